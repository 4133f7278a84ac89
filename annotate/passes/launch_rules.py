"""The kernels that PyTorch launches for one call of an operator, in order.

A rule takes a call and the GPU and returns the launches. The rules here follow PyTorch's sources,
whose file a comment names; those of operators that sort and select are in `sort_launches.py`, those
of NVIDIA's libraries in `library_launches.py`. An operator without a rule launches one kernel.
"""

from collections.abc import Sequence
from math import ceil

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.block_cycles import additions_of, group_norm_cycles
from onerank.annotate.op_costs.kernel_overheads import rolled_dimensions
from onerank.annotate.op_costs.op_classes import OpClass, base_name, is_generated, op_class
from onerank.annotate.op_costs.operands import Call, Piece, Tensor, numbers_of, tensor_lists
from onerank.annotate.op_costs.reductions import NEED_AXES, division_of
from onerank.annotate.passes.library_launches import (
    CONVOLUTIONS,
    FILL,
    LIBRARY_RULES,
    MEMSET,
    WHOLE,
    Launch,
    Rule,
    attention_of_cpu,
    gemm_launches,
    in_float32,
)
from onerank.annotate.passes.sort_launches import SORT_RULES


def launches_of(
    op: str, call: Call, target: Gpu, attention: str = "usual", *, tf32: bool = True
) -> Sequence[Launch]:
    """Return the launches of a call on `target` in order; the shares sum to 1.

    Args:
        op: operator with namespace.
        call: its operands; with values if it `launches_need_values`.
        target: an NVIDIA GPU.
        attention: requested kernel for attention that was captured on a CPU.
        tf32: whether the script lets cuDNN multiply float32 in TF32.
    """
    if is_generated(op):
        return (WHOLE,)
    rule = _RULES.get(call.op)
    # A CPU capture names the CPU's attention, which runs on no GPU.
    if "_for_cpu" in call.op:
        rule = attention_of_cpu(call, target, attention)
    if rule is None and call.op.startswith("_foreach_"):
        rule = _foreach
    if rule is None:
        rule = _OF_CLASS.get(op_class(op))
    launches = rule(call, target) if rule else ()
    if not tf32 and rule in CONVOLUTIONS and _has_float32(call):
        launches = in_float32(launches)
    return launches or (WHOLE,)


def _has_float32(call: Call) -> bool:
    image = call.tensor(0)
    return image is not None and image.dtype == "float32"


# Lists of tensors. Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh.

_CHUNK_ELEMENTS = 65536

_MOST_BLOCKS = 320

_MOST_TENSORS = (110, 64, 48, 36, 30)

# Limits of a launch by the number of lists: what 4 kB of kernel arguments hold. torch 2.11 has them
# with CUDA 13, too, as every capture in traces/ shows. The header of torch 2.13 raises them to 2240
# blocks where it is built for CUDA 13.
_MOST_TENSORS_WITH_SCALARS = (96, 64, 48, 36, 30)

# Tensors whose norms one launch of `lpnorm_cleanup` finishes: 1000 take three (measured).
_CLEANED_TENSORS = 400


