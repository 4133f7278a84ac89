"""Chains of loads that wait for each other, which bound kernels with few rows or with an index.

One thread block reads a row in steps, and a step waits for the loads of the step before. With many
rows other blocks hide this time; with few the time grows with the length of the row and not with
the number of rows. Times on an H100, torch 2.11 (benchmarks/results,
2026-11-27-small-operators-h100): layer norm of 1 to 64 rows of 7168 15 us, a softmax of 1 to 8 rows
of 128,256 numbers 41 us, `cumsum` along the first dimension of 8192 x 256 3.2 ms. An index and the
element at it are a chain of two loads.

The chain is one of four bounds of a kernel, of which the longest counts (`roofline`): with many
rows it is that of bytes (`memory_bound`) or of SM cycles (`kernel_overheads`).
"""

from collections.abc import Callable
from math import ceil, log2
from typing import Any

from onerank.annotate.op_costs.block_cycles import (
    ALIGNED_BYTES,
    FEW_ROWS,
    SCANS,
    additions_of,
    scanned,
    threads_of_scan,
)
from onerank.annotate.op_costs.kernel_overheads import (
    SHARED_ROW_BYTES,
    STORES_BY_INDEX,
    VARIANCES,
    chained_rows_of,
)
from onerank.annotate.op_costs.memory_bound import row_elements
from onerank.annotate.op_costs.op_classes import op_class
from onerank.annotate.op_costs.operand_layouts import mixes_dtypes
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.op_costs.reductions import NEED_AXES, SM_COUNT, division_of

NEED_VALUES = frozenset(SCANS) | NEED_AXES
"""Scans and reductions, whose chain depends on the dimensions."""

# Elements that a block of PyTorch's kernels reads in a step, and its steps over a row. Layer norm
# (`vectorized_layer_norm_kernel`): 128 threads with 4 elements each, once for the sums and once for
# the result. Softmax of rows that do not fit into shared memory: 1024 threads with 16 bytes each,
# for the maximum, the sum and the result. Reductions: see `reductions`.
_NORM_ELEMENTS, _NORM_PASSES = 512, 2
# A step of an RMS norm takes 0.20 us if the cache has the row and 0.39 if not, of a layer norm, by
# Welford's algorithm, 0.28 and 0.47 (rows of 1152 to 8192, 2026-11-27-small-operators-blind-h100).
_RMS_NORM, _LAYER_NORM = 0.5, 0.69
_SOFTMAX_BYTES, _SOFTMAX_PASSES = 16 * 1024, 3

# Time of a load of a sum over that of other loads: means of 1 to 512 rows of 512 to 7168 elements
# take 2.0 us and 0.22 us for each load of a thread, on an H100 and an H200 (decodes, torch 2.11).
_SUMMED = 0.535
# From memory a load takes 0.57 and 0.64 us: means of 2048 rows of 4096 and of 7168 take an H100
# 20.1 and 37.6 us.
_SUMMED_FROM_MEMORY = 1.46
_SUMS = ("sum", "nansum", "mean", "linalg_vector_norm", "norm", "amax", "amin", "any", "all")
# Welford's algorithm loads two values at a time and divides for each: 0.33 us for such a load from
# the cache and 0.48 from memory, whether 2 or 1500 rows wait (`std` of rows of 896 to 8192 numbers
# on an H100).
_WELFORD_TOGETHER, _WELFORD = 2, 0.8

# Variances of columns: 0.05 us for each value of each of a thread's columns, and 0.2 us to combine
# two partial results, of the threads of a column and of the blocks that share it. 16, 128 and
# 512 rows take an H100 5.3, 9.6 and 29.4 us, 300 rows of 1000, 1002 and 1001 columns, of which a
# thread has four, two and one, 19, 8.4 and 4.9 (2026-11-27-kernel-sweep-h100).
_WELFORD_VALUE, _COMBINED = 0.122, 0.49

