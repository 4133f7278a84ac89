"""Time of torch's attention kernels over that of `attention_time`, by the shape of the call.

`attention_time` predicts the kernel that is written for an architecture. Kernels of torch differ
from it by the size of heads, by masks and by dropout; small heads of the memory-efficient kernel
take the cycles of its thread blocks.
"""

from dataclasses import dataclass

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_time import QUERY_TILE
from onerank.annotate.op_costs.cost_record import AttentionShape
from onerank.ir.arrays import F64

_SCORE_ROWS = 64  # `fmha_cutlassF_..._64x64` and its backward


@dataclass(frozen=True, slots=True)
class ScoreBlocks:
    """SM cycles of a kernel whose thread blocks take 64 queries each, and 64 keys at a time.

    Several blocks share an SM, so their times add up. A call of many short sequences, such as the
    windows of an image, takes mostly the starts of its blocks.

    Attributes:
        widest: largest size of a head that has these cycles.
        forward: cycles of a block's start, and of 64 keys of heads of `widest`. The cycles of 64
            keys are proportional to the root of a head's size.
        backward: the same of the backward pass, whose blocks take 64 keys each.
    """

    widest: int
    forward: tuple[float, float]
    backward: tuple[float, float]

    def above_floor_ns(self, gpu: Gpu, shapes: F64, *, training: bool) -> F64:
        """Return the time of each call above the launch floor, float64[d].

        Arguments as for `ShapeFactors.of`.
        """
        call = AttentionShape.columns(shapes)
        rows, keys, backward = call["rows"], call["keys"], call["backward"] > 0
        of_start = np.where(backward, self.backward[0], self.forward[0])
        of_keys = np.where(backward, self.backward[1], self.forward[1])
        blocks: F64 = call["batch"] * call["heads"] * np.ceil(rows / _SCORE_ROWS)
        tiles = np.ceil(keys / _SCORE_ROWS)
        # A causal mask leaves a block half of the keys, and its own.
        tiles = np.where((call["causal"] > 0) & (rows == keys), (tiles + 1) / 2, tiles)
        cycles = of_start + tiles * of_keys * np.sqrt(call["d"] / self.widest)
        clock_hz = gpu.clock_hz if training else gpu.max_clock_hz
        return np.maximum(blocks / gpu.sm_count, 1.0) * cycles / clock_hz * 1e9


_DROPOUT_HEADS = (64, 128)


@dataclass(frozen=True, slots=True)
class Dropout:
    """SM cycles of the random number that a kernel draws for each score that it computes.

    Wider and smaller heads than the measured ones have the cycles of the nearest.

    Attributes:
        forward: for heads of `_DROPOUT_HEADS`, in the forward pass.
        backward: the same of the backward pass.
    """

    forward: tuple[float, float]
    backward: tuple[float, float]

    def time_ns(self, gpu: Gpu, shapes: F64, *, training: bool) -> F64:
        """Return the time that dropout adds to each call, 0 without dropout, float64[d].

        Arguments as for `ShapeFactors.of`.
        """
        call = AttentionShape.columns(shapes)
        rows, keys, sequences = call["rows"], call["keys"], call["batch"] * call["heads"]
        tiles = np.ceil(rows / QUERY_TILE)
        # A causal mask leaves a tile of queries half of the keys, and its own.
        seen = np.where((call["causal"] > 0) & (rows == keys), (tiles + 1) / (2 * tiles), 1.0)
        forward = np.interp(call["d"], _DROPOUT_HEADS, self.forward)
        backward = np.interp(call["d"], _DROPOUT_HEADS, self.backward)
        each = np.where(call["backward"] > 0, backward, forward)
        cycles = sequences * rows * keys * seen * each
        # Few tiles leave the other SMs idle.
        busy = np.minimum(sequences * tiles, gpu.sm_count)
        # As for `ScoreBlocks`: GEMMs keep the clock of a step of training at the power limit.
        clock_hz = gpu.clock_hz if training else gpu.max_clock_hz
        return np.where(call["dropout"] > 0, cycles / busy / clock_hz * 1e9, 0.0)


