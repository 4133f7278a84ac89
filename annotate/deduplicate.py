"""Deduplicate rows of integer columns, so that each combination is computed once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

# Least size of the table of combinations; it adds little to the time of a million rows.
_WIDE = 1 << 20


def deduplicate(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return (first, inverse) over the rows of equally long columns.

    Returns:
        first: the first row of each distinct combination, int64[d].
        inverse: the combination of each row, int64[n], below d.
    """
    rows = len(columns[0])
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    table = 4 * rows + _WIDE
    key, count = np.zeros(rows, dtype=np.int64), 1
    for column in columns:
        codes, distinct = _in_range(column, table)
        if count * distinct > table:
            # Ranks number only combinations that occur, so the next product stays near the table's
            # size.
            key, count = _rank(key, count)
        key, count = key * distinct + codes, count * distinct
        if count > table:
            key, count = _in_range(key, table)
    key, count = _rank(key, count)
    first = np.empty(count, dtype=np.int64)
    # The last to be written is the first row.
    first[key[::-1]] = np.arange(rows - 1, -1, -1)
    return first, key


def _in_range(values: npt.NDArray[Any], table: int) -> tuple[I64, int]:
    """Return (values shifted or ranked to start at 0 in the same order, exclusive upper bound).

    Values within a range of `table`, such as codes and ids, are shifted; others become ranks.
    """
    # A shift avoids the sort of `np.unique`.
    least, most = int(values.min()), int(values.max())
    if most - least < table:
        return values.astype(np.int64, copy=False) - least, most - least + 1
    distinct, ranks = np.unique(values, return_inverse=True)
    return ranks.astype(np.int64), len(distinct)


def _rank(values: I64, below: int) -> tuple[I64, int]:
    """Return (rank of each value among the distinct ones, number of distinct values)."""
    seen = np.zeros(below, dtype=bool)
    seen[values] = True
    distinct = np.flatnonzero(seen)
    rank = np.empty(below, dtype=np.int64)
    rank[distinct] = np.arange(len(distinct))
    return rank.take(values), len(distinct)
