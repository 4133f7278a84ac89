"""Query the databases for nodes: exact rows, or interpolation between measured sizes.

Between measured sizes, a model's prediction is corrected by its error at the measured sizes around
it. A call is a point of log sizes. ln(measured / modelled) is averaged over the 8 nearest measured
points with weights 1 / (distance^2 + 0.1^2). Only points inside the range of the measured ones, and
within a distance of 2 of one of them, are interpolated.

The error of an interpolation is estimated by leaving out: measured points are predicted from others
that are at least as far away as the call is from its nearest point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.call_features import Point, modelled_ns, point_of
from onerank.annotate.kernel_db.call_keys import CallKey, Keyed, keys_of
from onerank.annotate.kernel_db.database import VERSIONS, KernelRow
from onerank.annotate.kernel_db.database_set import Library, Match
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.error_model import Uncertainty
from onerank.annotate.models.features import U8
from onerank.annotate.models.intervals import HALF_WIDTH
from onerank.annotate.models.provenance import Rule
from onerank.annotate.models.terms import (
    Term,
    TermRecord,
    exponential,
    factor,
    power,
    product,
    quantity,
    quotient,
)
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.unique_rows import combine
from onerank.ir import UNKNOWN, Graph

F64 = npt.NDArray[np.float64]

I64 = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]

FEWEST = 5
"""Points there must be; with so few the bound is the largest of their errors."""

_NEIGHBOURS = 8

_BLUNT = 0.1  # sizes nearer than 10% tell the same

_FARTHEST = 2.0

_RADII = (0.0, 0.1, 0.2, 0.35, 0.5, 0.69, 1.0, 1.38)
"""A distance counts as the next of these below it; two sizes, one double the other, are 0.69."""

_LEFT_OUT = 300  # points left out, one at a time: so many at least, up to half as many more

_LEVEL = 0.8

_ROOM = 1e-9

_CHUNK = 128


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


class Interpolated(NamedTuple):
    """Interpolation results for q points.

    Attributes:
        off: expected ln(measured / modelled), float64[q]; nan outside the range of interpolation.
        bound: four of five errors of `off` at left-out points are within it, float64[q].
        near: nearest measured points, int64[q, k].
        weight: their weights, float64[q, k].
    """

    off: F64
    bound: F64
    near: I64
    weight: F64


def interpolate(sizes: F64, off: F64, at: F64) -> Interpolated:
    """Interpolate the error of a model between measured points.

    Args:
        sizes: ln of the measured sizes, float64[d, f].
        off: ln(measured / modelled) there, float64[d].
        at: ln of the requested sizes, float64[q, f].
    """
    distance, near = _nearest(sizes, at)
    weight = _weights(distance)
    made = (weight * off[near]).sum(axis=1)
    inside = _inside(sizes, at)
    step: I64 = np.searchsorted(np.array(_RADII), distance[:, 0], side="right") - 1
    bounds = np.full(len(_RADII), np.nan)
    for one in np.unique(step[inside]):
        bounds[one] = bound_beyond(sizes, off, _RADII[int(one)])
    bound = bounds[step]
    usable = inside & (distance[:, 0] <= _FARTHEST) & np.isfinite(bound)
    return Interpolated(
        np.where(usable, made, np.nan), np.where(usable, bound, np.nan), near, weight
    )


def bound_beyond(sizes: F64, off: F64, radius: float) -> float:
    """Return the bound of four of five errors, for points predicted from those beyond a radius.

    Points at the rim, not surrounded by others, are ignored if there are others: nothing is
    interpolated there. nan if fewer than `FEWEST` points can be predicted. Of n errors the bound is
    the one of rank 0.8 * (n + 1), or the largest, which is cautious for few points.
    """
    if len(sizes) < FEWEST:
        return np.nan
    step = max(1, len(sizes) // _LEFT_OUT)
    errors, surrounded = list[float](), list[bool]()
    for row in range(0, len(sizes), step):
        distance = np.sqrt(((sizes - sizes[row]) ** 2).sum(axis=1))
        others = distance >= radius
        others[row] = False
        rest, apart = np.flatnonzero(others), distance[others]
        if len(rest) < FEWEST - 1 or apart.min() > 2 * max(radius, 1):
            continue
        nearest = np.argsort(apart, kind="stable")[:_NEIGHBOURS]
        told = (_weights(apart[nearest][None]) * off[rest[nearest]]).sum()
        errors.append(abs(float(off[row] - told)))
        surrounded.append(bool(_inside(sizes[rest], sizes[row][None])[0]))
    inner = [error for error, one in zip(errors, surrounded, strict=True) if one]
    counted = np.sort(inner if len(inner) >= FEWEST else errors)
    if len(counted) < FEWEST:
        return np.nan
    rank = int(np.ceil(_LEVEL * (len(counted) + 1)))
    return float(counted[min(rank, len(counted)) - 1])


def _inside(sizes: F64, at: F64) -> Mask:
    """Return which points are within the range of others in every size, bool[q]."""
    above, below = at >= sizes.min(axis=0) - _ROOM, at <= sizes.max(axis=0) + _ROOM
    return (above & below).all(axis=1)


def _weights(distance: F64) -> F64:
    """Return the weights of neighbours, which add up to 1, float64[q, k]."""
    weight = 1 / (distance**2 + _BLUNT**2)
    return weight / weight.sum(axis=1, keepdims=True)


def _nearest(sizes: F64, at: F64) -> tuple[F64, I64]:
    """Return (distances, points) of the nearest measured points, the nearest first."""
    count = min(_NEIGHBOURS, len(sizes))
    distance, near = np.empty((len(at), count)), np.empty((len(at), count), dtype=np.int64)
    for start in range(0, len(at), _CHUNK):
        part = slice(start, start + _CHUNK)
        pairs = zip(at[part].T, sizes.T, strict=True)
        squares = np.zeros((len(at[part]), len(sizes)))
        for one, other in pairs:
            squares += (one[:, None] - other) ** 2
        chosen = np.argpartition(squares, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(squares, chosen, axis=1)
        order = np.argsort(found, axis=1, kind="stable")
        near[part] = np.take_along_axis(chosen, order, axis=1)
        distance[part] = np.sqrt(np.take_along_axis(found, order, axis=1))
    return distance, near


class Neighbour(NamedTuple):
    """A measured call around another one.

    Attributes:
        key: the call.
        time_ns: measured.
        off: ln(measured / modelled).
        weight: of it among the neighbours.
    """

    key: CallKey
    time_ns: float
    off: float
    weight: float


class Between(NamedTuple):
    """A call that was not measured, predicted from its neighbours.

    Attributes:
        time_ns: of the operator's own kernels together.
        modelled_ns: the model's prediction without a measurement.
        bound: four of five ln(measured / predicted) of left-out rows are within it of 0.
        neighbours: largest weight first.
    """

    time_ns: float
    modelled_ns: float
    bound: float
    neighbours: tuple[Neighbour, ...]

    def term(self, part: float) -> Term:
        """Return the time of a kernel that takes `part` of the operator's time as a term."""
        off = float(np.log(self.time_ns / self.modelled_ns))
        note = f"four of five rows left out are within e^+-{self.bound:.3f}"
        modelled = quantity("modelled alone", self.modelled_ns, note="the model by the shape alone")
        deviation = factor(off, "off", "ln(measured / modelled) of the rows around the call")
        between = product(
            modelled, exponential(deviation), name="between", value=self.time_ns, note=note
        )
        if part == 1:
            return between
        return product(between, factor(part, "part", "of the operator's time"), name="kernel")


