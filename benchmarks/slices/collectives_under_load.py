"""Collectives concurrent with compute: NCCL on all GPUs of this host, and emulated collectives.

    torchrun --nproc-per-node 2 -m benchmarks.slices.collectives_under_load -o DIR
        [--seconds 1.5] [--mib 64,512]

Each collective runs repeatedly, uncontended and concurrent with a matrix product or an elementwise
product on another stream. NCCL runs on all GPUs at once; then each GPU runs the emulated collective
with the uncontended time of NCCL. The table has the times of collectives and of concurrent kernels,
the power (energy counter of the board over the second half; it lags by about 0.6 s, so lines below
1.2 s show the power of the previous line) and the median clock. It compares the emulation with NCCL
in bandwidth, multiprocessors and power.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from onerank.capture.collective_kernels.kernels import CollectiveKernels, Move, device_range
from onerank.capture.collective_kernels.launch_plan import plan_launch
from onerank.capture.collective_kernels.network import Curve, Link, Network
from onerank.capture.profiling.nvml import Board

BETWEEN_MARKS = 4

AHEAD = 1.6
"""Enqueued time of concurrent kernels over the collectives' uncontended time: they end last."""


@dataclass(frozen=True)
class Row:
    """One line of the table for one GPU; None for a value that was not measured."""

    collective: str
    mib: int
    of: str
    concurrent: str
    call_us: float
    overlapped_us: float | None
    watts: float | None
    sm_clock_mhz: int | None


