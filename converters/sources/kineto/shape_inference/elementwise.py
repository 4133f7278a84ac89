"""Results of pointwise operators, copies and views."""

from onerank.converters.sources.kineto.shape_inference.inputs import (
    Inputs,
    Result,
    Shape,
    Tensor,
    cpp_name,
    promote_types,
    requested_type,
    type_category,
)

_LIKE_FIRST = """
    abs neg exp exp2 expm1 log log2 log10 log1p sin cos tan tanh asin acos atan sinh cosh
    sigmoid sqrt rsqrt reciprocal square sign ceil floor round trunc frac erf erfc lgamma
    digamma relu relu6 silu gelu softplus hardtanh hardswish hardsigmoid leaky_relu elu selu
    celu mish log_sigmoid clamp clamp_min clamp_max tril triu bitwise_not masked_fill clone
    contiguous cumprod flip roll alias detach nan_to_num dropout alpha_dropout
    masked_scatter index_add index_copy index_fill index_put _unsafe_index_put scatter
    scatter_add scatter_reduce renorm conj_physical logit"""
_FLOATING = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan tanh asin acos atan sinh cosh sigmoid sqrt
    rsqrt reciprocal erf erfc lgamma digamma div true_divide atan2 logit""".split()
)
"""Operators whose result is floating point also for integers."""

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


def broadcast(shapes: list[Shape]) -> Shape | None:
    """Return the shape that all shapes broadcast to; None if they do not broadcast."""
    reversed_shape: list[int] = []
    for place in range(max(map(len, shapes), default=0)):
        sizes = {shape[-1 - place] for shape in shapes if place < len(shape)} - {1}
        if len(sizes) > 1:
            return None
        reversed_shape.append(sizes.pop() if sizes else 1)
    return tuple(reversed(reversed_shape))


def like(position: int, *, also: int = 0):
    """Return a rule: the first result has the shape and type of the input at `position`.

    Args:
        position: position of the input.
        also: number of following inputs that have a result of the same shape and type.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        results = [inputs.tensor(at) for at in range(position, position + also + 1)]
        return tuple(results) if results[0] is not None else None

    return rule


def _like_first(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return None if operand is None else (operand,)


def _floating(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    if operand is None:
        return None
    return (operand if type_category(operand.type) > 1 else Tensor(operand.shape, "float"),)


def _broadcast_rule(count: int, *, truth: bool = False, floating: bool = False):
    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        tensors = [tensor for at in range(count) if (tensor := inputs.tensor(at)) is not None]
        shape = broadcast([tensor.shape for tensor in tensors])
        if not tensors or shape is None:
            return None
        if truth:
            return (Tensor(shape, "bool"),)
        numbers = [inputs.value(at) for at in range(count) if inputs.tensor(at) is None]
        result = promote_types(tensors, numbers)
        return (Tensor(shape, "float" if floating and type_category(result) < 2 else result),)

    return rule


def _where(inputs: Inputs) -> tuple[Result, ...] | None:
    tensors = [tensor for at in (0, 1, 2) if (tensor := inputs.tensor(at)) is not None]
    shape = broadcast([tensor.shape for tensor in tensors])
    chosen = [tensor for at in (1, 2) if (tensor := inputs.tensor(at)) is not None]
    return (Tensor(shape, promote_types(chosen)),) if chosen and shape is not None else None


def _to_copy(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return (
        None
        if operand is None
        else (Tensor(operand.shape, requested_type(inputs, 1, operand.type)),)
    )


def _cumsum(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    if operand is None:
        return None
    return (
        Tensor(
            operand.shape,
            requested_type(
                inputs, 2, operand.type if type_category(operand.type) > 1 else cpp_name("int64")
            ),
        ),
    )


def _native_dropout(inputs: Inputs) -> tuple[Result, ...] | None:
    operand = inputs.tensor(0)
    return None if operand is None else (operand, Tensor(operand.shape, "bool"))


def _repeat(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, times = inputs.tensor(0), inputs.numbers(1)
    if operand is None or times is None or len(times) < len(operand.shape):
        return None
    shape = (1,) * (len(times) - len(operand.shape)) + operand.shape
    return (Tensor(tuple(a * b for a, b in zip(shape, times, strict=True)), operand.type),)


def _pad(inputs: Inputs) -> tuple[Result, ...] | None:
    operand, pads = inputs.tensor(0), inputs.numbers(1)
    if operand is None or pads is None or len(pads) > 2 * len(operand.shape):
        return None
    shape = list(operand.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return (Tensor(tuple(shape), operand.type),) if min(shape) >= 0 else None


def _sizes_at_1(inputs: Inputs) -> tuple[Result, ...] | None:
    """Rule of a backward that writes a gradient into zeros of the sizes at position 1."""
    operand, sizes = inputs.tensor(0), inputs.numbers(1)
    return None if operand is None or sizes is None else (Tensor(tuple(sizes), operand.type),)


RULES = {
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