# Of sums whose outputs several blocks share: the last block waits 4 us for the others, and then
# loads their partial results, 0.17 to 0.19 us for each load of a thread (4 to 528 of them on an
# H100, 2026-11-28-norms-sums-h100).
_LAST_BLOCK, _PARTIAL = 9.5, 0.43

# A row of the gradients of a norm's weights: 4.2 to 5.1 ns for 8,192 to 50,176 rows of 256 to 1024
# numbers on an H200 (2026-11-28-norm-weights-h200), 4.3 on an H100.
_CHAINED_ROW = 0.0105

_EXTREMES = ("argmax", "argmin", "max", "min")
_LARGEST = 1.05

# A step of a scan along the last dimension is a tree of additions: 1.35 to 1.65 us for 32 to 512
# threads, in loads.
_TREE = 3.5

# A number of a column takes 0.16 us from the cache and 0.38 from memory (1500 x 256 int64).
_COLUMN = 0.386


def _norm(call: Call) -> float:
    tensor = call.tensor(0)
    if tensor is None or not tensor.shape:
        return 0.0
    steps = _NORM_PASSES * ceil(tensor.shape[-1] / _NORM_ELEMENTS)
    return steps * (_LAYER_NORM if call.op == "native_layer_norm" else _RMS_NORM)


# Up to this length `softmax_warp_forward` keeps a row in the registers of a warp: rows of 256
# numbers, 8 for each thread, take an H100 1.98 us, rows of 896, which count as 1024, 4.3.
_WARP_ROW, _WARP, _WARP_ELEMENT, _WARP_HIDDEN = 1024, 32, 0.23, 1.0


def _softmax(call: Call) -> float:
    tensor = call.tensor(0)
    if tensor is None or not tensor.shape:
        return 0.0
    if tensor.shape[-1] <= _WARP_ROW:
        elements = 2 ** ceil(log2(max(1, tensor.shape[-1]))) / _WARP
        return max(0.0, _WARP_ELEMENT * elements - _WARP_HIDDEN)
    row_bytes = tensor.shape[-1] * tensor.item_bytes
    passes = _SOFTMAX_PASSES if row_bytes > SHARED_ROW_BYTES else 1
    return passes * ceil(row_bytes / _SOFTMAX_BYTES)


def _reduction(call: Call) -> float:
    division = division_of(call)
    if division is None:
        return 0.0
    if call.op in VARIANCES and division.along_input:
        return division.values_read / _WELFORD_TOGETHER * _WELFORD
    if call.op in VARIANCES:
        blocks, threads = division.rows(SM_COUNT), division.block[1]
        combined = log2(threads) if division.across_warps else 0
        combined += ceil(blocks / threads) if blocks > 1 else 0
        values = ceil(division.values / blocks)
        return division.vector * (_WELFORD_VALUE * values + _COMBINED * combined)
    return division.loads * (_SUMMED if call.op in _SUMS else _LARGEST)


