"""Distinct rows are numbered in their order, whatever range the columns have."""

import numpy as np
import pytest

from onerank.ir.arrays import deduplicate


@pytest.mark.parametrize("ends", [(0, 3), (-2, 40_000), (0, 2**62)])
def test_rows_are_numbered_as_sorting_numbers_them(ends: tuple[int, int]):
    rng = np.random.default_rng(0)
    values = rng.integers(*ends, size=60)
    columns = [values[rng.integers(0, 60, 5000)] for _ in range(6)]
    first, inverse = deduplicate(columns)
    rows = np.stack(columns, axis=1)
    _, firsts, numbers = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    assert first.tolist() == firsts.tolist()
    assert inverse.tolist() == numbers.ravel().tolist()


def test_no_rows():
    first, inverse = deduplicate([np.zeros(0, dtype=np.int32), np.zeros(0)])
    assert len(first) == len(inverse) == 0
