"""FLOPs of decompositions and Fourier transforms by hand, and their times as an H200 took them."""

import json

import numpy as np
import pytest

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class

REAL, COMPLEX = "Tensor(float)", "Tensor(c10::complex<float>)"


def work(op: str, *shapes: list[int]) -> Work:
    inputs = json.dumps(shapes), json.dumps([REAL] * len(shapes))
    return work_of(f"aten::{op}", inputs, (json.dumps(shapes[:1]), json.dumps([REAL])))


def transform(
    op: str, given: list[int], result: list[int], axes: list[int], *, onesided: bool = True
) -> Work:
    types = {"_fft_c2c": (COMPLEX, COMPLEX), "_fft_r2c": (REAL, COMPLEX)}[op]
    inputs, results = (
        (json.dumps([shape]), json.dumps([kind]))
        for shape, kind in zip((given, result), types, strict=True)
    )
    return work_of(f"aten::{op}", inputs, results, json.dumps([None, axes, 0, onesided]))


def microseconds(of: Work) -> float:
    kernels = kernels_of([of], np.zeros(1))
    return float(predict_from_datasheet(kernels, load_gpu("H200")).duration_ns[0]) / 1e3


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        ("linalg_cholesky_ex", [[2, 30, 30]], 2 * 9_000),
        ("linalg_inv_ex", [[30, 30]], 54_000),
        ("_linalg_solve_ex", [[30, 30], [30, 5]], 18_000 + 5 * 1_800),
        ("linalg_qr", [[60, 30]], 2 * (108_000 - 18_000)),
        ("linalg_qr", [[30, 60]], 2 * (108_000 - 18_000)),
        ("_linalg_eigh", [[4, 30, 30]], 4 * 243_000),
        ("_linalg_svd", [[300, 30]], 6 * 300 * 900 + 20 * 27_000),
        ("linalg_lstsq", [[60, 30], [60, 2]], 90_000 + 2 * (7_200 - 900)),
    ],
)
def test_flops_of_decompositions(op: str, shapes: list[list[int]], flops: int):
    assert work(op, *shapes).flops == flops
    assert op_class(f"aten::{op}") is OpClass.DECOMPOSITION


def test_flops_of_fourier_transforms():
    assert transform("_fft_c2c", [8, 64, 32], [8, 64, 32], [1, 2]).flops == 5 * 16_384 * 11
    assert transform("_fft_r2c", [8, 64], [8, 33], [1]).flops == 5 * 512 * 6 // 2


@pytest.mark.parametrize(
    ("op", "shape", "measured_us"),
    [
        ("_linalg_svd", [1024, 1024], 50_922),
        ("_linalg_svd", [64, 128, 128], 130_261),
        ("_linalg_eigh", [512, 512], 12_775),
        ("linalg_qr", [4096, 512], 3_496),
        ("linalg_inv_ex", [2048, 2048], 6_007),
        ("linalg_cholesky_ex", [1024, 1024], 362),
    ],
)
def test_times_are_those_of_an_h200(op: str, shape: list[int], measured_us: float):
    assert microseconds(work(op, shape)) == pytest.approx(measured_us, rel=0.12)


def test_a_prime_length_streams_the_data_several_times():
    even, prime = (transform("_fft_c2c", [512, n], [512, n], [1]).passes for n in (1024, 421))
    assert prime / even == pytest.approx(4.7)


@pytest.mark.parametrize(
    ("rows", "length", "measured_us"),
    [(65_536, 1024, 724.3), (65_536, 256, 186.7), (4096, 16_384, 800.1), (65_536, 96, 91.0)],
)
def test_a_real_transform_copies_the_conjugates(rows: int, length: int, measured_us: float):
    both = transform("_fft_r2c", [rows, length], [rows, length], [1], onesided=False)
    assert microseconds(both) == pytest.approx(measured_us, rel=0.16)


@pytest.mark.parametrize(
    ("op", "shape", "axes", "measured_us"),
    [
        ("_fft_r2c", [16, 64, 256, 256], [2, 3], 329.6),
        ("_fft_r2c", [4, 128, 421, 421], [2, 3], 2098.4),
        ("_fft_c2c", [16, 64, 256, 256], [2, 3], 544.8),
        ("_fft_c2c", [4, 32, 64, 64, 64], [2, 3, 4], 429.1),
    ],
)
def test_transforms_are_those_of_an_h200(op: str, shape: list[int], axes: list[int], measured_us):
    result = [*shape[:-1], shape[-1] // 2 + 1] if op == "_fft_r2c" else shape
    assert microseconds(transform(op, shape, result, axes)) == pytest.approx(measured_us, rel=0.1)
