"""The bundle of a recording: a row for the steps of equal sequences, and the trace of one of them.

A bundle is that of one rank, so it has the steps of the first rank that was recorded.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from onerank.annotate import CLASSES, characterise
from onerank.annotate.op_costs.op_classes import OpClass, classify, op_class
from onerank.converters.sources.kineto.convert_rank import convert_engine_steps
from onerank.ir import Graph
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note
from onerank.serving.bundle import Bundle, encoded_trace
from onerank.serving.recordings.recorded_experts import (
    ExpertLayer,
    unknown_experts,
    with_expert_work,
)
from onerank.serving.recordings.recorded_windows import WindowedLayers, layer_windows
from onerank.serving.recordings.recording import RecordedFile, RecordedStep, Recording
from onerank.serving.tables import KernelRow, Manifest, Part, RankMemory, StepRow, p10_median_p90

# Contexts of one row: within a factor of 2**(1/4). Each step of a decode has a longer context than
# the one before, so that a recording of a minute would have thousands of rows.
_CONTEXTS_PER_OCTAVE = 4

# Operators of engines that compute attention. Those that only write the KV cache, or schedule
# attention, have "cache" or "metadata" in their names.
_ATTENTION = re.compile(r"(?:attention|attn|mla)(?!\w*(?:cache_update|metadata|reshape_and_cache))")


@dataclass(frozen=True)
class Deployment:
    """What a recording does not contain, as far as it is given.

    Attributes:
        config: `config.json` of the model, or its directory; None if not given.
        tp: tensor-parallel size; None: 1 if the run has one rank.
    """

    config: Path | None = None
    tp: int | None = None


def bundle_of(
    recording: Recording,
    files: Sequence[Path],
    captures: Sequence[Path] = (),
    deployment: Deployment | None = None,
) -> tuple[Bundle, dict[int, bytes]]:
    """Return the bundle of a recording, and the trace of each row, from 1.

    Args:
        recording: tables of the recording.
        files: its files.
        captures: as for `read_recording`.
        deployment: what it does not contain; None: nothing of that is known.

    Raises:
        TraceError: a step cannot be converted, the configuration cannot be read, or the
            tensor-parallel size does not divide the ranks of the run.
    """
    deployment = deployment or Deployment()
    recorded = _first_rank(recording.manifest.files)
    config, tp = _config(deployment.config), _tp(deployment.tp, recorded)
    paths = {path.name: path for path in files}
    names = {file.file for file in recorded}
    steps = [row for row in recording.step_rows if row.file in names]
    # An idle step of a data-parallel engine has operations and no sequences. vLLM's last step has
    # neither, and no annotation where steps are known by frames alone.
    busy = [row for row in steps if row.gpu_ns and row.kind != "idle"]
    if not busy:
        raise TraceError(
            f"{recorded[0].file}: no step of its {len(steps)} runs an operation",
            code="engine-steps-empty",
        )
    groups = _groups(busy)
    typical = [_typical(group) for group in groups]
    experts = ExpertLayer.of(config, tp)
    windows = WindowedLayers(layer_windows(config))
    graphs = _graphs(typical, paths, captures, experts, windows)
    unknown = unknown_experts([*graphs.values()])
    rows = tuple(_row(group, step) for group, step in zip(groups, typical, strict=True))
    kernels = tuple(
        kernel
        for number, step in enumerate(typical, start=1)
        for kernel in _kernels(recording, step, graphs[number], number)
    )
    notes = (
        *recording.manifest.notes,
        *_notes(recording, recorded, rows, steps=(len(busy), len(steps))),
        *([] if unknown is None else [unknown]),
        *windows.notes(),
    )
    manifest = _manifest(recorded, config, tp, notes)
    traces = {number: encoded_trace(graph) for number, graph in graphs.items()}
    return Bundle(manifest, rows, kernels).validated(), traces


def _manifest(
    recorded: Sequence[RecordedFile],
    config: dict[str, Any],
    tp: int | None,
    notes: tuple[Note, ...],
) -> Manifest:
    """Return the manifest of the files of a rank.

    Args:
        recorded: the files.
        config: configuration of the model; {} if not given.
        tp: tensor-parallel size; None if not known.
        notes: of the bundle.
    """
    return Manifest(
        model=_model(config),
        config=config,
        tp=tp,
        layers=config.get("num_hidden_layers"),
        longest=config.get("max_position_embeddings"),
        device=recorded[0].device_text,
        device_type=recorded[0].device_type,
        source="recorded",
        memory=RankMemory(max(file.memory_bytes for file in recorded)),
        versions={file.engine: file.version for file in recorded},
        notes=notes,
        rank=recorded[0].rank,
        collectives_timed=True,
    )


def _first_rank(files: Sequence[RecordedFile]) -> list[RecordedFile]:
    """Return the files of the first rank; SGLang can write one for each kind of step."""
    first = min(file.rank or 0 for file in files)
    return [file for file in files if (file.rank or 0) == first]


def _config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    file = path / "config.json" if path.is_dir() else path
    try:
        # Not msgspec, which refuses the `Infinity` that Python writes.
        config = json.loads(file.read_bytes())
        _model(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "is no JSON object with a model_type"
        raise TraceError(
            f"{file}: {why}\n  expected the config.json of the model that the engine served",
            code="recording-config-unreadable",
        ) from None
    return config


def _model(config: Mapping[str, Any]) -> str | None:
    """Return the class of the model, or its type where a configuration names no class."""
    if not config:
        return None
    architectures = config.get("architectures") or [config["model_type"]]
    return str(architectures[0])


def _tp(given: int | None, files: Sequence[RecordedFile]) -> int | None:
    ranks = files[0].ranks
    if given is not None and ranks is not None and ranks % given:
        raise TraceError(
            f"{files[0].file}: tensor-parallel size {given} does not divide the {ranks} ranks of "
            "the run",
            code="recording-tp-indivisible",
        )
    # The recorded groups have no names, so those of several ranks may be of pipeline stages.
    return given or (1 if ranks == 1 else None)


def _groups(steps: Sequence[RecordedStep]) -> list[list[RecordedStep]]:
    """Return the steps by their sequences, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[RecordedStep]] = {}
    for row in steps:
        key = (row.kind, row.batch, row.prefills, row.prefill_new_tokens, row.decodes,
               row.decode_new_tokens, _place(row.prefill_context_tokens, row.prefills),
               _place(row.decode_context_tokens, row.decodes), row.by_graph > 0)  # fmt: skip
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def _place(context_tokens: int | None, sequences: int | None) -> int | None:
    if context_tokens is None or not sequences:
        return None
    return int(_CONTEXTS_PER_OCTAVE * log2(context_tokens / sequences + 1))


