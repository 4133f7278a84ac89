"""The tiles of GEMM kernels: those from which cuBLAS chooses, and those of other libraries.

`gemm_tiles` computes the time of each tiling.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import ASYNCHRONOUS
from onerank.annotate.models.coefficients import Coefficients, FinelyScaled, GemmCoefficients
from onerank.annotate.models.features import ComponentGemms
from onerank.annotate.op_costs.cost_record import GemmShape, PartKernel, Scales
from onerank.ir.arrays import F64, I64, U8, Mask

_EDGES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 256), (256, 64),
          (16, 64), (32, 64), (16, 128), (32, 128))  # fmt: skip

_SPLITS = (1, 2, 4, 8, 16)

_HALF_BYTES = 2

TILINGS = np.array([(*edges, split) for edges in _EDGES for split in _SPLITS], dtype=np.float64).T
"""Rows, columns and splits of the tilings from which cuBLAS chooses, float64[3, 60]."""

# Kernels for scales of rows or blocks never divide the inner size: without it the residuals' spread
# falls from 0.29 to 0.23 over the block-scaled layers of an H100, and from 0.37 to 0.29 on an L40S.
_WHOLE_K = TILINGS[:, TILINGS[2] == 1]


class TileKernel(NamedTuple):
    """A kernel whose tilings, or whose coefficients, are not those from which cuBLAS chooses.

    Attributes:
        coefficients: of its tiles.
        floor_ns: shortest time, in addition to the tiles; None: that of cuBLAS's kernels. A given
            one is fitted to times per call and contains the gap to the next kernel.
        rate: factor on the sustained rate.
        epilogue: time of a tile that no other tile hides, in epilogues of cuBLAS's tiles.
        tilings: rows, columns and splits of the tilings that it has, float64[3, t].
        cluster: tiles along the rows that run together, on an SM each, also where one is empty.
        exposed: times that nothing hides.
        stream: bytes of [k, n] per cycle of an SM whose tile has rows; None: memory alone limits
            them.
        fills_tiles: whether rows and columns that tiles lack count as work under the power cap.
    """

    coefficients: GemmCoefficients
    floor_ns: float | None
    rate: float
    epilogue: float
    tilings: F64
    cluster: int = 1
    exposed: "ExposedTimes | None" = None
    stream: float | None = None
    fills_tiles: bool = False


class ExposedTimes(NamedTuple):
    """Times of a kernel, in ns, that no other tile hides.

    Attributes:
        start: before the first tile.
        wave: of each wave of tiles.
    """

    start: float
    wave: float


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
    return TileKernel(c, None, 1.0, 0.0, _BATCHED_VECTOR)


# The gradient of a weight over millions of rows has few tiles and a long inner loop, which cuBLAS
# divides further. Three float32 products over 2,097,152 rows take an H200 276, 755 and 760 us
# (2026-11-28-seventeen-jobs-h200); in 16 bits none was measured.
LONG_SIZE = 65536
"""Least inner size of a float32 GEMM with these tilings."""

_LONG_TILINGS = np.array(
    [(*edges, split) for edges in _EDGES for split in (*_SPLITS, 32, 64, 128, 256)],
    dtype=np.float64,
).T


def long_vector_kernel(c: GemmCoefficients) -> TileKernel:
    """Return the kernel of GEMMs on the vector units with a long inner size."""
    return TileKernel(c, None, 1.0, 0.0, _LONG_TILINGS)


# Tiles of cuBLAS for TF32 on Hopper, of the kernels' names. Steps of 32 elements take a fourth of a
# microsecond at least. Figures are fitted to 27 products of an H200, with operands as in a linear
# layer or in a batch: 10% off (2026-11-28-hopper-kernels-h200).
_TF32_EDGES = ((64, 64), (64, 128), (64, 256), (128, 128), (128, 256), (256, 128))
_TF32_TILINGS = np.array(
    [(*edges, split) for edges in _TF32_EDGES for split in _SPLITS], dtype=np.float64
).T
_TF32_STEP_CYCLES, _TF32_RATE = 600.0, 0.85


def tf32_kernel(gpu: Gpu, c: GemmCoefficients) -> TileKernel | None:
    """Return the kernel of GEMMs in TF32; None if it is that of other types."""
    if gpu.architecture != "hopper":
        return None
    coefficients = msgspec.structs.replace(c, step_cycles=_TF32_STEP_CYCLES)
    return TileKernel(coefficients, None, _TF32_RATE, 0.0, _TF32_TILINGS)


def experts_kernels(gpu: Gpu, kernels: U8, c: Coefficients) -> Iterator[tuple[I64, TileKernel]]:
    """Yield the rows of experts' GEMMs in `kernels`, a `PartKernel` for each, and their kernel."""
    for code, (library, tilings) in _EXPERT_KERNELS.items():
        rows = np.flatnonzero(kernels == code)
        if len(rows):
            experts = c.experts[library]
            floors = c.gemm.floor + c.gemm.call_gap
            floor_ns = experts.other_ns + floors * gpu.launch_floor_ns
            yield rows, TileKernel(c.gemm, floor_ns, experts.rate, experts.epilogue, tilings)


