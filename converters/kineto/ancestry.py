"""Check that the nodes of an execution trace form one tree of callers."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from onerank.ir.errors import TraceError

I64 = npt.NDArray[np.int64]


LARGEST_PART_CUT_OFF = 0.02
"""Share of the nodes that may be missing in the file, as callers of others."""
PLACEHOLDERS = "onerank::placeholders"
"""The nodes before and behind callers that stand for nobody, and are not in the file."""
FEW_CUT_OFF, PART_OF_FEW = 16, 0.1
"""In a small file so many may, up to this share: a thread was at work as the recording began."""


def without_placeholders(node: I64, caller: I64, marks: I64) -> I64:
    """Return callers with the root in the place of those that stand for nobody.

    Args:
        node: ids, int64[n].
        caller: id of each node's caller, int64[n].
        marks: ids of the nodes called PLACEHOLDERS: one before such callers and one behind, again
            and again, int64[m].
    """
    for first, last in marks[: len(marks) // 2 * 2].reshape(-1, 2):
        caller = np.where((first < caller) & (caller < last), node.min(), caller)
    return caller


def check_callers(path: Path, node: I64, caller: I64) -> int:
    """Check ids and callers; the root is its own caller. Return how many callers are missing.

    In real traces a few callers are missing: operators that began before the recording, and those
    that a checkpoint's recomputation ended within, by an exception. torch's observer never closes
    the latter, and takes what follows in their thread to be called by them, a whole backward at
    times. Nodes without their caller stand for themselves.

    Args:
        path: the file, to begin an error with.
        node: ids, in the file's order, int64[n].
        caller: id of each node's caller, int64[n].

    Raises:
        TraceError: an id is given twice, more than a few callers are not in the file, or nodes call
            each other.
    """
    order = np.argsort(node, kind="stable")
    ids = node[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise TraceError(
            f"{path}: nodes {first} and {second} both have id {ids[twice[0]]}; ids must be "
            "unique: record the trace again"
        )
    if not len(ids):
        return 0
    place = np.minimum(np.searchsorted(ids, caller), len(ids) - 1)
    absent = ids[place] != caller
    missing = np.flatnonzero(absent)
    count = len(ids)
    callers = len(np.unique(caller[missing]))
    if callers > max(LARGEST_PART_CUT_OFF * count, min(FEW_CUT_OFF, PART_OF_FEW * count)):
        raise TraceError(
            f"{path}: node {missing[0]} (id {node[missing[0]]}) is called by node "
            f"{caller[missing[0]]}, which is not in the file ({callers} such callers): the trace "
            "was cut, or its nodes changed"
        )
    above = np.where(absent, np.arange(len(ids)), order[place])
    climbed = above
    for _ in range(len(ids).bit_length()):  # twice as far each time
        climbed = climbed[climbed]
    circling = np.flatnonzero(above[climbed] != climbed)
    if len(circling):
        raise TraceError(
            f"{path}: node {circling[0]} (id {node[circling[0]]}) is called by itself, by way of "
            f"its callers ({len(circling)} such nodes): record the trace again"
        )
    return len(missing)
