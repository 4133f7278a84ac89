"""Products whose rows begin between the boundaries from which matrix units are fed.

A vocabulary of 50257 in 16 bits: rows of logits begin at any even byte, and no kernel of the GPU's
own generation takes them 16 bytes at a time. Libraries then run one of an older generation, at a
fraction of the rate, whatever the product's size.
"""

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_BOUNDARY_BYTES = 16
_ITEM_BYTES = 2
_OF_OPERANDS, _OF_RESULTS = 380.0, 290.0
"""FLOPs of an SM and cycle where an operand's rows are so, and where the result's are.

By bf16 products of H100s and H200s, geometric means: of GPT-2's vocabulary 362 forward, 535 and
565 for the two gradients (2026-11-23); in public traces (AMD-AGI/TraceLens, H100) of BERT's, 30522,
408, of eager attention over 3137 and 5185 patches 195 and 244 for scores, 255 and 273 for what they
weigh. There products of 25,089 and 5185 rows, whose rows begin well, run at 2050 and more.
"""


def rows_off(gemm: F64) -> tuple[Mask, Mask]:
    """Return whether the rows of an operand, and of the result, begin off the boundaries.

    The result's rows are n long, an operand's k where it is not transposed. Of a weight's gradient
    an operand's are m long: the m of tokens is not told from it by the shape, but by the step, in
    which a layer's width is some product's n.

    Args:
        gemm: all products of a step as `tiles.gemm_ns` takes them, or zeros, float64[d, 6].

    Returns:
        Two masks, bool[d].
    """
    batch, m, n, item = gemm[:, [0, 1, 2, 4]].T
    off = (gemm[:, 1:4] * item[:, None]) % _BOUNDARY_BYTES != 0
    off &= (item == _ITEM_BYTES)[:, None]
    widths = np.unique(n[off[:, 1] & (batch == 1)])
    gradient = off[:, 0] & (batch == 1) & np.isin(m, widths)
    return off[:, 2] | gradient, off[:, 1]


def least_ns(gpu: Gpu, gemm: F64) -> F64:
    """Return the time that such products take at least on a GPU, in ns; 0 of others, float64[d].

    Of GPUs of other vendors than NVIDIA nothing is known of them.
    """
    least = np.zeros(len(gemm))
    if not gpu.is_nvidia:
        return least
    operands, results = rows_off(gemm)
    flops = 2 * gemm[:, :4].prod(axis=1)
    cycles_per_ns = gpu.sm_count * gpu.max_clock_hz * 1e-9
    for rows, rate in ((operands, _OF_OPERANDS), (results, _OF_RESULTS)):
        least[rows] = np.maximum(least, flops / rate / cycles_per_ns)[rows]
    return least
