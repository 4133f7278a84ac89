"""Result shapes and dtypes of operators, one rule per operator; `results_of` is the entry point.

Rules of matrix products, attention, convolutions and pooling are in `matmul`.
"""

from onerank.converters.sources.kineto.shape_inference.inputs import (
    Inputs,
    Result,
    Rule,
    Shape,
    TensorShape,
    broadcast,
    cpp_name,
    like,
    promote_types,
    requested_type,
    type_category,
)
from onerank.converters.sources.kineto.shape_inference.matmul import PRODUCT_RULES

_LIKE_FIRST = """
    abs neg exp exp2 expm1 log log2 log10 log1p sin cos tan tanh asin acos atan sinh cosh
    sigmoid sqrt rsqrt reciprocal square sign ceil floor round trunc frac erf erfc lgamma
    digamma relu relu6 silu gelu softplus hardtanh hardswish hardsigmoid leaky_relu elu selu
    celu mish log_sigmoid clamp clamp_min clamp_max tril triu bitwise_not masked_fill clone
    contiguous cumprod flip roll alias detach nan_to_num dropout alpha_dropout
    masked_scatter index_add index_copy index_fill index_put _unsafe_index_put scatter
    scatter_add scatter_reduce renorm conj_physical logit"""
# Operators whose result is floating point also for integers.
_FLOATING = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan tanh asin acos atan sinh cosh sigmoid sqrt
    rsqrt reciprocal erf erfc lgamma digamma div true_divide atan2 logit""".split()
)

_BROADCAST = {
    2: """add sub rsub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin
        atan2 bitwise_and bitwise_or bitwise_xor __and__ __or__ silu_backward gelu_backward
        sigmoid_backward tanh_backward threshold_backward leaky_relu_backward elu_backward
        hardtanh_backward softplus_backward hardswish_backward hardsigmoid_backward mish_backward
        logit_backward glu_jvp prelu _prelu_kernel threshold hypot copysign xlogy""",
    3: "addcmul addcdiv lerp",
}
_COMPARISONS = {
    1: "logical_not isnan isinf isfinite signbit",
    2: "eq ne lt le gt ge logical_and logical_or logical_xor",
}


def _like_first(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return None if operand is None else (operand,)


def _floating(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    if operand is None:
        return None
    return (operand if type_category(operand.type) > 1 else TensorShape(operand.shape, "float"),)


def _broadcast_rule(count: int, *, truth: bool = False, floating: bool = False) -> Rule:
    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        tensors = [tensor for at in range(count) if (tensor := inputs.tensor(at)) is not None]
        shape = broadcast([tensor.shape for tensor in tensors])
        if not tensors or shape is None:
            return None
        if truth:
            return (TensorShape(shape, "bool"),)
        # Python numbers take part in type promotion, but not in broadcasting.
        numbers = [inputs.value(at) for at in range(count) if inputs.tensor(at) is None]
        result = promote_types(tensors, numbers)
        return (TensorShape(shape, "float" if floating and type_category(result) < 2 else result),)

    return rule


def _where(inputs: Inputs) -> tuple[Result, ...] | None:
    tensors = [tensor for at in (0, 1, 2) if (tensor := inputs.tensor(at)) is not None]
    shape = broadcast([tensor.shape for tensor in tensors])
    chosen = [tensor for at in (1, 2) if (tensor := inputs.tensor(at)) is not None]
    return (TensorShape(shape, promote_types(chosen)),) if chosen and shape is not None else None


def _to_copy(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return (
        None
        if operand is None
        else (TensorShape(operand.shape, requested_type(inputs, 1, operand.type)),)
    )


def _cumsum(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    if operand is None:
        return None
    return (
        TensorShape(
            operand.shape,
            requested_type(
                inputs, 2, operand.type if type_category(operand.type) > 1 else cpp_name("int64")
            ),
        ),
    )


def _native_dropout(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return None if operand is None else (operand, TensorShape(operand.shape, "bool"))


def _repeat(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, times = inputs.tensor(0), inputs.numbers(1)
    if operand is None or times is None or len(times) < len(operand.shape):
        return None
    shape = (1,) * (len(times) - len(operand.shape)) + operand.shape
    return (TensorShape(tuple(a * b for a, b in zip(shape, times, strict=True)), operand.type),)


def _pad(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, pads = inputs.tensor(0), inputs.numbers(1)
    if operand is None or pads is None or len(pads) > 2 * len(operand.shape):
        return None
    shape = list(operand.shape)
    for place in range(len(pads) // 2):
        # Pads start from the last dimension, before and after it.
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return (TensorShape(tuple(shape), operand.type),) if min(shape) >= 0 else None


def _sizes_at_1(inputs: Inputs) -> tuple[Result, ...] | None:
    """Apply the rule of a backward that writes a gradient into zeros of the sizes at position 1."""
    operand, sizes = inputs.tensor(0), inputs.numbers(1)
    return None if operand is None or sizes is None else (TensorShape(tuple(sizes), operand.type),)


_POINTWISE_RULES = {
    **dict.fromkeys(_LIKE_FIRST.split(), _like_first),
    **dict.fromkeys(_FLOATING, _floating),
    **{
        name: _broadcast_rule(count, floating=name in _FLOATING)
        for count, names in _BROADCAST.items()
        for name in names.split()
    },
    **{
        name: _broadcast_rule(count, truth=True)
        for count, names in _COMPARISONS.items()
        for name in names.split()
    },
    "where": _where,
    "_to_copy": _to_copy,
    "cumsum": _cumsum,
    "native_dropout": _native_dropout,
    "_fused_dropout": _native_dropout,
    "native_dropout_backward": _like_first,
    "repeat": _repeat,
    **dict.fromkeys(("slice_backward", "select_backward", "resize_"), _sizes_at_1),
    "constant_pad_nd": _pad,
}


_INT64 = cpp_name("int64")


def _reduced_shape(shape: Shape, dims: list[int] | None, *, keep: bool) -> Shape | None:
    """Return the shape after a reduction over `dims`; None or [] reduces all dimensions."""
    rank = len(shape)
    if any(not -max(rank, 1) <= dim < max(rank, 1) for dim in dims or ()):
        return None
    # Negative dimensions count from the end.
    reduced = {dim % rank for dim in dims} if dims and rank else set(range(rank))
    sizes = [1 if at in reduced else size for at, size in enumerate(shape)]
    return tuple(size for at, size in enumerate(sizes) if keep or at not in reduced)


def _reduce(inputs: Inputs, at: int) -> tuple[TensorShape, Shape] | None:
    """Return the operand and the reduced shape; `at` is the position of `dim`, then `keepdim`."""
    operand = inputs.tensor(0)
    if operand is None:
        return None
    has_dims = len(inputs) > at + 1
    # torch before 2.1 records no values: the dimensions are unknown.
    if has_dims and inputs.value(at) is None and inputs.types[at] != "None":
        return None
    dim = inputs.value(at) if has_dims else None
    dims = [dim] if type(dim) is int else inputs.numbers(at) if has_dims else None
    shape = _reduced_shape(operand.shape, dims, keep=has_dims and inputs.value(at + 1) is True)
    return None if shape is None else (operand, shape)


def _reduction(at: int, *, types: int | None, counts: bool = False) -> Rule:
    """Return the rule of a reduction.

    Args:
        at: position of the dimensions, then of `keepdim`.
        types: position of the requested dtype; None for operators without one.
        counts: whether integers and booleans are summed in int64.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        reduction = _reduce(inputs, at)
        if reduction is None:
            return None
        operand, shape = reduction
        default = _INT64 if counts and type_category(operand.type) < 2 else operand.type
        # `sum(self, dtype)` has the dtype at 1, `sum(self, dim, keepdim, dtype)` at 3.
        position = (types if len(inputs) > at + 1 else 1) if types is not None else len(inputs)
        return (TensorShape(shape, requested_type(inputs, position, default)),)

    return rule


