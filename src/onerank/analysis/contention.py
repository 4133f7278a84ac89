"""The share of a GPU that each kernel and collective of a graph occupies.

Measured on H100 and H200, 132 multiprocessors, NCCL 2.28.9 with 24 channels:

- Kernels that run during a collective take 1.15 to 1.31 times as long, both those bound by
  arithmetic and those bound by memory; 132 / (132 - 24) is 1.22
  (benchmarks/results/2026-11-27-torchtitan-4xh100.txt).
- `SLOWDOWN_BY_ARITHMETIC` and `SLOWDOWN_BY_MEMORY` are slopes: the difference between the times of
  calls of 512 and 64 MiB next to kernels, over the same difference without kernels
  (benchmarks/results/2026-11-22-collectives-under-load-2xh200.txt).
- The calls of 64 MiB take longer than that slowdown explains. The rest is their wait for
  multiprocessors: 126 to 152 us next to products of 900 us, 2 us next to elementwise kernels, whose
  blocks end often (same file). Next to a persistent product calls start when it ends (traces of the
  former file).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import F64, I64
from onerank.ir.contention import Contention
from onerank.ir.nodes import SYMMETRIC_COPY

SLOWDOWN_BY_ARITHMETIC = 1.63
"""Slowdown of a collective next to matrix products: the mean of 1.51 to 1.68, four slopes."""

SLOWDOWN_BY_MEMORY = 1.85
"""Slowdown of a collective next to elementwise kernels: the mean of 1.79 to 1.90, four slopes."""

_MEMORY_BOUND_FLOPS_PER_BYTE = 50
"""Kernels below are bound by memory: GPUs balance at 100 to 300, elementwise kernels have under 10,
products and attention of training several hundred."""

_IN_PLACE = (Evidence.SCALED, Evidence.CALIBRATED, Evidence.MEASURED)
"""Evidence of durations from a trace, which contain what concurrent kernels took."""

_TILE = (256, 128)
"""Rows and columns of a tile of cuBLAS's products in 8 and 16 bits on H100s. Kernels are named
"nvjet_sm90_tst_256x128"; some have tiles of 320 x 128."""

_LARGEST_OPERAND = 2
"""Bytes of an element up to which tiles are known: those of float32 were not measured."""

_LEAST_FILLED = 0.9
"""Share of the multiprocessors below which libraries choose smaller tiles: assumed."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a communication call occupies its GPU.

    Attributes:
        channels: thread blocks of its kernel, each of which occupies a multiprocessor.
        headroom: rate at which its GPUs could run it, divided by the network's; 1 if the GPUs limit
            it.
    """

    channels: int
    headroom: float


def contention_of(
    graph: Graph, calls: Mapping[int, CallShape], *, persistent: bool = False
) -> Contention | None:
    """Return the share of the GPU that each operation of a graph occupies.

    None if durations contain the contention already, because the collectives of the capture (or
    kernels in their place) ran on its GPU; if the GPU's number of multiprocessors is unknown; or if
    nothing can compete.

    Args:
        graph: with times of kernels and of communication.
        calls: the shape of each communication node that runs on the GPU.
        persistent: whether the GPU's matrix products are persistent kernels (`Contention`).
    """
    nodes, sm_count = graph.nodes, graph.job.device.sm_count
    ran = nodes.evidence[graph.communication] != Evidence.NONE
    if not sm_count or ran.any():
        return None
    kernels = graph.gpu_compute & (nodes.duration_ns > 0)
    blocks = _blocks(graph)
    # Without a launch shape a kernel is assumed to have many short blocks.
    needed = np.where(blocks > 0, np.minimum(1.0, blocks / sm_count), 1.0)
    tiles = np.where(kernels, _tiles(graph, sm_count), 0)
    parts = np.where(blocks > 0, blocks, tiles)
    rounds = np.where(parts > 0, np.maximum(1, parts // sm_count), 0)
    held, headroom = np.zeros(len(graph)), np.ones(len(graph))
    for index, call in calls.items():
        held[index], headroom[index] = call.channels / sm_count, call.headroom
    contention = Contention(
        needed=np.where(kernels, needed, 0.0),
        tiles=tiles,
        rounds=np.where(kernels, rounds, 0),
        held=held,
        headroom=headroom,
        call_slowdown=np.where(kernels, _call_slowdown(graph), 1.0),
        copies=np.array([op == SYMMETRIC_COPY for op in graph.text("op")], dtype=np.bool_),
        multiprocessors=sm_count,
        persistent=persistent,
        among_kernels=not np.isin(nodes.evidence[kernels], _IN_PLACE).any(),
    )
    return contention if contention.matters(nodes.stream) else None


def _call_slowdown(graph: Graph) -> F64:
    """Return the slowdown of a call next to each node, if the node is a kernel, float64[n]."""
    nodes = graph.nodes
    moved = np.maximum(nodes.bytes_read, 0) + np.maximum(nodes.bytes_written, 0)
    bound_by_memory = (moved > 0) & (nodes.flops < _MEMORY_BOUND_FLOPS_PER_BYTE * moved)
    return np.where(bound_by_memory, SLOWDOWN_BY_MEMORY, SLOWDOWN_BY_ARITHMETIC)


def _tiles(graph: Graph, sm_count: int) -> I64:
    """Return the tiles of each matrix product, int64[n]; 0 for others and for small ones."""
    costs = op_costs_of(graph)
    counts = np.zeros(len(costs.works), dtype=np.int64)
    for call, work in enumerate(costs.works):
        if work.gemm is None or work.gemm.operand_bytes > _LARGEST_OPERAND:
            continue
        batch, m, n = work.gemm.batch, work.gemm.m, work.gemm.n
        counts[call] = batch * min(
            math.ceil(m / rows) * math.ceil(n / columns) for rows, columns in (_TILE, _TILE[::-1])
        )
    counts[counts < _LEAST_FILLED * sm_count] = 0
    tiles = np.zeros(len(graph), dtype=np.int64)
    tiles[costs.index[costs.matmul]] = counts[costs.call[costs.matmul]]
    return tiles


def _blocks(graph: Graph) -> I64:
    """Return the thread blocks of each launch, 0 if not known."""
    codes, place = np.unique(graph.nodes.grid, return_inverse=True)
    counts = [_product(graph.strings[code]) for code in codes.tolist()]
    return np.array(counts, dtype=np.int64)[place.reshape(-1)]


def _product(grid: str) -> int:
    """Return the number of blocks of a launch shape such as "[2, 66, 1]", 0 for ""."""
    return math.prod(int(size) for size in grid.strip("[]").split(",")) if grid else 0
