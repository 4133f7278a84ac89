"""What kernels of memory-bound operators take beyond one pass over their operands and results.

- Repeated passes over operands (`passes_of`). A norm reads its row for the sums and again for the
  result; its backward reads gradient and operand again for the weight gradients; batch and group
  norms do so in separate kernels. A softmax keeps rows of up to 1024 elements in registers and
  reads longer ones twice. Additions by index in 16 bits retry failed compare-and-swap operations.
- Work per element (`cycles_of`). A kernel with broadcast operands, operands of unequal strides or
  a widening cast computes the address of each element, and a sum adds elements singly, so an SM
  handles a few elements per cycle at any size.
- A later start (`floor_factor_of`). Short kernels, as in a decode, show that those which compute
  addresses also start more slowly.

The bytes and FLOPs are in `memory_bound`. Kernels with few rows wait for one load after another
instead: see `load_chains`.
"""

from onerank.annotate.op_costs.block_cycles import block_cycles_of, computes_sums
from onerank.annotate.op_costs.memory_bound import changed_elements
from onerank.annotate.op_costs.op_classes import OpClass, is_generated
from onerank.annotate.op_costs.operand_layouts import (
    casts,
    computes_addresses,
    concatenates_strided,
    innermost_sizes,
    is_expanded,
    mixes_dtypes,
    reads_device_scalar,
    transposes,
)
from onerank.annotate.op_costs.operands import Call, Tensor, numbers_of
from onerank.annotate.op_costs.reductions import SM_COUNT, division_of

# Longest row that PyTorch's softmax keeps in the registers of a warp, in elements, in torch 2.11.
# Longer ones take `_LONG_SOFTMAX` passes.
_REGISTER_ROW = 2048

SHARED_ROW_BYTES = 48 * 1024
"""Longest row that a softmax or its backward keeps in shared memory: the limit of a block without
opt-in."""

PASSES = {
    "native_layer_norm": 1.5,
    "_fused_rms_norm": 1.45,
    "native_layer_norm_backward": 2.7,
    "_fused_rms_norm_backward": 2.7,
    "native_dropout": 1.2,
}
"""Passes over the bytes: time times achievable bandwidth, over the bytes.

Measured on calls of 30 us and more in the shipped database of the H200. Dropout in 32 bits:
1.12 on an H100 (134 million elements, 2026-11-26), 1.27 to 1.3 on an H200 (6 to 67 million); in 16
bits its random numbers take longer (`_PER_CYCLE`). Layer norm
reads once for the sums and again for the result: in NeuSight's set it takes 1.53 passes on a V100,
1.46 on a T4 and 1.35 on an A100 (medians, 32 bits).
"""

# On a Hopper GPU the SM's cache keeps short rows of all its blocks between the two. Passes over the
# bytes of rows up to the first length and from the second on, in bytes: an H100 takes 0.97 to 1.09
# for rows of 2 to 5 kB, 1.07 to 1.31 for 8 kB, 1.3 for 12 kB, 1.4 to 1.5 for 16 kB and 1.45 to 1.55
# for 32 kB (2026-11-28-norms-sums-h100). A V100 takes 1.6 to 1.7 for 4 to 10 kB.
_NORMS = ("native_layer_norm", "_fused_rms_norm")
_CACHED_ROW, _CACHED_PASSES, _REREAD_ROW, _REREAD_PASSES = 4096, 1.05, 16384, 1.45

# Their backward on a Hopper GPU: 1.15 passes for the gradient of the operand; a second kernel sums
# those of the weights, and reads two of the three tensors again. Each of its blocks goes through
# all rows, which takes 4.3 ns for a row on an H100 and on an H200, whatever its length up to about
# 6 kB (`load_chains.tail_of`). More than 65,536 rows of less than 2,112 elements are divided among
# blocks (layer_norm_kernel.cu). Chosen on eight shapes of training steps on H100s
# (2026-11-28-norms-sums-h100).
_NORM_BACKWARDS = ("native_layer_norm_backward", "_fused_rms_norm_backward")
_OPERAND_PASSES, _WEIGHT_PASSES, _CHAINED_ROW_BYTES = 1.15, 0.7, 5860
_DIVIDED_ROWS, _DIVIDED_WIDTH = 65_536, 2112

