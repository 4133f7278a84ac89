"""Interpolate between the measured calls of a database.

A model's prediction is corrected by its error at the measured sizes around a call. A call is a
point of log sizes. ln(measured / modelled) is averaged over the 8 nearest measured points with
weights 1 / (distance^2 + 0.1^2). Only points inside the range of the measured ones, and within a
distance of 2 of one of them, are interpolated.

The error of an interpolation is estimated by leaving out: measured points are predicted from others
that are at least as far away as the call is from its nearest point.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.calls import (
    BY_LAYOUT,
    CallKey,
    CallPoint,
    Layout,
    layout_of_row,
    modelled_ns,
    point_of,
)
from onerank.annotate.kernel_db.database import Library
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.prediction_terms import Term, exponential, factor, product, quantity
from onerank.annotate.op_costs.op_classes import op_class
from onerank.ir.arrays import F64, I64, Mask

FEWEST = 5
"""Least number of points; with five, the bound is the largest of their errors."""

_NEIGHBOURS = 8

# Distance in ln below which points have about equal weights: sizes within 10%.
_BLUNT = 0.1

# Largest distance in ln to the nearest measured point: a factor of 7 in one size.
_FARTHEST = 2.0

# Distances for which errors are estimated; a point uses the largest one below its distance. A size
# doubled is at a distance of ln 2 = 0.69.
_RADII = (0.0, 0.1, 0.2, 0.35, 0.5, 0.69, 1.0, 1.38)

# Leave-one-out errors per estimate: at least 300, or all points if there are fewer. Each costs a
# pass over all points.
_LEFT_OUT = 300

_LEVEL = 0.8  # an 80% interval

_TOLERANCE = 1e-9  # rounding of the logarithms at the ends of the measured range

# Requested points per block, which bounds the matrix of distances to all measured points.
_CHUNK = 128


class Interpolated(NamedTuple):
    """Interpolation results for q points.

    Attributes:
        off: expected ln(measured / modelled), float64[q]; nan outside the range of interpolation.
        bound: 80% of the errors of `off` at left-out points are within it, float64[q].
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
    estimate = (weight * off[near]).sum(axis=1)
    inside = _inside(sizes, at)
    step: I64 = np.searchsorted(np.array(_RADII), distance[:, 0], side="right") - 1
    bounds = np.full(len(_RADII), np.nan)
    for index in np.unique(step[inside]):
        bounds[index] = bound_beyond(sizes, off, _RADII[int(index)])
    bound = bounds[step]
    usable = inside & (distance[:, 0] <= _FARTHEST) & np.isfinite(bound)
    return Interpolated(
        np.where(usable, estimate, np.nan), np.where(usable, bound, np.nan), near, weight
    )


