"""Results of pointwise operators, copies and views."""

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
"""Of integers they make floating-point numbers."""

_BROADCAST = {
    2: """add sub rsub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin
        atan2 bitwise_and bitwise_or bitwise_xor __and__ __or__ silu_backward gelu_backward
        sigmoid_backward tanh_backward threshold_backward leaky_relu_backward elu_backward
        hardtanh_backward softplus_backward hardswish_backward hardsigmoid_backward mish_backward
        logit_backward glu_jvp prelu _prelu_kernel threshold hypot copysign xlogy""",
    3: "addcmul addcdiv lerp",
}
_TRUTHS = {
    1: "logical_not isnan isinf isfinite signbit",
    2: "eq ne lt le gt ge logical_and logical_or logical_xor",
}


def broadcast(shapes: list[Shape]) -> Shape | None:
    """Return the shape that all of them are broadcast to, or None."""
    made: list[int] = []
    for place in range(max(map(len, shapes), default=0)):
        sizes = {shape[-1 - place] for shape in shapes if place < len(shape)} - {1}
        if len(sizes) > 1:
            return None
        made.append(sizes.pop() if sizes else 1)
    return tuple(reversed(made))


def like(position: int, *, also: int = 0):
    """Return the rule of operators whose first result is like the input at `position`.

    Args:
        position: of the input.
        also: of how many inputs behind it there is a result, too.
    """

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        found = [given.tensor(at) for at in range(position, position + also + 1)]
        return tuple(found) if found[0] is not None else None

    return rule


def _like_first(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    return None if own is None else (own,)


def _floating(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    if own is None:
        return None
    return (own if kind(own.type) > 1 else Tensor(own.shape, "float"),)


def _together(count: int, *, truth: bool = False, floating: bool = False):
    def rule(given: Inputs) -> tuple[Result, ...] | None:
        tensors = [one for at in range(count) if (one := given.tensor(at)) is not None]
        shape = broadcast([one.shape for one in tensors])
        if not tensors or shape is None:
            return None
        if truth:
            return (Tensor(shape, "bool"),)
        numbers = [given.value(at) for at in range(count) if given.tensor(at) is None]
        made = promoted(tensors, numbers)
        return (Tensor(shape, "float" if floating and kind(made) < 2 else made),)

    return rule


def _where(given: Inputs) -> tuple[Result, ...] | None:
    tensors = [one for at in (0, 1, 2) if (one := given.tensor(at)) is not None]
    shape = broadcast([one.shape for one in tensors])
    chosen = [one for at in (1, 2) if (one := given.tensor(at)) is not None]
    return (Tensor(shape, promoted(chosen)),) if chosen and shape is not None else None


def _to_copy(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    return None if own is None else (Tensor(own.shape, asked(given, 1, own.type)),)


def _cumsum(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    if own is None:
        return None
    return (Tensor(own.shape, asked(given, 2, own.type if kind(own.type) > 1 else named("int64"))),)


def _native_dropout(given: Inputs) -> tuple[Result, ...] | None:
    own = given.tensor(0)
    return None if own is None else (own, Tensor(own.shape, "bool"))


def _repeat(given: Inputs) -> tuple[Result, ...] | None:
    own, times = given.tensor(0), given.numbers(1)
    if own is None or times is None or len(times) < len(own.shape):
        return None
    shape = (1,) * (len(times) - len(own.shape)) + own.shape
    return (Tensor(tuple(a * b for a, b in zip(shape, times, strict=True)), own.type),)


def _padded(given: Inputs) -> tuple[Result, ...] | None:
    own, pads = given.tensor(0), given.numbers(1)
    if own is None or pads is None or len(pads) > 2 * len(own.shape):
        return None
    shape = list(own.shape)
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return (Tensor(tuple(shape), own.type),) if min(shape) >= 0 else None


def _of_sizes(given: Inputs) -> tuple[Result, ...] | None:
    """Of a gradient put into zeros of the sizes at position 1."""
    own, sizes = given.tensor(0), given.numbers(1)
    return None if own is None or sizes is None else (Tensor(tuple(sizes), own.type),)


RULES = {
    **dict.fromkeys(_LIKE_FIRST.split(), _like_first),
    **dict.fromkeys(_FLOATING, _floating),
    **{
        name: _together(count, floating=name in _FLOATING)
        for count, names in _BROADCAST.items()
        for name in names.split()
    },
    **{
        name: _together(count, truth=True)
        for count, names in _TRUTHS.items()
        for name in names.split()
    },
    "where": _where,
    "_to_copy": _to_copy,
    "cumsum": _cumsum,
    "native_dropout": _native_dropout,
    "_fused_dropout": _native_dropout,
    "native_dropout_backward": _like_first,
    "repeat": _repeat,
    **dict.fromkeys(("slice_backward", "select_backward", "resize_"), _of_sizes),
    "constant_pad_nd": _padded,
}