# SM cycles of a row and of each of its elements in the kernel for the gradient of the operand, and
# bytes that memory gives an SM in a cycle while the other kernel reads its two tensors.
_BACKWARD_ROW = {"native_layer_norm_backward": 170, "_fused_rms_norm_backward": 139}
_BACKWARD_ELEMENT, _BYTES_PER_CYCLE = 0.294, 10.9

# A sum over leading axes whose outputs several blocks share takes as long as if its rows had this
# many bytes more: rows of 256 B to 16 kB on an H100 (the same file).
_SHARED_ROW_BYTES = 500

# Passes by the kernels' code: one for the sums, one for the result. Not measured.
_COUNTED = {
    "native_batch_norm": 3 / 2,
    "cudnn_batch_norm": 3 / 2,
    "miopen_batch_norm": 3 / 2,
    "_batch_norm_with_update": 3 / 2,
    "_native_batch_norm_legit": 3 / 2,
    "native_group_norm": 3 / 2,
    "native_batch_norm_backward": 5 / 3,
    "cudnn_batch_norm_backward": 5 / 3,
    "miopen_batch_norm_backward": 5 / 3,
    "batch_norm_backward": 5 / 3,
    "native_group_norm_backward": 5 / 3,
}

# A cache serves some of the rereads: 1.54 passes on a V100, 1.28 on a T4 and 1.36 on an A100, in
# NeuSight's set. On an H200 the SMs bound the forward (`_LONG_SOFTMAX_PER_CYCLE`); its backward is
# measured in the same way as `PASSES`.
_LONG_SOFTMAX, _LONG_SOFTMAX_BACKWARD = 1.5, 1.4


# Elementwise kernels on one list of tensors (`multi_tensor_apply`), whose blocks take 65,536
# elements each: `_foreach_sqrt` and `_foreach_mul` of 60 to 600 MB take an H200 1.15 to 1.3 times
# as long as memory needs (2026-11-28-convolutions-h200).
_LIST_PASSES = 1.2


def passes_of(call: Call) -> float:
    """Return the number of times that a call's kernels stream its bytes."""
    name = call.op
    if name in _NORM_BACKWARDS and (chained_rows_of(call) or not _sums_weights(call)):
        return _OPERAND_PASSES
    if name in PASSES:
        return PASSES[name]
    if name in _COUNTED:
        return _COUNTED[name] if computes_sums(call) else 1.0
    tensor = call.tensor(0)
    if tensor is None or not tensor.shape:
        return 1.0
    row_bytes = tensor.shape[-1] * tensor.item_bytes
    if name == "roll":
        passes = float(rolled_dimensions(call))
    elif name.startswith("_foreach_") and sum(map(bool, call.inputs)) == 1:
        passes = _LIST_PASSES
    elif name in _SUMS and shares_outputs(call):
        passes = 1 + _SHARED_ROW_BYTES / max(call.output_numel * tensor.item_bytes, 1)
    elif name in ("_softmax", "_log_softmax"):
        passes = _LONG_SOFTMAX if tensor.shape[-1] > _REGISTER_ROW else 1.0
    elif name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        passes = 1.0 if row_bytes <= SHARED_ROW_BYTES else _LONG_SOFTMAX_BACKWARD
    else:
        passes = 1.0
    return passes


def cached_passes_of(call: Call) -> float:
    """Return `passes_of` where an SM's cache keeps the rows of its blocks, as on Hopper GPUs."""
    tensor = call.tensor(0)
    if tensor is None or not tensor.numel:
        return passes_of(call)
    if call.op in ("_softmax", "_log_softmax"):
        row = tensor.shape[-1] * tensor.item_bytes if tensor.shape else 0
        return _UNCACHED_SOFTMAX if row > _UNCACHED_ROW_BYTES else passes_of(call)
    if call.op not in (*_NORMS, *_NORM_BACKWARDS):
        return passes_of(call)
    width = tensor.shape[-1] if tensor.shape else 1
    row_bytes = width * tensor.item_bytes
    if call.op in _NORM_BACKWARDS:
        streams_weights = _sums_weights(call) and not chained_rows_of(call)
        return _OPERAND_PASSES + (_WEIGHT_PASSES if streams_weights else 0.0)
    share = (row_bytes - _CACHED_ROW) / (_REREAD_ROW - _CACHED_ROW)
    return _CACHED_PASSES + min(max(share, 0.0), 1.0) * (_REREAD_PASSES - _CACHED_PASSES)


