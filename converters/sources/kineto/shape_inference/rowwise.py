"""Results of reductions, norms, softmaxes, losses and embedding look-ups."""

from onerank.converters.sources.kineto.shape_inference.elementwise import broadcast, like
from onerank.converters.sources.kineto.shape_inference.inputs import (
    Inputs,
    Result,
    Shape,
    Tensor,
    asked,
    kind,
    named,
    promoted,
)

_INT64 = named("int64")


def _left(shape: Shape, dims: list[int] | None, *, keep: bool) -> Shape | None:
    """Return what a reduction over `dims` leaves of a shape; None or []: over all."""
    rank = len(shape)
    if any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims or ()):
        return None
    gone = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    kept = [(1 if at in gone else size, at in gone) for at, size in enumerate(shape)]
    return tuple(size for size, reduced in kept if keep or not reduced)


def _reduced(given: Inputs, at: int) -> tuple[Tensor, Shape] | None:
    """Return the operand and what is left, `at` being where dimensions and `keepdim` stand."""
    own = given.tensor(0)
    if own is None:
        return None
    told = len(given) > at + 1
    if told and given.value(at) is None and given.types[at] != "None":
        return None  # of an old trace, without values
    one = given.value(at) if told else None
    dims = [one] if type(one) is int else given.numbers(at) if told else None
    shape = _left(own.shape, dims, keep=told and given.value(at + 1) is True)
    return None if shape is None else (own, shape)


def _sum(at: int, *, types: int | None, counts: bool = False):
    def rule(given: Inputs) -> tuple[Result, ...] | None:
        found = _reduced(given, at)
        if found is None:
            return None
        own, shape = found
        made = _INT64 if counts and kind(own.type) < 2 else own.type
        position = (types if len(given) > at + 1 else 1) if types is not None else len(given)
        return (Tensor(shape, asked(given, position, made)),)

    return rule


def _as(name: str):
    def rule(given: Inputs) -> tuple[Result, ...] | None:
        found = _reduced(given, 1)
        return None if found is None else (Tensor(found[1], name),)

    return rule


def _extreme(given: Inputs) -> tuple[Result, ...] | None:
    """Of max and min: of all, along a dimension (with places), or of two tensors."""
    own, other = given.tensor(0), given.tensor(1)
    if own is None:
        return None
    if other is not None:
        shape = broadcast([own.shape, other.shape])
        return None if shape is None else (Tensor(shape, promoted([own, other])),)
    if len(given) < 3:
        return (Tensor((), own.type),)
    found = _reduced(given, 1)
    return None if found is None else (Tensor(found[1], own.type), Tensor(found[1], _INT64))


def _layer_norm(given: Inputs) -> tuple[Result, ...] | None:
    own, sizes = given.tensor(0), given.numbers(1)
    if own is None:
        return None
    count = len((given.tensor(2) or own).shape) if sizes is None else len(sizes)
    rows = own.shape[: len(own.shape) - count] + (1,) * count
    half = kind(own.type) == 2 and own.type not in ("float", "double")
    saved = Tensor(rows, "float" if half else own.type)
    return own, saved, saved


def _rms_norm(given: Inputs) -> tuple[Result, ...] | None:
    found = _layer_norm(given)
    return found and found[:2]


def _gradients(operands: tuple[int, ...], mask: int | None):
    """Return the rule of backward passes: gradients like the inputs at these positions."""

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        found: list[Result] = [given.tensor(at) for at in operands]
        if found[0] is None:
            return None
        wanted = given.list_of(mask) if mask is not None else None
        wanted = wanted or [True] * len(found)
        return tuple(one if ask else None for one, ask in zip(found, wanted, strict=False))

    return rule


def _batch_norm(given: Inputs) -> tuple[Result, ...] | None:
    own, training = given.tensor(0), given.value(5)
    if own is None or len(own.shape) < 2:
        return None
    half = kind(own.type) == 2 and own.type not in ("float", "double")
    saved = Tensor((own.shape[1] if training is not False else 0,), "float" if half else own.type)
    return own, saved, saved


def _group_norm(given: Inputs) -> tuple[Result, ...] | None:
    own, groups = given.tensor(0), given.value(6)
    if own is None or not own.shape or type(groups) is not int:
        return None if own is None else (own,)
    saved = Tensor((own.shape[0], groups), own.type)
    return own, saved, saved


