"""Distinct combinations of integer columns: what is computed once, and who it is for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

_WIDE = 1 << 20  # a table of so many entries costs nothing beside a million rows


def combine(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return (first, inverse) over the rows of equally long columns.

    Returns:
        first: the first row of each distinct combination, int64[d].
        inverse: the combination of each row, int64[n], below d.
    """
    key, count = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        codes, distinct = _number(column)
        key, count = _number(key * max(1, distinct) + codes)
    first = np.empty(count if len(key) else 0, dtype=np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]  # the last to be written is the first row
    return first, key


def _number(values: npt.NDArray[Any]) -> tuple[I64, int]:
    """Return (values replaced by their rank among the distinct ones, how many those are).

    Values of a small range, as codes and ids are, need no sorting.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64), 0
    least, most = int(values.min()), int(values.max())
    if most - least < 4 * len(values) + _WIDE:
        place = values.astype(np.int64) - least
        seen = np.zeros(most - least + 1, dtype=bool)
        seen[place] = True
        rank = np.cumsum(seen, dtype=np.int64) - 1
        return rank[place], int(rank[-1]) + 1
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), len(distinct)
