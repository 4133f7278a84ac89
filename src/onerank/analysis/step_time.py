"""The parts of a replayed step's time, and the step time before and after re-costing."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from onerank.converters.nccl import wire_bytes
from onerank.display import Displayed
from onerank.ir import UNKNOWN, Graph, Kind
from onerank.ir.all_to_all import even_bytes
from onerank.ir.arrays import Mask, union_duration_ns
from onerank.ir.errors import GraphError
from onerank.ir.replay import ReplayedRank, ReplayTimes, schedule
from onerank.ir.start_delays import unrecorded_waits
from onerank.ir.steady_state import (
    job_step_ns,
    launch_waits_ns,
    steady_state_step,
    with_host_factor,
)


class PathShare(msgspec.Struct, frozen=True):
    """A module's share of the critical path.

    Attributes:
        name: module, numbered siblings kept; "" for none.
        kind: host, compute, communication or launch.
        time_ns: time on the path.
        nodes: nodes on the path.
    """

    name: str
    kind: str
    time_ns: int
    nodes: int


class StepBreakdown(msgspec.Struct, frozen=True):
    """Where the time of a step goes, in ns; fields as in `Replay`."""

    step_ns: int
    compute_ns: int
    exposed_communication_ns: int
    idle_ns: int
    host_bound_ns: int


class Replay(Displayed, msgspec.Struct, frozen=True):
    """The parts of a replayed step; times in ns.

    Attributes:
        step_time_ns: from the first start to the last end.
        measured_ns: the profiled step that the durations come from; None if it was not measured, or
            if the graph no longer holds all of it (its host, its network).
        steady_state: parts of the steady-state step (`steady_state_step`). Its idle time includes
            the measured residual. None if the host was not measured without a profiler.
        steady_state_measured_ns: median of measured steady-state steps; None if not measured, or no
            longer valid for the graph.
        job_step_ns: expected step of the job, whose equal ranks wait for the slowest; None as for
            `steady_state_measured_ns`, and for a graph that is not a slice of such a rank.
        compute_ns: the device computes (in a CPU capture: its operators).
        exposed_communication_ns: the device communicates and computes nothing.
        idle_ns: the rest.
        host_bound_ns: part of the idle time in which the next operation waits for its launch.
        data_loading_ns: part of the idle time in which the script waits for its next batch.
        unexplained_ns: part of the idle time whose cause the trace does not record.
        critical_path: by module and kind, longest first.
    """

    step_time_ns: int
    measured_ns: int | None
    steady_state: StepBreakdown | None
    steady_state_measured_ns: int | None
    job_step_ns: int | None
    compute_ns: int
    exposed_communication_ns: int
    idle_ns: int
    host_bound_ns: int
    data_loading_ns: int
    unexplained_ns: int
    critical_path: list[PathShare]


def replay(graph: Graph, *, bandwidth_gb_per_s: float | None = None) -> Replay:
    """Replay the graph and return the parts of its step time.

    Args:
        graph: one rank's step.
        bandwidth_gb_per_s: bus bandwidth that determines the time of communication; None keeps the
            graph's durations.

    Raises:
        GraphError: the graph has a cycle, takes no time, or has communication without bytes or
            without a known group.
    """
    if bandwidth_gb_per_s is not None:
        graph = with_communication(graph, bandwidth_gb_per_s)
    times = schedule(graph)
    busy = graph.compute | graph.communication
    busy_ns = _union(times, busy)
    # An operation that starts earlier by its unrecorded wait covers the idle time of that wait.
    without_gaps = replace(times, start_ns=times.start_ns - unrecorded_waits(graph))
    begun_ns = int(times.start_ns.min())
    step = _parts(graph, times, begun_ns, int(times.end_ns.max()) - begun_ns)
    return Replay(
        step_time_ns=step.step_ns,
        # The measured steps had the network of the capture, not this bandwidth.
        measured_ns=None if bandwidth_gb_per_s else _measured_ns(graph),
        steady_state=_steady_state(graph),
        steady_state_measured_ns=(
            None if bandwidth_gb_per_s else graph.job.measurement.median_step_ns
        ),
        job_step_ns=(None if bandwidth_gb_per_s else job_step_ns(graph, graph.job.world.size)),
        compute_ns=step.compute_ns,
        exposed_communication_ns=step.exposed_communication_ns,
        idle_ns=step.idle_ns,
        host_bound_ns=step.host_bound_ns,
        data_loading_ns=_union(times, busy | graph.data_loading) - busy_ns,
        unexplained_ns=_union(without_gaps, busy) - busy_ns,
        critical_path=_critical_path(graph, times),
    )


def _steady_state(graph: Graph) -> StepBreakdown | None:
    step = steady_state_step(graph)
    if step is None:
        return None
    step_ns = step.step_ns + step.residual_ns
    return _parts(graph, step.times, step.device_begin_ns(graph), step_ns)


def _parts(graph: Graph, times: ReplayTimes, begun_ns: int, step_ns: int) -> StepBreakdown:
    """Return the parts of a step in which the device is available from `begun_ns` on."""
    compute_ns = _union(times, graph.compute)
    busy_ns = _union(times, graph.compute | graph.communication)
    idle_ns = step_ns - busy_ns
    # A negative residual makes a steady-state step shorter than its replay, and its idle time less.
    host_bound_ns = min(launch_waits_ns(graph, times, begun_ns), idle_ns)
    return StepBreakdown(step_ns, compute_ns, busy_ns - compute_ns, idle_ns, host_bound_ns)


def _measured_ns(graph: Graph) -> int | None:
    """Return the duration of the profiled step; None if the graph no longer has all of it."""
    # A GPU step without host operators is coarsened, or was recorded without them.
    on_gpu, has_host = graph.mask(Kind.KERNEL).any(), graph.mask(Kind.HOST_OP).any()
    return graph.job.measurement.profiled_step_ns or None if has_host or not on_gpu else None


def with_communication(graph: Graph, bandwidth_gb_per_s: float) -> Graph:
    """Return the graph with communication timed by bytes over bus bandwidth, see `wire_bytes`.

    Raises:
        GraphError: a communication without bytes, or of a group that the job does not know.
    """
    duration = graph.nodes.duration_ns.copy()
    for index in np.flatnonzero(graph.communication).tolist():
        node = graph.node(index)
        size, name = node.value("comm_bytes"), node.text("group")
        group = graph.job.group(name)
        # The default group of torch.distributed has no name and is the world.
        ranks = len(group.ranks) if group else graph.job.world.size if name == "" else 0
        if size < 0 or (ranks == 0 and node.kind is Kind.COLLECTIVE):
            missing = "its bytes" if size < 0 else f"the ranks of its group {name!r}"
            raise GraphError(
                f"node {node.id} ({node.name!r}) communicates, and {missing} are unknown",
                code="replay-unknown-communication",
            )
        size = even_bytes(node, ranks)
        wire = wire_bytes(node.collective.name.lower(), size, max(ranks, 1))
        # Bytes over GB/s are nanoseconds.
        duration[index] = round(wire / bandwidth_gb_per_s)
    return graph.with_columns(duration_ns=duration)


def _union(times: ReplayTimes, chosen: Mask) -> int:
    """Return the time in which at least one of the chosen nodes runs."""
    return union_duration_ns(times.start_ns[chosen], times.end_ns[chosen])


def _critical_path(graph: Graph, times: ReplayTimes) -> list[PathShare]:
    """Return the shares of the critical path.

    The walk goes back from the last end, from each node to the node that determined its start.
    """
    time, count = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    # A node that waited for nothing ends the walk. The time before it counts as its own, so that
    # the shares sum to the step.
    begun_ns = np.where(times.blocked_by == UNKNOWN, times.start_ns.min(), times.start_ns)
    node = int(np.argmax(times.end_ns))
    end_ns = int(times.end_ns[node])
    while node != UNKNOWN:
        view = graph.node(node)
        kind = "host" if view.kind is Kind.HOST_OP else "compute"
        key = (view.text("module"), "communication" if view.kind.is_communication else kind)
        blocker = int(times.blocked_by[node])
        start_ns = int(begun_ns[node])
        time[key] += end_ns - start_ns
        count[key] += 1
        # The launching operator ran on after the launch, so the path counts only the time from its
        # start to the launch, and continues with what the operator waited for.
        if times.by_launch[node]:
            launch = (view.text("module"), "launch")
            time[launch] += start_ns - int(begun_ns[blocker])
            count[launch] += 1
            start_ns = int(begun_ns[blocker])
            node, end_ns = int(times.blocked_by[blocker]), start_ns
            continue
        node, end_ns = blocker, start_ns
    shares = [PathShare(name, kind, ns, count[name, kind]) for (name, kind), ns in time.items()]
    return sorted(shares, key=lambda share: (-share.time_ns, share.name, share.kind))


class StepChange(msgspec.Struct, frozen=True):
    """A step before and after a re-costing; durations in ns.

    Attributes:
        source: "steady_state": a step without a profiler, host overhead measured; "replay": the
            graph replayed with the profiled host, because nothing else was measured.
        before: the step before, with its parts; None if the nodes have no times.
        after: the step after.
        p10_ns: the step after at the 10th percentile: of its whole compute, and of its host where
            the host is not the measured one; None without intervals.
        p90_ns: the same at the 90th percentile.
        measured_ns: median of the measured steps without a profiler; None if there is none.
        untimed: communication calls of the step after that have no time in the graph.
    """

    source: Literal["steady_state", "replay"]
    before: StepBreakdown | None
    after: StepBreakdown | None
    p10_ns: int | None
    p90_ns: int | None
    measured_ns: int | None
    untimed: int


def step_change(before: Graph, after: Graph, interval: Sequence[int]) -> StepChange:
    """Return the step before and after a re-costing.

    Args:
        before: the measured graph.
        after: the re-costed graph.
        interval: 10th and 90th percentile of the total compute time after, in ns; () for none.

    Raises:
        GraphError: one of the graphs has a cycle.
    """
    replay_before, replay_after = (_replayed(graph) for graph in (before, after))
    # A steady-state step does not compare with a replay under the profiler, so neither mixes them.
    # A CPU capture has no step on a GPU, and its prediction has a host without a profiler.
    in_steady_state = bool(replay_after and replay_after.steady_state) and bool(
        before.job.device.runs_operators or (replay_before and replay_before.steady_state)
    )
    compute = after.compute
    total = int(after.nodes.duration_ns[compute].sum())
    # The interval is one of the sum of all compute; the whole step scales with it.
    ends = [
        _with_compute(after, end / total, in_steady_state=in_steady_state)
        for end in interval
        if total
    ]
    replayed_after = _replayed_parts(replay_after, in_steady_state=in_steady_state)
    factors = host_interval(after) if in_steady_state else ()
    if replayed_after and factors:
        ends = _combined(replayed_after.step_ns, ends, _host_ends(after, replayed_after, factors))
    return StepChange(
        source="steady_state" if in_steady_state else "replay",
        before=_replayed_parts(
            replay_before,
            in_steady_state=in_steady_state and not before.job.device.runs_operators,
        ),
        after=replayed_after,
        p10_ns=ends[0] if ends else None,
        p90_ns=ends[1] if ends else None,
        measured_ns=replay_before.steady_state_measured_ns if replay_before else None,
        untimed=int((after.communication & (after.nodes.duration_ns == 0)).sum()),
    )


def host_interval(graph: Graph) -> Sequence[float]:
    """Return the factors on the graph's host at the 10th and 90th percentile; () for none."""
    return _detail(graph, "host_interval")


