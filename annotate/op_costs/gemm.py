"""FLOPs of GEMMs and convolutions, and the GEMMs inside.

An [m, k] x [k, n] product takes k multiply-adds for each of m*n results: 2*m*n*k FLOPs. Bias, alpha
and beta of addmm and similar operators add at most m*n and are not counted, as is common practice.

Libraries compute a convolution as an implicit GEMM. Its left matrix is never written: each row
holds the filter's window at one point of the image, so an element of the image appears in many
rows.

    from the larger image to the smaller   points x channels, inner: filter's points and channels
    from the smaller to the larger         the same, the other way round
    the filter's gradient                  filter's points x channels, inner: the image's points

The forward of a convolution goes from the larger image to the smaller and its gradient back; a
transposed convolution is the reverse. Depthwise convolutions have no GEMM: vector units multiply
element by element.
"""

from dataclasses import replace
from math import hypot, prod
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import (
    ComponentGemm,
    Formula,
    GemmShape,
    PartKernel,
    Scales,
    Work,
    matmul_work,
    vector_work,
)
from onerank.annotate.op_costs.depthwise import DepthwiseSizes
from onerank.annotate.op_costs.operands import Call, Tensor, allowing_tf32
from onerank.annotate.op_costs.recurrent import RECURRENT


def _at(first: int, second: int, *also: int) -> Formula:
    """Return the formula of `[..., m, k] x [..., k, n]` with operands at these positions.

    Bytes read are those of the two and of the operands at `also`; `out` of an out-variant is not
    read.
    """

    def formula(call: Call) -> Work | None:
        left, right = call.tensor(first), call.tensor(second)
        if left is None or right is None:
            return None
        sizes = _matmul_sizes(left.shape, right.shape)
        if sizes is None:
            return None
        flops = 2 * prod(sizes)
        read = call.list_bytes(first, second, *also)
        return _with_addend(matmul_work(call, left, flops, read, gemm=sizes), call, also)

    return formula


def _with_addend(work: Work, call: Call, also: tuple[int, ...]) -> Work:
    """Return the work with the addend's bytes next to those of the result, if it has that size.

    Each tile of the result reads its part of the addend before it writes. An accumulation into
    the gradient of a weight takes an H200 395 us for [128256, 128] x [128, 2048], 193 without its
    addend (2026-11-28-hopper-kernels-h200).
    """
    if work.gemm is None:
        return work
    elements = work.gemm.batch * work.gemm.m * work.gemm.n
    addends = (call.tensor(at) for at in also)
    added = sum(each.item_bytes for each in addends if each and each.numel == elements)
    shape = work.gemm._replace(result_bytes=work.gemm.result_bytes + added)
    return replace(work, gemm=shape) if added else work