def _reduction_to(name: str) -> Rule:
    """Return the rule of a reduction whose result has the type `name`."""

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        reduction = _reduce(inputs, 1)
        return None if reduction is None else (TensorShape(reduction[1], name),)

    return rule


def _extreme(inputs: Inputs) -> tuple[Result, ...] | None:
    """Apply the rule of max and min.

    They reduce a tensor, reduce a dimension (with indices), or compare two tensors.
    """
    operand, other = inputs.tensor(0), inputs.tensor(1)
    if operand is None:
        return None
    if other is not None:
        shape = broadcast([operand.shape, other.shape])
        return None if shape is None else (TensorShape(shape, promote_types([operand, other])),)
    # `max(self)` against `max(self, dim, keepdim)`.
    if len(inputs) < 3:
        return (TensorShape((), operand.type),)
    reduction = _reduce(inputs, 1)
    return (
        None
        if reduction is None
        else (TensorShape(reduction[1], operand.type), TensorShape(reduction[1], _INT64))
    )


def _layer_norm(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, sizes = inputs.tensor(0), inputs.numbers(1)
    if operand is None:
        return None
    count = len((inputs.tensor(2) or operand).shape) if sizes is None else len(sizes)
    # Means and reciprocal deviations are saved for backward, in float32 for half-precision inputs.
    rows = operand.shape[: len(operand.shape) - count] + (1,) * count
    half = type_category(operand.type) == 2 and operand.type not in ("float", "double")
    saved = TensorShape(rows, "float" if half else operand.type)
    return operand, saved, saved


def _rms_norm(inputs: Inputs) -> tuple[Result, ...] | None:
    results = _layer_norm(inputs)
    return results and results[:2]


def _gradients(operands: tuple[int, ...], mask: int | None) -> Rule:
    """Return the rule of a backward whose gradients are like the inputs at these positions.

    Args:
        operands: the positions.
        mask: position of the flags that say which gradients are requested; None for all.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        gradients: list[Result] = [inputs.tensor(at) for at in operands]
        if gradients[0] is None:
            return None
        requested = inputs.list_of(mask) if mask is not None else None
        requested = requested or [True] * len(gradients)
        pairs = zip(gradients, requested, strict=False)
        return tuple(gradient if is_requested else None for gradient, is_requested in pairs)

    return rule


def _batch_norm(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, training = inputs.tensor(0), inputs.value(5)
    if operand is None or len(operand.shape) < 2:
        return None
    half = type_category(operand.type) == 2 and operand.type not in ("float", "double")
    saved = TensorShape(
        # Evaluation saves no statistics of the batch.
        (operand.shape[1] if training is not False else 0,),
        "float" if half else operand.type,
    )
    return operand, saved, saved


def _group_norm(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, groups = inputs.tensor(0), inputs.value(6)
    if operand is None or not operand.shape or type(groups) is not int:
        return None if operand is None else (operand,)
    saved = TensorShape((operand.shape[0], groups), operand.type)
    return operand, saved, saved


def _softmax(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    if operand is None:
        return None
    # The third argument is `half_to_float`.
    return (TensorShape(operand.shape, "float" if inputs.value(2) is True else operand.type),)


def _softmax_backward(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return (
        None
        if operand is None
        else (TensorShape(operand.shape, requested_type(inputs, 3, operand.type)),)
    )


def _loss(reduction: int) -> Rule:
    """Return the rule of a loss of two tensors: a scalar, or per element without reduction."""

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        operand, target, reduction_mode = (
            inputs.tensor(0),
            inputs.tensor(1),
            inputs.value(reduction),
        )
        if (
            operand is None
            or target is None
            or (reduction_mode is None and len(inputs) > reduction)
        ):
            return None
        # 0 is at::Reduction::None.
        shape = broadcast([operand.shape, target.shape]) if reduction_mode == 0 else ()
        return None if shape is None else (TensorShape(shape, operand.type),)

    return rule


def _nll_loss(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, target, reduction_mode = inputs.tensor(0), inputs.tensor(1), inputs.value(3)
    if operand is None or target is None or reduction_mode is None:
        return None
    return TensorShape(target.shape if reduction_mode == 0 else (), operand.type), TensorShape(
        (), operand.type
    )


def _embedding(inputs: Inputs) -> tuple[Result, ...] | None:
    table, index = inputs.tensor(0), inputs.tensor(1)
    if table is None or index is None or not table.shape:
        return None
    return (TensorShape((*index.shape, *table.shape[1:]), table.type),)


def _embedding_backward(count: int) -> Rule:
    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        grad, rows = inputs.tensor(0), inputs.value(count)
        if grad is None or not grad.shape or type(rows) is not int:
            return None
        return (TensorShape((rows, grad.shape[-1]), grad.type),)

    return rule


def _embedding_bag(inputs: Inputs) -> tuple[Result, ...] | None:
    table, index, offsets = (inputs.tensor(at) for at in range(3))
    if table is None or index is None or offsets is None or not table.shape:
        return None
    # `include_last_offset` adds an offset at which no bag begins.
    bags = offsets.numel - (1 if inputs.value(8) is True else 0)
    output = TensorShape((bags, *table.shape[1:]), table.type)
    per_bag = TensorShape((bags,), index.type)
    return output, TensorShape((0,), index.type), per_bag, per_bag


def _index_select(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, dim, index = inputs.tensor(0), inputs.value(1), inputs.tensor(2)
    if operand is None or index is None or type(dim) is not int or not operand.shape:
        return None
    place = dim % len(operand.shape)
    return (
        TensorShape(
            (*operand.shape[:place], index.numel, *operand.shape[place + 1 :]), operand.type
        ),
    )


def _gather(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, index = inputs.tensor(0), inputs.tensor(2)
    return None if operand is None or index is None else (TensorShape(index.shape, operand.type),)


def _sort(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return None if operand is None else (operand, TensorShape(operand.shape, _INT64))


def _argsort(inputs: Inputs) -> tuple[Result, ...] | None:
    results = _sort(inputs)
    return results and results[1:]


def _topk(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, count, dim = inputs.tensor(0), inputs.value(1), inputs.value(2)
    if operand is None or type(count) is not int or type(dim) is not int or not operand.shape:
        return None
    place = dim % len(operand.shape)
    shape = (*operand.shape[:place], count, *operand.shape[place + 1 :])
    return TensorShape(shape, operand.type), TensorShape(shape, _INT64)


_REDUCING_RULES = {
    "sum": _reduction(1, types=3, counts=True),
    "nansum": _reduction(1, types=3, counts=True),
    "mean": _reduction(1, types=3),
    "prod": _reduction(1, types=3, counts=True),
    "amax": _reduction(1, types=None),
    "amin": _reduction(1, types=None),
    "logsumexp": _reduction(1, types=None),
    "linalg_vector_norm": _reduction(2, types=4),
    **dict.fromkeys(("all", "any"), _reduction_to("bool")),
    **dict.fromkeys(("argmax", "argmin"), _reduction_to(_INT64)),
    **dict.fromkeys(("max", "min"), _extreme),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _gradients((1, 5, 6), 7),
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _gradients((1, 4), 5),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _batch_norm),
    # The position of the weight twice: the bias has its shape. cuDNN and MIOpen take the input
    # first.
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


def _cat(inputs: Inputs) -> tuple[Result, ...] | None:
    # torch.cat ignores an empty 1-d tensor among tensors of any rank.
    tensors = [tensor for tensor in inputs.tensors(0) if tensor.shape != (0,)]
    dim = inputs.value(1)
    if not tensors or type(dim) is not int:
        return None
    first = tensors[0].shape
    if not first or not -len(first) <= dim < len(first):
        return None
    place = dim % len(first)
    size = sum(tensor.shape[place] for tensor in tensors if len(tensor.shape) == len(first))
    return (TensorShape((*first[:place], size, *first[place + 1 :]), tensors[0].type),)


def _scalar_per_tensor(inputs: Inputs) -> tuple[Result, ...] | None:
    return tuple(TensorShape((), tensor.type) for tensor in inputs.tensors(0)) or None


def results_like_first_list(inputs: Inputs) -> tuple[Result, ...] | None:
    """Return results with the shapes and types of the first list's tensors."""
    return inputs.tensors(0) or None


def in_place_result(inputs: Inputs) -> tuple[Result, ...] | None:
    """Return the result of an in-place operator: its first tensor, nothing for a list."""
    tensor = inputs.tensor(0)
    if tensor is None:
        return () if inputs.tensors(0) else None
    return (tensor,)


_ON_LISTS_RULES = {
    "cat": _cat,
    **dict.fromkeys(("_foreach_norm", "_foreach_max"), _scalar_per_tensor),
}

_RULES: dict[str, Rule] = {
    **_POINTWISE_RULES,
    **_REDUCING_RULES,
    **PRODUCT_RULES,
    **_ON_LISTS_RULES,
}

_ATEN = "aten::"

_COMPILED = "triton_"


def results_of(name: str, inputs: Inputs) -> tuple[Result, ...] | None:
    """Return the results of a call; None without a rule.

    Kernels that torch.compile generated write into their arguments and return nothing.
    """
    if name.startswith(_COMPILED):
        return ()
    if not name.startswith(_ATEN):
        return None
    operator = name.removeprefix(_ATEN).partition(".")[0]
    rule = _RULES.get(operator)
    # `__and__` and `__or__` end with an underscore, but do not work in place.
    if rule is None and operator.endswith("_") and not operator.endswith("__"):
        rule = in_place_result
    elif rule is None and operator.startswith("_foreach_"):
        rule = results_like_first_list
    return rule(inputs) if rule else None
