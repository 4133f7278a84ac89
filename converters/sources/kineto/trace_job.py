"""What a trace adds to the job: device, process groups, step time, memory, host overhead.

The host overhead needs two measurements without a profiler: the host time of a step that began with
an idle GPU, like the profiled step; and the time of a step in steady state. The first gives the
factor on host times with which the graph reproduces it. The second gives what the replayed
steady-state step lacks.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from onerank.converters.sources.kineto.collectives.communication import Communication
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps
from onerank.converters.sources.kineto.memory_events import Memory
from onerank.converters.sources.kineto.read.schema import (
    I64,
    DeviceProperties,
    Distributed,
    KinetoTrace,
)
from onerank.ir import Device, Graph, HostOverhead, Job, Kind, Measurement, ProcessGroup, World
from onerank.ir.arrays import union_duration_ns
from onerank.ir.job.world import axis_of
from onerank.ir.replay.steady_state import replay_without_profiler
from onerank.ir.replay.steady_state import with_step_time as with_step_time_trace_job

HOST = (0.2, 1.2)

"""The factor is looked for between these."""

CLOSE = 0.001

"""Of the time that the factor is to give."""

TRIES = 8


def with_host_overhead(graph: Graph) -> Graph:
    """Return the graph with its `Measurement.host_overhead`, if the job has what it is made of."""
    measurement = graph.job.measurement
    if not (measurement.host_step_ns and measurement.profiled_host_ns and measurement.step_ns):
        return graph
    if not (graph.mask(Kind.HOST_OP).any() and graph.gpu_compute.any()):
        return graph
    step_ns = round(statistics.median(measurement.step_ns))
    overhead = _host_overhead(graph, measurement)
    notes = measurement.notes
    if overhead.host_factor in HOST:
        notes += (
            f"the host took {statistics.median(measurement.host_step_ns):.0f} ns a step without "
            f"the profiler and {measurement.profiled_host_ns[0]} ns under it, which no factor "
            f"from {HOST[0]} to {HOST[1]} on its own times explains: the nearest is taken",
        )
    measurement = msgspec.structs.replace(measurement, host_overhead=overhead, notes=notes)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return with_step_time_trace_job(replace(graph, job=job), step_ns)


def _host_overhead(graph: Graph, measurement: Measurement) -> HostOverhead:
    inter_step_host_ns = max(measurement.profiled_host_ns[0] - _host_span(graph, 1.0), 0)

    def host_ns(factor: float) -> float:
        return _host_span(graph, factor) + factor * inter_step_host_ns

    # One that waits for its GPU takes no longer for being slower: the slowest such is taken.
    shortest = host_ns(HOST[0]) * (1 + 2 * CLOSE)
    host = _factor(host_ns, max(statistics.median(measurement.host_step_ns), shortest), HOST)
    return HostOverhead(round(host, 3), round(host * inter_step_host_ns), 0)


def _factor(
    time_ns: Callable[[float], float], wanted_ns: float, within: tuple[float, float]
) -> float:
    """Return the factor that gives a time which grows with it, or the end of the range next to it.

    Regula falsi, the Illinois way.
    """
    low, high = within
    below, above = time_ns(low) - wanted_ns, time_ns(high) - wanted_ns
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    moved, factor = 0, low
    for _ in range(TRIES):
        factor = (low * above - high * below) / (above - below)
        off = time_ns(factor) - wanted_ns
        if abs(off) <= CLOSE * wanted_ns:
            break
        if off > 0:
            high, above, below = factor, off, below / 2 if moved > 0 else below
            moved = 1
        else:
            low, below, above = factor, off, above / 2 if moved < 0 else above
            moved = -1
    return factor


def _host_span(graph: Graph, factor: float) -> int:
    """Return the time from the host's first operator to its last, which begins with the GPU."""
    times = replay_without_profiler(graph, factor).schedule()
    host = graph.mask(Kind.HOST_OP)
    return int(times.end_ns[host].max() - times.start_ns[host].min())


def of_step(job: Job, number: int) -> Job:
    """Return the job with the times of its profiled step `number`, where each step's are known."""
    measurement = job.measurement
    steps, hosts = measurement.profiled_steps_ns, measurement.profiled_host_ns
    if number < len(steps):
        measurement = msgspec.structs.replace(
            measurement, profiled_step_ns=steps[number], profiled_steps_ns=()
        )
    own = hosts[number : number + 1]
    measurement = msgspec.structs.replace(measurement, profiled_host_ns=own)
    return msgspec.structs.replace(job, measurement=measurement)


