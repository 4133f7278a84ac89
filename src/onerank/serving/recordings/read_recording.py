"""Read the profiler's traces of vLLM and SGLang into the tables of a recording."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.engine_steps import EngineStep, recorded_steps
from onerank.converters.sources.kineto.link.graph_replays import (
    CapturedGraphs,
    EngineCaptures,
    RecordedGraphs,
    with_replayed_operators,
)
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.link_kernels import GpuOps, is_communication, link
from onerank.converters.sources.kineto.read.json_stream import beginning, kind_of
from onerank.converters.sources.kineto.read.kineto_trace import load_kineto
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace, pick
from onerank.ir import UNKNOWN, StringTable
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note
from onerank.serving.recordings.recording import (
    OUTSIDE,
    Link,
    RecordedFile,
    RecordedKernel,
    RecordedStep,
    Recording,
    RecordingManifest,
    Unlinked,
)

_LINKS: tuple[Link, ...] = ("operator", "CUDA graph", "launch call", "no launch")
_BY_OPERATOR, _BY_GRAPH, _BY_CALL, _NO_LAUNCH = range(len(_LINKS))

# Kernels of CUDA graphs, and kernels that engines launch themselves, have no arguments that
# identify a collective, so its name does. Names: vLLM's and SGLang's custom all-reduce, flashinfer
# and TensorRT-LLM (allreduce_fusion), symmetric memory of torch (multimem_, one_shot_), DeepEP.
_COLLECTIVE = re.compile(
    r"cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep::",
    re.IGNORECASE,
)


def recording_files(directory: Path) -> list[Path]:
    """Return the Kineto traces in a directory, by name.

    Raises:
        TraceError: the directory has no trace.
    """
    files = [
        path
        for path in sorted(directory.iterdir())
        if path.name.endswith((".json", ".json.gz")) and kind_of(beginning(path)) == "kineto"
    ]
    if not files:
        raise TraceError(
            f"{directory}: expected the profiler's traces of an engine, .json or .json.gz; found "
            "none\n  vLLM writes them to torch_profiler_dir, SGLang to SGLANG_TORCH_PROFILER_DIR",
            code="recording-empty",
        )
    return files


def read_recording(files: Sequence[Path], captures: Sequence[Path] = ()) -> Recording:
    """Read the files of a recording, one for each process of the engine, into tables.

    Files of processes without a model, such as vLLM's front end, have no steps; a note names them.

    Args:
        files: Kineto traces.
        captures: traces recorded while the engine captured its CUDA graphs: the operators of the
            replayed kernels.

    Raises:
        TraceError: a file cannot be read, no file has steps, or no capture has a graph.
    """
    recorded: list[_File] = []
    without_steps: list[TraceError] = []
    notes: list[Note] = []
    strings = StringTable()
    engine_captures = EngineCaptures(captures, strings) if captures else None
    for path in files:
        trace = load_kineto(path, strings)
        try:
            engine, steps = recorded_steps(trace)
        except TraceError as error:
            if error.code != "engine-steps-not-found":
                raise
            without_steps.append(error)
            continue
        replays = trace.gpu.correlation
        if engine_captures is not None:
            sizes = [(step.start_ns, step.content.new_tokens) for step in steps]
            captured = CapturedGraphs(engine_captures, sizes)
            trace = with_replayed_operators(trace, RecordedGraphs(None, trace.strings), captured)
            notes += captured.notes()
        recorded.append(_file_of(trace, engine, steps, replays))
    if not recorded:
        raise without_steps[0]
    rows = tuple(row for file in recorded for row in file.steps)
    notes += _notes_of_steps(files, recorded, rows)
    kernels = tuple(kernel for file in recorded for kernel in file.kernels)
    records = tuple(file.record for file in recorded)
    manifest = RecordingManifest(records, _unlinked(kernels), tuple(notes))
    return Recording(manifest, rows, kernels)


def _notes_of_steps(
    files: Sequence[Path], recorded: Sequence["_File"], rows: Sequence[RecordedStep]
) -> Iterator[Note]:
    """Yield notes on files without steps, and on steps without a kind."""
    with_steps = {file.record.file for file in recorded}
    if others := [path.name for path in files if path.name not in with_steps]:
        yield Note(
            f"{len(others)} of {len(files)} files have no engine step, as those of "
            f"processes without a model: {', '.join(others)}",
            code="engine-files-without-steps",
        )
    if unknown := sum(row.kind is None for row in rows):
        yield Note(
            f"{unknown} of {len(rows)} steps have no kind, because their annotations or frames "
            "do not name it",
            code="engine-steps-unlabelled",
        )


def _unlinked(kernels: Sequence[RecordedKernel]) -> tuple[Unlinked, ...]:
    counts, times = Counter[tuple[str, Link]](), Counter[tuple[str, Link]]()
    for row in kernels:
        if row.link != "operator":
            counts[row.name, row.link] += row.count
            times[row.name, row.link] += row.time_ns
    return tuple(
        Unlinked(name, reason, counts[name, reason], time_ns)
        for (name, reason), time_ns in times.most_common()
    )


@dataclass(frozen=True)
class _File:
    record: RecordedFile
    steps: list[RecordedStep]
    kernels: list[RecordedKernel]


@dataclass(frozen=True)
class _Operations:
    """Operations on the GPU, or operators of a CPU, n of them.

    Attributes:
        name: codes, int[n].
        operator: code of the operator's name, or UNKNOWN, int64[n].
        link: index into `_LINKS`, int64[n].
        by_graph: those that the launch of a CUDA graph started, bool[n].
        launch: id of their launch call; of a graph's operations, that of its replay, int64[n].
        step: number of the step, OUTSIDE for none, int64[n].
        start_ns: int64[n].
        time_ns: durations, int64[n].
    """

    name: I64
    operator: I64
    link: I64
    by_graph: Mask
    launch: I64
    step: I64
    start_ns: I64
    time_ns: I64


def _file_of(trace: KinetoTrace, engine: str, steps: list[EngineStep], replays: I64) -> _File:
    """Return the tables of a file.

    Args:
        trace: the recording.
        engine: its engine.
        steps: its steps.
        replays: id of the launch of each operation before `with_replayed_operators`, which gives
            each operation of a replay its own.
    """
    timeline = host_timeline(trace)
    starts = np.array([step.start_ns for step in steps], dtype=np.int64)
    if len(trace.gpu):
        gpu = link(trace, timeline)
        if not (gpu.returned_ns != UNKNOWN).any():
            raise TraceError(
                f"{trace.path}: none of {len(gpu)} GPU operations has its launch call, so no "
                "operation belongs to a step: record CPU and GPU activity together",
                code="engine-launches-missing",
            )
        launch_of = dict(zip(trace.gpu.correlation.tolist(), replays.tolist(), strict=True))
        launch = np.array([launch_of[own] for own in gpu.rows.correlation.tolist()])
        operations = _on_gpu(gpu, timeline, starts, launch)
    else:
        operations = _on_cpu(timeline, starts)
    record = _file_record(trace, engine, steps, operations)
    names = {int(code) for code in np.unique(operations.name)}
    collective = np.isin(operations.name, [c for c in names if _is_collective(trace.strings[c])])
    rows = [_step_row(step, record.file, record.rank, operations, collective) for step in steps]
    return _File(record, rows, _kernel_rows(trace, operations))


def _kernel_rows(trace: KinetoTrace, operations: _Operations) -> list[RecordedKernel]:
    """Return the operations of each step, summed by name, calling operator and kind of link."""
    keys, place = np.unique(
        np.stack([operations.step, operations.name, operations.operator, operations.link], axis=1),
        axis=0,
        return_inverse=True,
    )
    counts = np.bincount(place, minlength=len(keys)).tolist()
    times = np.zeros(len(keys), dtype=np.int64)
    # In integers: `bincount` would sum floats, and the sums are exact to the nanosecond.
    np.add.at(times, place, operations.time_ns)
    groups: list[list[int]] = keys.tolist()
    strings, file = trace.strings, trace.path.name
    return [
        RecordedKernel(
            file,
            step,
            strings[name],
            "" if operator == UNKNOWN else strings[operator],
            _LINKS[kind],
            count,
            time_ns,
        )
        for (step, name, operator, kind), count, time_ns in zip(
            groups, counts, times.tolist(), strict=True
        )
    ]


def _file_record(
    trace: KinetoTrace, engine: str, steps: list[EngineStep], operations: _Operations
) -> RecordedFile:
    """Return the file's row: its engine, rank and device, and how its operations are linked."""
    distributed, on_gpu = trace.distributed, len(trace.gpu) > 0
    outside = operations.step == OUTSIDE
    return RecordedFile(
        file=trace.path.name,
        engine=engine,
        version=trace.vllm_version,
        rank=None if distributed is None else distributed.rank,
        ranks=None if distributed is None else distributed.size,
        device=(trace.device.name if trace.device else "") if on_gpu else "cpu",
        device_type="cuda" if on_gpu else "cpu",
        memory_bytes=trace.device.memory_bytes if trace.device and on_gpu else 0,
        steps=dict(Counter(step.content.kind or "unknown" for step in steps)),
        operations={
            name: int((operations.link == number).sum())
            for number, name in enumerate(_LINKS)
            if (operations.link == number).any()
        },
        time_ns=int(operations.time_ns.sum()),
        outside=int(outside.sum()),
        outside_ns=int(operations.time_ns[outside].sum()),
    )


