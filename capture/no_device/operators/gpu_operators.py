"""Operators whose CUDA implementation calls other operators, which launch kernels.

A profile shows the inner operator inside the outer one, and a graph has the inner one. A CPU build
of torch has no CUDA implementations, so they are listed here; each was seen in captures on an H100
and an H200 (torch 2.11). `inner_of` describes an operator that does the work in the outer one's
place. `run_before` runs those that prepare operands, so that their memory is accounted for too.
"""

from collections.abc import Callable, Sequence
from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onerank.capture.fake_tensors import is_integral, sparse_parts
from onerank.capture.no_device.event_log import Shaped

_torch: Any = torch  # operators by name have no types


class Inner(NamedTuple):
    """An operator that another one calls.

    Attributes:
        name: with its namespace.
        args: its arguments.
        results: what it returns; None for what the outer operator returns.
    """

    name: str
    args: Sequence[Any]
    results: Sequence[Any] | None = None


# Takes an operator's arguments in the schema's order, and its result.
_Call = Callable[[Sequence[Any], Any], Inner | None]


def inner_of(name: str, args: Sequence[Any], result: Any) -> Inner | None:
    """Return the operator that an operator's CUDA implementation calls; None if it calls none.

    Args:
        name: its name, with its namespace.
        args: its arguments, in the schema's order.
        result: what it returned.
    """
    call = _INNER.get(name.removeprefix("aten::"))
    return call(args, result) if call is not None else None


def _gathered_in(args: Sequence[Any], result: Any) -> Inner:
    """`fsdp::all_gather_copy_in` copies the shards into views of its flat buffer."""
    shards, buffer = args[0], result[0]
    views = [Shaped(buffer, buffer.dtype, shard.shape) for shard in shards]
    return Inner("aten::_foreach_copy_", (views, [*shards], False), ())


