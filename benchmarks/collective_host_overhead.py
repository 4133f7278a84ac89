"""Host time of a collective: NCCL calls, or emulated calls of the recorder.

    torchrun --nproc-per-node 2 benchmarks/collective_host_overhead.py
    python benchmarks/collective_host_overhead.py

The first form, on a host with two CUDA GPUs, measures NCCL, the second the recorder as rank 0 of 2.
It prints the time in us until a call returns, and of the wait for its handle (medians of 60).
"""

import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import parser_of

from onerank.capture.collective_kernels import CollectiveEmulation, uniform
from onerank.capture.fake_world.recorder import Recorder

CALLS = 60  # fewer than the launches that a stream takes before the host waits
ROUNDS = 2
ELEMENTS = 1 << 18
BUSBW_GB_PER_S = 300.0


def main() -> None:
    """Print a line for each kind of call, twice."""
    parser_of(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU, or two under torchrun")
    real = "WORLD_SIZE" in os.environ
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    if real:
        dist.init_process_group("nccl", device_id=device)
    else:
        Recorder(0, 2, emulation=CollectiveEmulation(uniform(BUSBW_GB_PER_S))).start()
        dist.init_process_group("nccl", rank=0, world_size=2, device_id=device)
    if rank == 0:
        implementation = "NCCL" if real else "the recorder"
        print(
            f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"{implementation}; us of the host"
        )
    for name, once in [*calls().items()] * ROUNDS:
        issue, wait = measure(once)
        if rank == 0:
            print(f"{name:24}call {issue:6.1f}   wait {wait:6.1f}", flush=True)
    dist.destroy_process_group()


def calls() -> dict[str, Callable[[], dist.Work | None]]:
    """Return the calls to measure, by name."""
    gathered, shard = (torch.randn(n * ELEMENTS, device="cuda") for n in (2, 1))
    return {
        "all-gather, async": lambda: dist.all_gather_into_tensor(gathered, shard, async_op=True),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, shard),
        "reduce-scatter, async": lambda: dist.reduce_scatter_tensor(shard, gathered, async_op=True),
        "all-reduce, async": lambda: dist.all_reduce(gathered, async_op=True),
        "all-reduce": lambda: dist.all_reduce(gathered),
    }


def measure(once: Callable[[], dist.Work | None]) -> tuple[float, float]:
    """Return the us of a call and of its wait."""
    issues: list[float] = []
    waits: list[float] = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        work = once()
        issued = time.perf_counter()
        if work is not None:
            work.wait()
        waits.append((time.perf_counter() - issued) * 1e6)
        issues.append((issued - begun) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(issues), statistics.median(waits)


if __name__ == "__main__":
    main()
