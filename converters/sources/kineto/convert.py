"""Convert one rank's Kineto trace and execution trace to a graph: all steps, in order."""

from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec

from onerank.converters.sources.kineto.collectives.gloo import GlooCalls, find_gloo_calls
from onerank.converters.sources.kineto.link.et_join import join
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.kernel_launches import link, with_unattributed_launches
from onerank.converters.sources.kineto.link.module_phase import (
    assign_phases,
    attribute,
    attribute_grad_reductions,
    with_attention,
)
from onerank.converters.sources.kineto.lowering.build_graph import LinkedTrace, assemble
from onerank.converters.sources.kineto.lowering.diagnostics import (
    Conversion,
    of_unread,
    overlap_notes,
)
from onerank.converters.sources.kineto.memory_events import activations, differing_steps, memory
from onerank.converters.sources.kineto.profiled_steps import (
    copy_record_ids,
    leave_out_unknown_calls,
    merge_steps,
    with_uncontended_times,
)
from onerank.converters.sources.kineto.read.allocator_history import History, read_history
from onerank.converters.sources.kineto.read.execution_trace import (
    load_execution_trace,
    no_execution_trace,
)
from onerank.converters.sources.kineto.read.kineto_trace import ALL, choose, cut, load_kineto
from onerank.converters.sources.kineto.read.schema import ExecutionTrace, KinetoTrace
from onerank.converters.sources.kineto.shape_inference.recorded_shapes import use_profiler_shapes
from onerank.converters.sources.kineto.sync.launch_queue import launch_queue
from onerank.converters.sources.kineto.sync.sync_events import synchronizations
from onerank.converters.sources.kineto.trace_job import (
    groups_of,
    of_step,
    with_busy_time,
    with_device,
    with_host_overhead,
    with_memory,
    with_world,
)
from onerank.ir import Graph, Job, StringTable
from onerank.ir.errors import TraceError

JOB = "job.json"

PROFILE = "profile.json.gz"

UNCONTENDED = "uncontended.json.gz"

STRUCTURE = "structure.json.gz"

EXECUTION_TRACE = "et.json.gz"

HISTORY = "memory.json"


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of one rank's capture.

    Attributes:
        kineto: Kineto trace recorded together with `et`.
        et: execution trace of the same window. If None, a GPU trace gives only GPU operations, and
            operators have no shapes.
        profiles: Kineto traces of equal steps without the execution trace observer, which give the
            times; with several, each node gets the median.
        histories: the allocator's history of the same steps; files may be absent.
        alone: Kineto trace of an uncontended step, if emulated collectives occupied the GPU in
            `profiles`; None without one.
        operators: whether a GPU trace keeps its operators although there is no `et`.
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
    alone = not sources.profiles
    structure, observed, cut_off = _read(
        sources.kineto, strings, step, calls=alone, operands=sources.et is None
    )
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
        rf_id, difference = copy_record_ids(timeline, observed)
        if rf_id is None:
            unlike.append(f"{path.name}: {difference}")
            continue
        timeline.rows.rf_id[:] = rf_id
        unknown = leave_out_unknown_calls(timeline)
        history = read_history(sources.histories[number]) if sources.histories else None
        graph, report = _lower(trace, timeline, et, sources, of_step(job, number), history=history)
        sizes = differing_steps(trace.memory, structure.memory)
        report.notes.extend(note for note in (difference, unknown, sizes) if note)
        steps.append((graph, report))
    if steps:
        graph, report = merge_steps(steps)
    else:
        graph, report = _lower(structure, observed, et, sources, job)
    report.notes.extend(unlike)
    return with_host_overhead(graph), report


