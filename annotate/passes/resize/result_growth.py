"""How the results of a call grow, by rules of operators, shapes and sizes of the operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from onerank.annotate.op_costs.gemm import CONVOLUTIONS
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.size_change import CONSTANT, Power, Powers, total

Shape = tuple[int, ...]

NEED_VALUES = frozenset(
    "sum mean amax amin prod norm linalg_vector_norm std var any all argmax argmin logsumexp "
    "max min cat stack index_select gather".split()
)
"""Operators whose results depend on argument values."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call, and the powers of the call's operands.

    Attributes:
        call: the call.
        by_argument: for each argument, the powers of its tensors; () for other arguments.
        index: index of the result.
        shape: its captured shape.
    """

    call: Call
    by_argument: Sequence[tuple[Powers, ...]]
    index: int
    shape: Shape

    def powers_of(self, argument: int) -> Powers | None:
        """Return the powers of an argument's first tensor; None if it has none."""
        if argument >= len(self.by_argument):
            return None
        return next(iter(self.by_argument[argument]), None)


Rule = Callable[[Result], Powers | None]
"""Returns the powers of a result; None if the rule does not apply."""


def _reduction(result: Result) -> Powers | None:
    """Rule for reductions: drop the reduced dimensions, or make them constant."""
    call, shape = result.call, result.shape
    x, powers = call.tensor(0), result.powers_of(0) or ()
    if x is None or not shape:
        return ()
    axis_lists = [cast("list[Any]", value) for value in call.values[1:] if isinstance(value, list)]
    axes: list[Any] = (
        axis_lists[0] if axis_lists else [value for value in call.values[1:2] if type(value) is int]
    )
    reduced_axes = {int(axis) % len(x.shape) for axis in axes if isinstance(axis, int)}
    if len(shape) == len(x.shape):
        pairs = enumerate(zip(shape, x.shape, powers, strict=True))
        return tuple(
            power if a == b and axis not in reduced_axes else CONSTANT
            for axis, (a, b, power) in pairs
        )
    return tuple(power for axis, power in enumerate(powers) if axis not in reduced_axes)


def _cat(result: Result) -> Powers | None:
    """Rule for `cat`: the largest power of any part per dimension."""
    parts = [powers for powers in result.by_argument[0] if len(powers) == len(result.shape)]
    if not parts:
        return None
    # A constant part, such as a class token, joins one that grows.
    return tuple(max(powers[axis] for powers in parts) for axis in range(len(result.shape)))


def _stack(result: Result) -> Powers | None:
    """Rule for `stack`: one more dimension, which is constant."""
    axis, powers = result.call.value(1), result.powers_of(0)
    if powers is None or not isinstance(axis, int):
        return None
    at = axis % len(result.shape)
    return (*powers[:at], CONSTANT, *powers[at:])


def _embedding(result: Result) -> Powers | None:
    """Rule for `embedding`: one row of the table per index."""
    table, indices = result.powers_of(0), result.powers_of(1)
    return None if table is None or indices is None else (*indices, *table[1:])


def _index_select(result: Result) -> Powers | None:
    """Rule for `index_select`: the axis has the powers of the indices."""
    axis, powers, indices = result.call.value(1), result.powers_of(0), result.powers_of(2)
    if not isinstance(axis, int) or powers is None or not indices:
        return None
    at = axis % len(powers)
    return (*powers[:at], indices[0], *powers[at + 1 :])


def _index(result: Result) -> Powers | None:
    """Rule for `index` by integers: their dimensions replace the indexed ones.

    Sizes show which dimensions are indexed, because a call does not record omitted indices.
    """
    call, shape = result.call, result.shape
    x, indices = call.tensor(0), call.inputs[1] if len(call.inputs) > 1 else None
    powers = result.powers_of(0)
    if (
        x is None
        or not indices
        or powers is None
        or any(index.dtype == "bool" for index in indices)
    ):
        return None
    index_powers, count = result.by_argument[1][0], len(indices)
    for first_axis in range(len(powers) - count + 1):
        if (*x.shape[:first_axis], *indices[0].shape, *x.shape[first_axis + count :]) == shape:
            return (*powers[:first_axis], *index_powers, *powers[first_axis + count :])
    return (*index_powers, *powers[count:])


def _like_argument(argument: int) -> Rule:
    """Return the rule for a result that grows like an argument."""
    return lambda result: result.powers_of(argument)


def _constant(result: Result) -> Powers:
    """Rule for an embedding's gradient: weights do not grow."""
    return (CONSTANT,) * len(result.shape)


def _embedding_bag(result: Result) -> Powers | None:
    """Rule for `_embedding_bag`: one row per bag; further results are per index or per bag."""
    indices, bags = result.powers_of(1), result.powers_of(2)
    if not indices or not bags or result.index > 2:
        return None
    return ((bags[0], CONSTANT), indices, bags)[result.index]


