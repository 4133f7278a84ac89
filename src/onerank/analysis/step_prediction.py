"""Step time before and after re-costing, with its interval."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from onerank.analysis.replay_breakdown import Parts, Replay, replay
from onerank.annotate import compute_mask
from onerank.ir import Graph
from onerank.ir.replay.scheduler import Run
from onerank.ir.replay.steady_state import steady_state_step


class StepChange(msgspec.Struct, frozen=True):
    """A step before and after a re-costing; durations in ns.

    Attributes:
        source: "steady_state": a step without a profiler, host overhead measured; "replay": the
            graph replayed with the host as profiled, because nothing else was measured.
        before: the step before, and where its time goes; None if the nodes have no times.
        after: the step after.
        low_ns: the step after with all compute at the low end of its interval; None without
            intervals.
        high_ns: the same at the high end.
        measured_ns: median of the measured steps without a profiler; None if there is none.
        untimed: communication calls of the step after that have no time in the graph.
    """

    source: Literal["steady_state", "replay"]
    before: Parts | None
    after: Parts | None
    low_ns: int | None
    high_ns: int | None
    measured_ns: int | None
    untimed: int


def step_change(before: Graph, after: Graph, interval: Sequence[int]) -> StepChange:
    """Return what became of the step.

    Args:
        before: as measured.
        after: made of it by a re-costing.
        interval: where four of five measured times of all compute after lie, in ns; () for none.

    Raises:
        GraphError: one has a cycle.
    """
    was, now = (_replayed(graph) for graph in (before, after))
    by_row = bool(was and was.row) and bool(now and now.row)
    compute = compute_mask(after)
    total = int(after.nodes.duration_ns[compute].sum())
    ends = [_with_compute(after, end / total, by_row=by_row) for end in interval if total]
    return StepChange(
        source="steady_state" if by_row else "replay",
        before=_parts(was, by_row=by_row),
        after=_parts(now, by_row=by_row),
        low_ns=ends[0] if ends else None,
        high_ns=ends[1] if ends else None,
        measured_ns=was.row_measured_ns if was else None,
        untimed=int((after.communication & (after.nodes.duration_ns == 0)).sum()),
    )


def _replayed(graph: Graph) -> Replay | None:
    return replay(graph) if graph.nodes.duration_ns.any() else None


def _parts(ran: Replay | None, *, by_row: bool) -> Parts | None:
    if ran is None or by_row:
        return ran and ran.row
    return Parts(
        ran.step_time_ns,
        ran.compute_ns,
        ran.exposed_communication_ns,
        ran.idle_ns,
        ran.host_bound_ns,
    )


def _with_compute(graph: Graph, factor: float, *, by_row: bool) -> int:
    """Return how long the step takes where all compute takes `factor` times as long."""
    duration, compute = graph.nodes.duration_ns.copy(), compute_mask(graph)
    duration[compute] = np.rint(duration[compute] * factor).astype(np.int64)
    if by_row and (row := steady_state_step(graph, duration)):
        return row.step_ns + row.more_ns
    times = Run(graph).lasting(duration).schedule()
    return int(times.end_ns.max() - times.start_ns.min())
