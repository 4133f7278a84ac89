"""Lower a Kineto trace and its execution trace to a graph."""

from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from onerank.converters.kineto.adopt import adopt_record_ids
from onerank.converters.kineto.alone import alone_durations
from onerank.converters.kineto.assemble import assemble
from onerank.converters.kineto.device import GpuOp, link, waits
from onerank.converters.kineto.host import HostTimeline, attribute
from onerank.converters.kineto.load import (
    HOST_CATEGORIES,
    DeviceProperties,
    EtNode,
    ExecutionTrace,
    KinetoTrace,
    load_execution_trace,
    load_kineto,
)
from onerank.converters.kineto.memory import Memory, activations, memory
from onerank.converters.kineto.observed import with_attention
from onerank.converters.kineto.repeats import median_of
from onerank.converters.kineto.report import Conversion
from onerank.ir import Device, Graph, Job
from onerank.ir.errors import TraceError

JOB = "job.json"
PROFILE = "profile.json.gz"
ALONE = "alone.json.gz"
STRUCTURE = "structure.json.gz"
EXECUTION_TRACE = "et.json.gz"


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of one rank's capture.

    Attributes:
        kineto: Kineto trace recorded together with `et`.
        et: execution trace of the same window.
        profiles: Kineto traces of like steps without the execution trace observer, whose times
            are truer; of several, each node gets the median.
        alone: Kineto trace of a step in which no communication held the GPU, where `profiles` have
            stand-ins that did; None when there is none.
    """

    kineto: Path
    et: Path
    profiles: tuple[Path, ...] = ()
    alone: Path | None = None


def profile_name(number: int) -> str:
    """Return the name of the file that a capture keeps of its profiled step `number`, from 0."""
    return PROFILE if number == 0 else PROFILE.replace(".", f".{number}.", 1)


def convert(sources: Sources, job: Job | None = None) -> tuple[Graph, Conversion]:
    """Link the traces and lower them to a graph.

    Args:
        sources: files of the capture.
        job: what is known of the job; groups found in the traces are added.

    Raises:
        TraceError: a file cannot be read, or the two do not belong together.
    """
    structure = load_kineto(sources.kineto)
    et = load_execution_trace(sources.et)
    job = job or Job()
    if not sources.profiles:
        return _lower(structure, et, sources, job, sources.kineto.name)
    steps: list[tuple[Graph, Conversion]] = []
    unlike: list[str] = []
    for path in sources.profiles:
        trace, difference = adopt_record_ids(load_kineto(path), structure)
        if trace is structure:
            unlike.append(f"{path.name}: {difference}")
            continue
        graph, report = _lower(trace, et, sources, job, path.name)
        report.notes.extend([difference] if difference else [])
        steps.append((graph, report))
    graph, report = (
        median_of(steps) if steps else _lower(structure, et, sources, job, sources.kineto.name)
    )
    report.notes.extend(unlike)
    return graph, report


def _lower(
    trace: KinetoTrace, et: ExecutionTrace, sources: Sources, job: Job, timing: str
) -> tuple[Graph, Conversion]:
    """Lower one window's trace, its host events joined with the execution trace."""
    timeline = HostTimeline(e for e in trace.events if e.cat in HOST_CATEGORIES and e.ph == "X")
    _join(timeline, et, sources)
    attribute(timeline)
    gpu = link(trace.events, timeline)
    used = memory(trace.events, timeline, on_gpu=bool(gpu))
    held = activations(trace.events, timeline, on_gpu=bool(gpu))
    job = _with_memory(_with_device(job, trace, on_gpu=bool(gpu)), used, held, on_gpu=bool(gpu))
    job = with_attention(_with_busy_time(job, gpu), timeline)
    alone, unpaired = {}, 0
    if sources.alone is not None:
        alone, unpaired = alone_durations(timeline, gpu, load_kineto(sources.alone))
    graph, report = assemble(
        timeline=timeline,
        gpu=gpu,
        waits=waits(trace.events),
        memory=used,
        alone=alone,
        job=job,
        timing=timing,
        et_path=str(sources.et),
    )
    if unpaired:
        report.notes.append(
            f"{unpaired} GPU operations have no partner in the window without communication: how "
            "long they take alone is not known"
        )
    return graph, report


