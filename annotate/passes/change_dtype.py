"""Run matrix products in another dtype than the captured one."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import Mask
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import base_name
from onerank.ir import UNKNOWN, Graph
from onerank.ir.dtypes import TENSOR_TYPES
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Change:
    """Torch's name of a type, of what types it takes the place, bytes of operand and of result."""

    dtype: str
    wider: tuple[str, ...]
    operand: int
    result: int


_CHANGES = {
    "fp8": _Change("float8_e4m3fn", ("bfloat16", "float16"), 1, 2),
    "bf16": _Change("bfloat16", ("float32", "tfloat32"), 2, 2),
    "fp16": _Change("float16", ("bfloat16", "float32", "tfloat32"), 2, 2),
    "tf32": _Change("tfloat32", ("float32",), 4, 4),
}
"""Results of fp8 products stay in 16 bits, as those of `_scaled_mm`; of others as of autocast."""

DTYPES = tuple(_CHANGES)

_MULTIPLE = 16  # of n and k, in fp8: cuBLAS takes no others


def run_in_float16(
    found: OpCosts, dtype: str | None, gpus: tuple[Gpu | None, Gpu]
) -> tuple[OpCosts, str | None, tuple[str, ...]]:
    """Return the work of the nodes in float16, the rest for `change_dtype`, and a note.

    Both have 16 bits, and GPUs with units for both run them at one rate. So a measurement in one
    dtype is valid for the other, for attention and convolutions too, and the step is as if captured
    in float16; float32 parts stay. Nothing changes for another `dtype`, or from a source that lacks
    either.

    Args:
        found: work of the nodes, as measured.
        dtype: the requested dtype.
        gpus: source (None if no GPU measured the graph) and target.

    Raises:
        AnnotateError: the target has no matrix units for float16.
    """
    source, target = gpus
    count = int((_typed(found, "bfloat16") & found.matmul).sum())
    if dtype != "fp16" or not count or not (source is None or _runs_alike(source)):
        return found, dtype, ()
    _check_units(dtype, target)
    names = tuple("float16" if name == "bfloat16" else name for name in found.dtypes)
    made = replace(found, dtypes=names)
    where = "" if source is None else f", which {source.name} runs at the same rate"
    note = (
        f"What if fp16: {count} kernels of products, convolutions and attention in bfloat16 run in "
        f"float16{where}. Bytes and all else are as captured; loss scaling is not added."
    )
    return made, None, (note,)


def _runs_alike(gpu: Gpu) -> bool:
    """Return whether a GPU has matrix units for both types of 16 bits, of one rate."""
    rates = [gpu.peak_tensor_flops_per_s(dtype) for dtype in ("bfloat16", "float16")]
    return rates[0] is not None and rates[0] == rates[1]


def missing_units_notes(found: OpCosts, target: Gpu) -> tuple[str, ...]:
    """Return a sentence where products in bfloat16 are many times slower than in float16."""
    slow = target.tensor_flops_per_s("bfloat16"), target.tensor_flops_per_s("float16")
    count = int((_typed(found, "bfloat16") & found.matmul).sum())
    rate = target.tensor_flops_per_s("float32")
    if slow[0] is not None or slow[1] is None or not count:
        return ()
    other = f"in float32, at {rate / 1e12:.1f} TFLOP/s" if rate else "at no rate that is known"
    return (
        f"{target.name} has no matrix units for bfloat16: {count} kernels of products and of "
        f"attention run {other}. For training in float16, at {slow[1] / 1e12:.1f} TFLOP/s, give "
        "`--dtype fp16`.",
    )


def change_dtype(
    graph: Graph, found: OpCosts, dtype: str, target: Gpu
) -> tuple[OpCosts, Mask, str]:
    """Return what the nodes do with their products in `dtype`, which those are, and a note.

    Dense and grouped products change; convolutions, attention and all else stay. No cast or scale
    is added.

    Raises:
        AnnotateError: `dtype` is not known, the target has no matrix units for it, or the graph
            has no product to change.
    """
    if dtype not in _CHANGES:
        raise AnnotateError(
            f'unknown data type "{dtype}"; known are {", ".join(DTYPES)}', code="dtype-unknown"
        )
    _check_units(dtype, target)
    change, able = _CHANGES[dtype], _able(graph, found, dtype)
    if not able.any():
        why = _why_none(graph, found, dtype)
        raise AnnotateError(
            f"no matrix product can change to {dtype}: {why}", code="dtype-nothing-to-change"
        )
    changed = np.zeros(len(found.works), dtype=bool)
    changed[found.call[able]] = True
    works = tuple(
        _retyped_work(work, change) if one else work
        for work, one in zip(found.works, changed.tolist(), strict=True)
    )
    dtypes = tuple(dict.fromkeys([*found.dtypes, change.dtype]))
    item = np.array([_item_bytes(found.dtypes[int(c)]) for c in found.dtype[able]])
    read, written = found.bytes_read.copy(), found.bytes_written.copy()
    for column, after in ((read, change.operand), (written, change.result)):
        scaled = np.rint(column[able] * (np.minimum(after, item) / item)).astype(np.int64)
        column[able] = np.where(column[able] == UNKNOWN, UNKNOWN, scaled)
    code = np.where(able, dtypes.index(change.dtype), found.dtype)
    wide = _typed(found, *change.wider)
    total, rest = int(able.sum()), int((found.matmul & wide & ~able).sum())
    note = (
        f"What if {dtype}: {total} of {total + rest} kernels of products in "
        f"{' or '.join(change.wider)} change: an element of operands has {8 * change.operand} "
        f"bits, of results {8 * change.result}. The others (attention, convolutions, sizes that "
        "the type does not take) and all else are as captured, and no casts are added. The nodes "
        "keep the operand types of the capture: what reads them, energy for one, goes by these."
    )
    made = replace(
        found, works=works, dtypes=dtypes, dtype=code, bytes_read=read, bytes_written=written
    )
    return made, able, note


