"""The time of FlashMLA's decode on Hopper, as it divides latent keys among SMs.

`get_mla_metadata` of FlashMLA cuts the keys of all sequences, one after another, into parts of
about equal length, one for each SM, or for each two if a token has more than 64 heads. It counts
blocks of 64 keys, and 5 more for each sequence that a part begins. A thread block processes its
part; the one with most to do determines the time. A second kernel combines the parts of each
sequence. It returns at once where a sequence is in one part.

Each piece of a sequence begins with loads that no computation hides. Its end takes longer with more
heads. Blocks wait for memory, and wait longer when more SMs load, so computation and memory add up
with an exponent below one: the sum exceeds both times together.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_time import AttentionTerms
from onerank.annotate.models.gemm_tiles import p_norm
from onerank.ir.arrays import F64, Mask

_KEYS, _VALUES = 576, 512  # the only widths of a latent vector and of its leading part, the values
# Keys of a block, blocks that `get_mla_metadata` adds for each sequence, and heads of a tile.
_BLOCK, _OVERHEAD, _HEADS = 64, 5, 64
_ROWS = 8  # heads of a thread block that combines parts
_ITEM_BYTES = 2  # of latent vectors and results, in 16 bits
_PART_BYTES = 4  # of the results of parts, in float32


@dataclass(frozen=True, slots=True)
class FlashMla:
    """Coefficients of both kernels.

    Attributes:
        floor: launch floors of the first.
        piece_cycles: of a piece of a sequence: without heads, and what 64 heads add; fewer heads
            add in proportion.
        block_cycles: of a block of keys.
        bandwidth_share: bandwidth for all keys over the described one. It is not a rate that the
            kernel reaches: it exceeds 1 because `overlap` lengthens the sum.
        overlap: exponent with which the times of computation and memory add up.
        combine_floor: launch floors of the second.
        combine_grid_ns: its time with one thread block per SM; it grows with the square root of
            their number.
        combine_ns: its time for the most divided sequence: without parts, and for each part.
        combine_bandwidth_share: as `bandwidth_share`, for reading the parts.
        combine_overlap: as `overlap`.
    """

    floor: float
    piece_cycles: tuple[float, float]
    block_cycles: float
    bandwidth_share: float
    overlap: float
    combine_floor: float
    combine_grid_ns: float
    combine_ns: tuple[float, float]
    combine_bandwidth_share: float
    combine_overlap: float


FLASH_MLA = {
    "hopper": FlashMla(
        floor=1.383,
        piece_cycles=(2440.0, 3670.0),
        block_cycles=820.0,
        bandwidth_share=4.18,
        overlap=0.437,
        combine_floor=0.383,
        combine_grid_ns=500.0,
        combine_ns=(587.0, 195.0),
        combine_bandwidth_share=1.5,
        combine_overlap=0.777,
    )
}
"""Architecture -> coefficients.

Fitted to 648 of 1,190 calls on an H100 and an H200 (torch 2.11; 8 to 128 heads, 1 to 96 sequences
of 64 to 12,288 tokens, caches in turn so that keys come from memory). For the other 542 calls, of
other sizes, the sum of both kernels is 4.5 to 5.9% off in the mean on each GPU, both up to 20 us
and above (2026-11-27-flash-mla-2-hopper).
"""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the keys of a call are divided.

    Attributes:
        pieces: pieces of sequences of the thread block with most to do.
        blocks: its blocks of keys.
        most: parts of the most divided sequence.
        divided: sequences in several parts.
        parts: parts of these.
    """

    pieces: int
    blocks: int
    most: int
    divided: int
    parts: int


