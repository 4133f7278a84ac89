"""Convert one rank's Kineto trace and execution trace to a graph: all steps, in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from onerank.converters.sources.kineto.engine_steps import EngineStep, find_steps
from onerank.converters.sources.kineto.gloo import GlooCalls, find_gloo_calls
from onerank.converters.sources.kineto.link.et_join import join
from onerank.converters.sources.kineto.link.graph_replays import (
    CapturedGraphs,
    EngineCaptures,
    RecordedGraphs,
    with_replayed_operators,
)
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.launch_queue import launch_queue
from onerank.converters.sources.kineto.link.link_kernels import (
    GpuOps,
    link,
    with_unattributed_launches,
)
from onerank.converters.sources.kineto.link.module_phase import (
    assign_phases,
    attribute,
    attribute_grad_reductions,
    with_attention,
)
from onerank.converters.sources.kineto.link.sync_events import synchronizations
from onerank.converters.sources.kineto.lowering.build_graph import LinkedTrace, assemble
from onerank.converters.sources.kineto.lowering.diagnostics import (
    Conversion,
    device_notes,
    of_unread,
    overlap_notes,
)
from onerank.converters.sources.kineto.memory_events import (
    History,
    MemoryHistory,
    activations,
    differing_steps,
    join_memory,
    read_history,
)
from onerank.converters.sources.kineto.profiled_steps import (
    copy_record_ids,
    drop_unknown_calls,
    merge_steps,
    with_uncontended_times,
)
from onerank.converters.sources.kineto.read.execution_trace import (
    load_execution_trace,
    no_execution_trace,
)
from onerank.converters.sources.kineto.read.kineto_trace import (
    ALL,
    ProfilerStep,
    choose,
    cut,
    load_kineto,
    steps,
)
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace, KinetoTrace
from onerank.converters.sources.kineto.shape_inference.recorded_shapes import use_profiler_shapes
from onerank.converters.sources.kineto.trace_job import (
    groups_of,
    of_step,
    with_busy_time,
    with_device,
    with_host_overhead,
    with_memory,
    with_world,
)
from onerank.ir import Graph, InferenceStep, Job, StringTable
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

SHAPES_ONLY = "model"
"""Type of the device of a step that ran on shapes alone."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Files of one rank's capture.

    Attributes:
        kineto: Kineto trace recorded together with `et`.
        et: execution trace of the same window. If None, the graph of a GPU trace has only GPU
            operations, and operators have no shapes.
        profiles: Kineto traces of equal steps, recorded without the execution trace observer, which
            give the times; with several, each node gets the median.
        histories: the allocator's history of each of these steps, or of the step of `kineto` if
            there are none; the files may be missing.
        uncontended: Kineto trace of a step without emulated collectives on the GPU, which gives
            uncontended kernel times; None if `profiles` have no emulated collectives.
        operators: whether to keep the operators of a GPU trace without `et`.
        graphs: directory with the recordings of CUDA graphs; None without any.
        captures: Kineto traces recorded while an engine captured its CUDA graphs.
    """

    kineto: Path
    et: Path | None = None
    profiles: tuple[Path, ...] = ()
    histories: tuple[Path, ...] = ()
    uncontended: Path | None = None
    operators: bool = False
    graphs: Path | None = None
    captures: tuple[Path, ...] = ()


def convert(
    sources: Sources, job: Job | None = None, *, step: str = ALL
) -> tuple[Graph, Conversion]:
    """Link the traces and lower them to a graph.

    Args:
        sources: files of the capture.
        job: the job so far; device, groups, world and memory of the traces are added.
        step: number of a step of the trace, "median", or "all" for the whole trace.

    Raises:
        TraceError: a file cannot be read, the two do not belong together, or there is no such step.
    """
    strings = StringTable()
    graphs = RecordedGraphs(sources.graphs, strings)
    # Profiled windows get their record ids by pairing host events, so launches outside operators
    # become host events only where the structure window gives the times itself.
    window = _read(
        sources.kineto,
        graphs,
        step,
        calls=not sources.profiles,
        operands=sources.et is None,
        captures=sources.captures,
    )
    et = no_execution_trace()
    if sources.et is not None:
        rf_ids = window.timeline.rows.rf_id
        recorded = rf_ids[rf_ids != 0]
        et = load_execution_trace(sources.et, strings, recorded if len(recorded) else None)
        et = graphs.with_execution_traces(et)
    capture = _Capture(sources, et, graphs)
    job = job or Job()
    if window.inference is not None:
        job = msgspec.structs.replace(job, inference=window.inference)
    if sources.profiles:
        graph, report = _convert_profiles(capture, window, job)
    else:
        graph, report = _lower(window, capture, job, capture.history(0))
        report.notes.extend(window.notes)
    report.notes.extend(graphs.notes())
    return graph, report


def _convert_profiles(
    capture: "_Capture", structure: "_Window", job: Job
) -> tuple[Graph, Conversion]:
    """Lower each profiled step with the execution trace of `structure`, and merge the graphs.

    The structure gives the times only if no profiled step runs the same operators.
    """
    measured: list[tuple[Graph, Conversion]] = []
    mismatched: list[Note] = []
    spread = 0.0
    # Times come from windows without the execution trace observer: with it a CPU operator takes 111
    # us longer, under Kineto alone 3 to 6 us.
    for number, path in enumerate(capture.sources.profiles):
        profile = _read(path, capture.graphs)
        rf_id, difference = copy_record_ids(profile.timeline, structure.timeline)
        if rf_id is None:
            if difference is not None:
                mismatched.append(difference.at(path.name))
            continue
        profile.timeline.rows.rf_id[:] = rf_id
        unknown = drop_unknown_calls(profile.timeline)
        graph, report = _lower(profile, capture, of_step(job, number), capture.history(number))
        sizes, size_spread = differing_steps(profile.trace.memory, structure.trace.memory)
        spread = max(spread, size_spread)
        report.notes.extend([unknown] if unknown else [])
        mismatched += [note for note in (difference, sizes) if note and note not in mismatched]
        measured.append((graph, report))
    if measured:
        graph, report = merge_steps(measured)
    else:
        graph, report = _lower(structure, capture, job)
    return with_host_overhead(_with_mismatch(graph, mismatched, spread)), report


def convert_engine_steps(
    file: Path, numbers: Sequence[int], captures: Sequence[Path] = (), *, operators: bool = False
) -> Iterator[Graph]:
    """Yield the graphs of steps of a recorded engine, whose file is read once.

    Args:
        file: Kineto trace.
        numbers: steps, from 1.
        captures: as of `Sources`.
        operators: as of `Sources`.

    Raises:
        TraceError: as for `convert`.
    """
    strings = StringTable()
    graphs = RecordedGraphs(None, strings)
    trace = load_kineto(file, strings, operands=True)
    engine_steps = find_steps(trace)
    captured = EngineCaptures(captures, strings) if captures else None
    for number in numbers:
        window = _window(trace, graphs, str(number), engine_steps, captured, calls=True)
        job = Job()
        if window.inference is not None:
            job = msgspec.structs.replace(job, inference=window.inference)
        sources = Sources(file, captures=tuple(captures), operators=operators)
        yield _lower(window, _Capture(sources, no_execution_trace(), graphs), job)[0]


def _with_mismatch(graph: Graph, notes: list[Note], spread: float) -> Graph:
    """Record in the graph's measurement that its times belong to other shapes.

    Args:
        graph: the converted graph.
        notes: stored in the graph, so that every command that reads it repeats them.
        spread: |ln| of the ratio of memory that the steps with times and with shapes used.
    """
    measured = graph.job.measurement
    measured = msgspec.structs.replace(
        measured,
        notes=(*measured.notes, *notes),
        input_spread=max(measured.input_spread, spread),
    )
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


@dataclass(frozen=True, slots=True)
class _Window:
    """A trace, or one of its steps.

    Attributes:
        trace: the trace without its host events.
        timeline: the host events.
        notes: on dropped steps.
        inference: what the step of an engine computes; None if not recorded.
    """

    trace: KinetoTrace
    timeline: HostTimeline
    notes: list[Note]
    inference: InferenceStep | None


@dataclass(frozen=True, slots=True)
class _Capture:
    """What all windows of a rank's capture share.

    Attributes:
        sources: its files.
        et: the execution trace; without nodes if the rank has no such file.
        graphs: recordings of the CUDA graphs that the windows replay.
    """

    sources: Sources
    et: ExecutionTrace
    graphs: RecordedGraphs

    def history(self, number: int) -> History | None:
        """Return the allocator's history of a profiled step; None if not recorded."""
        return read_history(self.sources.histories[number]) if self.sources.histories else None


