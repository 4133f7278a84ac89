"""Replace predicted durations of nodes by measured ones, of the same size or of another."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np

from onerank.annotate.kernel_db.call_keys import CallKey
from onerank.annotate.kernel_db.database import KernelRow
from onerank.annotate.kernel_db.database_set import Library, release
from onerank.annotate.kernel_db.interpolate import Basis, Lookups, look_up
from onerank.annotate.models.error_model import Uncertainty, kinds_of, resize_kinds_of
from onerank.annotate.models.features import F64, U8, KernelFeatures, Mask
from onerank.annotate.models.intervals import ErrorKinds, half_widths
from onerank.annotate.models.provenance import Rule
from onerank.annotate.models.terms import TermRecord, product, quantity, quotient
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import membership_mask


class Best(NamedTuple):
    """Predictions with those of the database in place of weaker ones.

    Attributes:
        moved_ns: float64[n].
        rules: uint8[n].
        doubt: of look-ups.
        notes: what a reader should know.
    """

    moved_ns: F64
    rules: U8
    doubt: Uncertainty
    notes: tuple[str, ...]

    @classmethod
    def of(cls, told: Lookups, better: Mask, otherwise: tuple[F64, U8], note: str) -> Self:
        """Return the database's durations where they are better, else the model's."""
        return cls(
            np.where(better, told.time_ns, otherwise[0]),
            np.where(better, told.rules, otherwise[1]).astype(np.uint8),
            Uncertainty(
                np.where(better, told.doubt.own, 0.0),
                told.doubt.otherwise & better,
                told.doubt.loosely & better,
            ),
            (note,),
        )


def best_of(
    graph: Graph,
    found: OpCosts,
    kernels: KernelFeatures,
    predicted: tuple[F64, U8],
    basis: Basis,
    *,
    where: Mask,
    record: TermRecord | None = None,
) -> Best:
    """Return the prediction with the narrower interval: a cost model's or the database's.

    Rows of another campaign, with other libraries, are off by 8 to 11%
    (`benchmarks/kernel_db_accuracy.py`, "looked up"). A GEMM that was measured on another cut of
    the target's die is predicted better from there: H100 to H200 and back 6% off
    (`benchmarks/accuracy.py`). Interpolated calls must lie close to rows. If the graph was not
    measured (a CPU capture), the database
    always wins: the models' intervals apply to measured sources.

    Args:
        graph: as measured.
        found: work of its nodes.
        kernels: the same as features of cost models.
        predicted: durations in ns and rules of a model, n of each.
        basis: rows, GPUs, and a model.
        where: nodes that may be looked up, bool[n].
        record: terms of the model's predictions; takes those of the database.
    """
    target, errors = basis.target, basis.errors
    scratch = None if record is None else TermRecord(record.rows)
    told = look_up(graph, found, where & ~kernels.over_link, basis, scratch)
    kinds = kinds_of(kernels, predicted, basis.source, target)
    _, modelled = half_widths(ErrorKinds.of(kinds), target, errors)
    kinds = kinds_of(kernels, (told.time_ns, told.rules), basis.source, target, told.doubt)
    _, reach = half_widths(ErrorKinds.of(kinds), target, errors, told.doubt)
    known = np.isfinite(told.time_ns)
    better = known if basis.source is None else known & (reach <= modelled)
    if record is not None and scratch is not None:
        for row in record.rows.tolist():
            record.facts[row] += scratch.facts[row]
            if better[row]:
                record.modelled[row] = record.roots[row]
                record.roots[row] = scratch.roots[row]
            elif known[row]:
                reason = "not used: the model's interval is the narrower one"
                record.facts[row].append(("database", reason))
            elif where[row]:
                record.facts[row].append(("database", _no_row(basis, scratch.facts[row])))
    note = note_of(graph, basis.library, better, known & ~better)
    return Best.of(told, better, predicted, note)


def _no_row(basis: Basis, facts: Sequence[tuple[str, str]]) -> str:
    """Return why the database has no duration for a node, from what it knows of its call."""
    if not facts:
        return f"{basis.target.name} has no row of this operator"
    if any(name == "row" for name, _ in facts):
        return "not used: the row has no time for this kernel"
    return "no row of this call, and it does not lie between rows"


def note_of(graph: Graph, library: Library, better: Mask, worse: Mask) -> str:
    """Return a note on the database: nodes it covers, and its versions against the graph's."""
    rows = [row for some in library.target.values() for row in some]
    days = sorted({row.date[:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    count = f"{len(rows)} row" + "s" * (len(rows) > 1)
    text = f"Kernel database: {count} of {rows[0].gpu} ({_versions(rows)}; {when})"
    text += f" told {int(better.sum())} of {len(better)} nodes"
    if count := int(worse.sum()):
        text += f"; {count} more keep the model's, whose interval is narrower"
    if not any(library.ran_with(row) for row in rows):
        ran = graph.job.measurement.versions
        pairs = (("torch", ran.get("torch")), ("CUDA", ran.get("cuda")))
        told = ", ".join(f"{name} {release(one)}" for name, one in pairs if one)
        whose = f"ran {told}" if told else "does not tell its versions"
        text += f". The trace {whose}: other libraries may run other kernels, so that intervals "
        text += "are those of another campaign"
    return text + "."


def _versions(rows: Sequence[KernelRow]) -> str:
    told = {f"torch {row.torch}, CUDA {row.cuda}" for row in rows}
    return "; ".join(sorted(told))


def evidence_of(rules: U8, otherwise: U8) -> U8:
    """Return the evidence of predictions: by the database's rules, else as it is, uint8[n]."""
    exact = membership_mask(rules, [Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH, Rule.RESIZED_BY_ROWS])
    between = membership_mask(rules, [Rule.BETWEEN, Rule.RESIZED_BETWEEN])
    made = np.where(exact, np.uint8(Evidence.LOOKED_UP), otherwise)
    made = np.where(between, np.uint8(Evidence.INTERPOLATED), made)
    others = membership_mask(rules, [Rule.MEASURED_WITH_OVERRIDES, Rule.LOOKED_UP_WITH_OVERRIDES])
    return np.where(others, np.uint8(Evidence.EXTRAPOLATED), made)


LONG_NS = 10_000
"""Replayed time from which on launches count little."""

_BY_CLOCK = (OpClass.GEMM, OpClass.ATTENTION)


class Size(NamedTuple):
    """A step at one size: its graph and what its compute nodes do."""

    graph: Graph
    found: OpCosts


def best_resized(
    sizes: tuple[Size, Size],
    kernels: KernelFeatures,
    predicted: tuple[F64, U8],
    basis: Basis,
    *,
    where: Mask,
    record: TermRecord | None = None,
) -> Best:
    """Return the narrower prediction: a model's ratio of both sizes or the database's.

    On the GPU that measured the step, a node takes its measured time times the ratio of the rows of
    both sizes; on another GPU the time of the new size's rows.

    Args:
        sizes: the step as captured, and as requested.
        kernels: as requested, with measured durations.
        predicted: durations in ns and rules for the requested sizes, n of each.
        basis: rows, GPUs, and a model.
        where: nodes with other shapes, bool[n].
        record: terms of the model's predictions; takes those of the database.
    """
    target, errors = basis.target, basis.errors
    library = basis.library
    rows = at_one_clock(library.target) if basis.source == target else library.target
    library = Library(rows, {}, library.versions)
    basis = basis._replace(library=library)
    records = [None if record is None else TermRecord(record.rows) for _ in sizes]
    before, after = (
        look_up(*size, where & ~kernels.over_link, basis, scratch)
        for size, scratch in zip(sizes, records, strict=True)
    )
    made = _times(kernels.duration_ns, before, after) if basis.source == target else after
    kinds = kinds_of(kernels, predicted, basis.source, target)
    _, modelled = half_widths(ErrorKinds.of(kinds, resize_kinds_of(kernels, where)), target, errors)
    kinds = kinds_of(kernels, (made.time_ns, made.rules), basis.source, target, made.doubt)
    _, reach = half_widths(ErrorKinds.of(kinds), target, errors, made.doubt)
    known = np.isfinite(made.time_ns)
    better = known & (reach <= modelled)
    if record is not None and records[0] is not None and records[1] is not None:
        for row in record.rows[better[record.rows]].tolist():
            old, new = records[0].roots[row], records[1].roots[row]
            if basis.source == target:
                measured = quantity("measured", float(kernels.duration_ns[row]))
                new = product(measured, quotient(new, old), name="other size")
            record.roots[row] = new
    note = note_of(sizes[0].graph, library, better, known & ~better)
    return Best.of(made, better, predicted, note)


def at_one_clock(rows: Mapping[CallKey, Sequence[KernelRow]]) -> dict[CallKey, list[KernelRow]]:
    """Return rows whose kernels last as in replays at the highest clock of any.

    The profiler's runs, of which kernel times are, noted no clock; what a call took in the replays,
    of products and attention times their clock, is what its rows at several sizes have in common
    (on an H200 a product of 4096 x 4096 x 14336 and of half the rows: 0.55 by kernel times, 0.50 by
    these and in steps). What memory bounds takes as long at any clock. Short calls, whose replays
    are launches in part, and rows without a clock stay as they are.
    """
    clocks = (row.sm_clock_mhz for some in rows.values() for row in some if row.sm_clock_mhz)
    highest = max(clocks, default=0)
    return {key: [_at_clock(row, highest) for row in some] for key, some in rows.items()}


def _at_clock(row: KernelRow, highest_mhz: int) -> KernelRow:
    if not row.sm_clock_mhz or row.median_ns < LONG_NS:
        return row
    bound = op_class(row.operator) in _BY_CLOCK
    factor = row.sm_clock_mhz / highest_mhz if bound else 1.0
    factor *= row.median_ns / sum(row.kernel_ns)
    times = tuple(max(1, round(time * factor)) for time in row.kernel_ns)
    return msgspec.structs.replace(row, kernel_ns=times)


def _times(measured_ns: F64, before: Lookups, after: Lookups) -> Lookups:
    """Return what was measured times the ratio of both sizes' rows."""
    exact = (before.rules == Rule.LOOKED_UP) & (after.rules == Rule.LOOKED_UP)
    return Lookups(
        measured_ns * after.time_ns / before.time_ns,
        np.where(exact, Rule.RESIZED_BY_ROWS, Rule.RESIZED_BETWEEN).astype(np.uint8),
        Uncertainty(
            np.hypot(before.doubt.own, after.doubt.own),
            before.doubt.otherwise | after.doubt.otherwise,
            before.doubt.loosely | after.doubt.loosely,
        ),
    )
