"""The tiles of GEMM kernels: those from which cuBLAS chooses, and those of other libraries.

`gemm_tiles` computes the time of each tiling.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import ASYNCHRONOUS
from onerank.annotate.models.coefficients import Coefficients, FinelyScaled, GemmCoefficients
from onerank.annotate.models.features import ComponentGemms
from onerank.annotate.op_costs.cost_record import GemmShape, PartKernel, Scales
from onerank.ir.arrays import F64, I64, U8

_EDGES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 256), (256, 64),
          (16, 64), (32, 64), (16, 128), (32, 128))  # fmt: skip

_SPLITS = (1, 2, 4, 8, 16)

TILINGS = np.array([(*edges, split) for edges in _EDGES for split in _SPLITS], dtype=np.float64).T
"""Rows, columns and splits of the tilings from which cuBLAS chooses, float64[3, 60]."""

# Kernels for scales of rows or blocks never divide the inner size: without it the residuals' spread
# falls from 0.29 to 0.23 over the block-scaled layers of an H100, and from 0.37 to 0.29 on an L40S.
_WHOLE_K = TILINGS[:, TILINGS[2] == 1]

# CUTLASS's kernels for scales of rows choose the tile by m alone: beyond 128 rows it is at least
# 128 x 128, whatever the grid. From 129 to 256 rows vLLM's layers take 1.09 times the time of that
# tile on an H100, spread 0.07, and 1.45 times that of the best tile, spread 0.13.
_LARGE_TILES = _WHOLE_K[:, (_WHOLE_K[0] >= 128) & (_WHOLE_K[1] >= 128)]
_LARGE_FROM = 128

# Tensor cores with a memory of their own (tcgen05, compute capability 10 and 11) multiply at least
# 64 rows at once in 8 bits, and 128 in 4 bits with scales of blocks. Smaller tiles are mostly
# empty. CUTLASS also has smaller tiles than Hopper's for more than 128 rows: time(m + 1) / time(m)
# at m = 256 is 1.57 on an H200 and 1.44 on a B200, and at 1024 it is 1.31 and 1.17. With both, the
# mean error of a B200's 8-bit layers falls from 15.4 to 14.4% over 10 us and from 12.5 to 9.0%
# under, its family left out, and that of NVFP4 layers, the dtype left out, from 21.7 to 18.7%.
_TENSOR_MEMORY = range(100, 120)
_EIGHT_BIT_ROWS, _FOUR_BIT_ROWS = 64, 128


class TileKernel(NamedTuple):
    """A kernel whose tilings, or whose coefficients, are not those from which cuBLAS chooses.

    Attributes:
        coefficients: of its tiles.
        floor_ns: shortest time, in addition to the tiles.
        rate: factor on the sustained rate.
        epilogue: time of a tile that no other tile hides, in epilogues of cuBLAS's tiles.
        tilings: rows, columns and splits of the tilings that it has, float64[3, t].
    """

    coefficients: GemmCoefficients
    floor_ns: float
    rate: float
    epilogue: float
    tilings: F64


def _undivided(edges: Iterable[tuple[int, int]]) -> F64:
    """Return tilings of these rows and columns that do not divide the inner size."""
    return np.array([(*edge, 1) for edge in edges], dtype=np.float64).T


# Kernel -> library of its coefficients, and tilings. Triton's experts have no tuned configuration
# for most shapes: vLLM and SGLang then take one tile for more tokens than experts, and one for
# fewer. For few tokens SGLang's kernel also has the tiles of its tuned configurations: they lower
# the mean error over the layers of both from 17.8 to 17.5%, families left out. CUTLASS's kernels
# are tuned when the engine starts.
_EXPERT_KERNELS = {
    PartKernel.VLLM_EXPERTS: ("vllm", _undivided([(64, 64)])),
    PartKernel.VLLM_FEW_TOKENS: ("vllm", _undivided([(16, 32)])),
    PartKernel.SGLANG_EXPERTS: ("sglang", _undivided([(64, 64)])),
    PartKernel.SGLANG_FEW_TOKENS: ("sglang", _undivided([(16, 32), (16, 64), (16, 128)])),
    PartKernel.CUTLASS_EXPERTS: (
        "cutlass",
        _undivided((rows, columns) for rows in (16, 32, 64, 128) for columns in (32, 64, 128, 256)),
    ),
}


# cuBLAS runs batched float32 GEMMs on an A100 in one tile, whatever their sizes: all 2,281 of
# NeuSight's set have the kernel "ampere_sgemm_128x128_nn". The V100, T4 and H100 of that set have
# smaller tiles, too. Other Ampere dies were not measured, and are assumed to run the A100's kernel.
_BATCHED_VECTOR = np.array([[128.0], [128.0], [1.0]])


def batched_vector_kernel(gpu: Gpu, c: GemmCoefficients) -> TileKernel | None:
    """Return the kernel of batched GEMMs on the vector units; None if it is that of single ones."""
    if gpu.architecture != "ampere":
        return None
    return TileKernel(c, c.floor * gpu.launch_floor_ns, 1.0, 0.0, _BATCHED_VECTOR)


def experts_kernels(gpu: Gpu, kernels: U8, c: Coefficients) -> Iterator[tuple[I64, TileKernel]]:
    """Yield the rows of experts' GEMMs in `kernels`, a `PartKernel` for each, and their kernel."""
    for code, (library, tilings) in _EXPERT_KERNELS.items():
        rows = np.flatnonzero(kernels == code)
        if len(rows):
            experts = c.experts[library]
            floor_ns = experts.other_ns + c.gemm.floor * gpu.launch_floor_ns
            yield rows, TileKernel(c.gemm, floor_ns, experts.rate, experts.epilogue, tilings)


