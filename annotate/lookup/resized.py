"""What the kernel database says of calls at another size than they were measured at."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.lookup.call_key import CallKey
from onerank.annotate.lookup.database import Row
from onerank.annotate.lookup.library import Library
from onerank.annotate.lookup.look_up import Basis, Found, look_up
from onerank.annotate.lookup.nodes import Best, note_of
from onerank.annotate.models.error_kinds import Doubt, kinds_of, sizes_of
from onerank.annotate.models.intervals import ErrorKinds, half_widths
from onerank.annotate.models.kernels import F64, U8, Kernels, Mask
from onerank.annotate.models.rules import Rule
from onerank.annotate.work.characters import Characters
from onerank.annotate.work.classes import OpClass, op_class
from onerank.ir import Graph

LONG_NS = 10_000
"""Replayed time from which on launches count little."""


_BY_CLOCK = (OpClass.GEMM, OpClass.ATTENTION)


class Size(NamedTuple):
    """A step at one size: its graph and what its compute nodes do."""

    graph: Graph
    found: Characters


def best_resized(
    sizes: tuple[Size, Size],
    kernels: Kernels,
    predicted: tuple[F64, U8],
    basis: Basis,
    *,
    where: Mask,
) -> Best:
    """Return what has the narrower interval, a model's ratio of both sizes or the database's.

    On the GPU that measured the step a node takes what was measured times the ratio of the rows of
    both sizes; on another one what the rows of the new size say.

    Args:
        sizes: the step as captured, and as asked for.
        kernels: as asked for, with durations as measured.
        predicted: durations in ns and rules for the sizes asked for, n of each.
        basis: rows, GPUs, and a model.
        where: nodes that have other shapes, bool[n].
    """
    target, errors = basis.target, basis.errors
    library = basis.library
    rows = at_one_clock(library.target) if basis.source == target else library.target
    library = Library(rows, {}, library.versions)
    basis = basis._replace(library=library)
    before, after = (look_up(*one, where & ~kernels.over_link, basis) for one in sizes)
    made = _times(kernels.duration_ns, before, after) if basis.source == target else after
    kinds = kinds_of(kernels, predicted, basis.source, target)
    _, modelled = half_widths(ErrorKinds.of(kinds, sizes_of(kernels, where)), target, errors)
    kinds = kinds_of(kernels, (made.time_ns, made.rules), basis.source, target, made.doubt)
    _, reach = half_widths(ErrorKinds.of(kinds), target, errors, made.doubt)
    known = np.isfinite(made.time_ns)
    better = known & (reach <= modelled)
    note = note_of(sizes[0].graph, library, better, known & ~better)
    return Best.of(made, better, predicted, note)


def at_one_clock(rows: Mapping[CallKey, Sequence[Row]]) -> dict[CallKey, list[Row]]:
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


def _at_clock(row: Row, highest_mhz: int) -> Row:
    if not row.sm_clock_mhz or row.median_ns < LONG_NS:
        return row
    bound = op_class(row.operator) in _BY_CLOCK
    factor = row.sm_clock_mhz / highest_mhz if bound else 1.0
    factor *= row.median_ns / sum(row.kernel_ns)
    times = tuple(max(1, round(time * factor)) for time in row.kernel_ns)
    return msgspec.structs.replace(row, kernel_ns=times)


def _times(measured_ns: F64, before: Found, after: Found) -> Found:
    """Return what was measured times the ratio of both sizes' rows."""
    exact = (before.rules == Rule.LOOKED_UP) & (after.rules == Rule.LOOKED_UP)
    return Found(
        measured_ns * after.time_ns / before.time_ns,
        np.where(exact, Rule.RESIZED_BY_ROWS, Rule.RESIZED_BETWEEN).astype(np.uint8),
        Doubt(
            np.hypot(before.doubt.own, after.doubt.own),
            before.doubt.otherwise | after.doubt.otherwise,
            before.doubt.loosely | after.doubt.loosely,
        ),
    )
