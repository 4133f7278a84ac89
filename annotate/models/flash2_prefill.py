"""The time of FlashAttention 2's forward kernel that does not divide the keys, by its schedule.

The grid has a thread block for each tile of queries, sequence and head, tiles first
(`flash_fwd_launch_template.h` of flash-attention 2, as in torch 2.11). Thread blocks start in this
order as places on the SMs become free, so under a causal mask the tiles of a head start with the
shortest. A block processes the keys that its queries see, from the last to the first; the size of
both tiles depends on the size of heads (`TILES`).

An SM has two blocks at a time, or one with heads of 192. Two blocks share its tensor cores: they
take less than twice as long as one block alone, which cannot fill them. A few tiles therefore take
as long as the SM with the longest pair: 700 tokens of 32 heads are 192 blocks, of which 120 share
an SM. `_makespan` simulates the schedule.

Blocks of keys at the mask's edge cost extra instructions for each score, more where the lengths
are not multiples of the tiles: then the kernel compares all positions with the lengths and loads
rows under a predicate. With a window the kernel compares the positions of every score.
"""

import heapq
import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.calibration import without_overrides
from onerank.annotate.models.prediction_terms import Term, quantity, total
from onerank.annotate.op_costs.attention import QUERY_TILE
from onerank.annotate.op_costs.cost_record import LOWER_RIGHT, AttentionShape
from onerank.ir.arrays import F64, I64, Mask

TILES = {
    64: (128, 128, 2),
    96: (128, 64, 2),
    128: (128, 64, 2),
    192: (128, 64, 1),
    256: (64, 64, 2),
}
"""Heads up to this size -> (queries of a tile, keys of a block, thread blocks of an SM).

The traits that `run_mha_fwd_hdim*` choose without dropout on a GPU with 227 KiB of shared memory.
Registers limit all but heads of 192 to two blocks: 128 threads with up to 255 each.
"""


@dataclass(frozen=True, slots=True)
class TileCycles:
    """Cycles of a thread block of one size of heads.

    Attributes:
        alone: for each block of keys, if it has an SM for itself.
        shared: of an SM for each block of keys of two thread blocks; None: it has one at a time.
        prologue: before and after the keys.
        window: more for each block of keys if the call has a window.
        edge: more for each block of keys at the edge of a causal mask.
        ragged_edge: the same where lengths are not multiples of the tiles, with any mask.
    """

    alone: float
    shared: float | None
    prologue: float
    window: float
    edge: float
    ragged_edge: float


FLASH2_TILES = {
    "hopper": {
        64: TileCycles(4550, 3450, 4070, 3000, 1260, 4120),
        96: TileCycles(3650, 2280, 4500, 900, 800, 1500),
        128: TileCycles(3700, 2980, 4500, 900, 800, 4100),
        192: TileCycles(4900, None, 4620, 626, 800, 1500),
        256: TileCycles(5280, 3220, 4750, 231, 800, 1500),
    }
}
"""Architecture -> size of heads -> cycles.

Fitted to 63 calls on H100s with torch 2.11 at 1,980 MHz; 84 other calls of up to 12 ms were 3.4%
off in the mean (2026-11-27-flash2-schedule-h100). Then 153 sizes were predicted before they were
measured: 6.5% off in the median, too long where lengths are ragged (2026-11-27-flash2-blind-h100).
The ragged edges of all sizes of heads but 64 were chosen afterwards, with both in view. Calls one
after another take less at these edges than calls in a step do. Hopper alone was measured.
"""

_FLOORS = 0.9  # launch floors of a call: 2.4 us on an H100


