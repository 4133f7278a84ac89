"""Attention by its shape on an H100, beside the rates that FlashAttention-3's authors published.

    python benchmarks/attention_published.py

TFLOP/s of figures 5 and 6 of arXiv 2407.08608 (H100 80GB SXM5, bf16, 2048 / head size heads, 16,384
tokens in all), at 512, 1k, 2k, 4k, 8k and 16k tokens; the forward pass was not fitted to them, the
backward pass's factor was chosen with them in view. Prints them, what is predicted, and how many
times too fast that is of FlashAttention-3 and of cuDNN.
"""

import math

import numpy as np

from onerank.annotate import load_gpu
from onerank.annotate.models.attention_tiles import attention_ns
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.tiles import Rates

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
PUBLISHED = {  # head size, causal, backward: FlashAttention-3, cuDNN
    (64, 0, 0): ((333, 392, 460, 476, 496, 497), (335, 373, 395, 408, 412, 413)),
    (128, 0, 0): ((467, 565, 625, 638, 646, 648), (497, 574, 617, 609, 600, 595)),
    (64, 1, 0): ((197, 265, 371, 420, 460, 473), (225, 288, 334, 363, 379, 388)),
    (128, 1, 0): ((292, 423, 521, 579, 602, 616), (315, 410, 484, 518, 529, 539)),
    (64, 0, 1): ((272, 363, 422, 453, 472, 474), (266, 348, 395, 417, 432, 433)),
    (128, 0, 1): ((316, 424, 501, 542, 559, 561), (305, 408, 465, 499, 518, 516)),
}


def main() -> None:
    """Print the table."""
    gpu = load_gpu("H100")
    sustained, peak = gpu.tensor_flops_per_s("bfloat16"), gpu.peak_tensor_flops_per_s("bfloat16")
    assert sustained, "an H100 multiplies in bf16"
    assert peak, "an H100 multiplies in bf16"
    count = len(LENGTHS)
    rates = Rates(np.full(count, sustained), np.full(count, peak))
    print(f"{'   d cau back':19}" + "".join(f"{length:>8}" for length in LENGTHS) + "   times")
    for (d, causal, back), told in PUBLISHED.items():
        heads = WIDTH // d
        rows = [(TOKENS // n, heads, heads, n, n, d, d, causal, back) for n in LENGTHS]
        ns = attention_ns(gpu, rates, np.array(rows, dtype=float), shipped().attention)
        flops = [4 * TOKENS * n * WIDTH * (2.5 if back else 1) / (1 + causal) for n in LENGTHS]
        made = [one / time / 1e3 for one, time in zip(flops, ns.tolist(), strict=True)]
        print(f"{d:4}{causal:5}{back:4}  here" + "".join(f"{one:8.0f}" for one in made))
        for name, figures in zip(("FA-3", "cuDNN"), told, strict=True):
            off = [math.log(a / b) for a, b in zip(made, figures, strict=True)]
            print(f"{name:>19}" + "".join(f"{one:8}" for one in figures)
                  + f"{math.exp(sum(off) / count):8.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
