"""Look nodes up in the databases: rows of the same call, or interpolation between measured ones."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.calls import BY_LAYOUT, CallKey, Keyed, Layout, keys_of, layout_of
from onerank.annotate.kernel_db.database import VERSIONS, KernelRow, Library, Match
from onerank.annotate.kernel_db.interpolate import Between, between
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.error_kinds import Uncertainty
from onerank.annotate.models.intervals import HALF_WIDTH
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    factor,
    power,
    product,
    quantity,
    quotient,
)
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.ir import UNKNOWN, Graph
from onerank.ir.arrays import F64, I32, I64, U8, Mask, deduplicate

SOURCE_SHARE = 0.5
"""Share of the source's ln(measured / looked up) that carries over to the target.

Two benchmark sets on one GPU disagree, because clocks, caches and libraries differ. In part they
disagree in the same way on two GPUs: for 35,742 GEMMs measured twice on H200 and on B200 the
correlation is 0.36; over 1 ms it is 0.48. Carrying over half reduces the time-weighted error from
11.1% to 7.9% (H200 to B200) and to 7.7% (back); from A100 to H100 and back, in another benchmark
set, from 10.0% to 8.8% and from 8.2% to 6.7%. Carrying over all gives 7.0, 7.2, 9.2 and 9.3%, and
the largest errors of single GEMMs.
"""

# Classes whose time depends on the indices.
_BY_DATA = (OpClass.EMBEDDING, OpClass.INDEX)


class Basis(NamedTuple):
    """The inputs of a prediction.

    Attributes:
        library: rows of the kernel databases.
        source: GPU that measured the graph; None if it was not measured.
        target: GPU to predict.
        from_description: a model's prediction for unmeasured calls, see `PredictFromDescription`.
        errors: of the model, and of look-ups.
    """

    library: Library
    source: Gpu | None
    target: Gpu
    from_description: PredictFromDescription
    errors: Coefficients


class Lookups(NamedTuple):
    """The database's durations of n nodes.

    Attributes:
        time_ns: durations; nan if the database has none, float64[n].
        rules: `LOOKED_UP`, `LOOKED_UP_ON_BOTH` or `BETWEEN` where there is a duration, uint8[n].
        uncertainty: uncertainty of the durations.
    """

    time_ns: F64
    rules: U8
    uncertainty: Uncertainty

    @property
    def durations(self) -> PredictedDurations:
        """The durations and their rules."""
        return PredictedDurations(self.time_ns, self.rules)

    @classmethod
    def nothing(cls, count: int) -> Self:
        """Return the look-ups of an empty database."""
        return cls(np.full(count, np.nan), np.zeros(count, dtype=np.uint8), Uncertainty.none(count))

    def put(self, rows: I64, other: Self) -> None:
        """Take over the results of `other` for the nodes at `rows`."""
        known = np.isfinite(other.time_ns)
        rows = rows[known]
        self.time_ns[rows], self.rules[rows] = other.time_ns[known], other.rules[known]
        for column, new in zip(self.uncertainty, other.uncertainty, strict=True):
            column[rows] = new[known]


def look_up(
    graph: Graph, costs: OpCosts, where: Mask, basis: Basis, record: TermRecord | None = None
) -> Lookups:
    """Return the database's durations for the nodes of `costs` selected by `where`.

    A kernel takes the time of the kernel with its name in the row of its call. If the target runs
    other kernels, the operator's kernels share their time in proportion to their measured
    durations. If the source also has a row with the kernel, `SOURCE_SHARE` of its deviation from
    that row carries over. A call without a row may be interpolated (see `between`). `record` takes
    the durations as terms, and the rows as facts.
    """
    lookups = Lookups.nothing(len(where))
    # Rows are of dense GEMMs; a sparse one has the same shapes and dtypes, and unknown FLOPs.
    sparse = costs.is_class(OpClass.GEMM) & (costs.flops == UNKNOWN)
    # Convolutions were measured with TF32 allowed, as by default.
    rows = np.flatnonzero(where & ~sparse & ~costs.exact_by_cudnn)
    tf32 = costs.tf32_by_choice[rows]
    keyed = keys_of(graph, costs.index[rows], basis.library.operators, tf32)
    rows, keyed = rows[keyed.key >= 0], Keyed(keyed.key[keyed.key >= 0], keyed.keys)
    if len(rows):
        nodes = _Nodes.of(graph, costs, rows)
        data_dependent = costs.is_class(*_BY_DATA)
        scratch = None if record is None else record.within(rows)
        lookups.put(rows, _exact(graph, nodes, keyed, basis, scratch))
        # A key has rows or is interpolated, never both, so the order of the two does not matter.
        lookups.put(rows, _between(nodes, keyed, basis, scratch))
        if record is not None and scratch is not None:
            record.take(rows, scratch)
        lookups.uncertainty.data_dependent[rows] = data_dependent[rows]
    return lookups


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes to look up.

    Attributes:
        whole: whether a node represents all kernels of its operator, as in a CPU capture.
        index: their indices in the graph, int64[n].
        strides: codes of the strides of their operands; 0 where the names of kernels decide, or
            the graph has no strides, int32[n].
        name: codes of their names, int32[n].
        duration_ns: measured durations, float64[n].
        operator_ns: measured time of the kernels of the operator instance; nan if not measured, and
            for copies and fills, float64[n].
    """

    whole: bool
    index: I64
    strides: I32
    name: I32
    duration_ns: F64
    operator_ns: F64
    streams_strided: Mask

    @classmethod
    def of(cls, graph: Graph, costs: OpCosts, rows: I64) -> Self:
        index, operator = costs.index[rows], costs.operator_ns[rows]
        has_time = ~costs.auxiliary[rows] & (operator > 0)
        whole = graph.job.device.runs_operators
        strides = graph.nodes.input_strides[index]
        return cls(
            whole,
            index,
            strides if whole else np.zeros_like(strides),
            graph.nodes.name[index],
            graph.nodes.duration_ns[index].astype(np.float64),
            np.where(has_time, operator, np.nan),
            costs.is_class(*BY_LAYOUT)[rows] & _is_strided(graph, index),
        )

    def layout_at(self, graph: Graph, row: int) -> Layout | None:
        """Return the layout of a call; None if it is not known."""
        # A graph in which no operator has strides records none.
        if not self.strides.any():
            return None
        nodes, strings, at = graph.nodes, graph.strings, self.index[row]
        columns = (nodes.op, nodes.input_shapes, nodes.input_types, nodes.input_strides)
        return layout_of(*(strings[int(column[at])] for column in columns))