def _scan(call: Call) -> float:
    """Return the loads of a scan; CUB divides a single row of a sum among blocks.

    Along another dimension than the last, a thread adds the numbers of a column one by one. Along
    the last, a thread has two elements of each step of a row.
    """
    known = scanned(call)
    if known is None:
        return 0.0
    (tensor, axis), slower = known, SCANS[call.op]
    size = tensor.shape[axis]
    if not tensor.numel or (tensor.numel == size and "helper" not in call.op):
        return 0.0
    if axis != len(tensor.shape) - 1:
        return _COLUMN * size
    threads = threads_of_scan(tensor.numel // size, size)
    return slower * _TREE * ceil(size / (2 * threads))


# An index, and the element or row at it: 2.05 us for one row of `embedding`, `index_select` and
# `index`, 2.0 for `gather` and `scatter` of 8. `index_put` divides offsets by sizes before it
# knows an address, for the operand, the index and the result: 4.0 to 4.6 us for 1 to 16 rows.
# `index_copy`, whose operands the cache has, takes 2.3 to 2.9. `flip` divides as well, without an
# index to load: 2.2 us, and 3.0 to 3.3 from memory.
_INDEXED, _PUT, _FLIPPED = 2.0, 4.0, 2.2

# Elements that a thread of `_scatter_gather_elementwise_kernel` takes one after another, threads of
# a block, and loads for an element: 128 elements take 2.2 us, 256 3.1, 512 4.8, 768 6.8, and 1024
# or more 8.6, from memory; 1.7 to 5.4 from the cache.
_SCATTERED_BY_THREAD, _SCATTER_THREADS, _SCATTERED = 8, 128, 1.3
# Extremes swap in a loop: 7.0 to 8.2 us where additions take 4.2 to 4.6 (H200).
_COMPARED_BY_SWAPS = 1.75

# Up to 16 rows `indexSelectSmallIndex` and `indexFuncSmallIndex` take one row after another (their
# sources: Indexing.cu). Of 1 to 16 rows `embedding` and `index_select` take 2.2 to 11.5 us,
# `index_add`, which reads and writes the row, 2.3 to 13.6; 32 rows take 2.1 and 3.1.
_SELECTED, _ADDED = 1.5, 1.8


def _scattered(call: Call) -> float:
    """Return the loads of a gather or scatter of single elements along a dimension.

    Along another dimension than the last, a gather takes whole rows that are aligned:
    `index_select` and `embedding` are recorded so without a device.
    """
    index = call.tensor(2)
    if index is None:
        return 0.0
    table = call.tensor(0)
    aligned = table is not None and not row_elements(call, table) * table.item_bytes % ALIGNED_BYTES
    if call.op == "gather" and aligned and _is_before_last(call.value(1), index):
        return _INDEXED
    each = additions_of(call) or _COMPARED_BY_SWAPS
    return each * _SCATTERED * min(_SCATTERED_BY_THREAD, ceil(index.numel / _SCATTER_THREADS))


def _is_before_last(axis: Any, tensor: Tensor | None) -> bool:
    """Return whether `axis` is known, and is another dimension of the tensor than the last."""
    axes = len(tensor.shape) if tensor else 0
    return isinstance(axis, int) and axes > 0 and axis % axes != axes - 1


def _of_rows(rows: int, each: float) -> float:
    """Return the loads of a kernel that selects rows, of which it takes a few one by one."""
    return max(_INDEXED, 0.5 + each * rows) if rows <= FEW_ROWS else _INDEXED


def _selected(call: Call) -> float:
    # The index is the second argument of `embedding`, the third of `index_select`.
    index = call.tensor(1 if call.op == "embedding" else 2)
    return _of_rows(index.numel, _SELECTED) if index else _INDEXED


def _added(call: Call) -> float:
    index = call.tensor(2)
    return _of_rows(index.numel, _ADDED) if index else _INDEXED


# Of 1152 to 8192 bounds: 3.5 to 4.0 us from the cache, 4.7 to 5.7 from memory. A power of two of
# bounds takes up to twice as long: its comparisons share few sets of the SM's cache.
_COMPARED = 0.52


def _bisected(call: Call) -> float:
    """Return the loads of a binary search, each of which waits for the comparison before it."""
    at = 0 if call.op == "searchsorted" else 1
    bounds = call.tensor(at)
    return _COMPARED * log2(bounds.shape[-1] + 1) if bounds and bounds.shape else 0.0


# Negative log-likelihood: one block, of which a thread takes about 16 rows one after another, of a
# target, and of the score at it in the forward (NLLLoss.cu). A row takes 1.1 us forward and 0.56
# backward, for 512 to 16,384 rows of an H200 (2026-11-28-hopper-kernels-h200).
_LOSS_ROWS, _LEAST_THREADS, _MOST_THREADS = 16, 32, 1024
_SCORE_LOADS, _TARGET_LOADS = 2.6, 1.25


def _nll_loss(call: Call) -> float:
    target = call.tensor(2 if "backward" in call.op else 1)
    rows = target.numel if target else 0
    if not rows:
        return 0.0
    threads = 2 ** round(log2(max(rows / _LOSS_ROWS, 1)))
    threads = min(max(threads, _LEAST_THREADS), _MOST_THREADS)
    each = _TARGET_LOADS if "backward" in call.op else _SCORE_LOADS
    return each * ceil(rows / threads)


# An elementwise kernel whose operands differ in dtype loads by a switch of the dtype, so a thread's
# four elements wait for each other. One takes an H200 1.35 us, four 2.6
# (2026-11-28-hopper-kernels-h200).
_CAST_BY_THREAD, _CAST_THREADS, _CAST_LOADS = 4, 128, 0.8


def _mixed(call: Call) -> float:
    return _CAST_LOADS * min(_CAST_BY_THREAD, ceil(call.output_numel / _CAST_THREADS))


_SCATTERS = (
    "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_".split()
)

_CHAINS: dict[str, Callable[[Call], float]] = {
    **dict.fromkeys(_SCATTERS, _scattered),
    **dict.fromkeys(("embedding", "index_select"), _selected),
    **dict.fromkeys(("index_add", "index_add_"), _added),
    "index": lambda _: _INDEXED,
    "flip": lambda _: _FLIPPED,
    **dict.fromkeys(STORES_BY_INDEX, lambda _: _PUT),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _norm),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys((*_SUMS, *VARIANCES, *_EXTREMES), _reduction),
    **dict.fromkeys(SCANS, _scan),
    **dict.fromkeys(("searchsorted", "bucketize"), _bisected),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _nll_loss),
}


