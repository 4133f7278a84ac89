"""Robust least squares: Levenberg and Marquardt's steps on reweighted residuals."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
_STEP = 1e-2
_SCALE = 0.1
_PULL = 0.005
_ROUNDS = 40


def least_squares(residuals: Callable[[F64], F64], start: F64) -> F64:
    """Return the x near `start` that minimises sum 2*s^2*(sqrt(1 + (r/s)^2) - 1), s = 0.1.

    Residuals far above s count by their size, not its square, so that a shape for which a library
    has a bad kernel on one GPU does not rule. A weak pull towards `start` holds what the residuals
    leave open.

    Args:
        residuals: x, float64[p], to residuals, float64[d].
        start: where to begin, float64[p].
    """
    x: F64 = start.copy()
    damping = 1e-2
    here = residuals(x)
    pull = _PULL * np.sqrt(len(here))
    cost = _cost(here, pull * (x - start))
    for _ in range(_ROUNDS):
        slopes = _slopes(residuals, x, here)
        weight: F64 = 1 / np.sqrt(1 + (here / _SCALE) ** 2)
        curvature: F64 = (slopes * weight) @ slopes.T + pull**2 * np.eye(len(x))
        gradient: F64 = (slopes * weight) @ here + pull**2 * (x - start)
        while damping < 1e6:
            moved = x - _solved(curvature + damping * np.diag(np.diag(curvature)), gradient)
            there = residuals(moved)
            lower = _cost(there, pull * (moved - start))
            if lower < cost:
                break
            damping *= 4
        else:
            return x
        gained = (cost - lower) / cost
        x, here, cost, damping = moved, there, lower, damping / 4
        if gained < 1e-5:
            return x
    return x


def _slopes(residuals: Callable[[F64], F64], x: F64, here: F64) -> F64:
    """Return the derivative of each residual by each coordinate, float64[p, d]."""
    axes: F64 = _STEP * np.eye(len(x))
    return np.array([(residuals(x + axes[i]) - here) / _STEP for i in range(len(x))])


def _solved(matrix: F64, right: F64) -> F64:
    return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)


def _cost(residuals: F64, pulls: F64) -> float:
    robust = 2 * _SCALE**2 * (np.sqrt(1 + (residuals / _SCALE) ** 2) - 1)
    return float(robust.sum() + (pulls**2).sum())
