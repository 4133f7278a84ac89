"""Results of matrix products, attention, convolutions and pooling."""

from onerank.converters.sources.kineto.shape_inference.inputs import (
    Inputs,
    Result,
    Rule,
    Shape,
    TensorShape,
    broadcast,
    like,
    requested_type,
)


def _product(first: int, second: int, *, types: int | None = None, name: str = "") -> Rule:
    """Return the rule of `[..., m, k] x [..., k, n]`.

    Args:
        first: position of the left operand.
        second: position of the right operand.
        types: position of the requested dtype; None for operators without one.
        name: type of the result; "" for the left operand's.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        left, right = inputs.tensor(first), inputs.tensor(second)
        if left is None or right is None or not left.shape or not right.shape:
            return None
        batch = broadcast([left.shape[:-2], right.shape[:-2]])
        if batch is None or left.shape[-1] != right.shape[-2:][0]:
            return None
        # A vector has no row or column, so its side is missing in the result.
        sizes = (*batch, *left.shape[-2:-1], *right.shape[-1:][: len(right.shape) - 1])
        dtype = name or left.type
        return (
            TensorShape(
                sizes, requested_type(inputs, types, dtype) if types is not None else dtype
            ),
        )

    return rule


def _linear(inputs: Inputs) -> tuple[Result, ...] | None:
    x, weight = inputs.tensor(0), inputs.tensor(1)
    if x is None or weight is None or x.shape[-1:] != weight.shape[-1:]:
        return None
    return (TensorShape((*x.shape[:-1], *weight.shape[:-1]), x.type),)


def _grouped(inputs: Inputs) -> tuple[Result, ...] | None:
    """Apply the rule of a grouped product of experts, whose offsets split one dimension.

    They split the rows (2-D x 3-D), the columns (3-D x 2-D) or the inner dimension (2-D x 2-D).
    """
    left, right, offsets = (inputs.tensor(at) for at in range(3))
    if left is None or right is None:
        return None
    ranks = len(left.shape), len(right.shape)
    if ranks == (2, 2):
        if offsets is None:
            return None
        # One matrix per expert: each offset is the end of a group.
        return (TensorShape((offsets.numel, left.shape[0], right.shape[1]), left.type),)
    if ranks in ((2, 3), (3, 2)):
        return (TensorShape((left.shape[-2], right.shape[-1]), left.type),)
    return (
        (TensorShape((*left.shape[:-1], right.shape[-1]), left.type),) if ranks == (3, 3) else None
    )


def _attention(*, heads_first: bool) -> Rule:
    """Return the rule of fused attention: the output, and a log-sum-exp per row and head.

    Args:
        heads_first: whether operands are [batch, heads, rows, width], else [batch, rows, heads,
            width].
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        query, _, value = (inputs.tensor(at) for at in range(3))
        if query is None or value is None or len(query.shape) < 3:
            return None
        # The log-sum-exp has the heads before the rows, whatever the layout of the query.
        *batch, first, second = query.shape[:-1]
        sums = (*batch, first, second) if heads_first else (*batch, second, first)
        output = TensorShape((*query.shape[:-1], value.shape[-1]), query.type)
        return output, TensorShape(sums, "float")

    return rule


def _window_positions(
    size: int, kernel: int, stride: int, pad: int, dilation: int, *, up: bool = False
) -> int:
    """Return the number of window positions along one side; `up` rounds up."""
    over = size + 2 * pad - dilation * (kernel - 1) - 1
    return (over + (stride - 1 if up else 0)) // stride + 1


def _per_side(numbers: list[int] | None, count: int, default: int | None) -> list[int] | None:
    """Return a number for each of `count` sides.

    A single number applies to all sides, an empty list means `default`.
    """
    if not numbers:
        return None if default is None or numbers is None else [default] * count
    return numbers * count if len(numbers) == 1 else numbers if len(numbers) == count else None


def _window_sides(
    shape: Shape, kernel: Shape, *lists: list[int] | None, up: bool = False
) -> Shape | None:
    """Return the output sides of a sliding window; `lists` are stride, padding, dilation."""
    sides = len(kernel)
    pairs = zip(lists, (None, 0, 1), strict=True)
    per_side = [_per_side(numbers, sides, default) for numbers, default in pairs]
    if sides == 0 or len(shape) < sides or any(numbers is None for numbers in per_side):
        return None
    stride, pad, dilation = (numbers or [] for numbers in per_side)
    if min(stride) < 1:
        return None
    sizes = [
        _window_positions(*side, up=up)
        for side in zip(shape[-sides:], kernel, stride, pad, dilation, strict=True)
    ]
    return tuple(sizes) if min(sizes) >= 0 else None


