"""Rules across ranks: every collective and message meets its counterpart."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    Call,
    Channel,
    NodeType,
    Program,
    channel_of,
    group_text,
)
from onerank.converters.targets.astra_sim.check.deadlocks import report_stalls
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.converters.targets.astra_sim.check.rank_symmetry import RankClasses, sorts_of
from onerank.converters.targets.astra_sim.check.untimed_run import Run

FEW = 64
"""Ranks that are all run."""


def check_matching(
    programs: Sequence[Program], groups: dict[str, tuple[int, ...]], report: Report
) -> None:
    """Check the ranks of one workload, `programs[rank]`, against each other.

    Of many ranks one of each sort is run; all of them only where that meets a fault, to name it.
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
    """Whether one rank of each sort finishes, and nothing is left over."""
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
