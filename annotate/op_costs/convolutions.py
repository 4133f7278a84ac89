"""Convolutions: FLOPs from shapes, and the GEMMs that libraries turn them into.

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

from math import prod
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import Formula, Part, Work, product, vector
from onerank.annotate.op_costs.operands import Call, Tensor

_CHANNEL_BYTES = 16
"""Bytes of neighbouring channels that matrix units load; fewer channels are padded with zeros."""
_INNER = 32768
"""Largest inner size of one GEMM. A filter's gradient sums over all points of a batch of images, so
its inner size is divided further than `gemm_tiles` splits it."""

SLOWER = {"down": 1.14, "up": 1.3, "filter": 1.4}
"""Time of a convolution over that of a GEMM of its sizes by `gemm_tiles`.

Measured on DeepBench's 16-bit convolutions of 32 channels and more with cuDNN 7.6; medians on a
V100 and a T4: 1.13 and 1.15 (down), 1.34 and 1.24 (up), 1.31 and 1.78 (filter); see
benchmarks/deepbench.py.
"""


class _Sizes(NamedTuple):
    """Sizes of a convolution between a larger image and a smaller one, per group of channels."""

    groups: int
    large: Tensor
    small: Tensor
    large_channels: int
    small_channels: int
    kernel: int

    @property
    def flops(self) -> int:
        """FLOPs of one pass: each point of the smaller image sums over one filter."""
        return 2 * self.small.numel * self.large_channels * self.kernel

    def parts(self, *kinds: str) -> tuple[Part, ...]:
        """Return the GEMMs of the kinds in `SLOWER`."""
        return tuple(self._part(kind) for kind in kinds)

    def _part(self, kind: str) -> Part:
        item = self.large.item_bytes
        lanes = max(1, _CHANNEL_BYTES // item)
        padded_large = -(-self.large_channels // lanes) * lanes
        padded_small = -(-self.small_channels // lanes) * lanes
        points = self.small.numel // (self.groups * self.small_channels)
        large_points = self.large.numel // (self.groups * self.large_channels)
        slower = SLOWER[kind]
        if kind == "down":
            sizes, image = (points, self.small_channels, padded_large * self.kernel), self.large
        elif kind == "up":
            inner = max(1, points * padded_small * self.kernel // max(1, large_points))
            sizes, image = (large_points, self.large_channels, inner), self.small
        else:
            divided = -(-points // _INNER)
            sizes, image = (
                (padded_large * self.kernel, self.small_channels, points // divided),
                self.large,
            )
            reuse = self.groups * padded_large * self.kernel * points / max(1, image.numel)
            return Part(self.groups * divided, *sizes, item, max(1.0, reuse), slower)
        reuse = self.groups * sizes[0] * sizes[2] / max(1, image.numel)
        return Part(self.groups, *sizes, item, max(1.0, reuse), slower)


def _sizes(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> _Sizes | None:
    """Return the sizes of x, weight [out, in / groups, ...], transposed [in, out / groups, ...]."""
    large, small = (out, x) if transposed else (x, out)
    axis = 0 if len(large.shape) == len(weight.shape) - 1 else 1  # of an image without a batch
    if min(len(large.shape), len(weight.shape)) < 2 or not min(x.numel, out.numel, weight.numel):
        return None
    groups = max(1, large.shape[axis] // weight.shape[1])
    few = weight.shape[0] // groups
    return _Sizes(groups, large, small, weight.shape[1], max(1, few), prod(weight.shape[2:]))


def _work(call: Call, x: Tensor, sizes: _Sizes, *kinds: str) -> Work:
    flops = sizes.flops * len(kinds)
    if sizes.large_channels == 1 and sizes.groups > 1:
        return vector(call, flops)
    return product(call, allowing_tf32(x), flops, parts=sizes.parts(*kinds))


def _convolution(transposed_at: int | None, *, transposed: bool = False) -> Formula:
    """Return the formula of a forward convolution.

    Args:
        transposed_at: position of the argument `transposed`; None: no such argument.
        transposed: whether the operator itself is a transposed convolution.
    """

    def formula(call: Call) -> Work | None:
        x, weight, out = call.tensor(0), call.tensor(1), call.output()
        if x is None or weight is None or out is None:
            return None
        turned = transposed or (transposed_at is not None and call.value(transposed_at) is True)
        sizes = _sizes(x, weight, out, transposed=turned)
        return sizes and _work(call, x, sizes, "up" if turned else "down")

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
    return sizes and _work(call, x, sizes, *requested)


def allowing_tf32(x: Tensor) -> Tensor:
    """Return the operand with the dtype that cuDNN multiplies in."""
    # PyTorch allows TF32 for cuDNN by default (`torch.backends.cudnn.allow_tf32`), not for cuBLAS.
    return Tensor(x.shape, "tfloat32", x.item_bytes) if x.dtype == "float32" else x


_BY_ARGUMENT = ("convolution", "_convolution", "convolution_overrideable")
_FORWARD = """
    cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution
    mkldnn_convolution _slow_conv2d_forward thnn_conv2d slow_conv_dilated2d slow_conv_dilated3d
    slow_conv3d_forward _conv_depthwise2d conv_depthwise3d"""

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_BY_ARGUMENT, _convolution(6)),
    **dict.fromkeys(_FORWARD.split(), _convolution(None)),
    **dict.fromkeys(
        ("slow_conv_transpose2d", "slow_conv_transpose3d"), _convolution(None, transposed=True)
    ),
    "convolution_backward": _convolution_backward,
}

NEED_VALUES = frozenset({*_BY_ARGUMENT, "convolution_backward"})
"""Operators whose cost depends on argument values in addition to shapes."""