# Tiles of torch's grouped GEMM on Hopper, by rows of an expert or columns: pingpong kernels up to
# the first figure, cooperative ones above (aten/src/ATen/native/cuda/GroupMM.cu of torch 2.11). A
# cluster has two tiles along the rows, so with up to 64 rows of each expert half of them are empty.
_GROUPED_FEW = 128
_GROUPED_CLUSTER = 2

# Before a wave every SM loads the descriptors of other experts' operands. SMs with an empty tile
# load no weights. With up to 64 rows half of them do not, and the others limit an H200 to 3 TB/s,
# which its DRAM would not. The figures are fitted to 299 layers on an H100 and as many on an H200.
# With rows for all experts, up to 64 each, these are 3.8 and 5.2% off, and with one row for some 9
# and 11%. By a fit to the H100, the H200's are 5.6 and 13% off (2026-11-28-grouped-gemms-h200).
_GROUPED_EXPOSED = ExposedTimes(start=5_580.0, wave=257.0)
_GROUPED_STREAM = 26.1

# Tiles of both kernels. Their rate is cuBLAS's: single launches of more than 128 rows on a cool GPU
# are 1.1 times as fast, replays for tens of ms as fast (2026-11-28-hopper-kernels-3-h100).
_GROUPED_TILES = _undivided([(64, 128)]), _undivided([(128, 256)])

# The cooperative kernel in 8 bits has higher tiles if two of m, n and k are at least this large
# (ScaledGroupMM.cu of torch 2.11).
_GROUPED_LARGE, _GROUPED_LARGE_TILES = 2048, _undivided([(256, 128)])

# Rate of the kernels in 8 bits with a scale for each row, and their epilogues, by 42 products of
# an H200 and 18 of an H100 (2026-11-28-hopper-kernels-h200, 2026-11-28-hopper-kernels-3-h100).
_GROUPED_8_BIT = 0.75, 0.15

# Costs that were chosen on an H100 alone, without a limit of SMs, were 20% short on an H200. Errors
# on other Hopper GPUs are therefore those of experts on a die family that a fit has not seen.
_GROUPED_MEASURED = "H100-SXM", "H200"


def has_grouped_kernels(gpu: Gpu) -> bool:
    """Return whether the tiles of torch's grouped GEMMs on a GPU are known."""
    return gpu.architecture == "hopper"


def has_measured_grouped_kernels(gpu: Gpu) -> bool:
    """Return whether torch's grouped GEMMs were measured on a GPU, without its overrides."""
    return gpu.board in _GROUPED_MEASURED