def _detail(graph: Graph, name: str) -> Sequence[Any]:
    annotations = graph.job.annotations
    return annotations[-1].details.get(name, ()) if annotations else ()


def _host_ends(graph: Graph, after: StepBreakdown, factors: Sequence[float]) -> list[int]:
    """Return the steady-state step with the host at each factor, in ns.

    A graph with residuals for both ends has a step of unexplained time for each, too.
    """
    ends: list[int] = []
    residuals_ns = _detail(graph, "host_residual_ns") or (None,) * len(factors)
    for factor, residual_ns in zip(factors, residuals_ns, strict=True):
        # A GPU that waits for no launch gains nothing from a faster host.
        unchanged = factor == 1 or (factor < 1 and not after.host_bound_ns)
        if unchanged and residual_ns is None:
            ends.append(after.step_ns)
            continue
        scaled = graph if unchanged else with_host_factor(graph, factor)
        if residual_ns is not None:
            scaled = _with_residual(scaled, int(residual_ns))
        step = steady_state_step(scaled)
        ends.append(step.step_ns + step.residual_ns if step else after.step_ns)
    return ends


def _with_residual(graph: Graph, residual_ns: int) -> Graph:
    measurement = graph.job.measurement
    if measurement.host_overhead is None:
        return graph
    overhead = msgspec.structs.replace(measurement.host_overhead, residual_ns=residual_ns)
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def _combined(step_ns: int, compute: Sequence[int], host: Sequence[int]) -> list[int]:
    """Return the ends of an interval from those of two independent causes, in ns.

    The logarithms of the ratios to the step add in squares.
    """
    ends: list[int] = []
    for sign, causes in zip((-1, 1), zip(compute or host, host, strict=True), strict=True):
        # Without an interval of compute, `zip` pairs the host's ends with themselves.
        used = causes if compute else causes[:1]
        # An end on the wrong side of the step widens nothing.
        logs = [max(0.0, sign * math.log(end / step_ns)) for end in used]
        ends.append(round(step_ns * math.exp(sign * math.hypot(*logs))))
    return ends


def _replayed(graph: Graph) -> Replay | None:
    return replay(graph) if graph.nodes.duration_ns.any() else None


def _replayed_parts(replayed: Replay | None, *, in_steady_state: bool) -> StepBreakdown | None:
    if replayed is None or in_steady_state:
        return replayed.steady_state if replayed else None
    return StepBreakdown(
        replayed.step_time_ns,
        replayed.compute_ns,
        replayed.exposed_communication_ns,
        replayed.idle_ns,
        replayed.host_bound_ns,
    )


def _with_compute(graph: Graph, factor: float, *, in_steady_state: bool) -> int:
    """Return the step time in ns if all compute takes `factor` times as long."""
    duration, compute = graph.nodes.duration_ns.copy(), graph.compute
    duration[compute] = np.rint(duration[compute] * factor).astype(np.int64)
    if in_steady_state and (step := steady_state_step(graph, duration)):
        return step.step_ns + step.residual_ns
    times = ReplayedRank(graph).with_gpu_durations(duration).schedule()
    return int(times.end_ns.max() - times.start_ns.min())
