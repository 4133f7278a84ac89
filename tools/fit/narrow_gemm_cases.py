"""Predictions of GEMMs in 8 and 4 bits, from the tables of `public_sets`, and their fit.

The coefficients of a prediction are fitted without the target's die family.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database import SHIPPED, read_database, rows_of
from onerank.annotate.models.coefficients import FinelyScaled, GemmCoefficients
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.tile_kernels import scaled_kernels
from onerank.annotate.op_costs.cost_record import Scales
from onerank.annotate.op_costs.op_classes import shares_on
from onerank.annotate.passes.swap_kernels import shape_ratio
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.fit_tiles import fit_robustly, rates_of
from tools.fit.measured_kernels import (
    LINEARS_FILE,
    TORCH_DTYPE,
    Products,
    family,
    of_products,
    read_table,
)

# (kernel, dtype) -> scales of its layers, if one kernel quantises the activations. TensorRT-LLM
# quantises per tensor with several kernels, see `_read_tensor_scaled`.
_SCALES = {
    ("sglang_sgl_kernel_fp8_scaled_mm", "fp8"): Scales.ROW,
    ("CutlassFP8ScaledMMLinearKernel", "fp8"): Scales.ROW,
    ("sglang_deepgemm_gemm_nt_f8f8bf16", "fp8_block"): Scales.BLOCK,
    ("torch_flow", "fp8_block"): Scales.BLOCK,
    ("deepgemm", "fp8_block"): Scales.BLOCK,
}

# Names of the same kernel in different frameworks. On Ada TensorRT-LLM has no DeepGEMM.
_SAME = {"torch_flow": "deepgemm", "sglang_deepgemm_gemm_nt_f8f8bf16": "deepgemm"}
_ADA = "ada"

_SHAPES = 800  # of each GPU and kernel: the errors' quantiles change little beyond

_EVERY = 4  # the fit takes every fourth of them

_SEED = 4

_SIZES = ["m", "n", "k"]

# Least share of the product in a measured time that includes the quantisation.
_LEAST_PRODUCT = 0.2


@dataclass(frozen=True, slots=True)
class Linears:
    """Linear layers in 8 bits of one GPU and kernel.

    Attributes:
        gpu: the GPU.
        kernel: the kernel, one name in all frameworks.
        products: the GEMMs.
        times_ns: times with the quantisation of the activations, float64[d].
    """

    gpu: Gpu
    kernel: str
    products: Products
    times_ns: F64

    @property
    def quantised_ns(self) -> F64:
        """The time to quantise the activations, float64[d]."""
        return quantised_ns(self.gpu, self.products)


# A row is read for its scale and again to divide by it, and a cache serves part of the second time.
# vLLM's kernel for a scale of each row, timed alone in the same set, takes 1.3 times the time of
# its bytes on an H100, 1.55 on an H200 and 2.0 on a B200 (medians of calls over 20 us).
_QUANTISE_PASSES = 1.4

# Time of the shortest of them, as a share of the launch floor: that of the shortest reductions in
# the H200's database.
_QUANTISE_FLOOR = 0.77


def quantised_ns(gpu: Gpu, products: Products) -> F64:
    """Return the time to quantise [m, k] from 16 bits, float64[d]: floor and bytes."""
    _, m, _, k, item, _ = products.shapes.T
    share = shares_on(np.array([_QUANTISE_FLOOR]), gpu)
    moved = _QUANTISE_PASSES * (2 + item) * m * k
    return share * gpu.launch_floor_ns + moved / gpu.bandwidth_bytes_per_s * 1e9


def read_linears(folder: Path) -> list[Linears]:
    """Read `linears.parquet`: up to `_SHAPES` shapes of each GPU and kernel, the same on all.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    columns = ["gpu", "dataset", "kernel", "dtype", *_SIZES, "time_us"]
    rows = read_table(folder / LINEARS_FILE, columns)
    linears: list[Linears] = []
    for (kernel, dtype), scales in _SCALES.items():
        of_kernel = rows.filter(pl.col("kernel") == kernel, pl.col("dtype") == dtype)
        by_gpu = of_kernel.group_by("gpu", *_SIZES).agg(pl.col("time_us").median())
        sizes = by_gpu.select(_SIZES).unique().sort(_SIZES)
        sizes = sizes.sample(min(_SHAPES, len(sizes)), seed=_SEED)
        drawn = by_gpu.join(sizes, on=_SIZES).sort(_SIZES)
        for (name,), table in drawn.group_by("gpu", maintain_order=True):
            gpu = load_gpu(str(name))
            ones = np.ones(len(table))
            columns = [table[size].to_numpy().astype(np.float64) for size in _SIZES]
            shapes = np.stack([ones, *columns, ones, 2 * ones], axis=1)
            times_ns = table["time_us"].to_numpy().astype(np.float64) * 1000
            products = Products(TORCH_DTYPE["fp8"], shapes, {gpu.name: times_ns}, scales)
            same = kernel if gpu.architecture == _ADA else _SAME.get(kernel, kernel)
            linears.append(Linears(gpu, same, products, times_ns))
    # The order of groups is not defined, and the fit's rounding depends on it.
    return sorted(linears, key=lambda each: (each.kernel, each.gpu.name, len(each.times_ns)))


