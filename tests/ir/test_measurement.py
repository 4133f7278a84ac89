"""Figures that follow from the measured steps."""

import pytest

from onerank.ir import Job, Measurement
from onerank.ir.job import Module


def test_the_slowest_of_several_ranks_is_a_quantile_of_the_steps() -> None:
    measured = Measurement(step_ns=tuple(range(100, 0, -1)))
    assert measured.median_step_ns == 50
    assert measured.slowest_step_ns(1) == 50
    # 0.5 ** (1 / 4) of the way from the first of 100 steps to the last.
    assert measured.slowest_step_ns(4) == round(1 + 0.5**0.25 * 99)


@pytest.mark.parametrize("steps", [(), (10,), (10, 11, 12, 13, 14)])
def test_few_steps_do_not_tell_the_slowest_rank_from_an_outlier(steps: tuple[int, ...]) -> None:
    assert Measurement(step_ns=steps).slowest_step_ns(8) is None


def test_a_job_of_thousands_of_modules_is_a_few_lines() -> None:
    paths = (f"layers.{layer}" for layer in range(5000))
    modules = tuple(Module(path=path, type="Linear") for path in paths)
    text = repr(Job(rank=3, modules=modules, measurement=Measurement(step_ns=(10**9,) * 5000)))
    assert "rank=3" in text
    assert "layers.0" in text
    assert len(text) < 4000
