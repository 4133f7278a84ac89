"""Results of matrix products, attention, convolutions and pooling."""

from onerank.converters.sources.kineto.shape_inference.elementwise import broadcast, like
from onerank.converters.sources.kineto.shape_inference.inputs import (
    Inputs,
    Result,
    Shape,
    Tensor,
    asked,
)


def _product(first: int, second: int, *, types: int | None = None, name: str = ""):
    """Return the rule of `[..., m, k] x [..., k, n]`, the operands at these positions."""

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        left, right = given.tensor(first), given.tensor(second)
        if left is None or right is None or not left.shape or not right.shape:
            return None
        batch = broadcast([left.shape[:-2], right.shape[:-2]])
        if batch is None or left.shape[-1] != right.shape[-2:][0]:
            return None
        sizes = (*batch, *left.shape[-2:-1], *right.shape[-1:][: len(right.shape) - 1])
        made = name or left.type
        return (Tensor(sizes, asked(given, types, made) if types is not None else made),)

    return rule


def _linear(given: Inputs) -> tuple[Result, ...] | None:
    x, weight = given.tensor(0), given.tensor(1)
    if x is None or weight is None or x.shape[-1:] != weight.shape[-1:]:
        return None
    return (Tensor((*x.shape[:-1], *weight.shape[:-1]), x.type),)


def _grouped(given: Inputs) -> tuple[Result, ...] | None:
    """Of experts' products, whose rows, columns or inner size are divided by offsets."""
    left, right, offsets = (given.tensor(at) for at in range(3))
    if left is None or right is None:
        return None
    ranks = len(left.shape), len(right.shape)
    if ranks == (2, 2):
        if offsets is None:
            return None
        return (Tensor((offsets.numel, left.shape[0], right.shape[1]), left.type),)
    if ranks in ((2, 3), (3, 2)):
        return (Tensor((left.shape[-2], right.shape[-1]), left.type),)
    return (Tensor((*left.shape[:-1], right.shape[-1]), left.type),) if ranks == (3, 3) else None


def _attention(*, heads_first: bool):
    """Return the rule of fused attention: queries with the width of values, and a sum per row."""

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        query, _, value = (given.tensor(at) for at in range(3))
        if query is None or value is None or len(query.shape) < 3:
            return None
        *batch, rows, heads = query.shape[:-1]
        sums = (*batch, rows, heads) if heads_first else (*batch, heads, rows)
        made = Tensor((*query.shape[:-1], value.shape[-1]), query.type)
        return made, Tensor(sums, "float")

    return rule


def _size(size: int, kernel: int, stride: int, pad: int, dilation: int, *, up: bool = False) -> int:
    """Return how many places a filter has along a side; `up` sizes of the `up` of the ceiling."""
    over = size + 2 * pad - dilation * (kernel - 1) - 1
    return (over + (stride - 1 if up else 0)) // stride + 1


def _each(numbers: list[int] | None, count: int, default: int | None) -> list[int] | None:
    """Return a number for each of `count` sides; one number applies to all, none is `default`."""
    if not numbers:
        return None if default is None or numbers is None else [default] * count
    return numbers * count if len(numbers) == 1 else numbers if len(numbers) == count else None


def _slid(shape: Shape, kernel: Shape, *lists: list[int] | None, up: bool = False) -> Shape | None:
    """Return the sides of what a filter of `kernel` makes; lists are stride, padding, dilation."""
    sides = len(kernel)
    given = [_each(one, sides, default) for one, default in zip(lists, (None, 0, 1), strict=True)]
    if sides == 0 or len(shape) < sides or any(one is None for one in given):
        return None
    stride, pad, dilation = (one or [] for one in given)
    if min(stride) < 1:
        return None
    made = [
        _size(*one, up=up)
        for one in zip(shape[-sides:], kernel, stride, pad, dilation, strict=True)
    ]
    return tuple(made) if min(made) >= 0 else None


def _turned(shape: Shape, kernel: Shape, *lists: list[int] | None) -> Shape | None:
    """Return the sides of a transposed convolution: stride, padding, dilation, output padding."""
    sides, defaults = len(kernel), (None, 0, 1, 0)
    given = [_each(one, sides, default) for one, default in zip(lists, defaults, strict=True)]
    if len(shape) < sides or any(one is None for one in given):
        return None
    stride, pad, dilation, more = (one or [] for one in given)
    rows = zip(shape[-sides:], kernel, stride, pad, dilation, more, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in rows)


