"""What a trace adds to what is known of its job."""

from collections.abc import Iterable

import msgspec

from onerank.converters.kineto.columns import I64, KinetoTrace
from onerank.converters.kineto.communication import Communication
from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.memory import Memory
from onerank.converters.kineto.rows import DeviceProperties
from onerank.ir import Device, Job, ProcessGroup
from onerank.ir.spans import covered_ns


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
    busy = covered_ns(start_ns, start_ns + gpu.rows.duration_ns)
    measurement = msgspec.structs.replace(job.measurement, gpu_busy_ns=busy)
    return msgspec.structs.replace(job, measurement=measurement)


def with_memory(job: Job, used: Memory, held: tuple[int, ...], *, on_gpu: bool) -> Job:
    """Add what each micro-batch held, and start and peak where the allocator did not tell them.

    On a GPU the events carry the allocator's total; on a CPU they tell the rise above what was
    live when the window began, which is the peak only when the job knows that figure.
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
    """Take the time from the first start to the last end where the job tells of no step's.

    A replay is held against it.
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