def _is_strided(graph: Graph, index: I64) -> Mask:
    """Return whether an operand of a node is known not to be contiguous, bool[n]."""
    names = ("op", "input_shapes", "input_types", "input_strides")
    columns: list[I32] = [getattr(graph.nodes, name)[index] for name in names]
    first, which = deduplicate(columns)
    strided = [
        bool(layout_of(*(graph.strings[int(column[row])] for column in columns))) for row in first
    ]
    return np.array(strided, dtype=bool)[which]


@dataclass(frozen=True, slots=True)
class _Matched:
    """Rows of the databases for n nodes.

    Attributes:
        matches: of each distinct call, kernel name and strides; None without rows.
        which: index in `matches` of each node, int64[n].
        kernel_ns: as in `Match`, of each node, nan without rows, float64[n]; so are `rest_ns`,
            `whole_ns` and `source_ns`.
        uncertainty: spread of the rows, and whether their versions are the graph's.
    """

    matches: list[Match | None]
    which: I64
    kernel_ns: F64
    rest_ns: F64
    whole_ns: F64
    source_ns: F64
    uncertainty: Uncertainty

    @classmethod
    def of(cls, graph: Graph, nodes: _Nodes, keyed: Keyed, library: Library) -> Self:
        first, which = deduplicate([keyed.key, nodes.name, nodes.strides])
        key_of_first = [int(key) for key in keyed.key[first]]
        names = graph.strings.decode(nodes.name[first])
        ran: list[set[str]] = [set() for _ in keyed.keys]
        for key, name in zip(key_of_first, names, strict=True):
            ran[key].add(name)
        matches = [
            library.match(keyed.keys[key], name, ran[key], nodes.layout_at(graph, int(row)))
            for key, name, row in zip(key_of_first, names, first, strict=True)
        ]
        absent = (np.nan,) * 5
        times = [absent if match is None else match[:5] for match in matches]
        figures: F64 = np.array(times, dtype=np.float64)[which]
        kernel_ns, rest_ns, whole_ns, source_ns, spread = (figures[:, n] for n in range(5))
        # A call without rows has no versions to compare; its time is nan anyway.
        versions = [m is None or all(library.ran_with(row) for row in m.rows) for m in matches]
        same = np.array(versions, dtype=bool)[which]
        uncertainty = Uncertainty.none(len(which))._replace(spread=spread, other_versions=~same)
        return cls(matches, which, kernel_ns, rest_ns, whole_ns, source_ns, uncertainty)

    def match_of(self, row: int) -> Match | None:
        """Return the rows for a node."""
        return self.matches[int(self.which[row])]