def _why_none(graph: Graph, found: OpCosts, dtype: str) -> str:
    """Return why no product of the graph can change to `dtype`."""
    wider = _CHANGES[dtype].wider
    wide = found.matmul & _typed(found, *wider)
    if not wide.any():
        types = {found.dtypes[int(code)] for code in np.unique(found.dtype[found.matmul])}
        has = ", ".join(sorted(types)) or "none"
        return f"that takes one in {' or '.join(wider)}, and the trace has {has}"
    others = int((wide & ~_taking(graph, found)).sum())
    odd = int(wide.sum()) - others
    reasons = [f"{others} are convolutions or attention, which stay as they are"] * bool(others)
    reasons += [f"{odd} have an n or k that is no multiple of {_MULTIPLE}"] * bool(odd)
    return f"of the {int(wide.sum())} in {' or '.join(wider)}, {' and '.join(reasons)}"


def with_operands(graph: Graph, index: I64, dtype: str) -> tuple[Graph, bool]:
    """Return the graph in which the nodes at `index` have operands in `dtype`, and whether they do.

    So a kernel database finds the calls that they would be. TF32 is no type of operands.
    """
    change = _CHANGES[dtype]
    if change.dtype not in TENSOR_TYPES:
        return graph, False
    strings, types = graph.strings.copy(), graph.nodes.input_types.copy()
    codes, place = np.unique(types[index], return_inverse=True)
    made: list[str] = [strings[code] for code in codes.tolist()]
    for wider in change.wider:
        if wider in TENSOR_TYPES:
            old, new = TENSOR_TYPES[wider], TENSOR_TYPES[change.dtype]
            made = [text.replace(old, new) for text in made]
    types[index] = np.array([strings.intern(text) for text in made], dtype=types.dtype)[place]
    return replace(graph.with_columns(input_types=types), strings=strings), True


def _check_units(dtype: str, target: Gpu) -> None:
    """Refuse a type that the target has no matrix units for.

    Raises:
        AnnotateError: it has none.
    """
    units = [n.split("_tensor_t")[0] for n in target.figures if "_tensor_t" in n]
    if dtype not in units:
        raise AnnotateError(
            f"{target.name} has no matrix units for {dtype}; it has them for "
            f"{', '.join(units) or 'no data type'}",
            code="dtype-unsupported-by-gpu",
        )


def _typed(found: OpCosts, *dtypes: str) -> Mask:
    """Return which nodes have operands of one of the types, bool[n]."""
    return np.isin(found.dtype, [i for i, t in enumerate(found.dtypes) if t in dtypes])


def _able(graph: Graph, found: OpCosts, dtype: str) -> Mask:
    """Return which nodes are products that can change to `dtype`, bool[n]."""
    fits = np.array([_fits(work, dtype) for work in found.works], dtype=bool)[found.call]
    typed = _typed(found, *_CHANGES[dtype].wider)
    return fits & typed & found.matmul & _taking(graph, found)


def _taking(graph: Graph, found: OpCosts) -> Mask:
    """Return which nodes are dense or grouped products, bool[n]."""
    ops = np.zeros(len(found.works), dtype=np.int64)
    ops[found.call] = graph.nodes.op[found.index]
    names = [base_name(graph.strings[int(op)]) for op in ops]
    sort = [_takes(work, name) for work, name in zip(found.works, names, strict=True)]
    return np.array(sort, dtype=bool)[found.call]


def _retyped_work(work: Work, change: _Change) -> Work:
    gemm = (*work.gemm[:4], change.operand, change.result) if work.gemm else ()
    parts = tuple(part._replace(item_bytes=change.operand) for part in work.parts)
    return replace(work, gemm=gemm, parts=parts)


def _takes(work: Work, name: str) -> bool:
    return work.matmul and not work.attention and "conv" not in name


def _fits(work: Work, dtype: str) -> bool:
    """Return whether the sizes, where they are known, are such as the type's kernels take."""
    return dtype != "fp8" or not any(size % _MULTIPLE for size in work.gemm[2:4])


def _item_bytes(dtype: str) -> int:
    return 4 if dtype in ("float32", "tfloat32") else 2
