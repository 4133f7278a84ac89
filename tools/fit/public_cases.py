"""Predictions of other dtypes, vector units and kernels, from the tables of `public_sets`.

The coefficients of a prediction are fitted without the target's die family, or without the kernel.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_kernels import attention_ns
from onerank.annotate.models.coefficients import AttentionCoefficients, EightBit, GemmCoefficients
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.features import F64, KernelFeatures
from onerank.annotate.models.gemm_tiles import Rates, gemm_ns
from onerank.annotate.models.intervals import same_die
from onerank.annotate.models.launch_floor import floor_share_of
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.op_costs.memory_bound import PASSES
from onerank.annotate.op_costs.op_classes import OpClass
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.fit_tiles import SCALE, rates_of, stored_ns
from tools.fit.measured_kernels import (
    TORCH_DTYPE,
    Attention,
    Products,
    family,
    of_attention,
    of_memory,
    of_products,
    read_table,
)

_optimize: Any = scipy.optimize  # it has no types

LINEARS_FILE, ATTENTION_KERNELS_FILE, VECTOR_FILE = (
    "linears.parquet",
    "attention.parquet",
    "vector.parquet",
)

# (kernel, dtype) of the rows whose quantisation is one kernel over the activations; TensorRT-LLM
# quantises per tensor with several, which take 8 us together for the smallest.
_EIGHT_BIT = (
    ("sglang_sgl_kernel_fp8_scaled_mm", "fp8"),
    ("CutlassFP8ScaledMMLinearKernel", "fp8"),
    ("sglang_deepgemm_gemm_nt_f8f8bf16", "fp8_block"),
    ("torch_flow", "fp8_block"),
    ("deepgemm", "fp8_block"),
)

# architecture -> names of the kernels that libraries run there, as `attention_kernels` has them.
_USUAL = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "ada": ("vllm_flash_attn_fa2",),
    "hopper": ("fa3", "vllm_flash_attn_fa3"),
    "blackwell": ("trtllm_mha", "vllm_flashinfer_trtllmprefill"),
}

# Names of the same kernel in different frameworks.
_SAME = {"torch_flow": "deepgemm", "sglang_deepgemm_gemm_nt_f8f8bf16": "deepgemm"}

_SHAPES = 800  # of each GPU and kernel: the errors' quantiles change little beyond

_EVERY = 4  # of them is fitted to

_LEAST_QUERIES = 16  # frameworks run other kernels for fewer

_CALLS = 400  # of each GPU, attention kernel and head size

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


def quantised_ns(gpu: Gpu, products: Products) -> F64:
    """Return the time to quantise [m, k] from 16 to 8 bits, float64[d]: floor and bytes."""
    _, m, _, k, _, _ = products.shapes.T
    floor_ns = floor_share_of(OpClass.REDUCTION) * gpu.launch_floor_ns
    return floor_ns + 3 * m * k / gpu.bandwidth_bytes_per_s * 1e9


def read_linears(folder: Path) -> list[Linears]:
    """Read `linears.parquet`: up to `_SHAPES` shapes of each GPU and kernel, the same on all.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    columns = ["gpu", "campaign", "kernel", "dtype", *_SIZES, "time_us"]
    rows = read_table(folder / LINEARS_FILE, columns)
    linears: list[Linears] = []
    for kernel, dtype in _EIGHT_BIT:
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
            products = Products(TORCH_DTYPE["fp8"], shapes, {gpu.name: times_ns})
            linears.append(Linears(gpu, _SAME.get(kernel, kernel), products, times_ns))
    # The order of groups is not defined, and the fit's rounding depends on it.
    return sorted(linears, key=lambda each: (each.kernel, each.gpu.name, len(each.times_ns)))


def fit_eight_bit(linears: Sequence[Linears], c: GemmCoefficients) -> dict[str, EightBit]:
    """Return the coefficients of 8-bit GEMMs for each architecture of `linears`."""
    architectures = sorted({each.gpu.architecture for each in linears})
    return {
        name: _fit_architecture([each for each in linears if each.gpu.architecture == name], c)
        for name in architectures
    }


