"""Match the communication of ranks: the order of collectives, their members, sends and receives.

ASTRA-sim matches the collectives of a group by the order in which each rank issues them, and a rank
runs one collective at a time. Where no dependency orders two of them, a late message or a slower
kernel may swap them on only one rank. Both ranks then wait for each other, and ASTRA-sim exits
with status 0. The two may be of one group, or of two groups that share another rank.

Equivalent ranks form a class, and one representative runs for the whole class. Two ranks are in one
class if they run the same step and each of their communication slots uses a group (or a
sender-receiver pair) of the same class. Two groups are in one class if the classes of their
members, and the slots in which they meet, are the same. If all members of a class meet in the same
slots, they proceed and wait together, so the representatives run as all ranks would.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    Channel,
    CommNode,
    CommProgram,
    End,
    NodeType,
    Program,
    channel_of,
    group_text,
)
from onerank.converters.targets.astra_sim.check.deadlocks import CommRun, report_stalls
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.ir.arrays import I64


def check_order(
    programs: Sequence[Program], members: Mapping[str, frozenset[int]], report: Report
) -> None:
    """Report the first two unordered collectives of each group and pair of groups, once per step.

    Args:
        programs: the ranks' programs.
        members: ranks of each group.
        report: receives the findings.
    """
    unordered: dict[tuple[int, tuple[int, ...]], list[_Pair]] = {}
    reported: set[tuple[int, tuple[int, ...], _Pair]] = set()
    shared = _SharedRanks(members)
    for program in programs:
        lanes_by_group: dict[str, int] = {}
        lanes = tuple(
            lanes_by_group.setdefault(end, len(lanes_by_group)) if isinstance(end, str) else -1
            for end in program.ends
        )
        # Equal ranks share one CommProgram and number their groups in the same order, so the search
        # runs once for all of them.
        key = id(program.comm), lanes
        if lanes_by_group and key not in unordered:
            unordered[key] = _unordered(program.comm, lanes, len(lanes_by_group))
        groups = [*lanes_by_group]
        for pair in unordered.get(key, ()):
            first_group, second_group = groups[pair.lanes[0]], groups[pair.lanes[1]]
            if (*key, pair) not in reported and shared.between(first_group, second_group):
                reported.add((*key, pair))
                _report(program.file, pair, first_group, second_group, report)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two collectives without an order.

    Attributes:
        nodes: their ids, ascending.
        lanes: the numbers of their groups on the rank.
    """

    nodes: tuple[int, int]
    lanes: tuple[int, int]


class _SharedRanks:
    """Which pairs of groups share two ranks or more.

    Args:
        members: ranks of each group; the default group is not among them.
    """

    def __init__(self, members: Mapping[str, frozenset[int]]) -> None:
        self._members = members
        self._known: dict[tuple[str, str], bool] = {}

    def between(self, first: str, second: str) -> bool:
        """Return whether two groups of a rank share another rank; the default group has all."""
        if first == second or WORLD in (first, second):
            return True
        key = (first, second)
        if key not in self._known:
            few, many = sorted((self._members[first], self._members[second]), key=len)
            # The rank itself is in both.
            self._known[key] = sum(rank in many for rank in few) > 1
        return self._known[key]


def _unordered(comm: CommProgram, lanes: tuple[int, ...], groups: int) -> list[_Pair]:
    """Return the first unordered collectives of each lane and pair of lanes.

    Follows, for each lane, the latest of its collectives that each node waits for. In an order that
    respects all dependencies it suffices to compare neighbours: the collectives are ordered if each
    waits for the one before it.

    Args:
        comm: a step's communication.
        lanes: number of the group of each slot, -1 for a message.
        groups: number of groups.
    """
    dag = comm.dag
    awaited = np.full((len(dag.ids), groups), -1, dtype=np.int64)
    latest = np.full(groups, -1, dtype=np.int64)
    issued: list[int] = []
    pairs: dict[tuple[int, int], _Pair] = {}
    for node in comm.order:
        call, slot = comm.calls[node], comm.slots[node]
        if call is not None and slot is not None and call.type == NodeType.COLL:
            lane = lanes[slot]
            others: list[int] = np.flatnonzero(awaited[node] != latest).tolist()
            for other in others:
                before = issued[int(latest[other])]
                ends = sorted(((dag.ids[before], other), (dag.ids[node], lane)))
                pair = _Pair((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]))
                pairs.setdefault((min(lane, other), max(lane, other)), pair)
            awaited[node, lane] = latest[lane] = len(issued)
            issued.append(node)
        followers = dag.followers_of(node)
        if followers:
            awaited[followers] = np.maximum(awaited[followers], awaited[node])
    return [*pairs.values()]


