"""Time and bus bandwidth of collectives and messages between this host's GPUs, by size.

    torchrun --nproc-per-node 2 benchmarks/collective_bandwidth.py -o link.json [--most-mib 256]

Each size runs `REPEATS` times back to back, between two CUDA events (with gloo on a CPU: clocks);
the time therefore excludes the host. Sizes are the input of a rank, as in Chakra: for an
all-gather the shard. Bus bandwidth is defined as in nccl-tests' doc/PERFORMANCE.md.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.converters.nccl import wire_bytes

REPEATS = 20
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def main() -> None:
    """Measure on all ranks; rank 0 writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--most-mib", type=int, default=256)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    sizes = [1 << n for n in range(12, 40, 2) if 1 << n <= arguments.most_mib << 20]
    rows: list[dict[str, object]] = []
    for name in CALLS:
        for size in sizes:
            try:
                rows.append(row(name, size, device))
            except RuntimeError as error:
                rows.append({"call": name, "bytes": size, "error": str(error).split("\n", 1)[0]})
                break
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__}
        if cuda:
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        report = {
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "versions": versions,
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def row(name: str, size: int, device: torch.device) -> dict[str, object]:
    """Return the slowest rank's time of one call of `size` bytes."""
    once = call(name, size, device)
    for _ in range(5):
        once()
    seconds = timed(once, device)
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ns = float(slowest.item()) * 1e9
    busbw = wire_bytes(name, size, dist.get_world_size()) / ns
    if dist.get_rank() == 0:
        print(f"  {name:16}{size:>12} bytes{ns / 1e3:>12.1f} us{busbw:>10.2f} GB/s", flush=True)
    return {"call": name, "bytes": size, "ns": ns, "busbw_gb_per_s": busbw}


def call(name: str, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that makes the call once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if name == "all_gather":
        gathered = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=device)
        return lambda: dist.all_gather_into_tensor(gathered, tensor)
    if name == "reduce_scatter":
        shard = torch.empty(tensor.numel() // ranks, dtype=tensor.dtype, device=device)
        return lambda: dist.reduce_scatter_tensor(shard, tensor[: shard.numel() * ranks])
    if name == "all_to_all":
        even = tensor[: tensor.numel() // ranks * ranks]
        received = torch.empty_like(even)
        return lambda: dist.all_to_all_single(received, even)
    return lambda: message(tensor, rank)


def message(tensor: Tensor, rank: int) -> None:
    """Send from rank 0 to rank 1."""
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)


def timed(once: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, the mean of `REPEATS` back to back."""
    dist.barrier()
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(REPEATS):
            once()
        return (time.perf_counter() - begun) / REPEATS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host runs ahead
    begin.record()
    for _ in range(REPEATS):
        once()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPEATS


if __name__ == "__main__":
    sys.exit(main())