@dataclass(frozen=True, slots=True)
class ShapeFactors:
    """Time of a kernel that torch runs over that of the model, by the shape of the call.

    Kernels that do not start the longest tiles of a causal mask first wait for the last ones: their
    time grows by `forward_tail` or `backward_tail` of the longest tile, which with w tiles for each
    SM is 2 / w of the time of all.

    Attributes:
        heads: head sizes, ascending.
        forward: time over the model's for each head size, forward.
        backward: the same of the backward pass.
        forward_tail: share of the longest tile.
        backward_tail: the same of the backward pass.
        source: where the figures are from.
        sustained: sustained over peak rate of the GPU on which the kernel alone was measured and
            stayed below the power limit; None if it reached the limit.
        masked_forward: time with a mask over that without one for each head size, forward.
        masked_backward: the same of the backward pass.
        masked_narrow: the same, forward, of values that are narrower than keys; None: as of others.
        blocks: cycles of small heads in 16 bits, in the place of factors; None if it has none.
        dropout: cycles of dropout; None if it was not measured.
    """

    heads: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_tail: float
    backward_tail: float
    source: str
    sustained: float | None = None
    masked_forward: tuple[float, ...] | None = None
    masked_backward: tuple[float, ...] | None = None
    masked_narrow: float | None = None
    blocks: ScoreBlocks | None = None
    dropout: Dropout | None = None

    def in_training(self, gpu: Gpu) -> float:
        """Return the time in a step of training over the time alone.

        Products keep a step at the power limit, so its clock is the boost clock. A kernel that
        stays below the limit alone has the highest clock there. The model's rate is proportional
        to the root of the sustained rate, so a GPU with a lower one has a part of the limit in its
        time already, and gets a smaller factor.
        """
        rates = gpu.tensor_flops_per_s("bfloat16"), gpu.peak_tensor_flops_per_s("bfloat16")
        if self.sustained is None or not rates[0] or not rates[1]:
            return 1.0
        limited = (rates[0] / rates[1] / self.sustained) ** 0.5
        return gpu.max_clock_hz / gpu.clock_hz * limited

    def of(self, gpu: Gpu, shapes: F64, *, training: bool) -> F64:
        """Return the factor of each call, float64[d].

        Args:
            gpu: the GPU.
            shapes: as for `attention_time.attention_terms`, float64[d, 12].
            training: whether the calls are of a step of training.
        """
        call = AttentionShape.columns(shapes)
        by_head: F64 = np.where(
            call["backward"] > 0,
            np.interp(call["d"], self.heads, self.backward),
            np.interp(call["d"], self.heads, self.forward),
        )
        factors = by_head * self._waiting(gpu, shapes) * self._of_masks(shapes)
        return factors * self.in_training(gpu) if training else factors

    def dropout_ns(self, gpu: Gpu, shapes: F64, *, training: bool) -> F64:
        """Return the time that dropout adds to each call, float64[d]; arguments as for `of`."""
        if self.dropout is None:
            return np.zeros(len(shapes))
        added_ns = self.dropout.time_ns(gpu, shapes, training=training)
        return added_ns * self._waiting(gpu, shapes)

    def _waiting(self, gpu: Gpu, shapes: F64) -> F64:
        """Return the time with the wait for the last tiles over that without, float64[d]."""
        call = AttentionShape.columns(shapes)
        tiles: F64 = call["batch"] * call["heads"] * np.ceil(call["rows"] / QUERY_TILE)
        tail: F64 = np.where(call["backward"] > 0, self.backward_tail, self.forward_tail)
        waiting: F64 = 1 + 2 * tail / np.maximum(tiles / gpu.sm_count, _FEW_TILES)
        return np.where(call["causal"] > 0, waiting, 1.0)

    def _of_masks(self, shapes: F64) -> F64:
        """Return the time with the mask of each call over that without one, float64[d]."""
        if self.masked_forward is None or self.masked_backward is None:
            return np.ones(len(shapes))
        call = AttentionShape.columns(shapes)
        forward = np.interp(call["dv"], self.heads, self.masked_forward)
        if self.masked_narrow is not None:
            forward = np.where(call["d"] > call["dv"], self.masked_narrow, forward)
        backward = np.interp(call["dv"], self.heads, self.masked_backward)
        factors = np.where(call["backward"] > 0, backward, forward)
        return np.where(call["mask"] > 0, factors, 1.0)


