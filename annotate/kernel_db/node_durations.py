"""Replace predicted durations of nodes by database rows, of the same size or of another."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np

from onerank.annotate.kernel_db.calls import CallKey
from onerank.annotate.kernel_db.database import KernelRow, Library, release
from onerank.annotate.kernel_db.look_up import Basis, Lookups, look_up
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.error_kinds import Uncertainty, kinds_of, resize_kinds_of
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import ErrorKinds, half_widths
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    TermRecord,
    product,
    quantity,
    quotient,
)
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import F64, U8, Mask, membership_mask
from onerank.ir.notes import Note


class Best(NamedTuple):
    """Predictions, with the database's durations in place of less certain ones.

    Attributes:
        durations: of n nodes.
        uncertainty: uncertainty of look-ups.
        notes: statements on the quality of the result.
    """

    durations: PredictedDurations
    uncertainty: Uncertainty
    notes: tuple[Note, ...]

    @classmethod
    def of(
        cls, lookups: Lookups, better: Mask, predicted: PredictedDurations, notes: tuple[Note, ...]
    ) -> Self:
        """Return the database's durations at `better`, else the model's."""
        return cls(
            PredictedDurations(
                np.where(better, lookups.time_ns, predicted.duration_ns),
                np.where(better, lookups.rules, predicted.rules).astype(np.uint8),
            ),
            Uncertainty(
                np.where(better, lookups.uncertainty.spread, 0.0),
                lookups.uncertainty.other_versions & better,
                lookups.uncertainty.data_dependent & better,
            ),
            notes,
        )


def _of_any_die(errors: Coefficients) -> Coefficients:
    """Return coefficients with the errors of all dies, to compare a model with a database.

    The errors of the two on one die come from kernels and libraries that are not the same.
    """
    return msgspec.structs.replace(errors, dies={})


def best_of(
    graph: Graph,
    costs: OpCosts,
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    basis: Basis,
    *,
    where: Mask,
    record: TermRecord | None = None,
) -> Best:
    """Return the prediction with the narrower interval: a cost model's or the database's.

    Rows of another benchmark set, with other libraries, are off by 8 to 11%
    (`benchmarks/predictions/kernel_db_accuracy.py`, "looked up"). A GEMM that was measured on
    another cut of the target's die is predicted better from there: H100 to H200 and back 6% off
    (`benchmarks/predictions/accuracy.py`). Interpolated calls must lie close to rows. If the graph
    was not measured (a CPU capture), the database always wins: the models' intervals apply to
    measured sources.

    Args:
        graph: the measured graph.
        costs: work of its nodes.
        kernels: features of its nodes.
        predicted: durations of a model.
        basis: rows, GPUs and a model.
        where: nodes that may be looked up, bool[n].
        record: terms of the model's predictions; takes those of the database.
    """
    target, errors = basis.target, _of_any_die(basis.errors)
    scratch = None if record is None else TermRecord(record.rows)
    lookups = look_up(graph, costs, where & ~kernels.over_link, basis, scratch)
    kinds = kinds_of(kernels, predicted, basis.source, target)
    _, model_width = half_widths(predicted.duration_ns, ErrorKinds.of(kinds), target, errors)
    kinds = kinds_of(kernels, lookups.durations, basis.source, target, lookups.uncertainty)
    _, lookup_width = half_widths(
        lookups.durations.duration_ns, ErrorKinds.of(kinds), target, errors, lookups.uncertainty
    )
    known = np.isfinite(lookups.time_ns)
    better = known if basis.source is None else known & (lookup_width <= model_width)
    if record is not None and scratch is not None:
        for row in record.rows.tolist():
            record.facts[row] += scratch.facts[row]
            if better[row]:
                record.modelled[row] = record.roots[row]
                record.roots[row] = scratch.roots[row]
            elif known[row]:
                reason = "not used: the model's interval is narrower"
                record.facts[row].append(("database", reason))
            elif where[row]:
                record.facts[row].append(("database", _no_row(basis, scratch.facts[row])))
    notes = notes_of(graph, basis.library, better, known & ~better)
    return Best.of(lookups, better, predicted, notes)


def _no_row(basis: Basis, facts: Sequence[tuple[str, str]]) -> str:
    """Return the reason why the database has no duration for a node, from the facts on it."""
    if not facts:
        return f"{basis.target.name} has no row of this operator"
    if any(name == "row" for name, _ in facts):
        return "not used: the row has no time for this kernel"
    return "no row of this call, and it does not lie between rows"


def notes_of(graph: Graph, library: Library, better: Mask, worse: Mask) -> tuple[Note, ...]:
    """Return notes on the database: the nodes that it covers, and its library versions.

    Args:
        graph: the measured graph.
        library: rows of the databases.
        better: nodes with the database's duration, bool[n].
        worse: nodes with a row whose interval is wider than the model's, bool[n].
    """
    rows = [row for call_rows in library.target.values() for row in call_rows]
    days = sorted({row.date[:10] for row in rows})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    count = f"{len(rows)} row" + "s" * (len(rows) > 1)
    text = f"Kernel database: {count} of {rows[0].gpu} ({_versions(rows)}; {dates})"
    text += f" gave the durations of {int(better.sum())} of {len(better)} nodes."
    notes = [Note(text, code="kernel-database")]
    if count := int(worse.sum()):
        text = (
            f"Kernel database: its intervals of {count} more nodes are wider than the model's, so "
            "these keep the model's duration."
        )
        notes.append(Note(text, code="kernel-database-wider"))
    if not any(library.ran_with(row) for row in rows):
        ran = graph.job.measurement.versions
        pairs = (("torch", ran.get("torch")), ("CUDA", ran.get("cuda")))
        recorded = ", ".join(f"{name} {release(version)}" for name, version in pairs if version)
        trace_text = f"ran {recorded}" if recorded else "does not record its versions"
        text = (
            f"Kernel database: the trace {trace_text}. Other versions may run other kernels, so "
            "intervals are those between benchmark sets."
        )
        notes.append(Note(text, code="kernel-database-other-versions"))
    return tuple(notes)


def _versions(rows: Sequence[KernelRow]) -> str:
    versions = {f"torch {row.torch}, CUDA {row.cuda}" for row in rows}
    return "; ".join(sorted(versions))


def evidence_of(rules: U8, default: U8) -> U8:
    """Return the evidence of predictions by their rules, else `default`, uint8[n]."""
    exact = membership_mask(rules, [Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH, Rule.RESIZED_BY_ROWS])
    between = membership_mask(rules, [Rule.BETWEEN, Rule.RESIZED_BETWEEN])
    evidence = np.where(exact, np.uint8(Evidence.LOOKED_UP), default)
    evidence = np.where(between, np.uint8(Evidence.INTERPOLATED), evidence)
    overridden = membership_mask(
        rules, [Rule.MEASURED_WITH_OVERRIDES, Rule.LOOKED_UP_WITH_OVERRIDES]
    )
    return np.where(overridden, np.uint8(Evidence.EXTRAPOLATED), evidence)


LONG_NS = 10_000
"""Replays of shorter calls are dominated by launches."""

# A replay of these throttles the clock more than a step does, so times are compared at one clock.
_BY_CLOCK = (OpClass.GEMM, OpClass.ATTENTION)


class Size(NamedTuple):
    """A step at one size: its graph and the work of its compute nodes."""

    graph: Graph
    costs: OpCosts


def best_resized(
    sizes: tuple[Size, Size],
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    basis: Basis,
    *,
    where: Mask,
    record: TermRecord | None = None,
) -> Best:
    """Return the narrower prediction: a model's ratio of both sizes or the database's.

    On the GPU that measured the step, a node's measured time is multiplied by the ratio of the rows
    of both sizes; on another GPU the new size's row is used.

    Args:
        sizes: the step as captured, and as requested.
        kernels: features at the requested size, with measured durations.
        predicted: durations of a model at the requested size.
        basis: rows, GPUs and a model.
        where: nodes with changed shapes, bool[n].
        record: terms of the model's predictions; takes those of the database.
    """
    target, errors = basis.target, _of_any_die(basis.errors)
    library = basis.library
    # Only a ratio of two rows needs one clock; a looked-up time is that of the profiler's run.
    rows = at_one_clock(library.target) if basis.source == target else library.target
    # Without rows of the source: on the GPU that measured the step, its deviation is in the
    # measured time already.
    library = Library(rows, {}, library.versions)
    basis = basis._replace(library=library)
    records = [None if record is None else TermRecord(record.rows) for _ in sizes]
    before, after = (
        look_up(*size, where & ~kernels.over_link, basis, scratch)
        for size, scratch in zip(sizes, records, strict=True)
    )
    lookups = _times(kernels.duration_ns, before, after) if basis.source == target else after
    kinds = kinds_of(kernels, predicted, basis.source, target)
    of_model = ErrorKinds.of(kinds, resize_kinds_of(kernels, where))
    _, model_width = half_widths(predicted.duration_ns, of_model, target, errors)
    kinds = kinds_of(kernels, lookups.durations, basis.source, target, lookups.uncertainty)
    _, lookup_width = half_widths(
        lookups.durations.duration_ns, ErrorKinds.of(kinds), target, errors, lookups.uncertainty
    )
    known = np.isfinite(lookups.time_ns)
    better = known & (lookup_width <= model_width)
    if record is not None and records[0] is not None and records[1] is not None:
        for row in record.rows[better[record.rows]].tolist():
            old, new = records[0].roots[row], records[1].roots[row]
            if basis.source == target:
                measured = quantity("measured", float(kernels.duration_ns[row]))
                new = product(measured, quotient(new, old), name="other size")
            record.roots[row] = new
    notes = notes_of(sizes[0].graph, library, better, known & ~better)
    return Best.of(lookups, better, predicted, notes)


def at_one_clock(rows: Mapping[CallKey, Sequence[KernelRow]]) -> dict[CallKey, list[KernelRow]]:
    """Return rows with kernel times scaled to those of replays at the highest recorded clock.

    The profiler's runs do not record a clock, so kernel times of two sizes may be of different
    clocks; replays record one. On an H200 half the rows of a GEMM of 4096 x 4096 x 14336 take 0.55
    of its time by kernel times, and 0.50 by replays times clock and in steps. Memory-bound calls
    take as long at any clock. Short calls, whose replays include launches, and rows without a clock
    stay unchanged.
    """
    clocks = (
        row.sm_clock_mhz for call_rows in rows.values() for row in call_rows if row.sm_clock_mhz
    )
    # Any common clock gives the same ratios of sizes.
    highest = max(clocks, default=0)
    return {key: [_at_clock(row, highest) for row in call_rows] for key, call_rows in rows.items()}


def at_settled_clock(row: KernelRow) -> KernelRow:
    """Return a row without the low clock that a call had while it was profiled.

    After a call at the power limit the clock is low for a while, and a profiled run of the next one
    may fall into it. Replays settle first, and nothing is slower than a call that repeats without
    a pause. So the times of a long GEMM or attention add up to the replayed time at most. Of 184
    rows of attention of an H200, 62 had times that were 5 to 26% longer. In a step with two of
    these calls they were 20 and 23% too long, and the replays 4 and 7%
    (2026-11-28-two-gpu-jobs-2xh200, its Trainer). Other calls may be faster in replays because of
    caches.
    """
    profiled_ns = sum(row.kernel_ns)
    clock_bound = op_class(row.operator) in _BY_CLOCK and row.median_ns >= 2 * LONG_NS
    if not clock_bound or profiled_ns <= row.median_ns:
        return row
    times = (max(1, round(ns * row.median_ns / profiled_ns)) for ns in row.kernel_ns)
    return msgspec.structs.replace(row, kernel_ns=tuple(times))


def _at_clock(row: KernelRow, highest_mhz: int) -> KernelRow:
    if not row.sm_clock_mhz or row.median_ns < LONG_NS:
        return row
    clock_bound = op_class(row.operator) in _BY_CLOCK
    factor = row.sm_clock_mhz / highest_mhz if clock_bound else 1.0
    # Replays take the place of the profiler's times, but each kernel keeps its share of the call.
    factor *= row.median_ns / sum(row.kernel_ns)
    times = tuple(max(1, round(time * factor)) for time in row.kernel_ns)
    return msgspec.structs.replace(row, kernel_ns=times)


def _times(measured_ns: F64, before: Lookups, after: Lookups) -> Lookups:
    """Return the measured times multiplied by the ratio of both sizes' rows."""
    exact = (before.rules == Rule.LOOKED_UP) & (after.rules == Rule.LOOKED_UP)
    return Lookups(
        measured_ns * after.time_ns / before.time_ns,
        np.where(exact, Rule.RESIZED_BY_ROWS, Rule.RESIZED_BETWEEN).astype(np.uint8),
        Uncertainty(
            # Standard deviations in ln of a ratio's two ends add in squares.
            np.hypot(before.uncertainty.spread, after.uncertainty.spread),
            before.uncertainty.other_versions | after.uncertainty.other_versions,
            before.uncertainty.data_dependent | after.uncertainty.data_dependent,
        ),
    )
