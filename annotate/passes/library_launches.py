"""The kernels that NVIDIA's libraries and FlashAttention launch for one call of an operator.

These are GEMMs (cuBLAS), convolutions (cuDNN) and attention. NVIDIA publishes no sources
of cuBLAS and cuDNN, so their rules come from measurements: the captures in traces/, the shipped
database of the H200, and 1,400 calls profiled on an H100 (2026-11-25, torch 2.11.0+cu130).
"""

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import FUSED, resolve_unmeasured
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.flash_mla import combination_ns
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Piece, Tensor, numbers_of
from onerank.annotate.op_costs.recurrent import RecurrentLayers, recurrent_layers
from onerank.annotate.op_costs.state_operators import chunk_kernels
from onerank.ir import Kind


class Launch(NamedTuple):
    """One kernel, copy or fill that a call launches.

    Attributes:
        name: name of the kernel, without template arguments; "" for the operator's name.
        share: share of the call's FLOPs and bytes that it does; 0 for a helper.
        kind: KERNEL, MEMCPY or MEMSET.
        op: operator that launches it from within the call; "" for the call's own.
        written_bytes: bytes of the call's results that a helper writes.
        internal_bytes: bytes that it reads and writes of buffers within the call.
        floors: least time in launch floors; 0: the floor of its class.
        cycles: SM cycles that a helper takes at least.
        fitted: whether the model of the operator's class was fitted on times that contain it.
        grid: blocks along each axis; () if not known.
        block: threads of a block along each axis; () if not known.
        pieces: the part of the call's lists of tensors that it takes; () for all operands.
    """

    name: str = ""
    share: float = 0.0
    kind: Kind = Kind.KERNEL
    op: str = ""
    written_bytes: int = 0
    internal_bytes: int = 0
    floors: float = 0.0
    cycles: float = 0.0
    fitted: bool = True
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()


Rule = Callable[[Call, Gpu], Sequence[Launch]]
"""(call, target) -> its launches; none where the rule does not cover the call."""


def floors_of_cycles(cycles: float, target: Gpu) -> float:
    """Return SM cycles, summed over all SMs, as launch floors."""
    return cycles / target.issue_rate_hz * 1e9 / target.launch_floor_ns


WHOLE = Launch(share=1.0)

MEMSET = Launch("Memset (Device)", kind=Kind.MEMSET)

FILL = "aten::fill_"


# GEMMs. cuBLAS 13 on a Hopper GPU runs persistent kernels ("nvjet_sm90"): a block takes
# tile after tile from a counter, which a memset clears first.

_HOPPER = 90

_TILE = (256, 128)

# Tiles per SM above which the kernel takes tiles from a counter. 491 of 493 bf16 and 115 of 116
# float8 GEMMs in the H200's database agree, and every GEMM of the captures in traces/. Up to
# two tiles per SM are assigned at launch.
_TILES_FROM_COUNTER = 2

_SPLIT_TILE = 64

_SPLIT_LEAST_K = 4096

# Inner size per tile of 64 x 64 of the result from which cuBLAS splits the inner size. bf16 on an
# H100: 795 GEMMs of 64 to 4096 rows and columns. The rule disagrees on 22, all at its edge (32
# tiles with 4096, 256 with 16384), where the operands' layout decides. float16: three shapes in the
# H200's database. No GEMM with an inner size of 2048 or less is split.
_SPLIT_K_PER_TILE = {"bfloat16": 120, "float16": 64}


