"""Errors of left-out families, dtypes and kernels, and the tables that they are read from."""

import numpy as np
import polars as pl
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.gemm_tiles import Rates, gemm_ns
from tools.fit.evaluate_fit import Case
from tools.fit.fit_tiles import rates_of
from tools.fit.leave_one_out import errors_of, few_families
from tools.fit.measured_kernels import Products
from tools.fit.public_cases import (
    fit_eight_bit,
    kernel_cases,
    other_attention,
    quantised_ns,
    read_linears,
    vector_cases,
)

A100, H100, L40S, B200 = (load_gpu(name) for name in ("A100", "H100", "L40S", "B200"))


def case_of(kind: str, gpu, errors: list[float]) -> Case:
    return Case(kind, gpu, gpu, np.exp(errors), np.ones(len(errors)), np.ones(len(errors)))


def test_every_family_has_the_same_weight():
    """Ten errors of 0.1 and one of 0.5: four of five are within 0.5 if families count equally."""
    many, one = case_of("gemm", A100, [0.1] * 10), case_of("gemm", H100, [0.5])
    assert errors_of([many, one]).high == pytest.approx(0.5)
    assert errors_of([many, case_of("gemm", A100, [0.5])]).high == pytest.approx(0.1)


def test_few_families_widen_the_bound():
    """Each of three families is left out: 0.4 / 0.2, 0.2 / 0.4 and 0.1 / 0.4 of the others' bound.

    Four of five of these ratios are within the largest.
    """
    cases = [case_of("gemm", g, [e]) for g, e in ((A100, 0.1), (H100, 0.2), (L40S, 0.4))]
    assert few_families(cases) == pytest.approx(2.0)
    error = errors_of(cases, few=2.0)
    assert (error.high, error.low) == pytest.approx((0.8, -0.8))
    assert errors_of(cases).independent == error.independent  # of calls, which are many
    assert few_families(cases[:1]) == 1.0


def eight_bit_table(tmp_path, times_us: list[float]) -> None:
    rows = {"gpu": "H100-SXM", "campaign": "sglang 1", "dtype": "fp8", "n": 4096, "k": 4096,
            "kernel": "sglang_sgl_kernel_fp8_scaled_mm"}  # fmt: skip
    sizes = [2 ** (4 + at) for at in range(len(times_us))]
    table = pl.DataFrame({"m": sizes, "time_us": times_us}).with_columns(
        **{name: pl.lit(value) for name, value in rows.items()}
    )
    table.write_parquet(tmp_path / "linears.parquet")


def test_eight_bit_kernels_are_fitted_without_their_quantisation(tmp_path):
    """Times made with known coefficients give them back; the quantisation moves 3 bytes each."""
    c, truth = shipped().gemm, shipped().eight_bit["hopper"]
    sizes = [2.0 ** (4 + at) for at in range(10)]
    shapes = np.array([(1, m, 4096, 4096, 1, 2) for m in sizes])
    products = Products("float8_e4m3fn", shapes, {})
    moved_ns = 3 * 8192 * 4096 / (3.35e12 * 0.865) * 1e9
    assert quantised_ns(H100, products)[-1] == pytest.approx(0.77 * 2600 + moved_ns, rel=0.01)
    rates = rates_of(H100, products.dtype, len(shapes))
    rates = Rates(np.minimum(rates.peak, rates.sustained * truth.rate), rates.peak)
    product_ns = gemm_ns(H100, rates, shapes, c, eight_bit=truth)
    eight_bit_table(tmp_path, ((product_ns + quantised_ns(H100, products)) / 1000).tolist())
    (linears,) = read_linears(tmp_path)
    assert (linears.gpu, len(linears.times_ns)) == (H100, 10)
    made = fit_eight_bit([linears], c)["hopper"]
    again_ns = gemm_ns(H100, Rates(np.minimum(rates.peak, rates.sustained / truth.rate * made.rate),
                                   rates.peak), shapes, c, eight_bit=made)  # fmt: skip
    assert again_ns == pytest.approx(product_ns, rel=0.05)


def test_fp32_operators_are_cases_of_vector_units(tmp_path):
    sizes = {"b": [1, 1], "m": [4096, 8192], "n": [4096, 4096], "k": [4096, 4096]}
    rows = {"gpu": ["H100-SXM"] * 2, "op": ["linear"] * 2, **sizes, "time_us": [2800.0, 5600.0]}
    pl.DataFrame(rows).write_parquet(tmp_path / "vector.parquet")
    (case,) = vector_cases(tmp_path)
    assert case.kind == "product_unmeasured"
    assert case.predicted_ns == pytest.approx([2.8e6, 5.6e6], rel=0.1)  # 50.9 of 67 TFLOP/s


def test_kernels_that_an_architecture_does_not_usually_run(tmp_path):
    index = {"batch": 4, "rows": 2048, "keys": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128}
    rows = [
        {"gpu": gpu, "campaign": "c", "kernel": kernel, "phase": "context", **index, "time_us": t}
        for gpu, kernel, t in (
            ("H100-SXM", "fa3", 400.0),
            ("H100-SXM", "triton", 900.0),
            ("L40S", "triton", 1500.0),
        )
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "attention.parquet")
    usual, *others = kernel_cases(tmp_path, lambda _: lambda kernels, _: (np.full(1, 3e5), None))
    assert (usual.kind, {case.kind for case in others}) == (
        "attention_unmeasured",
        {"attention_other"},
    )
    # Each is predicted with the factor of the other family.
    factors = [float(case.predicted_ns[0]) for case in others]
    raw = case_of("attention_other", A100, [0.2, 0.4])
    assert other_attention([raw]) == pytest.approx(np.exp(0.3))
    assert factors[0] != factors[1]
