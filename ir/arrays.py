"""Array types, and functions on columns: membership, distinct values and rows, merged intervals."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_Number = TypeVar("_Number", bound=np.generic)


def membership_mask(codes: U8, chosen: Iterable[int]) -> Mask:
    """Return which of `codes` (uint8[n]) are in `chosen`, bool[n]."""
    # A lookup table is six times faster than `np.isin` on uint8 codes.
    table = np.zeros(256, dtype=bool)
    table[np.fromiter(chosen, dtype=np.uint8)] = True
    return table.take(codes)


def unique_values(values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return the distinct values in ascending order, [k]; `values` is [n]."""
    # `np.unique` imports numpy.ma at its first call (numpy 2.4), which costs 46 million
    # instructions: a tenth of the import of numpy.
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def union_duration_ns(start_ns: I64, end_ns: I64) -> int:
    """Return the length of the union of the intervals; starts and ends are int64[k]."""
    # `reach` is the latest end so far, so an interval inside an earlier one adds nothing.
    order = np.argsort(start_ns, kind="stable")
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    before = np.concatenate([start[:1], reach[:-1]])
    return int(np.maximum(reach - np.maximum(before, start), 0).sum())


# Least size of the table of combinations; it adds little to the time of a million rows.
_MIN_TABLE = 1 << 20


def deduplicate(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return (first, inverse) over the rows of equally long columns.

    Returns:
        first: the first row of each distinct combination, int64[d].
        inverse: the combination of each row, int64[n], below d.
    """
    rows = len(columns[0])
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    table = 4 * rows + _MIN_TABLE
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
    # Rows are written in reverse, so the first row of each combination remains.
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
