"""The time of kernels whose instructions are known."""

from dataclasses import replace

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work

# A float8 cast of an MLP's backward: 16,384 x 14,336 elements on an H100 (torch 2.11).
MOVED = 3_288_334_342
CLOCK_HZ = 1.83e9


def predicted_us(gpu: str, instructions: float) -> tuple[float, int]:
    """Return the time above the floor of a launch, and the rule."""
    kernels = kernels_of([Work(bytes_read=MOVED, bytes_written=0)], np.zeros(1))
    alone = replace(kernels, bytes=np.zeros(1))
    kernels = replace(kernels, instructions=np.array([instructions]))
    target = load_gpu(gpu)
    (time_ns,), (rule,) = predict_from_datasheet(kernels, target)
    (floor_ns,), _ = predict_from_datasheet(alone, target)
    return (time_ns - floor_ns) / 1e3, int(rule)


def test_instructions_lengthen_a_kernel_that_memory_bounds():
    memory_us, _ = predicted_us("H100", 0)
    us, rule = predicted_us("H100", 715.7e6 * 32)
    issued_us = 715.7e6 * 32 / (132 * 128 * CLOCK_HZ) * 1e6
    assert us == pytest.approx((memory_us**3 + issued_us**3) ** (1 / 3))
    assert rule == Rule.MEMORY
    # Nsight Compute measured 1,190 us at 1.97 GHz, a profiled training step 1,243 us.
    assert us == pytest.approx(1_217, rel=0.03)


def test_instructions_bound_a_kernel_that_moves_little():
    us, rule = predicted_us("H100", 1e12)
    assert us == pytest.approx(1e12 / (132 * 128 * CLOCK_HZ) * 1e6, rel=0.001)
    assert rule == Rule.ISSUE


def test_other_vendors_gpus_were_not_measured():
    assert predicted_us("MI300X", 1e12) == predicted_us("MI300X", 0)
