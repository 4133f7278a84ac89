"""Measured power beside the features of each call, from kernel databases and tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from onerank.annotate.describe_gpu import Powers
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.annotate.kernel_db.call_features import call_of
from onerank.annotate.kernel_db.call_keys import CallKey
from onerank.annotate.kernel_db.database import KernelRow, read_database, rows_of
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.power import uses, uses_of
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir.errors import FormatError, TargetError

F64 = npt.NDArray[np.float64]

COLUMNS = ("gpu", "m", "n", "k", "time_us", "power_w")

LEAST_US = 200
"""Products of a table are no shorter: of those that were run for less than a sample of the power
takes, the idle time between the runs is in the sample. A product of m = n = k = 2048 draws 309 W in
the table and 705 W when it is held for two seconds on the same GPU, one of 4096 692 W in both."""

_LISTS = {
    **dict.fromkeys(("_foreach_add_", "_foreach_mul_", "_foreach_div_", "_foreach_sqrt"), 1),
    **dict.fromkeys(("_foreach_lerp_",), 2),
    **dict.fromkeys(("_foreach_addcmul_", "_foreach_addcdiv_"), 3),
    **dict.fromkeys(("_fused_adamw_", "_fused_adam_"), 5),
}
"""Operator -> lists among its operands, which a key lays out one by one."""

_AS_OPERAND = (OpClass.ELEMENTWISE, OpClass.NORM, OpClass.SOFTMAX)

_FUSED = 5


def read_held(path: Path) -> list[Powers]:
    """Read the calls of a kernel database whose power was measured, an entry for each GPU.

    Raises:
        DatabaseError: the file is no kernel database.
        FormatError: no row has a power.
        OSError: the file cannot be read.
        TargetError: a GPU has no description, or one without power limit.
    """
    rows = [row for row in rows_of(read_database(path)) if row.power_w is not None]
    if not rows:
        raise FormatError(
            f"{path}: no row has a power; expected calls that were held, as `onerank bench --grid "
            "power` measures them"
        )
    names = dict.fromkeys(row.gpu for row in rows)
    return [_held(name, [row for row in rows if row.gpu == name]) for name in names]


def _held(name: str, rows: list[KernelRow]) -> Powers:
    gpu = find_gpu(name)
    if gpu is None or gpu.tdp_w is None:
        raise TargetError(f"{name}: the fit needs a description with tdp_w")
    nanoseconds = np.array([row.median_ns for row in rows], dtype=np.float64)
    use = uses_of(kernels_of([_work(row) for row in rows], nanoseconds), gpu)
    share = np.array([row.power_w or 0.0 for row in rows]) / gpu.tdp_w
    names = tuple(op_class(row.operator).value for row in rows)
    return Powers(gpu, use, share, nanoseconds * 1e-9, names)


def _work(row: KernelRow) -> Work:
    """Return what a row's call does, its results taken to be as its operands."""
    call = call_of(CallKey(row.operator, row.shapes, row.dtypes, row.attributes))
    if call is None:
        raise FormatError(f"{row.operator}: an operand of {', '.join(row.dtypes)} has no size")
    work = work_of_call(row.operator, with_results(call))
    if work.dtype == "float32" and "tf32" in row.layout:
        return replace(work, dtype="tfloat32")
    return work


def with_results(call: Call) -> Call:
    """Return a call of a key with its lists put together, and with the results it will have."""
    lists, given = _LISTS.get(call.op, 0), call.inputs
    if lists:
        each = len(given) // lists
        some = [one[0] for one in given if one]
        parts = [tuple(some[at * each : (at + 1) * each]) for at in range(lists)]
        given = (*parts[:4], (), *parts[4:]) if lists == _FUSED else tuple(parts)
        outputs = given[:1] if not call.op.endswith("_") else ()
        return replace(call, inputs=given, outputs=outputs)
    tensors = [one[0] for one in given if one]
    return replace(call, outputs=tuple((one,) for one in _results(call, tensors)))


def _results(call: Call, tensors: list[Tensor]) -> list[Tensor]:
    sort = op_class(f"aten::{call.op}")
    if call.op in ("mm", "_scaled_mm"):
        left, right = tensors[:2]
        item = ("bfloat16", 2) if call.op == "_scaled_mm" else (left.dtype, left.item_bytes)
        return [Tensor((left.shape[0], right.shape[1]), *item)]
    if sort is OpClass.ATTENTION:
        return tensors[1:4] if "backward" in call.op else tensors[:1]
    if call.op == "cat":
        return tensors
    if call.op == "embedding":
        table, index = tensors[:2]
        return [Tensor((*index.shape, table.shape[-1]), table.dtype, table.item_bytes)]
    if call.op == "embedding_dense_backward":
        made, rows = tensors[0], call.value(2)
        return [Tensor((rows, made.shape[-1]), made.dtype, made.item_bytes)]
    return [max(tensors, key=lambda one: one.numel)] if sort in _AS_OPERAND else []


def read_products(path: Path) -> list[Powers]:
    """Read bf16 products of `LEAST_US` and more with their power, one entry per GPU.

    Raises:
        FormatError: the file is no such table.
        TargetError: a GPU has no description, or one without power limit.
    """
    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise FormatError(f"{path}: no parquet table can be read there: {error}") from None
    if lacking := [name for name in COLUMNS if name not in table.columns]:
        raise FormatError(f"{path}: lacks {', '.join(lacking)}; it has {', '.join(table.columns)}")
    if "dtype" in table.columns:
        table = table.filter(pl.col("dtype").cast(pl.String) == "bfloat16")
    table = table.filter(pl.col("time_us") >= LEAST_US)
    return [
        _products(load_gpu(str(key)), rows)
        for (key,), rows in table.group_by("gpu", maintain_order=True)
    ]


def _products(gpu: Gpu, rows: pl.DataFrame) -> Powers:
    rate = gpu.tensor_flops_per_s("bfloat16")
    if gpu.tdp_w is None or rate is None:
        raise TargetError(f"{gpu.name}: the test needs tdp_w and a bf16 rate")
    m, n, k, time, power = (rows[name].to_numpy().astype(np.float64) for name in COLUMNS[1:])
    moved = 2 * (m * k + k * n + m * n)
    use = uses(time * 1e-6, 2 * m * n * k / rate, moved, np.zeros_like(time), gpu)
    return Powers(gpu, use, power / gpu.tdp_w, time * 1e-6, ("gemm",) * len(time))