def _report(file: str, pair: _Pair, first_group: str, second_group: str, report: Report) -> None:
    first, second = pair.nodes
    if first_group == second_group:
        groups = f"of {group_text(first_group)}"
    else:
        groups = f"of {group_text(first_group)} and {group_text(second_group)}, which share ranks,"
    report.add(
        "unordered-collectives",
        file,
        second,
        f"nodes {first} and {second} are collectives {groups} and neither waits for the other: "
        "arrival times decide which starts first, and ranks that start different ones stall: add "
        "a dependency between them",
        cause=tuple(sorted((first_group, second_group))),
    )


# Passes over all ranks after which every rank runs.
_MAX_REFINEMENTS = 64

# Mean ranks per class from which running representatives is cheaper than running all ranks.
_MIN_RANKS_PER_CLASS = 4


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
class _Memberships:
    """Membership of ranks in groups and sender-receiver pairs, one row per rank and place.

    Attributes:
        rank: int64[m].
        place: number of the group or pair, int64[m].
        slots: number of the set of slots in which the rank communicates there, -1 for a member
            that never does, int64[m].
        places: number of each group and pair.
    """

    rank: I64
    place: I64
    slots: I64
    places: dict[End, int]


def rank_classes(
    programs: Sequence[Program], members: dict[str, tuple[int, ...]]
) -> RankClasses | None:
    """Return one rank of each class; None if too few ranks are equivalent.

    Args:
        programs: the ranks' programs.
        members: ranks of each group.
    """
    memberships = _memberships(programs, members)
    by_place = _Segments(memberships.place, len(memberships.places))
    by_rank = _Segments(memberships.rank, len(programs))
    of_rank = _numbered([id(program.comm) for program in programs])
    count = 0
    # Partition refinement: classes of ranks split classes of groups, and the other way round, until
    # a pass splits none.
    for _ in range(_MAX_REFINEMENTS):
        of_place = by_place.classes(
            np.stack([of_rank[memberships.rank], memberships.slots], axis=1)
        )
        seen = np.stack([memberships.slots, of_place[memberships.place]], axis=1)
        of_rank = by_rank.classes(seen, of_rank)
        before, count = count, int(of_rank.max(initial=-1)) + 1
        if count * _MIN_RANKS_PER_CLASS > len(programs):
            return None
        # Refinement only splits classes, so an equal number means equal classes.
        if count == before:
            if _cross(memberships, of_rank):
                return None
            return _representatives(programs, memberships, of_rank, of_place)
    return None


def _cross(memberships: _Memberships, of_rank: I64) -> bool:
    """Return whether members of a group meet in other slots than members of its class."""
    is_group = np.array([isinstance(end, str) for end in memberships.places], dtype=bool)
    in_group = is_group[memberships.place]
    rows = np.stack([memberships.place, of_rank[memberships.rank], memberships.slots], axis=1)[
        in_group
    ]
    return len(np.unique(rows, axis=0)) > len(np.unique(rows[:, :2], axis=0))


