"""Classes of equivalent ranks: one rank of each class runs in place of all.

Two ranks are in one class when they run the same step, and each of their slots meets a group (or a
sender-receiver pair) of the same class. Two groups are in one class when the classes of their
members, and the slots in which they meet, are the same. If all members of a class meet in the same
slots, ranks of a class that proceed together also wait together, for ranks of one class. So the
representatives run as all ranks would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.targets.astra_sim.check.comm_programs import End, Program
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
    """Whether members of a group meet in it in other slots than those of their sort."""
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
        """Return the sort of each segment: those are one whose rows are the same, in any order.

        Args:
            rows: int64[m, 2].
            before: sorts to be told apart further, int64[segments].
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
    """Number values as they come, equal ones alike."""
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