def _exact(
    graph: Graph, nodes: _Nodes, keyed: Keyed, basis: Basis, record: TermRecord | None
) -> Lookups:
    """Return durations from rows of the calls themselves."""
    matched = _Matched.of(graph, nodes, keyed, basis.library)
    if record is not None:
        for row in record.rows.tolist():
            key = keyed.keys[int(keyed.key[row])]
            record.facts[row] += [("call", call_text(key)), *match_facts(matched.match_of(row))]
    if nodes.whole:
        return _times_of_calls(matched, record)
    return _times_of_kernels(nodes, keyed, matched, basis, record)


def _times_of_calls(matched: _Matched, record: TermRecord | None) -> Lookups:
    """Return the time of all kernels of each call."""
    whole_ns, count = matched.whole_ns, len(matched.which)

    def term(i: int, _: Term | None) -> Term | None:
        if not np.isfinite(whole_ns[i]):
            return None
        return quantity("looked up", whole_ns[i], note="all kernels of the call")

    if record is not None:
        record.update(slice(0, count), term)
    rules = np.full(count, Rule.LOOKED_UP, dtype=np.uint8)
    return Lookups(whole_ns, rules, matched.uncertainty)


def _times_of_kernels(
    nodes: _Nodes, keyed: Keyed, matched: _Matched, basis: Basis, record: TermRecord | None
) -> Lookups:
    """Return the time of each kernel: of its name, or a part of the kernels without a name."""
    kernel_ns, rest_ns, source_ns = matched.kernel_ns, matched.rest_ns, matched.source_ns
    count = len(matched.which)
    on_both: Mask = np.isfinite(source_ns) & (nodes.duration_ns > 0)
    deviation = np.divide(nodes.duration_ns, source_ns, out=np.ones(count), where=on_both)
    nameless: Mask = np.isnan(kernel_ns)
    part = _part(nodes, keyed.key, nameless)
    named: F64 = np.where(nameless, part * rest_ns, kernel_ns)
    time_ns = named * deviation**SOURCE_SHARE

    def term(i: int, _: Term | None) -> Term | None:
        if not np.isfinite(time_ns[i]):
            return None
        match = matched.match_of(i)
        rows = len(match.rows) if match else 0
        mean = f", geometric mean of {rows} rows" if rows > 1 else ""
        if nameless[i]:
            note = f"kernels of the call that the trace does not have{mean}"
            looked_up = product(
                quantity("looked up", rest_ns[i], note=note),
                factor(part[i], "part", "of the operator's time"),
            )
        else:
            looked_up = quantity("looked up", kernel_ns[i], note=f"the kernel of this name{mean}")
        if not on_both[i]:
            return looked_up
        here = "" if basis.source is None else f"on {basis.source.name}"
        measured = quantity("measured", nodes.duration_ns[i], note=here)
        row = quantity("source row", source_ns[i], note=f"the kernel's row {here}")
        return product(looked_up, power(quotient(measured, row), factor(SOURCE_SHARE)), name="both")

    if record is not None:
        record.update(slice(0, count), term)
    rules = np.where(on_both, Rule.LOOKED_UP_ON_BOTH, Rule.LOOKED_UP).astype(np.uint8)
    return Lookups(time_ns, rules, matched.uncertainty)


def _part(nodes: _Nodes, key: I64, nameless: Mask) -> F64:
    """Return each node's share of its operator's time in kernels that the target's row lacks.

    The share of these kernels in an operator's time is assumed equal for all instances of a call.

    Args:
        nodes: the nodes.
        key: their call keys, int64[n].
        nameless: nodes whose kernel name is not in the target's row, bool[n].
    """
    has_time = np.isfinite(nodes.operator_ns)
    times = np.where(has_time, nodes.duration_ns, 0.0)
    all_ns, nameless_ns = (np.bincount(key, weights=w) for w in (times, times * nameless))
    share = np.divide(nameless_ns, all_ns, out=np.ones_like(nameless_ns), where=nameless_ns > 0)
    return nodes.duration_ns / (nodes.operator_ns * share[key])