def chain_of(call: Call) -> float:
    """Return the number of loads of a call's longest chain; 0 if none bounds its time."""
    chain = _CHAINS.get(call.op)
    if chain is None and mixes_dtypes(call, op_class(call.op)):
        return _mixed(call)
    return chain(call) if chain else 0.0


# Operators whose loads were measured from memory and from the cache, and the ratio.
_FAR_LOADS = {
    **dict.fromkeys(_SUMS, _SUMMED_FROM_MEMORY / _SUMMED),
    **dict.fromkeys(_EXTREMES, _SUMMED_FROM_MEMORY),
    **dict.fromkeys(VARIANCES, 1.47),
    "_fused_rms_norm": 1.95,
    "native_layer_norm": 1.67,
    **dict.fromkeys(_SCATTERS, 1.78),
    **dict.fromkeys(STORES_BY_INDEX, 1.75),
    "flip": 1.9,
    **dict.fromkeys(SCANS, 2.4),
    **dict.fromkeys(("searchsorted", "bucketize"), 1.4),
}


def far_load_of(call: Call) -> float:
    """Return the time of a chain's load from memory over one from the cache; 1 if not measured."""
    axis = call.value(1)
    # Scans of columns were measured, and gathers and scatters of single elements.
    of_rows = call.op in SCANS and not _is_before_last(axis, call.tensor(0))
    whole_rows = _CHAINS.get(call.op) is _scattered and _is_before_last(axis, call.tensor(2))
    return 1.0 if of_rows or whole_rows else _FAR_LOADS.get(call.op, 1.0)


def tail_of(call: Call) -> float:
    """Return the loads that follow the rest of a sum: of the partial results of its blocks.

    If blocks share an output, the last of them to finish adds the partial results of all. The
    kernel for the weights of a norm's backward follows that for its operand.
    """
    if rows := chained_rows_of(call):
        return _CHAINED_ROW * rows
    division = division_of(call) if call.op in ("sum", "mean") else None
    if division is None or division.along_input:
        return 0.0
    blocks = division.rows(SM_COUNT)
    return _LAST_BLOCK + _PARTIAL * ceil(blocks / division.block[1]) if blocks > 1 else 0.0
