"""Callers that an execution trace does not hold, and attributes of its nodes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raised import raises_code

from onerank.converters.sources.kineto.read.execution_trace import (
    check_callers,
    load_execution_trace,
)
from onerank.ir import StringTable
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


def attribute(name: str, value: Any, kind: str = "uint64") -> dict[str, Any]:
    return {"name": name, "type": kind, "value": value}


RF_ID, TID = attribute("rf_id", 7), attribute("tid", 3)
BETWEEN = [attribute("fw_parent", 0), attribute("seq_id", -1, "int64"), attribute("scope", 0)]
TEXT = attribute("op_schema", 'a}, {"name": "tid", "type": "uint64", "value": 9}', "string")


def trace_with(attributes: Any, path: Path, separators: tuple[str, str] | None = None) -> Path:
    """Write a trace of one node with these attributes."""
    empty: dict[str, list[Any]] = {"values": [], "shapes": [], "types": []}
    node = {"id": 1, "name": "aten::mm", "ctrl_deps": 1, "inputs": empty, "outputs": empty}
    trace = {"schema": "1.1.1-chakra.0.0.4", "nodes": [{**node, "attrs": attributes}]}
    path.write_text(json.dumps(trace, separators=separators))
    return path


@pytest.mark.parametrize(
    ("attributes", "rf_id", "tid"),
    [
        ([RF_ID, *BETWEEN, TID, TEXT], 7, 3),
        ([RF_ID, *BETWEEN, TID, attribute("tid", 9)], 7, 3),  # the first of a name
        ([RF_ID, *BETWEEN, TEXT], 7, 0),
        ([RF_ID, *BETWEEN[1:], TEXT, TID], 7, 3),
        ([RF_ID, TID, *BETWEEN], 7, 3),
        ([TEXT, *BETWEEN, TID, RF_ID], 7, 3),
        ([attribute("rf_id", 7, "int64"), *BETWEEN, attribute("tid", -3, "int64")], 7, 0),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), None])
def test_attributes_are_read_in_any_order(attributes, rf_id, tid, separators, tmp_path) -> None:
    path = trace_with(attributes, tmp_path / "et.json", separators)
    trace = load_execution_trace(path, StringTable())
    assert (trace.rf_id.tolist(), trace.tid.tolist()) == ([rf_id], [tid])


def test_a_node_without_a_record_id_is_left_out(tmp_path: Path) -> None:
    path = trace_with([attribute("rf_id", 0), *BETWEEN, TID], tmp_path / "et.json")
    assert len(load_execution_trace(path, StringTable()).id) == 0


@pytest.mark.parametrize("attributes", [7, [7], [{"name": "rf_id"}], [{"name": 7, "value": 1}]])
def test_attributes_of_another_type_are_refused(attributes: Any, tmp_path: Path) -> None:
    path = trace_with(attributes, tmp_path / "et.json")
    with raises_code("trace-malformed", TraceError, naming=str(path)):
        load_execution_trace(path, StringTable())
