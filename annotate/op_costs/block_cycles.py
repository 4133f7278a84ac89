"""SM cycles of kernels that the work of their warps and blocks limits, not their bytes.

Their blocks wait for a few loads, or for each other at one address, and an SM has room for a
limited number of them. So a short row, a gathered row, an added element or a value of a channel
takes a number of cycles that hardly depends on the bytes: one million gathered rows take as long
with 16 bytes each as with 1 kB. Constants are fitted to an H200 with torch 2.11
(benchmarks/results, 2026-11-28-block-cycles-h200.txt), in cycles of `max_clock_mhz`.
"""

from math import ceil, log2

from onerank.annotate.op_costs.image_cycles import image_cycles
from onerank.annotate.op_costs.memory_bound import row_elements
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.op_costs.reductions import SM_COUNT, division_of

NEED_VALUES = frozenset(
    ("index_select", "roll", "_cummax_helper", "_cummin_helper", "_cdist_backward")
)
"""Operators, by base name, whose cycles depend on an argument that is no tensor. Those of sums and
gathers do, too; `load_chains` and `memory_bound` list them."""

NEED_STRIDES = frozenset(
    """native_batch_norm cudnn_batch_norm _batch_norm_with_update _native_batch_norm_legit
    native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward""".split()
)
"""Batch norms, whose kernels depend on the strides."""


def block_cycles_of(call: Call) -> float:
    """Return the SM cycles of a call, summed over all SMs; 0 for kernels of other kinds."""
    # Each rule has operators of its own, so their order does not matter.
    rules = (
        _short_rows,
        _scan,
        _gathered_rows,
        _gathered_elements,
        _added,
        _batch_norm,
        _group_norm,
        _distances,
        image_cycles,
    )
    return next(filter(None, (rule(call) for rule in rules)), 0.0)


# Short rows ---------------------------------------------------------------------------------------

# A warp reduces one row, or several if the row has fewer than 32 values: cycles of a warp, of each
# step by which its threads combine their values, and of each value that a thread reads. Rows of at
# least `_VECTOR_ROW` values are read as vectors of 16 bytes. Extremes take longer to combine, and
# variances divide.
_WARP, _WARP_CYCLES, _COMBINED = 32, 44.9, 1.27
_VALUE, _VECTOR_VALUE = 6.2, {2: 2.35, 4: 3.6}
_VECTOR_ROW, _VECTOR_BYTES = 128, 16
_LONGEST_ROW = 512
_SHARES = {
    **dict.fromkeys(("sum", "mean", "nansum", "norm", "linalg_vector_norm"), 1.0),
    **dict.fromkeys(("amax", "amin"), 1.17),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 1.95),
}


