"""Give host events execution trace nodes by the order of operators, where no record id joins them.

A thread's operators come in one order in both files, so the two sequences of names pair up. Which
thread of the one is which of the other, the names tell as well. Where one file has an event that
the other lacks, the pairing goes on behind it.
"""

from collections import Counter

import numpy as np

from onerank.converters.kineto.columns import I64, ExecutionTrace
from onerank.converters.kineto.host import NONE, HostTimeline

LEAST_FITTING = 0.95
"""Share of the trace's operators that must find a node of their name."""

_REACH = 64  # events that one file may have more than the other, in a row
_AGREE = 4  # names in a row that must be equal again behind these


def align(timeline: HostTimeline, et: ExecutionTrace) -> tuple[I64, float]:
    """Return each host event's row in the execution trace (or NONE), and the share that fitted.

    The share is that of the operators.
    """
    rows = np.full(len(timeline), NONE)
    threads = {
        int(tid): np.flatnonzero(et.tid == tid)[np.argsort(et.id[et.tid == tid], kind="stable")]
        for tid in np.unique(et.tid)
    }
    names: dict[int, Counter[int]] = {
        tid: Counter(et.name[own].tolist()) for tid, own in threads.items()
    }
    spans = sorted(timeline.threads.values(), key=len, reverse=True)
    for span in spans:
        mine = timeline.rows.name[span.start : span.stop]
        counted: Counter[int] = Counter(mine.tolist())
        shared = {tid: (counted & own).total() for tid, own in names.items()}
        tid = max(shared, key=shared.__getitem__, default=None)
        if tid is None or not shared[tid]:
            continue
        theirs = threads.pop(tid)
        del names[tid]
        places, others = _follow(mine.tolist(), et.name[theirs].tolist())
        rows[np.array(places, dtype=np.int64) + span.start] = theirs[others]
    operators = timeline.rows.is_operator
    fitted = int((operators & (rows != NONE)).sum())
    return rows, fitted / max(int(operators.sum()), 1)


def _follow(names: list[int], others: list[int]) -> tuple[list[int], list[int]]:
    """Return places of equal names in both sequences, in order."""
    places: list[int] = []
    twins: list[int] = []
    at, other = 0, 0
    while at < len(names) and other < len(others):
        if names[at] == others[other]:
            places.append(at)
            twins.append(other)
            at += 1
            other += 1
            continue
        skipped = _resume(names[at : at + _REACH + _AGREE], others[other : other + _REACH + _AGREE])
        at += skipped[0]
        other += skipped[1]
    return places, twins


def _resume(names: list[int], others: list[int]) -> tuple[int, int]:
    """Return how much of each sequence to leave out until they agree again; 1 and 1 if never."""
    for total in range(1, _REACH):
        for mine in range(total + 1):
            here, there = names[mine : mine + _AGREE], others[total - mine : total - mine + _AGREE]
            if here and here == there:
                return mine, total - mine
    return 1, 1
