"""Record ids: carry them from the structure window to a profiled window, by order where none exist.

Give host events execution trace nodes by the order of operators, where no record id joins them.

A thread's operators come in one order in both files, so the two sequences of names pair up. Which
thread of the one is which of the other, the names tell as well. Where one file has an event that
the other lacks, the pairing goes on behind it.

Give the events of a profiled window the record ids of a structure window.

The execution trace observer slows every operator tenfold, so times come from a window without
it. That window has no record ids; a training step repeats its operators in the same order, so
the two windows' host events pair up thread by thread. Where one step does a little more than the
other (it logs its loss, say), the rest still pairs up. Which of Gloo's threads carries a call out
is chance: these calls pair up by their order among those of a name, on whatever thread.
"""

from collections import Counter, defaultdict
from difflib import SequenceMatcher

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.read.trace_columns import I32, I64, ExecutionTrace, Mask

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


LEAST_ALIKE = 0.95
"""Share of both windows' host events that must pair up."""

_LONGEST_COMPARED = 5000  # events that differ in the middle; comparing them is quadratic

_OBSERVER_EVENT = "## process_group:init ##"  # the observer's own, at its start

Pairs = list[tuple[I64, I64]]
"""Runs of events that pair up: indices in one window, indices in the other."""


def copy_record_ids(profile: HostTimeline, structure: HostTimeline) -> tuple[I64 | None, str]:
    """Return the record ids of `profile`, by `structure`, and a sentence on what differs, or "".

    Where the windows are too unlike there are none: None. Both timelines share a string table.
    """
    # in the order of Gloo's queue
    runs = _runs(profile, profile.rows.start_ns)
    other_runs = _runs(structure, structure.rows.rf_id)
    sequences = list(
        zip(_by_thread(profile, runs), _by_thread(structure, other_runs), strict=False)
    )
    for name in runs.keys() & other_runs.keys():
        sequences += zip(runs[name], other_runs[name], strict=False)
    rf_id = profile.rows.rf_id.copy()
    paired = 0
    for mine, other in sequences:
        for own, twin in pairs(profile, mine, structure, other):
            rf_id[own] = structure.rows.rf_id[twin]
            paired += len(own)
    count, other_count = _counted(profile), _counted(structure)
    if paired < LEAST_ALIKE * max(count, other_count):
        return None, (
            f"of {count} host events of the profiled and {other_count} of the structure window "
            f"only {paired} pair up: its times are left out, and without another profiled "
            "step (`capture run --repeat` profiles several) those of the structure window are "
            "taken, recorded under the execution trace observer"
        )
    difference = ""
    if paired < max(count, other_count):
        difference = (
            f"the profiled window has {count - paired} host events that the structure window "
            f"lacks, and lacks {other_count - paired} of its: the former have no shapes"
        )
    return rf_id, difference


def leave_out_unknown_calls(profile: HostTimeline) -> str:
    """Take recorded calls that the structure window lacks for nothing; return a sentence, or "".

    A step that logs, say, reduces its loss; what a call is, the structure window alone tells.
    """
    unknown = profile.rows.rf_id == 0
    count = int((profile.is_mark & unknown).sum())
    profile.is_mark &= ~unknown
    profile.is_wait &= ~unknown
    if not count:
        return ""
    some = "1 communication call" if count == 1 else f"{count} communication calls"
    return (
        f"the profiled step has {some} that the structure step lacks (does the script log in some "
        "steps?): what they are is not known, and they are left out"
    )


def pairs(first: HostTimeline, ours: I64, second: HostTimeline, theirs: I64) -> Pairs:
    """Pair events of equal name in order: from the front, from the back, and in between."""
    return pairs_of_names(first.rows.name[ours], ours, second.rows.name[theirs], theirs)


def pairs_of_names(names: I32, ours: I64, other_names: I32, theirs: I64) -> Pairs:
    """Pair the members of two sequences whose names are equal, as `pairs`."""
    shorter = min(len(names), len(other_names))
    front = _equal(names[:shorter], other_names[:shorter])
    rest = shorter - front
    back = _equal(names[::-1][:rest], other_names[::-1][:rest])
    found: Pairs = [(ours[:front], theirs[:front])]
    middle = names[front : len(names) - back].tolist()
    other_middle = other_names[front : len(other_names) - back].tolist()
    if middle and other_middle and max(len(middle), len(other_middle)) <= _LONGEST_COMPARED:
        matcher = SequenceMatcher(None, middle, other_middle, autojunk=False)
        for block in matcher.get_matching_blocks():
            begin, other_begin = front + block.a, front + block.b
            found.append(
                (ours[begin : begin + block.size], theirs[other_begin : other_begin + block.size])
            )
    if back:
        found.append((ours[-back:], theirs[-back:]))
    return found


def _equal(names: I32, other_names: I32) -> int:
    """Return how many are equal from the front on."""
    unlike = np.flatnonzero(names != other_names)
    return int(unlike[0]) if len(unlike) else len(names)


_Runs = dict[int, list[I64]]


def _runs(timeline: HostTimeline, order: I64) -> _Runs:
    """Return what threads of Gloo's own did: by name, the calls, each with the events within it.

    Args:
        timeline: the host events.
        order: what the calls of a name are sorted by, int64[n].
    """
    rows, found = timeline.rows, defaultdict[int, list[I64]](list)
    for span in timeline.threads.values():
        own = np.arange(span.start, span.stop)
        first = np.flatnonzero(timeline.is_run[own])
        if not len(first) or first[0]:
            continue
        last = own[first[np.searchsorted(first, np.arange(len(own)), side="right") - 1]]
        if (rows.start_ns[own] > rows.end_ns[last]).any():
            continue  # of somebody who does more
        for members in np.split(own, first[1:]):
            found[int(rows.name[members[0]])].append(members)
    for calls in found.values():
        calls.sort(key=lambda members: int(order[members[0]]))
    return found


def _by_thread(timeline: HostTimeline, runs: _Runs) -> list[I64]:
    """Other host events per thread in call order, the threads in the order of their first event."""
    own = _is_counted(timeline)
    for calls in runs.values():
        own[np.concatenate(calls)] = False
    found = [np.arange(span.start, span.stop)[own[span.start : span.stop]]
             for span in timeline.threads.values()]  # fmt: skip
    return sorted(
        (members for members in found if len(members)),
        key=lambda members: int(timeline.rows.start_ns[members[0]]),
    )


def _is_counted(timeline: HostTimeline) -> Mask:
    return ~timeline.named(_OBSERVER_EVENT.__eq__)


def _counted(timeline: HostTimeline) -> int:
    return int(_is_counted(timeline).sum())