def with_device(job: Job, trace: KinetoTrace, *, on_gpu: bool) -> Job:
    """Take the device from the trace where the job does not name one."""
    if job.device.type:
        return job
    if not on_gpu:
        return msgspec.structs.replace(job, device=Device(type="cpu"))
    first = trace.device or DeviceProperties()
    device = Device("cuda", first.name, first.memory_bytes, first.sm_count)
    return msgspec.structs.replace(job, device=device)


def with_busy_time(job: Job, gpu: GpuOps) -> Job:
    """Add the time in which anything ran on the GPU, what emulates communication included."""
    start_ns = gpu.rows.start_ns
    busy = union_duration_ns(start_ns, start_ns + gpu.rows.duration_ns)
    measurement = msgspec.structs.replace(job.measurement, gpu_busy_ns=busy)
    return msgspec.structs.replace(job, measurement=measurement)


def with_memory(job: Job, used: Memory, held: tuple[int, ...], *, on_gpu: bool) -> Job:
    """Add activation bytes, and start and peak if the allocator did not record them.

    On a GPU, memory events carry the allocator's total. On a CPU they show the rise above the level
    at the start of the window, which gives the peak only if the job knows that level.
    """
    measurement = msgspec.structs.replace(job.measurement, activation_bytes=held)
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
    """Add the groups that calls name and the job does not know."""
    known = {group.name: group for group in job.groups}
    for call in calls:
        if call.group and call.group not in known and call.group_ranks:
            known[call.group] = ProcessGroup(call.group, call.group_ranks)
    return msgspec.structs.replace(job, groups=tuple(known.values()))


def with_step_time(job: Job, span_ns: int) -> Job:
    """Use the time from the first start to the last end if the job has no step time.

    A replay is compared with it.
    """
    if job.measurement.profiled_step_ns:
        return job
    measurement = msgspec.structs.replace(job.measurement, profiled_step_ns=span_ns)
    return msgspec.structs.replace(job, measurement=measurement)


def with_blocks(job: Job, memory: Memory, node: dict[int, int], place: I64) -> Job:
    """Add what the step did with memory, block by block.

    Args:
        job: the job so far.
        memory: the blocks.
        node: host event -> node that answers for what it allocated or freed.
        place: number of each node in the graph.
    """
    if memory.blocks is None:
        return job
    node_of = {index: int(place[number]) for index, number in node.items()}
    log = memory.blocks.log(memory.events, memory.peak_reserved_bytes, node_of)
    measurement = msgspec.structs.replace(job.measurement, memory=log)
    return msgspec.structs.replace(job, measurement=measurement)


_AXES = ("tp", "cp", "dp", "pp")


def groups_of(told: Distributed | None) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a trace describes."""
    groups = told.groups if told else ()
    return tuple(ProcessGroup(one.description or one.name, one.ranks) for one in groups)


def with_world(job: Job, told: Distributed | None) -> Job:
    """Return the job with the run's world and rank, and its groups assigned to axes.

    Axes are the groups of the rank that form evenly spaced lines. Without any, the world has one
    axis called "world"; the part that no group spans is called "other".

    Args:
        job: of one rank, with its groups.
        told: the run that the trace records.
    """
    if told is None or told.size < 2 or job.world.size > 1:
        return job
    world = World(_axes(told, job.groups))
    groups = tuple(
        msgspec.structs.replace(group, axis=axis_of(group.ranks, world, told.rank, group.name))
        if told.rank in group.ranks
        else group
        for group in job.groups
    )
    return msgspec.structs.replace(job, world=world, rank=told.rank, groups=groups)


def _axes(told: Distributed, groups: Iterable[ProcessGroup]) -> dict[str, int]:
    """Return the sizes of the axes that groups span, innermost first."""
    sizes: dict[str, int] = {}
    reach = 1
    for stride, count, name in sorted(_lines(told, groups)):
        if stride % reach:
            continue  # within several axes
        if stride > reach:
            sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = stride // reach
        sizes[name if name and name not in sizes else f"axis{len(sizes)}"] = count
        reach = stride * count
    if not sizes or told.size % reach:
        return {"world": told.size}
    if told.size > reach:
        sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = told.size // reach
    return sizes


def _lines(told: Distributed, groups: Iterable[ProcessGroup]) -> set[tuple[int, int, str]]:
    """Return stride, size and name of the groups that are evenly spaced lines of a grid."""
    found: dict[tuple[int, int], str] = {}
    for group in groups:
        ranks = sorted(group.ranks)
        count = len(ranks)
        if told.rank not in ranks or not 1 < count < told.size:
            continue
        stride = ranks[1] - ranks[0]
        first = told.rank - told.rank // stride % count * stride
        if ranks == list(range(first, first + count * stride, stride)):
            said = [axis for axis in _AXES if axis in group.name.lower().split("_")]
            found.setdefault((stride, count), said[0] if said else "")
    return {(*line, name) for line, name in found.items()}
