"""Job metadata from a trace: device, process groups, step time, memory, host overhead.

The host overhead needs two measurements without a profiler: the host time of a step that began with
an idle GPU, like the profiled step; and the time of a step in steady state. The first gives the
factor on host times with which the graph reproduces it. The second gives what the replayed
steady-state step lacks.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import numpy as np

from onerank.converters.sources.kineto.collectives import Communication
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.memory_events import MemoryHistory
from onerank.converters.sources.kineto.read.schema import DeviceProperties, Distributed
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace
from onerank.ir import (
    Device,
    Evidence,
    Graph,
    HostOverhead,
    Job,
    Kind,
    Measurement,
    MemoryClass,
    MemoryLog,
    ProcessGroup,
    World,
)
from onerank.ir.arrays import I64, union_duration_ns
from onerank.ir.notes import Note
from onerank.ir.steady_state import (
    launch_waits_ns,
    replay_without_profiler,
    steady_state_step,
    with_step_time,
)
from onerank.ir.world import axis_of

# Range in which the factor on host times is searched.
_HOST_FACTORS = (0.2, 1.2)

# Relative error of the host time at which the search ends.
_TOLERANCE = 0.001

_MAX_TRIES = 8


def with_host_overhead(graph: Graph) -> Graph:
    """Return the graph with its `Measurement.host_overhead`, if the job has the measurements."""
    measurement = graph.job.measurement
    if not (measurement.host_step_ns and measurement.profiled_host_ns and measurement.step_ns):
        return graph
    if not (graph.mask(Kind.HOST_OP).any() and graph.gpu_compute.any()):
        return graph
    # The profiler slows the host, and each profiled step begins with an idle GPU. Replays with the
    # recorded host times of a host-bound slice on an H200 were 5 to 63% too long.
    step_ns = round(np.median(measurement.step_ns))
    overhead = _host_overhead(graph, measurement)
    notes = measurement.notes
    if overhead.host_factor in _HOST_FACTORS:
        notes += (
            Note(
                f"the host took {np.median(measurement.host_step_ns):.0f} ns per step "
                f"without the profiler and {measurement.profiled_host_ns[0]} ns with it: the "
                f"factor on host times is outside {_HOST_FACTORS[0]} to {_HOST_FACTORS[1]}, and "
                "the nearer end is used",
                code="host-factor-out-of-range",
            ),
        )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead, notes=notes)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return with_kernel_factor(with_step_time(replace(graph, job=job), step_ns))


# The GPU sets the pace of a step if it waits for launches for at most the first share of the step,
# and if the median absolute deviation of the timed steps is at most the second share of their
# median. Of eleven slices on H100s three wait for no launch and vary by 0.2 to 1.5%. Others wait
# for 1% and more, or vary by 2% and more
# (benchmarks/results/2026-11-27-four-gpu-jobs-4xh100.txt and 2026-11-27-two-gpu-jobs-2xh100.txt).
_WAITING, _SPREAD = 0.01, 0.02


def with_kernel_factor(graph: Graph) -> Graph:
    """Return a slice with `HostOverhead.kernel_factor`, where its GPU never waits for the host.

    A GPU at its power limit lowers its clock. In the profiled step it waits for the slower host, so
    that it may stay below the limit: kernels of an H100 were 4 to 7% shorter than in the real job.
    """
    measurement = graph.job.measurement
    overhead = measurement.host_overhead
    step = steady_state_step(graph, as_captured=True)
    # Real ranks wait for each other, which lengthens their steps too.
    ran = graph.nodes.evidence[graph.communication] != Evidence.NONE
    if overhead is None or step is None or ran.any():
        return graph
    waits_ns = launch_waits_ns(graph, step.times, step.device_begin_ns(graph))
    if waits_ns > _WAITING * step.step_ns:
        return graph
    steps = np.array(measurement.step_ns)
    if np.median(np.abs(steps - np.median(steps))) > _SPREAD * np.median(steps):
        return graph
    gpu, begun_ns = graph.compute, graph.nodes.start_ns
    busy_ns = union_duration_ns(begun_ns[gpu], (begun_ns + graph.nodes.duration_ns)[gpu])
    # Copies that emulate communication are no nodes, and lengthen the timed steps as well.
    emulation_ns = max(0, measurement.gpu_busy_ns - busy_ns)
    longer_ns = max(0, overhead.residual_ns - emulation_ns)
    overhead = msgspec.structs.replace(
        overhead, kernel_factor=round(1 + longer_ns / max(1, busy_ns), 4)
    )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def _host_overhead(graph: Graph, measurement: Measurement) -> HostOverhead:
    """Fit the factor on host times; the profiled host time beyond the replay is between steps."""
    inter_step_host_ns = max(measurement.profiled_host_ns[0] - _host_span(graph, 1.0), 0)

    def host_ns(factor: float) -> float:
        return _host_span(graph, factor) + factor * inter_step_host_ns

    # The time of a host that waits for its GPU does not depend on the factor. The target is just
    # above that time, so the search ends at the largest factor that gives it.
    shortest = host_ns(_HOST_FACTORS[0]) * (1 + 2 * _TOLERANCE)
    target_ns = max(float(np.median(measurement.host_step_ns)), shortest)
    factor = _find_factor(host_ns, target_ns, _HOST_FACTORS)
    return HostOverhead(round(factor, 3), round(factor * inter_step_host_ns), 0)


def _find_factor(
    time_ns: Callable[[float], float], target_ns: float, bounds: tuple[float, float]
) -> float:
    """Return the factor at which an increasing `time_ns` reaches the target, else the nearer bound.

    Regula falsi with the Illinois modification.
    """
    low, high = bounds
    low_error, high_error = time_ns(low) - target_ns, time_ns(high) - target_ns
    if low_error >= 0 or high_error <= 0:
        return low if low_error >= 0 else high
    last_moved, factor = 0, low
    for _ in range(_MAX_TRIES):
        factor = (low * high_error - high * low_error) / (high_error - low_error)
        error = time_ns(factor) - target_ns
        if abs(error) <= _TOLERANCE * target_ns:
            break
        # Illinois: if the same bound moves twice, halve the error of the other bound.
        if error > 0:
            low_error = low_error / 2 if last_moved > 0 else low_error
            high, high_error, last_moved = factor, error, 1
        else:
            high_error = high_error / 2 if last_moved < 0 else high_error
            low, low_error, last_moved = factor, error, -1
    return factor


def _host_span(graph: Graph, factor: float) -> int:
    """Return the replayed time from the start of the first operator to the end of the last."""
    times = replay_without_profiler(graph, factor).schedule()
    host = graph.mask(Kind.HOST_OP)
    return int(times.end_ns[host].max() - times.start_ns[host].min())


def of_step(job: Job, number: int) -> Job:
    """Return the job with the times of its profiled step `number`, as far as they are recorded."""
    measurement = job.measurement
    steps, hosts = measurement.profiled_steps_ns, measurement.profiled_host_ns
    if number < len(steps):
        measurement = msgspec.structs.replace(
            measurement, profiled_step_ns=steps[number], profiled_steps_ns=()
        )
    measurement = msgspec.structs.replace(measurement, profiled_host_ns=hosts[number : number + 1])
    return msgspec.structs.replace(job, measurement=measurement)


def with_device(job: Job, trace: KinetoTrace, *, on_gpu: bool) -> Job:
    """Return the job with the trace's device if the job names none."""
    if job.device.type:
        return job
    if not on_gpu:
        return msgspec.structs.replace(job, device=Device(type="cpu"))
    first = trace.device or DeviceProperties()
    device = Device("cuda", first.name, first.memory_bytes, first.sm_count)
    return msgspec.structs.replace(job, device=device)