def _fit_architecture(linears: list[Linears], c: GemmCoefficients) -> EightBit:
    def cost(x: F64) -> float:
        narrow = EightBit(*np.exp(x).tolist())
        costs: list[float] = []
        for each in linears:
            shapes = each.products.shapes[::_EVERY]
            rates = rates_of(each.gpu, each.products.dtype, len(shapes))
            rates = Rates(np.minimum(rates.peak, rates.sustained * narrow.rate), rates.peak)
            product_ns = gemm_ns(each.gpu, rates, shapes, c, eight_bit=narrow)
            predicted_ns = product_ns + each.quantised_ns[::_EVERY]
            costs.append(_robust_loss(np.log(each.times_ns[::_EVERY] / predicted_ns)))
        return float(np.mean(costs))

    start = np.zeros(3)
    # SciPy's first simplex around zeros is too small to leave the start.
    simplex = np.concatenate([np.zeros((1, 3)), 0.3 * np.eye(3)])
    options = {"maxiter": 120, "xatol": 0.01, "fatol": 1e-4, "initial_simplex": simplex}
    solution = _optimize.minimize(cost, start, method="Nelder-Mead", options=options)
    return EightBit(*np.exp(solution.x).tolist())


def _robust_loss(error: F64) -> float:
    """Return the mean loss of errors in ln: up to a factor that of `fit_tiles.fit_robustly`."""
    return float(np.mean(np.sqrt(1 + (error / SCALE) ** 2) - 1))


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
        # Two campaigns of one GPU are no prediction.
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


def vector_cases(
    folder: Path,
    model: Predict = predict_learned,
    by_shape: PredictFromDescription = predict_from_description,
) -> Iterator[Case]:
    """Yield fp32 operators by shape, and from another GPU's time.

    No family is excluded: the tiles are those of 16-bit GEMMs. The sustained fractions of the
    vector units are medians over the largest linear layers of this set.

    Args:
        folder: has `vector.parquet`.
        model: of measured kernels.
        by_shape: of unmeasured kernels.

    Raises:
        FormatError: `vector.parquet` is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    rows = read_table(folder / VECTOR_FILE, ["gpu", "op", "b", *_SIZES, "time_us"])
    cases: dict[tuple[str, str, str], list[Case]] = {}
    for (op,), table in rows.group_by("op", maintain_order=True):
        kind = "product" if op in ("linear", "bmm") else "memory"
        times = table.pivot(
            on="gpu", index=["b", *_SIZES], values="time_us", aggregate_function="median"
        )
        names = times.columns[4:]
        for name in names:
            measured = times.drop_nulls([name])
            gpu, kernels = load_gpu(name), _vector_kernels(str(op), measured, name)
            predicted_ns, _ = by_shape(kernels, gpu)
            times_ns = kernels.duration_ns
            case = Case(f"{kind}_unmeasured", gpu, gpu, times_ns, predicted_ns, kernels.bytes)
            cases.setdefault((case.kind, name, name), []).append(case)
        for source, target in permutations(names, 2):
            both = times.drop_nulls([source, target])
            gpus = load_gpu(source), load_gpu(target)
            # The two A100s differ in memory, which says little about other pairs.
            if len(both) < 30 or same_die(*gpus):
                continue
            kernels = _vector_kernels(str(op), both, source)
            predicted_ns, _ = model(kernels, *gpus)
            measured_ns = both[target].to_numpy() * 1000
            case = Case(kind, *gpus, measured_ns, predicted_ns, kernels.bytes)
            cases.setdefault((kind, source, target), []).append(case)
    # One case for all operators of a pair: what one operator is off is not shared by the others.
    for of_pair in cases.values():
        measured_ns = np.concatenate([case.measured_ns for case in of_pair])
        predicted_ns = np.concatenate([case.predicted_ns for case in of_pair])
        moved = np.concatenate([case.rows for case in of_pair])
        first = of_pair[0]
        yield Case(first.kind, first.source, first.target, measured_ns, predicted_ns, moved)


def _vector_kernels(op: str, table: pl.DataFrame, gpu: str) -> KernelFeatures:
    times_ns = table[gpu].to_numpy() * 1000
    b, m, n, k = (table[size].to_numpy().astype(np.float64) for size in ("b", *_SIZES))
    if op in ("linear", "bmm"):
        fours = np.full(len(table), 4.0)
        shapes = np.stack([b, m, n, k, fours, fours], axis=1)
        return of_products(Products("float32", shapes, {}), times_ns)
    tensors = 3 if op in ("add", "mul", "div", "pow") else 2
    op_class = {"ln": OpClass.NORM, "softmax": OpClass.SOFTMAX}.get(op, OpClass.ELEMENTWISE)
    passes = PASSES["native_layer_norm"] if op == "ln" else 1.0
    kernels = of_memory(times_ns, 4 * tensors * m * n)
    ones = np.ones(len(table))
    return replace(kernels, floor_share=floor_share_of(op_class) * ones, passes=passes * ones)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Causal attention of one GPU, kernel and head size.

    Attributes:
        gpu: the GPU.
        usual: whether libraries run this kernel on the architecture.
        shapes: as `attention_kernels.attention_ns` takes them, float64[d, 9].
        times_ns: times with the write of keys and values, float64[d].
    """

    gpu: Gpu
    usual: bool
    shapes: F64
    times_ns: F64


