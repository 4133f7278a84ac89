"""Run GEMMs in another dtype than the captured one."""

from dataclasses import dataclass, replace

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.cost_record import Scales, Work
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import base_name
from onerank.ir import UNKNOWN, Graph
from onerank.ir.arrays import I64, Mask
from onerank.ir.dtypes import TENSOR_TYPES
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note


@dataclass(frozen=True, slots=True)
class _DtypeChange:
    """A dtype that GEMMs can run in.

    Attributes:
        dtype: torch's name.
        replaced: dtypes of operands that it replaces.
        operand_bytes: bytes per element of operands, with its share of a scale.
        result_bytes: bytes per element of results.
        multiple: what n and k must be multiples of.
        scales: of the operands.
    """

    dtype: str
    replaced: tuple[str, ...]
    operand_bytes: float
    result_bytes: int
    multiple: int = 1
    scales: Scales = Scales.TENSOR


# Results of fp8 and fp4 GEMMs have 16 bits, as with `_scaled_mm`; other results are as in
# autocast. cuBLAS accepts fp8 GEMMs only if n and k are multiples of 16. fp4 is NVFP4: 16
# elements share a scale in 8 bits, and k must be a multiple of 32.
_CHANGES = {
    "fp8": _DtypeChange("float8_e4m3fn", ("bfloat16", "float16"), 1, 2, multiple=16),
    "fp4": _DtypeChange(
        "float4_e2m1fn_x2", ("bfloat16", "float16"), 0.5625, 2, multiple=32, scales=Scales.BLOCK
    ),
    "bf16": _DtypeChange("bfloat16", ("float32", "tfloat32"), 2, 2),
    "fp16": _DtypeChange("float16", ("bfloat16", "float32", "tfloat32"), 2, 2),
    "tf32": _DtypeChange("tfloat32", ("float32",), 4, 4),
}

DTYPES = tuple(_CHANGES)


def keeps_times_in_float16(costs: OpCosts, dtype: str | None, source: Gpu | None) -> bool:
    """Return whether `dtype` is fp16 and times of the bfloat16 work are valid in float16.

    Both have 16 bits, and GPUs with units for both run them at the same rate. A measurement in one
    dtype is therefore valid for the other, also of attention and convolutions. False if the source
    lacks either; a graph that no GPU measured (`source` None) has no times to keep.
    """
    if dtype != "fp16" or not (_has_dtype(costs, "bfloat16") & costs.matmul).any():
        return False
    return source is None or _has_equal_rates(source)


def run_in_float16(costs: OpCosts, gpus: tuple[Gpu | None, Gpu]) -> tuple[OpCosts, Note]:
    """Return the work of the nodes as if captured in float16, and a note.

    Parts in float32 stay. Precondition: `keeps_times_in_float16`.

    Args:
        costs: work of the nodes, as measured.
        gpus: source (None if no GPU measured the graph) and target.

    Raises:
        AnnotateError: the target has no tensor cores for float16.
    """
    source, target = gpus
    count = int((_has_dtype(costs, "bfloat16") & costs.matmul).sum())
    _check_units("fp16", target)
    names = tuple("float16" if name == "bfloat16" else name for name in costs.dtypes)
    renamed = replace(costs, dtypes=names)
    rate_note = "" if source is None else f", which {source.name} runs at the same rate"
    note = Note(
        f"What if fp16: {count} GEMMs, convolutions and attention kernels in bfloat16 run in "
        f"float16{rate_note}. Bytes and other kernels are as captured; loss scaling is not added.",
        code="what-if-float16",
    )
    return renamed, note


def _has_equal_rates(gpu: Gpu) -> bool:
    """Return whether a GPU has tensor cores for bfloat16 and float16 with the same rate."""
    rates = [gpu.peak_tensor_flops_per_s(dtype) for dtype in ("bfloat16", "float16")]
    return rates[0] is not None and rates[0] == rates[1]


