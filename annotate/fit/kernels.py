"""Measured kernels as the cost models see them."""

from dataclasses import replace

import numpy as np
import polars as pl

from onerank.annotate.fit.data import F64, Attention, Products
from onerank.annotate.models.kernels import Kernels
from onerank.annotate.models.launch_floors import launches_of
from onerank.annotate.work.classes import OpClass
from onerank.annotate.work.passes import PASSES

_LAYERS = {
    "add": OpClass.ELEMENTWISE,
    "mlp_act": OpClass.ELEMENTWISE,
    "attn_rope": OpClass.ELEMENTWISE,
    "emb": OpClass.EMBEDDING,
    "input_layernorm": OpClass.NORM,
    "post_attention_layernorm": OpClass.NORM,
}


def of_products(products: Products, times_ns: F64) -> Kernels:
    """Return one product an operator, measured to take `times_ns`."""
    batch, m, n, k, item, result = products.shapes.T
    moved = batch * (item * (m * k + k * n) + result * m * n)
    made = _kernels(times_ns, 2 * batch * m * n * k, moved, products.dtype)
    return replace(made, gemm=products.shapes)


def of_attention(attention: Attention, times_ns: F64) -> Kernels:
    """Return one 16-bit attention an operator, measured to take `times_ns`."""
    batch, heads, key_heads, rows, keys, d, dv, _, _ = attention.shapes.T
    flops = batch * heads * rows * keys * (d + dv)  # causal: half of them
    moved = 2 * batch * (rows * heads + keys * key_heads) * (d + dv)
    return replace(_kernels(times_ns, flops, moved, "bfloat16"), attention=attention.shapes)


def of_memory(times_ns: F64, moved: F64) -> Kernels:
    """Return kernels that move `moved` bytes, in float64[d], and have no products."""
    made = _kernels(times_ns, np.zeros(len(moved)), moved, "")
    none = np.zeros(len(moved), dtype=bool)
    return replace(made, matmul=none, matmul_class=none)


def of_layers(times_ns: F64, table: pl.DataFrame) -> Kernels:
    """Return operators of a layer that have no products: columns `op` and `bytes` of vidur's."""
    moved = table["bytes"].to_numpy().astype(np.float64)
    launches = np.array([launches_of(_LAYERS[name]) for name in table["op"].cast(pl.String)])
    norms = np.array([_LAYERS[name] is OpClass.NORM for name in table["op"].cast(pl.String)])
    passes = np.where(norms, PASSES["_fused_rms_norm"], 1.0)
    return replace(of_memory(times_ns, moved), launches=launches, passes=passes)


def _kernels(times_ns: F64, flops: F64, moved: F64, dtype: str) -> Kernels:
    count = len(times_ns)
    every, none = np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
    return Kernels(
        duration_ns=times_ns,
        flops=flops,
        bytes=moved,
        matmul=every,
        matmul_class=every,
        over_link=none,
        transfer=none,
        dtype=np.zeros(count, dtype=np.int64),
        dtypes=(dtype,),
        call=np.arange(count),
        gemm=np.zeros((count, 6)),
        attention=np.zeros((count, 9)),
        operator_ns=times_ns,
        launches=np.ones(count),
        passes=np.ones(count),
        rereads=np.ones(count),
        cycles=np.zeros(count),
    )