class _Segments:
    """Rows grouped by a number in each of them."""

    def __init__(self, number: I64, count: int) -> None:
        self._number = number
        counts = np.bincount(number, minlength=count)
        last = np.cumsum(counts)
        self._spans = list(zip((last - counts).tolist(), last.tolist(), strict=True))

    def classes(self, rows: I64, before: I64 | None = None) -> I64:
        """Return the class of each segment; segments with the same rows form a class.

        Args:
            rows: int64[m, 2].
            before: classes to refine, int64[segments].
        """
        order = np.lexsort((rows[:, 1], rows[:, 0], self._number))
        row_bytes = np.ascontiguousarray(rows[order]).tobytes()
        # As bytes, which compare and hash faster than rows of an array.
        size = rows.itemsize * 2
        segments = [row_bytes[first * size : last * size] for first, last in self._spans]
        if before is None:
            return _numbered(segments)
        return _numbered(list(zip(before.tolist(), segments, strict=True)))


def _memberships(programs: Sequence[Program], members: dict[str, tuple[int, ...]]) -> _Memberships:
    ranks: list[int] = []
    places: dict[End, int] = {}
    number: list[int] = []
    sets: dict[tuple[int, ...], int] = {}
    slots: list[int] = []
    for rank, program in enumerate(programs):
        slots_of_end: dict[End, tuple[int, ...]] = {}
        for slot, end in enumerate(program.ends):
            slots_of_end[end] = (*slots_of_end.get(end, ()), slot)
        for end, shared_slots in slots_of_end.items():
            ranks.append(rank)
            number.append(places.setdefault(end, len(places)))
            slots.append(sets.setdefault(shared_slots, len(sets)))
    # A member that never communicates in its group would stall the others, so it gets a row too.
    met = set(zip(number, ranks, strict=True))
    for end, place in places.items():
        for rank in members[end] if isinstance(end, str) else ():
            if (place, rank) not in met:
                ranks.append(rank)
                number.append(place)
                slots.append(-1)
    return _Memberships(
        np.array(ranks, dtype=np.int64),
        np.array(number, dtype=np.int64),
        np.array(slots, dtype=np.int64),
        places,
    )


