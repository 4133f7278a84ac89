"""Time attention with each kernel of PyTorch on the current GPU.

    python -m benchmarks.predictions.attention_kernels

Causal bfloat16 attention of training shapes, forward and backward, by CUDA events: the median of
20 batches of 10 calls after 10 warm-up calls. `times flash2` is relative to flash-attention 2. Its
inverse is the figure of `onerank.annotate.models.attention_kernels` for flash-attention 2 where
the other kernel is the usual one of the architecture. Needs a GPU.
"""

import statistics
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions

SHAPES = [(1, 8, 4096), (1, 32, 4096), (4, 32, 2048), (1, 32, 16384)]  # batch, heads, length
KERNELS = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def main() -> None:
    """Print the table."""
    parser_of(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    print_conditions(*gpus_and_torch())
    print(f"{'shape':>16}{'d':>5}{'pass':>10}{'kernel':>9}{'us':>10}{'TFLOP/s':>9}{'x flash2':>10}")
    for batch, heads, length in SHAPES:
        for d in (64, 128):
            measure(batch, heads, length, d)


def measure(batch: int, heads: int, length: int, d: int) -> None:
    """Print both passes of one shape by each kernel."""
    size = (batch, heads, length, d)
    operands = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    first: dict[str, float] = {}
    for name, backend in KERNELS.items():
        with sdpa_kernel(backend):
            out = attend(*operands, is_causal=True)
            passes: dict[str, Callable[[], object]] = {
                "forward": lambda: attend(*operands, is_causal=True),
                "backward": lambda out=out: torch.autograd.grad(
                    out, operands, gradient, retain_graph=True
                ),
            }
            for direction, call in passes.items():
                us = microseconds(call)
                flops = 2 * batch * heads * length**2 * d * (1 if direction == "forward" else 2.5)
                base = first.setdefault(direction, us)
                shape = f"{batch}x{heads}x{length}"
                print(f"{shape:>16}{d:>5}{direction:>10}{name:>9}{us:10.1f}{flops / us / 1e6:9.0f}"
                      f"{us / base:10.3f}")  # fmt: skip


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    for _ in range(10):
        call()
    times: list[float] = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return statistics.median(times)


if __name__ == "__main__":
    main()