def _read(
    path: Path,
    graphs: RecordedGraphs,
    step: str = ALL,
    *,
    calls: bool = False,
    operands: bool = False,
    captures: tuple[Path, ...] = (),
) -> _Window:
    """Read a trace, or one of its steps.

    Args:
        path: the file.
        graphs: recordings of the CUDA graphs that the trace replays.
        step: as for `convert`.
        calls: whether launches outside operators become host events.
        operands: whether to read the operands that the profiler recorded.
        captures: as of `Sources`.
    """
    trace = load_kineto(path, graphs.strings, operands=operands)
    engine_steps = find_steps(trace) if step != ALL or captures else []
    captured = EngineCaptures(captures, graphs.strings) if captures else None
    return _window(trace, graphs, step, engine_steps, captured, calls=calls)


def _window(
    trace: KinetoTrace,
    graphs: RecordedGraphs,
    step: str,
    engine_steps: Sequence[EngineStep],
    captures: EngineCaptures | None,
    *,
    calls: bool,
) -> _Window:
    """Return a loaded trace, or one of its steps; arguments as of `_read`."""
    path, notes, inference = trace.path, list[Note](), None
    if step != ALL:
        available = [ProfilerStep(each.number, each.start_ns, each.end_ns) for each in engine_steps]
        chosen = choose(path, available or steps(trace), step)
        trace, notes = cut(trace, chosen)
        if engine_steps:
            # Engine steps are numbered from 1.
            inference = engine_steps[chosen.number - 1].content.inference(chosen.number)
    captured = None
    if captures is not None:
        sizes = [(each.start_ns, each.content.new_tokens) for each in engine_steps]
        captured = CapturedGraphs(captures, sizes)
    trace = with_replayed_operators(trace, graphs, captured)
    if captured is not None:
        notes += captured.notes()
    timeline = host_timeline(trace)
    if calls:
        trace, timeline = with_unattributed_launches(trace, timeline)
    # The timeline has its own, ordered copy of the host events: keep only one in memory.
    return _Window(replace(trace, host=trace.host.take(slice(0))), timeline, notes, inference)