def _matmul_sizes(
    left: tuple[int, ...], right: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """Return (batch, m, n, k), as torch.matmul reads the shapes; None if they do not fit."""
    if not left or not right:
        return None
    inner = right[-2:][0]
    if left[-1] != inner:
        return None
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    batch = _broadcast(left[:-2], right[:-2])
    return None if batch is None else (batch, rows, columns, inner)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    size = max(len(left), len(right))
    pairs = zip((1,) * (size - len(left)) + left, (1,) * (size - len(right)) + right, strict=True)
    sizes = [b if a == 1 else a for a, b in pairs if a == b or 1 in (a, b)]
    return prod(sizes) if len(sizes) == size else None


# Dtypes whose element holds two 4-bit numbers: torch's, and the bytes in which vLLM packs them.
_PACKED = ("float4_e2m1fn_x2", "uint8")


class _Scaled(NamedTuple):
    """Positions of a scaled GEMM's arguments: [m, k] x [k, n] and the scales of both.

    Attributes:
        also: positions of other operands that are read, such as a bias.
        result: position of the argument that receives the result; None: the call returns it.
        of_torch: whether the operator is torch's.
    """

    left: int
    right: int
    left_scale: int
    right_scale: int
    also: tuple[int, ...] = ()
    result: int | None = None
    of_torch: bool = False


def _scaled(at: _Scaled) -> Formula:
    """Return the formula of a GEMM in 8 or 4 bits whose operands have scales."""

    def formula(call: Call) -> Work | None:
        left, right = call.tensor(at.left), call.tensor(at.right)
        scales = call.tensor(at.left_scale), call.tensor(at.right_scale)
        result = call.output() if at.result is None else call.tensor(at.result)
        sizes = left and right and _matmul_sizes(left.shape, right.shape)
        if left and right and not sizes and left.dtype in _PACKED:
            # vLLM keeps packed weights as [n, k].
            sizes = _matmul_sizes(left.shape, right.shape[::-1])
        if left is None or not sizes:
            return None
        batch, m, n, k = sizes
        item, dtype = float(left.item_bytes), left.dtype
        if left.dtype in _PACKED:
            k, item, dtype = 2 * k, item / 2, _PACKED[0]
            if scales[0] is not None:
                item += scales[0].nbytes / (m * k)
        written = result.nbytes if result else call.output_bytes
        return Work(
            2 * batch * m * n * k,
            call.list_bytes(at.left, at.right, at.left_scale, at.right_scale, *at.also),
            written,
            matmul=True,
            dtype=dtype,
            gemm=GemmShape(batch, m, n, k, item, result.item_bytes if result else 2),
            scales=_scales_of(scales, m, n, of_torch=at.of_torch),
        )

    return formula


def _scales_of(
    scales: tuple[Tensor | None, Tensor | None], m: int, n: int, *, of_torch: bool
) -> Scales:
    """Return the granularity of the scales of operands with m rows and n columns."""
    counts = tuple(scale.numel if scale else 1 for scale in scales)
    if counts == (1, 1):
        return Scales.TENSOR
    if counts == (m, n):
        return Scales.TORCH_ROW if of_torch else Scales.ROW
    return Scales.TORCH_BLOCK if of_torch else Scales.BLOCK


def _linear(call: Call) -> Work | None:
    """Return the work for x [..., k] and weight [n, k]: 2*n FLOPs per element of x."""
    x, weight = call.tensor(0), call.tensor(1)
    if x is None or weight is None or x.shape[-1:] != weight.shape[-1:]:
        return None
    columns = prod(weight.shape[:-1])
    # Leading dimensions of x become rows of one GEMM, which is how `linear` runs it.
    sizes = (1, prod(x.shape[:-1]), columns, x.shape[-1])
    return matmul_work(call, x, 2 * x.numel * columns, call.list_bytes(0, 1, 2), gemm=sizes)


def _grouped_mm(call: Call) -> Work | None:
    """Return the work of experts' GEMMs, whose rows are routed by offsets.

    The offsets are on the device and not recorded: experts have equal shares of the rows, and with
    fewer rows than experts each row goes to a different expert. Experts without rows are not read.

    [t, k] x [e, k, n]: one expert for each of t rows: 2*t*k*n.
    [m, t] x [t, n]: the inner size t is divided among experts, e results of [m, n]: 2*m*t*n.
    [e, m, k] x [k, t]: one expert for each of t columns: 2*m*k*t.
    [e, m, k] x [e, k, n]: a batched GEMM.
    """
    left, right = call.tensor(0), call.tensor(1)
    if left is None or right is None or left.shape[-1:] != right.shape[-2:-1]:
        return None
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    by_expert = [tensor for tensor in (left, right) if len(tensor.shape) == 3]
    result = call.output()
    read, batch = call.input_bytes, 1
    match by_expert:
        case [experts]:
            divides_columns = experts is left
            total = n if divides_columns else m
            active = max(1, min(experts.shape[0], total))
            each = -(-total // active)
            sizes = (active, m, each, k) if divides_columns else (active, each, n, k)
            expert_bytes = experts.numel // max(1, experts.shape[0]) * experts.item_bytes
            read -= (experts.shape[0] - active) * expert_bytes
        case [_, _]:
            batch = left.shape[0]
            sizes = (batch, m, n, k)
        case _:
            groups = max(1, result.shape[0]) if result and len(result.shape) == 3 else 1
            sizes = (groups, m, n, -(-k // groups))
    part = ComponentGemm(
        *sizes,
        left.item_bytes,
        kernel=PartKernel.GROUPED,
        result_bytes=result.item_bytes if result else 0,
    )
    # Parts, not `gemm`: recosting multiplies a measured time by the ratio of the parts' predicted
    # times, in which the deviation of the call's routing from equal shares cancels.
    return matmul_work(call, left, 2 * batch * m * k * n, read, parts=(part,))


def _int8_linear(call: Call) -> Work | None:
    """Return the work of bitsandbytes' 8-bit linear layer, whose input is quantised already.

    Its arguments are the input in 16 bits, the same in 8 bits [m, k] and the weight [n, k] in 8
    bits, and a scale for each row of both. Only columns of outliers are read in 16 bits.
    """
    x, weight = call.tensor(1), call.tensor(2)
    if x is None or weight is None or x.shape[-1:] != weight.shape[-1:]:
        return None
    sizes = (1, prod(x.shape[:-1]), weight.shape[0], x.shape[-1])
    return matmul_work(call, x, 2 * prod(sizes), call.list_bytes(1, 2, 3, 4, 6), gemm=sizes)


PACKED_PRODUCTS = (
    *("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"),
    *("gemm_4bit", "gemv_4bit", "qbytes_mm", "_mixed_dtypes_linear"),
)
"""Products with packed weights: torch's, bitsandbytes' (`*_4bit`) and quanto's (`qbytes_mm`)."""


def _packed(call: Call) -> Work | None:
    """Return the work of x [..., k] times weights of 4 or 8 bits in a packed layout.

    The weights are converted to x's dtype before they are multiplied. Their shape depends on the
    layout, so the result [..., n] gives n. Weights and scales are read as packed.
    """
    x, out = call.tensor(0), call.output()
    if x is None or out is None or not x.shape or x.shape[:-1] != out.shape[:-1]:
        return None
    sizes = (1, prod(x.shape[:-1]), out.shape[-1], x.shape[-1])
    return matmul_work(call, x, 2 * prod(sizes), gemm=sizes)


# torch's products of bf16 rows with weights of 4 bits (`tinygemm`): SM cycles to load a packed
# byte, multiplications in a cycle, further rows above 16, and loads that wait for each other for
# each element of a row. An H100's times of 276 calls of 1 to 4,096 rows and twelve layers, with
# scales of 32 to 256 elements, are 5% off in the mean; they chose the figures
# (2026-11-28-four-bit-products-h100).
_BYTE_CYCLES, _PRODUCTS_PER_CYCLE, _FURTHER_ROWS, _LOADS = 0.141, 58.2, (16, 2), 2 / 1024


def _four_bit(call: Call) -> Work | None:
    """Return the work of bf16 rows [m, k] times packed weights [n, k] of 4 bits.

    The kernel converts the weights again for a few rows at a time, so it is far from the rates of
    tensor cores: 117 TFLOP/s of an H100's 990.
    """
    packed, weights = _packed(call), call.tensor(1)
    if packed is None or packed.gemm is None or weights is None:
        return None
    _, m, n, k, *_ = packed.gemm
    most, more = _FURTHER_ROWS
    products = (m + more * (m > most)) * n * k / _PRODUCTS_PER_CYCLE
    cycles = hypot(_BYTE_CYCLES * call.list_bytes(1, 3), products)
    return replace(packed, gemm=None, cycles=cycles, chain=_LOADS * k)


# The same of torch's products with weights of 8 bits on a GPU, a kernel without tensor cores.
_EIGHT_BIT_PRODUCTS_PER_CYCLE, _EIGHT_BIT_LOADS = 1.8, 1 / 11


def _eight_bit(call: Call) -> Work | None:
    """Return the work of rows [m, k] times weights [n, k] of 8 bits with a scale for each row."""
    packed = _packed(call)
    if packed is None or packed.gemm is None:
        return None
    _, m, n, k, *_ = packed.gemm
    cycles = m * n * k / _EIGHT_BIT_PRODUCTS_PER_CYCLE
    return replace(packed, gemm=None, cycles=cycles, chain=_EIGHT_BIT_LOADS * k)


GEMMS: dict[str, Formula] = {
    "mm": _at(0, 1),
    "bmm": _at(0, 1),
    "matmul": _at(0, 1),
    "mv": _at(0, 1),
    "dot": _at(0, 1),
    "vdot": _at(0, 1),
    "addmm": _at(1, 2, 0),
    "addmm_": _at(1, 2, 0),
    "_addmm_activation": _at(1, 2, 0),
    "baddbmm": _at(1, 2, 0),
    "baddbmm_": _at(1, 2, 0),
    "addbmm": _at(1, 2, 0),
    "addmv": _at(1, 2, 0),
    "_int_mm": _at(0, 1),
    "_scaled_mm": _scaled(_Scaled(0, 1, 2, 3, also=(4, 5), of_torch=True)),
    "_scaled_mm_v2": _scaled(_Scaled(0, 1, 2, 5, also=(8,), of_torch=True)),
    # SGLang's and vLLM's kernels.
    "fp8_scaled_mm": _scaled(_Scaled(0, 1, 2, 3, also=(5,))),
    "cutlass_scaled_mm": _scaled(_Scaled(1, 2, 3, 4, also=(5,), result=0)),
    "cutlass_scaled_fp4_mm": _scaled(_Scaled(1, 2, 3, 4, also=(5,), result=0)),
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "linear": _linear,
    "mkldnn_linear": _linear,
    **dict.fromkeys(PACKED_PRODUCTS, _packed),
    "_weight_int4pack_mm": _four_bit,
    "_weight_int8pack_mm": _eight_bit,
    "int8_mixed_scaled_mm": _int8_linear,
    "int8_linear_matmul": _linear,
    "int8_scaled_mm": _linear,
}


# Bytes of neighbouring channels that tensor cores load; fewer channels are padded with zeros.
_CHANNEL_BYTES = 16
# Largest inner size of one GEMM. A filter's gradient sums over all points of a batch of images, so
# its inner size is divided further than `gemm_tiles` splits it.
_INNER = 32768

# The kernel of each kind of product: of a plain convolution, of one whose channels are not aligned,
# and of one that is a plain GEMM for each point.
_KERNELS = {
    "down": (
        PartKernel.CONVOLUTION,
        PartKernel.NARROW_CONVOLUTION,
        PartKernel.POINT_CONVOLUTION,
    ),
    "up": (
        PartKernel.IMAGE_GRADIENT,
        PartKernel.NARROW_IMAGE_GRADIENT,
        PartKernel.POINT_IMAGE_GRADIENT,
    ),
    "filter": (
        PartKernel.FILTER_GRADIENT,
        PartKernel.NARROW_FILTER_GRADIENT,
        PartKernel.POINT_FILTER_GRADIENT,
    ),
}


# cuDNN runs all groups of channels at once where the channels of a group are powers of two. Others
# run one after another, on up to eight streams: time of a group over that of its GEMM, and launch
# floors of its copies. Kernels of fewer than eight channels take no longer.
_ONE_BY_ONE, _OF_A_GROUP, _FEW_CHANNELS = 1.7, 1, 8

# In 16 bits and with a long window a forward takes one number of the inner size after another,
# whatever the images: launch floors of each, within `_ONE_BY_ONE`. wav2vec 2.0's window of 128
# points, 16 groups of 48: 4 and 8 sequences take an H200 12.4 and 9.5 ms
# (2026-11-28-seventeen-jobs-h200).
_LONG_WINDOW, _OF_A_NUMBER, _HALF_BYTES = 64, 0.025, 2


class _Sizes(NamedTuple):
    """Sizes of a convolution between a larger image and a smaller one, per group of channels.

    `window` has the sizes of the filter's window.
    """

    groups: int
    large: Tensor
    small: Tensor
    large_channels: int
    small_channels: int
    window: tuple[int, ...]

    @property
    def kernel(self) -> int:
        """Points of the window."""
        return prod(self.window)

    @property
    def flops(self) -> int:
        """FLOPs of one pass: each point of the smaller image sums over one filter."""
        return 2 * self.small.numel * self.large_channels * self.kernel

    def parts(self, *kinds: str) -> tuple[ComponentGemm, ...]:
        """Return the GEMMs of the kinds in `_KERNELS`."""
        return tuple(self._part(kind) for kind in kinds)

    def _part(self, kind: str) -> ComponentGemm:
        item = self.large.item_bytes
        # Of an RGB image, three channels in 16 bits become eight.
        lanes = max(1, _CHANNEL_BYTES // item)
        padded_large = -(-self.large_channels // lanes) * lanes
        padded_small = -(-self.small_channels // lanes) * lanes
        points = self.small.numel // (self.groups * self.small_channels)
        large_points = self.large.numel // (self.groups * self.large_channels)
        kernel = _KERNELS[kind][self._form]
        batch, reused = self.groups, 0
        if kind == "down":
            sizes, image = (points, self.small_channels, padded_large * self.kernel), self.large
        elif kind == "up":
            # With a stride each point of the larger image meets only some of the
            # filter's points, so the inner size follows from the total FLOPs.
            inner = max(1, points * padded_small * self.kernel // max(1, large_points))
            sizes, image = (large_points, self.large_channels, inner), self.small
        else:
            divided = -(-points // _INNER)
            sizes, image = (
                (padded_large * self.kernel, self.small_channels, points // divided),
                self.large,
            )
            batch = self.groups * divided
            reused = self.groups * padded_large * self.kernel * points
        reuse = (reused or batch * sizes[0] * sizes[2]) / max(1, image.numel)
        part = ComponentGemm(batch, *sizes, item, max(1.0, reuse), kernel=kernel)
        if not self._runs_one_by_one:
            return part
        few = min(self.large_channels, self.small_channels) < _FEW_CHANNELS
        return part._replace(
            batch=batch // self.groups,
            times=self.groups * (1.0 if few else _ONE_BY_ONE),
            launches=_OF_A_GROUP + self._waits(kind, sizes[2]),
        )

    def _waits(self, kind: str, inner: int) -> int:
        """Return the launch floors for which a group with a long window waits."""
        narrow = self.large.item_bytes <= _HALF_BYTES
        waits = kind == "down" and narrow and self.kernel >= _LONG_WINDOW
        return round(_OF_A_NUMBER * inner) if waits else 0

    @property
    def _runs_one_by_one(self) -> bool:
        """Whether cuDNN has no kernel for all groups."""
        channels = self.large_channels, self.small_channels
        return self.groups > 1 and any(number & (number - 1) for number in channels)

    @property
    def _form(self) -> int:
        """Place in `_KERNELS` of the convolution's kernels."""
        lanes = max(1, _CHANNEL_BYTES // self.large.item_bytes)
        if self.large_channels % lanes or self.small_channels % lanes:
            return 1
        is_pointwise = self.kernel == 1 and self.groups == 1
        strided = prod(self.large.shape[2:]) != prod(self.small.shape[2:])
        return 2 if is_pointwise and not strided else 0


def _sizes(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> _Sizes | None:
    """Return the sizes of x, weight [out, in / groups, ...], transposed [in, out / groups, ...]."""
    large, small = (out, x) if transposed else (x, out)
    # An image without a batch begins with its channels.
    axis = 0 if len(large.shape) == len(weight.shape) - 1 else 1
    if min(len(large.shape), len(weight.shape)) < 2 or not min(x.numel, out.numel, weight.numel):
        return None
    groups = max(1, large.shape[axis] // weight.shape[1])
    few = weight.shape[0] // groups
    return _Sizes(groups, large, small, weight.shape[1], max(1, few), weight.shape[2:])


def _work(call: Call, x: Tensor, sizes: _Sizes, *kinds: str, own: bool | None = None) -> Work:
    flops = sizes.flops * len(kinds)
    if sizes.large_channels == 1 and sizes.groups > 1:
        # Depthwise: one input channel per group leaves no inner size for tensor cores.
        images = len(x.shape) == len(sizes.window) + 2
        last = images and bool(x.recorded_strides) and x.strides[1] == 1
        depthwise = DepthwiseSizes(sizes.large, sizes.small, sizes.window, last, own)
        cycles = sum(map(depthwise.cycles, kinds)) if images else 0.0
        return replace(vector_work(call, flops), cycles=cycles)
    return matmul_work(call, allowing_tf32(x), flops, parts=sizes.parts(*kinds))


def _convolution(
    transposed_at: int | None, *, transposed: bool = False, own: bool | None = None
) -> Formula:
    """Return the formula of a forward convolution.

    Args:
        transposed_at: position of the argument `transposed`; None: no such argument.
        transposed: whether the operator itself is a transposed convolution.
        own: whether torch's own kernel runs if the convolution is depthwise; None: the layout of
            the images decides.
    """

    def formula(call: Call) -> Work | None:
        x, weight, out = call.tensor(0), call.tensor(1), call.output()
        if x is None or weight is None or out is None:
            return None
        turned = transposed or (transposed_at is not None and call.value(transposed_at) is True)
        sizes = _sizes(x, weight, out, transposed=turned)
        return None if sizes is None else _work(call, x, sizes, "up" if turned else "down", own=own)

    return formula


def _convolution_backward(call: Call) -> Work | None:
    """The gradients of input and weight each take the forward's products once, if requested."""
    grad, x, weight = (call.tensor(position) for position in range(3))
    mask = call.value(10)
    if grad is None or x is None or weight is None or not isinstance(mask, list):
        return None
    turned = call.value(7) is True
    sizes = _sizes(x, weight, grad, transposed=turned)
    kinds = ("down" if turned else "up", "filter")
    requested = [kind for position, kind in enumerate(kinds) if call.output(position) is not None]
    return None if sizes is None else _work(call, x, sizes, *requested)


# Whether these transpose is an argument; for those in `_FORWARD` the name says that they do not.
_BY_ARGUMENT = ("convolution", "_convolution", "convolution_overrideable")
_FORWARD = """
    cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution
    mkldnn_convolution _slow_conv2d_forward thnn_conv2d slow_conv_dilated2d slow_conv_dilated3d
    slow_conv3d_forward"""

CONVOLUTIONS: dict[str, Formula] = {
    **dict.fromkeys(_BY_ARGUMENT, _convolution(6)),
    **dict.fromkeys(_FORWARD.split(), _convolution(None, own=False)),
    **dict.fromkeys(("_conv_depthwise2d", "conv_depthwise3d"), _convolution(None, own=True)),
    **dict.fromkeys(
        ("slow_conv_transpose2d", "slow_conv_transpose3d"), _convolution(None, transposed=True)
    ),
    "convolution_backward": _convolution_backward,
}

NEED_VALUES = frozenset({*_BY_ARGUMENT, "convolution_backward"})
"""Operators whose cost depends on argument values in addition to shapes."""

NEED_STRIDES = NEED_VALUES
"""Operators whose cost depends on the layout of their images, if they are depthwise."""


def _triangular_solve(call: Call) -> Work | None:
    """Return the work of a triangular system a [..., n, n] for right sides b, by substitution.

    n^2 FLOPs for each right side. transformers' linear attention solves one for each chunk.
    """
    a, b = call.tensor(0), call.tensor(1)
    if a is None or b is None or not a.shape:
        return None
    return matmul_work(call, a, b.numel * a.shape[-1])


BY_CUDNN = frozenset({*CONVOLUTIONS, *RECURRENT})
"""Operators of cuDNN, which multiplies float32 in TF32 by default."""

FORMULAS = {
    **GEMMS,
    **CONVOLUTIONS,
    **RECURRENT,
    "linalg_solve_triangular": _triangular_solve,
}