def chained_rows_of(call: Call) -> int:
    """Return the short rows that each block of a norm's backward sums one after another.

    0 if blocks divide the rows, if bytes limit the kernel, without weights, and for other
    operators.
    """
    tensor = call.tensor(0)
    if call.op not in _NORM_BACKWARDS or tensor is None or not tensor.shape or not tensor.numel:
        return 0
    if not _sums_weights(call):
        return 0
    width = tensor.shape[-1]
    short = width * tensor.item_bytes < _CHAINED_ROW_BYTES
    return tensor.numel // width if short and not _divides_rows(tensor) else 0


def _sums_weights(call: Call) -> bool:
    """Return whether a norm's backward has gradients of weights; true if results are not known."""
    weights = call.outputs[1:]
    return not weights or any(each.numel for result in weights for each in result or ())


def _divides_rows(tensor: Tensor) -> bool:
    """Return whether blocks share the rows of which a norm's backward sums weight gradients."""
    width = tensor.shape[-1] if tensor.shape else 1
    return tensor.numel // width > _DIVIDED_ROWS and width < _DIVIDED_WIDTH


def rereads_of(call: Call) -> float:
    """Return the number of times that memory, not the cache, serves a call's bytes.

    A long softmax rereads its rows from memory. A norm rereads them from the cache: its kernels
    take 1.18 times as long on an H100 as on an H200, whose memory is 1.43 times as fast; those of a
    long softmax take 1.34 times as long (2026-11-23).
    """
    return passes_of(call) if "softmax" in call.op else 1.0


# Elements per SM and cycle of `max_clock_mhz`: of elementwise kernels without vector loads, and of
# reductions. Measured on kernels of 10 us and more in two captured steps on an H200: 1.25 to 1.56
# for `elementwise_kernel` and `unrolled_elementwise_kernel`, in 16 and 32 bits; 2.3 to 3.2 for
# `reduce_kernel`. Concatenations with a strided operand: 0.93 on an H100 and 0.96 on an H200 (2 to
# 67 MB), by a kernel that divides each element's index.
_ELEMENTWISE_PER_CYCLE, _REDUCED_PER_CYCLE, _CONCATENATED_PER_CYCLE = 1.34, 2.5, 0.95

# On an H100 kernels with operands of 4 bytes take 1.09 to 1.15, since their bytes take about as
# long. Kernels that load each operand by a switch of its dtype take 0.84 to 0.90; sums over leading
# axes about 4.5 of 16 bits (2026-11-28-norms-sums-h100).
_WIDE_PER_CYCLE, _MIXED_PER_CYCLE, _LEADING_PER_CYCLE = 1.15, 0.87, 4.5

# Sums, means and extremes of rows: SM cycles of a row, and bytes in a cycle. Rows of 1,000, 1,536
# and 64,128 numbers in 16 and 32 bits on an H200 are 0 to 5% off (2026-11-28-hopper-kernels-h200,
# and a captured step). Memory limits an H100 (2026-11-28-hopper-kernels-3-h100). After writes of
# 512 MB, which the cache still has to store, it took 1.13 times as long.
_ROW_CYCLES, _ROW_BYTES_PER_CYCLE = 40, 16

# Largest values with their positions: 3.0 to 3.5 of 32 bits on an H200, rows of 64,128 in a step.
_FOUND_PER_CYCLE = 3.3

# Sums and means over leading axes, of which a thread has four outputs: cycles of an output, of four
# of its values, which are loaded at once, and of each value beyond a multiple of four. Chosen on
# parts of 50 million numbers in bf16 on an H100, of which 2, 3, 4, 6 and 8 take 208, 253, 211, 323
# and 314 us (2026-11-28-sums-h100). With fewer outputs, blocks share them. The least number was not
# measured: it is the geometric mean of two measured ones, of which 1,048,576 outputs in bf16 are
# predicted with -25 to +4% with these cycles, -24 to +129% without, and 65,536 need none.
_SUMS, _TOGETHER, _FILLING_OUTPUTS = frozenset(("sum", "mean")), 4, 1 << 18
_OUTPUT_CYCLES, _FOUR_CYCLES, _OTHER_CYCLES = 0.54, 0.55, 0.27