def _softmax(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    if own is None:
        return None
    return (Tensor(own.shape, "float" if given.value(2) is True else own.type),)


def _softmax_backward(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    return None if own is None else (Tensor(own.shape, asked(given, 3, own.type)),)


def _loss(reduction: int):
    """Return the rule of a loss of two tensors: one number, unless it is not to be reduced."""

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        own, target, how = given.tensor(0), given.tensor(1), given.value(reduction)
        if own is None or target is None or (how is None and len(given) > reduction):
            return None
        shape = broadcast([own.shape, target.shape]) if how == 0 else ()
        return None if shape is None else (Tensor(shape, own.type),)

    return rule


def _nll_loss(given: Inputs) -> tuple[Result, ...] | None:
    own, target, how = given.tensor(0), given.tensor(1), given.value(3)
    if own is None or target is None or how is None:
        return None
    return Tensor(target.shape if how == 0 else (), own.type), Tensor((), own.type)


def _embedding(given: Inputs) -> tuple[Result, ...] | None:
    table, index = given.tensor(0), given.tensor(1)
    if table is None or index is None or not table.shape:
        return None
    return (Tensor((*index.shape, *table.shape[1:]), table.type),)


def _embedding_backward(count: int):
    def rule(given: Inputs) -> tuple[Result, ...] | None:
        grad, rows = given.tensor(0), given.value(count)
        if grad is None or not grad.shape or type(rows) is not int:
            return None
        return (Tensor((rows, grad.shape[-1]), grad.type),)

    return rule


def _embedding_bag(given: Inputs) -> tuple[Result, ...] | None:
    table, index, offsets = (given.tensor(at) for at in range(3))
    if table is None or index is None or offsets is None or not table.shape:
        return None
    bags = offsets.numel - (1 if given.value(8) is True else 0)
    made = Tensor((bags, *table.shape[1:]), table.type)
    each = Tensor((bags,), index.type)
    return made, Tensor((0,), index.type), each, each


def _index_select(given: Inputs) -> tuple[Result, ...] | None:
    own, dim, index = given.tensor(0), given.value(1), given.tensor(2)
    if own is None or index is None or type(dim) is not int or not own.shape:
        return None
    place = dim % len(own.shape)
    return (Tensor((*own.shape[:place], index.numel, *own.shape[place + 1 :]), own.type),)


def _gather(given: Inputs) -> tuple[Result, ...] | None:
    own, index = given.tensor(0), given.tensor(2)
    return None if own is None or index is None else (Tensor(index.shape, own.type),)


def _sort(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    return None if own is None else (own, Tensor(own.shape, _INT64))


def _argsort(given: Inputs) -> tuple[Result, ...] | None:
    found = _sort(given)
    return found and found[1:]


def _topk(given: Inputs) -> tuple[Result, ...] | None:
    own, count, dim = given.tensor(0), given.value(1), given.value(2)
    if own is None or type(count) is not int or type(dim) is not int or not own.shape:
        return None
    place = dim % len(own.shape)
    shape = (*own.shape[:place], count, *own.shape[place + 1 :])
    return Tensor(shape, own.type), Tensor(shape, _INT64)


RULES = {
    "sum": _sum(1, types=3, counts=True),
    "nansum": _sum(1, types=3, counts=True),
    "mean": _sum(1, types=3),
    "prod": _sum(1, types=3, counts=True),
    "amax": _sum(1, types=None),
    "amin": _sum(1, types=None),
    "logsumexp": _sum(1, types=None),
    "linalg_vector_norm": _sum(2, types=4),
    **dict.fromkeys(("all", "any"), _as("bool")),
    **dict.fromkeys(("argmax", "argmin"), _as(_INT64)),
    **dict.fromkeys(("max", "min"), _extreme),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _gradients((1, 5, 6), 7),
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _gradients((1, 4), 5),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _batch_norm),
    "native_batch_norm_backward": _gradients((1, 2, 2), 9),
    "cudnn_batch_norm_backward": _gradients((0, 2, 2), None),
    "miopen_batch_norm_backward": _gradients((0, 2, 2), None),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _gradients((1, 4, 4), 9),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    "mse_loss": _loss(2),
    "smooth_l1_loss": _loss(2),
    "huber_loss": _loss(2),
    "binary_cross_entropy": _loss(3),
    "binary_cross_entropy_with_logits": _loss(4),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(
        "nll_loss_backward nll_loss2d_backward mse_loss_backward smooth_l1_loss_backward "
        "huber_loss_backward binary_cross_entropy_backward".split(),
        like(1),
    ),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward(2),
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_dense_backward": _embedding_backward(5),
    "index_select": _index_select,
    "gather": _gather,
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
}