@dataclass(frozen=True, slots=True)
class ScheduleTerms:
    """Terms of the time of d calls, in ns.

    Attributes:
        floor_ns: launch floor.
        blocks: thread blocks, int64[d].
        schedule_ns: time until the last of them ends, float64[d].
    """

    floor_ns: float
    blocks: I64
    schedule_ns: F64

    @property
    def predicted_ns(self) -> F64:
        """The time, float64[d]."""
        return self.floor_ns + self.schedule_ns

    def term(self, i: int, gpu: str) -> Term:
        """Return the time of call `i` on the GPU of this name as a term."""
        on = f"on {gpu}"
        note = f"{self.blocks[i]} thread blocks in order {on}"
        terms = [
            quantity("floor", self.floor_ns, note=f"launch floor {on}"),
            quantity("schedule", self.schedule_ns[i], note=note),
        ]
        return total(*terms, name="by schedule", value=float(self.predicted_ns[i]), note=on)


def is_scheduled(gpu: Gpu, shapes: F64) -> Mask:
    """Return which calls `flash2_schedule_terms` has cycles for, bool[d].

    Arguments as for `flash2_schedule_terms`.
    """
    known = FLASH2_TILES.get(gpu.architecture, {})
    _, _, _, rows, _, d, dv, _, backward, *_ = shapes.T
    # With dropout the kernel has other tiles.
    drops = AttentionShape.columns(shapes)["dropout"] > 0
    sizes = np.array([kernel_head_size(int(width)) in known for width in d], dtype=bool)
    # Smaller heads have a kernel that was not measured.
    return sizes & (d > 32) & (d == dv) & (rows > 1) & (backward == 0) & ~drops


def flash2_schedule_terms(gpu: Gpu, shapes: F64, *, training: bool) -> ScheduleTerms:
    """Return the terms of the time of forward calls that do not divide their keys.

    Args:
        gpu: the GPU.
        shapes: as for `attention_time.attention_terms`, float64[d, 10].
        training: whether the calls are of a step of training, whose products keep the GPU at its
            power limit and its clock at the boost clock. Alone, the kernel stays below the limit.
    """
    clock_hz = gpu.clock_hz if training else gpu.max_clock_hz
    # An overridden peak of the tensor cores changes the cycles of products.
    described = without_overrides(gpu).peak_tensor_flops_per_s("bfloat16")
    peak = gpu.peak_tensor_flops_per_s("bfloat16")
    speed = peak / described if peak and described else 1.0
    calls, place = np.unique(shapes, axis=0, return_inverse=True)
    cycles = np.empty(len(calls))
    blocks = np.empty(len(calls), dtype=np.int64)
    for i, call in enumerate(calls.astype(np.int64).tolist()):
        shape = AttentionShape(*call)
        size = kernel_head_size(shape.d)
        of_size = FLASH2_TILES[gpu.architecture][size]
        work = _work(of_size, of_size.alone / speed, _key_blocks(size, shape))
        heads, places = shape.batch * shape.heads, TILES[size][2]
        share = min(1.0, of_size.alone / (2 * of_size.shared)) if of_size.shared else 1.0
        cycles[i] = _makespan(tuple(work.tolist()), heads, gpu.sm_count, places, share)
        blocks[i] = heads * len(work)
    return ScheduleTerms(
        floor_ns=_FLOORS * gpu.launch_floor_ns,
        blocks=blocks[place],
        schedule_ns=cycles[place] / clock_hz * 1e9,
    )


def kernel_head_size(width: int) -> int:
    """Return the size of heads of the kernel that multiplies heads of this width; 0 if none."""
    return next((size for size in TILES if width <= size), 0)


@dataclass(frozen=True, slots=True)
class _KeyBlocks:
    """Blocks of keys of the tiles of one head.

    Attributes:
        seen: blocks of each tile, int64[m].
        at_edge: those at the edge of the mask, int64[m]; None: the call has a window.
        ragged: whether lengths are not multiples of the tiles.
    """

    seen: I64
    at_edge: I64 | None = None
    ragged: bool = False