def _typical(group: Sequence[RecordedStep]) -> RecordedStep:
    """Return the step whose kernels take the median time; of two, the shorter."""
    return sorted(group, key=lambda row: row.gpu_ns)[(len(group) - 1) // 2]


def _row(group: Sequence[RecordedStep], typical: RecordedStep) -> StepRow:
    first = group[0]
    prefill_context = _median([row.prefill_context_tokens for row in group])
    decode_context = _median([row.decode_context_tokens for row in group])
    low, step_ns, high = _interval([row.step_ns for row in group])
    graph_low, graph_ns, graph_high = _interval([row.graph_ns for row in group])
    return StepRow(
        kind=first.kind,
        decodes=first.decodes,
        decode_context=_mean(decode_context, first.decodes),
        prefills=first.prefills,
        prefill_tokens=_mean(first.prefill_new_tokens, first.prefills),
        prefill_context=_mean(prefill_context, first.prefills),
        batch=first.batch,
        new_tokens=first.new_tokens,
        context_tokens=_median([row.context_tokens for row in group]),
        step_ns=step_ns,
        p10_ns=low,
        p90_ns=high,
        graph_ns=graph_ns,
        graph_low_ns=graph_low,
        graph_high_ns=graph_high,
        # That of the step whose kernels are in `kernels.parquet`.
        gpu_ns=typical.gpu_ns,
        host_ns=_median([row.host_ns for row in group]),
        peak_bytes=None,
        fits=True,
        source="recorded",
    )


def _median(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


def _mean(total: int | None, sequences: int | None) -> int | None:
    """Return tokens of each sequence; 0 of no sequences."""
    if sequences == 0:
        return 0
    return None if total is None or sequences is None else round(total / sequences)


def _interval(times_ns: Sequence[int | None]) -> tuple[int | None, int | None, int | None]:
    """Return the 10th percentile, the median and the 90th percentile; None without a time."""
    known = [time_ns for time_ns in times_ns if time_ns is not None]
    if not known:
        return None, None, None
    return p10_median_p90(known)


def _graphs(
    steps: Sequence[RecordedStep],
    paths: Mapping[str, Path],
    captures: Sequence[Path],
    experts: ExpertLayer | None,
    windows: WindowedLayers,
) -> dict[int, Graph]:
    """Return the graph of each step by its place, from 1, with the work of its kernels."""
    graphs: dict[int, Graph] = {}
    for name in dict.fromkeys(step.file for step in steps):
        places = [place for place, step in enumerate(steps, start=1) if step.file == name]
        numbers = [steps[place - 1].step for place in places]
        converted = convert_engine_steps(paths[name], numbers, captures)
        # The kernels of one call share its work, and only the operators show which these are.
        with_calls = convert_engine_steps(paths[name], numbers, captures, operators=True)
        for place, graph, detailed in zip(places, converted, with_calls, strict=True):
            step = steps[place - 1]
            worked = characterise(with_expert_work(detailed, experts))
            graphs[place] = with_work(graph, windows.with_work(worked, step), step=step)
    return dict(sorted(graphs.items()))


def with_work(graph: Graph, detailed: Graph, step: RecordedStep) -> Graph:
    """Return a step with the work that the same step with its operators has.

    Args:
        graph: the step.
        detailed: the step, converted with its operators.
        step: names the step in an error.

    Raises:
        TraceError: the kernels of both are not the same, one by one.
    """
    compute, same = np.flatnonzero(graph.compute), np.flatnonzero(detailed.compute)
    if not np.array_equal(graph.nodes.duration_ns[compute], detailed.nodes.duration_ns[same]):
        raise TraceError(
            f"{step.file}: step {step.step} has {len(compute)} operations, and {len(same)} when it "
            "is converted with its operators; their durations must be equal, one by one\n  record "
            "the step again",
            code="engine-step-contradictory",
        )
    columns: dict[str, I64] = {}
    for name in ("flops", "bytes_read", "bytes_written"):
        columns[name] = getattr(graph.nodes, name).copy()
        columns[name][compute] = getattr(detailed.nodes, name)[same]
    return graph.with_columns(**columns)


# Parts of a step ----------------------------------------------------------------------------------


def _kernels(
    recording: Recording, step: RecordedStep, graph: Graph, number: int
) -> list[KernelRow]:
    """Return the parts of a step: their times as recorded, and their work by the graph."""
    counts: dict[bool, list[int]] = {}
    for kernel in recording.kernel_rows:
        if (kernel.file, kernel.step) == (step.file, step.step):
            figures = counts.setdefault(_is_attention(kernel.name, kernel.operator), [0, 0])
            figures[0] += kernel.count
            figures[1] += kernel.time_ns
    work = {row.part: row for row in part_rows(graph, step.kind)}
    rows: list[KernelRow] = []
    for attention, (count, time_ns) in sorted(counts.items()):
        part = _part(step.kind, attention=attention)
        known = work.get(part)
        rows.append(
            KernelRow(
                number,
                None,
                part,
                count,
                time_ns,
                known.flops if known else None,
                known.bytes if known else None,
            )
        )
    return rows


def _is_attention(kernel: str, operator: str) -> bool:
    if op_class("", kernel) is OpClass.ATTENTION or op_class(operator) is OpClass.ATTENTION:
        return True
    return _ATTENTION.search(operator) is not None


def _part(kind: str | None, *, attention: bool) -> Part | None:
    """Return what the time of attention, or of all else, depends on in a step."""
    if not attention:
        return "tokens"
    parts: dict[str | None, Part] = {"prefill": "prefill_attention", "decode": "decode_attention"}
    return parts.get(kind)


def part_rows(graph: Graph, kind: str | None) -> list[KernelRow]:
    """Return the rows of a step's graph: attention, and all else; `row` is 0.

    Args:
        graph: a step of an engine.
        kind: "prefill", "decode", "mixed" or None.
    """
    graph = characterise(graph)
    compute = np.flatnonzero(graph.compute)
    attention = classify(graph, compute) == CLASSES.index(OpClass.ATTENTION)
    nodes = graph.nodes
    rows: list[KernelRow] = []
    masks: list[tuple[bool, Mask]] = [(False, ~attention), (True, attention)]
    for is_attention, mask in masks:
        index = compute[mask]
        if not len(index):
            continue
        moved = np.stack([nodes.bytes_read[index], nodes.bytes_written[index]])
        flops = nodes.flops[index]
        rows.append(
            KernelRow(
                row=0,
                module=None,
                part=_part(kind, attention=is_attention),
                kernels=len(index),
                time_ns=int(nodes.duration_ns[index].sum()),
                flops=None if (flops < 0).any() else int(flops.sum()),
                bytes=None if (moved < 0).any() else int(moved.sum()),
            )
        )
    return rows


def _notes(
    recording: Recording,
    recorded: Sequence[RecordedFile],
    rows: Sequence[StepRow],
    *,
    steps: tuple[int, int],
) -> list[Note]:
    """Return what a reader of the bundle needs to know of the recording.

    Args:
        recording: tables of the recording.
        recorded: its files of the first rank.
        rows: rows of the bundle.
        steps: number of steps of that rank that compute, and of all its steps.
    """
    notes = [
        Note(
            "times are those of an engine under a profiler, which makes the host slower; the time "
            "of a step lasts until the next one begins",
            code="recording-profiled",
        )
    ]
    ranks = {file.rank for file in recording.manifest.files}
    if len(ranks) > 1:
        rank = recorded[0].rank or 0
        notes.append(
            Note(
                f"the bundle has the steps of rank {rank} of {len(ranks)} recorded ranks",
                code="recording-first-rank",
            )
        )
    busy, count = steps
    if busy < count:
        notes.append(
            Note(
                f"{count - busy} of {count} steps compute nothing and have no row, such as vLLM's "
                "after its last request",
                code="recording-idle-steps",
            )
        )
    unknown = sum(not row.is_composed for row in rows)
    if unknown:
        notes.append(
            Note(
                f"{unknown} of {len(rows)} rows have no context or number of sequences, because "
                "the recording lacks it, or compute several tokens for each decode: they are not "
                "interpolated",
                code="recording-sequences-unknown",
            )
        )
    return notes
