"""Read measured kernels of several GPUs from a directory, as input of cost models."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.features import KernelFeatures, Timing
from onerank.annotate.models.operand_reuse import OperandReuse
from onerank.annotate.op_costs.cost_record import Scales
from onerank.annotate.op_costs.kernel_overheads import PASSES
from onerank.annotate.op_costs.op_classes import OpClass, floor_share_of
from onerank.ir.arrays import F64
from onerank.ir.errors import FormatError

GEMM_FILE = "gemm.parquet"

ATTENTION_FILE = "attention_prefill.parquet"

LINEARS_FILE = "linears.parquet"

# Bytes of an element of the operands and of the result: GEMMs in fp8 write 16 bits.
_ITEM_BYTES = {"bfloat16": (2, 2), "fp8": (1, 2)}

# Benchmarks repeat a call with the same operands, so the last-level cache serves those that fit.
# Calls whose operands have between these shares of its size are omitted; smaller ones take little
# time from memory, too. The omission does not flatter: with a dataset of decodes left out of the
# fit, its omitted calls over 10 us are 13 to 18% off, the others 9 to 27%, by dataset.
CACHE_SERVED = 0.1, 2.0

TORCH_DTYPE = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2"}


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products of one data type, the same on each GPU.

    Attributes:
        dtype: torch's name of it.
        shapes: batch, m, n, k, bytes of an operand's and of a result's element, float64[d, 6].
        times_ns: name of a description -> measured times, float64[d].
        scales: of operands in 8 or 4 bits.
        per_call: whether times are those of calls, of replayed CUDA graphs or between events, and
            not durations of kernels.
    """

    dtype: str
    shapes: F64
    times_ns: dict[str, F64]
    scales: Scales = Scales.TENSOR
    per_call: bool = True


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal forward attention by one kernel family, the same shapes on each GPU.

    Attributes:
        shapes: `AttentionShape` of each call without a window, float64[d, 9].
        times_ns: name of a description -> measured times, float64[d].
        per_call: as for `Products`.
    """

    shapes: F64
    times_ns: dict[str, F64]
    per_call: bool = True


def family(gpu: Gpu) -> str:
    """Return the die family of a GPU; a fit excludes whole families."""
    return gpu.architecture


def read_products(folder: Path, dtype: str = "bfloat16") -> Products:
    """Read `gemm.parquet`: gpu, dtype, m, n, k, time_us.

    Raises:
        FormatError: the file is not there or lacks a column.
        TargetError: it has a GPU without a description.
    """
    columns = ["gpu", "dtype", "m", "n", "k", "time_us"]
    rows = read_table(folder / GEMM_FILE, columns).filter(pl.col("dtype").cast(pl.String) == dtype)
    # Only shapes that every GPU measured can be compared.
    table = rows.pivot(on="gpu", index=["m", "n", "k"], values="time_us").drop_nulls()
    ones = np.ones(len(table))
    sizes = [table[name].to_numpy().astype(np.float64) for name in ("m", "n", "k")]
    item, result = _ITEM_BYTES[dtype]
    shapes = np.stack([ones, *sizes, ones * item, ones * result], axis=1)
    # The dataset's 8-bit layers scale each row (sglang).
    scales = Scales.ROW if item == 1 else Scales.TENSOR
    return Products(TORCH_DTYPE[dtype], shapes, _times(table, 3), scales)


def read_other_products(folder: Path) -> list[Products]:
    """Read the bf16 GEMMs of `linears.parquet`, one entry per benchmark set.

    Raises:
        FormatError: the file is not there or lacks a column.
        TargetError: it has a GPU without a description.
    """
    sizes = ["m", "n", "k"]
    rows = read_table(folder / LINEARS_FILE, ["gpu", "dataset", "dtype", *sizes, "time_us"])
    rows = rows.filter(pl.col("dtype") == "bfloat16")
    sets: list[Products] = []
    for _, of_set in rows.group_by("dataset", maintain_order=True):
        by_gpu = of_set.group_by("gpu", *sizes).agg(pl.col("time_us").median())
        table = by_gpu.sort("gpu", *sizes).pivot(on="gpu", index=sizes, values="time_us")
        table = table.drop_nulls().sort(sizes)
        times_ns = _times(table, len(sizes))
        ones = np.ones(len(table))
        columns = [table[size].to_numpy().astype(np.float64) for size in sizes]
        shapes = np.stack([ones, *columns, 2 * ones, 2 * ones], axis=1)
        sets.append(Products(TORCH_DTYPE["bfloat16"], shapes, times_ns, Scales.TENSOR))
    return sets


def read_attention(folder: Path) -> Attention:
    """Read `attention_prefill.parquet`: flash attention, forward, causal, without a window.

    Raises:
        FormatError: the file is not there or lacks a column.
        TargetError: it has a GPU without a description.
    """
    index = ["batch", "seq", "heads", "kv_heads", "head_dim"]
    rows = read_table(folder / ATTENTION_FILE, ["gpu", *index, "window_size", "kernel", "time_us"])
    rows = rows.filter(
        pl.col("kernel").cast(pl.String) == "flash_attention",
        pl.col("window_size").fill_null(0) == 0,
    )
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_us").median())
    table = grouped.pivot(on="gpu", index=index, values="time_us").drop_nulls()
    batch, seq, heads, key_heads, d = (table[name].to_numpy().astype(np.float64) for name in index)
    ones = np.ones(len(table))
    # 1 is causal, 0 is no mask, as `attention_ns` reads the last two.
    shapes = np.stack([batch, heads, key_heads, seq, seq, d, d, ones, 0 * ones], axis=1)
    return Attention(shapes, _times(table, len(index)))


def read_table(path: Path, columns: list[str]) -> pl.DataFrame:
    if not path.is_file():
        raise FormatError(
            f"{path}: no such file; give the folder that contains {path.name}", code="fit-no-file"
        )
    schema = pl.read_parquet_schema(path)
    if missing := [name for name in columns if name not in schema]:
        raise FormatError(
            f"{path} lacks the columns {', '.join(missing)}", code="fit-missing-columns"
        )
    return pl.read_parquet(path, columns=columns)


def _times(table: pl.DataFrame, first: int) -> dict[str, F64]:
    """Return the times by GPU description; the last dataset wins for a GPU with two."""
    return {
        load_gpu(name).name: table[name].to_numpy().astype(np.float64) * 1000
        for name in table.columns[first:]
    }


_LAYERS = {
    "add": OpClass.ELEMENTWISE,
    "mlp_act": OpClass.ELEMENTWISE,
    "attn_rope": OpClass.ELEMENTWISE,
    "emb": OpClass.EMBEDDING,
    "input_layernorm": OpClass.NORM,
    "post_attention_layernorm": OpClass.NORM,
}


TORCH_LAYERS = ("add",)
"""Layers of vidur's that are an operator of PyTorch; the others are vLLM's kernels."""


def of_products(products: Products, times_ns: F64) -> KernelFeatures:
    """Return one operator per product, with measured `times_ns`."""
    batch, m, n, k, item, result = products.shapes.T
    moved = batch * (item * (m * k + k * n) + result * m * n)
    kernels = _kernels(times_ns, 2 * batch * m * n * k, moved, products.dtype)
    scales = np.full(len(times_ns), products.scales, dtype=np.uint8)
    return replace(kernels, gemm=products.shapes, scales=scales, timing=_timing(products.per_call))


def of_attention(attention: Attention, times_ns: F64) -> KernelFeatures:
    """Return one operator per 16-bit attention, with measured `times_ns`."""
    batch, heads, key_heads, rows, keys, d, dv, *_ = attention.shapes.T
    flops = batch * heads * rows * keys * (d + dv)  # causal: half of them
    moved = 2 * batch * (rows * heads + keys * key_heads) * (d + dv)
    kernels = _kernels(times_ns, flops, moved, "bfloat16")
    timing = _timing(attention.per_call)
    return replace(kernels, attention=attention.shapes, timing=timing)


def _timing(per_call: bool) -> Timing:
    return Timing.CALL if per_call else Timing.STEP


def of_memory(times_ns: F64, moved: F64) -> KernelFeatures:
    """Return kernels that move `moved` bytes, in float64[d], and have no products."""
    kernels = _kernels(times_ns, np.zeros(len(moved)), moved, "")
    none = np.zeros(len(moved), dtype=bool)
    return replace(kernels, matmul=none, matmul_class=none)


def of_layers(times_ns: F64, table: pl.DataFrame) -> KernelFeatures:
    """Return operators of a layer that have no products: columns `op` and `bytes` of vidur's."""
    moved = table["bytes"].to_numpy().astype(np.float64)
    floor_share = np.array([floor_share_of(_LAYERS[name]) for name in table["op"].cast(pl.String)])
    norms = np.array([_LAYERS[name] is OpClass.NORM for name in table["op"].cast(pl.String)])
    passes = np.where(norms, PASSES["_fused_rms_norm"], 1.0)
    from_torch = table["op"].cast(pl.String).is_in(TORCH_LAYERS).to_numpy()
    layers = replace(of_memory(times_ns, moved), floor_share=floor_share, from_torch=from_torch)
    # On Hopper PyTorch's norms find their rows in the SM's cache; vLLM's were not measured there.
    return replace(layers, passes=passes, cached_passes=passes)


def _kernels(times_ns: F64, flops: F64, moved: F64, dtype: str) -> KernelFeatures:
    count = len(times_ns)
    every, none = np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
    return KernelFeatures(
        duration_ns=times_ns,
        flops=flops,
        bytes=moved,
        matmul=every,
        matmul_class=every,
        over_link=none,
        transfer=none,
        constant=none,
        dtype=np.zeros(count, dtype=np.int64),
        dtypes=(dtype,),
        call=np.arange(count),
        gemm=np.zeros((count, 6)),
        scales=np.zeros(count, dtype=np.uint8),
        attention=np.zeros((count, 9)),
        operator_ns=times_ns,
        floor_share=np.ones(count),
        passes=np.ones(count),
        cached_passes=np.ones(count),
        rereads=np.ones(count),
        cycles=np.zeros(count),
        arithmetic=np.zeros(count, dtype=bool),
        chain=np.zeros(count),
        far_load=np.ones(count),
        tail=np.zeros(count),
        unknown_layout=np.zeros(count, dtype=bool),
        from_torch=every,
        sequence_state=none,
        instructions=np.zeros(count),
        reuse=OperandReuse.unknown(count),
    )