def _convolution(
    stride: int,
    pad: int,
    dilation: int | None,
    *,
    turned: int | None = None,
    more: int | None = None,
    groups: int | None = None,
):
    """Return the rule of a convolution, its arguments at these positions.

    Args:
        stride: position of the strides.
        pad: of the padding.
        dilation: of the dilation; None: it has none.
        turned: of whether it is transposed; None: it is not.
        more: of what a transposed one adds to its result.
        groups: of the number of groups, which a transposed one needs.
    """

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        x, weight = given.tensor(0), given.tensor(1)
        if x is None or weight is None or len(weight.shape) < 3:
            return None
        kernel = weight.shape[2:]
        lists = [given.numbers(stride), given.numbers(pad)]
        lists.append([1] if dilation is None else given.numbers(dilation))
        if turned is not None and given.value(turned) is None:
            return None
        if turned is not None and given.value(turned) is True and more is not None:
            count = given.value(groups) if groups is not None else None
            if type(count) is not int:
                return None
            sides, channels = _turned(x.shape, kernel, *lists, given.numbers(more)), count
            channels *= weight.shape[1]
        else:
            sides, channels = _slid(x.shape, kernel, *lists), weight.shape[0]
        if sides is None:
            return None
        batch = x.shape[: len(x.shape) - len(kernel) - 1]
        return (Tensor((*batch, channels, *sides), x.type),)

    return rule


def _convolution_backward(given: Inputs) -> tuple[Result, ...] | None:
    grad, x, weight = (given.tensor(at) for at in range(3))
    mask = given.list_of(10)
    if grad is None or x is None or weight is None or mask is None:
        return None
    turned = given.value(7) is True
    groups = given.value(9)
    channels = weight.shape[1] * groups if turned and type(groups) is int else weight.shape[0]
    results: list[Result] = [x, weight, Tensor((channels,), weight.type)]
    return tuple(one if ask else None for one, ask in zip(results, mask, strict=False))


def _pooled(*, dilated: bool, places: bool):
    """Return the rule of pooling: kernel, stride, padding, then dilation, whether to round up."""

    def rule(given: Inputs) -> tuple[Result, ...] | None:
        x, kernel, ceiling = given.tensor(0), given.numbers(1), given.value(5 if dilated else 4)
        if x is None or not kernel or ceiling is None:
            return None
        lists = [given.numbers(2) or kernel, given.numbers(3)]
        lists.append(given.numbers(4) if dilated else [1])
        sides = _slid(x.shape, tuple(kernel), *lists, up=ceiling is True)
        if sides is None:
            return None
        made = Tensor((*x.shape[: -len(kernel)], *sides), x.type)
        return (made, Tensor(made.shape, "long int")) if places else (made,)

    return rule


def _sized(given: Inputs) -> tuple[Result, ...] | None:
    """Of what makes images of the size at position 1."""
    x, sides = given.tensor(0), given.numbers(1)
    if x is None or not sides or len(sides) > len(x.shape):
        return None
    return (Tensor((*x.shape[: -len(sides)], *sides), x.type),)


def _sized_backward(given: Inputs) -> tuple[Result, ...] | None:
    grad, sizes = given.tensor(0), given.numbers(2)
    return None if grad is None or not sizes else (Tensor(tuple(sizes), grad.type),)


_UPSAMPLING = [
    f"{way}{exact}"
    for way in ("upsample_nearest", "_upsample_nearest_exact")
    for exact in ("1d", "2d", "3d")
] + ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]

RULES = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), _product(0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addmv"), _product(1, 2)),
    "_int_mm": _product(0, 1, name="int"),
    "_scaled_mm": _product(0, 1, types=6),
    "_grouped_mm": _grouped,
    "linear": _linear,
    "mkldnn_linear": _linear,
    **dict.fromkeys(
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention "
        "_cudnn_attention_forward _scaled_dot_product_fused_attention_overrideable".split(),
        _attention(heads_first=True),
    ),
    **dict.fromkeys(
        ("_flash_attention_forward", "_efficient_attention_forward"), _attention(heads_first=False)
    ),
    **dict.fromkeys(
        "_flash_attention_backward _efficient_attention_backward _cudnn_attention_backward "
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward".split(),
        like(1, also=2),
    ),
    **dict.fromkeys(
        ("convolution", "_convolution", "convolution_overrideable"),
        _convolution(3, 4, 5, turned=6, more=7, groups=8),
    ),
    "cudnn_convolution": _convolution(3, 2, 4),
    **dict.fromkeys(
        ("miopen_convolution", "miopen_depthwise_convolution", "mkldnn_convolution"),
        _convolution(4, 3, 5),
    ),
    "cudnn_convolution_relu": _convolution(3, 4, 5),
    **dict.fromkeys(("thnn_conv2d", "_slow_conv2d_forward"), _convolution(4, 5, None)),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d"), _convolution(4, 5, 6)),
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _pooled(dilated=True, places=True),
    "max_pool3d_with_indices": _pooled(dilated=True, places=True),
    "avg_pool2d": _pooled(dilated=False, places=False),
    "avg_pool3d": _pooled(dilated=False, places=False),
    **dict.fromkeys(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward "
        "avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward".split(),
        like(1),
    ),
    **dict.fromkeys((*_UPSAMPLING, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _sized),
    **dict.fromkeys((f"{name}_backward" for name in _UPSAMPLING), _sized_backward),
}