def with_busy_time(job: Job, gpu: GpuOps) -> Job:
    """Return the job with its GPU busy time, kernels that emulate collectives included."""
    start_ns = gpu.rows.start_ns
    busy = union_duration_ns(start_ns, start_ns + gpu.rows.duration_ns)
    measurement = msgspec.structs.replace(job.measurement, gpu_busy_ns=busy)
    return msgspec.structs.replace(job, measurement=measurement)


def with_memory(
    job: Job, used: MemoryHistory, activations: tuple[int, ...], *, on_gpu: bool
) -> Job:
    """Return the job with activation bytes, and with start and peak if not recorded.

    On a GPU, memory events carry the allocator's total. On a CPU they show the rise above the level
    at the start of the window, which gives the peak only if the job knows that level.
    """
    measurement = msgspec.structs.replace(job.measurement, activation_bytes=activations)
    if measurement.peak_memory_bytes:
        return msgspec.structs.replace(job, measurement=measurement)
    start = measurement.start_memory_bytes
    if on_gpu:
        peak, start = used.peak_total_bytes, start or used.start_total_bytes
    else:
        peak = start + used.peak_rise_bytes if start else 0
    measurement = msgspec.structs.replace(
        measurement, peak_memory_bytes=peak, start_memory_bytes=start
    )
    return msgspec.structs.replace(job, measurement=measurement)


def with_groups(job: Job, calls: Iterable[Communication]) -> Job:
    """Return the job with the groups that calls name and the job lacks."""
    known = {group.name: group for group in job.groups}
    for call in calls:
        if call.group and call.group not in known and call.group_ranks:
            known[call.group] = ProcessGroup(call.group, call.group_ranks)
    return msgspec.structs.replace(job, groups=tuple(known.values()))


