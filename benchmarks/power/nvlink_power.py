"""Power of active links to peers, and the slowdown of kernels at the power limit.

    python -m benchmarks.power.nvlink_power [--seconds 2.2] [--rounds 2]

Needs two GPUs of one host that reach each other. Both multiply 4096 x 4096 by 4096 x 14336
(bfloat16) repeatedly while copies go from each to the other: none, 4 KiB every so many ms, which
keeps the link active with negligible traffic, and 64 MiB, next to equal copies within the GPU. Then
it repeats this without products. Power is the energy counter over the second half of a line.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from onerank.capture.profiling.nvml import Board

PRODUCTS = 16  # GEMMs between two CUDA events
AHEAD = 8  # copies in flight
GPUS = (0, 1)


@dataclass(frozen=True)
class Copies:
    """Copies of each GPU, one every `ms` milliseconds; 0: one after the other."""

    name: str
    bytes: int
    ms: float
    to_peer: bool = True


TRICKLES = [Copies(f"4 KiB each {ms} ms", 4 << 10, ms) for ms in (0.1, 1, 20, 100)]
BESIDE = [
    *TRICKLES,
    Copies("64 MiB each 4 ms", 64 << 20, 4),
    Copies("on device 64 MiB each 4 ms", 64 << 20, 4, to_peer=False),
    Copies("64 MiB always", 64 << 20, 0),
]
ALONE = [*TRICKLES, Copies("64 MiB always", 64 << 20, 0)]


def main() -> None:
    """Print a line for each kind of copies."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=2.2, help="of each line")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < len(GPUS):
        sys.exit(f"needs {len(GPUS)} CUDA GPUs, found {torch.cuda.device_count()}")
    measuring = Measuring(arguments.seconds)
    print_conditions(*gpus_and_torch(len(GPUS)))
    print(f"{arguments.seconds} s a line; both GPUs' figures")
    print(f"{'copies':30}{'W':>14}{'MHz':>12}{'product, us':>18}")
    measuring.line("none, to warm up", None, products=True)
    measuring.line("none, no peer reached yet", None, products=True)
    for _ in range(arguments.rounds):
        measuring.line("none", None, products=True)
        for copies in BESIDE:
            measuring.line(copies.name, copies, products=True)
    print("no products")
    for copies in (None, *ALONE, None):
        measuring.line(copies.name if copies else "none", copies, products=False)


@dataclass
class Measuring:
    """Both GPUs and the operands of their GEMMs."""

    seconds: float
    boards: list[Board] = field(default_factory=list[Board])
    operands: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for gpu in GPUS:
            with torch.cuda.device(gpu):
                self.boards.append(Board())
                shapes = ((4096, 4096), (4096, 14336), (4096, 14336))
                a, b, c = (
                    torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes
                )
                self.operands.append((a, b, c))

    def line(self, name: str, copies: Copies | None, *, products: bool) -> None:
        """Run both GPUs for some seconds; print their power, clocks and times per GEMM."""
        stop = threading.Event()
        took: dict[int, float] = {}
        work: list[threading.Thread] = []
        for gpu in GPUS:
            if products:
                task = (gpu, self.operands[gpu], stop, took)
                work.append(threading.Thread(target=_multiply, args=task))
            if copies is not None:
                once = _copying(gpu, copies)
                task = (gpu, once, copies.ms / 1e3, stop)
                work.append(threading.Thread(target=_repeat, args=task))
        with self.boards[0].power() as first, self.boards[1].power() as second:
            for thread in work:
                thread.start()
            time.sleep(self.seconds)
            stop.set()
            for thread in work:
                thread.join()
        powers = _pair([power.watts for power in (first, second)], ".0f")
        clocks = _pair([power.sm_clock_mhz for power in (first, second)], "d")
        times = _pair([took.get(gpu) for gpu in GPUS], ".1f")
        print(f"{name:30}{powers:>14}{clocks:>12}{times:>18}", flush=True)


def _multiply(
    gpu: int,
    operands: tuple[Tensor, Tensor, Tensor],
    stop: threading.Event,
    took: dict[int, float],
) -> None:
    """Multiply until `stop` is set; record the time in us of a GEMM in the second half."""
    torch.cuda.set_device(gpu)
    a, b, result = operands
    marks: list[torch.cuda.Event] = []
    while not stop.is_set():
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=result)
        if len(marks) > 4:
            marks[-4].synchronize()
    torch.cuda.synchronize()
    half = marks[len(marks) // 2 :]
    took[gpu] = half[0].elapsed_time(half[-1]) * 1e3 / PRODUCTS / (len(half) - 1)


def _copying(gpu: int, copies: Copies) -> Callable[[], object]:
    """Return a function that copies once."""
    target_gpu = GPUS[1 - gpu] if copies.to_peer else gpu
    source = torch.randn(copies.bytes // 4, device=f"cuda:{gpu}")
    target = torch.empty(copies.bytes // 4, device=f"cuda:{target_gpu}")
    target.copy_(source)
    for device in GPUS:
        torch.cuda.synchronize(device)
    return lambda: target.copy_(source, non_blocking=True)


def _repeat(gpu: int, once: Callable[[], object], each_s: float, stop: threading.Event) -> None:
    """Copy on a separate stream until `stop` is set."""
    torch.cuda.set_device(gpu)
    issued: list[torch.cuda.Event] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        while not stop.is_set():
            once()
            issued.append(torch.cuda.Event())
            issued[-1].record()
            if len(issued) > AHEAD:
                issued[-AHEAD].synchronize()
            if each_s:
                time.sleep(each_s)
        torch.cuda.current_stream().synchronize()


def _pair(values: Sequence[float | None], form: str) -> str:
    return " / ".join("-" if value is None else format(value, form) for value in values)


if __name__ == "__main__":
    main()
