"""Operators whose CUDA implementation calls another operator, which launches the kernel.

A profile shows the inner operator inside the outer one, and a graph has the inner one. A CPU build
of torch has no CUDA implementations, so they are listed here; each was seen in captures on an H100
and an H200 (torch 2.11).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shaped:
    """An operand of which only the shape and the dtype are known."""

    def __init__(
        self, like: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> None:
        self.storage = like
        self.shape = list(like.shape if shape is None else shape)
        self.dtype = dtype


@dataclass(frozen=True)
class WrappedNumber:
    """A Python number that an operator takes as a tensor; an execution trace shows it as one."""

    value: complex

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that torch makes of it."""
        match self.value:
            case bool():
                return torch.bool
            case int():
                return torch.int64
            case float():
                return torch.float64
            case _:
                return torch.complex128


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


def _gathered_in(args: Sequence[Any], _: Any) -> Inner:
    """`fsdp::all_gather_copy_in` copies the shards into views of its flat buffer."""
    shards = args[0]
    return Inner(
        "aten::_foreach_copy_", ([Shaped(t, t.dtype) for t in shards], [*shards], False), ()
    )


def _split(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::split_with_sizes_copy", args)


def _concatenated(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::_chunk_cat", args, args[-1:])


def _filled(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::fill_", (args[0], 0))


def _drawn(_: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::random_", (result, None))


def _drawn_normal(_: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::normal_", (result, 0.0, 1.0, None))


def _drawn_uniform(_: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::uniform_", (result, 0.0, 1.0, None))


def _put(args: Sequence[Any], _: Any) -> Inner:
    return Inner("aten::_index_put_impl_", (*args, False))


def _gathered(args: Sequence[Any], result: Any) -> Inner:
    tensor, dimension, index = args
    return Inner("aten::gather", (tensor, dimension, Shaped(result, index.dtype), False))


def _copied(args: Sequence[Any], result: Any) -> Inner:
    return Inner("aten::copy_", (result, args[0], False))


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


_INNER: dict[str, _Call] = {
    "fsdp::all_gather_copy_in": _gathered_in,
    "fsdp::split_with_sizes_copy": _split,
    "fsdp::chunk_cat": _concatenated,
    "zero_": _filled,
    "randint": _drawn,
    "randint_like": _drawn,
    "randn": _drawn_normal,
    "randn_like": _drawn_normal,
    "rand": _drawn_uniform,
    "rand_like": _drawn_uniform,
    "index_put_": _put,
    "index_select": _gathered,
    "pow": _power,
    "repeat": _copied,
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
