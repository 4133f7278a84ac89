"""Rows that are alike in some columns, found so that each distinct one is looked at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.edges import I64

_ODD = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def alike(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return a row of each distinct combination of values, and which of these each row has.

    Args:
        columns: integers, each [n].

    Returns:
        int64[distinct], and int64[n] of places in it.
    """
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed *= _ODD
        mixed ^= mixed >> _SHIFT
        mixed ^= column.astype(np.int64).view(np.uint64)
    order = np.argsort(mixed, kind="stable")  # faster where many are equal
    by_value = mixed[order]
    begins = np.ones(len(mixed), dtype=bool)
    np.not_equal(by_value[1:], by_value[:-1], out=begins[1:])
    first = order[begins]
    number = np.empty(len(mixed), dtype=np.int64)
    number[order] = np.cumsum(begins) - 1
    same_as = first[number]
    if all(np.array_equal(column, column[same_as]) for column in columns):
        return first, number
    everyone = np.arange(len(mixed))  # two combinations were mixed into one number
    return everyone, everyone
