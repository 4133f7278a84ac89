"""Explain a deadlock: which ranks wait for ever, for what, and why."""

from collections import Counter
from collections.abc import Iterator

from onerank.converters.targets.astra_sim.check.comm_programs import (
    Channel,
    NodeType,
    channel_of,
    group_text,
    name_of,
)
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.converters.targets.astra_sim.check.untimed_run import Rendezvous, Run


def report_stalls(run: Run, report: Report) -> None:
    """Report why the ranks that did not finish a run wait."""
    stalled = [rank for rank, state in enumerate(run.states) if state.left]
    if not stalled:
        return
    end = f"; {_ranks(stalled)} of {len(run.states)} never finish"
    blocked: dict[int, list[tuple[int, int]]] = {rank: [] for rank in stalled}
    at_fault: set[int] = set()
    for meeting in run.meetings.values():
        absent = [rank for rank in run.members[meeting.group] if rank not in meeting.arrived]
        gone = [rank for rank in absent if rank not in blocked]
        if not run.agrees(meeting):
            _report_mismatch(run, meeting, end, report)
            at_fault.update(meeting.arrived)
        elif gone:
            _report_missing(run, meeting, gone, end, report)
            at_fault.update(meeting.arrived)
        else:
            for rank, node in meeting.arrived.items():
                blocked[rank].extend((other, node) for other in absent)
    unsent = _unsent(run)
    for rank in stalled:
        for node in sorted(run.states[rank].receiving):
            channel = channel_of(run.call(rank, node))
            if channel in unsent:
                blocked[rank].append((channel[0], node))
            else:
                at_fault.add(rank)
    # What waits for a rank with a fault of its own is not at fault.
    blocked.update({rank: [] for rank in at_fault})
    for ring in _rings(blocked):
        rank, node = ring[0][0], ring[0][2]
        waits = ", ".join(
            f"rank {waiter} waits in {run.call(waiter, its)} for rank {other}"
            for waiter, other, its in ring
        )
        report.add(
            "deadlock",
            run.programs[rank].file,
            run.programs[rank].course.dag.ids[node],
            f"{waits}{end}; number the nodes so that all members issue in one order",
        )


def _report_mismatch(run: Run, meeting: Rendezvous, end: str, report: Report) -> None:
    shapes = {rank: run.shape(rank, node) for rank, node in sorted(meeting.arrived.items())}
    usual = Counter(shapes.values()).most_common(1)[0][0]
    model = next(rank for rank, shape in shapes.items() if shape == usual)
    odd = next(rank for rank, shape in shapes.items() if shape != usual)
    call = run.call(odd, meeting.arrived[odd])
    report.add(
        "collective-mismatch",
        run.programs[odd].file,
        call.node,
        f"collective {meeting.place + 1} of {group_text(meeting.group)}: rank {odd} waits in "
        f"{call}, rank {model} in {run.call(model, meeting.arrived[model])}{end}; "
        "type and bytes must be equal",
    )


def _report_missing(
    run: Run, meeting: Rendezvous, gone: list[int], end: str, report: Report
) -> None:
    rank, node = min(meeting.arrived.items())
    call = run.call(rank, node)
    report.add(
        "collective-missing",
        run.programs[rank].file,
        call.node,
        f"collective {meeting.place + 1} of {group_text(meeting.group)}: {_ranks(gone)} finished "
        f"without issuing it, rank {rank} waits in {call}{end}; "
        f"add the {name_of(call.collective)} there or remove it here",
    )


def _unsent(run: Run) -> set[Channel]:
    """Return the channels on which a stalled rank would still send."""
    unsent: set[Channel] = set()
    for rank, state in enumerate(run.states):
        ready = set(state.communicating)
        for node, call in enumerate(run.calls(rank)):
            held = state.waits[node] or node in ready
            if held and call is not None and call.type == NodeType.SEND:
                unsent.add(channel_of(call))
    return unsent


def _rings(blocked: dict[int, list[tuple[int, int]]]) -> list[list[tuple[int, int, int]]]:
    """Return rings of waiting ranks, as (rank, rank waited for, node), no rank in two."""
    rings: list[list[tuple[int, int, int]]] = []
    finished: set[int] = set()
    for first in blocked:
        # Depth first; `path` holds the ranks from `first` on, in order, with the step each took.
        path: dict[int, tuple[int, int]] = {}
        rest: dict[int, Iterator[tuple[int, int]]] = {}
        rank: int | None = None if first in finished else first
        while rank is not None:
            if rank not in rest:
                rest[rank] = iter(blocked[rank])
            path.pop(rank, None)
            step = next(rest[rank], None)
            if step is None:
                finished.add(rank)
                rank = next(reversed(path), None)
            elif step[0] in path or step[0] == rank:
                path[rank] = step
                ring = list(path)[list(path).index(step[0]) :]
                rings.append([(member, *path[member]) for member in ring])
                finished.update(path)
                rank = None
            else:
                path[rank] = step
                rank = rank if step[0] in finished else step[0]
    return rings


def _ranks(ranks: list[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(named)}"
