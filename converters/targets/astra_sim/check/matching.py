"""Match the communication of ranks: equal ranks, the collectives of a group, sends and receives.

Equivalent ranks form a class, and one representative runs for the whole class. Two ranks are in one
class if they run the same step and each of their communication slots uses a group (or a
sender-receiver pair) of the same class. Two groups are in one class if the classes of their
members, and the slots in which they meet, are the same. If all members of a class meet in the same
slots, they proceed and wait together, so the representatives run as all ranks would.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    Call,
    Channel,
    End,
    NodeType,
    Program,
    channel_of,
    group_text,
)
from onerank.converters.targets.astra_sim.check.deadlocks import Run, report_stalls
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.ir.edges import I64

_MOST_TURNS = 64

"""Most refinements; each is a pass over all ranks. Beyond it, ranks count as different."""

_WORTH = 4

"""Least ranks per class for which finding the classes pays off."""


@dataclass(frozen=True, slots=True)
class RankClasses:
    """One rank of each class, as programs that communicate with each other.

    Attributes:
        programs: program of the first rank of each class; a group's name is the class of the
            group, and both ends of a message are the number of the class of their pair.
        members: class of each group -> the classes of its members.
    """

    programs: list[Program]
    members: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Meetings:
    """Who meets where, each row a rank that is in a group or a pair.

    Attributes:
        rank: int64[m].
        place: number of the group or pair, int64[m].
        slots: number of the set of slots in which the rank meets there, -1 where it is a member
            and never does, int64[m].
        places: number of each group and pair.
    """

    rank: I64
    place: I64
    slots: I64
    places: dict[End, int]


def sorts_of(
    programs: Sequence[Program], members: dict[str, tuple[int, ...]]
) -> RankClasses | None:
    """Return one rank of each class; None if too few ranks are equivalent.

    Args:
        programs: the ranks' programs.
        members: ranks of each group.
    """
    meetings = _meetings(programs, members)
    by_place = _Segments(meetings.place, len(meetings.places))
    by_rank = _Segments(meetings.rank, len(programs))
    of_rank = _numbered([id(program.course) for program in programs])
    count = 0
    for _ in range(_MOST_TURNS):
        of_place = by_place.sorts(np.stack([of_rank[meetings.rank], meetings.slots], axis=1))
        seen = np.stack([meetings.slots, of_place[meetings.place]], axis=1)
        of_rank = by_rank.sorts(seen, of_rank)
        before, count = count, int(of_rank.max(initial=-1)) + 1
        if count * _WORTH > len(programs):
            return None
        if count == before:
            if _cross(meetings, of_rank):
                return None
            return _one_of_each(programs, meetings, of_rank, of_place)
    return None


def _cross(meetings: _Meetings, of_rank: I64) -> bool:
    """Whether members of a group meet in other slots than members of its class."""
    is_group = np.array([isinstance(end, str) for end in meetings.places], dtype=bool)
    here = is_group[meetings.place]
    rows = np.stack([meetings.place, of_rank[meetings.rank], meetings.slots], axis=1)[here]
    return len(np.unique(rows, axis=0)) > len(np.unique(rows[:, :2], axis=0))


class _Segments:
    """Rows that belong together, by the number of what they belong to."""

    def __init__(self, number: I64, count: int) -> None:
        self._number = number
        counts = np.bincount(number, minlength=count)
        last = np.cumsum(counts)
        self._spans = list(zip((last - counts).tolist(), last.tolist(), strict=True))

    def sorts(self, rows: I64, before: I64 | None = None) -> I64:
        """Return the class of each segment; segments with the same rows form a class.

        Args:
            rows: int64[m, 2].
            before: classes to refine, int64[segments].
        """
        order = np.lexsort((rows[:, 1], rows[:, 0], self._number))
        octets = np.ascontiguousarray(rows[order]).tobytes()
        size = rows.itemsize * 2
        cut = [octets[first * size : last * size] for first, last in self._spans]
        if before is None:
            return _numbered(cut)
        return _numbered(list(zip(before.tolist(), cut, strict=True)))


def _meetings(programs: Sequence[Program], members: dict[str, tuple[int, ...]]) -> _Meetings:
    ranks: list[int] = []
    places: dict[End, int] = {}
    number: list[int] = []
    sets: dict[tuple[int, ...], int] = {}
    slots: list[int] = []
    for rank, program in enumerate(programs):
        meets: dict[End, tuple[int, ...]] = {}
        for slot, end in enumerate(program.ends):
            meets[end] = (*meets.get(end, ()), slot)
        for end, those in meets.items():
            ranks.append(rank)
            number.append(places.setdefault(end, len(places)))
            slots.append(sets.setdefault(those, len(sets)))
    met = set(zip(number, ranks, strict=True))
    for end, place in places.items():
        for rank in members[end] if isinstance(end, str) else ():
            if (place, rank) not in met:
                ranks.append(rank)
                number.append(place)
                slots.append(-1)
    return _Meetings(
        np.array(ranks, dtype=np.int64),
        np.array(number, dtype=np.int64),
        np.array(slots, dtype=np.int64),
        places,
    )


def _numbered(values: Sequence[object]) -> I64:
    """Number values by first appearance; equal values get the same number."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _one_of_each(
    programs: Sequence[Program], meetings: _Meetings, of_rank: I64, of_place: I64
) -> RankClasses:
    sorts = {end: int(of_place[place]) for end, place in meetings.places.items()}
    made: list[Program] = []
    firsts: list[int] = np.unique(of_rank, return_index=True)[1].tolist()
    for given in (programs[rank] for rank in firsts):
        ends: list[End] = [
            str(sorts[end]) if isinstance(end, str) else (sorts[end], sorts[end])
            for end in given.ends
        ]
        made.append(Program(given.file, given.course, ends))
    pairs = np.unique(np.stack([of_place[meetings.place], of_rank[meetings.rank]], axis=1), axis=0)
    members: dict[str, list[int]] = {}
    for place, sort in pairs.tolist():
        members.setdefault(str(place), []).append(sort)
    return RankClasses(made, {name: tuple(those) for name, those in members.items()})