def missing_units_notes(costs: OpCosts, target: Gpu) -> tuple[Note, ...]:
    """Return a note if the target has tensor cores for float16, but none for bfloat16."""
    # A V100 or a T4 runs bfloat16 GEMMs at its float32 rate, so training there uses float16.
    rates = target.tensor_flops_per_s("bfloat16"), target.tensor_flops_per_s("float16")
    count = int((_has_dtype(costs, "bfloat16") & costs.matmul).sum())
    rate = target.tensor_flops_per_s("float32")
    if rates[0] is not None or rates[1] is None or not count:
        return ()
    fallback = f"in float32, at {rate / 1e12:.1f} TFLOP/s" if rate else "at an unknown rate"
    return (
        Note(
            f"{target.name} has no tensor cores for bfloat16: {count} kernels of GEMMs and of "
            f"attention run {fallback}. For training in float16, at {rates[1] / 1e12:.1f} TFLOP/s, "
            "give `--dtype fp16`.",
            code="no-bfloat16-units",
        ),
    )


def change_dtype(
    graph: Graph, costs: OpCosts, dtype: str, target: Gpu
) -> tuple[OpCosts, Mask, Note]:
    """Return the work of the nodes with GEMMs in `dtype`, the changed nodes, and a note.

    Dense and grouped GEMMs change; convolutions, attention and all else stay. No cast or scale
    is added.

    Raises:
        AnnotateError: `dtype` is not known, the target has no tensor cores for it, or the graph
            has no GEMM to change.
    """
    if dtype not in _CHANGES:
        raise AnnotateError(
            f'unknown dtype "{dtype}"; known are {", ".join(DTYPES)}', code="dtype-unknown"
        )
    _check_units(dtype, target)
    change, can_change = _CHANGES[dtype], _can_change(graph, costs, dtype)
    if not can_change.any():
        why = _reason_none(graph, costs, dtype)
        raise AnnotateError(f"no GEMM can change to {dtype}: {why}", code="dtype-nothing-to-change")
    changed = np.zeros(len(costs.works), dtype=bool)
    changed[costs.call[can_change]] = True
    works = tuple(
        _work_in_dtype(work, change) if changes else work
        for work, changes in zip(costs.works, changed.tolist(), strict=True)
    )
    dtypes = tuple(dict.fromkeys([*costs.dtypes, change.dtype]))
    item_bytes = np.array([_item_bytes(costs.dtypes[int(c)]) for c in costs.dtype[can_change]])
    read, written = costs.bytes_read.copy(), costs.bytes_written.copy()
    for column, after in ((read, change.operand_bytes), (written, change.result_bytes)):
        # A change never widens: an operand that is narrower already keeps its bytes.
        ratio = np.minimum(after, item_bytes) / item_bytes
        scaled = np.rint(column[can_change] * ratio).astype(np.int64)
        column[can_change] = np.where(column[can_change] == UNKNOWN, UNKNOWN, scaled)
    code = np.where(can_change, dtypes.index(change.dtype), costs.dtype)
    wide = _has_dtype(costs, *change.replaced)
    total, others = int(can_change.sum()), int((costs.matmul & wide & ~can_change).sum())
    note = Note(
        f"What if {dtype}: {total} of {total + others} GEMM kernels in "
        f"{' or '.join(change.replaced)} change: an element of operands has "
        f"{8 * change.operand_bytes:g} bits, of results {8 * change.result_bytes}. The others "
        "(attention, convolutions, sizes that the type does not support) stay as captured, and no "
        "casts are added. The nodes keep the captured operand types, and the energy estimate uses "
        "these.",
        code="what-if-dtype",
    )
    changed_costs = replace(
        costs, works=works, dtypes=dtypes, dtype=code, bytes_read=read, bytes_written=written
    )
    return changed_costs, can_change, note


def _reason_none(graph: Graph, costs: OpCosts, dtype: str) -> str:
    """Return why no GEMM of the graph can change to `dtype`."""
    change = _CHANGES[dtype]
    replaced = change.replaced
    wide = costs.matmul & _has_dtype(costs, *replaced)
    if not wide.any():
        types = {costs.dtypes[int(code)] for code in np.unique(costs.dtype[costs.matmul])}
        has = ", ".join(sorted(types)) or "none"
        return f"expected one in {' or '.join(replaced)}, and those of the trace are in {has}"
    others = int((wide & ~_is_gemm(graph, costs)).sum())
    misaligned = int(wide.sum()) - others
    reasons = [f"{others} are convolutions or attention, which keep their dtype"] * bool(others)
    reasons += [f"{misaligned} have an n or k that is not a multiple of {change.multiple}"] * bool(
        misaligned
    )
    return f"of the {int(wide.sum())} in {' or '.join(replaced)}, {' and '.join(reasons)}"


