"""The time of FlashAttention 2 where it divides the keys: decodes, and prefills of few tokens.

A call with one query per sequence has a thread block for each sequence, key head and tile of 64
queries; the heads of a group are its queries. If these blocks fill less than 0.8 of two per SM, the
kernel also divides the keys: `num_splits_heuristic` of torch's `flash_attn/flash_api.cpp` (2.11)
takes the fewest parts with which the waves of blocks are at least 0.85 times as full as with the
best number. A second kernel combines the parts. On an H100 the heuristic gives the recorded grid of
each of the 47 decodes of a Llama-8B that were compared.

Blocks run in waves of as many per SM as fit. A wave takes its prologue, and the longer of two: the
keys of the fullest SM at the rate of its blocks, and all blocks' keys at the rate of the memory.

A call that does not divide its keys runs the kernel of prefills, whose tile has 128 rows even if a
sequence has one query. So a block of keys takes the cycles that it takes in a prefill
(`flash2_prefill`), which differ between sizes of heads: 256 sequences of 1,001 tokens with heads
of 160, in tiles of 192, take an H200 2.9 ms at 1.8 TB/s; with 8 key heads of 256 they take 0.48 ms
at 4.3 TB/s, and memory limits them.

A prefill has a block for each head and tile of 64 new tokens, and divides the keys by the same
rule: 64 tokens of 32 heads are 32 blocks, whose keys become 6 to 8 parts. The products of a tile
limit such a block, not its keys, which the heads of a group share in the cache.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.flash2_prefill import FLASH2_TILES, TILES, kernel_head_size
from onerank.annotate.models.gemm_tiles import p_norm
from onerank.annotate.models.prediction_terms import Term, quantity, total
from onerank.ir.arrays import F64, I64, Mask

BLOCKS_PER_SM = 2
"""Thread blocks of an SM that the heuristic counts on."""

FULL_WAVE = 0.8
"""Share of these blocks from which the kernel does not divide keys."""

# The least efficiency of the heuristic relative to the best, and the most parts.
_NEARLY_BEST, _MOST_PARTS = 0.85, 128
_QUERY_TILE = 64


@dataclass(frozen=True, slots=True)
class WholeKeys:
    """Coefficients of the kernel whose thread blocks have all keys of a sequence.

    Attributes:
        floor: launch floors of a call.
        prologue_cycles: of a wave.
        alone_key_cycles: for each key, of a block that has an SM for itself and waits for its own
            loads; not of heads of 192, whose blocks always have one.
        bandwidth_share: share of the described bandwidth that all blocks reach together.
        overlap: exponent of how the SMs' own rate and the memory's overlap.
    """

    floor: float
    prologue_cycles: float
    alone_key_cycles: float
    bandwidth_share: float
    overlap: float

    def wave_ns(self, gpu: Gpu, running: F64, keys: F64, width: F64) -> F64:
        """Return the time of a wave, float64[d].

        Args:
            gpu: the GPU.
            running: blocks of the wave, up to those that fit on all SMs.
            keys: of a block.
            width: elements of a head.
        """
        sizes = _kernel_sizes(width)
        block_keys, per_sm = np.array([TILES[size][1:] for size in sizes], dtype=np.float64).T
        tiles = [FLASH2_TILES[gpu.architecture][size] for size in sizes]
        one = np.array([tile.alone for tile in tiles])
        two = np.array([2 * (tile.shared or 0.0) for tile in tiles])
        alone = np.where(per_sm > 1, self.alone_key_cycles * block_keys, one)
        each = np.where((per_sm > 1) & (running > gpu.sm_count), np.maximum(alone, two), alone)
        cycles = self.prologue_cycles + np.ceil(keys / block_keys) * each
        key_bytes = 4 * width  # key and value, of 16 bits
        bandwidth = self.bandwidth_share * gpu.bandwidth_bytes_per_s / 1e9
        by_memory = np.maximum(running, 1) * keys * key_bytes / bandwidth
        # Decodes stay below the power limit.
        return p_norm(self.overlap, cycles / gpu.max_clock_hz * 1e9, by_memory)


@dataclass(frozen=True, slots=True)
class DividedKeys:
    """Coefficients of the kernel whose thread blocks have a part of the keys of a sequence.

    Attributes:
        floor: launch floors of a call.
        prologue_cycles: of a wave.
        block_key_cycles: of a block for each key, if it has an SM for itself.
        sm_key_cycles: of an SM for each key of two blocks, and for each key and element of a head.
        bandwidth_share: share of the described bandwidth that all blocks reach together.
        overlap: exponent of how the SMs' own rate and the memory's overlap.
    """

    floor: float
    prologue_cycles: float
    block_key_cycles: float
    sm_key_cycles: tuple[float, float]
    bandwidth_share: float
    overlap: float

    def wave_ns(self, gpu: Gpu, running: F64, keys: F64, read: F64, width: F64) -> F64:
        """Return the time of a wave, float64[d].

        Args:
            gpu: the GPU.
            running: blocks of the wave, up to two per SM.
            keys: of the block that has most.
            read: keys that a block reads in the mean.
            width: elements of a head.
        """
        cycle = 1e9 / gpu.clock_hz
        each, by_width = self.sm_key_cycles
        of_two = np.maximum(self.block_key_cycles, 2 * (each + by_width * width))
        key_cycles = np.where(running > gpu.sm_count, of_two, self.block_key_cycles)
        key_bytes = 4 * width  # key and value, of 16 bits
        bandwidth = self.bandwidth_share * gpu.bandwidth_bytes_per_s / 1e9
        by_memory = np.maximum(running, 1) * read * key_bytes / bandwidth
        return self.prologue_cycles * cycle + p_norm(
            self.overlap, keys * key_cycles * cycle, by_memory
        )


@dataclass(frozen=True, slots=True)
class Flash2Decode:
    """Coefficients on an architecture.

    Attributes:
        whole: of the kernel whose blocks have all keys of a sequence.
        divided: of the one whose blocks have a part of them.
    """

    whole: WholeKeys
    divided: DividedKeys


FLASH2_DECODE = {
    "hopper": Flash2Decode(
        whole=WholeKeys(
            floor=0.577,
            prologue_cycles=8500.0,
            alone_key_cycles=47.8,
            bandwidth_share=1.099,
            overlap=4.65,
        ),
        divided=DividedKeys(
            floor=1.175,
            prologue_cycles=3530.0,
            block_key_cycles=10.2,
            sm_key_cycles=(7.5, 0.0445),
            bandwidth_share=1.167,
            overlap=1.62,
        ),
    )
}
"""Architecture -> coefficients.