# A 0-d operand on the GPU has an address, too, but its index is divided by nothing: 1.39 to 1.55
# elements of 32 bits and 2.1 to 2.6 of 16, for 590 thousand to 41 million elements in captured
# steps on an H200 (clipping by a norm, attention scaled by a tensor;
# 2026-11-28-two-gpu-jobs-2xh200). The shortest calls take 1.5 times as long as vectorised ones.
_SCALAR_PER_CYCLE = {2: 2.1, 4: 1.4}
_OF_SCALARS = 1.5

# Kernels that compute an address for each element in other ways (an H100, rows of 896 to 6144
# numbers in 16 bits, 2026-11-27-small-operators-unseen-h100): copies of an expanded operand, as
# `repeat` makes them, 2.0 to 2.2; `roll_cuda_kernel` 0.86 to 0.95; `index_elementwise_kernel` (flip
# and stores by index) 1.4 to 1.9, and `triu_tril_kernel` 1.35, as other elementwise kernels.
_EXPANDED_PER_CYCLE, _ROLLED_PER_CYCLE = 2.0, 0.9

# The same of elementwise kernels and copies whose operands have different innermost axes: each
# thread of a warp reads another sector. In 16 and 32 bits on an H100 0.44 to 0.53 for 8 to 151
# million elements, 0.40 to 0.54 for 1 to 7 million (2026-11-27-kernel-sweep-h100). A block writes
# 512 adjacent elements. If they span several rows of a narrow result, the block uses more of each
# sector.
_TRANSPOSED_PER_CYCLE, _UNTRANSPOSED_PER_CYCLE, _WIDE_ROW = 0.5, 1.34, 256

# Kernels with long arithmetic for each element (an H100, 12 million numbers,
# 2026-11-27-small-operators-blind-h100): variances by Welford's algorithm, `normal_`, `softplus`;
# sorts of rows in one block, of numbers up to a power of two; comparisons of a binary search.
_PER_CYCLE = {
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 2.4),
    "normal_": 1.55,
    "softplus": 1.9,
    # 2.12 to 2.39 for 1.6 to 25 million elements of 16 bits in captured steps on an H200.
    "native_dropout": 2.28,
    # 4 million draws on an H200; binomial ones of at most about 20 trials each
    # (2026-11-28-fourier-distances-h200).
    "_standard_gamma": 0.18,
    "binomial": 0.0226,
}
_SORTED_PER_CYCLE, _COMPARED_PER_CYCLE = 0.12, 3.3

ARITHMETIC = frozenset(("_cdist_forward", "_standard_gamma", "binomial", "native_dropout"))
"""Operators whose cycles are of arithmetic: operands in a cache do not shorten them."""

# The first comparisons of a search among a power of two of bounds read addresses that share few
# sets of an SM's cache: 8,192 and 32,768 bounds take an H100 1.5 and 1.8 times as long as others of
# about that size, and 512 bounds as long (2026-11-28-sums-h100). Each bit of the number of bounds
# beyond the 10 bits of 512 counts as `_CONFLICTS` more comparisons.
_CONFLICTS, _SPREAD_BITS = 2, 10

# SM cycles of a row and of each of its elements in a softmax of long rows, by bytes of an element:
# rows of 4,096 to 262,144 numbers on an H200, -20 to +8% off (2026-11-28-hopper-kernels-h200 and
# its second file). In 32 bits the shipped database of the H200 has 0.8 to 1.0 cycles.
_LONG_SOFTMAX_CYCLES = {2: (1500, 0.35), 4: (1500, 0.8)}

# On a Hopper GPU rows of this length, of two blocks for each SM, exceed the cache, and memory
# serves all three reads: 2.0 passes of a read and a write (128,256 numbers in 16 and 32 bits, and
# 151,936, on an H200). Shorter rows are in the cache.
_UNCACHED_ROW_BYTES, _UNCACHED_SOFTMAX = 190_000, 2.0