def _is_collective(name: str) -> bool:
    return is_communication(name) or _COLLECTIVE.search(name) is not None


def _step_row(
    step: EngineStep, file: str, rank: int | None, operations: _Operations, collective: Mask
) -> RecordedStep:
    content = step.content
    prefills, decodes = content.prefills, content.decodes
    inside = operations.step == step.number
    start, time = operations.start_ns[inside], operations.time_ns[inside]
    links = operations.link[inside]
    return RecordedStep(
        file=file,
        rank=rank,
        step=step.number,
        annotation=step.annotation,
        kind=content.kind,
        batch=content.batch,
        prefills=prefills.count if prefills else None,
        prefill_new_tokens=prefills.new_tokens if prefills else None,
        prefill_context_tokens=prefills.context_tokens if prefills else None,
        decodes=decodes.count if decodes else None,
        decode_new_tokens=decodes.new_tokens if decodes else None,
        decode_context_tokens=decodes.context_tokens if decodes else None,
        new_tokens=content.new_tokens,
        context_tokens=content.context_tokens,
        step_ns=None if step.is_last else step.end_ns - step.start_ns,
        host_ns=step.host_end_ns - step.start_ns,
        gpu_ns=int(time.sum()),
        gpu_span_ns=int((start + time).max() - start.min()) if len(start) else None,
        graph_ns=_graph_ns(operations, inside),
        collective_ns=int(operations.time_ns[inside & collective].sum()),
        operations=len(start),
        linked=int((links == _BY_OPERATOR).sum()),
        by_graph=int(operations.by_graph[inside].sum()),
    )