`whole` was fitted to 103 calls of steps of 23 models on H100s and H200s, with heads of 64 to 256:
3.1% off in the mean. Without Zamba 2 (heads of 160) and Gemma 2 (256) in the fit, their calls are
6.1% off on an H200 (2026-11-28-serving-blind-7-h200).

`divided` was fitted to 48 decodes of a Llama-8B and a Llama-1B (32 heads of 128 or 64, 8 key heads;
1 to 256 sequences of 128 to 16,384 tokens) with torch 2.11 on H100s and an H200 (2026-11-26 and
27), of which it is about 4% off in the mean; behind a prefill of the same step 18% at most. 119
decodes of heads of 64, 96, 128 and 256 are 7% off (2026-11-27-kernel-sweep-h100).
"""

# The kernel that combines parts reads them one after another. Its floor in launches, the cycles for
# a part, and those of a block beyond the first two on an SM. On an H100 it is 5% off in 119 decodes
# and 8% in 48 prefills, with which the figures were chosen, 8 and 10% in 9 and 8 others
# (2026-11-27-kernel-sweep-h100).
_COMBINE_FLOORS, _PART_CYCLES, _BLOCK_CYCLES, _BLOCKS_TOGETHER = 1.05, 390.0, 700.0, 2.0


def _combine_ns(gpu: Gpu, results: F64, width: F64, parts: F64) -> F64:
    """Return the time to combine the parts of queries' results, float64[d].

    Args:
        gpu: the GPU.
        results: queries of all heads, of all sequences.
        width: elements of a head.
        parts: into which the keys are divided.
    """
    cycle = 1e9 / gpu.clock_hz
    # `kBlockM` of `run_mha_fwd_splitkv_dispatch`: results of a block.
    together = np.where(width % 128 == 0, 4, np.where(width % 64 == 0, 8, 16))
    blocks = np.ceil(results / together) / gpu.sm_count
    further = _BLOCK_CYCLES * np.maximum(0, blocks - _BLOCKS_TOGETHER)
    return _COMBINE_FLOORS * gpu.launch_floor_ns + (_PART_CYCLES * parts + further) * cycle


@dataclass(frozen=True, slots=True)
class Flash2Prefill:
    """Coefficients of a prefill with divided keys on an architecture.

    Attributes:
        floor: launch floors of a call.
        prologue_cycles: of a wave.
        key_cycles: of a block for each key, with heads of 128.
        overlap: exponent of how the products of all blocks overlap with reading keys and values.
    """

    floor: float
    prologue_cycles: float
    key_cycles: float
    overlap: float


FLASH2_PREFILL = {
    "hopper": Flash2Prefill(
        floor=1.313,
        prologue_cycles=3870.0,
        key_cycles=48.2,
        overlap=2.5,
    )
}
"""Architecture -> coefficients.