def between(
    library: Library, keys: Sequence[CallKey], gpu: Gpu, from_description: PredictFromDescription
) -> list[Between | None]:
    """Return predictions for calls without rows on `gpu`; None where interpolation is impossible.

    Only rows of the same operator, dtype and form are compared (see `points`); several rows of a
    call are averaged geometrically. See `near` for the range of interpolation.
    """
    predictions: list[Between | None] = [None] * len(keys)
    unmeasured: dict[tuple[object, ...], list[tuple[int, Point]]] = {}
    for position, key in enumerate(keys):
        if point := point_of(key):
            unmeasured.setdefault(point.group, []).append((position, point))
    operators = {keys[position].operator for calls in unmeasured.values() for position, _ in calls}
    measured: dict[tuple[object, ...], list[tuple[CallKey, Point]]] = {}
    for key in library.target:
        if key.operator in operators and (point := point_of(key)) and point.group in unmeasured:
            measured.setdefault(point.group, []).append((key, point))
    for group, rows in measured.items():
        if len(rows) >= FEWEST:
            points = [point for _, point in unmeasured[group]]
            interpolated = _interpolate_group(library, rows, points, gpu, from_description)
            for (position, _), prediction in zip(unmeasured[group], interpolated, strict=True):
                predictions[position] = prediction
    return predictions


