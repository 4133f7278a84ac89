"""Tables of a recording of vLLM or SGLang: the steps of the engine and their kernels.

They are the directory `recording` of the recording's bundle:

recording.json        files of the recording, and what could not be linked
compositions.parquet  one row per file and batch of equal size: medians and percentiles
steps.parquet         one row per step and file
kernels.parquet       one row per step, file, kernel and operator

Columns named as in the tables of a bundle have the same meaning.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
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
from onerank.converters.sources.kineto.read.schema import KinetoTrace, pick
from onerank.ir import UNKNOWN, StringTable
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note
from onerank.ir.output_files import write_tables
from onerank.serving.tables import data_frame

if TYPE_CHECKING:
    import polars as pl

RECORDING = "recording"
"""Directory of the tables in the recording's bundle."""

MANIFEST, COMPOSITIONS = "recording.json", "compositions.parquet"
STEPS, KERNELS = "steps.parquet", "kernels.parquet"

# Percentiles of the ends of an 80% interval, as in a bundle.
_LOW, _HIGH = 10, 90

Link = Literal["operator", "CUDA graph", "launch call", "no launch"]
"""Link of an operation on the GPU.

operator     it was launched by this operator, in the recording or in that of a CUDA graph's capture
CUDA graph   it was replayed by a CUDA graph whose capture is not recorded or not certain
launch call  it was launched by a call outside of any operator
no launch    the trace has no launch of it
"""

_LINKS: tuple[Link, ...] = ("operator", "CUDA graph", "launch call", "no launch")
_BY_OPERATOR, _BY_GRAPH, _BY_CALL, _NO_LAUNCH = range(len(_LINKS))

OUTSIDE = 0
"""Step of operations that were launched before the first step, or have no recorded launch."""

# Kernels of CUDA graphs, and kernels that engines launch themselves, have no arguments that
# identify a collective, so its name does. Names: vLLM's and SGLang's custom all-reduce, flashinfer
# and TensorRT-LLM (allreduce_fusion), symmetric memory of torch (multimem_, one_shot_), DeepEP.
_COLLECTIVE = re.compile(
    r"cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep::",
    re.IGNORECASE,
)


class RecordedStep(msgspec.Struct, frozen=True):
    """A row of `steps.parquet`: a step of the engine on one rank.

    Attributes:
        file: name of the file.
        rank: rank of the file, None if not recorded.
        step: number in the file, from 1.
        annotation: the engine's annotation, or a Python frame.
        kind: "prefill", "decode", "mixed" or "idle"; None if not recorded, as all columns down to
            `context_tokens`.
        batch: sequences of the step.
        prefills: sequences that compute tokens of their prompt.
        prefill_new_tokens: tokens that they compute, summed.
        prefill_context_tokens: their tokens in the KV cache before the step, summed.
        decodes: sequences that have output already.
        decode_new_tokens: as for prefills; more than one for each if they are speculative.
        decode_context_tokens: as for prefills.
        new_tokens: tokens that the step computes.
        context_tokens: tokens in the KV cache before the step.
        step_ns: from the start of the step to that of the next; None for the last one.
        host_ns: time that the host spends in the annotation.
        gpu_ns: summed operations on the GPU; on a CPU, operators.
        gpu_span_ns: from the start of the first operation to the end of the last; None without one.
        graph_ns: spans of the replays of CUDA graphs, plus the other operations; None without one.
        collective_ns: of `gpu_ns`, kernels of collectives, by their names.
        operations: operations on the GPU; on a CPU, operators.
        linked: of these, linked to an operator.
        by_graph: of these, started by the launch of a CUDA graph.
    """

    file: str
    rank: int | None
    step: int
    annotation: str
    kind: str | None
    batch: int | None
    prefills: int | None
    prefill_new_tokens: int | None
    prefill_context_tokens: int | None
    decodes: int | None
    decode_new_tokens: int | None
    decode_context_tokens: int | None
    new_tokens: int | None
    context_tokens: int | None
    step_ns: int | None
    host_ns: int
    gpu_ns: int
    gpu_span_ns: int | None
    graph_ns: int | None
    collective_ns: int
    operations: int
    linked: int
    by_graph: int


class RecordedKernel(msgspec.Struct, frozen=True):
    """A row of `kernels.parquet`: equal kernels of a step.

    Attributes:
        file: name of the file.
        step: number of the step in the file; 0 outside of all steps.
        name: name of the kernel, memcpy or memset; on a CPU, of the operator.
        operator: innermost operator that launched it; "" if not linked to one.
        link: what it is linked to.
        count: number of operations.
        time_ns: their summed durations.
    """

    file: str
    step: int
    name: str
    operator: str
    link: Link
    count: int
    time_ns: int


