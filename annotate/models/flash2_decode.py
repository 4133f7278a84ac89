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
sequence has one query. So two blocks of an SM take the cycles that they take in a prefill
(`flash2_prefill`), which differ between sizes of heads: 256 sequences of 1,001 tokens with heads of
160, in tiles of 192, take an H200 2.9 ms at 1.8 TB/s; with 8 key heads of 256 they take 0.48 ms at
4.3 TB/s, and memory limits them.

A prefill has a block for each head and tile of 64 new tokens, and divides the keys by the same
rule: 64 tokens of 32 heads are 32 blocks, whose keys become 6 to 8 parts. The products of a tile
limit such a block, not its keys, which the heads of a group share in the cache.
"""

import math
from collections.abc import Mapping
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
        prologue_cycles: of a wave with one block on each SM, and with two.
        alone_key_cycles: size of heads -> for each key, of a block that has an SM for itself and
            waits for its own loads.
        bandwidth_share: share of the described bandwidth that all blocks reach together.
        overlap: exponent of how the SMs' own rate and the memory's overlap.
    """

    floor: float
    prologue_cycles: tuple[float, float]
    alone_key_cycles: Mapping[int, float]
    bandwidth_share: float
    overlap: float

    def wave_ns(self, gpu: Gpu, running: F64, keys: F64, sizes: F64) -> F64:
        """Return the time of a wave, float64[d].

        Args:
            gpu: the GPU.
            running: blocks of the wave, up to those that fit on all SMs.
            keys: of a block.
            sizes: size of heads of the kernel.
        """
        block_keys, per_sm = np.array([TILES[int(size)][1:] for size in sizes], dtype=np.float64).T
        shared = [FLASH2_TILES[gpu.architecture][int(size)].shared for size in sizes]
        alone = np.array([self.alone_key_cycles[int(size)] for size in sizes]) * block_keys
        of_two = np.maximum(alone, 2 * np.array([each or 0.0 for each in shared]))
        has_two = (per_sm > 1) & (running > gpu.sm_count)
        one_prologue, prologue_of_two = self.prologue_cycles
        cycles = np.where(has_two, prologue_of_two, one_prologue)
        cycles += np.ceil(keys / block_keys) * np.where(has_two, of_two, alone)
        read_ns = _read_ns(gpu, running, keys, sizes, self.bandwidth_share)
        # Decodes stay below the power limit.
        return p_norm(self.overlap, cycles / gpu.max_clock_hz * 1e9, read_ns)


@dataclass(frozen=True, slots=True)
class DividedKeys:
    """Coefficients of the kernel whose thread blocks have a part of the keys of a sequence.

    Attributes:
        floor: launch floors of a call.
        prologue_cycles: of a wave.
        sm_key_cycles: of an SM with two blocks for each key of both, and for each key and element
            of a head. Memory limits blocks that have an SM each.
        bandwidth_share: share of the described bandwidth that all blocks reach together.
    """

    floor: float
    prologue_cycles: float
    sm_key_cycles: tuple[float, float]
    bandwidth_share: float

    def wave_ns(self, gpu: Gpu, running: F64, longest: F64, read: F64, sizes: F64) -> F64:
        """Return the time of a wave, float64[d].

        Args:
            gpu: the GPU.
            running: blocks of the wave, up to two per SM.
            longest: keys of the block that has most.
            read: keys that a block reads in the mean.
            sizes: size of heads of the kernel.
        """
        each, by_size = self.sm_key_cycles
        key_cycles = np.where(running > gpu.sm_count, 2 * (each + by_size * sizes), 0.0)
        read_ns = _read_ns(gpu, running, read, sizes, self.bandwidth_share)
        cycle = 1e9 / gpu.clock_hz
        return self.prologue_cycles * cycle + np.maximum(longest * key_cycles * cycle, read_ns)


def _read_ns(gpu: Gpu, running: F64, keys: F64, sizes: F64, share: float) -> F64:
    """Return the time to read the keys and values of a wave's blocks, float64[d].

    Narrower heads take as long as those of the kernel's size: with heads of 80, 160 and 224, calls
    that divide their keys were 16 to 21% short otherwise (2026-11-28-flash2-decodes-h200).

    Args:
        gpu: the GPU.
        running: blocks of the wave.
        keys: that a block reads.
        sizes: size of heads of the kernel.
        share: share of the described bandwidth.
    """
    key_bytes = 4 * sizes  # key and value, of 16 bits
    return np.maximum(running, 1) * keys * key_bytes / (share * gpu.bandwidth_bytes_per_s) * 1e9


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
            floor=1.28,
            prologue_cycles=(1500.0, 7820.0),
            alone_key_cycles={64: 47.8, 96: 57.3, 128: 56.3, 192: 85.8, 256: 68.0},
            bandwidth_share=1.088,
            overlap=5.66,
        ),
        divided=DividedKeys(
            floor=1.23,
            prologue_cycles=3500.0,
            sm_key_cycles=(3.59, 0.206),
            bandwidth_share=1.03,
        ),
    )
}
"""Architecture -> coefficients.

`whole` was fitted to 215 calls with torch 2.11, `divided` to 172: those of decodes of 24 models on
H100s and H200s, and 192 of heads of 64 to 256 on an H200, which were predicted before. They are 4.1
and 6.0% off in the mean. With one size of heads left out, `divided` is 4.2 to 9.4% off its calls
(2026-11-28-flash2-decodes-h200).
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
    sizes = _kernel_sizes(width)
    per_sm = np.array([TILES[int(size)][2] for size in sizes])
    places = np.where(divided, BLOCKS_PER_SM, per_sm) * float(gpu.sm_count)
    full, rest = np.divmod(units * parts, places)
    # The longest part determines a wave, but only its own keys are read.
    longest, read = np.ceil(blocks / parts) * block_keys, keys / parts

    def wave_ns(running: F64) -> F64:
        of_parts = c.divided.wave_ns(gpu, running, longest, read, sizes)
        return np.where(divided, of_parts, c.whole.wave_ns(gpu, running, keys, sizes))

    waves_ns = full * wave_ns(places) + np.where(rest > 0, wave_ns(rest), 0.0)
    combine = _combine_ns(gpu, batch * heads * rows, width, parts)
    return WaveTerms(
        floor_ns=np.where(divided, c.divided.floor, c.whole.floor) * gpu.launch_floor_ns,
        waves=(full + (rest > 0)).astype(np.int64),
        waves_ns=waves_ns,
        combine_ns=np.where(divided, combine, 0.0),
    )


def _kernel_sizes(width: F64) -> F64:
    """Return the size of heads of each call's kernel, float64[d]; the largest for wider heads."""
    return np.array([float(kernel_head_size(int(each)) or max(TILES)) for each in width])


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
