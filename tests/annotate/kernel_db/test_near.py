"""Interpolation between measured points, and its error by leaving points out."""

import numpy as np
import pytest

from onerank.annotate.kernel_db.interpolate import bound_beyond, interpolate


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def test_the_mean_of_neighbours_by_distance():
    sizes, off = column(0, 1, 2, 3, 4), np.array([0.1, 0.1, 0.3, 0.3, 0.3])
    found = interpolate(sizes, off, column(1.5))
    near, far = 1 / (0.5**2 + 0.01), 1 / (1.5**2 + 0.01)
    farthest = 1 / (2.5**2 + 0.01)
    whole = 2 * near + 2 * far + farthest
    expected = ((near + far) * 0.1 + (near + far + farthest) * 0.3) / whole
    assert found.off[0] == pytest.approx(expected)
    assert found.weight[0].sum() == pytest.approx(1)


def test_only_inside_the_range_and_near_a_point():
    sizes = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [9, 0], [9, 1], [8, 1]], dtype=np.float64)
    off = np.full(7, 0.2)
    at = np.array([[0.5, 0.5], [-0.1, 0.5], [0.5, 1.1], [4.5, 0.5]])
    assert np.isfinite(interpolate(sizes, off, at).off).tolist() == [True, False, False, False]
    assert np.isnan(interpolate(sizes[:4], off[:4], at).off).all()  # too few points


def test_the_bound_is_of_points_left_out():
    # each inner point is predicted from the others, which are all equal but for itself
    sizes = column(*range(12))
    off = np.zeros(12)
    off[[2, 5, 9]] = 0.5, -0.4, 0.3
    errors = []
    for left in range(1, 11):
        rest = [row for row in range(12) if row != left]
        apart = np.array([abs(row - left) for row in rest], dtype=np.float64)
        nearest = np.argsort(apart, kind="stable")[:8]
        weight = 1 / (apart[nearest] ** 2 + 0.01)
        predicted = (weight * off[np.array(rest)[nearest]]).sum() / weight.sum()
        errors.append(abs(off[left] - predicted))
    ninth = np.sort(errors)[8]  # rank 0.8 * 11 of ten errors, rounded up
    assert bound_beyond(sizes, off, 0.0) == pytest.approx(ninth)


def test_errors_are_those_at_the_distance_of_the_prediction():
    # pairs a hundredth apart agree; the pairs themselves do not
    rng = np.random.default_rng(0)
    level = rng.normal(0, 0.3, 40)
    sizes = np.concatenate([column(*range(40)), column(*(np.arange(40) + 0.01))])
    off = np.concatenate([level, level])
    close, apart = interpolate(sizes, off, column(20.005, 20.5)).bound
    assert close < 0.1
    assert apart > 0.2


def test_four_of_five_are_within_the_bound():
    rng = np.random.default_rng(1)
    sizes, at = rng.uniform(0, 5, (400, 3)), rng.uniform(0.5, 4.5, (2000, 3))

    def truth(where: np.ndarray) -> np.ndarray:
        return 0.2 * np.sin(2 * where[:, 0]) + 0.1 * where[:, 1] + rng.normal(0, 0.05, len(where))

    found = interpolate(sizes, truth(sizes), at)
    predicted = np.isfinite(found.off)
    inside = np.abs(truth(at) - found.off)[predicted] <= found.bound[predicted]
    assert predicted.mean() > 0.9
    assert 0.75 < inside.mean() < 0.88
