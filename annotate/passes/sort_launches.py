"""The kernels of operators that sort, select, count or scan, and of those that sort their indices.

PyTorch runs CUB, and for short rows its own kernels. If the number of results depends on the data,
a copy to the host follows. Floors are medians of the kernels' times on an H100, over 2640 ns.
"""

from collections.abc import Sequence
from math import ceil, expm1, log1p

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.kernel_overheads import SORTED_IN_BLOCK, selects_in_blocks
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.library_launches import FILL, MEMSET, Launch, Rule, floors_of_cycles
from onerank.ir import Kind

_ARANGE, _COPY = "aten::arange", "aten::copy_"

# Keys that CUB sorts in one block; measured between 2048 and 3072.
_SINGLE_TILE = 2048

_DIGIT_BITS = 8

_ASSERT = Launch("_assert_async_cuda_kernel", floors=0.83, op="aten::_assert_async")

_COUNT_UP = Launch("elementwise_kernel_with_index", op=_ARANGE)


# Time of a byte that a radix sort of many keys moves over that of a byte at the memory's bandwidth.
# On an H100 a sweep over 10.2 million keys of 4 bytes with values of 8 takes 124 us, 82 at the
# bandwidth; the histogram of the keys 40 us, 14 at the bandwidth; of 1.6 million keys 26 and 12.
_SWEPT, _COUNTED = 1.5, 3


def _radix_sort(bits: int, keys_bytes: int = 0, values_bytes: int = 0) -> Sequence[Launch]:
    """Return the launches of CUB's onesweep radix sort.

    Args:
        bits: bits of a key.
        keys_bytes: bytes of all keys; 0 if there are few.
        values_bytes: bytes of the values that are sorted by them.
    """
    swept = int(_SWEPT * 2 * (keys_bytes + values_bytes))
    sweep = (MEMSET, Launch("DeviceRadixSortOnesweepKernel", floors=2.2, internal_bytes=swept))
    return (
        MEMSET,
        MEMSET,
        Launch("DeviceRadixSortHistogramKernel", floors=1.2, internal_bytes=_COUNTED * keys_bytes),
        Launch("DeviceRadixSortExclusiveSumKernel", floors=0.5),
        *sweep * ceil(bits / _DIGIT_BITS),
    )


_SCAN = (Launch("DeviceScanInitKernel", floors=0.35), Launch("DeviceScanKernel", floors=0.95))

_FEW_INDICES = 3072

# Rows of a segment (`NROWS_PER_THREAD`), and elements of partial sums that an SM handles per cycle.
# Both kernels have threads for as many rows as there are indices. Rows without a sum take a share
# of the time of others, 0.42 and 0.33 in blocks of 1024 threads, next to nothing in smaller ones
# (2026-11-27-embedding-backward-h100).
_SEGMENT_ROWS, _SUMMED_PER_CYCLE = 10, 0.495
_WITHOUT_PARTIAL, _WITHOUT_ROW, _IN_SMALL_BLOCK = 0.42, 0.33, 0.05
_LARGEST_BLOCK = 1024


