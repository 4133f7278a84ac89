"""Data of a bundle's report: times, throughput and energy of steps by batch and context."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

import msgspec
import numpy as np

from onerank.analysis.report_data import RooflinePoints
from onerank.annotate import Gpu, find_gpu, recost
from onerank.annotate.energy import StepDurations, report_energy
from onerank.ir.chakra import read
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note
from onerank.serving.bundle import Bundle
from onerank.serving.tables import StepRow

MOST_CURVES = 10
"""Curves of a chart; those with the most points are kept."""


class CurvePoint(msgspec.Struct, frozen=True):
    """A step on a curve.

    Attributes:
        x: size that differs along the curve.
        y: figure of the step.
        low: lower end of its 80% interval; None if not known.
        high: upper end.
        label: sequences of the step.
    """

    x: int
    y: float
    low: float | None
    high: float | None
    label: str


class Curve(msgspec.Struct, frozen=True):
    """Steps that have one size in common, such as a context.

    Attributes:
        name: the size.
        size: its value, by which curves are ordered.
        points: the steps, by `x`.
    """

    name: str
    size: int
    points: tuple[CurvePoint, ...]


class Curves(msgspec.Struct, frozen=True):
    """The curves of a chart.

    Attributes:
        curves: by size.
        dropped: points of curves beyond `MOST_CURVES`.
    """

    curves: tuple[Curve, ...]
    dropped: int = 0


class LargestBatches(msgspec.Struct, frozen=True):
    """The largest batch of decodes that fits into memory.

    Attributes:
        contexts: tokens of each sequence in the KV cache.
        batches: the most sequences.
        fitting: context and batch of decodes of the grid that fit.
        misfits: of decodes that do not.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    fitting: tuple[tuple[int, int], ...]
    misfits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ServingFigures:
    """What a report shows of a bundle.

    Attributes:
        ttft: milliseconds of a prefill by its new tokens.
        tpot_by_batch: milliseconds of a decode by its batch.
        tpot_by_context: milliseconds of a decode by its context.
        throughput: tokens per second and GPU by batch; empty if the number of GPUs is not known.
        per_joule: tokens per joule of all GPUs by batch; empty without figures of its power.
        largest: None if the memory is not known.
        roofline: decodes by context; empty if their FLOPs are not known.
        without_work: decodes whose FLOPs or bytes are not known.
        gpu: description of the device; None without one.
        notes: why a figure or a step is missing.
    """

    ttft: Curves
    tpot_by_batch: Curves
    tpot_by_context: Curves
    throughput: Curves
    per_joule: Curves
    largest: LargestBatches | None
    roofline: tuple[RooflinePoints, ...]
    without_work: int
    gpu: Gpu | None
    notes: tuple[Note, ...]


def serving_figures(bundle: Bundle) -> ServingFigures:
    """Return the figures of a bundle's report.

    The time of a step is that of a CUDA graph where it is known, as engines run it.

    Raises:
        AnnotateError: a trace cannot be re-costed.
    """
    composed = [row for row in bundle.rows if row.fits and row.is_composed]
    rows = [row for row in composed if step_time_ns(row)]
    prefills = [row for row in rows if row.kind == "prefill"]
    decodes = [row for row in rows if row.kind == "decode"]
    gpu = find_gpu(bundle.manifest.device)
    by_context = _by_context(bundle, "decode_context")
    milliseconds = _interval_of(lambda ns, row: ns / 1e6)
    tp = bundle.manifest.tp
    # A full pipeline computes a batch on each of its stages.
    gpus = (tp or 1) * bundle.manifest.pp
    rate = _interval_of(lambda ns, row: row.composition.decodes * 1e9 / ns / gpus)
    energies, notes = _energies_uj(bundle, decodes, gpu)
    if untimed := len(composed) - len(rows):
        # The last eager step of a recording, which no other step follows.
        notes.append(
            Note(
                f"{untimed} of {len(bundle.rows)} steps have no time and are in no chart",
                code="report-steps-untimed",
            )
        )
    roofline, without_work = _roofline(bundle, decodes, by_context)
    return ServingFigures(
        ttft=_curves(prefills, _prompts(bundle), _new_tokens, milliseconds),
        tpot_by_batch=_curves(decodes, by_context, _batch, milliseconds),
        tpot_by_context=_curves(decodes, _by_batch, _context, milliseconds),
        throughput=_curves(decodes, by_context, _batch, rate) if tp else Curves(()),
        per_joule=_curves(
            [row for row in decodes if id(row) in energies],
            by_context,
            _batch,
            lambda row: (row.composition.decodes * 1e6 / energies[id(row)] / gpus, None, None),
        ),
        largest=_largest(bundle),
        roofline=roofline,
        without_work=without_work,
        gpu=gpu,
        notes=tuple(notes),
    )


def step_time_ns(row: StepRow) -> int | None:
    """Return the time of a step as a CUDA graph, or else of the eager step."""
    return row.graph_ns or row.step_ns or None


_Value = Callable[[StepRow], tuple[float, float | None, float | None]]
_Key = Callable[[StepRow], tuple[str, int]]


def _interval_of(value: Callable[[int, StepRow], float]) -> _Value:
    """Return a function of a row's figure and the ends of its interval, from a time."""

    def of(row: StepRow) -> tuple[float, float | None, float | None]:
        time_ns = step_time_ns(row)
        assert time_ns is not None, "the chosen rows have a time"
        low, high = (
            (row.graph_low_ns, row.graph_high_ns) if row.graph_ns else (row.p10_ns, row.p90_ns)
        )
        if low is None or high is None:
            return value(time_ns, row), None, None
        # A rate is lowest at the longest time.
        least, most = sorted((value(low, row), value(high, row)))
        return value(time_ns, row), least, most

    return of