def with_operands(graph: Graph, index: I64, dtype: str) -> tuple[Graph, bool]:
    """Return the graph in which the nodes at `index` have operands in `dtype`, and whether they do.

    A kernel database is keyed by operand dtypes, so look-ups need them. TF32 is a mode of float32
    GEMMs and not a dtype of operands, and 4-bit operands are packed in pairs: the graph stays,
    and the second result is False.
    """
    change = _CHANGES[dtype]
    # Packed operands have other shapes, and no database has rows with them.
    if change.dtype not in TENSOR_TYPES or change.operand_bytes < 1:
        return graph, False
    # A copy, since interning adds texts and the table is shared with the captured graph.
    strings, types = graph.strings.copy(), graph.nodes.input_types.copy()
    codes, code_index = np.unique(types[index], return_inverse=True)
    texts: list[str] = [strings[code] for code in codes.tolist()]
    for old_dtype in change.replaced:
        if old_dtype in TENSOR_TYPES:
            old, new = TENSOR_TYPES[old_dtype], TENSOR_TYPES[change.dtype]
            texts = [text.replace(old, new) for text in texts]
    types[index] = np.array([strings.intern(text) for text in texts], dtype=types.dtype)[code_index]
    return replace(graph.with_columns(input_types=types), strings=strings), True


def _check_units(dtype: str, target: Gpu) -> None:
    """Raise if the target has no tensor cores for `dtype`.

    Raises:
        AnnotateError: the target has no tensor cores for it.
    """
    units = [n.split("_tensor_t")[0] for n in target.figures if "_tensor_t" in n]
    if dtype not in units:
        raise AnnotateError(
            f"{target.name} has no tensor cores for {dtype}; it has them for "
            f"{', '.join(units) or 'no dtype'}",
            code="dtype-unsupported-by-gpu",
        )


def _has_dtype(costs: OpCosts, *dtypes: str) -> Mask:
    """Return the nodes whose operands have one of the dtypes, bool[n]."""
    return np.isin(costs.dtype, [i for i, t in enumerate(costs.dtypes) if t in dtypes])


def _can_change(graph: Graph, costs: OpCosts, dtype: str) -> Mask:
    """Return the GEMMs that can change to `dtype`, bool[n]."""
    change = _CHANGES[dtype]
    fits = np.array([_has_multiple_sizes(work, change) for work in costs.works], dtype=bool)[
        costs.call
    ]
    typed = _has_dtype(costs, *change.replaced)
    return fits & typed & costs.matmul & _is_gemm(graph, costs)


def _is_gemm(graph: Graph, costs: OpCosts) -> Mask:
    """Return the dense and grouped GEMMs, bool[n]."""
    ops = np.zeros(len(costs.works), dtype=np.int64)
    ops[costs.call] = graph.nodes.op[costs.index]
    names = [base_name(graph.strings[int(op)]) for op in ops]
    is_gemm = [_is_gemm_work(work, name) for work, name in zip(costs.works, names, strict=True)]
    return np.array(is_gemm, dtype=bool)[costs.call]


def _work_in_dtype(work: Work, change: _DtypeChange) -> Work:
    gemm = work.gemm
    if gemm is not None:
        gemm = gemm._replace(operand_bytes=change.operand_bytes, result_bytes=change.result_bytes)
    parts = tuple(part._replace(item_bytes=change.operand_bytes) for part in work.parts)
    return replace(work, gemm=gemm, parts=parts, scales=change.scales)


def _is_gemm_work(work: Work, name: str) -> bool:
    return work.matmul and not work.attention and "conv" not in name


def _has_multiple_sizes(work: Work, change: _DtypeChange) -> bool:
    """Return whether the dtype's kernels support the sizes of a call; True for unknown sizes."""
    # Grouped GEMMs have no `gemm` and pass: their rows are not recorded.
    if work.gemm is None:
        return True
    return not (work.gemm.n % change.multiple or work.gemm.k % change.multiple)


def _item_bytes(dtype: str) -> int:
    # TF32 is a mode of float32 GEMMs: operands in memory keep 4 bytes.
    return 4 if dtype in ("float32", "tfloat32") else 2