def _interpolate_group(
    library: Library,
    rows: list[tuple[CallKey, Point]],
    unmeasured: list[Point],
    gpu: Gpu,
    from_description: PredictFromDescription,
) -> list[Between | None]:
    """Return predictions for unmeasured points of one group, from its measured rows."""
    matches = [library.match(key) for key, _ in rows]
    times = np.array([match.rest_ns if match else np.nan for match in matches])
    off = np.log(times / modelled_ns([point.work for _, point in rows], gpu, from_description))
    modelled = modelled_ns([point.work for point in unmeasured], gpu, from_description)
    row_sizes = np.array([point.sizes for _, point in rows])
    sizes = np.array([point.sizes for point in unmeasured])
    found = interpolate(row_sizes, off, sizes)
    predictions = list[Between | None]()
    for index in range(len(unmeasured)):
        if not np.isfinite(found.off[index]):
            predictions.append(None)
            continue
        neighbours = tuple(
            Neighbour(rows[row][0], float(times[row]), float(off[row]), float(weight))
            for row, weight in zip(found.near[index].tolist(), found.weight[index], strict=True)
        )
        time = float(modelled[index] * np.exp(found.off[index]))
        predictions.append(
            Between(time, float(modelled[index]), float(found.bound[index]), neighbours)
        )
    return predictions


SOURCE_SHARE = 0.5
"""Share of the source's ln(measured / looked up) that carries over to the target.

Two campaigns on one GPU disagree, because clocks, caches and libraries differ. In part they
disagree in the same way on two GPUs: for 35,742 GEMMs measured twice on H200 and on B200 the
correlation is 0.36; over 1 ms it is 0.48. Carrying over half reduces the time-weighted error from
11.1% to 7.9% (H200 to B200) and to 7.7% (back); from A100 to H100 and back, in another campaign,
from 10.0% to 8.8% and from 8.2% to 6.7%. Carrying over all gives 7.0, 7.2, 9.2 and 9.3%, and the
largest errors of single GEMMs.
"""

_BY_DATA = (OpClass.EMBEDDING, OpClass.INDEX)
"""Classes whose time depends on the indices."""


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
    """What the database says of n nodes.

    Attributes:
        time_ns: nan where it says nothing, float64[n].
        rules: `LOOKED_UP`, `LOOKED_UP_ON_BOTH` or `BETWEEN` where it says something, uint8[n].
        doubt: of what it says.
    """

    time_ns: F64
    rules: U8
    doubt: Uncertainty

    @classmethod
    def nothing(cls, count: int) -> Self:
        """Return what a database says that is empty."""
        return cls(np.full(count, np.nan), np.zeros(count, dtype=np.uint8), Uncertainty.none(count))

    def put(self, rows: I64, told: Self) -> None:
        """Take over the results of `told` for the nodes at `rows`."""
        known = np.isfinite(told.time_ns)
        rows = rows[known]
        self.time_ns[rows], self.rules[rows] = told.time_ns[known], told.rules[known]
        for mine, theirs in zip(self.doubt, told.doubt, strict=True):
            mine[rows] = theirs[known]