def _attention(result: Result) -> Powers | None:
    """Rule for attention: results have the query's powers, log-sums its first three."""
    query, shape = result.powers_of(0), result.shape
    if query is None or result.index == 0:
        return query
    if len(shape) == 4 and shape[-1] == 1:
        return (*query[:3], CONSTANT)  # cuDNN's log-sums
    # The other results are seeds and offsets of dropout, whose sizes are constant.
    return query[: len(shape)] if len(shape) in (3, 4) and shape[-1] != 1 else None


def _convolution(result: Result) -> Powers | None:
    """Rule for convolutions: batch and spatial dimensions keep their powers."""
    # Sizes without rules lose the sequence behind a padded convolution, as a Mamba has.
    x = result.powers_of(0)
    return (x[0], CONSTANT, *x[2:]) if x else None


def _recurrent_layer(result: Result) -> Powers | None:
    """Rule for recurrent layers: one state per token, and a workspace for backward."""
    x = result.powers_of(0)
    if x is None:
        return None
    if result.index == 0:
        return (*x[:-1], CONSTANT)
    return (total(x),) if result.index == 3 and len(result.shape) == 1 else None


def _topk(result: Result) -> Powers | None:
    """Rule for `topk`: a constant number of elements in the last dimension."""
    x = result.powers_of(0)
    return (*x[:-1], CONSTANT) if x else None


BAGS = ("_embedding_bag", "_embedding_bag_forward_only")

FORWARD_CONVOLUTIONS = CONVOLUTIONS.keys() - {"convolution_backward"}

# A rule may return powers of another number of dimensions than the result has; they are not used.
RULES: dict[str, Rule] = {
    **dict.fromkeys(NEED_VALUES, _reduction),
    "cat": _cat,
    "stack": _stack,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _like_argument(2),
    "index": _index,
    **dict.fromkeys(BAGS, _embedding_bag),
    "_embedding_bag_dense_backward": _constant,
    "embedding_dense_backward": _constant,
    "embedding_backward": _constant,
    # Its first input is the gradient of the loss, mostly a scalar.
    "nll_loss_backward": _like_argument(1),
    **dict.fromkeys(FORWARD_CONVOLUTIONS, _convolution),
    **dict.fromkeys(
        ("copy_", "constant_pad_nd", "pad", "sort", "scatter_add_"), _like_argument(0)
    ),
    "topk": _topk,
    "mkldnn_rnn_layer": _recurrent_layer,
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
         "scaled_dot_product_attention", "_flash_attention_forward", "_cudnn_attention_forward",
         "_efficient_attention_forward"), _attention,
    ),
}  # fmt: skip


def powers_of_results(
    call: Call, tensors: list[Tensor], inputs: list[Powers], results: Sequence[Shape]
) -> tuple[list[Powers], bool]:
    """Return the powers of each result, and whether a rule determined them, not sizes.

    Args:
        call: the call.
        tensors: its input tensors, lists flattened.
        inputs: the powers of each.
        results: the shape of each result.
    """
    by_argument = _group_by_argument(call, inputs)
    rule = RULES.get(call.op)
    outputs: list[Powers] = []
    ruled = True
    for index, shape in enumerate(results):
        powers = rule(Result(call, by_argument, index, shape)) if rule else None
        if powers is None or len(powers) != len(shape):
            powers = _same_shape(tensors, inputs, shape) or _broadcast_powers(
                tensors, inputs, shape
            )
        if powers is None:
            powers, ruled = _by_size(tensors, inputs, shape), not shape and ruled
        outputs.append(powers)
    return outputs, ruled


def _group_by_argument(call: Call, inputs: Sequence[Powers]) -> list[tuple[Powers, ...]]:
    """Return the powers by argument."""
    grouped, start = list[tuple[Powers, ...]](), 0
    for operand in call.inputs:
        count = len(operand or ())
        grouped.append(tuple(inputs[start : start + count]))
        start += count
    return grouped


def _same_shape(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers | None:
    """Return the powers of the first input of the same shape."""
    return next((p for t, p in zip(tensors, inputs, strict=True) if t.shape == shape), None)


def _broadcast_powers(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers | None:
    """Return the powers of a result that the inputs are broadcast to, or None."""
    result: list[Power] = [CONSTANT] * len(shape)
    is_covered: list[bool] = [size == 1 for size in shape]
    for tensor, powers in zip(tensors, inputs, strict=True):
        offset = len(shape) - len(tensor.shape)
        if offset < 0:
            return None
        for axis, (size, power) in enumerate(zip(tensor.shape, powers, strict=True), offset):
            if size == shape[axis]:
                is_covered[axis] = True
                result[axis] = result[axis] if result[axis] != CONSTANT else power
            elif size != 1:
                return None
    return tuple(result) if all(is_covered) else None


def _by_size(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers:
    """Return for each size the power of the first unused input dimension of that size.

    This is the fallback for operators without a rule, and a wrong guess if two dimensions of one
    size grow differently.
    """
    free = [
        pair
        for tensor, powers in zip(tensors, inputs, strict=True)
        for pair in zip(tensor.shape, powers, strict=True)
    ]
    result: list[Power] = []
    for size in shape:
        match = next((pair for pair in free if pair[0] == size), None)
        if match is not None:
            free.remove(match)
        result.append(match[1] if match else CONSTANT)
    return tuple(result)