def with_profiled_step(job: Job, span_ns: int) -> Job:
    """Return the job with `span_ns` as profiled step time if it has none.

    Args:
        job: the job so far.
        span_ns: time from the first start to the last end, with which a replay is compared.
    """
    if job.measurement.profiled_step_ns:
        return job
    measurement = msgspec.structs.replace(job.measurement, profiled_step_ns=span_ns)
    return msgspec.structs.replace(job, measurement=measurement)


def with_blocks(job: Job, memory: MemoryHistory, node: dict[int, int], place: I64) -> Job:
    """Return the job with the log of the memory blocks that the step allocated or freed.

    Args:
        job: the job so far.
        memory: the blocks.
        node: host event -> future node responsible for its allocations and frees.
        place: index in the graph of each future node, int64[n].
    """
    if memory.blocks is None:
        return job
    node_of = {index: int(place[number]) for index, number in node.items()}
    log = memory.blocks.log(memory.events, memory.peak_reserved_bytes, node_of)
    if job.inference is not None:
        log = _with_kv_cache(log)
    measurement = msgspec.structs.replace(job.measurement, memory=log)
    return msgspec.structs.replace(job, measurement=measurement)


def _with_kv_cache(log: MemoryLog) -> MemoryLog:
    """Return the log of a forward with the class of the KV cache.

    A repeated forward drops its outputs, so only the KV cache outlives the step. A block that the
    step frees but did not allocate is a cache that a longer one replaces.
    """
    blocks = log.blocks
    columns = zip(blocks.memory_class, blocks.allocated_at, blocks.freed_at, strict=True)
    classes = tuple(
        int(MemoryClass.KV_CACHE)
        if allocated < 0 or (freed < 0 and memory_class == MemoryClass.ACTIVATIONS)
        else memory_class
        for memory_class, allocated, freed in columns
    )
    return msgspec.structs.replace(
        log, blocks=msgspec.structs.replace(blocks, memory_class=classes)
    )


_AXES = ("tp", "cp", "dp", "pp")


def groups_of(distributed: Distributed | None) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a trace describes."""
    groups = distributed.groups if distributed else ()
    return tuple(ProcessGroup(group.description or group.name, group.ranks) for group in groups)


def with_world(job: Job, distributed: Distributed | None) -> Job:
    """Return the job with the run's world and rank, and its groups assigned to axes.

    Axes are the groups of the rank that form evenly spaced lines. Without any, the world has one
    axis called "world"; the part that no group spans is called "other".

    Args:
        job: of one rank, with its groups.
        distributed: the run that the trace records; None if it records none.
    """
    if distributed is None or distributed.size < 2 or job.world.size > 1:
        return job
    world = World(_axes(distributed, job.groups))
    groups = tuple(
        msgspec.structs.replace(
            group, axis=axis_of(group.ranks, world, distributed.rank, group.name)
        )
        if distributed.rank in group.ranks
        else group
        for group in job.groups
    )
    return msgspec.structs.replace(job, world=world, rank=distributed.rank, groups=groups)


def _axes(distributed: Distributed, groups: Iterable[ProcessGroup]) -> dict[str, int]:
    """Return the sizes of the axes that groups span, innermost first."""
    sizes: dict[str, int] = {}
    reach = 1
    # By stride: each axis builds on the reach of those inside it.
    for stride, count, name in sorted(_lines(distributed, groups)):
        if stride % reach:
            continue  # the line crosses several axes
        if stride > reach:
            sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = stride // reach
        sizes[name if name and name not in sizes else f"axis{len(sizes)}"] = count
        reach = stride * count
    if not sizes or distributed.size % reach:
        return {"world": distributed.size}
    if distributed.size > reach:
        sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = distributed.size // reach
    return sizes


def _lines(distributed: Distributed, groups: Iterable[ProcessGroup]) -> set[tuple[int, int, str]]:
    """Return stride, size and name of the groups that are evenly spaced lines of a grid."""
    lines: dict[tuple[int, int], str] = {}
    for group in groups:
        ranks = sorted(group.ranks)
        count = len(ranks)
        if distributed.rank not in ranks or not 1 < count < distributed.size:
            continue
        stride = ranks[1] - ranks[0]
        # The rank minus its own position along the line.
        first = distributed.rank - distributed.rank // stride % count * stride
        if ranks == list(range(first, first + count * stride, stride)):
            # torch's DeviceMesh describes the group of axis `tp` as `mesh_tp`.
            names = [axis for axis in _AXES if axis in group.name.lower().split("_")]
            lines.setdefault((stride, count), names[0] if names else "")
    return {(*line, name) for line, name in lines.items()}
