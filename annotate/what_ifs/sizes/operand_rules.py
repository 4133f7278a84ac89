"""How the results of an operator grow, by what it does with its operands."""

from collections.abc import Callable
from typing import Any, cast

from onerank.annotate.what_ifs.sizes.dimensions import Powers
from onerank.annotate.what_ifs.sizes.sizing import CONSTANT, total
from onerank.annotate.work.convolutions import FORMULAS
from onerank.annotate.work.shapes import Call

Shape = tuple[int, ...]

NEED_VALUES = frozenset(
    "sum mean amax amin prod norm linalg_vector_norm std var any all argmax argmin logsumexp "
    "max min cat stack index_select".split()
)
"""Operators whose results cannot be told without argument values."""

Rule = Callable[[Call, list[tuple[Powers, ...]], int, Shape], Powers | None]
"""(call, powers by argument, place of the result, its shape) -> its powers; None: not told here."""


def _reduced(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Leave out, or make one, the dimensions that are summed over."""
    x, (powers, *_rest) = call.tensor(0), by_place[0] or ((),)
    if x is None or not shape:
        return ()
    lists = [cast("list[Any]", v) for v in call.values[1:] if isinstance(v, list)]
    over: list[Any] = lists[0] if lists else [v for v in call.values[1:2] if type(v) is int]
    gone = {int(axis) % len(x.shape) for axis in over if isinstance(axis, int)}
    if len(shape) == len(x.shape):
        pairs = enumerate(zip(shape, x.shape, powers, strict=True))
        return tuple(p if a == b and axis not in gone else CONSTANT for axis, (a, b, p) in pairs)
    kept = tuple(p for axis, p in enumerate(powers) if axis not in gone)
    return kept if len(kept) == len(shape) else None


def _joined(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Of `cat`: what any of the parts grows with."""
    parts = [p for p in by_place[0] if len(p) == len(shape)]
    return tuple(max(p[axis] for p in parts) for axis in range(len(shape))) if parts else None


def _stacked(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    axis = call.value(1)
    if not by_place[0] or not isinstance(axis, int):
        return None
    made = list(by_place[0][0])
    made.insert(axis % len(shape), CONSTANT)
    return tuple(made)


def _picked(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    """Of `embedding`: a row of the table for each index."""
    return (*by_place[1][0], *by_place[0][0][1:]) if by_place[0] and by_place[1] else None


def _selected(call: Call, by_place: list[tuple[Powers, ...]], _: int, ___: Shape) -> Powers | None:
    """Of `index_select`: as many along the axis as there are indices."""
    axis = call.value(1)
    if not isinstance(axis, int) or len(by_place) < 3:
        return None
    if not by_place[0] or not by_place[2] or not by_place[2][0]:
        return None
    made = list(by_place[0][0])
    made[axis % len(made)] = by_place[2][0][0]
    return tuple(made)


def _indexed(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Of `index` by integers: theirs in place of the dimensions that they index, first or later.

    Which these are is told by the sizes, as a call does not tell of those that it leaves out.
    """
    x, indices = call.tensor(0), call.inputs[1] if len(call.inputs) > 1 else None
    if x is None or not indices or not by_place[0] or any(one.dtype == "bool" for one in indices):
        return None
    powers, inner, count = by_place[0][0], by_place[1][0], len(indices)
    for lead in range(len(powers) - count + 1):
        if (*x.shape[:lead], *indices[0].shape, *x.shape[lead + count :]) == shape:
            return (*powers[:lead], *inner, *powers[lead + count :])
    made = (*inner, *powers[count:])
    return made if len(made) == len(shape) else None


def _of_index(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    """Of `gather`: the shape of the indices."""
    return by_place[2][0] if len(by_place) > 2 and by_place[2] else None


def _of_table(_: Call, __: list[tuple[Powers, ...]], ___: int, shape: Shape) -> Powers:
    """Of an embedding's gradient: nothing of a weight grows."""
    return (CONSTANT,) * len(shape)


def _bagged(_: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape) -> Powers | None:
    """Of `_embedding_bag`: a row for each bag; what else it tells is of indices or of bags."""
    indices, bags = by_place[1], by_place[2]
    if not indices or not bags:
        return None
    return ((bags[0][0], CONSTANT), indices[0], bags[0])[place] if place < 3 else None


def _of_second(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    return by_place[1][0] if len(by_place) > 1 and by_place[1] else None


def _of_first(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    return by_place[0][0] if by_place and by_place[0] else None


def _attended(
    _: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape
) -> Powers | None:
    """Of attention: the result as the query; the softmax's sums have its first three sizes."""
    query = by_place[0][0]
    if place == 0:
        return query
    return query[: len(shape)] if len(shape) in (3, 4) and shape[-1] != 1 else None


def _convolved(_: Call, by_place: list[tuple[Powers, ...]], __: int, shape: Shape) -> Powers | None:
    """Of a convolution: the batch; what is along the sizes keeps its powers."""
    x = by_place[0][0]
    return (x[0], CONSTANT, *x[2:]) if len(x) == len(shape) else None


def _recurrent(
    _: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape
) -> Powers | None:
    """Of a recurrent layer: a state for each token; what backward needs of the forward pass."""
    x = by_place[0][0]
    if place == 0 and len(x) == len(shape):
        return (*x[:-1], CONSTANT)
    return (total(x),) if place == 3 and len(shape) == 1 else None


def _chosen(_: Call, by_place: list[tuple[Powers, ...]], __: int, shape: Shape) -> Powers | None:
    """Of `topk`: as many of the last dimension as were asked for."""
    x = by_place[0][0] if by_place and by_place[0] else ()
    return (*x[:-1], CONSTANT) if len(x) == len(shape) > 0 else None


BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
CONVOLUTIONS = FORMULAS.keys() - {"convolution_backward"}

RULES: dict[str, Rule] = {
    **dict.fromkeys(NEED_VALUES, _reduced),
    "cat": _joined,
    "stack": _stacked,
    "embedding": _picked,
    "index_select": _selected,
    "gather": _of_index,
    "index": _indexed,
    **dict.fromkeys(BAGS, _bagged),
    "_embedding_bag_dense_backward": _of_table,
    "embedding_dense_backward": _of_table,
    "embedding_backward": _of_table,
    "nll_loss_backward": _of_second,
    **dict.fromkeys(CONVOLUTIONS, _convolved),
    **dict.fromkeys(("copy_", "constant_pad_nd", "pad", "sort", "scatter_add_"), _of_first),
    "topk": _chosen,
    "mkldnn_rnn_layer": _recurrent,
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
         "scaled_dot_product_attention", "_flash_attention_forward", "_cudnn_attention_forward",
         "_efficient_attention_forward"), _attended,
    ),
}  # fmt: skip