def gemm_launches(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a GEMM: its kernel, and a memset or a reduction of partial sums.

    Empty if one launch of the operator's default kind describes it.
    """
    work = work_of_call(f"aten::{call.op}", call)
    # float32 GEMMs run kernels of several generations, chosen by whether TF32 is on, which no
    # capture records.
    if target.capability != _HOPPER or not work.gemm or work.gemm.operand_bytes > 2:
        return ()
    batch, m, n, k, _, _ = work.gemm
    if call.op == "_scaled_mm" or work.dtype not in _SPLIT_K_PER_TILE:
        splits = False
    else:
        small_tiles = batch * ceil(m / _SPLIT_TILE) * ceil(n / _SPLIT_TILE)
        splits = k >= _SPLIT_LEAST_K and small_tiles * _SPLIT_K_PER_TILE[work.dtype] <= k
    # A GEMM of one row is a matrix-vector product, which other kernels compute.
    if splits and min(m, n) > 1:
        parts = max(2, target.sm_count // max(1, batch * ceil(m / _TILE[0]) * ceil(n / _TILE[1])))
        # cuBLAS divides by at most 16 in every profiled GEMM.
        partial_bytes = 4 * batch * m * n * min(parts, 16)
        reduce = Launch("cublasLt::splitKreduce_kernel", internal_bytes=partial_bytes, floors=0.6)
        return (WHOLE, reduce)
    tiles = batch * min(
        ceil(m / rows) * ceil(n / columns) for rows, columns in (_TILE, _TILE[::-1])
    )
    # A persistent kernel has one block per SM.
    blocks = (2, target.sm_count // 2, 1)
    if tiles > _TILES_FROM_COUNTER * target.sm_count:
        return (MEMSET, WHOLE._replace(grid=blocks, block=(384, 1, 1)))
    if tiles > target.sm_count:
        return (WHOLE._replace(grid=blocks, block=(384, 1, 1)),)
    return ()


_BETA = 3
"""Position of the factor of the added matrix."""


def _added_product(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `addmm` and `baddbmm`: a GEMM into a copy of the added matrix.

    A bias has a row, which the GEMM adds; with `beta` 0 nothing is added. Source:
    aten/src/ATen/native/cuda/Blas.cpp.
    """
    added, result = call.tensor(0), call.output()
    launches = gemm_launches(call, target)
    if added is None or result is None or added.shape != result.shape or added.shape[0] == 1:
        return launches
    if call.value(_BETA) == 0:
        return launches
    contiguous = added.contiguous
    copy = Launch(
        "Memcpy DtoD (Device -> Device)" if contiguous else "elementwise_kernel",
        kind=Kind.MEMCPY if contiguous else Kind.KERNEL,
        op="aten::copy_",
        internal_bytes=2 * result.nbytes,
    )
    return (copy, *(launches or (WHOLE,)))


def _grouped_gemm(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a grouped GEMM: a kernel that writes the groups' pointers first."""
    return (Launch("prepare_grouped_gemm_data", floors=0.5), WHOLE)


# Convolutions. cuDNN's kernels for tensor cores take images with the channels last. Measured on an
# H100, cuDNN 9.1x of torch 2.11.0+cu130: 24 shapes, each in three dtypes and both layouts.

_TO_CHANNELS_LAST, _FROM_CHANNELS_LAST = "nchwToNhwcKernel", "nhwcToNchwKernel"

# SM cycles of an element in these copies, by the points of an image or of a filter's window: images
# of 512 to 4,200,000 points take 0.37 to 0.53, filters of 27 points 0.45, of 9 points 1.4 to 1.5
# (steps of two U-Nets on an H200, 2026-11-28-block-cycles-h200).
_COPIED_POINT, _COPIED_WINDOW, _SMALL_WINDOW = 0.5, 1.43, 16

_ADD_PADDING = "nhwcAddPaddingKernel"

_CHANNELS = 8

_CONVOLUTION_TILE = 128 * 128

# Tiles per SM above which the kernel takes tiles from a counter: 1.48 does not, 1.94 does.
_CONVOLUTION_TILES_FROM_COUNTER = 1.7

# Points of the images per tile of the filter's gradient from which its sum is split, which a kernel
# prepares: 227 is not, 910 is.
_SPLIT_POINTS_PER_TILE = 500


# Names of the products: of the smaller image, of the larger one, and of the filter.
_FORWARD, _GRADIENT, _OF_FILTER = (
    f"sm90_xmma_{name}_implicit_gemm" for name in ("fprop", "dgrad", "wgrad")
)


def _convolution(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a convolution: copies to and from channels-last, and its bias."""
    image, weight, bias, out = call.tensor(0), call.tensor(1), call.tensor(2), call.output()
    if image is None or weight is None or out is None:
        return ()
    if not _is_covered(weight, target):
        return ()
    add = (_bias_added(out, bias, target),) if bias is not None else ()
    transposed = call.value(6) is True
    if _is_depthwise(image if transposed else out, weight):
        return (WHOLE, *add)
    gemm = _ImplicitGemm(image, weight, out, _is_pointwise(call, weight, 3), target)
    name = _GRADIENT if transposed else _FORWARD
    return (*gemm.product(name, (image, weight), out, 1.0), *add)


def _convolution_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a convolution's backward: gradients of image, filter and bias."""
    grad, image, weight = (call.tensor(position) for position in range(3))
    if grad is None or image is None or weight is None:
        return ()
    if not _is_covered(weight, target):
        return ()
    of_image, of_weight, of_bias = (call.output(position) for position in range(3))
    products = sum(result is not None for result in (of_image, of_weight))
    if not products:
        return ()
    transposed = call.value(7) is True
    gemm = _ImplicitGemm(image, weight, grad, _is_pointwise(call, weight, 4), target)
    depthwise = _is_depthwise(image if transposed else grad, weight)
    launches: list[Launch] = []
    if of_image is not None:
        name = _FORWARD if transposed else _GRADIENT
        whole = (Launch(name, 1 / products),)
        parts = gemm.product(name, (grad, weight), of_image, 1 / products)
        launches += whole if depthwise else parts
    if of_weight is not None:
        whole = (Launch(_OF_FILTER, 1 / products),)
        launches += whole if depthwise else gemm.filter_gradient(_OF_FILTER, grad, 1 / products)
    if of_bias is not None:
        launches += [MEMSET] * gemm.channels_last
        launches.append(_bias_gradient(grad, target, gemm.channels_last))
    return launches


# Launches around a product: copies to and from channels-last, and what the product's kernel needs.
_AROUND_PRODUCT = (
    *(_TO_CHANNELS_LAST, _FROM_CHANNELS_LAST, _ADD_PADDING, "init_device_workspace"),
    *("splitKreduce_kernel", MEMSET.name),
)


def in_float32(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches of a convolution in float32 without TF32.

    cuDNN's kernels for vector units take images in either layout: 328 of 435 on an H200 ran without
    a copy (2026-11-28-convolutions-float32-h200).
    """
    return [launch for launch in launches if launch.name not in _AROUND_PRODUCT]


def _is_depthwise(many: Tensor, weight: Tensor) -> bool:
    """Return whether each channel has its own filter.

    `many` is the image with `weight.shape[0]` channels.
    """
    return weight.shape[1] == 1 and weight.shape[0] > 1 and many.shape[1] >= weight.shape[0]


def _bias_added(out: Tensor, bias: Tensor, target: Gpu) -> Launch:
    """Return the launch that adds the bias, which computes the address of each element's bias."""
    column = Tensor((1, bias.numel, *(1 for _ in out.shape[2:])), bias.dtype, bias.item_bytes)
    call = Call("add_", ((out,), (column,)), ((out,),))
    floors = _floors_of("aten::add_", call, target)
    return Launch("elementwise_kernel", op="aten::add_", floors=floors, fitted=False)


def _bias_gradient(grad: Tensor, target: Gpu, channels_last: bool) -> Launch:
    """Return the launch that sums the gradient over images and their points."""
    if not channels_last:
        return Launch("reduce_kernel", op="aten::sum", internal_bytes=grad.nbytes, fitted=False)
    channels = grad.shape[1]
    points = Tensor((grad.numel // channels, channels), grad.dtype, grad.item_bytes)
    result = Tensor((1, channels), grad.dtype, grad.item_bytes)
    floors = _floors_of("aten::sum", Call("sum", ((points,),), ((result,),)), target)
    return Launch("reduce_kernel", op="aten::sum", floors=floors, fitted=False)


def _floors_of(op: str, call: Call, target: Gpu) -> float:
    """Return the time of an operator that a call launches from within, in launch floors."""
    kernel = kernels_of([work_of_call(op, call)], np.ones(1))
    predicted_ns, _ = predict_from_datasheet(kernel, target)
    return float(predicted_ns[0]) / target.launch_floor_ns


def _is_covered(weight: Tensor, target: Gpu) -> bool:
    """Return whether a convolution is of a measured kind: of sequences, images or volumes."""
    return len(weight.shape) in (3, 4, 5) and target.capability == _HOPPER


def _is_pointwise(call: Call, weight: Tensor, stride_at: int) -> bool:
    """Return whether each point of the image is multiplied by one matrix: a plain GEMM."""
    return prod(weight.shape[2:]) == 1 and set(numbers_of(call.value(stride_at))) <= {1}


class _ImplicitGemm:
    """The launches of a convolution as GEMMs, by the layout of its image."""

    def __init__(
        self, image: Tensor, weight: Tensor, result: Tensor, pointwise: bool, target: Gpu
    ) -> None:
        # A sequence counts as an image of one row.
        images = len(weight.shape) > 3
        self.channels_last = images and image.strides[1] == 1 and image.shape[1] > 1
        self._image = image
        self._weight = weight
        self._pointwise = pointwise
        self._target = target
        # Tensor cores load eight channels of 16 bits: fewer are padded in a zeroed buffer.
        narrow = any(each.shape[1] % _CHANNELS for each in (image, result))
        self._padded = narrow and image.item_bytes == 2
        self._has_window = prod(weight.shape[2:]) > 1

    def product(
        self, name: str, operands: tuple[Tensor, Tensor], result: Tensor, share: float
    ) -> list[Launch]:
        """Return the launches of the result or of the gradient of the image."""
        main = Launch(name, share)
        if self._pointwise:
            return [main]
        first, weight = operands
        counted = self._tiles(result) > _CONVOLUTION_TILES_FROM_COUNTER * self._target.sm_count
        counter = [MEMSET] * (counted and not self._padded)
        before = [*self._laid_out(first), *(self._laid_out(weight) if self._has_window else [])]
        return [*before, *counter, main, *self._returned(result)]

    def filter_gradient(self, name: str, grad: Tensor, share: float) -> list[Launch]:
        """Return the launches of the gradient of the filter."""
        main = Launch(name, share)
        if self._pointwise:
            return [main, Launch("splitKreduce_kernel", floors=0.6)]
        tiles = ceil(self._weight.numel / _CONVOLUTION_TILE)
        points = grad.numel // grad.shape[1]
        prepare: list[Launch] = []
        if tiles > self._target.sm_count:
            prepare = [MEMSET]
        elif points >= _SPLIT_POINTS_PER_TILE * tiles:
            prepare = [Launch("init_device_workspace", floors=0.8)]
        before = [*self._laid_out(grad), *self._laid_out(self._image)]
        after = self._returned(self._weight) if self._has_window else []
        return [*before, *prepare, main, *after]

    def _tiles(self, result: Tensor) -> int:
        return ceil(result.numel / _CONVOLUTION_TILE)

    def _laid_out(self, tensor: Tensor) -> list[Launch]:
        if self._padded:
            name = _ADD_PADDING if self.channels_last else _TO_CHANNELS_LAST
            return [MEMSET, Launch(name, internal_bytes=2 * tensor.nbytes)]
        if self.channels_last:
            return []
        return [self._copied(_TO_CHANNELS_LAST, tensor)]

    def _returned(self, result: Tensor) -> list[Launch]:
        if self.channels_last:
            return []
        return [self._copied(_FROM_CHANNELS_LAST, result)]

    def _copied(self, name: str, tensor: Tensor) -> Launch:
        small = prod(tensor.shape[2:]) < _SMALL_WINDOW
        cycles = tensor.numel * (_COPIED_WINDOW if small else _COPIED_POINT)
        moved = 2 * tensor.nbytes
        return Launch(name, internal_bytes=moved, cycles=cycles, fitted=False)


# Attention.


def attention_of_cpu(call: Call, target: Gpu, requested: str) -> Rule | None:
    """Return the rule of the kernel that runs a CPU's attention on `target`."""
    backward = call.op.endswith("_backward")
    # Without a request it is the kernel that PyTorch picks there.
    named = requested if requested in FUSED else "fused"
    runs = resolve_unmeasured(target, named).runs
    if runs == "cudnn":
        return _cudnn_attention_backward if backward else _cudnn_attention
    return _flash_attention_backward if backward else None


def _cudnn_attention(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of cuDNN's fused attention on Hopper."""
    if _is_wide(call):
        return ()
    dropout = call.op == "_cudnn_attention_forward" and call.value(9)
    # MHA.cpp: a kernel reads the state of the random numbers.
    random = (Launch("unpack_cudnn", floors=0.4),) if isinstance(dropout, float) and dropout else ()
    return (*random, MEMSET, WHOLE)


def _is_wide(call: Call) -> bool:
    """Return whether operands exceed 16 bits: only memory-efficient attention takes those."""
    query = call.tensor(0)
    return query is not None and query.item_bytes > 2


def _cudnn_attention_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of cuDNN attention's backward, which sums dQ in float32."""
    if _is_wide(call):
        return _efficient_attention_backward(call, target)
    grad, query = call.tensor(0), call.tensor(1)
    elements_bytes = query.nbytes if query else 0
    launches = [
        MEMSET,
        Launch("cudnn::fusion::compute_dot_do_o", internal_bytes=2 * (grad.nbytes if grad else 0)),
        WHOLE,
        Launch("cudnn::fusion::convert_dq_to_16bits", internal_bytes=3 * elements_bytes),
    ]
    return (*launches, *_reduce_heads(call, "cudnn::fusion::fmha_reduce_head"))


def _flash_attention_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of flash attention's backward.

    Source: flash_bwd_launch_template.h and flash_api.cpp of FlashAttention 2 in PyTorch.
    """
    if _is_wide(call):
        return _efficient_attention_backward(call, target)
    grad, query = call.tensor(0), call.tensor(1)
    elements_bytes = query.nbytes if query else 0
    launches = [
        Launch("flash_bwd_dot_do_o_kernel", internal_bytes=2 * (grad.nbytes if grad else 0)),
        WHOLE,
        Launch("flash_bwd_convert_dq_kernel", internal_bytes=3 * elements_bytes),
    ]
    return (*launches, *_reduce_heads(call, "reduce_kernel", op="aten::sum"))


def _efficient_attention_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of memory-efficient attention's backward: it zeroes a workspace."""
    query = call.tensor(1)
    # The workspace is float32: twice the bytes of a 16-bit query.
    workspace_bytes = 2 * query.nbytes if query else 0
    return (
        Launch("vectorized_elementwise_kernel", op=FILL, internal_bytes=workspace_bytes),
        WHOLE,
    )


def _latent_attention(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of FlashMLA's decode: the parts of the keys, and their combination."""
    shape = work_of_call("onerank_serving::latent_attention", call).attention
    if shape is None or target.capability != _HOPPER:
        return ()
    heads = shape.heads * shape.rows
    combined_ns = combination_ns(target, shape.batch, heads, shape.keys)
    floors = combined_ns / target.launch_floor_ns
    return (WHOLE, Launch("flash_fwd_mla_combine_kernel", floors=floors, fitted=False))


def _chunked_scan(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a chunked scan of linear attention or Mamba 2."""
    return [
        Launch(
            kernel.name,
            share=0.0 if kernel.floors else 1.0,
            internal_bytes=kernel.moved if kernel.floors else 0,
            floors=kernel.floors,
            cycles=kernel.cycles,
            fitted=False,
        )
        for kernel in chunk_kernels(call.op, call)
    ]


# Shortest times in launch floors: of the updates of states in decodes, which load a state before
# they can compute, and of the kernel that keeps the last rows of a prefill's convolution. On an
# H100 and an H200, in OLMo-Hybrid, Falcon-H1 and Kimi-Linear with one sequence, they take 1.4 to
# 1.6, 3.8 to 3.9, 3.7 and 1.3 to 1.4 us (2026-11-28-state-errors-hopper).
_UPDATE_FLOORS = {
    "causal_conv1d_update": 0.52,
    "recurrent_gated_delta_rule": 0.96,
    "selective_state_update": 0.65,
}
_LAST_ROWS_FLOORS = 0.52


def _state_update(call: Call, _: Gpu) -> Sequence[Launch]:
    """Return the launch of the update of a state by one token of each sequence."""
    return (Launch(share=1.0, floors=_UPDATE_FLOORS[call.op], fitted=False),)


def _prefill_convolution(_: Call, __: Gpu) -> Sequence[Launch]:
    """Return the launches of fla's convolution of a prefill: it, and the state that it leaves."""
    states = Launch("causal_conv1d_states_fwd_kernel", floors=_LAST_ROWS_FLOORS, fitted=False)
    return (WHOLE, states)


def _reduce_heads(call: Call, name: str, op: str = "") -> Sequence[Launch]:
    """Return sums of the gradients of key and value over query heads that share them."""
    query, key = call.tensor(1), call.tensor(2)
    if query is None or key is None or len(query.shape) < 3:
        return ()
    # FlashAttention has the heads after the sequence; the operators that PyTorch calls, and cuDNN,
    # have them before it.
    axis = -2 if call.op.startswith("_flash") else 1
    sharing = query.shape[axis] // max(1, key.shape[axis])
    if sharing <= 1:
        return ()
    # The gradients of every query head are written, then summed into those of the key's heads.
    return (Launch(name, op=op, internal_bytes=(sharing + 1) * key.nbytes),) * 2


# Recurrent layers of cuDNN. A step launches its product and its gates; a backward another kernel
# for the gradients of the gates, but for 16 bits with less than 1,024 numbers. One layer in one
# direction runs as one kernel that keeps its weights: of float16 up to 1,024 numbers, a multiple of
# 128, or of 384 numbers at most. From 22 layers on an H200 (2026-11-28-recurrent-layers-h200).
_STEP, _GRADIENT_STEP, _NARROW_GRADIENT_STEP = 2, 3, 2
_NARROW_BYTES, _NARROW_SIZE = 2, 1024
_KEPT_SIZE, _KEPT_MULTIPLE, _KEPT_SMALL = 1024, 128, 384


def _recurrent(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a recurrent layer of cuDNN, or of its backward."""
    layers, backward = recurrent_layers(call, [1], 4), call.op.endswith("_backward")
    weight = layers.pairs[0][1] if layers else None
    if layers is None or weight is None or _is_kept(layers, weight, backward=backward):
        return ()
    kernels = _GRADIENT_STEP if backward else _STEP
    if backward and weight.item_bytes <= _NARROW_BYTES and layers.size < _NARROW_SIZE:
        kernels = _NARROW_GRADIENT_STEP
    count = kernels * layers.steps * len(layers.pairs)
    return (Launch("recurrent_step", 1 / count),) * count


def _is_kept(layers: RecurrentLayers, weight: Tensor, *, backward: bool) -> bool:
    if len(layers.pairs) > 1:
        return False
    half = weight.dtype == "float16"
    small = layers.size <= _KEPT_SMALL and not backward
    return small or (half and layers.size <= _KEPT_SIZE and not layers.size % _KEPT_MULTIPLE)


CONVOLUTIONS: tuple[Rule, ...] = (_convolution, _convolution_backward)
"""Rules of convolutions, which cuDNN multiplies in TF32 unless the script forbids it."""

LIBRARY_RULES: dict[str, Rule] = {
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent,
    "_grouped_mm": _grouped_gemm,
    **dict.fromkeys(["addmm", "baddbmm"], _added_product),
    "latent_attention": _latent_attention,
    **dict.fromkeys(
        ["chunk_gated_delta_rule", "mamba_chunk_scan", "selective_scan", "lightning_attention"],
        _chunked_scan,
    ),
    **dict.fromkeys(_UPDATE_FLOORS, _state_update),
    "causal_conv1d": _prefill_convolution,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        ["_cudnn_attention_forward", "_scaled_dot_product_cudnn_attention"], _cudnn_attention
    ),
    **dict.fromkeys(
        ["_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward"],
        _cudnn_attention_backward,
    ),
    **dict.fromkeys(
        [
            "_flash_attention_backward",
            "_scaled_dot_product_flash_attention_backward",
        ],
        _flash_attention_backward,
    ),
    **dict.fromkeys(
        ["_efficient_attention_backward", "_scaled_dot_product_efficient_attention_backward"],
        _efficient_attention_backward,
    ),
}