FEW = 64

"""Ranks that are all run."""


def check_matching(
    programs: Sequence[Program], groups: dict[str, tuple[int, ...]], report: Report
) -> None:
    """Check the ranks of one workload, `programs[rank]`, against each other.

    One rank of each class runs. If that finds a fault, all ranks run, to name it.
    """
    members = {**groups, WORLD: tuple(range(len(programs)))}
    if len(programs) > FEW:
        sorts = sorts_of(programs, members)
        if sorts is not None and _is_sound(sorts):
            return
    issued = [program.issued() for program in programs]
    _check_sequences(programs, issued, members, report)
    run = Run(programs, members)
    run.finish()
    _check_messages(programs, issued, report)
    report_stalls(run, report)


def _is_sound(sorts: RankClasses) -> bool:
    """Whether one rank of each class finishes without unmatched communication."""
    report = Report()
    issued = [program.issued() for program in sorts.programs]
    _check_sequences(sorts.programs, issued, sorts.members, report)
    if len(report) or any(_unmatched(issued)):
        return False
    run = Run(sorts.programs, sorts.members)
    run.finish()
    return not any(state.left for state in run.states)


def _check_sequences(
    programs: Sequence[Program],
    issued: list[list[Call]],
    members: dict[str, tuple[int, ...]],
    report: Report,
) -> None:
    sequences: dict[str, dict[int, list[Call]]] = defaultdict(dict)
    for rank, calls in enumerate(issued):
        for call in calls:
            if call.type == NodeType.COLL:
                sequences[call.group].setdefault(rank, []).append(call)
    for group, by_rank in sequences.items():
        shapes = {
            rank: tuple((call.collective, call.size) for call in by_rank.get(rank, []))
            for rank in members[group]
        }
        usual = Counter(shapes.values()).most_common(1)[0][0]
        model = next(rank for rank, shape in shapes.items() if shape == usual)
        for rank, shape in shapes.items():
            if shape == usual:
                continue
            mine, other = by_rank.get(rank, []), by_rank.get(model, [])
            place = _unlike(mine, other)
            here = str(mine[place]) if place < len(mine) else "none"
            there = str(other[place]) if place < len(other) else "none"
            report.add(
                "collective-sequence",
                programs[rank].file,
                mine[place].node if place < len(mine) else None,
                f"collective {place + 1} of {group_text(group)}: rank {rank} issues {here}, rank "
                f"{model} issues {there}; all members must issue one sequence of types and sizes",
            )


def _unlike(mine: list[Call], other: list[Call]) -> int:
    """Return the first place at which two sequences differ in type or size."""
    for place, (left, right) in enumerate(zip(mine, other, strict=False)):
        if (left.collective, left.size) != (right.collective, right.size):
            return place
    return min(len(mine), len(other))


def _unmatched(issued: list[list[Call]]) -> "tuple[_Lonely, _Lonely]":
    """Return sends, and receives, that have no counterpart, whenever they would be issued."""
    sends: dict[Channel, list[Call]] = defaultdict(list)
    receives: dict[Channel, list[Call]] = defaultdict(list)
    for calls in issued:
        for call in calls:
            if call.type == NodeType.SEND:
                sends[channel_of(call)].append(call)
            elif call.type == NodeType.RECV:
                receives[channel_of(call)].append(call)
    return _surplus(sends, receives), _surplus(receives, sends)


def _check_messages(programs: Sequence[Program], issued: list[list[Call]], report: Report) -> None:
    """Report sends and receives that have no counterpart."""
    lonely_sends, lonely_receives = _unmatched(issued)
    for rule, lonely, others, what in (
        ("unmatched-recv", lonely_receives, lonely_sends, "receive waits for ever"),
        ("unmatched-send", lonely_sends, lonely_receives, "send is never received"),
    ):
        for (source, target, _, _), calls in lonely.items():
            rank = target if rule == "unmatched-recv" else source
            near = others.get_near(source, target)
            hint = f"closest is {near} of rank {rank ^ source ^ target}; " if near else ""
            times = f" ({len(calls)} times)" if len(calls) > 1 else ""
            report.add(
                rule,
                programs[rank].file,
                calls[0].node,
                f"{calls[0]}: this {what}{times}; {hint}"
                "source, target, tag and bytes of both must be equal",
            )


class _Lonely(dict[Channel, list[Call]]):
    """Calls without a counterpart, by channel."""

    def get_near(self, source: int, target: int) -> Call | None:
        """Return one between the same ranks."""
        found = (calls for key, calls in self.items() if key[:2] == (source, target))
        return next(found, [None])[0]


def _surplus(mine: dict[Channel, list[Call]], theirs: dict[Channel, list[Call]]) -> _Lonely:
    lonely = _Lonely()
    for channel, calls in mine.items():
        rest = calls[len(theirs.get(channel, ())) :]
        if rest:
            lonely[channel] = rest
    return lonely
