"""Give the events of a profiled window the record ids of a structure window.

The execution trace observer slows every operator tenfold, so times come from a window without
it. That window has no record ids; a training step repeats its operators in the same order, so
the two windows' host events pair up thread by thread. Where one step does a little more than the
other (it logs its loss, say), the rest still pairs up. Which of Gloo's threads carries a call out
is chance: these calls pair up by their order among those of a name, on whatever thread.
"""

from collections import defaultdict
from difflib import SequenceMatcher

import numpy as np

from onerank.converters.kineto.columns import I32, I64, Mask
from onerank.converters.kineto.host import HostTimeline

LEAST_ALIKE = 0.95
"""Share of both windows' host events that must pair up."""

_LONGEST_COMPARED = 5000  # events that differ in the middle; comparing them is quadratic
_OBSERVER_EVENT = "## process_group:init ##"  # the observer's own, at its start

Pairs = list[tuple[I64, I64]]
"""Runs of events that pair up: indices in one window, indices in the other."""


def adopt_record_ids(profile: HostTimeline, structure: HostTimeline) -> tuple[I64 | None, str]:
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