def grouped_kernels(
    gpu: Gpu, shapes: F64, kernels: U8, c: GemmCoefficients
) -> Iterator[tuple[I64, TileKernel]]:
    """Yield the rows of torch's grouped GEMMs, and their kernel; none where its tiles are unknown.

    Args:
        gpu: where they run.
        shapes: as for `gemm_ns`.
        kernels: a `PartKernel` for each, uint8[d].
        c: of cuBLAS's tiles.
    """
    if not has_grouped_kernels(gpu):
        return
    m, n, k = (shapes[:, GemmShape._fields.index(name)] for name in ("m", "n", "k"))
    grouped: Mask = kernels == PartKernel.GROUPED
    eight_bit: Mask = shapes[:, GemmShape._fields.index("operand_bytes")] == 1
    few: Mask = (m <= _GROUPED_FEW) | (n <= _GROUPED_FEW)
    large: Mask = np.sum([size >= _GROUPED_LARGE for size in (m, n, k)], axis=0) >= 2
    large &= ~few & eight_bit
    kinds = (
        (grouped & few & ~eight_bit, _GROUPED_TILES[0], 1.0, 0.0),
        (grouped & ~few & ~eight_bit, _GROUPED_TILES[1], 1.0, 0.0),
        (grouped & few & eight_bit, _GROUPED_TILES[0], *_GROUPED_8_BIT),
        (grouped & ~few & ~large & eight_bit, _GROUPED_TILES[1], *_GROUPED_8_BIT),
        (grouped & large, _GROUPED_LARGE_TILES, *_GROUPED_8_BIT),
    )
    for rows, tilings, rate, epilogue in kinds:
        kernel = TileKernel(
            c,
            floor_ns=None,
            rate=rate,
            epilogue=epilogue,
            tilings=tilings,
            cluster=_GROUPED_CLUSTER,
            exposed=_GROUPED_EXPOSED,
            stream=_GROUPED_STREAM,
            # The pingpong kernels' few rows leave the power limit free.
            fills_tiles=tilings is not _GROUPED_TILES[0],
        )
        yield np.flatnonzero(rows), kernel


# Tiles of cuDNN's implicit GEMMs on Hopper, which the names of its kernels have. Only the sums of a
# filter's gradient are divided.
_CONVOLUTION_EDGES = ((256, 128), (128, 256), (128, 192), (256, 96), (128, 128), (256, 64),
                      (128, 64), (64, 128), (64, 64), (256, 32), (128, 32))  # fmt: skip
_CONVOLUTION_TILINGS = _undivided(_CONVOLUTION_EDGES)
_FILTER_TILINGS = np.array(
    [(*edges, split) for edges in _CONVOLUTION_EDGES for split in _SPLITS], dtype=np.float64
).T

# An SM loads this many bytes in a cycle of their tiles, a gathered image and a filter; cuBLAS sends
# a tile to the SMs of a cluster at once. Chosen on convolutions with windows on an H200
# (2026-11-28-convolutions-h200).
_CONVOLUTION_LOADS, _CONVOLUTION_PROLOGUE, _CONVOLUTION_RATE = 42.0, 11_000.0, 1.07

_WINDOWED = (
    PartKernel.CONVOLUTION,
    PartKernel.IMAGE_GRADIENT,
    PartKernel.NARROW_CONVOLUTION,
    PartKernel.NARROW_IMAGE_GRADIENT,
)
_FILTER_GRADIENTS = (PartKernel.FILTER_GRADIENT, PartKernel.NARROW_FILTER_GRADIENT)


class _LibraryFactors(NamedTuple):
    """Time of a product of cuDNN over that of a GEMM of the same tiles.

    Attributes:
        hopper_16_bit: on Hopper with operands of up to 16 bits.
        hopper_tf32: on Hopper in TF32.
        hopper_float32: on Hopper in float32 without TF32, on vector units.
        other: on other GPUs, over cuBLAS's GEMM of the same sizes.
    """

    hopper_16_bit: float
    hopper_tf32: float
    hopper_float32: float
    other: float = 1.0