class RecordedComposition(msgspec.Struct, frozen=True):
    """A row of `compositions.parquet`: the steps of a file with the same sequences and new tokens.

    Times are medians over the steps; of `step_ns` over those that another step follows.

    Attributes:
        file: name of the file.
        kind: as in `steps.parquet`, like the four columns after it.
        batch: sequences.
        prefills: sequences.
        decodes: sequences.
        new_tokens: tokens that a step computes.
        steps: number of steps.
        context_low: the least of their context tokens; None if not recorded.
        context_high: the most of their context tokens; None if not recorded.
        step_ns: as in `steps.parquet`; None if no step follows any.
        p10_ns: 10th percentile of `step_ns`.
        p90_ns: 90th percentile of `step_ns`.
        host_ns: as in `steps.parquet`.
        gpu_ns: as in `steps.parquet`.
        gpu_p10_ns: 10th percentile of `gpu_ns`.
        gpu_p90_ns: 90th percentile of `gpu_ns`.
        gpu_span_ns: as in `steps.parquet`.
    """

    file: str
    kind: str | None
    batch: int | None
    prefills: int | None
    decodes: int | None
    new_tokens: int | None
    steps: int
    context_low: int | None
    context_high: int | None
    step_ns: int | None
    p10_ns: int | None
    p90_ns: int | None
    host_ns: int
    gpu_ns: int
    gpu_p10_ns: int
    gpu_p90_ns: int
    gpu_span_ns: int | None


class RecordedFile(msgspec.Struct, frozen=True):
    """A file of a recording.

    Attributes:
        file: its name.
        engine: "vLLM" or "SGLang".
        version: version of the engine; "" if not recorded.
        rank: rank of the file; None if not recorded.
        ranks: ranks of the run; None if not recorded.
        device: name of the GPU, "a GPU" if not recorded; "cpu" if no operation ran on a GPU.
        memory_bytes: memory of the GPU; 0 if not recorded.
        steps: number of steps by kind; steps without a kind are "unknown".
        operations: operations on the GPU, or operators, by link.
        time_ns: their summed durations.
        outside: of these operations, those outside of all steps.
        outside_ns: summed durations of those.
    """

    file: str
    engine: str
    version: str
    rank: int | None
    ranks: int | None
    device: str
    memory_bytes: int
    steps: dict[str, int]
    operations: dict[str, int]
    time_ns: int
    outside: int
    outside_ns: int


class Unlinked(msgspec.Struct, frozen=True):
    """Kernels of a name that are not linked to an operator.

    Attributes:
        name: name of the kernel.
        link: what they are linked to.
        count: number of kernels.
        time_ns: their summed durations.
    """

    name: str
    link: Link
    count: int
    time_ns: int


