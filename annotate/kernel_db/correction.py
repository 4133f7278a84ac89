"""Between measured sizes: a model's figure, corrected by how far it was off around them.

A call is a point, by the logarithms of its sizes. ln(measured / modelled) is averaged over the 8
nearest measured points with the weights 1 / (distance^2 + 0.1^2). Only points inside the range of
the measured ones, and within a distance of 2 of one of them, are interpolated.

How far that is off is found by leaving out: measured points are predicted from the others that are
at least as far from them as the call is from its nearest.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


class Interpolated(NamedTuple):
    """What the measured points tell of q others.

    Attributes:
        off: ln(measured / modelled) expected; nan outside of what is interpolated, float64[q].
        bound: four of five errors of `off` are within this, of points left out, float64[q].
        near: nearest measured points, int64[q, k].
        weight: of these, float64[q, k].
    """

    off: F64
    bound: F64
    near: I64
    weight: F64


def interpolate(sizes: F64, off: F64, at: F64) -> Interpolated:
    """Return what measured points tell of others.

    Args:
        sizes: ln of the sizes that were measured, float64[d, f].
        off: ln(measured / modelled) there, float64[d].
        at: ln of the sizes asked for, float64[q, f].
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
    """Return what four of five errors stay below, of points predicted from those beyond a radius.

    Points at the rim, which the others do not surround, are left out of the count as long as others
    are there: nothing is interpolated there. nan where fewer than `FEWEST` can be predicted. Of n
    errors it is the one of rank 0.8 * (n + 1), or the largest: with few, a cautious figure.
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