def _between(nodes: _Nodes, keyed: Keyed, basis: Basis, record: TermRecord | None) -> Lookups:
    """Return predictions for calls without rows, interpolated between neighbouring rows."""
    keys, library = keyed.keys, basis.library
    time, bound = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
    other_versions = np.zeros(len(keys), dtype=bool)
    missing = [position for position, key in enumerate(keys) if key not in library.target]
    predictions = between(
        library, [keys[position] for position in missing], basis.target, basis.from_description
    )
    for position, prediction in zip(missing, predictions, strict=True):
        if prediction is not None:
            time[position], bound[position] = prediction.time_ns, prediction.bound
            rows = [row for near in prediction.neighbours for row in library.target[near.key]]
            other_versions[position] = not all(library.ran_with(row) for row in rows)
    # An interpolated time is of the whole operator; its kernels share it as they were measured.
    part = np.ones(len(keyed.key)) if nodes.whole else nodes.duration_ns / nodes.operator_ns
    # The neighbours are contiguous.
    part = np.where(nodes.streams_strided, np.nan, part)
    if record is not None:
        by_key = dict(zip(missing, predictions, strict=True))
        for row in record.rows.tolist():
            prediction = by_key.get(int(keyed.key[row]))
            if prediction is not None:
                record.facts[row] += neighbour_facts(prediction)
                if np.isfinite(part[row]):
                    record.roots[row] = prediction.term(float(part[row]))
    rules = np.full(len(keyed.key), Rule.BETWEEN, dtype=np.uint8)
    uncertainty = Uncertainty.none(len(keyed.key))._replace(
        spread=bound[keyed.key] / HALF_WIDTH, other_versions=other_versions[keyed.key]
    )
    return Lookups(part * time[keyed.key], rules, uncertainty)


def call_text(key: CallKey) -> str:
    """Return a call as text: operator, shapes and dtypes."""
    shapes = " ".join(str(list(shape)).replace(" ", "") for shape in key.shapes[:4])
    more = f" and {len(key.shapes) - 4} more" if len(key.shapes) > 4 else ""
    return f"{key.operator} {shapes}{more} {', '.join(dict.fromkeys(key.dtypes))}"


def match_facts(match: Match | None) -> list[tuple[str, str]]:
    """Return the rows of a call as facts: durations, and the conditions of their measurement."""
    facts: list[tuple[str, str]] = []
    if match is not None:
        for row in match.rows:
            facts += [("row", row_text(row)), ("row measured", _conditions(row))]
        facts += [("source row", row_text(row)) for row in match.source]
    return facts


def neighbour_facts(prediction: "Between") -> list[tuple[str, str]]:
    """Return the rows around a call as facts."""
    return [
        (
            "near",
            f"{call_text(neighbour.key)}: {neighbour.time_ns:,.0f} ns, ln(measured / modelled) = "
            f"{neighbour.off:+.3f}, weight {neighbour.weight:.2f}",
        )
        for neighbour in prediction.neighbours
    ]


def row_text(row: KernelRow) -> str:
    """Return a row as text: its durations and kernels."""
    kernels = row.kernels[0] if row.kernels else ""
    if len(row.kernels) > 1:
        kernels += f" and {len(row.kernels) - 1} more"
    return (
        f"{sum(row.kernel_ns):,} ns ({row.median_ns:,} replayed, {row.p10_ns:,} to {row.p90_ns:,} "
        f"in {row.samples} samples, {row.l2} cache, layout {row.layout}) by {kernels}"
    )


def _conditions(row: KernelRow) -> str:
    readings = [
        f"{value:,.0f} {unit}"
        for value, unit in ((row.sm_clock_mhz, "MHz"), (row.power_w, "W"), (row.temperature_c, "C"))
        if value is not None
    ]
    versions = [f"{name} {getattr(row, name)}" for name in VERSIONS if getattr(row, name)]
    return ", ".join([f"{row.gpu} {row.date}", *readings, *versions])
