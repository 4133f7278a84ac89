"""Spans of time that may overlap."""

import numpy as np

from onerank.ir.edges import I64


def covered_ns(start_ns: I64, end_ns: I64) -> int:
    """Return the time in which at least one of the spans lasts; int64[k] each."""
    order = np.argsort(start_ns, kind="stable")
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    before = np.concatenate([start[:1], reach[:-1]])
    return int(np.maximum(reach - np.maximum(before, start), 0).sum())