def _split(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::split_with_sizes_copy", args)


def _concatenated(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::_chunk_cat", args, args[-1:])


def _dense_bag(args: Sequence[Any], _: Any) -> Inner | None:
    """A dense gradient of an embedding bag does not need the offsets (EmbeddingBag.cpp)."""
    gradient, indices, _offsets, *sizes, scales, mode, sparse, weights, padding = args
    if sparse:
        return None
    rest = (*sizes, scales, mode, weights, padding)
    return Inner("aten::_embedding_bag_dense_backward", (gradient, indices, *rest))


def _filled(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::fill_", (args[0], 0))


def _drawn(args: Sequence[Any], result: Any) -> Inner:
    # `randint(low, high, size)` has two numbers before the size, `randint(high, size)` one.
    numbers = [value for value in args[:3] if isinstance(value, int)]
    return Inner("aten::random_", (result, *([0, *numbers][-2:]), None))


def _drawn_normal(_: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::normal_", (result, 0.0, 1.0, None))


def _drawn_uniform(_: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::uniform_", (result, 0.0, 1.0, None))


def _put(args: Sequence[Any], _: Any) -> Inner:
    """`index_put_` fills where a mask is set if it is given one number (`canDispatchToMaskedFill`).

    `x[mask] = 0` leaves that number on the CPU.
    """
    tensor, indices, value, accumulate = args[:4]
    mask: Any = indices[0] if len(indices) == 1 else None
    fills = not accumulate and value.numel() == 1 and not value.is_cuda
    if fills and mask is not None and mask.dtype in (torch.bool, torch.uint8):
        shape = (*mask.shape, *[1] * (tensor.dim() - mask.dim()))
        return Inner("aten::masked_fill_", (tensor, Shaped(mask, mask.dtype, shape), 0))
    return Inner("aten::_index_put_impl_", (*args[:4], False))


_FEW_ROWS = 16


def _gathered(args: Sequence[Any], result: Any) -> Inner | None:
    """`index_select` gathers by an index that it expands over the other dimensions.

    Up to 16 rows have their own kernel (`indexSelectSmallIndex` in Indexing.cu).
    """
    tensor, dimension, index = args
    if tensor.dim() > 1 and index.numel() <= _FEW_ROWS:
        return None
    strides = [0] * result.dim()
    if strides:
        strides[dimension] = index.stride(0) if index.dim() else 1
    expanded = Shaped(index, index.dtype, result.shape, strides)
    return Inner("aten::gather", (tensor, dimension, expanded, False, result))


def _repeated(args: Sequence[Any], result: Any) -> Inner:
    """`repeat` copies into its output: for each axis, one of repeats and one of the input.

    The input is expanded along the axes of repeats.
    """
    tensor, repeats = args
    added = len(repeats) - tensor.dim()
    sizes = (*[1] * added, *tensor.shape)
    shape = (*repeats, *sizes)
    into = result.stride()
    repeated = [stride * size for stride, size in zip(into, sizes, strict=True)]
    expanded = (*[0] * len(repeats), *[0] * added, *tensor.stride())
    return Inner(
        "aten::copy_",
        (
            Shaped(result, result.dtype, shape, strides=(*repeated, *into)),
            Shaped(tensor, tensor.dtype, shape, strides=expanded),
            False,
        ),
    )


def _of_one_number(args: Sequence[Any], result: Any) -> Inner | None:
    """`all` and `any` of one element copy it (`allany_impl` in ReduceOps.cpp)."""
    if args[0].numel() != 1:
        return None
    flag = Shaped(result, torch.bool)
    return Inner("aten::copy_", (flag, flag, False))


def _added(args: Sequence[Any], _: Any) -> Inner | None:
    """`add_` of a sparse tensor adds its values by `index_add_` (SparseCUDATensorMath.cu).

    A sparse tensor that was coalesced has another kernel, with the same reads and writes.
    """
    target, other, alpha = args[:3]
    if not isinstance(other, Tensor) or other.layout != torch.sparse_coo:
        return None
    indices, values = sparse_parts(other)
    rows = Shaped(indices, indices.dtype, indices.shape[1:])
    return Inner("aten::index_add_", (target, 0, rows, values, alpha))


def _power(args: Sequence[Any], result: Any) -> Inner | None:
    """`pow` copies its input for an exponent of 1, and fills its output for 0."""
    base, exponent = args[:2]
    if isinstance(exponent, int | float) and exponent == 1:
        return Inner("aten::copy_", (result, base, False))
    if isinstance(exponent, int | float) and exponent == 0:
        return Inner("aten::fill_", (result, 1))
    return None


def _cudnn(args: Sequence[Any], _: Any) -> Inner:
    query, key, value, bias, log_sum, dropout, is_causal, debug, scale = args
    sizes = query.shape[2], key.shape[2]
    rest = log_sum, dropout, is_causal, debug, scale
    return Inner(
        "aten::_cudnn_attention_forward", (query, key, value, bias, None, None, *sizes, *rest)
    )


def _cudnn_backward(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::_cudnn_attention_backward", args)


def _flash(args: Sequence[Any], _: Any) -> Inner:
    query, key, value, dropout, is_causal, debug, scale = args
    sizes = query.shape[2], key.shape[2]
    # Flash attention's kernels take the sequence before the heads.
    turned = [_turned(tensor) for tensor in (query, key, value)]
    rest = dropout, is_causal, debug, scale
    return Inner("aten::_flash_attention_forward", (*turned, None, None, *sizes, *rest))


def _flash_backward(args: Sequence[Any], _: Any) -> Inner:
    turned = [_turned(tensor) for tensor in args[:5]]
    return Inner("aten::_flash_attention_backward", (*turned, *args[5:]))


def _efficient(args: Sequence[Any], _: Any) -> Inner:
    query, key, value, bias, log_sum, dropout, is_causal, scale = args
    turned = [_turned(tensor) for tensor in (query, key, value)]
    rest = None, None, None, None, dropout, int(is_causal), log_sum, scale
    return Inner("aten::_efficient_attention_forward", (*turned, bias, *rest))


def _efficient_backward(args: Sequence[Any], _: Any) -> Inner:
    gradient, query, key, value, bias, output, log_sum, seed, offset, *rest = args
    dropout, needed, is_causal, scale = rest
    turned = [_turned(tensor) for tensor in (gradient, query, key, value)]
    lengths = None, None, query.shape[2], key.shape[2]
    random = dropout, seed, offset
    options = int(is_causal), bool(needed[3]), scale, None, None, False
    return Inner(
        "aten::_efficient_attention_backward",
        (*turned, bias, _turned(output), *lengths, log_sum, *random, *options),
    )


def _packed(args: Sequence[Any], _: Any) -> Inner:
    """`varlen_attn` of torch.nn.attention calls FlashAttention."""
    query, key, value, *boundaries, longest_q, longest_k, is_causal, scale, window = args[:10]
    lengths = *boundaries, longest_q, longest_k
    # Not `enable_gqa`, argument 10. `alibi_slopes`, which is None, stands after `seqused_k`.
    optional = *args[11:12], None, *args[12:]
    rest = 0.0, is_causal, False, scale, *(window or (-1, -1)), *optional
    return Inner("aten::_flash_attention_forward", (query, key, value, *lengths, *rest))


def _packed_backward(args: Sequence[Any], _: Any) -> Inner:
    *tensors, longest_q, longest_k, is_causal, random, scale, window = args
    rest = 0.0, is_causal, random, None, scale, *(window or (-1, -1))
    return Inner("aten::_flash_attention_backward", (*tensors, longest_q, longest_k, *rest))


def _xformers(args: Sequence[Any], _: Any) -> Inner:
    """Call FlashAttention of torch, as xformers does unless flash_attn is installed."""
    *tensors, lengths_used, longest_q, longest_k, dropout, scale, is_causal = args[:11]
    left, right, _, block_table = args[11:15]
    rest = dropout, is_causal, False, scale, left, right, lengths_used, None, block_table
    return Inner("aten::_flash_attention_forward", (*tensors, longest_q, longest_k, *rest))


def _xformers_backward(args: Sequence[Any], _: Any) -> Inner:
    *tensors, dropout, scale, is_causal, left, right, random = args[1:]
    rest = dropout, is_causal, random, random, scale, left, right
    return Inner("aten::_flash_attention_backward", (*tensors, *rest))


_INNER: dict[str, _Call] = {
    "xformers_flash::flash_fwd": _xformers,
    "xformers_flash::flash_bwd": _xformers_backward,
    "torch_attn::_varlen_attn": _packed,
    "torch_attn::_varlen_attn_backward": _packed_backward,
    "fsdp::all_gather_copy_in": _gathered_in,
    "fsdp::split_with_sizes_copy": _split,
    "fsdp::chunk_cat": _concatenated,
    "_embedding_bag_backward": _dense_bag,
    "zero_": _filled,
    "randint": _drawn,
    "randint_like": _drawn,
    "randn": _drawn_normal,
    "randn_like": _drawn_normal,
    "rand": _drawn_uniform,
    "rand_like": _drawn_uniform,
    "index_put_": _put,
    "_index_put_impl_": _put,
    "index_select": _gathered,
    "pow": _power,
    "add_": _added,
    "repeat": _repeated,
    "all": _of_one_number,
    "any": _of_one_number,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


def _turned(tensor: Tensor) -> Shaped:
    """Return (batch, sequence, heads, head size) of a tensor whose heads come before."""
    batch, heads, length, size = tensor.shape
    return Shaped(tensor, tensor.dtype, (batch, length, heads, size))


def has_preparation(name: str) -> bool:
    """Return whether `run_before` may run operators before one of this name."""
    return name.removeprefix("aten::") in _BEFORE


def run_before(name: str, args: Sequence[Any]) -> object:
    """Run the operators that an operator's CUDA implementation calls before its own kernel.

    Args:
        name: its name, with its namespace.
        args: its arguments, in the schema's order; a tensor among them is on the GPU.

    Returns:
        Their results, whose memory is freed when the operator ends.
    """
    call = _BEFORE.get(name.removeprefix("aten::"))
    return call(args) if call is not None else None


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Convert the operand of a sum: integers and flags to 64 bits unless a dtype is given."""
    dtype = dtype or (torch.int64 if is_integral(tensor.dtype) else tensor.dtype)
    # The kernels that sum 16-bit numbers in float32 convert them as they read them.
    widened = tensor.dtype in (torch.float16, torch.bfloat16) and dtype == torch.float32
    if dtype == tensor.dtype or widened:
        return None
    return _torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def _operand_in_dtype(args: Sequence[Any]) -> Tensor | None:
    # Overloads have the dtype at different places, and an out-variant has the result after it.
    dtypes = [value for value in args if isinstance(value, torch.dtype)]
    return _converted(args[0], dtypes[0] if dtypes else None)


def _weighted(args: Sequence[Any]) -> Tensor:
    """`softmax_backward_cuda_out` multiplies the gradient by the output first (SoftMax.cu)."""
    return args[0] * args[1]


def _first_contiguous(args: Sequence[Any]) -> list[Tensor]:
    """Norms and softmax copy an operand that is not contiguous (SoftMax.cu)."""
    return _copies(args[:1])


def _two_contiguous(args: Sequence[Any]) -> list[Tensor]:
    """The backward of a norm copies its gradient and its input."""
    return _copies(args[:2])


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors if not tensor.is_contiguous()]


def _depthwise_contiguous(args: Sequence[Any]) -> list[Tensor]:
    """A depthwise convolution by torch's own kernel copies its input (Convolution.cpp)."""
    return _copies(args[:1]) if _is_own_depthwise(args[0], args[1]) else []


def _depthwise_backward_contiguous(args: Sequence[Any]) -> list[Tensor]:
    """Its backward copies the gradient for each of its kernels, and the input for one."""
    gradient, image, weight = args[:3]
    if not _is_own_depthwise(image, weight):
        return []
    of_image, of_weight = args[-1][:2]
    return _copies([gradient] * of_image + [gradient, image] * of_weight)


def _is_own_depthwise(image: Tensor, weight: Tensor) -> bool:
    """Return whether torch's own kernel runs a convolution: depthwise, not channels last."""
    depthwise = weight.shape[1] == 1 and image.shape[1] == weight.shape[0] > 1
    channels_last = image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
    return depthwise and not channels_last


def _lengths_on_host(args: Sequence[Any]) -> list[Tensor]:
    """`ctc_loss` copies both lengths to the host, where its kernels' arguments are computed."""
    lengths = [each for each in args[2:4] if isinstance(each, Tensor)]
    return [each.to(device="cpu", dtype=torch.int64) for each in lengths]


def _ends(args: Sequence[Any]) -> Tensor:
    """`repeat_interleave` sums up the repeats (Repeat.h)."""
    return args[0].cumsum(0)


# FSDP2's copies take a list of addresses and a split of each tensor among blocks, which the host
# writes and copies to the GPU (`pack_vecs` in TensorShape.cu).
_TILE_BYTES = 128 * 16

_BLOCK_THREADS = 128


def _split_plan(args: Sequence[Any]) -> Tensor:
    """Copy what `split_with_sizes_copy` packs: three numbers per part, one per block, one more."""
    tensor, sizes, dimension = args[:3]
    chunk_bytes = [int(size) * tensor.stride(dimension) * tensor.element_size() for size in sizes]
    chunks = tensor.shape[:dimension].numel()
    gpu: Any = torch.cuda.get_device_properties(tensor.device)
    most = gpu.multi_processor_count * gpu.max_threads_per_multi_processor // _BLOCK_THREADS * 2
    tiles = sum(ceil(size / _TILE_BYTES) for size in chunk_bytes)
    rounds = ceil(tiles * chunks / most)
    per_chunk = ceil(rounds / min(ceil(sqrt(rounds)), chunks))
    blocks = sum(ceil(size / (_TILE_BYTES * per_chunk)) for size in chunk_bytes)
    return _from_host(4 * len(sizes) + 1 + blocks)


def _concatenation_plan(args: Sequence[Any]) -> Tensor:
    """Copy what `_chunk_cat` packs: six numbers per tensor, one per block, two more."""
    tensors, dimension, chunks, result = args
    blocks = 0
    for tensor in tensors:
        rows = ceil(tensor.shape[dimension] / chunks)
        elements = rows * tensor.shape[dimension + 1 :].numel()
        blocks += ceil(elements * result.element_size() / _TILE_BYTES)
    return _from_host(6 * len(tensors) + 2 + blocks)


def _from_host(numbers: int) -> Tensor:
    packed = torch.empty(numbers, dtype=torch.int64, device="cpu")
    return _torch.ops.aten._to_copy.default(packed, device=torch.device("cuda"), non_blocking=True)


def _random_state(args: Sequence[Any]) -> Tensor:
    """`varlen_attn` returns zeros for the random state of a dropout that it does not have."""
    return torch.zeros(2, dtype=torch.int64, device=args[0].device)


_BEFORE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "sum": _operand_in_dtype,
    "nansum": _operand_in_dtype,
    "prod": _operand_in_dtype,
    "cumsum": _operand_in_dtype,
    "cumprod": _operand_in_dtype,
    "native_layer_norm": _first_contiguous,
    "native_layer_norm_backward": _two_contiguous,
    "_fused_rms_norm": _first_contiguous,
    "_fused_rms_norm_backward": _two_contiguous,
    "_softmax": _first_contiguous,
    "_log_softmax": _first_contiguous,
    "_softmax_backward_data": _weighted,
    "convolution": _depthwise_contiguous,
    "convolution_backward": _depthwise_backward_contiguous,
    "_ctc_loss": _lengths_on_host,
    "repeat_interleave": _ends,
    "torch_attn::_varlen_attn": _random_state,
    "fsdp::split_with_sizes_copy": _split_plan,
    "fsdp::chunk_cat": _concatenation_plan,
}
