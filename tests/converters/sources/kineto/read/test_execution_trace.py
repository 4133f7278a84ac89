"""Callers that an execution trace does not hold."""

from pathlib import Path

import numpy as np
import pytest
from raised import raises_code

from onerank.converters.sources.kineto.read.execution_trace import check_callers
from onerank.ir.errors import TraceError

FILE = Path("et.json")


def with_missing(nodes: int, missing: int) -> int:
    """Check a trace whose last `missing` nodes are called by as many missing nodes."""
    ids = np.arange(1, nodes + 1)
    caller = np.ones(nodes, dtype=np.int64)
    caller[nodes - missing :] = 10**6 + np.arange(missing)
    return check_callers(FILE, ids, caller)


@pytest.mark.parametrize(("nodes", "most"), [(9, 0), (100, 10), (500, 16), (2000, 40)])
def test_a_few_may_be_missing(nodes: int, most: int) -> None:
    """A tenth of a small file, sixteen of a larger one, a fiftieth of a large one."""
    assert with_missing(nodes, most) == most
    with raises_code("et-missing-caller", TraceError) as info:
        with_missing(nodes, most + 1)
    assert f"{most + 1} such callers" in str(info.value)


def test_many_may_be_called_by_one_that_never_ended() -> None:
    """A recomputation ends within an operator, and what follows counts as called by that."""
    caller = np.ones(1000, dtype=np.int64)
    caller[500:900] = 10**6
    assert check_callers(FILE, np.arange(1, 1001), caller) == 400