def _lower(
    window: _Window, capture: _Capture, job: Job, history: History | None = None
) -> tuple[Graph, Conversion]:
    """Join one window's host events with the execution trace, and lower the window to a graph.

    Args:
        window: the window.
        capture: the capture that it belongs to.
        job: the job so far.
        history: the allocator's history of the step; None if not recorded.

    Raises:
        TraceError: the traces cannot be joined, or nothing in them computes.
    """
    trace, timeline, sources = window.trace, window.timeline, capture.sources
    et, join_notes = _attribute_operators(timeline, capture)
    gpu = link(trace, timeline)
    on_gpu = len(gpu) > 0
    if sources.et is None and not on_gpu and not timeline.rows.is_operator.any():
        raise TraceError(
            f"{sources.kineto}: has neither operators nor GPU operations: profile with "
            "ProfilerActivity.CPU and, on a GPU, ProfilerActivity.CUDA",
            code="trace-empty",
        )
    job, usage = _measured_job(window, gpu, job, history)
    gpu, uncontended_notes = _read_uncontended_times(gpu, window, capture)
    graph, report = assemble(
        LinkedTrace(
            timeline=timeline,
            gpu=gpu,
            gloo=GlooCalls()
            if on_gpu
            else find_gloo_calls(timeline, et, groups_of(trace.distributed)),
            waits=synchronizations(trace),
            queue=launch_queue(trace),
            memory=usage,
            timing=trace.path.name,
            et=et,
        ),
        job,
        with_operators=sources.et is not None or sources.operators or not on_gpu,
    )
    if not len(graph):
        raise TraceError(
            f"{sources.kineto}: nothing computes: all {report.host_ops} operators are views or "
            "allocations, and nothing ran on a GPU; profile a whole step",
            code="trace-no-compute",
        )
    graph = replace(graph, job=with_world(graph.job, trace.distributed))
    report.notes.extend(
        [
            *join_notes,
            *_notes_of_gloo(timeline, on_gpu=on_gpu),
            *of_unread(trace, et),
            *([usage.note] if usage.note else []),
            *device_notes(gpu),
            *overlap_notes(trace.path, timeline, gpu),
            *uncontended_notes,
        ]
    )
    return graph, report