# On Hopper from convolutions and recurrent layers on an H200 (2026-11-28-convolutions-h200). In
# float32 cuDNN has Ampere's kernels of small tiles, Winograd's and Fourier's transforms: medians of
# one sweep, which another tests (2026-11-28-convolutions-float32-h200). Gradients of filters of
# volumes take 4 to 30 times as long. On other GPUs from DeepBench's 16-bit convolutions of 32
# channels and more with cuDNN 7.6; medians on a V100 and a T4: 1.13 and 1.15 (convolutions), 1.34
# and 1.24 (gradients of images), 1.31 and 1.78 (of filters); see benchmarks/predictions/deepbench.
# Recurrent layers were not measured there.
_LIBRARY_FACTORS = {
    PartKernel.CONVOLUTION: _LibraryFactors(0.92, 0.92, 2.0, 1.14),
    PartKernel.IMAGE_GRADIENT: _LibraryFactors(0.92, 1.0, 2.2, 1.3),
    PartKernel.FILTER_GRADIENT: _LibraryFactors(1.03, 1.77, 2.0, 1.4),
    PartKernel.NARROW_CONVOLUTION: _LibraryFactors(1.7, 2.0, 2.2, 1.14),
    PartKernel.NARROW_IMAGE_GRADIENT: _LibraryFactors(1.4, 1.2, 1.1, 1.3),
    PartKernel.NARROW_FILTER_GRADIENT: _LibraryFactors(1.9, 3.2, 2.8, 1.4),
    PartKernel.POINT_CONVOLUTION: _LibraryFactors(1.0, 1.2, 1.1, 1.14),
    PartKernel.POINT_IMAGE_GRADIENT: _LibraryFactors(1.0, 1.2, 1.3, 1.3),
    PartKernel.POINT_FILTER_GRADIENT: _LibraryFactors(1.0, 1.0, 2.4, 1.4),
    PartKernel.RECURRENT_STEP: _LibraryFactors(1.0, 1.5, 1.5),
    PartKernel.RECURRENT_STEP_GRADIENT: _LibraryFactors(1.0, 1.8, 1.8),
    PartKernel.RECURRENT_WEIGHT_GRADIENT: _LibraryFactors(1.0, 1.7, 1.7),
}

# Share of a recurrent layer's launch floors for a step (`recurrent.STEP_LAUNCHES`) that the kernels
# of its gates take on Hopper, 1.7 to 3.7 us on an H200.
_STEP_SHARE = 1 / 6


def convolution_kernels(
    gpu: Gpu, kernels: U8, c: GemmCoefficients
) -> Iterator[tuple[I64, TileKernel]]:
    """Yield the rows of convolutions with windows in `kernels`, and their kernel on Hopper."""
    if gpu.architecture != "hopper":
        return
    changed = msgspec.structs.replace(
        c, l2_bytes_per_cycle=_CONVOLUTION_LOADS, prologue_cycles=_CONVOLUTION_PROLOGUE
    )
    for codes, tilings in (
        (_WINDOWED, _CONVOLUTION_TILINGS),
        (_FILTER_GRADIENTS, _FILTER_TILINGS),
    ):
        rows = np.flatnonzero(np.isin(kernels, codes))
        if len(rows):
            yield rows, TileKernel(changed, None, _CONVOLUTION_RATE, 0.0, tilings)


def launches_on(gpu: Gpu, parts: ComponentGemms) -> F64:
    """Return the additional launch floors of each component GEMM on a GPU, float64[p]."""
    steps = (PartKernel.RECURRENT_STEP, PartKernel.RECURRENT_STEP_GRADIENT)
    on_hopper = gpu.architecture == "hopper"
    share = np.where(np.isin(parts.kernels, steps) & on_hopper, _STEP_SHARE, 1.0)
    return parts.launches * share


def library_factors(gpu: Gpu, kernels: U8, operand_bytes: F64, vector: Mask) -> F64:
    """Return the times of cuDNN's products over those of their tiles, 1 for others, float64[d].

    Args:
        gpu: where they run.
        kernels: a `PartKernel` for each, uint8[d].
        operand_bytes: of an element, float64[d].
        vector: whether vector units multiply float32, bool[d].
    """
    factors = np.ones(len(kernels))
    for kernel, of_kernel in _LIBRARY_FACTORS.items():
        rows = kernels == kernel
        if gpu.architecture != "hopper":
            factors[rows] = of_kernel.other
            continue
        is_16_bit = operand_bytes[rows] <= _HALF_BYTES
        wide = np.where(vector[rows], of_kernel.hopper_float32, of_kernel.hopper_tf32)
        factors[rows] = np.where(is_16_bit, of_kernel.hopper_16_bit, wide)
    return factors


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