def _foreach(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of an operator on lists of tensors."""
    lists = tensor_lists(call.inputs)
    if not lists:
        return ()
    depth = len(lists)
    by_tensor = call.op in ("_foreach_norm", "_foreach_max", "_foreach_powsum")
    if not call.op.endswith("_") and not by_tensor:
        depth += 1  # the results are one more list
    factors = [operand[0] for operand in call.inputs[1:] if operand and len(operand) == 1]
    if len(lists[0]) > 1 and any(factor.dtype != lists[0][0].dtype for factor in factors):
        # ForeachUtils.h: operands of unequal dtypes go one by one through the plain operator.
        sizes = [tensor.numel for tensor in lists[0]]
        plain = "aten::" + call.op.removeprefix("_foreach_")
        return [
            Launch(
                "elementwise_kernel",
                size / max(1, sum(sizes)),
                op=plain,
                pieces=(Piece(tensor, 0, size),),
            )
            for tensor, size in enumerate(sizes)
        ]
    chunks = _multi_tensor(lists[0], min(depth, 5), with_scalars=_has_scalars(call))
    if not by_tensor:
        return chunks
    results = ceil(len(lists[0]) / _CLEANED_TENSORS)
    return (
        Launch("vectorized_elementwise_kernel", op=FILL),
        *chunks,
        *[Launch("lpnorm_cleanup", floors=0.7)] * results,
    )


def _has_scalars(call: Call) -> bool:
    """Return whether the call has a list of numbers, one for each tensor."""
    return any(numbers_of(value) for value in call.values[1:])


def _fused_optimizer(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a fused optimizer or of unscaling."""
    lists = tensor_lists(call.inputs)
    return _multi_tensor(lists[0], min(len(lists), 5), with_scalars=False) if lists else ()


def _multi_tensor(tensors: Sequence[Tensor], depth: int, *, with_scalars: bool) -> Sequence[Launch]:
    """Return one launch for every 320 chunks, or when its tensors' addresses are full."""
    limit = (_MOST_TENSORS_WITH_SCALARS if with_scalars else _MOST_TENSORS)[depth - 1]
    elements = sum(tensor.numel for tensor in tensors)
    launches: list[tuple[int, list[Piece]]] = []  # blocks, what they take
    blocks = tensor_count = 0
    pieces: list[Piece] = []
    for position, tensor in enumerate(tensors):
        left = tensor.numel
        tensor_count += left > 0
        while left > 0:
            taken = min(ceil(left / _CHUNK_ELEMENTS), _MOST_BLOCKS - blocks)
            begin = tensor.numel - left
            left -= min(left, taken * _CHUNK_ELEMENTS)
            pieces.append(Piece(position, begin, tensor.numel - left))
            blocks += taken
            if blocks == _MOST_BLOCKS or (tensor_count == limit and not left):
                launches.append((blocks, pieces))
                blocks, pieces = 0, []
                # The next launch begins with the rest of this tensor.
                tensor_count = int(left > 0)
    if blocks:
        launches.append((blocks, pieces))
    return [
        Launch(
            _MULTI_TENSOR,
            sum(piece.end - piece.begin for piece in pieces) / elements,
            grid=(blocks, 1, 1),
            block=(512, 1, 1),
            pieces=tuple(pieces),
        )
        for blocks, pieces in launches
    ]


_MULTI_TENSOR = "multi_tensor_apply_kernel"

# Tensors that one launch concatenates: `CAT_ARRAY_BATCH_SIZE` in Shape.cu.
_CAT_TENSORS = 128


def _cat(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a concatenation."""
    tensors = [tensor.numel for operand in call.inputs[:1] for tensor in operand or ()]
    total = sum(tensors)
    if len(tensors) <= _CAT_TENSORS or not total:
        return ()
    batches = [tensors[at : at + _CAT_TENSORS] for at in range(0, len(tensors), _CAT_TENSORS)]
    return [Launch("CatArrayBatchedCopy", sum(batch) / total) for batch in batches]


def _roll(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `roll`, one for each dimension."""
    shifted = rolled_dimensions(call)
    return (Launch("roll_cuda_kernel", 1 / shifted),) * shifted if shifted > 1 else ()


def _scatter_reduce(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a scattered mean: sums, and counts by which it divides them."""
    table = call.tensor(0)
    if additions_of(call) < 2 or table is None:
        return ()
    kernel = Launch("_scatter_gather_elementwise_kernel", 0.5)
    fill = Launch("vectorized_elementwise_kernel", op=FILL, internal_bytes=table.nbytes)
    others = ("clamp_min_", 2), ("div_", 3)
    return (
        kernel,
        fill,
        fill,
        kernel,
        *(
            Launch(
                "vectorized_elementwise_kernel",
                op=f"aten::{name}",
                internal_bytes=times * table.nbytes,
            )
            for name, times in others
        ),
    )


# Kernels of `logsumexp` before and after its sum: `logsumexp_out_impl` in ReduceOps.cpp takes the
# largest of each row, replaces infinite ones, and adds it to the logarithm of the sum.
_BEFORE_SUM = ("abs", "eq", "masked_fill_")
_AFTER_SUM = ("log_", "add_")


def _logsumexp(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of `logsumexp`."""
    size = call.list_bytes(0)

    def rows(names: Sequence[str]) -> list[Launch]:
        return [Launch("vectorized_elementwise_kernel", op=f"aten::{name}") for name in names]

    # Broadcast over a row, which computes addresses.
    spread = Launch("elementwise_kernel", op="aten::sub", floors=0.8, internal_bytes=2 * size)
    whole = Launch("vectorized_elementwise_kernel", op="aten::exp_", internal_bytes=2 * size)
    largest = Launch("reduce_kernel", op="aten::amax", floors=0.85, internal_bytes=size)
    added = Launch("reduce_kernel", 1.0, op="aten::sum")
    return (largest, *rows(_BEFORE_SUM), spread, whole, added, *rows(_AFTER_SUM))


# Norms and losses.


def _norm_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of the backward of a layer or RMS norm: of its input and its weight.

    Source: layer_norm_kernel.cu. Measured on an H100 (4096 x 4096 in bf16): 47 and 32 us.
    """
    weighted = any(tensor is not None and tensor.numel for tensor in _results(call)[1:])
    if not weighted:
        return ()
    return (
        Launch("layer_norm_grad_input_kernel_vectorized", 0.6),
        Launch("GammaBetaBackwardCUDAKernelTemplate", 0.4),
    )


def _results(call: Call) -> list[Tensor | None]:
    return [call.output(position) for position in range(len(call.outputs))]


# Helpers of group norms, in launch floors: the constants of each channel, and the gradients of its
# weight and bias.
_CONSTANTS, _CHANNEL_GRADIENTS = 0.9, 1.9


def _group_norm(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a group norm, moments first. Source: group_norm_kernel.cu."""
    share = _share_of_sums(call)
    return (
        Launch("RowwiseMomentsCUDAKernel", share),
        Launch("ComputeFusedParamsCUDAKernel", floors=_CONSTANTS),
        Launch("elementwise_kernel", 1 - share),
    )


def _group_norm_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of its backward. Source: group_norm_kernel.cu."""
    share = _share_of_sums(call)
    return (
        Launch("ComputeInternalGradientsCUDAKernel", share),
        Launch("elementwise_kernel", floors=_CONSTANTS),
        Launch("ComputeBackwardFusedParamsCUDAKernel", floors=_CONSTANTS),
        Launch("elementwise_kernel", 1 - share),
        Launch("GammaBetaBackwardCUDAKernel1", floors=_CHANNEL_GRADIENTS),
    )


def _share_of_sums(call: Call) -> float:
    sums, elementwise = group_norm_cycles(call)
    return sums / (sums + elementwise) if sums else 0.5


def _loss_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of the loss's backward: it zeroes the gradient. Source: Loss.cu."""
    zero = Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=call.output_bytes)
    return (zero, Launch("nll_loss_backward_reduce_cuda_kernel_2d", 1.0))


# Backwards on images that add gradients into a result of zeros. Sources: UpSampleBilinear2d.cu,
# UpSampleBicubic2d.cu, DilatedMaxPool2d.cu, AdaptiveAveragePooling.cu, GridSampler.cu,
# ReflectionPad.cu and ReplicationPadding.cu.
_ADD_INTO_ZEROS = (
    "upsample_bilinear2d_backward upsample_bicubic2d_backward max_pool2d_with_indices_backward "
    "_adaptive_avg_pool2d_backward grid_sampler_2d_backward reflection_pad2d_backward "
    "replication_pad2d_backward"
).split()


def _added_into_zeros(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of such a backward."""
    result = call.output()
    if result is None:
        return ()
    zero = Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=result.nbytes)
    return (zero, Launch(f"{call.op}_out_frame", 1.0))


# A CTC loss takes the time steps one after another, with a thread for each state. These are launch
# floors of a step, from the middle of what an H200 takes: 0.29 to 1.03 us in the forward, by
# sequences, classes and labels, 0.30 to 1.02 in the backward, 0.20 to 1.23 in the sums over states
# that follow, and 0.76 to 1.78 in cuDNN's kernel for both (2026-11-28-block-cycles-h200).
_ALPHA_STEP, _BETA_STEP, _COLLECTED_STEP, _CUDNN_STEP = 0.21, 0.28, 0.2, 0.36


def _ctc_loss(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of torch's CTC loss. Source: LossCTC.cu."""
    return (Launch("ctc_loss_log_alpha_gpu_kernel", 1.0, floors=_ALPHA_STEP * _times(call, 0)),)


def _ctc_loss_backward(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of its backward. Source: LossCTC.cu."""
    times, size = _times(call, 1), call.output_bytes
    return (
        Launch("vectorized_elementwise_kernel", op=FILL, written_bytes=size),
        Launch("ctc_loss_backward_log_beta_gpu_kernel", floors=_BETA_STEP * times),
        Launch("vectorized_elementwise_kernel", op="aten::exp", internal_bytes=2 * size),
        Launch("ctc_loss_backward_collect_gpu_kernel", 1.0, floors=_COLLECTED_STEP * times),
        Launch("ctc_loss_zero_padded_gradients", floors=0.4),
    )


def _cudnn_ctc_loss(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of cuDNN's CTC loss, which computes the gradient, too."""
    return (
        Launch("computeSoftmaxProbability", 0.5),
        Launch("compute_alphas_and_betas", floors=_CUDNN_STEP * _times(call, 0)),
        Launch("compute_grads_deterministic", 0.5, floors=_COLLECTED_STEP * _times(call, 0)),
    )


def _times(call: Call, position: int) -> int:
    """Return the time steps of the operand at `position`: (times, batch, classes)."""
    scores = call.tensor(position)
    return scores.shape[0] if scores is not None and scores.shape else 0


def _mean_loss(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a loss that is a mean or sum of pointwise losses. Source: Loss.cpp."""
    result = call.output()
    if result is None or result.numel != 1:
        return ()
    each = Launch("vectorized_elementwise_kernel", 1.0)
    size = call.list_bytes(0)
    return (each, Launch("reduce_kernel", op="aten::mean", floors=0.9, internal_bytes=2 * size))


# Elementwise kernels and reductions. Source: TensorIterator.cpp.

_INDEXED_BYTES = 2**31 - 1


def _halves(call: Call) -> int:
    """Return the number of launches into which 32-bit offsets split a call: a power of two."""
    largest = max(
        (tensor.nbytes for operand in (*call.inputs, *call.outputs) for tensor in operand or ()),
        default=0,
    )
    halves = 1
    while largest > halves * _INDEXED_BYTES:
        halves *= 2
    return halves


def _elementwise(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of an elementwise operator: more than one beyond 2 GB."""
    halves = _halves(call)
    return (Launch(share=1 / halves),) * halves if halves > 1 else ()


def _reduction(call: Call, target: Gpu) -> Sequence[Launch]:
    """Return the launches of a reduction: with semaphores where blocks share an output."""
    halves = _halves(call)
    if halves > 1:
        return (Launch(share=1 / halves),) * halves
    division = division_of(call)
    if division is None:
        return ()
    rows = division.rows(target.sm_count)
    kernel = Launch(
        "reduce_kernel", 1.0, grid=(division.columns, rows, 1), block=(*division.block, 1)
    )
    # Blocks that share an output count their arrivals in semaphores, which a memset clears first.
    return (MEMSET, kernel) if rows > 1 else (kernel,)


# Operators, by base name, whose launches depend on axes or flags.
_NEED_VALUES = NEED_AXES | frozenset(
    (
        "_index_put_impl_ index_put_ index_put _cudnn_attention_forward mamba_chunk_scan "
        "addmm baddbmm multinomial topk _embedding_bag_dense_backward roll scatter_reduce "
        "scatter_reduce_"
    ).split()
)


def launches_need_values(op: str) -> bool:
    """Return whether `launches_of` must be given the operator's input values."""
    name = base_name(op)
    return name in _NEED_VALUES or name.startswith("_foreach_") or launches_need_strides(op)


def launches_need_strides(op: str) -> bool:
    """Return whether `launches_of` must be given the strides of the operator's inputs."""
    return base_name(op) in ("convolution", "convolution_backward")


_RULES: dict[str, Rule] = {
    **LIBRARY_RULES,
    **SORT_RULES,
    **dict.fromkeys(
        [
            "_fused_adam_",
            "_fused_adamw_",
            "_fused_sgd_",
            "_fused_adagrad_",
            "_amp_foreach_non_finite_check_and_unscale_",
        ],
        _fused_optimizer,
    ),
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _ctc_loss_backward,
    "_cudnn_ctc_loss": _cudnn_ctc_loss,
    "cat": _cat,
    "roll": _roll,
    "scatter_reduce": _scatter_reduce,
    "scatter_reduce_": _scatter_reduce,
    "logsumexp": _logsumexp,
    **dict.fromkeys(["mse_loss", "smooth_l1_loss", "huber_loss"], _mean_loss),
    **dict.fromkeys(_ADD_INTO_ZEROS, _added_into_zeros),
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "nll_loss_backward": _loss_backward,
    "nll_loss2d_backward": _loss_backward,
}

_OF_CLASS: dict[OpClass, Rule] = {
    OpClass.GEMM: gemm_launches,
    OpClass.ELEMENTWISE: _elementwise,
    OpClass.COPY: _elementwise,
    OpClass.MEMSET: _elementwise,
    OpClass.REDUCTION: _reduction,
}
