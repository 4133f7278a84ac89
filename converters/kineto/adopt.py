"""Give the events of a profiled window the record ids of a structure window.

The execution trace observer slows every operator tenfold, so times come from a window without
it. That window has no record ids; a training step repeats its operators in the same order, so
the two windows' host events pair up one to one, thread by thread.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from onerank.converters.kineto.load import HOST_CATEGORIES, Event, KinetoTrace

_OBSERVER_EVENT = "## process_group:init ##"  # the observer's own, at its start


def adopt_record_ids(profile: KinetoTrace, structure: KinetoTrace) -> tuple[KinetoTrace, str]:
    """Return `profile` with the record ids of `structure`, and "".

    Where the windows differ, return `structure` itself and the sentence that says where.
    """
    ours, theirs = _by_thread(profile.events), _by_thread(structure.events)
    if len(ours) != len(theirs):
        return structure, (
            f"the profiled window has {len(ours)} host threads, the structure window "
            f"{len(theirs)}: times are those of the structure window, recorded under the "
            "execution trace observer"
        )
    rf_ids: dict[int, int] = {}
    for mine, other in zip(ours, theirs, strict=True):
        names, other_names = [e.name for e in mine], [e.name for e in other]
        if names != other_names:
            place = _first_difference(names, other_names)
            return structure, (
                f"the profiled and the structure window differ at host event {place}: times are "
                "those of the structure window, recorded under the execution trace observer"
            )
        rf_ids.update((id(event), twin.args.rf_id) for event, twin in zip(mine, other, strict=True))
    events = [
        msgspec.structs.replace(
            event, args=msgspec.structs.replace(event.args, rf_id=rf_ids[id(event)])
        )
        if id(event) in rf_ids
        else event
        for event in profile.events
    ]
    return KinetoTrace(events, profile.device_properties), ""


def _by_thread(events: Iterable[Event]) -> list[list[Event]]:
    """Host events per thread in call order, the threads in the order of their first event."""
    threads: dict[int | str, list[Event]] = defaultdict(list)
    for event in events:
        if event.cat in HOST_CATEGORIES and event.name != _OBSERVER_EVENT:
            threads[event.tid].append(event)
    for members in threads.values():
        members.sort(key=lambda e: (e.start_ns, -e.end_ns, e.args.event_index))
    return sorted(threads.values(), key=lambda members: members[0].start_ns)


def _first_difference(ours: list[str], theirs: list[str]) -> str:
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"{position} ({mine!r} against {other!r})"
    end = min(len(ours), len(theirs))
    return f"{end} (one window has {len(ours)} events, the other {len(theirs)})"