def _batch(row: StepRow) -> int:
    return row.composition.decodes


def _context(row: StepRow) -> int:
    return row.composition.decode_context


def _new_tokens(row: StepRow) -> int:
    return row.composition.prefill_tokens


def _by_batch(row: StepRow) -> tuple[str, int]:
    return f"batch {_batch(row):,}", _batch(row)


def _by_context(bundle: Bundle, field: str) -> _Key:
    """Return a function of the curve of a row, by its context.

    The contexts of a recording are those of its requests, so a curve has those up to a power of 2.
    """

    def key(row: StepRow) -> tuple[str, int]:
        context = getattr(row.composition, field)
        if not bundle.manifest.is_recording or not context:
            return f"context {context:,}", context
        end = 2 ** int(log2(context) + 1)
        return f"context {end // 2:,} to {end - 1:,}", end // 2

    return key


def _prompts(bundle: Bundle) -> _Key:
    by_context = _by_context(bundle, "prefill_context")

    def key(row: StepRow) -> tuple[str, int]:
        name, context = by_context(row)
        prefills = row.composition.prefills
        # One prompt first, at each context.
        return (name, context) if prefills == 1 else (f"{prefills} prompts, {name}", context + 1)

    return key


def _curves(rows: Iterable[StepRow], key: _Key, x: Callable[[StepRow], int], y: _Value) -> Curves:
    points: dict[tuple[str, int], list[CurvePoint]] = {}
    for row in rows:
        value, low, high = y(row)
        point = CurvePoint(x(row), value, low, high, str(row.composition))
        points.setdefault(key(row), []).append(point)
    longest = sorted(points, key=lambda name: -len(points[name]))
    kept = sorted(longest[:MOST_CURVES], key=lambda name: name[1])
    curves = [
        Curve(name, size, tuple(sorted(points[name, size], key=lambda point: point.x)))
        for name, size in kept
    ]
    return Curves(tuple(curves), sum(len(points[name]) for name in longest[MOST_CURVES:]))


def _largest(bundle: Bundle) -> LargestBatches | None:
    memory, longest = bundle.manifest.memory, bundle.manifest.longest
    if longest is None:
        return None
    contexts = [2**power for power in range(6, 30) if 2**power < longest] + [longest - 1]
    batches = [memory.sequences_that_fit(context) for context in contexts]
    if None in batches:
        return None
    decodes = [row for row in bundle.rows if row.kind == "decode"]
    return LargestBatches(
        tuple(contexts),
        tuple(batch or 0 for batch in batches),
        tuple((_context(row), _batch(row)) for row in decodes if row.fits),
        tuple((_context(row), _batch(row)) for row in decodes if not row.fits),
    )


def _energies_uj(
    bundle: Bundle, rows: Sequence[StepRow], gpu: Gpu | None
) -> tuple[dict[int, int], list[Note]]:
    """Return the energy of each row on one GPU by its id, and a note if it cannot be computed."""
    if gpu is None or bundle.directory is None:
        return {}, []
    traces = {id(bundle.rows[number - 1]): path for number, path in bundle.traces()}
    energies: dict[int, int] = {}
    for row in rows:
        graph = read(traces[id(row)])
        if bundle.manifest.source == "predicted":
            graph = recost(graph, gpu)
        time_ns = step_time_ns(row)
        assert time_ns is not None, "the chosen rows have a time"
        durations = StepDurations(time_ns, min(time_ns, row.gpu_ns or 0), "the bundle")
        try:
            energies[id(row)] = report_energy(graph, gpu, durations).step_uj
        except AnnotateError as error:
            return {}, [Note(f"no energy: {str(error).splitlines()[0]}", code=error.code)]
    return energies, []


def _roofline(
    bundle: Bundle, rows: Sequence[StepRow], key: _Key
) -> tuple[tuple[RooflinePoints, ...], int]:
    """Return the decodes as points by context, and how many have no FLOPs or bytes."""
    work: dict[int, list[tuple[int | None, int | None]]] = {}
    for kernel in bundle.kernel_rows:
        work.setdefault(kernel.row, []).append((kernel.flops, kernel.bytes))
    places = {id(row): number for number, row in enumerate(bundle.rows, start=1)}
    points: dict[tuple[str, int], list[tuple[StepRow, int, int]]] = {}
    without = 0
    for row in rows:
        flops, moved = zip(*work.get(places[id(row)], [(None, None)]), strict=True)
        total = sum(flop or 0 for flop in flops), sum(count or 0 for count in moved)
        if None in flops or None in moved or not all(total) or not row.gpu_ns:
            without += 1
            continue
        points.setdefault(key(row), []).append((row, *total))
    ordered = sorted(points.items(), key=lambda item: item[0][1])
    return tuple(
        RooflinePoints(
            name=name,
            kernels=tuple(str(row.composition) for row, _, _ in group),
            intensity=np.array([flops / moved for _, flops, moved in group]),
            flops_per_s=np.array([flops * 1e9 / (row.gpu_ns or 1) for row, flops, _ in group]),
            time_ns=np.array([row.gpu_ns or 0 for row, _, _ in group]),
            calls=np.ones(len(group), dtype=np.int64),
        )
        for (name, _), group in ordered
    ), without