# The larger a tile, the fewer bytes it loads from the cache for a FLOP. The power of GEMMs, which
# mostly have this tile, contains its loads.
_LARGE_TILE = 256.0, 128.0


def loads_of_small_tiles(parts: ComponentGemms, calls: int) -> F64:
    """Return the bytes that experts' kernels load from the cache for small tiles, float64[calls].

    They are those beyond the loads of tiles of 256 x 128 for as many FLOPs. Of the tiles of a tuned
    kernel, the one that loads least counts. 0 for calls without experts.
    """
    beyond = np.zeros(len(parts.call))
    batch, m, n, k, item, *_ = parts.shapes.T
    for code, (_, tilings) in _EXPERT_KERNELS.items():
        rows, columns, _ = tilings[:, :, None]
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        of_large = rows * columns * sum(1 / edge for edge in _LARGE_TILE)
        loads = item * k * tiles * np.stack([rows + columns, of_large])
        least = loads[0].argmin(axis=0), np.arange(len(m))
        beyond = np.where(parts.kernels == code, loads[0][least] - loads[1][least], beyond)
    loads: F64 = np.zeros(calls)
    np.add.at(loads, parts.call, parts.times * beyond)
    return loads


# Most rows, tiles, and tiles in a cluster of CUTLASS's kernels for scales of rows on Hopper. vLLM
# and SGLang choose by m alone (vLLM: csrc/quantization/w8a8/cutlass/c3x, Apache-2.0). For few rows
# they exchange the operands, so a tile has as few as 16. A cluster has two tiles of 128 rows:
# time(m + 1) / time(m) is 1.54 to 1.82 at m = 128, 1.51 to 1.57 at 256 and 1.51 to 1.58 at 512.
_HOPPER_ROWS: tuple[tuple[float, F64, int], ...] = (
    (16, _undivided([(16, 64)]), 1),
    (64, _undivided([(16, 64), (32, 64), (64, 64)]), 1),
    (128, _undivided([(64, 128)]), 1),
    (np.inf, _undivided([(128, 128)]), 2),
)

# Tensor cores with a memory of their own (tcgen05, compute capability 10 and 11) multiply at least
# 64 rows at once in 8 bits, and 128 in 4 bits with scales of blocks. Smaller tiles are mostly
# empty. CUTLASS also has smaller tiles than Hopper's for more than 128 rows: time(m + 1) / time(m)
# at m = 256 is 1.57 on an H200 and 1.44 on a B200, and at 1024 it is 1.31 and 1.17.
_TENSOR_MEMORY = range(100, 120)
_EIGHT_BIT_ROWS, _FOUR_BIT_ROWS = 64, 128

# Tiles of DeepGEMM on such tensor cores: 128 rows, or 128 columns with the operands exchanged.
_DEEP_GEMM = _undivided(
    [
        *((128, columns) for columns in (16, *range(32, 257, 32))),
        *((rows, 128) for rows in range(16, 257, 16)),
    ]
)


def _deep_gemm_choice(gpu: Gpu, shapes: F64) -> I64:
    """Return the index in `_DEEP_GEMM` of the tile that DeepGEMM chooses for each GEMM, int64[d].

    It has the fewest waves; of these, the fullest last one; of these, the smallest tile
    (csrc/jit_kernels/heuristics of deepseek-ai/DeepGEMM, MIT).
    """
    m, n = (shapes[:, GemmShape._fields.index(name), None] for name in ("m", "n"))
    rows, columns, _ = _DEEP_GEMM
    tiles = np.ceil(m / rows) * np.ceil(n / columns)
    waves = np.ceil(tiles / gpu.sm_count)
    idle = waves * gpu.sm_count - tiles
    order = np.lexsort((np.broadcast_to(rows + columns, tiles.shape), idle, waves), axis=1)
    return order[:, 0]