def _read(
    path: Path,
    strings: StringTable,
    step: str = ALL,
    *,
    calls: bool = False,
    operands: bool = False,
) -> tuple[KinetoTrace, HostTimeline, list[str]]:
    """Return a trace, its host events (which are in memory once), and what was cut off.

    With `calls` the launches outside of operators are among the host events; with `operands` these
    have theirs, as the profiler recorded them.
    """
    trace = load_kineto(path, strings, operands=operands)
    notes: list[str] = []
    chosen = choose(trace, step)
    if chosen is not None:
        trace, note = cut(trace, chosen)
        notes.append(note)
    timeline = host_timeline(trace)
    if calls:
        trace, timeline = with_unattributed_launches(trace, timeline)
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
        et, notes = join(timeline, et, sources.kineto)
    attribute(timeline, et.tid)
    assign_phases(timeline, et.tid)
    attribute_grad_reductions(timeline, et)
    if sources.et is None:
        use_profiler_shapes(timeline)
    gpu = link(trace, timeline)
    on_gpu = len(gpu) > 0
    if sources.et is None and not on_gpu and not timeline.rows.is_operator.any():
        raise TraceError(
            f"{sources.kineto}: holds neither operators nor GPU operations: profile with the "
            "activities CPU and, on a GPU, CUDA",
            code="trace-empty",
        )
    used = memory(trace.memory, timeline, history, on_gpu=on_gpu)
    held = activations(trace.memory, timeline, on_gpu=on_gpu)
    job = with_memory(with_device(job, trace, on_gpu=on_gpu), used, held, on_gpu=on_gpu)
    job = with_attention(with_busy_time(job, gpu), timeline)
    unpaired = 0
    if sources.alone is not None:
        other = load_kineto(sources.alone, trace.strings)
        gpu, unpaired = with_uncontended_times(timeline, gpu, other)
    linked = LinkedTrace(
        timeline=timeline,
        gpu=gpu,
        gloo=GlooCalls() if on_gpu else find_gloo_calls(timeline, et, groups_of(trace.distributed)),
        waits=synchronizations(trace),
        queue=launch_queue(trace),
        memory=used,
        timing=trace.path.name,
        et=et,
    )
    graph, report = assemble(
        linked,
        job,
        with_operators=sources.et is not None or sources.operators or not on_gpu,
    )
    if not len(graph):
        raise TraceError(
            f"{sources.kineto}: nothing in it computes: its {report.host_ops} operators are views "
            "and allocations, and nothing ran on a GPU; profile a whole step",
            code="trace-no-compute",
        )
    graph = replace(graph, job=with_world(graph.job, trace.distributed))
    report.notes.extend(notes)
    if on_gpu and (left_out := int(timeline.is_run.sum())):
        report.notes.append(f"{left_out} calls by Gloo are left out: with a GPU they are no nodes")
    report.notes.extend(of_unread(trace, et))
    if used.note:
        report.notes.append(used.note)
    report.notes.extend(overlap_notes(trace.path, timeline, gpu))
    if unpaired:
        report.notes.append(
            f"{unpaired} GPU operations have no partner in the window without communication: how "
            "long they take alone is not known"
        )
    return graph, report


def is_capture(directory: Path) -> bool:
    """Whether a directory holds the files of one rank's capture, with or without its job."""
    return (directory / JOB).exists() or (directory / STRUCTURE).exists()


def convert_directory(directory: Path) -> tuple[Graph, Conversion]:
    """Lower the files that a capture keeps in a directory.

    Raises:
        TraceError: the directory holds no capture, or a file cannot be read or linked.
    """
    job, missing_job = _read_job(directory)
    steps = range(_repeats(directory))
    sources = Sources(
        kineto=directory / STRUCTURE,
        et=directory / EXECUTION_TRACE,
        profiles=tuple(directory / profile_name(number) for number in steps),
        histories=tuple(directory / history_name(number) for number in steps),
        alone=directory / UNCONTENDED if (directory / UNCONTENDED).exists() else None,
    )
    graph, report = convert(sources, job)
    report.notes.extend(missing_job)
    return graph, report


def _read_job(directory: Path) -> tuple[Job, list[str]]:
    """Return the job of a capture, and a note if its file is missing."""
    path = directory / JOB
    # Traces are passed on without the job too: the Kineto trace names world, groups and device.
    if not path.exists() and is_capture(directory):
        return Job(), [
            f"{directory} has no {JOB}: world, groups and device come from the Kineto trace; the "
            "time of a step without the profiler is unknown"
        ]
    try:
        return msgspec.json.decode(path.read_bytes(), type=Job), []
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f"{directory}: expected the files of `capture run --raw-dir`; {JOB}: {reason}",
            code="raw-directory-incomplete",
        ) from error


def _repeats(directory: Path) -> int:
    """Return how many profiled steps a directory holds; one at least, for the error it gives."""
    return next(n for n in count(1) if not (directory / profile_name(n)).exists())
