"""SM cycles of depthwise convolutions, which have no GEMM: vector units multiply.

torch's kernels are in DepthwiseConv2d.cu and DepthwiseConv3d.cu. cuDNN runs images with the
channels last and, of others, those in float16 with windows of 3 x 3 and 5 x 5 and of one row
(`use_cudnn_depthwise` in Convolution.cpp). A thread computes one point, which costs a constant
number of cycles and a number for each point of the window. Measured on an H200 with torch 2.11 and
cuDNN 9.19 (benchmarks/results, 2026-11-28-convolutions-h200.txt), windows of 3 to 49 points.
"""

from math import prod
from typing import NamedTuple

from onerank.annotate.op_costs.operands import Tensor


class _Cycles(NamedTuple):
    """SM cycles of a point of an image, and of each point of its window."""

    point: float
    tap: float


# By kind: of a point of the smaller image, of the larger one, and of the smaller one. torch's
# kernels have their loops unrolled for windows of 3 x 3 and 5 x 5.
_UNROLLED = {"down": _Cycles(1.6, 0.105), "up": _Cycles(4.5, 0.0)}
_OWN = {
    1: {"down": _Cycles(2.6, 0.07), "up": _Cycles(2.3, 0.13)},
    2: {"down": _Cycles(1.0, 0.16), "up": _Cycles(1.0, 0.225)},
    3: {"down": _Cycles(0.0, 0.2), "up": _Cycles(0.0, 0.21)},
}

# cuDNN, images with their channels first in float16: with windows of one row, and of more.
_FIRST_ROW = {"down": _Cycles(0.1, 0.045), "up": _Cycles(0.1, 0.045), "filter": _Cycles(0.0, 0.22)}
_FIRST = {
    "down": _Cycles(0.25, 0.068),
    "up": _Cycles(0.25, 0.068),
    "filter": _Cycles(0.8, 0.06),
}
_LEAST_CHANNELS = 32

# cuDNN, channels last, by bytes of an element: larger windows of 32 bits have a slow kernel for the
# filter. Volumes have others.
_LAST = {
    2: {"down": _Cycles(0.25, 0.035), "up": _Cycles(0.1, 0.09), "filter": _Cycles(0.6, 0.02)},
    4: {"down": _Cycles(0.0, 0.1), "up": _Cycles(0.0, 0.1), "filter": _Cycles(0.0, 0.11)},
}
_LAST_VOLUME = {
    "down": _Cycles(0.0, 0.6),
    "up": _Cycles(0.0, 0.75),
    "filter": _Cycles(0.0, 0.6),
}
_MOST_TAPS, _MANY_TAPS = 25, _Cycles(0.0, 1.23)

# torch's kernel for the filter has a block for each of its elements, whose warps take an image at a
# time: cycles of an image, and of a point.
_FILTER_IMAGE, _FILTER_POINT = 36.0, 0.37


class DepthwiseSizes(NamedTuple):
    """A depthwise convolution between a larger image and a smaller one, [batch, channels, ...].

    Attributes:
        large: the larger image.
        small: the smaller one.
        window: sizes of the filter's window.
        channels_last: whether the images have their channels last.
        own: whether torch's own kernel runs; None: by dtype, layout and sizes.
    """

    large: Tensor
    small: Tensor
    window: tuple[int, ...]
    channels_last: bool
    own: bool | None = None

    def cycles(self, kind: str) -> float:
        """Return the SM cycles of a kernel.

        Args:
            kind: "down" for the smaller image, "up" for the larger one, "filter" for the filter.
        """
        taps, rates = prod(self.window), self._of_cudnn()
        if rates is None and kind == "filter":
            images, channels = self.small.shape[:2]
            points = self.small.numel // (images * channels)
            return channels * taps * images * (_FILTER_IMAGE + _FILTER_POINT * points)
        if rates is None:
            rates = _UNROLLED if self._is_unrolled else _OWN[min(len(self.window), 3)]
        each = rates[kind]
        if kind == "filter" and rates is _LAST[4] and taps > _MOST_TAPS:
            each = _MANY_TAPS
        points = self.large.numel if kind == "up" else self.small.numel
        return points * (each.point + each.tap * taps)

    @property
    def _is_unrolled(self) -> bool:
        return self.window in ((1, 1), (3, 3), (5, 5))

    def _of_cudnn(self) -> dict[str, _Cycles] | None:
        """Return the cycles of cuDNN's kernels; None if torch's own run."""
        if self.own:
            return None
        images, of_images = len(self.window) > 1, len(self.window) == 2
        if images and self.channels_last:
            return _LAST[4 if self.large.item_bytes > 2 else 2] if of_images else _LAST_VOLUME
        runs = self.large.dtype == "float16" and self.large.shape[1] >= _LEAST_CHANNELS
        runs &= self.large.numel == self.small.numel
        runs &= not images or (self._is_unrolled and prod(self.window) > 1)
        if not runs and self.own is None:
            return None
        return _FIRST if images else _FIRST_ROW
