"""Distinct combinations of integer columns: what is computed once, and who it is for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def combine(columns: Sequence[npt.NDArray[Any]]) -> tuple[I64, I64]:
    """Return (first, inverse) over the rows of equally long columns.

    Returns:
        first: a row of each distinct combination, int64[d].
        inverse: the combination of each row, int64[n], below d.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        key = np.unique(key * max(1, len(values)) + codes, return_inverse=True)[1]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