QUANTISE_FILE = "quantise.parquet"

# TensorRT-LLM's layers have one scale for a tensor. The kernels that quantise were measured alone,
# and a GEMM's time is the difference. It is used where they take up to a fifth of the layer's time,
# since the difference has the errors of both.
_TENSOR_SCALED, _MOST_QUANTISED = "torch_flow", 0.2


@dataclass(frozen=True, slots=True)
class _TensorScaled:
    """8-bit GEMMs with one scale for a tensor, of one GPU.

    Attributes:
        gpu: the GPU.
        narrow: the GEMMs.
        narrow_ns: their times without quantisation, float64[d].
        wide: the same in bf16.
        wide_ns: their times, float64[d].
    """

    gpu: Gpu
    narrow: Products
    narrow_ns: F64
    wide: Products
    wide_ns: F64


def _read_tensor_scaled(folder: Path) -> Iterator[_TensorScaled]:
    """Yield TensorRT-LLM's linear layers of each GPU in both dtypes.

    Raises:
        FormatError: `linears.parquet` or `quantise.parquet` is missing or lacks a column.
        TargetError: one has a GPU without a description.
    """
    columns = ["gpu", "dataset", "kernel", "dtype", *_SIZES, "time_us"]
    table = read_table(folder / LINEARS_FILE, columns)
    table = table.filter(pl.col("kernel") == _TENSOR_SCALED)
    quantise = read_table(folder / QUANTISE_FILE, ["gpu", "dataset", "m", "k", "time_us"])
    both = table.filter(pl.col("dtype") == "fp8").join(
        table.filter(pl.col("dtype") == "bfloat16"), on=["gpu", "dataset", *_SIZES]
    )
    both = both.join(quantise, on=["gpu", "dataset", "m", "k"], suffix="_quantise")
    for (name,), of_gpu in both.sort("gpu", *_SIZES).group_by("gpu", maintain_order=True):
        gpu = load_gpu(str(name))
        narrow, wide = (
            _products(dtype, of_gpu.select(_SIZES).to_numpy().astype(np.float64), item)
            for dtype, item in ((TORCH_DTYPE["fp8"], 1), ("bfloat16", 2))
        )
        measured_ns, wide_ns, quantised = (
            of_gpu[column].to_numpy().astype(np.float64) * 1000
            for column in ("time_us", "time_us_right", "time_us_quantise")
        )
        rows = np.flatnonzero(quantised < _MOST_QUANTISED * measured_ns)
        rows = np.random.default_rng(_SEED).permutation(rows)[:_SHAPES]
        yield _TensorScaled(
            gpu,
            replace(narrow, shapes=narrow.shapes[rows]),
            (measured_ns - quantised)[rows],
            replace(wide, shapes=wide.shapes[rows]),
            wide_ns[rows],
        )


