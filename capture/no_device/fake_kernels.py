"""Shapes of the results of GPU operators whose fake implementation is missing or wrong in torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops, utils

_library: Any = utils  # private in torch, without types
_custom: Any = custom_ops


def lacks_fake(func: Any) -> bool:
    """Whether an operator has no fake implementation, which would give its results' shapes."""
    definition = _custom.OPDEFS.get(func._schema.name)
    # torch gives each custom operator an implementation that may only raise.
    if definition is not None:
        return definition._abstract_fn is None
    return not _library.has_fake_kernel(func)


def _statistics(source: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return a mean and a scale per channel, in 32 bits for inputs of 16."""
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    channels = source.shape[1]
    mean = source.new_empty((channels,), dtype=dtype)
    return mean, torch.empty_like(mean)


def _gathered_statistics(_: Tensor, means: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    """Return the statistics of all ranks, from (ranks, channels) means."""
    return means.new_empty(means.shape[1:]), means.new_empty(means.shape[1:])


def _gradient_sums(*args: Any) -> tuple[Tensor | None, ...]:
    """Return the sums for the gradients of input, weight and bias, of those that are wanted."""
    _, _, mean, _, weight, of_input, of_weight, of_bias = args
    sums = [torch.empty_like(mean) if of_input else None for _ in range(2)]
    like = weight if weight is not None else mean
    return *sums, *(torch.empty_like(like) if wanted else None for wanted in (of_weight, of_bias))


def _like_second(_: Tensor, second: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(second)


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of groups of rows, of inner elements or of matrices.

    torch's fake implementation refuses types other than bfloat16, which a GPU takes.
    """
    del bias
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        # Two matrices are grouped along their inner size, so torch requires the ends of groups.
        assert ends is not None
        shape: tuple[int, ...] = (ends.shape[0], rows, columns)
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _attention_gradients(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *__: Any, **___: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and bias.

    torch's fake implementation lacks the argument `out`, so it takes each later one for the next.
    """
    like_bias = query.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), like_bias


SHAPES: dict[str, Callable[..., Any]] = {
    "_efficient_attention_backward": _attention_gradients,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _gathered_statistics,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _gradient_sums,
    "batch_norm_backward_elemt": _like_second,
}
"""Operator without `aten::` -> function of its arguments that returns empty results."""


def shapes_of(base: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function that gives the results of an operator; None if torch has one.

    Args:
        base: its name without `aten::`.
        args: its positional arguments.
    """
    if base == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        return _grouped_product
    return SHAPES.get(base)