# Layer and RMS norms: SM cycles of a row and of each of its elements, by bytes of an element. A
# block of 128 threads takes one row, and a warp's first load has 128 elements, however short the
# row is. Rows of 32 to 8192 on an H100, 3 to 6% off in the mean and 16% at most
# (2026-11-28-norms-sums-h100).
_NORM_CYCLES = {
    ("native_layer_norm", 2): (250, 0.38),
    ("native_layer_norm", 4): (331, 0.516),
    ("_fused_rms_norm", 2): (148, 0.177),
    ("_fused_rms_norm", 4): (165, 0.37),
}
_NORM_LOAD = 128

# The same of `topk`, which reads a row once for every two bits of its numbers: 8 of 256 numbers in
# 8192 rows take an H100 120 us (2026-11-27-small-operators-h100).
_TOPK_PER_CYCLE = 0.08


# Fewest elements of a row from which several blocks select from it, by the number of rows up to
# which this holds: `should_use_multiblock` in TensorTopK.cu.
_SHARED_ROWS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_MANY_SHARED_ROWS = 400


def selects_in_blocks(call: Call) -> bool:
    """Return whether several blocks share a row of `topk`."""
    keys = call.tensor(0)
    if keys is None or not keys.shape or not keys.shape[-1]:
        return False
    row = keys.shape[-1]
    rows = keys.numel // row
    return row >= next((least for most, least in _SHARED_ROWS if rows <= most), _MANY_SHARED_ROWS)


def cycles_of(call: Call, operator_class: OpClass) -> float:
    """Return the SM cycles of a call's elements; 0 if its bytes determine its time."""
    if cycles := block_cycles_of(call):
        return cycles
    op = call.op
    read, widest = call.numel(0), max(call.output_numel, call.numel(0))
    stored = call.tensor(2 if "put" in op else 3) if op in STORES_BY_INDEX else None
    computes = computes_addresses(call, operator_class) or (op == "copy_" and casts(call))
    sums, long_softmax = _leading_sum_cycles(call), _long_softmax_cycles(call)
    # Elements and their rate by the first rule that applies.
    rules = (
        (op in _PER_CYCLE, read, _PER_CYCLE.get(op, 1.0)),
        (op in ("index_fill", "index_fill_"), _filled(call), _ELEMENTWISE_PER_CYCLE),
        (op in ("sort", "argsort"), _sorted_in_blocks(call), _SORTED_PER_CYCLE),
        (op == "searchsorted", _compared(call), _COMPARED_PER_CYCLE),
        (op == "topk" and not selects_in_blocks(call), read, _TOPK_PER_CYCLE),
        (op in _NORMS, _norm_cycles(call), 1.0),
        (op in _NORM_BACKWARDS, _norm_backward_cycles(call), 1.0),
        (long_softmax > 0, long_softmax, 1.0),
        (sums > 0, sums, 1.0),
        (op in _SUMS and shares_outputs(call), read, _LEADING_PER_CYCLE),
        (_reduces_rows(call), _reduced_row_cycles(call), 1.0),
        (op in ("max", "min"), read, _FOUND_PER_CYCLE),
        (operator_class is OpClass.REDUCTION, read, _REDUCED_PER_CYCLE),
        (op == "roll", read * rolled_dimensions(call), _ROLLED_PER_CYCLE),
        (stored is not None, stored.numel if stored else 0, _ELEMENTWISE_PER_CYCLE),
        (computes and transposes(call), widest, _transposed_per_cycle(call)),
        (op != "copy_" and mixes_dtypes(call, operator_class), widest, _MIXED_PER_CYCLE),
        (computes and op != "copy_" and _is_wide(call), widest, _WIDE_PER_CYCLE),
        (computes, widest, _ELEMENTWISE_PER_CYCLE),
        (is_expanded(call, operator_class), widest, _EXPANDED_PER_CYCLE),
        (reads_device_scalar(call, operator_class), widest, _scalar_per_cycle(call)),
        (concatenates_strided(call), read, _CONCATENATED_PER_CYCLE),
    )
    return next((elements / rate for applies, elements, rate in rules if applies), 0.0)


def rolled_dimensions(call: Call) -> int:
    """Return the dimensions of `roll`; a kernel shifts each (`roll_common` in Roll.cpp)."""
    return max(1, len(numbers_of(call.value(1))))


