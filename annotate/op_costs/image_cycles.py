"""SM cycles of kernels that resample, pool, sample, pad and classify images.

Their threads compute addresses and compare or add values one by one, and that takes longer than
the bytes. Constants are fitted to an H200 with torch 2.11
(benchmarks/results, 2026-11-28-images-h200.txt), in cycles of `max_clock_mhz`.
"""

from collections.abc import Callable
from math import ceil

from onerank.annotate.op_costs.operands import Call, Tensor, numbers_of
from onerank.annotate.op_costs.reductions import SM_COUNT

_INTERPOLATED = ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")

_POOLED = ("max_pool2d_with_indices", "avg_pool2d")

_SOFTMAX = {
    **dict.fromkeys(("_softmax", "_log_softmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
}
"""Operator -> position of its dimension."""

NEED_VALUES = frozenset((*(name + end for name in _POOLED for end in ("", "_backward")), *_SOFTMAX))
"""Poolings and softmax, by base name, whose cycles depend on the window or the dimension."""

NEED_STRIDES = frozenset(
    name + end for name in (*_POOLED, *_INTERPOLATED) for end in ("", "_backward")
)
"""Operators on images, by base name, that have another kernel for channels last."""

_CHANNEL_AXIS, _AXES = 1, 4


def image_cycles(call: Call) -> float:
    """Return the SM cycles of a call, summed over all SMs; 0 for operators of other kinds."""
    given, result = call.tensor(0), call.output()
    if call.op in _OF_PIXELS:
        image = call.tensor(_OF_PIXELS[call.op][0])
        return (
            _OF_PIXELS[call.op][1](call, image) if image is not None and _is_image(image) else 0.0
        )
    if call.op not in NEED_STRIDES or not _is_image(given) or not _is_image(result):
        return 0.0
    assert given is not None
    assert result is not None
    last = given.shape[_CHANNEL_AXIS] > 1 and given.strides[_CHANNEL_AXIS] == 1
    name, backward = call.op.removesuffix("_backward"), call.op.endswith("_backward")
    if name in _POOLED:
        return _pooled(call, result, last=last)
    rule = (_RESAMPLED_BACKWARD if backward else _RESAMPLED)[name]
    return rule(given, result, last)


def _is_image(tensor: Tensor | None) -> bool:
    return tensor is not None and len(tensor.shape) == _AXES and tensor.numel > 0


# Resampling ---------------------------------------------------------------------------------------

# A thread of a bilinear or bicubic forward has a pixel of the result and computes it in all images
# and channels, one after another (UpSampleBilinear2d.cu). An SM has one block of 1,024 pixels at a
# time, and a plane takes it a latency, which grows with the warps of the block and with images that
# the second-level cache does not hold. So 16,384 planes of 8 x 8 points take 2.8 ms, by their bytes
# 4 us.
_BLOCK_PIXELS, _WARP = 1024, 32
_PLANE, _PLANE_WARP, _PLANE_FROM_MEMORY = 325.0, 2.8, 390.0
_CACHED_BYTES, _UNCACHED_BYTES = 25e6, 50e6
_BICUBIC, _BICUBIC_LAST = 1050.0, 6500.0
_BICUBIC_BACKWARD = {2: 55_000.0, 4: 5500.0}

# With channels last, and at least four of them, a thread has a number: cycles of a number, by bytes
# of an element, forward and backward.
_LEAST_CHANNELS = 4
_BILINEAR_LAST, _BILINEAR_LAST_BACKWARD = {2: 2.45, 4: 2.3}, {2: 3.3, 4: 2.25}

# Nearest neighbours: cycles of a number with channels last, of a number of a backward and of each
# gradient that it sums. The forward of other images is limited by its bytes. A thread of their
# backward takes all images, and waits for one gradient after another: cycles of such a load.
_NEAREST_LAST, _NEAREST_BACKWARD, _NEAREST_GRADIENT, _NEAREST_LOAD = 1.63, 2.6, 0.12, 300.0

# A thread of the backward adds a gradient to four numbers in memory. Those that are added to one
# number wait for each other: cycles of a gradient, and of each gradient of the numbers it goes to;
# the second for 16 bits, which are swapped in pairs. Results that are smaller take longer to find.
_BACKWARD, _SMALLER_BACKWARD = {2: 2.6, 4: 1.8}, {2: 4.4, 4: 2.9}
_WAITING = {2: 0.68, 4: 0.14}


def _uncached(size: int) -> float:
    """Return the share of some bytes that the second-level cache does not hold."""
    share = (size - _CACHED_BYTES) / (_UNCACHED_BYTES - _CACHED_BYTES)
    return min(max(share, 0.0), 1.0)


def _planes(large: Tensor, cycles: float) -> float:
    """Return the cycles of a kernel with a thread for each pixel of the larger image."""
    pixels = large.shape[-2] * large.shape[-1]
    waves = ceil(ceil(pixels / _BLOCK_PIXELS) / SM_COUNT)
    return SM_COUNT * waves * large.numel / pixels * cycles


def _nearest_backward(given: Tensor, result: Tensor, last: bool) -> float:
    cycles = result.numel * _NEAREST_BACKWARD + given.numel * _NEAREST_GRADIENT
    images, growth = result.shape[0], given.numel / result.numel
    return cycles if last else max(cycles, SM_COUNT * images * growth * _NEAREST_LOAD)


def _bilinear(given: Tensor, result: Tensor, last: bool) -> float:
    if last and given.shape[_CHANNEL_AXIS] >= _LEAST_CHANNELS:
        return result.numel * _BILINEAR_LAST.get(given.item_bytes, 0.0)
    pixels = result.shape[-2] * result.shape[-1]
    warps = min(ceil(pixels / _WARP), _BLOCK_PIXELS // _WARP)
    uncached = _uncached(given.nbytes + result.nbytes)
    cycles = _PLANE + _PLANE_WARP * warps + _PLANE_FROM_MEMORY * uncached
    return _planes(result, cycles)


def _bilinear_backward(given: Tensor, result: Tensor, last: bool) -> float:
    width = given.item_bytes
    if width not in _WAITING:
        return 0.0
    if last and given.shape[_CHANNEL_AXIS] >= _LEAST_CHANNELS:
        return given.numel * _BILINEAR_LAST_BACKWARD[width]
    growth = given.numel / result.numel
    if growth < 1:
        return given.numel * _SMALLER_BACKWARD[width]
    return given.numel * (_BACKWARD[width] + _WAITING[width] * growth)


def _nearest(given: Tensor, result: Tensor, last: bool) -> float:
    return result.numel * _NEAREST_LAST if last else 0.0


def _bicubic(given: Tensor, result: Tensor, last: bool) -> float:
    return _planes(result, _BICUBIC_LAST if last else _BICUBIC)


def _bicubic_backward(given: Tensor, result: Tensor, last: bool) -> float:
    return _planes(given, _BICUBIC_BACKWARD.get(given.item_bytes, 0.0))


_Rule = Callable[[Tensor, Tensor, bool], float]
"""(operand, result, whether its channels come last) -> SM cycles."""

_RESAMPLED: dict[str, _Rule] = dict(
    zip(_INTERPOLATED, (_nearest, _bilinear, _bicubic), strict=True)
)

_RESAMPLED_BACKWARD: dict[str, _Rule] = dict(
    zip(_INTERPOLATED, (_nearest_backward, _bilinear_backward, _bicubic_backward), strict=True)
)

# Pooling ------------------------------------------------------------------------------------------

# A thread has a number of the result, in a backward the gradient of a number of the operand: cycles
# of a thread, and of each number in its window, or of each window that has its number.
_AVERAGE, _AVERAGE_LAST = (2.9, 0.04), (6.0, 0.05)
_AVERAGE_BACKWARD, _AVERAGE_LAST_BACKWARD = (4.3, 0.43), (4.25, 0.55)
_LARGEST, _LARGEST_LAST = (2.45, 0.21), (3.0, 0.25)
_LARGEST_BACKWARD, _LARGEST_LAST_BACKWARD = (2.85, 0.17), (1.5, 0.5)
_CYCLES = {
    ("avg_pool2d", False): (_AVERAGE, _AVERAGE_LAST),
    ("avg_pool2d", True): (_AVERAGE_BACKWARD, _AVERAGE_LAST_BACKWARD),
    ("max_pool2d_with_indices", False): (_LARGEST, _LARGEST_LAST),
    ("max_pool2d_with_indices", True): (_LARGEST_BACKWARD, _LARGEST_LAST_BACKWARD),
}


def _pooled(call: Call, result: Tensor, *, last: bool) -> float:
    """Return the cycles of a pooling by windows, or of its backward."""
    backward = call.op.endswith("_backward")
    at = 2 if backward else 1
    window = numbers_of(call.value(at)) or []
    stride = numbers_of(call.value(at + 1)) or window
    if not window or not all(stride):
        return 0.0
    # One number stands for both dimensions.
    met = float(window[0] * window[-1])
    if backward:
        met /= stride[0] * stride[-1]
    thread, each = _CYCLES[call.op.removesuffix("_backward"), backward][last]
    return result.numel * (thread + each * met)


# Sampling and padding -----------------------------------------------------------------------------

# A thread of grid_sample has a pixel and takes its channels one after another: cycles of a number,
# and of a channel where few pixels leave the SMs idle. Gradients are added to four numbers.
_SAMPLED, _SAMPLED_CHANNEL = 3.3, 365.0
_SAMPLED_BACKWARD, _SAMPLED_BACKWARD_CHANNEL = {2: 17.5, 4: 14.5}, {2: 2550.0, 4: 1200.0}

# Cycles of a number of a padded image, and of a plane at least.
_PADDED, _PADDED_PLANE = {"reflection_pad2d": 1.68, "replication_pad2d": 1.42}, 330.0


def _sampled(call: Call, image: Tensor) -> float:
    result = call.output()
    if result is None or not _is_image(result):
        return 0.0
    return max(result.numel * _SAMPLED, SM_COUNT * image.shape[1] * _SAMPLED_CHANNEL)


def _sampled_backward(call: Call, image: Tensor) -> float:
    each = _SAMPLED_BACKWARD.get(image.item_bytes, 0.0)
    channel = _SAMPLED_BACKWARD_CHANNEL.get(image.item_bytes, 0.0)
    return max(image.numel * each, SM_COUNT * image.shape[1] * channel)


def _padded(call: Call, image: Tensor) -> float:
    result = call.output()
    padded = max(image.numel, result.numel if result is not None else 0)
    planes = image.shape[0] * image.shape[1]
    return max(padded * _PADDED[call.op.removesuffix("_backward")], planes * _PADDED_PLANE)


# Classes of pixels --------------------------------------------------------------------------------

# A softmax over channels has a thread for each pixel, which passes over its channels: cycles of a
# number by bytes of an element, and of a channel at least, forward and backward.
_CLASSIFIED, _CLASSIFIED_CHANNEL = {2: 0.85, 4: 1.05}, 2330.0
_CLASSIFIED_BACKWARD, _CLASSIFIED_BACKWARD_CHANNEL = {2: 0.85, 4: 1.15}, 1160.0

# The losses of an image's pixels have a block of 1,024 threads for every 128 blocks of pixels, and
# one at least (NLLLoss2d.cu): cycles of its step, with scores from the cache and from memory.
_LOSS_THREADS, _PIXELS_OF_BLOCK = 1024, 128
_LOSS_STEP, _LOSS_BACKWARD_STEP = (1090.0, 1990.0), (890.0, 1640.0)


def _classified(call: Call, image: Tensor) -> float:
    axis = call.value(_SOFTMAX[call.op])
    if not isinstance(axis, int) or axis % _AXES != _CHANNEL_AXIS:
        return 0.0
    backward = "backward" in call.op
    each = (_CLASSIFIED_BACKWARD if backward else _CLASSIFIED).get(image.item_bytes, 0.0)
    channel = _CLASSIFIED_BACKWARD_CHANNEL if backward else _CLASSIFIED_CHANNEL
    return max(image.numel * each, SM_COUNT * image.shape[_CHANNEL_AXIS] * channel)


def _losses(call: Call, image: Tensor) -> float:
    pixels = image.shape[-2] * image.shape[-1]
    blocks = max(1, ceil(pixels / _LOSS_THREADS) // _PIXELS_OF_BLOCK)
    steps = ceil(pixels / (blocks * _LOSS_THREADS))
    waves = ceil(image.shape[0] * blocks / SM_COUNT)
    cached, uncached = _LOSS_BACKWARD_STEP if "backward" in call.op else _LOSS_STEP
    step = cached + (uncached - cached) * _uncached(image.nbytes)
    return SM_COUNT * waves * steps * step


_OF_PIXELS: dict[str, tuple[int, Callable[[Call, Tensor], float]]] = {
    "grid_sampler_2d": (0, _sampled),
    "grid_sampler_2d_backward": (0, _sampled_backward),
    **dict.fromkeys((name + end for name in _PADDED for end in ("", "_backward")), (0, _padded)),
    **dict.fromkeys(_SOFTMAX, (0, _classified)),
    "nll_loss2d_forward": (0, _losses),
    "nll_loss2d_backward": (1, _losses),
}
"""Operator -> position of the image, and its rule."""