# Tiles per SM below which the wait grows no further: the model's time is that of the longest tile.
_FEW_TILES = 4
# Of benchmarks/results/2026-11-26-attention-kernels-h100.txt; the factors are fitted to all of it.
# FlashAttention-2 reaches half of cuDNN's rate, at 1980 MHz. In training steps of 1.6 to 1.84 GHz
# its forward takes 1.06 to 1.14 times as long and its backward 1.05 to 1.16 times; 1980 over the
# boost clock of 1830 MHz is 1.08 (2026-11-27-generated-instructions-h100).
_H100 = "measured on an H100 SXM, torch 2.11 and CUDA 13, heads of 64 to 256"
# (family, architecture) -> factors of the operators that torch runs there: geometric means over
# 4096 tokens and more without a mask; the tails fit the causal calls. FlashAttention-2's forward
# has `flash2_prefill` instead, except for heads below 33 and with dropout. Dropout: calls of 256 to
# 4,096 tokens, causal and not (2026-11-28-attention-dropout-h200).
_BY_SHAPE = {
    ("flash2", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (1.45, 1.53, 1.69, 2.12, 2.25),
        (1.72, 1.82, 1.85, 2.37, 2.43),
        0.75,
        0.35,
        _H100,
        0.737,
        dropout=Dropout((0.079, 0.115), (0.111, 0.1)),
    ),
    ("cudnn", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (1.0, 1.07, 0.98, 0.98, 1.02),
        (1.08, 1.22, 1.055, 1.72, 1.64),
        0.4,
        0.3,
        _H100,
        # benchmarks/results/2026-11-28-masked-attention-h200.txt: geometric means over 512 to 4096
        # tokens of masks, bool or added, of one or each sequence.
        masked_forward=(1.85, 1.95, 1.91, 3.94, 2.72),
        masked_backward=(1.45, 1.65, 1.89, 1.86, 1.78),
        # Keys of 192 and values of 128, 512 queries after 1,024 and 8,192 keys, of DeepSeek-V3,
        # DeepSeek-V2-Lite and Kimi-Linear: 1.26 to 1.51 (2026-11-28-serving-blind-6-h100).
        masked_narrow=1.4,
        dropout=Dropout((0.235, 0.25), (0.145, 0.185)),
    ),
    # Triton's kernels, which Inductor generates without autotuning: seven calls on an H200, full,
    # causal, with a window and of documents, without the sum of the gradient's products
    # (2026-11-28-hopper-kernels-h200). Triton's tiles have a power of two of elements of a head, so
    # heads of 96 take as long as those of 128.
    ("flex", "hopper"): ShapeFactors(
        (64, 96, 128),
        (1.12, 1.4 * 128 / 96, 1.4),
        (1.52, 1.45 * 128 / 96, 1.45),
        0.5,
        0.0,
        "measured on an H200, torch 2.11",
    ),
    # Causal calls alone were measured, so their figures hold the wait for the last tiles. Blocks:
    # six calls of 512 to 8192 tokens by heads of 64 are 9% off at most. Of 4,096 windows of 49
    # tokens by heads of 32 an H200 takes 1.93 us for each block and SM, and 4.0 backward
    # (2026-11-28-nine-jobs-h200).
    ("efficient", "hopper"): ShapeFactors(
        (64, 96, 128, 192, 256),
        (3.4, 4.5, 3.55, 5.5, 5.75),
        (4.2, 5.8, 4.4, 19.5, 25.0),
        0.0,
        0.0,
        _H100,
        blocks=ScoreBlocks(64, (2080.0, 2360.0), (2910.0, 7560.0)),
        dropout=Dropout((0.53, 0.495), (0.85, 1.75)),
    ),
}


def shape_factors(family: str, gpu: Gpu) -> ShapeFactors | None:
    """Return the factors of a family on a GPU's architecture; None if unknown."""
    return _BY_SHAPE.get((family, gpu.architecture))