def _numbered(values: Sequence[object]) -> I64:
    """Number values by first appearance; equal values get the same number."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _representatives(
    programs: Sequence[Program], memberships: _Memberships, of_rank: I64, of_place: I64
) -> RankClasses:
    class_of = {end: int(of_place[place]) for end, place in memberships.places.items()}
    representatives: list[Program] = []
    firsts: list[int] = np.unique(of_rank, return_index=True)[1].tolist()
    for program in (programs[rank] for rank in firsts):
        ends: list[End] = [
            str(class_of[end]) if isinstance(end, str) else (class_of[end], class_of[end])
            for end in program.ends
        ]
        representatives.append(Program(program.file, program.comm, ends))
    pairs = np.unique(
        np.stack([of_place[memberships.place], of_rank[memberships.rank]], axis=1), axis=0
    )
    members: dict[str, list[int]] = {}
    for place, rank_class in pairs.tolist():
        members.setdefault(str(place), []).append(rank_class)
    return RankClasses(representatives, {name: tuple(classes) for name, classes in members.items()})


FEW = 64
"""Ranks up to which all of them run, since that takes less time than comparing them."""


def check_matching(
    programs: Sequence[Program], groups: dict[str, tuple[int, ...]], report: Report
) -> None:
    """Check the communication of all ranks, `programs[rank]`, against each other.

    One rank of each class runs. If that shows a fault, all ranks run, so that the findings name the
    ranks.
    """
    # 1,024 ranks of 871 nodes took 25 s of CPU with all files parsed and all ranks run, and 0.7 s
    # with one file of each step and one rank of each class.
    members = {**groups, WORLD: tuple(range(len(programs)))}
    if len(programs) > FEW:
        classes = rank_classes(programs, members)
        if classes is not None and _is_sound(classes):
            return
    issued = [program.issued() for program in programs]
    _check_sequences(programs, issued, members, report)
    run = CommRun(programs, members)
    run.finish()
    _check_messages(programs, issued, report)
    report_stalls(run, report)


def _is_sound(classes: RankClasses) -> bool:
    """Return whether one rank of each class finishes without unmatched communication."""
    report = Report()
    issued = [program.issued() for program in classes.programs]
    _check_sequences(classes.programs, issued, classes.members, report)
    if len(report) or any(_unmatched(issued)):
        return False
    run = CommRun(classes.programs, classes.members)
    run.finish()
    return not any(state.left for state in run.states)


def _check_sequences(
    programs: Sequence[Program],
    issued: list[list[CommNode]],
    members: dict[str, tuple[int, ...]],
    report: Report,
) -> None:
    sequences: dict[str, dict[int, list[CommNode]]] = defaultdict(dict)
    for rank, calls in enumerate(issued):
        for call in calls:
            if call.type == NodeType.COLL:
                sequences[call.group].setdefault(rank, []).append(call)
    for group, by_rank in sequences.items():
        shapes = {
            rank: tuple((call.collective, call.size) for call in by_rank.get(rank, []))
            for rank in members[group]
        }
        # The sequence of most members counts as correct, so that the finding names the odd rank.
        usual = Counter(shapes.values()).most_common(1)[0][0]
        model = next(rank for rank, shape in shapes.items() if shape == usual)
        for rank, shape in shapes.items():
            if shape == usual:
                continue
            mine, other = by_rank.get(rank, []), by_rank.get(model, [])
            place = _first_difference(mine, other)
            here = str(mine[place]) if place < len(mine) else "none"
            there = str(other[place]) if place < len(other) else "none"
            report.add(
                "collective-sequence",
                programs[rank].file,
                mine[place].node if place < len(mine) else None,
                f"collective {place + 1} of {group_text(group)}: rank {rank} issues {here}, rank "
                f"{model} issues {there}; all members must issue one sequence of types and sizes",
            )


def _first_difference(mine: list[CommNode], other: list[CommNode]) -> int:
    """Return the first place at which two sequences differ in type or size."""
    for place, (left, right) in enumerate(zip(mine, other, strict=False)):
        if (left.collective, left.size) != (right.collective, right.size):
            return place
    return min(len(mine), len(other))


def _unmatched(issued: list[list[CommNode]]) -> "tuple[_Unmatched, _Unmatched]":
    """Return the sends and the receives without a counterpart, whenever they are issued."""
    sends: dict[Channel, list[CommNode]] = defaultdict(list)
    receives: dict[Channel, list[CommNode]] = defaultdict(list)
    for calls in issued:
        for call in calls:
            if call.type == NodeType.SEND:
                sends[channel_of(call)].append(call)
            elif call.type == NodeType.RECV:
                receives[channel_of(call)].append(call)
    return _surplus(sends, receives), _surplus(receives, sends)


def _check_messages(
    programs: Sequence[Program], issued: list[list[CommNode]], report: Report
) -> None:
    """Report sends and receives that have no counterpart."""
    unmatched_sends, unmatched_receives = _unmatched(issued)
    for rule, unmatched, others, what in (
        ("unmatched-recv", unmatched_receives, unmatched_sends, "receive waits for ever"),
        ("unmatched-send", unmatched_sends, unmatched_receives, "send is never received"),
    ):
        for (source, target, _, _), calls in unmatched.items():
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


class _Unmatched(dict[Channel, list[CommNode]]):
    """Calls without a counterpart, by channel."""

    def get_near(self, source: int, target: int) -> CommNode | None:
        """Return one between the same ranks."""
        same_ranks = (calls for key, calls in self.items() if key[:2] == (source, target))
        return next(same_ranks, [None])[0]


def _surplus(
    mine: dict[Channel, list[CommNode]], theirs: dict[Channel, list[CommNode]]
) -> _Unmatched:
    unmatched = _Unmatched()
    for channel, calls in mine.items():
        # Messages of a channel match in order, so the last ones are left over.
        rest = calls[len(theirs.get(channel, ())) :]
        if rest:
            unmatched[channel] = rest
    return unmatched
