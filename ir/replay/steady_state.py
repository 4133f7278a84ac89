"""The steady-state step: host overhead and step time without the profiler."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from onerank.ir.arrays import I64, union_duration_ns
from onerank.ir.enums import Kind
from onerank.ir.graph import Graph
from onerank.ir.replay.scheduler import ReplayedRank, Schedule


@dataclass(frozen=True, slots=True)
class SteadyStateStep:
    """One step in steady state, without a profiler: the GPU may still run the previous step.

    Attributes:
        times: replayed start and end of its nodes.
        step_ns: replayed step time; a measured step took `residual_ns` longer.
        residual_ns: `HostOverhead.residual_ns`, raised if needed so that `step_ns + residual_ns`
            is at least the GPU's busy time.
    """

    times: Schedule
    step_ns: int
    residual_ns: int


def steady_state_step(graph: Graph, gpu_ns: I64 | None = None) -> SteadyStateStep | None:
    """Replay the graph as consecutive steps without a profiler; return one in steady state.

    Returns None if the graph has no host operators, or if its host was not measured without the
    profiler.

    Args:
        graph: the graph.
        gpu_ns: durations to use for GPU operations, int64[n]; None keeps the graph's.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    overhead = graph.job.measurement.host_overhead
    if overhead is None or not graph.mask(Kind.HOST_OP).any():
        return None
    inter_step_host_ns = round(overhead.inter_step_host_ns * graph.job.host_factor)
    replayed = replay_without_profiler(graph, overhead.host_factor)
    if gpu_ns is not None:
        replayed = replayed.with_gpu_durations(gpu_ns)
    times, step_ns = replayed.steady_state(inter_step_host_ns)
    gpu = ~graph.mask(Kind.HOST_OP)
    busy_ns = union_duration_ns(times.start_ns[gpu], times.end_ns[gpu])
    return SteadyStateStep(times, step_ns, max(overhead.residual_ns, busy_ns - step_ns))


def with_step_time(graph: Graph, step_ns: int) -> Graph:
    """Return the graph with its host overhead set so that a steady-state step takes `step_ns`."""
    steady = steady_state_step(graph)
    measurement = graph.job.measurement
    if steady is None or measurement.host_overhead is None:
        return graph
    overhead = msgspec.structs.replace(
        measurement.host_overhead, residual_ns=step_ns - steady.step_ns
    )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def replay_without_profiler(graph: Graph, host_factor: float) -> ReplayedRank:
    """Return the graph ready for scheduling, its host time scaled by `host_factor`.

    Waits for room in launch queues are dropped.
    """
    # In 20 ms without the profiler a host launched 1050 kernels that took 50 ms; the profiled host
    # was already waiting for room in the launch queue, so its waits do not apply.
    return ReplayedRank(with_host_factor(graph, host_factor), queues=False)


def with_host_factor(graph: Graph, factor: float) -> Graph:
    """Return the graph with the duration of every host operator multiplied by `factor`.

    Start times stay as measured. A replay derives the host time between operators from them and
    scales it by `Job.host_factor`. Copies between host and GPU keep their durations.
    """
    host = graph.mask(Kind.HOST_OP) & (graph.nodes.duration_ns > 0)
    duration, spread = graph.nodes.duration_ns.copy(), graph.nodes.spread_ns.copy()
    duration[host] = np.rint(duration[host] * factor).astype(np.int64)
    spread[host] = np.rint(spread[host] * factor).astype(np.int64)
    job = msgspec.structs.replace(graph.job, host_factor=graph.job.host_factor * factor)
    return replace(graph.with_columns(duration_ns=duration, spread_ns=spread), job=job)