class RecordingManifest(msgspec.Struct, frozen=True):
    """Files of a recording, and the kernels without an operator.

    Attributes:
        files: its files.
        unlinked: kernels that are not linked to an operator, by name; the longest first.
        notes: statements on the quality of the recording.
    """

    files: tuple[RecordedFile, ...]
    unlinked: tuple[Unlinked, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class RecordingRecord:
    """A recording without the kernels of each step.

    Attributes:
        manifest: its files, and the kernels without an operator.
        compositions: the steps, by their sequences and new tokens.
        steps: the steps.
    """

    manifest: RecordingManifest
    compositions: tuple[RecordedComposition, ...]
    steps: tuple[RecordedStep, ...]


@dataclass(frozen=True)
class Recording:
    """Tables of a recording.

    Attributes:
        manifest: its files, and the kernels without an operator.
        step_rows: the steps.
        kernel_rows: what ran in them.
    """

    manifest: RecordingManifest
    step_rows: tuple[RecordedStep, ...]
    kernel_rows: tuple[RecordedKernel, ...]

    @property
    def record(self) -> RecordingRecord:
        """The steps, without their kernels."""
        return RecordingRecord(self.manifest, self.composition_rows, self.step_rows)

    @cached_property
    def composition_rows(self) -> tuple[RecordedComposition, ...]:
        """The steps of each file, by their sequences and new tokens, in the order of the first."""
        groups: dict[tuple[object, ...], list[RecordedStep]] = {}
        for row in self.step_rows:
            key = row.file, row.kind, row.batch, row.prefills, row.decodes, row.new_tokens
            groups.setdefault(key, []).append(row)
        return tuple(_composition(rows) for rows in groups.values())

    @property
    def compositions(self) -> "pl.DataFrame":
        """The steps by their sequences and new tokens, as a table."""
        return data_frame(self.composition_rows, RecordedComposition)

    @property
    def steps(self) -> "pl.DataFrame":
        """The steps as a table."""
        return data_frame(self.step_rows, RecordedStep)

    @property
    def kernels(self) -> "pl.DataFrame":
        """What ran in the steps, as a table."""
        return data_frame(self.kernel_rows, RecordedKernel)

    def write(self, directory: Path) -> None:
        """Write the tables to a new directory.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir()
        write_tables(
            {
                directory / COMPOSITIONS: self.compositions,
                directory / STEPS: self.steps,
                directory / KERNELS: self.kernels,
            }
        )
        manifest = msgspec.json.format(msgspec.json.encode(self.manifest))
        (directory / MANIFEST).write_bytes(manifest)


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
        recorded.append(_read(trace, engine, steps, replays))
    if not recorded:
        raise without_steps[0]
    if without_steps:
        with_steps = {file.record.file for file in recorded}
        names = ", ".join(path.name for path in files if path.name not in with_steps)
        notes.append(
            Note(
                f"{len(without_steps)} of {len(files)} files have no engine step, as those of "
                f"processes without a model: {names}",
                code="engine-files-without-steps",
            )
        )
    rows = tuple(row for file in recorded for row in file.steps)
    unknown = sum(row.kind is None for row in rows)
    if unknown:
        notes.append(
            Note(
                f"{unknown} of {len(rows)} steps have no kind, because their annotations or frames "
                "do not name it",
                code="engine-steps-unlabelled",
            )
        )
    kernels = tuple(kernel for file in recorded for kernel in file.kernels)
    records = tuple(file.record for file in recorded)
    manifest = RecordingManifest(records, _unlinked(kernels), tuple(notes))
    return Recording(manifest, rows, kernels)


def _composition(rows: Sequence[RecordedStep]) -> RecordedComposition:
    first = rows[0]
    contexts = [row.context_tokens for row in rows if row.context_tokens is not None]
    between = [row.step_ns for row in rows if row.step_ns is not None]
    spans = [row.gpu_span_ns for row in rows if row.gpu_span_ns is not None]
    gpu_low, gpu_ns, gpu_high = _percentiles([row.gpu_ns for row in rows])
    low, step_ns, high = _percentiles(between) if between else (None, None, None)
    return RecordedComposition(
        file=first.file,
        kind=first.kind,
        batch=first.batch,
        prefills=first.prefills,
        decodes=first.decodes,
        new_tokens=first.new_tokens,
        steps=len(rows),
        context_low=min(contexts, default=None),
        context_high=max(contexts, default=None),
        step_ns=step_ns,
        p10_ns=low,
        p90_ns=high,
        host_ns=_percentiles([row.host_ns for row in rows])[1],
        gpu_ns=gpu_ns,
        gpu_p10_ns=gpu_low,
        gpu_p90_ns=gpu_high,
        gpu_span_ns=_percentiles(spans)[1] if spans else None,
    )


def _percentiles(times_ns: Sequence[int]) -> tuple[int, int, int]:
    """Return the lower end of the interval, the median and the upper end."""
    low, median, high = np.percentile(times_ns, (_LOW, 50, _HIGH))
    return round(low), round(median), round(high)


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


def _read(trace: KinetoTrace, engine: str, steps: list[EngineStep], replays: I64) -> _File:
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
    strings, file = trace.strings, trace.path.name
    distributed = trace.distributed
    rank = None if distributed is None else distributed.rank
    names = {int(code) for code in np.unique(operations.name)}
    collective = np.isin(operations.name, [c for c in names if _is_collective(strings[c])])
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
    kernels = [
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
    rows = [_row(step, file, rank, operations, collective) for step in steps]
    outside = operations.step == OUTSIDE
    record = RecordedFile(
        file=file,
        engine=engine,
        version=trace.vllm_version,
        rank=rank,
        ranks=None if distributed is None else distributed.size,
        device=((trace.device and trace.device.name) or "a GPU") if len(trace.gpu) else "cpu",
        memory_bytes=trace.device.memory_bytes if trace.device and len(trace.gpu) else 0,
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
    return _File(record, rows, kernels)


def _is_collective(name: str) -> bool:
    return is_communication(name) or _COLLECTIVE.search(name) is not None


def _row(
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
        prefills=prefills and prefills.count,
        prefill_new_tokens=prefills and prefills.new_tokens,
        prefill_context_tokens=prefills and prefills.context_tokens,
        decodes=decodes and decodes.count,
        decode_new_tokens=decodes and decodes.new_tokens,
        decode_context_tokens=decodes and decodes.context_tokens,
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