def _short_rows(call: Call) -> float:
    """Return the cycles of a reduction of short rows of adjacent values."""
    tensor, division = call.tensor(0), division_of(call) if call.op in _SHARES else None
    if tensor is None or division is None or not division.along_input or division.across_warps:
        return 0.0
    results = max(call.output_numel, 1)
    row = tensor.numel // results
    if not 1 < row < _LONGEST_ROW or not tensor.contiguous:
        return 0.0
    vectors = row >= _VECTOR_ROW and tensor.item_bytes in _VECTOR_VALUE
    together = _VECTOR_BYTES // tensor.item_bytes if vectors else 1
    each = _VECTOR_VALUE[tensor.item_bytes] if vectors else _VALUE
    threads = min(2 ** int(log2(row // together)), _WARP)
    values = together * ceil(row / together / threads)
    cycles = _WARP_CYCLES + _COMBINED * log2(threads) + each * values
    return _SHARES[call.op] * results * threads / _WARP * cycles


# Scans --------------------------------------------------------------------------------------------

SCANS = {
    **dict.fromkeys(("cumsum", "cumprod"), 1.0),
    **dict.fromkeys(("logcumsumexp", "_logcumsumexp"), 1.8),
    **dict.fromkeys(("_cummax_helper", "_cummin_helper"), 1.75),
}
"""Time of a step of a scan over that of a sum's, by operator."""

_SCAN_LOG2_THREADS, _SCAN_LEAST_LOG2, _WRAPPED = 9, 4, 1 << 32

# SM cycles of a step of a block of 512 threads, in which each thread has two elements, and of each
# level of its tree of additions; integers of 64 bits take longer. Rows of 4 to 1,024 numbers.
_SCAN_STEP, _SCAN_LEVEL, _SCAN_WIDE, _BLOCK_THREADS = 1050.0, 48.0, 1.11, 512


def threads_of_scan(rows: int, size: int) -> int:
    """Return the threads that scan a row along the last dimension, out of 512 of a block.

    Source: `get_log_num_threads_x_inner_scan` in ScanUtils.cuh, which keeps the ratio of threads
    near that of sizes. Its numbers are unsigned, so with very many short rows the exponent wraps
    around, and all 512 threads of a block take one row.
    """
    spare = _SCAN_LOG2_THREADS + (size - 1).bit_length() - (rows - 1).bit_length()
    exponent = spare % _WRAPPED // 2
    return 1 << min(max(exponent, _SCAN_LEAST_LOG2), _SCAN_LOG2_THREADS)


def scanned(call: Call) -> tuple[Tensor, int] | None:
    """Return a scan's operand and its dimension; None for other calls, and if it is not known."""
    tensor = call.tensor(0)
    axis = call.value(3 if "helper" in call.op else 1)
    if call.op not in SCANS or tensor is None or not tensor.shape or not isinstance(axis, int):
        return None
    return tensor, axis % len(tensor.shape)


def _scan(call: Call) -> float:
    """Return the cycles of a scan along the last dimension of several rows."""
    known = scanned(call)
    if known is None or known[1] != len(known[0].shape) - 1:
        return 0.0
    tensor, size = known[0], known[0].shape[-1]
    if tensor.numel <= size:
        return 0.0
    rows = tensor.numel // size
    threads = threads_of_scan(rows, size)
    blocks = ceil(rows * threads / _BLOCK_THREADS)
    step = (_SCAN_STEP + _SCAN_LEVEL * log2(2 * threads)) * SCANS[call.op]
    step *= _SCAN_WIDE if tensor.item_bytes > 4 else 1.0
    return blocks * ceil(size / (2 * threads)) * step


# Gathered rows ------------------------------------------------------------------------------------

# `vectorized_gather_kernel` (torch 2.8 and later) has a block for each row, and for every 4 kB of
# it, which waits for the index and then for the row. It takes rows whose bytes are a multiple of
# 16. 20,000 rows of 16 B to 1 kB take 175 cycles each, 200,000 and 1,200,000 rows 157 to 159.
_ROW_CYCLES, _ROW_BYTES = 157.5, 4096

ALIGNED_BYTES = 16
"""The bytes of such a row are a multiple of it."""

FEW_ROWS = 16
"""Most rows that a kernel takes one after another; `load_chains` has its time."""


def _gathered_rows(call: Call) -> float:
    """Return the cycles of a gather of whole rows."""
    table = call.tensor(0)
    rows = _rows_of_gather(call, table) if table is not None and table.numel else 0
    if table is None or rows <= FEW_ROWS:
        return 0.0
    row_bytes = call.output_numel // rows * table.item_bytes
    if row_bytes % ALIGNED_BYTES or not row_bytes:
        return 0.0
    return rows * ceil(row_bytes / _ROW_BYTES) * _ROW_CYCLES


def _rows_of_gather(call: Call, table: Tensor) -> int:
    """Return the number of rows that a call gathers; 0 if it gathers elements, or is no gather."""
    if call.op == "gather":
        index = call.tensor(2)
        row = row_elements(call, table)
        return index.numel // row if index is not None and row > 1 else 0
    if call.op == "embedding":
        return call.numel(1)
    if call.op == "index_select":
        return call.numel(2) if call.value(1) == 0 else 0
    if call.op == "index":
        indices = (call.inputs[1] if len(call.inputs) > 1 else None) or ()
        return indices[0].numel if len(indices) == 1 and indices[0].item_bytes > 1 else 0
    return 0


# Additions by index -------------------------------------------------------------------------------

# Cycles of an element that is added in memory, by bytes of an element: of whole rows by `index_add`
# (`indexFuncLargeIndex`) and by `scatter_add` with an index that is expanded over the row, of
# single elements of a row, and of elements at random places of memory. An addition in 16 bits swaps
# two neighbours, and an extreme swaps in a loop. Of 200,000 rows and more of 32 to 512 elements,
# one call is 26% too long and the others are within 15%; 20,000 rows are up to 57% too short.
# Elements of a row in 16 bits are those of DeBERTa's relative positions, rows of 512; in 32 bits of
# rows of 32 and 512 (2026-11-28-convolutions-h200).
_INDEX_ADDED = {2: 2.2, 4: 1.9}
_ROWS_ADDED, _IN_ROWS_ADDED, _SINGLE_ADDED = {2: 1.0, 4: 0.85}, {2: 2.7, 4: 3.1}, {2: 4.9, 4: 3.7}
_ROWS_COMPARED, _SINGLE_COMPARED = 1.2, 7.4

# The same of elements that are gathered one by one.
_IN_ROWS_GATHERED, _SINGLE_GATHERED = 0.81, {2: 1.84, 4: 2.3}


def _added(call: Call) -> float:
    """Return the cycles of additions, or of extremes, at given places in memory."""
    name, source, table = call.op.removesuffix("_"), call.tensor(3), call.tensor(0)
    if table is None or source is None or table.item_bytes not in _INDEX_ADDED:
        return 0.0
    width = table.item_bytes
    if name == "index_add":
        single = len(source.shape) < 2 or source.shape[-1] == 1
        return source.numel * (_SINGLE_ADDED if single else _INDEX_ADDED)[width]
    index = call.tensor(2)
    if name not in ("scatter_add", "scatter_reduce") or index is None:
        return 0.0
    whole, additions = row_elements(call, table) > 1, additions_of(call)
    if additions:
        by_width = _ROWS_ADDED if whole else _IN_ROWS_ADDED if _in_rows(index) else _SINGLE_ADDED
        return additions * index.numel * by_width[width]
    return index.numel * (_ROWS_COMPARED if whole else _SINGLE_COMPARED)


def additions_of(call: Call) -> int:
    """Return how often a scatter adds: twice for a mean, which counts, too; 0 for extremes."""
    if call.op.removesuffix("_") != "scatter_reduce":
        return 1
    return {"sum": 1, "mean": 2}.get(call.value(4), 0)


def _gathered_elements(call: Call) -> float:
    """Return the cycles of a gather of single elements, as of rows that are not aligned."""
    table, index = call.tensor(0), call.tensor(2)
    if call.op != "gather" or table is None or index is None:
        return 0.0
    row = row_elements(call, table)
    if row > 1 and not row * table.item_bytes % ALIGNED_BYTES:
        return 0.0
    if _in_rows(index):
        return index.numel * _IN_ROWS_GATHERED
    return index.numel * _SINGLE_GATHERED.get(table.item_bytes, 0.0)


def _in_rows(index: Tensor) -> bool:
    """Return whether adjacent elements of an index belong to one row."""
    return bool(index.shape) and index.shape[-1] > 1


# Batch norms --------------------------------------------------------------------------------------

# A block normalises a channel: values of a channel per cycle. cuDNN runs 16 and 32 bits; torch's
# own kernels run bfloat16, where another one, with blocks for each image and channel, writes the
# result. With more channels than SMs, the blocks of an SM slow each other down: by these powers of
# the channels for each SM, in cuDNN's forward and in the other kernels. cuDNN keeps a channel of up
# to `_KEPT_BYTES` in the SM, and then memory limits it: it kept 100 kB, and not 131 kB. Images with
# channels last run other kernels; memory limits those of cuDNN.
_FORWARD, _BACKWARD = {2: 0.72, 4: 0.9}, 0.355
_OWN_STATISTICS, _OWN_RESULT, _OWN_BACKWARD = 0.6, 0.65, 0.28
_SHARED_FORWARD, _SHARED, _KEPT_BYTES = 0.57, 0.25, 101_000

# Cycles of an element of torch's own kernels with channels last.
_LAST_FORWARD, _LAST_BACKWARD = 1.4, 1.1

_CHANNEL_AXIS, _LEAST_AXES = 1, 3


def _batch_norm(call: Call) -> float:
    """Return the cycles of a batch norm that computes its statistics, or of its backward."""
    tensor = call.tensor(0)
    if call.op not in NEED_STRIDES or not computes_sums(call):
        return 0.0
    if tensor is None or len(tensor.shape) < _LEAST_AXES or tensor.item_bytes not in _FORWARD:
        return 0.0
    own, backward = tensor.dtype == "bfloat16", "backward" in call.op
    channels = tensor.shape[_CHANNEL_AXIS]
    values = tensor.numel // max(channels, 1)
    if channels > 1 and tensor.recorded_strides and tensor.strides[_CHANNEL_AXIS] == 1:
        return tensor.numel * (_LAST_BACKWARD if backward else _LAST_FORWARD) if own else 0.0
    if not own and values * tensor.item_bytes <= _KEPT_BYTES:
        return 0.0
    if not own:
        cycles = values / (_BACKWARD if backward else _FORWARD[tensor.item_bytes])
    elif backward:
        cycles = values / _OWN_BACKWARD
    else:
        cycles = values / _OWN_STATISTICS + values / _OWN_RESULT / tensor.shape[0]
    shared = _SHARED if own or backward else _SHARED_FORWARD
    return SM_COUNT * cycles * max(1.0, channels / SM_COUNT) ** shared


def computes_sums(call: Call) -> bool:
    """Return whether a norm computes its sums: a batch norm that uses running ones saves none."""
    forward_of_batch = "batch_norm" in call.op and "backward" not in call.op
    saved = call.outputs[1:2]
    return not (forward_of_batch and saved and not sum(result.numel for result in saved[0] or ()))


# Distances ----------------------------------------------------------------------------------------

# `cdist_kernel_cuda_impl` has a block of 256 threads for each distance between two rows, which
# combine their sums: cycles of a block, and of a number of a row. 4 to 268 million distances with
# p = 1 take an H200 339, 348 and 363 cycles each, of rows of 3, 64 and 128 numbers
# (2026-11-28-fourier-distances-h200). Euclidean distances between more than 25 rows are a product,
# which is recorded as such.
_DISTANCE_CYCLES, _NUMBER_CYCLES = 339.0, 0.19

# Gradients of rows: cycles of a distance, more with p = 2, and of a number of a row, with the sums
# over the other rows (2026-11-28-images-h200).
_GRADIENT_CYCLES, _EUCLIDEAN_CYCLES, _GRADIENT_NUMBER_CYCLES = 82.0, 9.5, 0.65


def _distances(call: Call) -> float:
    """Return the cycles of distances between all pairs of rows."""
    rows = call.tensor(0)
    if call.op == "_cdist_backward":
        return _distance_gradients(call)
    if call.op != "_cdist_forward" or rows is None or not rows.shape:
        return 0.0
    return call.output_numel * (_DISTANCE_CYCLES + _NUMBER_CYCLES * rows.shape[-1])


def _distance_gradients(call: Call) -> float:
    gradient, rows = call.tensor(0), call.tensor(1)
    if gradient is None or rows is None or not rows.shape:
        return 0.0
    euclidean = _EUCLIDEAN_CYCLES if call.value(3) not in (1, 1.0) else 0.0
    number = _GRADIENT_NUMBER_CYCLES * rows.shape[-1]
    return gradient.numel * (_GRADIENT_CYCLES + euclidean + number)


# Group norms --------------------------------------------------------------------------------------

# Kernels of group_norm_kernel.cu. Groups with fewer than 512 numbers have a warp each for their
# sums, of which an SM has 32 at a time: cycles of a group at least, and numbers in a cycle. 48,000
# groups of 36, 112 and 256 numbers take an H100 31, 34 and 56 us, and 6, 16 and 41
# (2026-11-27-small-operators-blind-h100).
_WARP_NUMBERS, _GROUP_CYCLES, _GROUPED_PER_CYCLE = 512, 150.0, 0.93

# Larger ones have a block of 512 threads each, four on an SM, whose threads load one number after
# another: cycles of a load. The gradients have a block for each channel of an image, or a warp for
# fewer than 512 points: cycles of a block, and of each load, by bytes of an element.
_NORM_THREADS, _NORM_BLOCKS, _LOAD_CYCLES = 512, 4, 890.0
_CHANNEL_CYCLES, _CHANNEL_LOAD = 600.0, {2: 242.0, 4: 289.0}
_CHANNEL_WARP = 190.0

# Numbers in a cycle of the elementwise kernels that follow, with operands of three shapes; those of
# groups of channels without points are of the H100's rows above.
_NORMED_PER_CYCLE, _NORMED_BACKWARD_PER_CYCLE = {2: 1.53, 4: 1.28}, {2: 1.12, 4: 1.02}
_NORMED_ROWS_PER_CYCLE = 1.27


def group_norm_cycles(call: Call) -> tuple[float, float]:
    """Return the SM cycles of a group norm's sums, and of its elementwise kernel.

    Of its backward, too. Zeros for other operators.
    """
    tensor = call.tensor(0)
    if tensor is None or not tensor.numel or tensor.item_bytes not in _NORMED_PER_CYCLE:
        return 0.0, 0.0
    width, numbers = tensor.item_bytes, tensor.numel
    if call.op == "native_group_norm":
        moments = call.output(1)
        sums = _moments_cycles(numbers, moments.numel if moments else 0)
        images = len(tensor.shape) > 2
        return sums, numbers / (_NORMED_PER_CYCLE[width] if images else _NORMED_ROWS_PER_CYCLE)
    if call.op == "native_group_norm_backward" and len(tensor.shape) > 1:
        channels = tensor.shape[0] * tensor.shape[1]
        points = numbers // channels
        each = _CHANNEL_CYCLES + _CHANNEL_LOAD[width] * ceil(points / _NORM_THREADS)
        sums = channels * (each if points >= _NORM_THREADS else _CHANNEL_WARP)
        return sums, numbers / _NORMED_BACKWARD_PER_CYCLE[width]
    return 0.0, 0.0


def _moments_cycles(numbers: int, groups: int) -> float:
    if not groups:
        return 0.0
    if numbers < groups * _WARP_NUMBERS:
        return max(groups * _GROUP_CYCLES, numbers / _GROUPED_PER_CYCLE)
    waves = ceil(groups / (_NORM_BLOCKS * SM_COUNT))
    loads = ceil(numbers / groups / _NORM_THREADS)
    return SM_COUNT * waves * loads * _LOAD_CYCLES


def _group_norm(call: Call) -> float:
    return sum(group_norm_cycles(call))
