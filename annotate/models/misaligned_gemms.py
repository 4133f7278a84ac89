"""GEMMs with misaligned rows: which they are, and the least time that they take.

Misaligned GEMMs are slower from Ampere on. With a vocabulary of 50257 in 16 bits, rows of logits
start at any even byte, but kernels of the GPU's generation need 16-byte alignment. Libraries then
run a kernel of an older generation at a fraction of the rate, whatever the size.
"""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.ir.arrays import F64, Mask

# Kernels of the GPU's generation need rows at this alignment; see the module's docstring.
_BOUNDARY_BYTES = 16

# Only 16-bit GEMMs were measured with misaligned rows.
_ITEM_BYTES = 2

# FLOPs per SM and cycle of GEMMs with misaligned rows of an operand, and of the result, in 16 bits
# on H100 and H200; means are geometric. Aligned GEMMs run at 2050 and more.
#
# Rows that begin at any element run kernels of Turing ("cutlass_75_tensorop"), which copy through
# registers. GPT-2's vocabulary, bf16, 2026-11-23: 362 forward, 535 and 565 for the two gradients.
# In a batch, eager attention over 3137 and 5185 patches (AMD-AGI/TraceLens, H100): 195 and 244 for
# the scores, 255 and 273 for the weighted sums.
_MISALIGNED_OPERANDS, _MISALIGNED_RESULTS = 550.0, 362.0
_BATCHED_OPERANDS, _BATCHED_RESULTS = 264.0, 218.0

# What their tiles load limits them, on an H100 as on an H200. The rates above are those of full
# tiles of 128 x 128. Up to 32 rows of the result run tiles of 64 x 64; rows that a tile lacks save
# a part of its time. Granite 3.3's head, 49,159 columns of 4096 in bf16: 8, 32, 33, 65 and 128 rows
# take 389, 508, 404, 454 and 547 us on an H100; these figures give 367, 444, 395, 446 and 546
# (2026-11-28-serving-blind-4-h100); 32 rows take 510 us on an H200. A single row runs a product of
# a matrix and a vector, 132 to 139 us on an H200, as long as this many FLOPs of each element.
_SIDE, _SMALL_SIDE, _SMALL_SIDE_ROWS, _ROW_SHARE, _FLOPS_OF_VECTOR = 128, 64, 32, 0.6, 63

# Rows that begin at multiples of 4 or 8 bytes run kernels of Ampere ("cutlass_80_tensorop"), whose
# asynchronous copies take 4, 8 or 16 bytes. fp16 on an H100, torch 2.11 (2026-11-26), forward and
# two gradients of 4096 tokens and a hidden size of 2048: 1057, 944 and 1057 with a vocabulary of
# 12564, 908, 942 and 852 with 6282. BERT's of 30522 took 408 in an older public trace.
_WORD_BYTES = 4
_WORD_ALIGNED = 957.0

# Volta's and Turing's own kernels copy operands through registers, which needs no alignment: in
# DeepBench 12 GEMMs with rows of 7133, 7435 or 5481 elements take as long on a V100 and a T4 as
# aligned ones.
_COPYING_THROUGH_REGISTERS = ("volta", "turing")


def has_misaligned_rows(gemm: F64, *, of_step: bool = True) -> tuple[Mask, Mask]:
    """Return whether the rows of an operand, and of the result, are misaligned.

    Rows of the result have n elements; rows of an operand: see `_operand_row_elements`.

    Args:
        gemm: shapes of all GEMMs of a step, as for `gemm_ns`, or zeros, float64[d, 6].
        of_step: whether they belong to one step, in which a GEMM may be the gradient of another.

    Returns:
        Two masks, bool[d].
    """
    rows = np.stack([_operand_row_elements(gemm, of_step=of_step), gemm[:, 2]])
    item = gemm[:, 4]
    off: Mask = (rows * item) % _BOUNDARY_BYTES != 0
    operands, results = off & (item == _ITEM_BYTES)
    return operands, results


def _operand_row_elements(gemm: F64, *, of_step: bool) -> F64:
    """Return the elements of a row of an operand, float64[d].

    An operand that is not transposed has rows of k elements. The gradient of a weight,
    [m, k] x [k, n], transposes both, so that they have m and n, and k is the number of tokens; the
    step then contains the forward GEMM, [k, n] x [n, m].

    Args:
        gemm: as for `has_misaligned_rows`.
        of_step: as for `has_misaligned_rows`.
    """
    batch, m, n, k, item, _ = gemm.T
    if not of_step:
        return k.copy()
    # Inductor pads GPT-2's vocabulary in two of its three products, so the third, the weight's
    # gradient, meets the padded width there (50264 for 50257, on an H100).
    padded = np.ceil(m * item / _BOUNDARY_BYTES) * _BOUNDARY_BYTES / np.maximum(item, 1)
    single = batch == 1
    forward = {*zip(m[single].tolist(), n[single].tolist(), k[single].tolist(), strict=True)}
    elements = k.copy()
    for row in np.flatnonzero(single):
        if any((k[row], width, n[row]) in forward for width in (m[row], padded[row])):
            elements[row] = m[row]
    return elements


def misaligned_lower_bound_ns(gpu: Gpu, gemm: F64, *, of_step: bool = True) -> F64:
    """Return the least time of misaligned GEMMs in ns; 0 for all others, float64[d].

    0 on GPUs of other vendors, whose misaligned GEMMs were not measured, and on GPUs before Ampere.
    `of_step` as for `has_misaligned_rows`.
    """
    least = np.zeros(len(gemm))
    if not gpu.is_nvidia or gpu.architecture in _COPYING_THROUGH_REGISTERS:
        return least
    operands, results = has_misaligned_rows(gemm, of_step=of_step)
    flops = 2 * gemm[:, :4].prod(axis=1)
    cycles_per_ns = gpu.sm_count * gpu.max_clock_hz * 1e-9
    item = gemm[:, 4]
    batched = gemm[:, 0] > 1
    elements = _operand_row_elements(gemm, of_step=of_step)
    of_results = _flops_of_full_tiles(gemm)
    for rows, work, row, single, of_batch in (
        (operands, flops, elements * item, _MISALIGNED_OPERANDS, _BATCHED_OPERANDS),
        (results, of_results, gemm[:, 2] * item, _MISALIGNED_RESULTS, _BATCHED_RESULTS),
    ):
        rate = np.where(batched, of_batch, np.where(row % _WORD_BYTES == 0, _WORD_ALIGNED, single))
        least[rows] = np.maximum(least, work / rate / cycles_per_ns)[rows]
    return least


def _flops_of_full_tiles(gemm: F64) -> F64:
    """Return the FLOPs of misaligned results that tiles of 128 x 128 compute in the same time."""
    batch, m, n, k, _, _ = gemm.T
    flops = 2 * batch * m * n * k
    side = np.where(m <= _SMALL_SIDE_ROWS, _SMALL_SIDE, _SIDE)
    rows = np.minimum(m, side)
    share = (side + _ROW_SHARE * rows) / (1 + _ROW_SHARE)
    of_tiles = 2 * np.ceil(m / side) * (n / side) * share * _SIDE * k
    of_call = np.where(m > 1, of_tiles, _FLOPS_OF_VECTOR * n * k)
    return np.where(batch > 1, flops, np.maximum(flops, of_call))
