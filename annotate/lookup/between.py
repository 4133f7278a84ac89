"""Calls that lie between rows of the kernel database."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.lookup.call_key import CallKey
from onerank.annotate.lookup.library import Library
from onerank.annotate.lookup.near import FEWEST, interpolate
from onerank.annotate.lookup.points import Point, modelled_ns, point_of
from onerank.annotate.models.model import Alone

F64 = npt.NDArray[np.float64]


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
    """A call that was not measured, and what those around it tell.

    Attributes:
        time_ns: of the operator's own kernels together.
        modelled_ns: what the model says of it without a measurement.
        bound: four of five of ln(measured / predicted) of rows left out are within it of 0.
        neighbours: the largest weight first.
    """

    time_ns: float
    modelled_ns: float
    bound: float
    neighbours: tuple[Neighbour, ...]


def between(
    library: Library, keys: Sequence[CallKey], gpu: Gpu, alone: Alone
) -> list[Between | None]:
    """Return what the rows of `gpu` tell of calls that have none, None where nothing.

    Compared are rows of one operator, data type and form, see `points`; where there are
    several of a call their geometric mean. See `near` for what is interpolated.
    """
    made: list[Between | None] = [None] * len(keys)
    asked: dict[tuple[object, ...], list[tuple[int, Point]]] = {}
    for position, key in enumerate(keys):
        if point := point_of(key):
            asked.setdefault(point.group, []).append((position, point))
    operators = {keys[position].operator for some in asked.values() for position, _ in some}
    measured: dict[tuple[object, ...], list[tuple[CallKey, Point]]] = {}
    for key in library.target:
        if key.operator in operators and (point := point_of(key)) and point.group in asked:
            measured.setdefault(point.group, []).append((key, point))
    for group, rows in measured.items():
        if len(rows) >= FEWEST:
            told = _told(library, rows, [point for _, point in asked[group]], gpu, alone)
            for (position, _), one in zip(asked[group], told, strict=True):
                made[position] = one
    return made


def _told(
    library: Library,
    rows: list[tuple[CallKey, Point]],
    asked: list[Point],
    gpu: Gpu,
    alone: Alone,
) -> list[Between | None]:
    matches = [library.match(key) for key, _ in rows]
    times = np.array([match.rest_ns if match else np.nan for match in matches])
    off = np.log(times / modelled_ns([point.work for _, point in rows], gpu, alone))
    modelled = modelled_ns([point.work for point in asked], gpu, alone)
    sizes, at = (np.array([point.sizes for point in some])
                 for some in ([point for _, point in rows], asked))  # fmt: skip
    found = interpolate(sizes, off, at)
    made = list[Between | None]()
    for one in range(len(asked)):
        if not np.isfinite(found.off[one]):
            made.append(None)
            continue
        around = tuple(
            Neighbour(rows[row][0], float(times[row]), float(off[row]), float(weight))
            for row, weight in zip(found.near[one].tolist(), found.weight[one], strict=True)
        )
        time = float(modelled[one] * np.exp(found.off[one]))
        made.append(Between(time, float(modelled[one]), float(found.bound[one]), around))
    return made