def _products(dtype: str, sizes: F64, item: float) -> Products:
    ones = np.ones(len(sizes))
    return Products(dtype, np.stack([ones, *sizes.T, item * ones, 2 * ones], axis=1), {})


def tensor_scaled_cases(
    folder: Path,
    by_shape: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield 8-bit GEMMs with one scale for a tensor by their shapes.

    They are cuBLAS's in the shipped H200's database, and TensorRT-LLM's. Arguments and errors as
    for `linear_cases`.
    """
    h200 = load_gpu("H200")
    rows = [
        row
        for row in rows_of(read_database(SHIPPED / "H200.parquet"))
        if "_scaled_mm" in row.operator and len(row.shapes[2]) == 0
    ]
    sizes = [(*row.shapes[0], row.shapes[1][1]) for row in rows]
    narrow = _products(TORCH_DTYPE["fp8"], np.array(sizes, dtype=np.float64)[:, [0, 2, 1]], 1)
    narrow_ns = np.array([row.median_ns for row in rows], dtype=np.float64)
    measured = [(h200, narrow, narrow_ns)]
    measured += [(each.gpu, each.narrow, each.narrow_ns) for each in _read_tensor_scaled(folder)]
    for gpu, products, times_ns in measured:
        kernels = of_products(products, times_ns)
        predicted_ns, _ = by_shape(family(gpu))(kernels, described(gpu))
        kind = "gemm_8bit_tensor_unmeasured"
        yield Case(kind, gpu, gpu, times_ns, predicted_ns, products.shapes[:, 1])


def retyped_cases(
    folder: Path, by_shape: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield fp8 GEMMs from bf16 ones on the GPU that measured both, by the ratio of a model.

    Arguments and errors as for `linear_cases`.
    """
    for each in _read_tensor_scaled(folder):
        model, gpu = by_shape(family(each.gpu)), each.gpu
        before = of_products(each.wide, each.wide_ns)
        after = of_products(each.narrow, each.narrow_ns)
        predicted_ns = each.wide_ns * shape_ratio(model, before, after, gpu)
        rows = each.narrow.shapes[:, 1]
        yield Case("retyped", gpu, gpu, each.narrow_ns, predicted_ns, rows)


def fit_finely_scaled(
    linears: Sequence[Linears], c: GemmCoefficients
) -> tuple[dict[str, FinelyScaled], FinelyScaled]:
    """Return the coefficients of 8-bit GEMMs for each architecture of `linears`, and of all."""
    every = _fit_together(linears, c, _START)
    return {
        name: _fit_together([each for each in linears if each.gpu.architecture == name], c, every)
        for name in sorted({each.gpu.architecture for each in linears})
    }, every


# Start of the fit: a step as that of cuBLAS.
_START = FinelyScaled(floor_ns=2000.0, rate=0.8, epilogue=0.3, step_cycles=87.0)


def _fit_together(
    linears: Sequence[Linears], c: GemmCoefficients, start: FinelyScaled
) -> FinelyScaled:
    """Return one set of coefficients for all `linears`; every die family has the same weight."""
    families = [family(each.gpu) for each in linears]

    def residuals(x: F64) -> F64:
        scaled = FinelyScaled(*np.exp(x).tolist())
        parts: list[F64] = []
        for each, name in zip(linears, families, strict=True):
            shapes = each.products.shapes[::_EVERY]
            predicted_ns = finely_scaled_ns(each.gpu, each.products, shapes, c, scaled)
            predicted_ns += each.quantised_ns[::_EVERY]
            error = np.log(predicted_ns / each.times_ns[::_EVERY])
            parts.append(families.count(name) ** -0.5 * error)
        return np.concatenate(parts)

    x = fit_robustly(residuals, np.log(msgspec.structs.astuple(start)))
    return FinelyScaled(*np.exp(x).tolist())


def finely_scaled_ns(
    gpu: Gpu, products: Products, shapes: F64, c: GemmCoefficients, scaled: FinelyScaled
) -> F64:
    """Return the time of finely scaled GEMMs of these shapes, float64[d]."""
    rates = rates_of(gpu, products.dtype, len(shapes))
    times_ns = np.empty(len(shapes))
    scales = np.full(len(shapes), products.scales, dtype=np.uint8)
    for rows, kernel in scaled_kernels(gpu, shapes, scales, c, scaled):
        chosen = Rates(rates.sustained[rows], rates.peak[rows])
        run = GemmTarget(gpu, chosen, per_call=True)
        times_ns[rows] = gemm_ns(run, shapes[rows], c, kernel=kernel)
    return times_ns


def linear_cases(
    linears: Sequence[Linears],
    by_shape: Callable[[str], PredictFromDescription],
    model: Callable[[str], Predict],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield 8-bit linear layers by shape, and from another GPU's time of the same kernel.

    A left-out kernel on an architecture that was measured has the same errors as a left-out
    architecture (a bound of 0.38 and of 0.35), so the kernel's name gives no narrower kind.

    Args:
        linears: the layers.
        by_shape: family that is left out -> the model of unmeasured kernels.
        model: family that is left out -> the model of measured kernels.
        described: returns the description of a target that the prediction may use.
    """
    for each in linears:
        target = described(each.gpu)
        kernels = of_products(each.products, each.times_ns)
        product_ns, _ = by_shape(family(each.gpu))(kernels, target)
        predicted_ns = product_ns + quantised_ns(target, each.products)
        rows = each.products.shapes[:, 1]
        yield Case("gemm_8bit_unmeasured", each.gpu, each.gpu, each.times_ns, predicted_ns, rows)
    for before, after in permutations(linears, 2):
        # Two datasets of one GPU are no prediction.
        if before.kernel != after.kernel or before.gpu == after.gpu:
            continue
        if not np.array_equal(before.products.shapes, after.products.shapes):
            continue
        product_ns = before.times_ns - before.quantised_ns
        product_ns = np.maximum(product_ns, _LEAST_PRODUCT * before.times_ns)
        kernels = of_products(before.products, product_ns)
        target = described(after.gpu)
        product_ns, _ = model(family(after.gpu))(kernels, before.gpu, target)
        predicted_ns = product_ns + quantised_ns(target, after.products)
        kind = "gemm_8bit_same_die" if same_die(before.gpu, after.gpu) else "gemm_8bit"
        rows = before.products.shapes[:, 1]
        yield Case(kind, before.gpu, after.gpu, after.times_ns, predicted_ns, rows)


_FOUR_BIT = "nvfp4"

# Bytes of an element in 4 bits with its share of a scale: 16 elements have one in 8 bits.
_FOUR_BIT_BYTES = 0.5 + 1 / 16


def four_bit_cases(
    folder: Path,
    by_shape: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield linear layers in NVFP4 by their shapes, from coefficients of 8 bits.

    Nothing is fitted to 4 bits, so the dtype is left out, and not the GPU's family. Arguments and
    errors as for `linear_cases`.
    """
    columns = ["gpu", "kernel", "dtype", *_SIZES, "time_us"]
    rows = read_table(folder / LINEARS_FILE, columns).filter(pl.col("dtype") == _FOUR_BIT)
    for (name, _), of_kernel in rows.sort("gpu", "kernel", *_SIZES).group_by(
        "gpu", "kernel", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        table = of_kernel.sample(min(_SHAPES, len(of_kernel)), seed=_SEED)
        sizes = table.select(_SIZES).to_numpy().astype(np.float64)
        products = _products(TORCH_DTYPE[_FOUR_BIT], sizes, _FOUR_BIT_BYTES)
        products = replace(products, scales=Scales.BLOCK)
        times_ns = table["time_us"].to_numpy().astype(np.float64) * 1000
        target = described(gpu)
        predicted_ns, _ = by_shape("")(of_products(products, times_ns), target)
        predicted_ns = predicted_ns + quantised_ns(target, products)
        yield Case("gemm_4bit_unmeasured", gpu, gpu, times_ns, predicted_ns, sizes[:, 0])