class _CublasLt(NamedTuple):
    """How a kernel of cuBLASLt for fine scales differs from those without.

    Attributes:
        rate: factor on the sustained rate.
        epilogue: as in `TileKernel`.
        step_cycles: as in `GemmCoefficients`: a step multiplies its sums with the scales.
    """

    rate: float
    epilogue: float
    step_cycles: float


# torch's operators run cuBLASLt's kernels of one tile on Hopper, with CUDA 12.9 and later, whatever
# the sizes: of 214 calls of 16 to 4096 rows on an H100, one of block scales divided the inner size
# (torch 2.11). The figures are fitted to 63 and 62 of them, and 35 and 34 others are 7% off
# (2026-11-28-fine-scales-h100). On other architectures torch has kernels of CUTLASS, of which none
# was measured: they count as an inference engine's.
_CUBLAS_LT = {
    Scales.TORCH_ROW: _CublasLt(rate=1.086, epilogue=0.043, step_cycles=238.0),
    Scales.TORCH_BLOCK: _CublasLt(rate=0.714, epilogue=0.062, step_cycles=279.0),
}
_CUBLAS_LT_TILE = _undivided([(128, 128)])

# Scales of torch's operators -> the same of an inference engine's.
_OF_ENGINES = {Scales.TORCH_ROW: Scales.ROW, Scales.TORCH_BLOCK: Scales.BLOCK}


def _scaled_tilings(gpu: Gpu, shapes: F64, scales: U8) -> Iterator[tuple[Mask, F64, int]]:
    """Yield GEMMs with fine scales, their tilings and the tiles in a cluster; see `scaled_kernels`.

    Kernels of Ada have smaller tiles for few rows and are chosen by more than m.
    """
    every: Mask = scales <= Scales.BLOCK
    by_row: Mask = scales == Scales.ROW
    if (gpu.capability or 0) in _TENSOR_MEMORY:
        four: Mask = shapes[:, GemmShape._fields.index("operand_bytes")] < 1
        yield four, _WHOLE_K[:, _WHOLE_K[0] >= _FOUR_BIT_ROWS], 1
        yield by_row & ~four, _WHOLE_K[:, _WHOLE_K[0] >= _EIGHT_BIT_ROWS], 1
        by_block = np.flatnonzero(~by_row & ~four)
        choice = np.full(len(shapes), -1)
        choice[by_block] = _deep_gemm_choice(gpu, shapes[by_block])
        for tile in np.unique(choice[by_block]):
            yield choice == tile, _DEEP_GEMM[:, [tile]], 1
        return
    if gpu.architecture not in ASYNCHRONOUS:
        yield every, _WHOLE_K, 1
        return
    yield every & ~by_row, _WHOLE_K, 1
    m, above = shapes[:, GemmShape._fields.index("m")], 0.0
    for most, tilings, cluster in _HOPPER_ROWS:
        yield by_row & (m > above) & (m <= most), tilings, cluster
        above = most


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
    scales = scales.copy()
    for of_torch, of_engines in _OF_ENGINES.items():
        rows = np.flatnonzero(scales == of_torch)
        if gpu.architecture == "hopper" and len(rows):
            kernel = _CUBLAS_LT[of_torch]
            stepped = msgspec.structs.replace(c, step_cycles=kernel.step_cycles)
            figures = kernel.rate, kernel.epilogue, _CUBLAS_LT_TILE
            yield rows, TileKernel(stepped, None, *figures)
        else:
            scales[rows] = of_engines
    coefficients = scaled.applied(c)
    for mask, tilings, cluster in _scaled_tilings(gpu, shapes, scales):
        if mask.any():
            figures = scaled.floor_ns, scaled.rate, scaled.epilogue
            yield np.flatnonzero(mask), TileKernel(coefficients, *figures, tilings, cluster)
