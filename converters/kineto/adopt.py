"""Give the events of a profiled window the record ids of a structure window.

The execution trace observer slows every operator tenfold, so times come from a window without
it. That window has no record ids; a training step repeats its operators in the same order, so
the two windows' host events pair up thread by thread. Where one step does a little more than the
other (it logs its loss, say), the rest still pairs up.
"""

from collections import defaultdict
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TypeVar

import msgspec

from onerank.converters.kineto.host import HostOp
from onerank.converters.kineto.load import HOST_CATEGORIES, Event, KinetoTrace

_Named = TypeVar("_Named", Event, HostOp)

LEAST_ALIKE = 0.95
"""Share of both windows' host events that must pair up."""

_LONGEST_COMPARED = 5000  # events that differ in the middle; comparing them is quadratic
_OBSERVER_EVENT = "## process_group:init ##"  # the observer's own, at its start


def adopt_record_ids(profile: KinetoTrace, structure: KinetoTrace) -> tuple[KinetoTrace, str]:
    """Return `profile` with the record ids of `structure`, and a sentence on what differs, or "".

    Where the windows are too unlike, return `structure` itself, all that is left to take times of.
    """
    ours, theirs = _by_thread(profile.events), _by_thread(structure.events)
    rf_ids: dict[int, int] = {}
    for mine, other in zip(ours, theirs, strict=False):
        for event, twin in pairs(mine, other):
            rf_ids[id(event)] = twin.args.rf_id
    count, other_count = sum(map(len, ours)), sum(map(len, theirs))
    if len(rf_ids) < LEAST_ALIKE * max(count, other_count):
        return structure, (
            f"of {count} host events of the profiled and {other_count} of the structure window "
            f"only {len(rf_ids)} pair up: its times are left out, and without another profiled "
            "step those of the structure window are taken, recorded under the execution trace "
            "observer"
        )
    events = [_with_record_id(event, rf_ids) for event in profile.events]
    difference = ""
    if len(rf_ids) < max(count, other_count):
        difference = (
            f"the profiled window has {count - len(rf_ids)} host events that the structure window "
            f"lacks, and lacks {other_count - len(rf_ids)} of its: the former have no shapes"
        )
    return KinetoTrace(events, profile.device_properties), difference


def _with_record_id(event: Event, rf_ids: dict[int, int]) -> Event:
    if id(event) not in rf_ids:
        return event
    args = msgspec.structs.replace(event.args, rf_id=rf_ids[id(event)])
    return msgspec.structs.replace(event, args=args)


def pairs(ours: list[_Named], theirs: list[_Named]) -> list[tuple[_Named, _Named]]:
    """Pair events of equal name in order: from the front, from the back, and in between."""
    names, other_names = [e.name for e in ours], [e.name for e in theirs]
    front, shorter = 0, min(len(names), len(other_names))
    while front < shorter and names[front] == other_names[front]:
        front += 1
    back = 0
    while back < shorter - front and names[-1 - back] == other_names[-1 - back]:
        back += 1
    found = list(zip(ours[:front], theirs[:front], strict=True))
    middle, other_middle = names[front : len(names) - back], other_names[front : len(theirs) - back]
    if max(len(middle), len(other_middle)) <= _LONGEST_COMPARED:
        for block in SequenceMatcher(
            None, middle, other_middle, autojunk=False
        ).get_matching_blocks():
            first, second = front + block.a, front + block.b
            found += zip(
                ours[first : first + block.size], theirs[second : second + block.size], strict=True
            )
    if back:
        found += zip(ours[-back:], theirs[-back:], strict=True)
    return found


def _by_thread(events: Iterable[Event]) -> list[list[Event]]:
    """Host events per thread in call order, the threads in the order of their first event."""
    threads: dict[int | str, list[Event]] = defaultdict(list)
    for event in events:
        if event.cat in HOST_CATEGORIES and event.name != _OBSERVER_EVENT:
            threads[event.tid].append(event)
    for members in threads.values():
        members.sort(key=lambda e: (e.start_ns, -e.end_ns, e.args.event_index))
    return sorted(threads.values(), key=lambda members: members[0].start_ns)
