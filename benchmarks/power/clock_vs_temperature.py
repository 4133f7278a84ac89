"""Slowdown of a GPU at its power limit as its temperature rises.

    python -m benchmarks.power.clock_vs_temperature [--seconds 120]

Needs a cold CUDA GPU. Multiplies 4096 x 4096 by 4096 x 14336 (bfloat16) in a loop
and prints, every few seconds, the power, the SM clock, the temperature and a product's time.
"""

import sys
import time

import torch

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from onerank.capture.profiling.nvml import Board

EACH_S = 5.0
PRODUCTS = 64  # between two looks at the clock


def main() -> None:
    """Print a line every few seconds."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU")
    print_conditions(*gpus_and_torch(), f"{torch.cuda.temperature()} °C at the start")
    shapes = ((4096, 4096), (4096, 14336), (4096, 14336))
    a, b, c = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    board = Board()
    begun = time.monotonic()
    print(f"{'s':>6}{'W':>8}{'MHz':>8}{'°C':>6}{'product, us':>14}")
    while (now := time.monotonic() - begun) < arguments.seconds:
        with board.power() as power:
            us = products(a, b, c)
        watts = "-" if power.watts is None else f"{power.watts:.0f}"
        clock = power.sm_clock_mhz or "-"
        print(f"{now:6.0f}{watts:>8}{clock:>8}{torch.cuda.temperature():6d}{us:14.1f}", flush=True)


def products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    """Multiply for some seconds; return the us of one product."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began, count = time.monotonic(), 0
    first.record()
    while time.monotonic() - began < EACH_S:
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=c)
        count += PRODUCTS
        torch.cuda.synchronize()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / count


if __name__ == "__main__":
    main()