def _measured_job(
    window: _Window, gpu: GpuOps, job: Job, history: History | None
) -> tuple[Job, MemoryHistory]:
    """Return the job with what the window measures of it, and the window's use of memory.

    Arguments are those of `_lower`, and the window's GPU operations.
    """
    trace, timeline, on_gpu = window.trace, window.timeline, len(gpu) > 0
    # A step on shapes alone has the memory of a GPU, but no kernels.
    in_gpu_memory = on_gpu or job.device.type == SHAPES_ONLY
    usage = join_memory(trace.memory, timeline, history, on_gpu=in_gpu_memory)
    activation_bytes = activations(trace.memory, timeline, on_gpu=in_gpu_memory)
    job = with_device(job, trace, on_gpu=on_gpu)
    job = with_memory(job, usage, activation_bytes, on_gpu=in_gpu_memory)
    return with_attention(with_busy_time(job, gpu), timeline), usage


def _attribute_operators(
    timeline: HostTimeline, capture: _Capture
) -> tuple[ExecutionTrace, list[Note]]:
    """Give a window's operators their records, modules, phases and shapes.

    Returns:
        The execution trace as joined, and notes on the join.
    """
    et, notes = capture.et, list[Note]()
    has_records = capture.sources.et is not None
    if has_records:
        et, notes = join(timeline, et, capture.sources.kineto)
    # In this order: phases need the modules, and gradient reductions need the phases.
    attribute(timeline, et.tid)
    assign_phases(timeline, et.tid)
    attribute_grad_reductions(timeline, et)
    if not has_records:
        use_profiler_shapes(timeline)
    return et, notes


def _notes_of_gloo(timeline: HostTimeline, *, on_gpu: bool) -> list[Note]:
    calls = int(timeline.is_run.sum())
    if not (on_gpu and calls):
        return []
    text = f"{calls} calls by Gloo are dropped: only CPU traces have them"
    return [Note(text, code="gloo-calls-dropped")]


def _read_uncontended_times(
    gpu: GpuOps, window: _Window, capture: _Capture
) -> tuple[GpuOps, list[Note]]:
    """Return the GPU operations with their times without emulated collectives, and a note.

    Kernels that emulate collectives slow the others, as NCCL's do. Times without that slowdown need
    a window in which they only leave markers.
    """
    path = capture.sources.uncontended
    if path is None:
        return gpu, []
    trace = with_replayed_operators(load_kineto(path, window.trace.strings), capture.graphs)
    gpu, unpaired = with_uncontended_times(window.timeline, gpu, trace)
    if not unpaired:
        return gpu, []
    text = (
        f"the uncontended time of {unpaired} GPU operations is unknown: the window without "
        "communication lacks them"
    )
    return gpu, [Note(text, code="uncontended-time-unknown")]