def convert_directory(directory: Path) -> tuple[Graph, Conversion]:
    """Lower the files that a capture keeps in a directory.

    Raises:
        TraceError: the directory holds no capture, or a file cannot be read or linked.
    """
    try:
        job = msgspec.json.decode((directory / JOB).read_bytes(), type=Job)
    except (OSError, msgspec.DecodeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f"{directory}: expected the files of `capture run --keep-raw`; {JOB}: {found}"
        ) from error
    sources = Sources(
        kineto=directory / STRUCTURE,
        et=directory / EXECUTION_TRACE,
        profiles=tuple(directory / profile_name(number) for number in range(_repeats(directory))),
        alone=directory / ALONE if (directory / ALONE).exists() else None,
    )
    return convert(sources, job)


def _repeats(directory: Path) -> int:
    """Return how many profiled steps a directory holds; one at least, for the error it gives."""
    return next(n for n in count(1) if not (directory / profile_name(n)).exists())


def _join(timeline: HostTimeline, et: ExecutionTrace, sources: Sources) -> None:
    """Give every host event its execution trace node, by record id."""
    nodes: dict[int, EtNode] = {}
    for node in et.nodes:
        if rf_id := node.attribute("rf_id"):
            nodes[rf_id] = node
    operators = [op for op in timeline if op.is_operator]
    both = f"{sources.kineto} and {sources.et}"
    if not operators:
        raise TraceError(f"{sources.kineto}: holds no operator: profile with the CPU activity on")
    if not any(op.args_rf_id for op in operators):
        raise TraceError(
            f"{both} cannot be linked: the Kineto trace has no `Record function id` on any of its "
            f"{len(operators)} operators. Record both in one window: start an "
            "ExecutionTraceObserver inside torch.profiler.profile()"
        )
    same, other = 0, Counter[tuple[str, str]]()
    for op in timeline:
        node = nodes.get(op.args_rf_id)
        if node is None:
            continue
        if node.name == op.name:
            same += 1
            op.et = node
        else:
            other[op.name, node.name] += 1
    if same == 0 or sum(other.values()) > same // 10:
        example = ""
        if other:
            (mine, theirs), _ = other.most_common(1)[0]
            example = f" (for example {mine!r} against {theirs!r})"
        raise TraceError(
            f"{both} are of different runs: of the {same + sum(other.values())} record ids they "
            f"share, {sum(other.values())} name different operators{example}. "
            "Give the two files of one window"
        )


def _with_device(job: Job, trace: KinetoTrace, *, on_gpu: bool) -> Job:
    """Take the device from the trace where the job does not name one."""
    if job.device.type:
        return job
    if not on_gpu:
        return msgspec.structs.replace(job, device=Device(type="cpu"))
    properties = trace.device_properties
    first = properties[0] if isinstance(properties, list) and properties else DeviceProperties()
    device = Device("cuda", first.name, first.memory_bytes, first.sm_count)
    return msgspec.structs.replace(job, device=device)


def _with_busy_time(job: Job, gpu: list[GpuOp]) -> Job:
    """Add the time in which anything ran on the GPU, what emulates communication included."""
    busy, until = 0, 0
    for op in sorted(gpu, key=lambda op: op.start_ns):
        end = op.start_ns + op.duration_ns
        busy += max(0, end - max(op.start_ns, until))
        until = max(until, end)
    measurement = msgspec.structs.replace(job.measurement, gpu_busy_ns=busy)
    return msgspec.structs.replace(job, measurement=measurement)


def _with_memory(job: Job, used: Memory, held: tuple[int, ...], *, on_gpu: bool) -> Job:
    """Add what each micro-batch held, and the peak where the allocator did not tell it.

    On a GPU the events carry the allocator's total; on a CPU they tell the rise above what was
    live when the window began, which is the peak only when the job knows that figure.
    """
    measurement = msgspec.structs.replace(job.measurement, activation_bytes=held)
    if measurement.peak_memory_bytes:
        return msgspec.structs.replace(job, measurement=measurement)
    if on_gpu:
        peak = used.peak_total_bytes
    else:
        start = measurement.start_memory_bytes
        peak = start + used.peak_rise_bytes if start else 0
    measurement = msgspec.structs.replace(measurement, peak_memory_bytes=peak)
    return msgspec.structs.replace(job, measurement=measurement)