@cache
def _plan(tiles: int, batch: int, blocks: int, sms: int) -> _Plan:
    """Return the plan of sequences of `blocks` of keys, and tiles of heads, for the SMs."""
    parts = max(1, sms // tiles)
    payload = math.ceil(batch * (blocks + _OVERHEAD) / parts) + _OVERHEAD
    splits = [0] * batch
    fullest = (0, 0)
    sequence = done = 0
    for _ in range(parts):
        remaining, pieces, taken = payload, 0, 0
        while sequence < batch and remaining >= blocks - done + _OVERHEAD:
            remaining -= blocks - done + _OVERHEAD
            pieces, taken = pieces + 1, taken + blocks - done
            splits[sequence] += 1
            sequence, done = sequence + 1, 0
        if sequence < batch and remaining > _OVERHEAD:
            done += remaining - _OVERHEAD
            pieces, taken = pieces + 1, taken + remaining - _OVERHEAD
            splits[sequence] += 1
        fullest = max(fullest, (pieces, taken), key=lambda of: _OVERHEAD * of[0] + of[1])
    several = [count for count in splits if count > 1]
    return _Plan(*fullest, max(splits), len(several), sum(several))


def runs_flash_mla(gpu: Gpu, shapes: F64) -> Mask:
    """Return which calls FlashMLA's decode can compute, bool[d]; arguments as for the terms."""
    columns: list[F64] = list(shapes.T)
    _, _, key_heads, _, _, d, dv, *_ = columns
    known = gpu.architecture in FLASH_MLA
    return known & (key_heads == 1) & (d == _KEYS) & (dv == _VALUES)


def flash_mla_terms(gpu: Gpu, shapes: F64) -> AttentionTerms:
    """Return the terms of the kernel that attends, without the combination of parts.

    Args:
        gpu: the GPU.
        shapes: as for `attention_time.attention_terms`, float64[d, 10].
    """
    c = FLASH_MLA[gpu.architecture]
    columns: list[F64] = list(shapes.T)
    batch, heads, _, rows, keys, *_ = columns
    plans = [_plan_of(gpu, *map(int, of)) for of in zip(batch, heads * rows, keys, strict=True)]
    pieces = np.array([plan.pieces for plan in plans], dtype=np.float64)
    blocks = np.array([plan.blocks for plan in plans], dtype=np.float64)
    least, by_heads = c.piece_cycles
    piece_cycles = least + by_heads * np.minimum(heads * rows, _HEADS) / _HEADS
    moved = _ITEM_BYTES * batch * np.ceil(keys / _BLOCK) * _BLOCK * _KEYS
    return AttentionTerms(
        floor_ns=c.floor * gpu.launch_floor_ns,
        compute_ns=(pieces * piece_cycles + blocks * c.block_cycles) / gpu.max_clock_hz * 1e9,
        memory_ns=moved / (c.bandwidth_share * gpu.bandwidth_bytes_per_s) * 1e9,
        helper_ns=np.zeros(len(shapes)),
        overlap=c.overlap,
    )


def combination_ns(gpu: Gpu, batch: int, heads: int, keys: int) -> float:
    """Return the time of the kernel that combines the parts.

    Args:
        gpu: the GPU.
        batch: sequences.
        heads: heads of all queries of a sequence.
        keys: keys of a sequence.
    """
    c, plan = FLASH_MLA[gpu.architecture], _plan_of(gpu, batch, heads, keys)
    grid = batch * heads / _ROWS / gpu.sm_count
    at_least = c.combine_floor * gpu.launch_floor_ns + grid**0.5 * c.combine_grid_ns
    if not plan.divided:
        return at_least
    least, each = c.combine_ns
    waiting = least + each * plan.most
    moved = heads * (_PART_BYTES * plan.parts + _ITEM_BYTES * plan.divided) * _VALUES
    by_memory = moved / (c.combine_bandwidth_share * gpu.bandwidth_bytes_per_s) * 1e9
    both = p_norm(c.combine_overlap, np.array([waiting]), np.array([by_memory]))
    return at_least + float(both[0])


def _plan_of(gpu: Gpu, batch: int, heads: int, keys: int) -> _Plan:
    """Return the plan; arguments as for `combination_ns`."""
    return _plan(-(-heads // _HEADS), batch, -(-keys // _BLOCK), gpu.sm_count)