def look_up(
    graph: Graph, found: OpCosts, where: Mask, basis: Basis, record: TermRecord | None = None
) -> Lookups:
    """Return the database's durations for the nodes of `found` selected by `where`.

    A kernel takes the time of the kernel with its name in the row of its call. If the target runs
    other kernels, the operator's kernels share their time in proportion to their measured
    durations. If the source also has a row with the kernel, `SOURCE_SHARE` of its deviation from
    that row carries over. A call without a row may be interpolated (see `between`). `record` takes
    the durations as terms, and the rows as facts.
    """
    made = Lookups.nothing(len(where))
    sparse = found.is_class(OpClass.GEMM) & (found.flops == UNKNOWN)  # rows are of dense products
    rows = np.flatnonzero(where & ~sparse)
    keyed = keys_of(graph, found.index[rows], basis.library.operators)
    rows, keyed = rows[keyed.key >= 0], Keyed(keyed.key[keyed.key >= 0], keyed.keys)
    if len(rows):
        nodes = _Nodes.of(graph, found, rows)
        loosely = found.is_class(*_BY_DATA)
        scratch = None if record is None else record.within(rows)
        made.put(rows, _exact(graph, nodes, keyed, basis, scratch))
        made.put(rows, _between(nodes, keyed, basis, scratch))
        if record is not None and scratch is not None:
            record.take(rows, scratch)
        made.doubt.loosely[rows] = loosely[rows]
    return made


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes to look up.

    Attributes:
        whole: whether a node represents everything its operator launches, as in a CPU capture.
        name: codes of their names, int32[n].
        duration_ns: measured, float64[n].
        operator_ns: measured time of the operator instance's own kernels; nan if not measured, and
            for copies and fills, float64[n].
    """

    whole: bool
    name: npt.NDArray[np.int32]
    duration_ns: F64
    operator_ns: F64

    @classmethod
    def of(cls, graph: Graph, found: OpCosts, rows: I64) -> Self:
        index, operator = found.index[rows], found.operator_ns[rows]
        own = ~found.auxiliary[rows] & (operator > 0)
        return cls(
            graph.job.device.runs_operators,
            graph.nodes.name[index],
            graph.nodes.duration_ns[index].astype(np.float64),
            np.where(own, operator, np.nan),
        )


def _exact(
    graph: Graph, nodes: _Nodes, keyed: Keyed, basis: Basis, record: TermRecord | None
) -> Lookups:
    """Return what rows of the calls themselves say."""
    library = basis.library
    first, pair = combine([keyed.key, nodes.name])
    of = [int(key) for key in keyed.key[first]]
    names = graph.strings.decode(nodes.name[first])
    ran: list[set[str]] = [set() for _ in keyed.keys]
    for key, name in zip(of, names, strict=True):
        ran[key].add(name)
    matches = [
        library.match(keyed.keys[key], name, ran[key]) for key, name in zip(of, names, strict=True)
    ]
    figures: F64 = np.array([_figures(match) for match in matches], dtype=np.float64)[pair]
    kernel, rest, whole, source, spread = (figures[:, column] for column in range(5))
    versions = [m is None or all(library.ran_with(row) for row in m.rows) for m in matches]
    same = np.array(versions, dtype=bool)[pair]
    doubt = Uncertainty.none(len(pair))._replace(own=spread, otherwise=~same)
    if record is not None:
        for row in record.rows.tolist():
            key, match = keyed.keys[int(keyed.key[row])], matches[int(pair[row])]
            record.facts[row] += [("call", call_text(key)), *match_facts(match)]
    if nodes.whole:
        if record is not None:
            note = "all kernels of the call"
            record.update(
                slice(0, len(pair)),
                lambda i, _: (
                    quantity("looked up", whole[i], note=note) if np.isfinite(whole[i]) else None
                ),
            )
        return Lookups(whole, np.full(len(pair), Rule.LOOKED_UP, dtype=np.uint8), doubt)
    both: Mask = np.isfinite(source) & (nodes.duration_ns > 0)
    deviation = np.divide(nodes.duration_ns, source, out=np.ones(len(pair)), where=both)
    nameless: Mask = np.isnan(kernel)
    part = _part(nodes, keyed.key, nameless)
    named: F64 = np.where(nameless, part * rest, kernel)
    time = named * deviation**SOURCE_SHARE

    def term(i: int, _: Term | None) -> Term | None:
        if not np.isfinite(time[i]):
            return None
        match = matches[int(pair[i])]
        count = len(match.rows) if match else 0
        mean = f", geometric mean of {count} rows" if count > 1 else ""
        if nameless[i]:
            note = f"the call's kernels that the trace has none of{mean}"
            looked_up = product(
                quantity("looked up", rest[i], note=note),
                factor(part[i], "part", "of the operator's time"),
            )
        else:
            looked_up = quantity("looked up", kernel[i], note=f"the kernel of this name{mean}")
        if not both[i]:
            return looked_up
        here = "" if basis.source is None else f"on {basis.source.name}"
        measured = quantity("measured", nodes.duration_ns[i], note=here)
        row = quantity("source row", source[i], note=f"the kernel's row {here}")
        return product(looked_up, power(quotient(measured, row), factor(SOURCE_SHARE)), name="both")

    if record is not None:
        record.update(slice(0, len(pair)), term)
    rules = np.where(both, Rule.LOOKED_UP_ON_BOTH, Rule.LOOKED_UP).astype(np.uint8)
    return Lookups(time, rules, doubt)


def _figures(match: Match | None) -> tuple[float, ...]:
    """Return the kernel's time, the others', all, the kernel's on the source, and the spread."""
    return (np.nan,) * 5 if match is None else match[:5]