def _key_blocks(size: int, shape: AttentionShape) -> _KeyBlocks:
    """Return the blocks of keys of a head's tiles, as the kernel counts them.

    Args:
        size: size of heads of the kernel.
        shape: the call.
    """
    tile, block, _ = TILES[size]
    rows, keys = shape.rows, shape.keys
    tiles = np.arange(-(-rows // tile), dtype=np.int64)
    if shape.window:
        return _KeyBlocks(_in_window(tiles, shape, (tile, block)))
    seen = np.full(len(tiles), -(-keys // block), dtype=np.int64)
    if shape.causal:
        before = keys - rows if shape.causal == LOWER_RIGHT else 0
        seen = np.clip(-(-((tiles + 1) * tile + before) // block), 0, seen)
    ragged = bool(rows % tile or keys % block)
    # `n_masking_steps` of flash_fwd_kernel.h
    steps = (-(-tile // block) if shape.causal else 0) + ragged
    return _KeyBlocks(seen, np.minimum(seen, steps), ragged)


def _in_window(tiles: I64, shape: AttentionShape, sizes: tuple[int, int]) -> I64:
    """Return the blocks of keys of tiles of a call with a window, int64[m].

    The first query sees `first` keys, each one after it one more, up to the window. Their mean and
    the window determine `first`.

    Args:
        tiles: the tiles, int64[m].
        shape: the call.
        sizes: queries of a tile, and keys of a block.
    """
    (tile, block), rows = sizes, shape.rows
    beyond = shape.window - shape.keys
    window = max(1, shape.window - (min(rows, QUERY_TILE) - 1))
    fewer = math.sqrt(2 * rows * beyond) if 2 * beyond < rows else beyond + rows / 2
    # The rest of a prefill usually begins at a multiple of the blocks.
    first = window if not beyond else 1 + block * max(0, round((window - fewer - 1) / block))
    start = np.maximum(0, first + tiles * tile - window)
    end = first - 1 + np.minimum((tiles + 1) * tile, rows)
    return -(-end // block) - start // block


def _work(c: TileCycles, alone: float, keys: _KeyBlocks) -> F64:
    """Return the cycles of the thread blocks of a head, each alone on an SM, float64[m]."""
    each = alone + (c.window if keys.at_edge is None else 0.0)
    work: F64 = c.prologue + each * keys.seen.astype(np.float64)
    if keys.at_edge is not None:
        work += (c.ragged_edge if keys.ragged else c.edge) * keys.at_edge
    return work


# Waves of thread blocks that are simulated, the last ones. Those before keep all SMs busy.
_SIMULATED_WAVES = 8


@cache
def _makespan(work: tuple[float, ...], heads: int, sms: int, places: int, share: float) -> float:
    """Return the cycles until the last thread block ends.

    Args:
        work: cycles of each thread block of a head alone on an SM, in their order.
        heads: heads of all sequences.
        sms: SMs.
        places: thread blocks of an SM at a time, 1 or 2.
        share: speed of each of two blocks of an SM, relative to a block alone.
    """
    before = 0.0
    simulated = math.ceil(_SIMULATED_WAVES * sms * places / len(work))
    if heads > 2 * simulated:
        before = (heads - simulated) * sum(work) / (sms * (2 * share if places > 1 else 1))
        heads = simulated
    blocks = iter([*work] * heads)
    if places == 1:
        free = [0.0] * sms
        for cycles in blocks:
            heapq.heapreplace(free, free[0] + cycles)
        return before + max(free)
    running: list[list[float]] = [[] for _ in range(sms)]
    for at in range(2 * sms):
        if (cycles := next(blocks, None)) is None:
            break
        running[at % sms].append(cycles)
    now = 0.0

    def ends(of: list[float], since: float) -> float:
        return since + (of[0] if len(of) == 1 else min(of) / share)

    events = [(ends(of, 0.0), sm) for sm, of in enumerate(running) if of]
    heapq.heapify(events)
    while events:
        now, sm = events[0]
        of = running[sm]
        if len(of) == 1:
            of.clear()
        else:
            done = min(of)
            of[:] = [max(of) - done]
        while len(of) < places and (cycles := next(blocks, None)) is not None:
            of.append(cycles)
        if of:
            heapq.heapreplace(events, (ends(of, now), sm))
        else:
            heapq.heappop(events)
    return before + now
