"""Durations from the kernel database in place of a cost model's."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.lookup.database import Row
from onerank.annotate.lookup.library import Library, release
from onerank.annotate.lookup.look_up import Basis, Found, look_up
from onerank.annotate.models.error_kinds import Doubt, kinds_of
from onerank.annotate.models.intervals import ErrorKinds, half_widths
from onerank.annotate.models.kernels import F64, U8, Kernels, Mask
from onerank.annotate.models.rules import Rule
from onerank.annotate.work.characters import Characters
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import among


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
    doubt: Doubt
    notes: tuple[str, ...]

    @classmethod
    def of(cls, told: Found, better: Mask, otherwise: tuple[F64, U8], note: str) -> Self:
        """Return what the database told where that is better, else a model's times and rules."""
        return cls(
            np.where(better, told.time_ns, otherwise[0]),
            np.where(better, told.rules, otherwise[1]).astype(np.uint8),
            Doubt(
                np.where(better, told.doubt.own, 0.0),
                told.doubt.otherwise & better,
                told.doubt.loosely & better,
            ),
            (note,),
        )


def best_of(
    graph: Graph,
    found: Characters,
    kernels: Kernels,
    predicted: tuple[F64, U8],
    basis: Basis,
    *,
    where: Mask,
) -> Best:
    """Return what has the narrower interval, a cost model's prediction or what the database says.

    Rows that another campaign measured, with other libraries, are off by 8 to 11%
    (`benchmarks/looked_up.py`, "looked up"): a product that was measured on another cut of the
    target's die is better predicted from there, H100 to H200 and back 6% off
    (`benchmarks/accuracy.py`). What lies between rows must lie close to them. Where nobody
    measured the graph, as that of a CPU capture, the database is always taken: the models'
    intervals are of measured sources.

    Args:
        graph: as measured.
        found: what its nodes do.
        kernels: the same as cost models see it.
        predicted: durations in ns and rules of a model, n of each.
        basis: rows, GPUs, and a model.
        where: nodes that may be looked up, bool[n].
    """
    target, errors = basis.target, basis.errors
    told = look_up(graph, found, where & ~kernels.over_link, basis)
    kinds = kinds_of(kernels, predicted, basis.source, target)
    _, modelled = half_widths(ErrorKinds.of(kinds), target, errors)
    kinds = kinds_of(kernels, (told.time_ns, told.rules), basis.source, target, told.doubt)
    _, reach = half_widths(ErrorKinds.of(kinds), target, errors, told.doubt)
    known = np.isfinite(told.time_ns)
    better = known if basis.source is None else known & (reach <= modelled)
    note = note_of(graph, basis.library, better, known & ~better)
    return Best.of(told, better, predicted, note)


def note_of(graph: Graph, library: Library, better: Mask, worse: Mask) -> str:
    """Return a sentence on the database: how much it told, and its versions beside the graph's."""
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


def _versions(rows: Sequence[Row]) -> str:
    told = {f"torch {row.torch}, CUDA {row.cuda}" for row in rows}
    return "; ".join(sorted(told))


def evidence_of(rules: U8, otherwise: U8) -> U8:
    """Return the evidence of predictions: by the database's rules, else as it is, uint8[n]."""
    exact = among(rules, [Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH, Rule.RESIZED_BY_ROWS])
    between = among(rules, [Rule.BETWEEN, Rule.RESIZED_BETWEEN])
    made = np.where(exact, np.uint8(Evidence.LOOKED_UP), otherwise)
    made = np.where(between, np.uint8(Evidence.INTERPOLATED), made)
    others = among(rules, [Rule.MEASURED_WITH_OTHERS, Rule.LOOKED_UP_WITH_OTHERS])
    return np.where(others, np.uint8(Evidence.EXTRAPOLATED), made)
