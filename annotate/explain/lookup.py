"""Explain a look-up: the database row of a node, or the rows around it."""

import math
from typing import NamedTuple

import numpy as np

from onerank.annotate.explain.terms import Lines
from onerank.annotate.kernel_db.call_keys import CallKey, keys_of
from onerank.annotate.kernel_db.database import VERSIONS, Row
from onerank.annotate.kernel_db.database_set import Match
from onerank.annotate.kernel_db.interpolate import SOURCE_SHARE, Basis, Between, between
from onerank.annotate.models.provenance import Rule
from onerank.annotate.op_costs.node_costs import Characters
from onerank.ir import Graph

_NARROWER = "the model's interval is the narrower one"


class Prediction(NamedTuple):
    """A node's duration in ns, and the rule that gave it."""

    time_ns: float
    rule: Rule


def database_lines(
    graph: Graph, found: Characters, row: int, made: Prediction, basis: Basis
) -> Lines:
    """Return how the database told of the node at `row` of `found`, or that it did not."""
    library, index = basis.library, found.index[row : row + 1]
    keyed = keys_of(graph, index, library.operators)
    if not len(keyed.keys):
        return [("database", f"{basis.target.name} has no row of this operator")]
    key = keyed.keys[0]
    lines: Lines = [("call", _call(key))]
    view = graph.node(int(index[0]))
    match = library.match(key, view.name, _ran(graph, found, row))
    if match is not None:
        return [*lines, *_match(match, view.duration_ns, made, basis)]
    (told,) = between(library, [key], basis.target, basis.alone)
    if told is None:
        return [*lines, ("database", "no row of this call, and it does not lie between rows")]
    lines += _neighbours(told)
    if made.rule is not Rule.BETWEEN:
        return [*lines, ("database", f"not used: {_NARROWER}")]
    return [*lines, ("part", _part(told.time_ns, made.time_ns))]


def _ran(graph: Graph, found: Characters, row: int) -> set[str]:
    """Return the names of all kernels that the calls like a node's launched."""
    nodes, index = graph.nodes, found.index
    like = found.call == found.call[row]
    return set(graph.strings.decode(np.unique(nodes.name[index[like]])))


def _match(match: Match, measured_ns: int, made: Prediction, basis: Basis) -> Lines:
    lines: Lines = []
    for one in match.rows:
        lines += [("row", _row(one)), ("measured", _conditions(one))]
    by_name = not math.isnan(match.kernel_ns)
    there = match.kernel_ns if by_name else match.rest_ns
    what = "the kernel of this name" if by_name else "the call's kernels that the trace has none of"
    if len(match.rows) > 1:
        what += f", geometric mean of {len(match.rows)} rows"
    lines.append(("looked up", f"{there:,.0f} ns: {what}"))
    if made.rule not in (Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH):
        why = _NARROWER if not math.isnan(there) else "the row has no time for this kernel"
        return [*lines, ("database", f"not used: {why}")]
    kept = 1.0
    if made.rule is Rule.LOOKED_UP_ON_BOTH and basis.source is not None:
        here = match.source_ns
        kept = math.exp(SOURCE_SHARE * math.log(measured_ns / here))
        lines += [
            *(("source row", _row(one)) for one in match.source),
            (
                "deviation",
                f"{measured_ns:,} ns measured on {basis.source.name}, {here:,.0f} ns in its row: "
                f"x ({measured_ns:,} / {here:,.0f})^{SOURCE_SHARE} = x {kept:.3f}",
            ),
        ]
    return lines if by_name else [*lines, ("part", _part(there, made.time_ns / kept))]


def _neighbours(told: Between) -> Lines:
    off = math.log(told.time_ns / told.modelled_ns)
    lines: Lines = [
        (
            "near",
            f"{_call(one.key)}: {one.time_ns:,.0f} ns, ln(measured / modelled) = {one.off:+.3f}, "
            f"weight {one.weight:.2f}",
        )
        for one in told.neighbours
    ]
    return [
        *lines,
        (
            "between",
            f"{told.modelled_ns:,.0f} ns by the model alone x e^{off:+.3f} = {told.time_ns:,.0f} "
            f"ns; four of five rows left out are within e^+-{told.bound:.3f}",
        ),
    ]


def _part(whole: float, own: float) -> str:
    return f"{own / whole:.1%} of the operator's {whole:,.0f} ns"


def _call(key: CallKey) -> str:
    shapes = " ".join(str(list(shape)).replace(" ", "") for shape in key.shapes[:4])
    more = f" and {len(key.shapes) - 4} more" if len(key.shapes) > 4 else ""
    types = ", ".join(dict.fromkeys(key.dtypes))
    return f"{key.operator} {shapes}{more} {types}"


def _row(row: Row) -> str:
    kernels = row.kernels[0] if row.kernels else ""
    if len(row.kernels) > 1:
        kernels += f" and {len(row.kernels) - 1} more"
    return (
        f"{sum(row.kernel_ns):,} ns ({row.median_ns:,} replayed, {row.low_ns:,} to {row.high_ns:,} "
        f"in {row.samples} samples, {row.l2} cache, layout {row.layout}) by "
        f"{kernels}"
    )


def _conditions(row: Row) -> str:
    read = [
        f"{value:,.0f} {unit}"
        for value, unit in ((row.sm_clock_mhz, "MHz"), (row.power_w, "W"), (row.temperature_c, "C"))
        if value is not None
    ]
    versions = [f"{name} {getattr(row, name)}" for name in VERSIONS if getattr(row, name)]
    return ", ".join([f"{row.gpu} {row.date}", *read, *versions])