def _embedding_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of an embedding's backward.

    Source: Embedding.cu and EmbeddingBackwardKernel.cu. Up to 3072 indices are added by one kernel;
    more are sorted, and the rows of each index are summed in segments.
    """
    gradient, indices = call.tensor(0), call.tensor(1)
    if gradient is None or indices is None:
        return ()
    if indices.numel <= _FEW_INDICES:
        # A block takes one index after another: 37 ns each for rows of 512 elements, 56 for 4096,
        # on an H100 and on an H200.
        floors = indices.numel * (0.0131 + 2e-6 * gradient.shape[-1])
        zero = Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=call.output_bytes)
        return (zero, Launch("embedding_backward_feature_kernel", 1.0, floors=floors))
    return _summed_by_row(call, target)


def _summed_by_row(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches that sort the indices of a gradient, and sum its rows for each index."""
    gradient, indices = call.tensor(0), call.tensor(1)
    if gradient is None or indices is None:
        return ()
    # Segments of up to ten rows of one index are summed in float32. A table's row occurs among n
    # random indices with probability 1 - (1 - 1/rows)^n.
    table = call.output()
    rows = table.shape[0] if table and table.shape else indices.numel
    distinct = rows * -expm1(indices.numel * log1p(-1 / rows)) if rows > 1 else 1.0
    partials = distinct + (indices.numel - distinct) / _SEGMENT_ROWS
    row_ns = gradient.shape[-1] / (_SUMMED_PER_CYCLE * target.issue_rate_hz) * 1e9
    row = row_ns / target.launch_floor_ns
    small = gradient.shape[-1] < _LARGEST_BLOCK
    without_partial = _IN_SMALL_BLOCK if small else _WITHOUT_PARTIAL
    without_row = _IN_SMALL_BLOCK if small else _WITHOUT_ROW
    partial_sums = partials + without_partial * (indices.numel - partials)
    row_sums = distinct + without_row * (indices.numel - distinct)
    return (
        _COUNT_UP,
        *_radix_sort(8 * indices.item_bytes),
        Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=call.output_bytes),
        Launch("DeviceCompactInitKernel", floors=0.4),
        Launch("DeviceUniqueByKeySweepKernel", floors=1.6),
        Launch("krn_partials_per_segment", floors=0.6),
        *_SCAN,
        Launch("compute_num_of_partial_segments", floors=0.45),
        Launch("krn_partial_segment_offset", floors=0.6),
        # One writes float32 sums of segments, the other reads them.
        Launch("compute_grad_weight", 0.5, floors=row * partial_sums),
        Launch("sum_and_scatter", 0.5, floors=row * row_sums),
    )


# SM cycles of an element that is added alone, by `indexing_backward_kernel_stride_1`: 46 to 60 for
# 262,144 to 2,900,000 of them on an H200 (2026-11-28-block-cycles-h200).
_SINGLE_PUT = 54


def _adds_single(call: Call) -> bool:
    """Return whether a store by index adds single elements, as its last axis is indexed.

    A trace does not record undefined indices, which stand for whole axes. So the shape of the
    values decides: it is that of the first axes, followed by that of an index.
    """
    rows, index, values = call.tensor(0), call.tensor(1), call.tensor(2)
    if rows is None or index is None or values is None:
        return False
    whole = len(rows.shape) - len(call.inputs[1] or ())
    return values.shape == (*rows.shape[:whole], *index.shape)


# The mode of `EmbeddingBag` among the arguments, and that of the largest element, which adds
# without sorting.
_BAG_MODE, _LARGEST_OF_BAG = 7, 2


def _bag_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of an embedding bag's backward. Source: EmbeddingBag.cu.

    Sums and means sort the indices and sum up the rows of each, whatever their number.
    """
    zero = Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=call.output_bytes)
    if call.value(_BAG_MODE) == _LARGEST_OF_BAG:
        return (zero, Launch("EmbeddingBag_accGradParametersKernel_max", 1.0))
    return [
        each._replace(name="compute_grad_weight_bags")
        if each.name == "compute_grad_weight"
        else each
        for each in _summed_by_row(call, target)
    ]


def _index_put(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of an indexed assignment; one that accumulates sorts its indices.

    Source: Indexing.cu. It checks the least and the largest index, without the host; three
    elementwise kernels make linear indices of those given.
    """
    rows, indices = call.tensor(0), call.tensor(1)
    if call.value(3) is not True or rows is None or indices is None or not rows.shape:
        # torch fills by the mask where a number is stored (`canDispatchToMaskedFill`): one kernel.
        # A CPU capture has `index_put_` there, one without a device `masked_fill_`.
        stored = call.tensor(2)
        fills = call.op != "_index_put_impl_" and stored is not None and stored.numel == 1
        masks = () if fills else _of_masks(call)
        return (*masks, Launch("index_elementwise_kernel", 1.0)) if masks else ()
    sort = _sorted_keys(indices.numel, max(1, (rows.shape[0] - 1).bit_length()))
    linear = [
        Launch("vectorized_elementwise_kernel", op=f"aten::{name}")
        for name in ("remainder", "mul", "div_")
    ]
    checks = [
        launch
        for extreme, compares in (("max", "lt"), ("min", "ge"))
        for launch in (
            Launch("reduce_kernel", op=f"aten::{extreme}", floors=0.85),
            Launch("vectorized_elementwise_kernel", op=f"aten::{compares}"),
            _ASSERT,
        )
    ]
    name, floors = "indexing_backward_kernel", 0.0
    if _adds_single(call):
        name = f"{name}_stride_1"
        floors = floors_of_cycles(_SINGLE_PUT * call.numel(2), target)
    added = Launch(name, 1.0, floors=floors)
    return (*checks, *linear, _COUNT_UP, *sort, added)