Fitted to five prefills of a Llama-8B (32 heads of 128, 8 key heads; 64 and 256 tokens after 0 to
8,192) on two H100s with torch 2.11. The overlap was chosen on 48 prefills of heads of 64 to 256, of
which 24 have a key head for each head, so that memory limits them. With the combining kernel these
are 7% off in the mean, and eight others 8% (2026-11-27-kernel-sweep-h100).
"""


@dataclass(frozen=True, slots=True)
class WaveTerms:
    """Terms of the time of d calls, in ns.

    Attributes:
        floor_ns: launch floor, float64[d].
        waves: waves of thread blocks, int64[d].
        waves_ns: their time, float64[d].
        combine_ns: time of the kernel that combines parts; 0 without one, float64[d].
    """

    floor_ns: F64
    waves: I64
    waves_ns: F64
    combine_ns: F64

    @property
    def predicted_ns(self) -> F64:
        """The time, float64[d]."""
        return self.floor_ns + self.waves_ns + self.combine_ns

    def term(self, i: int, gpu: str) -> Term:
        """Return the time of call `i` on the GPU of this name as a term."""
        on = f"on {gpu}"
        terms = [
            quantity("floor", float(self.floor_ns[i]), note=f"launch floor {on}"),
            quantity(
                "waves", self.waves_ns[i], note=f"waves of thread blocks {on}: {self.waves[i]}"
            ),
        ]
        if self.combine_ns[i]:
            note = f"sum over the parts of divided keys {on}"
            terms.append(quantity("combine", self.combine_ns[i], note=note))
        value = float(self.predicted_ns[i])
        return total(*terms, name="by waves", value=value, note=on)


def flash2_decode_terms(gpu: Gpu, shapes: F64, c: Flash2Decode) -> WaveTerms:
    """Return the terms of the time of attention with a few queries per sequence.

    Args:
        gpu: the GPU.
        shapes: as for `attention_time.attention_terms`, float64[d, 10].
        c: coefficients of the architecture.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, _, rows, keys, d, dv, *_ = columns
    width = (d + dv) / 2
    units, blocks, block_keys, parts = _division(gpu, shapes)
    divided = parts > 1
    per_sm = np.array([TILES[size][2] for size in _kernel_sizes(width)])
    places = np.where(divided, BLOCKS_PER_SM, per_sm) * float(gpu.sm_count)
    full, rest = np.divmod(units * parts, places)
    # The longest part determines a wave, but only its own keys are read.
    longest, read = np.ceil(blocks / parts) * block_keys, keys / parts

    def wave_ns(running: F64) -> F64:
        of_parts = c.divided.wave_ns(gpu, running, longest, read, width)
        return np.where(divided, of_parts, c.whole.wave_ns(gpu, running, keys, width))

    waves_ns = full * wave_ns(places) + np.where(rest > 0, wave_ns(rest), 0.0)
    combine = _combine_ns(gpu, batch * heads * rows, width, parts)
    return WaveTerms(
        floor_ns=np.where(divided, c.divided.floor, c.whole.floor) * gpu.launch_floor_ns,
        waves=(full + (rest > 0)).astype(np.int64),
        waves_ns=waves_ns,
        combine_ns=np.where(divided, combine, 0.0),
    )