def bound_beyond(sizes: F64, off: F64, radius: float) -> float:
    """Return the bound of 80% of the errors of points predicted from others beyond a radius.

    Points on the rim of the measured range are ignored if enough others remain, since nothing is
    interpolated there. nan if fewer than `FEWEST` points can be predicted. The bound is the error
    of rank 0.8 * (n + 1) among n, or the largest, which is conservative for few points.
    """
    if len(sizes) < FEWEST:
        return np.nan
    step = max(1, len(sizes) // _LEFT_OUT)
    errors, surrounded = list[float](), list[bool]()
    for row in range(0, len(sizes), step):
        distance = np.sqrt(((sizes - sizes[row]) ** 2).sum(axis=1))
        others = distance >= radius
        others[row] = False
        rest, distances = np.flatnonzero(others), distance[others]
        # The left-out point counts as one of `FEWEST`. Points whose
        # neighbours are all far off say nothing about interpolation.
        if len(rest) < FEWEST - 1 or distances.min() > 2 * max(radius, 1):
            continue
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        estimate = (_weights(distances[nearest][None]) * off[rest[nearest]]).sum()
        errors.append(abs(float(off[row] - estimate)))
        surrounded.append(bool(_inside(sizes[rest], sizes[row][None])[0]))
    inner = [error for error, is_inner in zip(errors, surrounded, strict=True) if is_inner]
    counted = np.sort(inner if len(inner) >= FEWEST else errors)
    if len(counted) < FEWEST:
        return np.nan
    rank = int(np.ceil(_LEVEL * (len(counted) + 1)))
    return float(counted[min(rank, len(counted)) - 1])


def _inside(sizes: F64, at: F64) -> Mask:
    """Return which points are within the range of others in every size, bool[q]."""
    above, below = at >= sizes.min(axis=0) - _TOLERANCE, at <= sizes.max(axis=0) + _TOLERANCE
    return (above & below).all(axis=1)


def _weights(distance: F64) -> F64:
    """Return the weights of neighbours, which add up to 1, float64[q, k]."""
    weight = 1 / (distance**2 + _BLUNT**2)
    return weight / weight.sum(axis=1, keepdims=True)


def _nearest(sizes: F64, at: F64) -> tuple[F64, I64]:
    """Return (distances, points) of the nearest measured points, ascending, [q, k] each."""
    count = min(_NEIGHBOURS, len(sizes))
    distance, near = np.empty((len(at), count)), np.empty((len(at), count), dtype=np.int64)
    for start in range(0, len(at), _CHUNK):
        part = slice(start, start + _CHUNK)
        pairs = zip(at[part].T, sizes.T, strict=True)
        squares = np.zeros((len(at[part]), len(sizes)))
        for requested, measured in pairs:
            squares += (requested[:, None] - measured) ** 2
        # Only the eight nearest points need an order, so all distances are partitioned, not sorted.
        chosen = np.argpartition(squares, count - 1, axis=1)[:, :count]
        chosen_squares = np.take_along_axis(squares, chosen, axis=1)
        order = np.argsort(chosen_squares, axis=1, kind="stable")
        near[part] = np.take_along_axis(chosen, order, axis=1)
        distance[part] = np.sqrt(np.take_along_axis(chosen_squares, order, axis=1))
    return distance, near


class Neighbour(NamedTuple):
    """A measured call near an unmeasured one.

    Attributes:
        key: the call.
        time_ns: measured time.
        off: ln(measured / modelled).
        weight: its weight among the neighbours.
    """

    key: CallKey
    time_ns: float
    off: float
    weight: float


class Between(NamedTuple):
    """A call that was not measured, predicted from its neighbours.

    Attributes:
        time_ns: time of all kernels of the operator, without copies and fills.
        modelled_ns: the model's prediction from the shape.
        bound: bound of |ln(measured / predicted)| for 80% of left-out rows.
        neighbours: the measured calls, largest weight first.
    """

    time_ns: float
    modelled_ns: float
    bound: float
    neighbours: tuple[Neighbour, ...]

    def term(self, part: float) -> Term:
        """Return the time of a kernel that takes `part` of the operator's time as a term."""
        off = float(np.log(self.time_ns / self.modelled_ns))
        note = f"80% of the rows left out are within e^+-{self.bound:.3f}"
        modelled = quantity("modelled", self.modelled_ns, note="the model's time by the shape")
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

    Only rows of the same group are compared (see `calls.point_of`), in elementwise kernels and
    copies those of contiguous operands. The module's docstring
    gives the range of interpolation.
    """
    predictions: list[Between | None] = [None] * len(keys)
    unmeasured: dict[tuple[object, ...], list[tuple[int, CallPoint]]] = {}
    for position, key in enumerate(keys):
        if point := point_of(key):
            unmeasured.setdefault(point.group, []).append((position, point))
    operators = {keys[position].operator for calls in unmeasured.values() for position, _ in calls}
    measured: dict[tuple[object, ...], list[tuple[CallKey, CallPoint]]] = {}
    for key in library.target:
        if key.operator not in operators or not _comparable(library, key):
            continue
        if (point := point_of(key)) and point.group in unmeasured:
            measured.setdefault(point.group, []).append((key, point))
    for group, rows in measured.items():
        if len(rows) >= FEWEST:
            points = [point for _, point in unmeasured[group]]
            interpolated = _interpolate_group(library, rows, points, gpu, from_description)
            for (position, _), prediction in zip(unmeasured[group], interpolated, strict=True):
                predictions[position] = prediction
    return predictions


def _compared_layout(key: CallKey) -> Layout | None:
    """Return the layout of the rows that are compared; None for all."""
    return {} if op_class(key.operator) in BY_LAYOUT else None


def _comparable(library: Library, key: CallKey) -> bool:
    """Return whether a call has a row with contiguous operands, if its time depends on them."""
    return _compared_layout(key) is None or any(
        not layout_of_row(row.layout, row.shapes) for row in library.target[key]
    )


def _interpolate_group(
    library: Library,
    rows: list[tuple[CallKey, CallPoint]],
    unmeasured: list[CallPoint],
    gpu: Gpu,
    from_description: PredictFromDescription,
) -> list[Between | None]:
    """Return predictions for unmeasured points of one group, from its measured rows."""
    matches = [library.match(key, layout=_compared_layout(key)) for key, _ in rows]
    # Without a kernel's name all kernels but copies and
    # fills count, which are separate nodes in a trace.
    times_ns = np.array([match.rest_ns if match else np.nan for match in matches])
    off = np.log(times_ns / modelled_ns([point.work for _, point in rows], gpu, from_description))
    predicted_ns = modelled_ns([point.work for point in unmeasured], gpu, from_description)
    row_sizes = np.array([point.sizes for _, point in rows])
    sizes = np.array([point.sizes for point in unmeasured])
    interpolated = interpolate(row_sizes, off, sizes)
    predictions = list[Between | None]()
    for index in range(len(unmeasured)):
        if not np.isfinite(interpolated.off[index]):
            predictions.append(None)
            continue
        neighbours = tuple(
            Neighbour(rows[row][0], float(times_ns[row]), float(off[row]), float(weight))
            for row, weight in zip(
                interpolated.near[index].tolist(), interpolated.weight[index], strict=True
            )
        )
        time_ns = float(predicted_ns[index] * np.exp(interpolated.off[index]))
        predictions.append(
            Between(
                time_ns, float(predicted_ns[index]), float(interpolated.bound[index]), neighbours
            )
        )
    return predictions