def executed_over_counted(parts: ComponentGemms, calls: int) -> F64:
    """Return the FLOPs that experts' kernels execute over those of their tokens, float64[calls].

    A tile has a fixed number of rows, and the tensor cores multiply its empty rows too. Of the
    tiles of a tuned kernel, the one with the fewest rows counts. 1 for calls without experts.
    """
    rows = np.ones(len(parts.call))
    for code, (_, tilings) in _EXPERT_KERNELS.items():
        rows[parts.kernels == code] = tilings[0].min()
    m = parts.shapes[:, 1]
    counted = parts.times * parts.flops
    executed = counted * np.ceil(m / rows) * rows / np.maximum(m, 1)
    of_executed = np.bincount(parts.call, weights=executed, minlength=calls)
    of_counted = np.bincount(parts.call, weights=counted, minlength=calls)
    return np.divide(of_executed, of_counted, out=np.ones(calls), where=of_counted > 0)


def scaled_kernels(
    gpu: Gpu, shapes: F64, scales: U8, c: GemmCoefficients, scaled: FinelyScaled
) -> Iterator[tuple[I64, TileKernel]]:
    """Yield rows of GEMMs in 8 or 4 bits with fine scales, and the kernel that computes them.

    Args:
        gpu: where they run.
        shapes: as for `gemm_ns`.
        scales: a `Scales` for each, uint8[d].
        c: of cuBLAS's tiles.
        scaled: of these kernels on the GPU.
    """
    coefficients = scaled.applied(c)
    if (gpu.capability or 0) in _TENSOR_MEMORY:
        four = shapes[:, GemmShape._fields.index("operand_bytes")] < 1
        parts = tuple(
            (mask, _WHOLE_K[:, _WHOLE_K[0] >= least])
            for mask, least in ((four, _FOUR_BIT_ROWS), (~four, _EIGHT_BIT_ROWS))
        )
    else:
        # Kernels of Ada have smaller tiles for few rows and are chosen by more than m.
        large = (scales == Scales.ROW) & (gpu.architecture in ASYNCHRONOUS)
        large &= shapes[:, GemmShape._fields.index("m")] > _LARGE_FROM
        parts = (large, _LARGE_TILES), (~large, _WHOLE_K)
    for mask, tilings in parts:
        if mask.any():
            figures = scaled.floor_ns, scaled.rate, scaled.epilogue
            yield np.flatnonzero(mask), TileKernel(coefficients, *figures, tilings)