# Keys of a row up to which a kernel of Sort.cu runs, its name, and the floors it takes at least: a
# block's threads sort several keys each, in passes over the bits. On an H100 64-bit keys take 3.4
# to 4.0 us, 8.6, 25.1 to 25.7, 27.1 and 31.2 (torch 2.11); `sortKeyValueInplace` chooses by size.
_BLOCK_SORTS = (
    (32, "bitonicSortKVInPlace", 1.4),
    (128, "radixSortKVInPlace", 3.25),
    (1024, "radixSortKVInPlace", 9.6),
    (2048, "radixSortKVInPlace", 10.3),
    (SORTED_IN_BLOCK, "radixSortKVInPlace", 11.8),
)

# Bits of the keys with which these times were measured; radix passes are as many as bits.
_TIMED_BITS = 64


def _sort(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a sort along the last dimension. Source: Sort.cu."""
    keys = call.tensor(0)
    if keys is None or not keys.shape or keys.numel <= 1:
        return ()
    copy = Launch("Memcpy DtoD (Device -> Device)", kind=Kind.MEMCPY, op=_COPY)
    if keys.shape[-1] <= SORTED_IN_BLOCK:
        several = keys.numel > keys.shape[-1]
        expand = Launch("elementwise_kernel", op=_COPY) if several else copy
        name, floors = next(
            (kernel, floors) for most, kernel, floors in _BLOCK_SORTS if keys.shape[-1] <= most
        )
        if name.startswith("radix"):
            floors *= 8 * keys.item_bytes / _TIMED_BITS
        return (copy, _COUNT_UP, expand, copy, Launch(name, 1.0, floors=floors))
    # Every key has a place of 8 bytes: its index, and its row if there are several.
    places = 8 * keys.numel
    *before, sweep = _radix_sort(8 * keys.item_bytes, keys.nbytes, places)
    whole = sweep._replace(share=1.0)
    if keys.numel == keys.shape[-1]:
        fill = Launch("fill_reverse_indices_kernel", floors=0.5, internal_bytes=places)
        return (copy, fill, *before, whole)
    segments = keys.numel // keys.shape[-1]
    copied = copy._replace(internal_bytes=2 * keys.nbytes)
    return (
        copied,
        Launch("fill_index_and_segment_kernel", floors=0.55, internal_bytes=places),
        *before,
        whole,
        # The keys of the second sort are the places.
        *_radix_sort((segments - 1).bit_length(), places, 0),
        # It reads a place and the key there, and writes key and index.
        Launch(
            "sort_postprocess_kernel",
            floors=1.0,
            internal_bytes=int(_SWEPT * 2 * (keys.nbytes + places)),
        ),
    )


# Passes over the bits of the keys: 2 bits in one block, `RADIX_BITS` in several.
_SHARED_BITS = 8

# Time of a byte that several blocks read for a top-k over that at the bandwidth: 10.2 million keys
# of 4 bytes take 25 to 30 us for the counts of a pass, 56 for the selection.
_DIGITS_READ, _SELECTED_READ = 2, 4


# Routers of few tokens rarely have two equal scores at the border of their choice. A block then
# reads 40% of the bits: 1 to 8 rows of 16 to 256 scores take an H100 4.2 to 5.7 us, 16 to 256 rows
# 5.5 to 8.8. A row of one key takes 2.5 us (steps of 2026-11-28-serving-blind-6-h100 and others).
_ROWS_WITH_EQUAL_KEYS, _BITS_WITHOUT_EQUAL_KEYS, _ONE_KEY = 16, 0.43, 0.95


def _topk(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a top-k: it selects, and sorts what it selected if requested.

    Routers of experts leave their choice unsorted. Source: TensorTopK.cu. Floors are those of an
    H100: a block that selects takes 7.3 us at least, because each of its passes waits for the one
    before.
    """
    keys = call.tensor(0)
    if keys is None:
        return ()
    unsorted = call.value(4) is False or call.value(1) == 1
    if not selects_in_blocks(call):
        # A block reads its row once for every two bits of the keys, 1024 elements in a step: 7.3 us
        # for rows of 256, 12.4 of 1152, 21.6 of 3584 and 37.5 of 8192, in 32 bits. It ends earlier
        # if the bits read so far tell the last selected key from all others.
        row = keys.shape[-1]
        steps = ceil(row / 1024) * keys.item_bytes / 4
        if keys.numel < _ROWS_WITH_EQUAL_KEYS * row:
            steps *= _BITS_WITHOUT_EQUAL_KEYS
        floors = _ONE_KEY if row == 1 else 1.2 + 1.52 * steps
        select = Launch("gatherTopK", 1.0, floors=floors)
        return (select,) if unsorted else (select, Launch("bitonicSortKVInPlace", floors=1.7))
    digits = (
        Launch("computeBlockDigitCounts", floors=0.9, internal_bytes=_DIGITS_READ * keys.nbytes),
        Launch("computeDigitCumSum", floors=1.2),
        Launch("computeBlockwiseWithinKCounts", floors=0.95),
    )
    scan = (Launch("DeviceScanByKeyInitKernel", floors=0.35),
            Launch("DeviceScanByKeyKernel", floors=1.3))  # fmt: skip
    return (
        Launch("mbtopk::fill", floors=0.35),
        MEMSET,
        MEMSET,
        *digits * (8 * keys.item_bytes // _SHARED_BITS),
        Launch("computeBlockwiseKthCounts", floors=0.8),
        *scan,
        *scan,
        Launch("mbtopk::gatherTopK", 1.0, internal_bytes=_SELECTED_READ * keys.nbytes),
        *(() if unsorted else (Launch("radixSortKVInPlace", floors=1.9),)),
    )


def _cumsum(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a scan: of one row with CUB. Source: ScanKernels.cpp."""
    tensor = call.tensor(0)
    if tensor is None or tensor.numel <= 1 or max(tensor.shape) != tensor.numel:
        return ()
    init, scan = _SCAN
    return (init, scan._replace(share=1.0))


def _read_number(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launch of `.item()`: a copy to the host, which waits for it."""
    return (_TO_HOST._replace(share=1.0),)


_NONZERO_SINGLE = 4096

_TO_HOST = Launch("Memcpy DtoH (Device -> Pinned)", kind=Kind.MEMCPY)

_SELECT = Launch("DeviceSelectSweepKernel", floors=1.1)


def _nonzero(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `nonzero`."""
    tensor = call.tensor(0)
    return () if tensor is None else (*_counted(tensor), Launch("DeviceSelectSweepKernel", 1.0))


def _masked_select(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a selection by a mask: `nonzero`, then indexing."""
    tensor = call.tensor(0)
    if tensor is None:
        return ()
    return (*_counted(tensor), _SELECT, Launch("index_elementwise_kernel", 1.0))


def _index(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of indexing with masks: `nonzero` of each, then the usual kernel."""
    masks = _of_masks(call)
    return (*masks, Launch("index_elementwise_kernel", 1.0)) if masks else ()


def _of_masks(call: Call) -> Sequence[Launch]:
    """Return the launches that make indices of the masks among a call's indices."""
    indices = call.inputs[1] if len(call.inputs) > 1 else None
    return [
        launch._replace(op="aten::nonzero")
        for index in indices or ()
        if index.dtype in ("bool", "uint8")
        for launch in (*_counted(index), _SELECT._replace(internal_bytes=index.nbytes))
    ]


def _counted(tensor: Tensor) -> Sequence[Launch]:
    """Return the launches that count elements, and copy their number to the host."""
    several = tensor.numel > _NONZERO_SINGLE
    return (
        *[Launch("DeviceReduceKernel", floors=0.6)] * several,
        Launch("DeviceReduceSingleTileKernel", floors=0.55),
        _TO_HOST,
        Launch("DeviceCompactInitKernel", floors=0.4),
    )


def _unique(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `unique` without counts: it sorts, selects, and copies the count."""
    keys = call.tensor(0)
    if keys is None or keys.numel <= 1:
        return ()
    return (
        *_sorted_keys(keys.numel, 8 * keys.item_bytes),
        Launch("DeviceCompactInitKernel", floors=0.4),
        Launch("DeviceSelectSweepKernel", 1.0),
        _TO_HOST,
    )


def _sorted_keys(count: int, bits: int) -> Sequence[Launch]:
    """Return the launches of CUB's sort of `count` keys."""
    if count <= _SINGLE_TILE:
        return (Launch("DeviceRadixSortSingleTileKernel", floors=1.4),)
    return _radix_sort(bits)


def _bincount(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `bincount`: it reads the least and largest value on the host."""
    bound = Launch("reduce_kernel", floors=1.0)
    return (bound, _TO_HOST, bound, _TO_HOST, *_histogram(call, target))


def _histogram(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a histogram: it zeroes the bins first."""
    return (
        Launch("vectorized_elementwise_kernel", op=FILL),
        Launch("kernelHistogram1D", 1.0, floors=0.7),
    )


# Launch floors of a load that waits for the one before, in a reduction's block of 512 threads with
# four values each, and the share of it that a sum takes (`load_chains`).
_LOAD_FLOORS, _SUMMED = 0.155, 0.535
_VALUES_OF_LOAD = 512 * 4

# Values from which blocks share a reduction to one number, and its floors then.
_SHARED_VALUES, _SHARED_FLOORS = 131072, 2.2


def _multinomial(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of one sample of each row: the largest of weights over random numbers.

    Source: `multinomial` in Distributions.cpp. It checks the weights first, without the host.
    """
    weights = call.tensor(0)
    if weights is None or not weights.shape or call.value(1) != 1:
        return ()
    values, size = weights.numel, weights.nbytes
    shared = values >= _SHARED_VALUES
    bound = _SHARED_FLOORS if shared else _LOAD_FLOORS * ceil(values / _VALUES_OF_LOAD)
    extreme = Launch("reduce_kernel", op="aten::min", floors=bound, internal_bytes=size)
    row_floors = _LOAD_FLOORS * ceil(weights.shape[-1] / _VALUES_OF_LOAD)
    small = Launch("vectorized_elementwise_kernel", op="aten::ge")
    clear = (MEMSET,) * shared
    return (
        *clear,
        extreme,
        small,
        *clear,
        extreme._replace(op="aten::max"),
        small._replace(op="aten::lt"),
        small._replace(op="aten::bitwise_and"),
        _ASSERT,
        Launch("reduce_kernel", op="aten::sum", floors=max(0.9, _SUMMED * row_floors),
               internal_bytes=size),
        small._replace(op="aten::eq"),
        Launch("reduce_kernel", op="aten::any", floors=1.0),
        small._replace(op="aten::bitwise_not"),
        _ASSERT,
        Launch("distribution_elementwise_grid_stride_kernel", op="aten::exponential_", floors=1.1,
               internal_bytes=size),
        Launch("vectorized_elementwise_kernel", op="aten::div", internal_bytes=3 * size),
        Launch("reduce_kernel", 1.0, op="aten::argmax", floors=max(0.9, row_floors)),
    )  # fmt: skip


SORT_RULES: dict[str, Rule] = {
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_dense_backward": _bag_backward,
    **dict.fromkeys(["_index_put_impl_", "index_put_", "index_put"], _index_put),
    "sort": _sort,
    "argsort": _sort,
    "topk": _topk,
    "cumsum": _cumsum,
    "multinomial": _multinomial,
    "_local_scalar_dense": _read_number,
    "index": _index,
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "_unique2": _unique,
    "bincount": _bincount,
    "histc": _histogram,
}
"""Base name of an operator -> its rule."""