def _kernel_sizes(width: F64) -> list[int]:
    """Return the size of heads of each call's kernel; the largest for wider heads."""
    return [kernel_head_size(int(each)) or max(TILES) for each in width]


def divides_keys(gpu: Gpu, shapes: F64) -> Mask:
    """Return whether the kernel divides the keys of each call, bool[d].

    Arguments as for `flash2_decode_terms`.
    """
    return _division(gpu, shapes)[-1] > 1


def flash2_prefill_terms(gpu: Gpu, shapes: F64, c: Flash2Prefill) -> WaveTerms:
    """Return the terms of the time of prefills whose keys are divided.

    Args:
        gpu: the GPU.
        shapes: as for `attention_time.attention_terms`, float64[d, 10].
        c: coefficients of the architecture.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, keys, d, dv, *_ = columns
    units, blocks, block_keys, parts = _division(gpu, shapes)
    cycle = 1e9 / gpu.clock_hz
    longest = np.ceil(blocks / parts) * block_keys * c.key_cycles * (d + dv) / 256
    waves = np.ceil(units * parts / (BLOCKS_PER_SM * gpu.sm_count))
    by_products = waves * (c.prologue_cycles + longest) * cycle
    read_bytes = 2 * batch * key_heads * keys * (d + dv)  # of 16 bits
    by_memory = read_bytes / gpu.bandwidth_bytes_per_s * 1e9
    return WaveTerms(
        floor_ns=np.full(len(shapes), c.floor * gpu.launch_floor_ns),
        waves=waves.astype(np.int64),
        waves_ns=p_norm(c.overlap, by_products, by_memory),
        combine_ns=_combine_ns(gpu, batch * heads * rows, (d + dv) / 2, parts),
    )


def _division(gpu: Gpu, shapes: F64) -> tuple[F64, F64, F64, F64]:
    """Return how the kernel divides each call's work.

    Returns:
        (thread blocks without a division of the keys, blocks of keys, keys of a block, parts into
        which the keys are divided), float64[d] each.
    """
    columns: list[F64] = list(shapes.T)
    batch, heads, key_heads, rows, keys, d, dv, *_ = columns
    # A single query of each head of a group becomes a row of one tile.
    swaps = (rows == 1) & (heads > key_heads)
    in_tile: F64 = np.where(swaps, heads / np.maximum(key_heads, 1), rows)
    units = batch * np.where(swaps, key_heads, heads) * np.ceil(in_tile / _QUERY_TILE)
    width = (d + dv) / 2
    # `set_params_splitkv`: fewer keys in a block of wider heads.
    block_keys: F64 = np.where(width <= 64, 256, np.where(width <= 128, 128, 64))
    blocks = np.ceil(keys / block_keys)
    places = BLOCKS_PER_SM * gpu.sm_count
    parts = [_parts(int(u), int(b), places) for u, b in zip(units, blocks, strict=True)]
    return units, blocks, block_keys, np.array(parts, dtype=np.float64)


@cache
def _parts(units: int, blocks: int, places: int) -> int:
    """Return into how many parts the keys of each unit are divided, as `num_splits_heuristic`."""
    if units >= FULL_WAVE * places:
        return 1
    efficiencies: list[float] = []
    for parts in range(1, min(_MOST_PARTS, places, blocks) + 1):
        # More parts than these leave as many blocks to the longest of them.
        same = parts > 1 and -(-blocks // parts) == -(-blocks // (parts - 1))
        waves = units * parts / places
        efficiencies.append(0.0 if same else waves / math.ceil(waves))
    least = _NEARLY_BEST * max(efficiencies)
    return 1 + next(at for at, efficiency in enumerate(efficiencies) if efficiency >= least)
