"""Lower a Kineto trace and its execution trace to a graph."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from onerank.converters.kineto.adopt import adopt_record_ids
from onerank.converters.kineto.align import LEAST_FITTING, align
from onerank.converters.kineto.alone import with_time_alone
from onerank.converters.kineto.assemble import assemble
from onerank.converters.kineto.columns import ExecutionTrace, KinetoTrace, last_of
from onerank.converters.kineto.device import GpuOps, link
from onerank.converters.kineto.gloo import Runs, gloo_runs
from onerank.converters.kineto.history import History, read_history
from onerank.converters.kineto.host import HostTimeline, attribute, host_timeline
from onerank.converters.kineto.launch_queue import launch_queue
from onerank.converters.kineto.load import load_execution_trace, load_kineto, no_execution_trace
from onerank.converters.kineto.memory import Memory, activations, differing_steps, memory
from onerank.converters.kineto.observed import with_attention
from onerank.converters.kineto.outside import with_calls
from onerank.converters.kineto.overlaps import overlap_notes
from onerank.converters.kineto.phases import settle_phases
from onerank.converters.kineto.repeats import median_of
from onerank.converters.kineto.report import Conversion
from onerank.converters.kineto.rows import DeviceProperties
from onerank.converters.kineto.steps import ALL, choose, cut
from onerank.converters.kineto.waits import waits
from onerank.converters.kineto.world import groups_of, with_world
from onerank.ir import Device, Graph, Job, StringTable
from onerank.ir.errors import TraceError

JOB = "job.json"
PROFILE = "profile.json.gz"
ALONE = "alone.json.gz"
STRUCTURE = "structure.json.gz"
EXECUTION_TRACE = "et.json.gz"
HISTORY = "memory.json"

LEAST_FITTING_OTHER_RUN = 0.99
"""Share of the operators that must fit by order where record ids tell of two runs."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of one rank's capture.

    Attributes:
        kineto: Kineto trace recorded together with `et`.
        et: execution trace of the same window; None leaves a GPU trace its GPU operations alone,
            and the operators without shapes.
        profiles: Kineto traces of like steps without the execution trace observer, whose times
            are truer; of several, each node gets the median.
        histories: the allocator's own account of the same steps; a file need not be there.
        alone: Kineto trace of a step in which no communication held the GPU, where `profiles` have
            stand-ins that did; None when there is none.
        operators: whether a GPU trace keeps its operators though there is no `et`.
    """

    kineto: Path
    et: Path | None = None
    profiles: tuple[Path, ...] = ()
    histories: tuple[Path, ...] = ()
    alone: Path | None = None
    operators: bool = False


def profile_name(number: int) -> str:
    """Return the name of the file that a capture keeps of its profiled step `number`, from 0."""
    return _numbered(PROFILE, number)


def history_name(number: int) -> str:
    """Return the name of the file with the allocator's history of that step."""
    return _numbered(HISTORY, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else name.replace(".", f".{number}.", 1)


def convert(
    sources: Sources, job: Job | None = None, *, step: str = ALL
) -> tuple[Graph, Conversion]:
    """Link the traces and lower them to a graph.

    Args:
        sources: files of the capture.
        job: what is known of the job; groups found in the traces are added.
        step: the number of one of the trace's steps, "median", or "all" for the whole trace.

    Raises:
        TraceError: a file cannot be read, the two do not belong together, or there is no such step.
    """
    strings = StringTable()
    structure, observed, cut_off = _read(sources.kineto, strings, step, calls=not sources.profiles)
    et = no_execution_trace()
    if sources.et is not None:
        recorded = observed.rows.rf_id[observed.rows.rf_id != 0]
        et = load_execution_trace(sources.et, strings, recorded if len(recorded) else None)
    job = job or Job()
    if not sources.profiles:
        graph, report = _lower(structure, observed, et, sources, job)
        report.notes.extend(cut_off)
        return graph, report
    steps: list[tuple[Graph, Conversion]] = []
    unlike: list[str] = []
    for number, path in enumerate(sources.profiles):
        trace, timeline, _ = _read(path, strings)
        rf_id, difference = adopt_record_ids(timeline, observed)
        if rf_id is None:
            unlike.append(f"{path.name}: {difference}")
            continue
        timeline.rows.rf_id[:] = rf_id
        history = read_history(sources.histories[number]) if sources.histories else None
        graph, report = _lower(trace, timeline, et, sources, _of_step(job, number), history=history)
        sizes = differing_steps(trace.memory, structure.memory)
        report.notes.extend(note for note in (difference, sizes) if note)
        steps.append((graph, report))
    if steps:
        graph, report = median_of(steps)
    else:
        graph, report = _lower(structure, observed, et, sources, job)
    report.notes.extend(unlike)
    return graph, report


def _of_step(job: Job, number: int) -> Job:
    """Return the job with the time of its profiled step `number`, where each step's is known."""
    steps = job.measurement.profiled_steps_ns
    if number >= len(steps):
        return job
    measurement = msgspec.structs.replace(
        job.measurement, profiled_step_ns=steps[number], profiled_steps_ns=()
    )
    return msgspec.structs.replace(job, measurement=measurement)


def _read(
    path: Path, strings: StringTable, step: str = ALL, *, calls: bool = False
) -> tuple[KinetoTrace, HostTimeline, list[str]]:
    """Return a trace, its host events (which are in memory once), and what was cut off.

    With `calls` the launches outside of operators are among the host events.
    """
    trace = load_kineto(path, strings)
    notes: list[str] = []
    chosen = choose(trace, step)
    if chosen is not None:
        trace, note = cut(trace, chosen)
        notes.append(note)
    timeline = host_timeline(trace)
    if calls:
        trace, timeline = with_calls(trace, timeline)
    return replace(trace, host=trace.host.take(slice(0))), timeline, notes


def _lower(
    trace: KinetoTrace,
    timeline: HostTimeline,
    et: ExecutionTrace,
    sources: Sources,
    job: Job,
    *,
    history: History | None = None,
) -> tuple[Graph, Conversion]:
    """Lower one window's trace, its host events joined with the execution trace."""
    notes: list[str] = []
    if sources.et is not None:
        et, notes = _join(timeline, et, sources)
    attribute(timeline, et.tid)
    settle_phases(timeline, et.tid)
    gpu = link(trace, timeline)
    on_gpu = len(gpu) > 0
    if sources.et is None and not on_gpu and not timeline.rows.is_operator.any():
        raise TraceError(
            f"{sources.kineto}: holds neither operators nor GPU operations: profile with the "
            "activities CPU and, on a GPU, CUDA"
        )
    used = memory(trace.memory, timeline, history, on_gpu=on_gpu)
    held = activations(trace.memory, timeline, on_gpu=on_gpu)
    job = _with_memory(_with_device(job, trace, on_gpu=on_gpu), used, held, on_gpu=on_gpu)
    job = with_attention(_with_busy_time(job, gpu), timeline)
    unpaired = 0
    if sources.alone is not None:
        other = load_kineto(sources.alone, trace.strings)
        gpu, unpaired = with_time_alone(timeline, gpu, other)
    graph, report = assemble(
        timeline=timeline,
        gpu=gpu,
        gloo=Runs() if on_gpu else gloo_runs(timeline, et, groups_of(trace.distributed)),
        waits=waits(trace),
        queue=launch_queue(trace),
        memory=used,
        job=job,
        timing=trace.path.name,
        et=et,
        with_operators=sources.et is not None or sources.operators or not on_gpu,
    )
    if not len(graph):
        raise TraceError(
            f"{sources.kineto}: nothing in it computes: its {report.host_ops} operators are views "
            "and allocations, and nothing ran on a GPU; profile a whole step"
        )
    graph = replace(graph, job=with_world(graph.job, trace.distributed))
    report.notes.extend(notes)
    if on_gpu and (left_out := int(timeline.is_run.sum())):
        report.notes.append(f"{left_out} calls by Gloo are left out: with a GPU they are no nodes")
    if et.without_caller:
        report.notes.append(
            f"{et.path.name}: the callers of {et.without_caller} nodes are not in the file; these "
            "count as called by nobody"
        )
    if trace.lost_run:
        report.notes.append(
            "distributedInfo is left out: it tells no rank within a world (rank, world_size)"
        )
    if trace.unread:
        told = ", ".join(f"{count} of category {cat!r}" for cat, count in trace.unread.items())
        report.notes.append(f"events of unknown categories are left out: {told}")
    if used.note:
        report.notes.append(used.note)
    report.notes.extend(overlap_notes(trace.path, timeline, gpu))
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
    steps = range(_repeats(directory))
    sources = Sources(
        kineto=directory / STRUCTURE,
        et=directory / EXECUTION_TRACE,
        profiles=tuple(directory / profile_name(number) for number in steps),
        histories=tuple(directory / history_name(number) for number in steps),
        alone=directory / ALONE if (directory / ALONE).exists() else None,
    )
    return convert(sources, job)


def _repeats(directory: Path) -> int:
    """Return how many profiled steps a directory holds; one at least, for the error it gives."""
    return next(n for n in count(1) if not (directory / profile_name(n)).exists())


def _join(
    timeline: HostTimeline, et: ExecutionTrace, sources: Sources
) -> tuple[ExecutionTrace, list[str]]:
    """Give every host event its execution trace node, by record id, else by order.

    Returns:
        The execution trace, read whole where record ids did not help, and sentences a reader
        should know.
    """
    rows = timeline.rows
    operators = int(rows.is_operator.sum())
    both = f"{sources.kineto} and {sources.et}"
    if not operators:
        raise TraceError(f"{sources.kineto}: holds no operator: profile with the CPU activity on")
    if not rows.rf_id[rows.is_operator].any():
        why = f"the Kineto trace has no `Record function id` on any of its {operators} operators"
        what = f"{both} cannot be linked: {why}"
        return _join_by_order(timeline, et, why, what, LEAST_FITTING)
    found = last_of(et.rf_id, rows.rf_id)
    known = found >= 0
    same = known.copy()
    same[known] = et.name[found[known]] == rows.name[known]
    other = np.flatnonzero(known & ~same)
    if not same.any() or len(other) > int(same.sum()) // 10:
        example = ""
        if len(other):
            strings = timeline.strings
            pairs = zip(rows.name[other].tolist(), et.name[found[other]].tolist(), strict=True)
            (mine, theirs), _ = Counter(pairs).most_common(1)[0]
            example = f" (for example {strings[mine]!r} against {strings[theirs]!r})"
        why = (
            f"of the {known.sum()} record ids they share, {len(other)} name different "
            f"operators{example}"
        )
        what = f"{both} are of different runs: {why}"
        return _join_by_order(timeline, et, why, what, LEAST_FITTING_OTHER_RUN)
    timeline.et = np.where(same, found, -1)
    return et, []


def _join_by_order(
    timeline: HostTimeline, et: ExecutionTrace, why: str, what: str, least: float
) -> tuple[ExecutionTrace, list[str]]:
    """Give host events execution trace nodes by the order of operators, if that fits.

    Args:
        timeline: the host events.
        et: the execution trace.
        why: why record ids do not join them.
        what: what an error begins with.
        least: share of the operators that must fit.

    Raises:
        TraceError: too few operators fit.
    """
    rows, share = align(timeline, et)
    operators = int(timeline.rows.is_operator.sum())
    fitted = int((timeline.rows.is_operator & (rows >= 0)).sum())
    if share < least:
        raise TraceError(
            f"{what}. By the order of operators only {fitted} of {operators} ({share:.1%}) fit, "
            f"expected {least:.0%}. Record both in one window: start an ExecutionTraceObserver "
            "inside torch.profiler.profile()"
        )
    timeline.et = rows
    if not et.whole:  # operands were kept by record ids
        et = load_execution_trace(et.path, timeline.strings)
    return et, [
        f"aligned with the execution trace by the order of operators per thread, since {why}: "
        f"{fitted} of {operators} operators ({share:.2%}) fitted"
    ]


def _with_device(job: Job, trace: KinetoTrace, *, on_gpu: bool) -> Job:
    """Take the device from the trace where the job does not name one."""
    if job.device.type:
        return job
    if not on_gpu:
        return msgspec.structs.replace(job, device=Device(type="cpu"))
    first = trace.device or DeviceProperties()
    device = Device("cuda", first.name, first.memory_bytes, first.sm_count)
    return msgspec.structs.replace(job, device=device)


def _with_busy_time(job: Job, gpu: GpuOps) -> Job:
    """Add the time in which anything ran on the GPU, what emulates communication included."""
    order = np.argsort(gpu.rows.start_ns, kind="stable")
    start = gpu.rows.start_ns[order]
    until = np.maximum.accumulate(start + gpu.rows.duration_ns[order])
    before = np.concatenate([start[:1], until[:-1]])
    busy = int(np.maximum(until - np.maximum(start, before), 0).sum())
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