def _part(nodes: _Nodes, key: I64, nameless: Mask) -> F64:
    """Return each node's part of its operator's kernels that the target has none of by name.

    What part of an operator's time those have is taken to be the same for all of a call.
    """
    own = np.isfinite(nodes.operator_ns)
    times = np.where(own, nodes.duration_ns, 0.0)
    every, some = (np.bincount(key, weights=w) for w in (times, times * nameless))
    share = np.divide(some, every, out=np.ones_like(some), where=some > 0)
    return nodes.duration_ns / (nodes.operator_ns * share[key])


def _between(nodes: _Nodes, keyed: Keyed, basis: Basis, record: TermRecord | None) -> Lookups:
    """Return predictions for calls without rows, interpolated between neighbouring rows."""
    keys, library = keyed.keys, basis.library
    time, bound = np.full(len(keys), np.nan), np.full(len(keys), np.nan)
    otherwise = np.zeros(len(keys), dtype=bool)
    missing = [position for position, key in enumerate(keys) if key not in library.target]
    predictions = between(
        library, [keys[at] for at in missing], basis.target, basis.from_description
    )
    for at, prediction in zip(missing, predictions, strict=True):
        if prediction is not None:
            time[at], bound[at] = prediction.time_ns, prediction.bound
            rows = [row for near in prediction.neighbours for row in library.target[near.key]]
            otherwise[at] = not all(library.ran_with(row) for row in rows)
    part = np.ones(len(keyed.key)) if nodes.whole else nodes.duration_ns / nodes.operator_ns
    if record is not None:
        by_key = dict(zip(missing, predictions, strict=True))
        for row in record.rows.tolist():
            prediction = by_key.get(int(keyed.key[row]))
            if prediction is not None:
                record.facts[row] += neighbour_facts(prediction)
                if np.isfinite(part[row]):
                    record.roots[row] = prediction.term(float(part[row]))
    rules = np.full(len(keyed.key), Rule.BETWEEN, dtype=np.uint8)
    doubt = Uncertainty.none(len(keyed.key))._replace(
        own=bound[keyed.key] / HALF_WIDTH, otherwise=otherwise[keyed.key]
    )
    return Lookups(part * time[keyed.key], rules, doubt)