def _graph_ns(operations: _Operations, inside: Mask) -> int | None:
    """Return the spans of a step's replays plus its other operations; None without a replay.

    The span of the whole step would contain the time in which the GPU waits for the host.
    """
    by_graph = np.flatnonzero(inside & operations.by_graph)
    if not len(by_graph):
        return None
    _, replay = np.unique(operations.launch[by_graph], return_inverse=True)
    count = int(replay.max()) + 1
    first, last = np.full(count, np.iinfo(np.int64).max), np.zeros(count, dtype=np.int64)
    start = operations.start_ns[by_graph]
    np.minimum.at(first, replay, start)
    np.maximum.at(last, replay, start + operations.time_ns[by_graph])
    others = operations.time_ns[inside & ~operations.by_graph]
    return int((last - first).sum() + others.sum())


def _on_gpu(gpu: GpuOps, timeline: HostTimeline, starts: I64, launch: I64) -> _Operations:
    launched = gpu.returned_ns != UNKNOWN
    unlinked = np.where(gpu.by_graph, _BY_GRAPH, np.where(launched, _BY_CALL, _NO_LAUNCH))
    linked = gpu.linked & launched
    return _Operations(
        name=gpu.rows.name.astype(np.int64),
        operator=np.where(linked, pick(timeline.rows.name, gpu.operator, UNKNOWN), UNKNOWN),
        link=np.where(linked, _BY_OPERATOR, unlinked),
        by_graph=gpu.by_graph,
        launch=launch,
        # Without the launch call of an operation its step is unknown.
        step=np.where(launched, _step_of(gpu.launch_ns, starts), OUTSIDE),
        start_ns=gpu.rows.start_ns,
        time_ns=gpu.rows.duration_ns,
    )


def _on_cpu(timeline: HostTimeline, starts: I64) -> _Operations:
    rows = timeline.rows
    # The time of an operator contains that of its callees, so only outermost operators count.
    callers = timeline.operator(timeline.parent)
    chosen = np.flatnonzero(rows.is_operator & (callers < 0))
    return _Operations(
        name=rows.name[chosen].astype(np.int64),
        operator=rows.name[chosen].astype(np.int64),
        link=np.full(len(chosen), _BY_OPERATOR),
        by_graph=np.zeros(len(chosen), dtype=bool),
        launch=np.zeros(len(chosen), dtype=np.int64),
        step=_step_of(rows.start_ns[chosen], starts),
        start_ns=rows.start_ns[chosen],
        time_ns=rows.end_ns[chosen] - rows.start_ns[chosen],
    )


def _step_of(times_ns: I64, starts: I64) -> I64:
    """Return the number of the step that began last before each time; OUTSIDE before the first."""
    return np.searchsorted(starts, times_ns, side="right")
