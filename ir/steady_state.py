"""The step of a graph without a profiler, in steady state, and that of a job of equal ranks.

The profiler slows the host, and a profiled step begins with an idle GPU. `HostOverhead` corrects
both, by steps that were measured without the profiler.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from onerank.ir.arrays import I64, union_duration_ns
from onerank.ir.contention import Contention
from onerank.ir.enums import Evidence, Kind
from onerank.ir.graph import Graph
from onerank.ir.replay import ReplayedRank, ReplayTimes


@dataclass(frozen=True, slots=True)
class SteadyStateStep:
    """One step in steady state, without a profiler: the GPU may still run the previous step.

    Attributes:
        times: replayed start and end of its nodes.
        step_ns: replayed step time; a measured step took `residual_ns` longer.
        residual_ns: `HostOverhead.residual_ns`, raised if needed so that `step_ns + residual_ns`
            is at least the GPU's busy time.
    """

    times: ReplayTimes
    step_ns: int
    residual_ns: int

    def device_begin_ns(self, graph: Graph) -> int:
        """Return the time in `times` from which the device is available to this step."""
        # The host runs ahead into the next step, so the device's last operation ends the step.
        ended_ns = self.times.end_ns[graph.compute | graph.communication].max(initial=0)
        return int(ended_ns) - self.step_ns


def steady_state_step(
    graph: Graph,
    gpu_ns: I64 | None = None,
    *,
    as_captured: bool = False,
    contention: Contention | None = None,
) -> SteadyStateStep | None:
    """Replay the graph as consecutive steps without a profiler; return one in steady state.

    Emulated calls keep the host as long as real ones would (`EmulatedCalls.excess_ns`).

    Returns None if the graph has no host operators, or if its host was not measured without the
    profiler.

    Args:
        graph: the graph.
        gpu_ns: durations to use for GPU operations, int64[n]; None keeps the graph's.
        as_captured: keep the host time of the emulation, as the measured steps contain it.
        contention: as for `ReplayedRank`.

    Raises:
        GraphError: the graph has a cycle, or no node takes time.
    """
    overhead = graph.job.measurement.host_overhead
    if overhead is None or not graph.mask(Kind.HOST_OP).any():
        return None
    inter_step_host_ns = round(overhead.inter_step_host_ns * graph.job.host_factor)
    emulated = None if as_captured else graph.job.measurement.emulated_calls
    # The measured host was that of the capture: a host of another speed issues real calls at its
    # own speed, too.
    excess_ns = emulated.excess_ns * graph.job.host_factor if emulated else 0.0
    replayed = replay_without_profiler(graph, overhead.host_factor, excess_ns, contention)
    if gpu_ns is not None:
        replayed = replayed.with_gpu_durations(gpu_ns)
    times, step_ns = replayed.steady_state(inter_step_host_ns)
    gpu = ~graph.mask(Kind.HOST_OP)
    # A negative residual must not make the step shorter than the GPU's work.
    busy_ns = union_duration_ns(times.start_ns[gpu], times.end_ns[gpu])
    return SteadyStateStep(times, step_ns, max(overhead.residual_ns, busy_ns - step_ns))


def with_steady_state_kernels(graph: Graph) -> Graph:
    """Return the graph with kernels that take their time in steady state.

    In a slice whose GPU sets the pace, kernels take `HostOverhead.kernel_factor` times their
    profiled time. The factor replaces the residual: what remains of it is the time of copies that
    emulate communication.
    """
    overhead = graph.job.measurement.host_overhead
    if overhead is None or overhead.kernel_factor == 1:
        return graph
    duration = graph.nodes.duration_ns.copy()
    duration[graph.compute] = np.rint(duration[graph.compute] * overhead.kernel_factor)
    overhead = msgspec.structs.replace(overhead, kernel_factor=1.0, residual_ns=0)
    measurement = msgspec.structs.replace(graph.job.measurement, host_overhead=overhead)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return replace(graph.with_columns(duration_ns=duration), job=job)


def launch_waits_ns(graph: Graph, times: ReplayTimes, begun_ns: int) -> int:
    """Return the idle time before operations of the device that waited for their launch.

    Args:
        graph: the graph.
        times: of its replay.
        begun_ns: time from which the device is available.
    """
    gpu = np.flatnonzero(graph.compute | graph.communication)
    gpu = gpu[np.argsort(times.start_ns[gpu], kind="stable")]
    if not len(gpu):
        return 0
    # Streams overlap: the device is idle only from the latest end of all earlier operations on.
    reach = np.maximum.accumulate(times.end_ns[gpu])
    before = np.concatenate([[begun_ns], reach[:-1]])
    idle = np.maximum(times.start_ns[gpu] - before, 0)
    return int(idle[times.by_launch[gpu]].sum())


def job_step_ns(graph: Graph, ranks: int) -> int | None:
    """Return the expected step of a job of equal ranks, which wait for the slowest of them.

    Emulated calls take the host as long as real ones (`emulation_excess_ns`). None if the graph is
    not a slice of such a rank, or if too few of its steps were measured
    (`Measurement.slowest_step_ns`).

    Args:
        graph: the slice.
        ranks: ranks of the job.
    """
    slowest_ns = graph.job.measurement.slowest_step_ns(ranks) if _stands_for_all(graph) else None
    return None if slowest_ns is None else slowest_ns - emulation_excess_ns(graph)


def emulation_excess_ns(graph: Graph) -> int:
    """Return by how much a measured step is longer because calls were emulated.

    Emulated calls keep the host longer than real ones. 0 if the GPU limits the step, or if the time
    of emulated calls was not measured.
    """
    if graph.job.measurement.emulated_calls is None:
        return 0
    captured, real = (steady_state_step(graph, as_captured=each) for each in (True, False))
    return max(captured.step_ns - real.step_ns, 0) if captured and real else 0


def slowest_rank_excess_ns(graph: Graph, ranks: int) -> int:
    """Return by how much the slowest of `ranks` equal ranks exceeds the median step.

    0 if the graph is not a slice of such a rank, or if too few steps were measured.
    """
    excess_ns = graph.job.measurement.slowest_excess_ns(ranks) if _stands_for_all(graph) else None
    return max(excess_ns or 0, 0)


def _stands_for_all(graph: Graph) -> bool:
    """Return whether a graph is the slice of a job whose ranks all do the same work."""
    nodes = graph.nodes
    calls = graph.communication & (nodes.duration_ns > 0)
    # A real rank's own steps wait already.
    emulated = bool(calls.any()) and not (nodes.evidence[calls] == Evidence.MEASURED).all()
    return emulated and graph.job.world.sizes.get("pp", 1) == 1


def with_step_time(graph: Graph, step_ns: int) -> Graph:
    """Return the graph with its host overhead set so that a steady-state step takes `step_ns`."""
    steady = steady_state_step(graph, as_captured=True)
    measurement = graph.job.measurement
    if steady is None or measurement.host_overhead is None:
        return graph
    overhead = msgspec.structs.replace(
        measurement.host_overhead, residual_ns=step_ns - steady.step_ns
    )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def replay_without_profiler(
    graph: Graph,
    host_factor: float,
    call_excess_ns: float = 0.0,
    contention: Contention | None = None,
) -> ReplayedRank:
    """Return the graph ready for scheduling, its host time scaled by `host_factor`.

    Waits for room in launch queues are dropped. `call_excess_ns` is as for `edge_delays`,
    `contention` as for `ReplayedRank`.
    """
    # In 20 ms without the profiler a host launched 1050 kernels that took 50 ms; the profiled host
    # was already waiting for room in the launch queue, so its waits do not apply.
    scaled = with_host_factor(graph, host_factor)
    return ReplayedRank(scaled, queues=False, call_excess_ns=call_excess_ns, contention=contention)


def with_host_factor(graph: Graph, factor: float) -> Graph:
    """Return the graph with the duration of every host operator multiplied by `factor`.

    Start times stay as measured. A replay derives the host time between operators from them and
    scales it by `Job.host_factor`. Copies between host and GPU keep their durations.
    """
    host = graph.mask(Kind.HOST_OP) & (graph.nodes.duration_ns > 0)
    duration, spread = graph.nodes.duration_ns.copy(), graph.nodes.spread_ns.copy()
    # Starts stay: replay derives the time between operators from them, and would scale it twice.
    duration[host] = np.rint(duration[host] * factor).astype(np.int64)
    spread[host] = np.rint(spread[host] * factor).astype(np.int64)
    job = msgspec.structs.replace(graph.job, host_factor=graph.job.host_factor * factor)
    return replace(graph.with_columns(duration_ns=duration, spread_ns=spread), job=job)