def _read_calls(folder: Path) -> Iterator[_Calls]:
    """Yield the calls in `attention.parquet`, without those that are nearly decoding.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    index = ["batch", "rows", "keys", "heads", "kv_heads", "head_dim"]
    columns = ["gpu", "campaign", "kernel", "phase", *index, "time_us"]
    rows = read_table(folder / ATTENTION_KERNELS_FILE, columns)
    rows = rows.filter(pl.col("phase") == "context", pl.col("rows") >= _LEAST_QUERIES)
    groups = rows.group_by("gpu", "campaign", "kernel", "head_dim", maintain_order=True)
    for (name, _, kernel, _), measured in groups:
        gpu = load_gpu(str(name))
        table = measured.sample(min(_CALLS, len(measured)), seed=_SEED)
        batch, queries, keys, heads, key_heads, d = (
            table[column].to_numpy().astype(np.float64) for column in index
        )
        ones = np.ones(len(table))
        shapes = np.stack([batch, heads, key_heads, queries, keys, d, d, ones, 0 * ones], axis=1)
        usual = str(kernel) in _USUAL.get(gpu.architecture, ())
        yield _Calls(gpu, usual, shapes, table["time_us"].to_numpy() * 1000)


def kernel_cases(
    folder: Path,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention by its shape, by GPU and kernel.

    Kernels that libraries run on the architecture have the kind "attention_unmeasured", others
    "attention_other". The fit has seen no kernel of the target's die family.

    Args:
        folder: has `attention.parquet`.
        model: family that is left out -> the model of unmeasured kernels.
        described: returns the description of a target that the prediction may use.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    others: list[Case] = []
    for call in _read_calls(folder):
        kernels = of_attention(Attention(call.shapes, {}), call.times_ns)
        predicted_ns, _ = model(family(call.gpu))(kernels, described(call.gpu))
        predicted_ns = predicted_ns + stored_ns(call.gpu, call.shapes)
        kind = "attention_unmeasured" if call.usual else "attention_other"
        queries = call.shapes[:, 3]
        case = Case(kind, call.gpu, call.gpu, call.times_ns, predicted_ns, queries)
        if call.usual:
            yield case
        else:
            others.append(case)
    for case in others:
        slower = other_attention([o for o in others if family(o.target) != family(case.target)])
        yield replace(case, predicted_ns=case.predicted_ns * slower)


def fit_attention_floor(
    folder: Path, c: AttentionCoefficients, gpus: Sequence[Gpu], without: Collection[str]
) -> dict[str, float]:
    """Return architecture -> factor on the floors of attention, by its usual kernels.

    Args:
        folder: has `attention.parquet`.
        c: fitted to FlashAttention.
        gpus: GPUs to fit to.
        without: architectures to omit, on which FlashAttention was measured.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    names = sorted({gpu.architecture for gpu in gpus} - {*without})
    return {name: _attention_floor(folder, c, name) for name in names}


def _attention_floor(folder: Path, c: AttentionCoefficients, architecture: str) -> float:
    calls = [
        call for call in _read_calls(folder) if call.usual and call.gpu.architecture == architecture
    ]

    def cost(x: F64) -> float:
        floors = msgspec.structs.replace(c, floor=c.floor * float(np.exp(x[0])))
        costs: list[float] = []
        for call in calls:
            rates = rates_of(call.gpu, "bfloat16", len(call.shapes))
            kernel_ns = attention_ns(call.gpu, rates, call.shapes, floors)
            predicted_ns = kernel_ns + stored_ns(call.gpu, call.shapes)
            costs.append(_robust_loss(np.log(call.times_ns / predicted_ns)))
        return float(np.mean(costs))

    options = {"initial_simplex": [[0.0], [0.3]], "xatol": 0.01, "fatol": 1e-4}
    solution = _optimize.minimize(cost, np.zeros(1), method="Nelder-Mead", options=options)
    return float(np.exp(solution.x[0]))


def other_attention(cases: list[Case]) -> float:
    """Return the factor on the time of attention by other kernels than its architecture's usual.

    The geometric mean over die families of measured over predicted.
    """
    families = sorted({family(case.target) for case in cases})
    errors = [
        np.concatenate([case.error for case in cases if family(case.target) == name])
        for name in families
    ]
    return float(np.exp(np.mean([np.mean(error) for error in errors])))