def _transposed_sides(shape: Shape, kernel: Shape, *lists: list[int] | None) -> Shape | None:
    """Return the sides of a transposed convolution: stride, padding, dilation, output padding."""
    sides, defaults = len(kernel), (None, 0, 1, 0)
    pairs = zip(lists, defaults, strict=True)
    per_side = [_per_side(numbers, sides, default) for numbers, default in pairs]
    if len(shape) < sides or any(numbers is None for numbers in per_side):
        return None
    stride, pad, dilation, output_padding = (numbers or [] for numbers in per_side)
    rows = zip(shape[-sides:], kernel, stride, pad, dilation, output_padding, strict=True)
    return tuple((n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in rows)


def _convolution(
    stride: int,
    pad: int,
    dilation: int | None,
    *,
    transposed: int | None = None,
    output_padding: int | None = None,
    groups: int | None = None,
) -> Rule:
    """Return the rule of a convolution, its arguments at these positions.

    Args:
        stride: position of the strides.
        pad: position of the padding.
        dilation: position of the dilation; None for operators without one.
        transposed: position of the transposed flag; None for operators that never transpose.
        output_padding: position of the output padding of a transposed convolution.
        groups: position of the number of groups, which only a transposed convolution needs.
    """

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        x, weight = inputs.tensor(0), inputs.tensor(1)
        if x is None or weight is None or len(weight.shape) < 3:
            return None
        kernel = weight.shape[2:]
        lists = [inputs.numbers(stride), inputs.numbers(pad)]
        lists.append([1] if dilation is None else inputs.numbers(dilation))
        if transposed is not None and inputs.value(transposed) is None:
            return None
        if (
            transposed is not None
            and inputs.value(transposed) is True
            and output_padding is not None
        ):
            count = inputs.value(groups) if groups is not None else None
            if type(count) is not int:
                return None
            sides, channels = (
                _transposed_sides(x.shape, kernel, *lists, inputs.numbers(output_padding)),
                count,
            )
            # A transposed convolution's weight is [in, out / groups, ...].
            channels *= weight.shape[1]
        else:
            sides, channels = _window_sides(x.shape, kernel, *lists), weight.shape[0]
        if sides is None:
            return None
        batch = x.shape[: len(x.shape) - len(kernel) - 1]
        return (TensorShape((*batch, channels, *sides), x.type),)

    return rule


def _convolution_backward(inputs: Inputs) -> tuple[Result, ...] | None:
    grad, x, weight = (inputs.tensor(at) for at in range(3))
    # Positions of convolution_backward: 7 is `transposed`, 9 `groups`, 10 `output_mask`.
    mask = inputs.list_of(10)
    if grad is None or x is None or weight is None or mask is None:
        return None
    transposed = inputs.value(7) is True
    groups = inputs.value(9)
    channels = weight.shape[1] * groups if transposed and type(groups) is int else weight.shape[0]
    results: list[Result] = [x, weight, TensorShape((channels,), weight.type)]
    pairs = zip(results, mask, strict=False)
    return tuple(result if is_requested else None for result, is_requested in pairs)


def _pooling(*, dilated: bool, indices: bool) -> Rule:
    """Return the rule of pooling: kernel, stride, padding, then dilation, whether to round up."""

    def rule(inputs: Inputs) -> tuple[Result, ...] | None:
        x, kernel, ceiling = inputs.tensor(0), inputs.numbers(1), inputs.value(5 if dilated else 4)
        if x is None or not kernel or ceiling is None:
            return None
        # An empty stride means the kernel size.
        lists = [inputs.numbers(2) or kernel, inputs.numbers(3)]
        lists.append(inputs.numbers(4) if dilated else [1])
        sides = _window_sides(x.shape, tuple(kernel), *lists, up=ceiling is True)
        if sides is None:
            return None
        output = TensorShape((*x.shape[: -len(kernel)], *sides), x.type)
        return (output, TensorShape(output.shape, "long int")) if indices else (output,)

    return rule


def _resize(inputs: Inputs) -> tuple[Result, ...] | None:
    """Apply the rule of an operator that produces images of the size at position 1."""
    x, sides = inputs.tensor(0), inputs.numbers(1)
    if x is None or not sides or len(sides) > len(x.shape):
        return None
    return (TensorShape((*x.shape[: -len(sides)], *sides), x.type),)


def _resize_backward(inputs: Inputs) -> tuple[Result, ...] | None:
    grad, sizes = inputs.tensor(0), inputs.numbers(2)
    return None if grad is None or not sizes else (TensorShape(tuple(sizes), grad.type),)


_UPSAMPLING = [
    f"{way}{exact}"
    for way in ("upsample_nearest", "_upsample_nearest_exact")
    for exact in ("1d", "2d", "3d")
] + ["upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"]

PRODUCT_RULES = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), _product(0, 1)),
    **dict.fromkeys(("addmm", "_addmm_activation", "baddbmm", "addmv"), _product(1, 2)),
    "_int_mm": _product(0, 1, name="int"),
    "_scaled_mm": _product(0, 1, types=6),
    "_scaled_mm_v2": _product(0, 1, types=9),
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
        _convolution(3, 4, 5, transposed=6, output_padding=7, groups=8),
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
    "max_pool2d_with_indices": _pooling(dilated=True, indices=True),
    "max_pool3d_with_indices": _pooling(dilated=True, indices=True),
    "avg_pool2d": _pooling(dilated=False, indices=False),
    "avg_pool3d": _pooling(dilated=False, indices=False),
    **dict.fromkeys(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward "
        "avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward".split(),
        like(1),
    ),
    **dict.fromkeys((*_UPSAMPLING, "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _resize),
    **dict.fromkeys((f"{name}_backward" for name in _UPSAMPLING), _resize_backward),
}