def main() -> None:
    """Measure, write each rank's rows, and print those of rank 0."""
    parser = parser_of(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each line")
    parser.add_argument("--mib", default="64,512", help="sizes of the whole tensor")
    arguments = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        sys.exit("start it with torchrun, on a host with two CUDA GPUs or more")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    measuring = Measuring(arguments.seconds, rank, ranks, device)
    if rank == 0:
        _conditions(ranks, arguments.seconds)
    rows: list[Row] = []
    for mib in map(int, arguments.mib.split(",")):
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            for row in measuring.collective(collective, mib):
                rows.append(row)
                if rank == 0:
                    print(_line(row), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = json.dumps([asdict(row) for row in rows], indent=1)
    (arguments.output / f"under-load.{rank}.json").write_text(table + "\n")
    dist.barrier()
    dist.destroy_process_group()


class Measuring:
    """The measurements of one rank."""

    def __init__(self, seconds: float, rank: int, ranks: int, device: torch.device) -> None:
        self.us, self.rank, self.ranks, self.device = seconds * 1e6, rank, ranks, device
        self.board, self.kernels = Board(), CollectiveKernels(device, paced=True)
        self.calls, self.compute = torch.cuda.Stream(), torch.cuda.Stream()
        a, b = self.random(4096, 4096), self.random(4096, 14336)
        c, d = self.random(4096, 14336), self.random(4096, 14336)
        self.concurrent: dict[str, Callable[[], object]] = {
            "matrix product": lambda: torch.mm(a, b, out=c),
            "elementwise": lambda: torch.mul(b, d, out=c),
        }
        self.alone_us = {name: _mean_us(once, 200) for name, once in self.concurrent.items()}

    def random(self, *shape: int) -> Tensor:
        """Return normal random numbers with standard deviation 1."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def collective(self, name: str, mib: int) -> list[Row]:
        """Measure a collective of `mib` MiB: NCCL's, then the emulated one."""
        tensor = self.random(mib << 19) * 0.01
        shard = tensor.chunk(self.ranks)[self.rank].clone()
        average = dist.ReduceOp.AVG
        size, nccl, moves = {
            "all_reduce": (
                tensor.nbytes,
                lambda: dist.all_reduce(tensor, op=average),
                [(device_range(tensor), device_range(tensor))],
            ),
            "all_gather": (
                shard.nbytes,
                lambda: dist.all_gather_into_tensor(tensor, shard),
                [(device_range(shard), device_range(tensor))],
            ),
            "reduce_scatter": (
                tensor.nbytes,
                lambda: dist.reduce_scatter_tensor(shard, tensor, op=average),
                [
                    (device_range(tensor[: shard.numel()]), device_range(shard)),
                    (device_range(tensor[shard.numel() :]), None),
                ],
            ),
        }[name]
        count = max(8, round(self.us / (4.0 * mib)))  # all ranks must make as many calls
        uncontended = torch.tensor([_mean_us(nccl, count)], device=self.device)
        dist.all_reduce(uncontended, op=dist.ReduceOp.MIN)
        us = float(uncontended.item())
        paced = self.paced(name, size, us, moves)
        return [
            Row(name, mib, implementation, concurrent, *self.figures(once, us, concurrent))
            for concurrent in ("", *self.concurrent)
            for implementation, once in (("NCCL", nccl), ("emulated", paced))
        ]

    def paced(self, name: str, size: int, us: float, moves: list[Move]) -> Callable[[], object]:
        """Return a function that runs the emulated collective once."""
        plan = plan_launch(
            name,
            size,
            "all",
            tuple(range(self.ranks)),
            network=Network(Link(1.0, measured={name: Curve(((size, us),))})),
            interconnect=self.kernels.interconnect,
        )
        return lambda: self.kernels.pace(name, plan, moves)

    def figures(
        self, once: Callable[[], object], us: float, concurrent: str
    ) -> tuple[float, float | None, float | None, int | None]:
        """Return the last four fields of a `Row`, for calls that take `us` uncontended.

        Concurrent kernels run on another stream and end after the last call.
        """
        count = max(8, round(self.us / us))
        concurrent_kernel = self.concurrent.get(concurrent)
        kernels_per_call = AHEAD * us / self.alone_us[concurrent] if concurrent_kernel else 0.0
        marks: list[torch.cuda.Event] = []
        done = 0
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = _event(), _event()
        with self.board.power() as power:
            begin.record(self.calls)
            for place in range(count):
                with torch.cuda.stream(self.calls):
                    once()
                with torch.cuda.stream(self.compute):
                    while concurrent_kernel and done < kernels_per_call * (place + 1):
                        if done % BETWEEN_MARKS == 0:
                            marks.append(_event())
                            marks[-1].record()
                        concurrent_kernel()
                        done += 1
            end.record(self.calls)
            end.synchronize()
        torch.cuda.synchronize()
        total = begin.elapsed_time(end)
        within = [moment for mark in marks if (moment := begin.elapsed_time(mark)) < total]
        within = within[len(within) // 10 :]  # without the start
        spans = BETWEEN_MARKS * (len(within) - 1)
        overlapped_us = (within[-1] - within[0]) * 1e3 / spans if spans > 0 else None
        return total * 1e3 / count, overlapped_us, power.watts, power.sm_clock_mhz


def _mean_us(once: Callable[[], object], count: int) -> float:
    """Return the time of a call in us: the mean of `count` calls, after as many to warm up."""
    took = 0.0
    for _ in range(2):
        begin, end = _event(), _event()
        begin.record()
        for _ in range(count):
            once()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end)
    return took * 1e3 / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _conditions(ranks: int, seconds: float) -> None:
    print_conditions(*gpus_and_torch(ranks))
    print(f"{seconds} s a line; figures of rank 0's GPU")
    print(
        f"{'collective':15}{'MiB':>5} {'concurrent':15}{'of':9}{'call, us':>10}{'overlap, us':>12}"
        f"{'W':>7}{'MHz':>6}"
    )


def _line(row: Row) -> str:
    def cell(value: float | None, width: int, digits: int = 0) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    return (
        f"{row.collective:15}{row.mib:>5} {row.concurrent or 'nothing':15}{row.of:9}"
        f"{cell(row.call_us, 10, 1)}{cell(row.overlapped_us, 12, 1)}"
        f"{cell(row.watts, 7)}{cell(row.sm_clock_mhz, 6)}"
    )


if __name__ == "__main__":
    main()