def _leading_sum_cycles(call: Call) -> float:
    """Return the SM cycles of a sum over leading axes, with outputs for all SMs; 0 for others."""
    tensor = call.tensor(0)
    if call.op not in _SUMS or tensor is None or not tensor.contiguous:
        return 0.0
    division, outputs = division_of(call), call.output_numel
    if division is None or division.vector < _TOGETHER or outputs < _FILLING_OUTPUTS:
        return 0.0
    fours, others = divmod(tensor.numel // outputs, _TOGETHER)
    return outputs * (_OUTPUT_CYCLES + fours * _FOUR_CYCLES + others * _OTHER_CYCLES)


def _filled(call: Call) -> int:
    """Return the elements that `index_fill` writes, by a kernel that computes their addresses."""
    table = call.tensor(0)
    return changed_elements(call, "index_fill", table) if table else 0


SORTED_IN_BLOCK = 4096
"""Longest row that a block sorts: `sort_size` in Sort.cu."""


def _sorted_in_blocks(call: Call) -> int:
    """Return the numbers that blocks sort, a row each."""
    keys = call.tensor(0)
    if keys is None or not keys.shape or not 0 < keys.shape[-1] <= SORTED_IN_BLOCK:
        return 0
    row = keys.shape[-1]
    return keys.numel // row * 2 ** (row - 1).bit_length()


def _norm_cycles(call: Call) -> float:
    """Return the SM cycles of a layer or RMS norm; 0 for other operators."""
    tensor = call.tensor(0)
    if call.op not in _NORMS or tensor is None or not tensor.shape or not tensor.shape[-1]:
        return 0.0
    width = tensor.shape[-1]
    of_row, of_element = _NORM_CYCLES[call.op, 2 if tensor.item_bytes <= 2 else 4]
    return tensor.numel // width * (of_row + of_element * max(width, _NORM_LOAD))


def _norm_backward_cycles(call: Call) -> float:
    """Return the SM cycles of a norm's backward whose rows are narrow; 0 for other operators."""
    tensor = call.tensor(0)
    if call.op not in _NORM_BACKWARDS or tensor is None or not tensor.numel:
        return 0.0
    width = tensor.shape[-1] if tensor.shape else 1
    row = _BACKWARD_ROW[call.op] + _BACKWARD_ELEMENT * max(width, _NORM_LOAD)
    if _divides_rows(tensor) and _sums_weights(call):
        row += 2 * width * tensor.item_bytes / _BYTES_PER_CYCLE
    return tensor.numel // width * row


def shares_outputs(call: Call) -> bool:
    """Return whether several blocks share each output of a sum over leading axes."""
    division = division_of(call)
    return division is not None and not division.along_input and division.rows(SM_COUNT) > 1


def _long_softmax_cycles(call: Call) -> float:
    """Return the SM cycles of a softmax that reads its rows more than once; 0 for others."""
    tensor = call.tensor(0)
    if call.op not in ("_softmax", "_log_softmax") or tensor is None or passes_of(call) == 1:
        return 0.0
    of_row, of_element = _LONG_SOFTMAX_CYCLES[4 if _is_wide(call) else 2]
    return tensor.numel // tensor.shape[-1] * of_row + tensor.numel * of_element


_OF_ROWS = ("sum", "mean", "amax", "amin")


def _reduced_row_cycles(call: Call) -> float:
    """Return the SM cycles of a sum, a mean or an extreme of rows of adjacent numbers."""
    return _ROW_CYCLES * call.output_numel + call.input_bytes / _ROW_BYTES_PER_CYCLE


def _reduces_rows(call: Call) -> bool:
    """Return whether a kernel reduces rows of adjacent numbers, which it loads as vectors."""
    tensor, division = call.tensor(0), division_of(call) if call.op in _OF_ROWS else None
    return division is not None and division.along_input and bool(tensor and tensor.contiguous)


def _is_wide(call: Call) -> bool:
    """Return whether the operands have 4 bytes or more."""
    tensor = call.tensor(0)
    return tensor is not None and tensor.item_bytes >= 4


def _compared(call: Call) -> int:
    """Return the comparisons of binary searches, and more for conflicts in the cache."""
    bounds = call.tensor(0)
    if bounds is None or not bounds.shape:
        return 0
    length = bounds.shape[-1]
    bits = length.bit_length()
    comparisons = bits
    if length and not length & (length - 1):
        comparisons += _CONFLICTS * max(0, bits - _SPREAD_BITS)
    return call.numel(1) * comparisons


STORES_BY_INDEX = frozenset(
    {"index_put", "index_put_", "_index_put_impl_", "index_copy", "index_copy_"}
)
"""Operators of `index_elementwise_kernel` that write rows at given places."""

VARIANCES = frozenset({"var", "std", "var_mean", "std_mean"})
"""Reductions by Welford's algorithm."""

# Shortest time of a kernel over that of a class's shortest, on an H100 (kernels of decodes of a
# Llama-8B and of DeepSeek-V3's layers, torch 2.11, 2026-11-26 and 27): `elementwise_kernel`, which
# divides an index by sizes, 2.0 to 2.3 us against 1.2; copies to a wider dtype, which
# `unrolled_elementwise_kernel` loads by a switch of the dtype, 2.7 (on an H200 2.3); concatenations
# with a strided operand, 2.0 to 2.5 (of contiguous ones 1.3). Reductions that Inductor generates
# take 1.3 us, as its elementwise kernels do.
_OF_ADDRESSES, _OF_CASTS, _GENERATED_REDUCTION = 1.75, 2.1, 0.65

# On an H100 (2026-11-27-small-operators-unseen-h100): `roll` 1.8 us against 1.3 of other copies.
# Vectorised kernels of `exp`, `square` and `clamp` take 1.47 to 1.54 us, of functions that divide
# 1.76 to 1.9, of those that reduce an angle to a quadrant 2.1 to 2.2: a thread computes its four to
# eight elements one after another. Variances take 1.4 times as long as sums, because the
# combination of two partial results divides. Norms take 1 to 1.5 us without the steps of their
# loads (rows of 896 to 6144 numbers); the shortest products 2.7.
_DIVIDING = """sigmoid silu gelu tanh erf mish div reciprocal logit atan asin acos sigmoid_backward
    silu_backward gelu_backward tanh_backward"""
_FLOOR_FACTORS = {
    **dict.fromkeys(_DIVIDING.split(), 1.25),
    **dict.fromkeys(("sin", "cos", "tan"), 1.5),
    **dict.fromkeys(VARIANCES, 1.4),
    "roll": 1.4,
    "softplus": 1.8,
    "_fused_rms_norm": 0.35,
    "native_layer_norm": 0.47,
}

# Elements of a block that casts; fewer take a thread one load.
_CAST_TOGETHER = 512


def floor_factor_of(op: str, call: Call, operator_class: OpClass) -> float:
    """Return the time of the shortest call of a kernel over that of its class's shortest."""
    if is_generated(op):
        return _GENERATED_REDUCTION if operator_class is OpClass.REDUCTION else 1.0
    if call.op == "copy_" and casts(call) and call.numel(0) >= _CAST_TOGETHER:
        return _OF_CASTS
    addresses = computes_addresses(call, operator_class) or is_expanded(call, operator_class)
    # The divisions of `flip` are a chain, see `load_chains`.
    if call.op != "flip" and (addresses or concatenates_strided(call)):
        return _OF_ADDRESSES
    if reads_device_scalar(call, operator_class):
        return _OF_SCALARS
    return _FLOOR_FACTORS.get(call.op.removesuffix("_"), 1.0)


def _scalar_per_cycle(call: Call) -> float:
    widths = [operand[0].item_bytes for operand in call.inputs if operand and operand[0].shape]
    return _SCALAR_PER_CYCLE[2 if max(widths, default=4) <= 2 else 4]


def _transposed_per_cycle(call: Call) -> float:
    """Return the elements per SM and cycle of a kernel whose operands are transposed."""
    sizes = innermost_sizes(call)
    if not sizes:
        return _TRANSPOSED_PER_CYCLE
    # The first operand, which a copy writes, determines the order of the elements.
    _, row = sizes[0]
    wide = min(1.0, row / _WIDE_ROW)
    return 1 / (wide / _TRANSPOSED_PER_CYCLE + (1 - wide) / _UNTRANSPOSED_PER_CYCLE)
