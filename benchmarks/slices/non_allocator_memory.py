"""Memory of each rank on its GPU outside the caching allocator.

    torchrun --nproc-per-node 2 -m benchmarks.slices.non_allocator_memory

NVML's figure of the used memory, less what the allocator has reserved, after each kind of work:
CUDA context, kernels and libraries, NCCL communicators, sends and receives.
Nothing else may run on these GPUs.
"""

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions

MIB = 1 << 20


class OutsideMemory:
    """Memory of this rank's GPU outside the caching allocator, since before the CUDA context."""

    def __init__(self, rank: int) -> None:
        self._nvml: Any = importlib.import_module("pynvml")  # it has no types
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(rank)
        self._rank = rank
        self._before = self._last = self._used()

    def tell(self, label: str) -> None:
        """Print the memory outside the allocator, and its increase since the last call."""
        torch.cuda.synchronize()
        now = self._used() - torch.cuda.memory_reserved()
        if self._rank == 0:
            total, more = ((now - was) / MIB for was in (self._before, self._last))
            print(f"{label:40}{total:10.0f} MiB {more:+10.0f}", flush=True)
        self._last = now

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)


def main() -> None:
    """Run each kind of work in turn, and print the memory after it."""
    parser_of(__doc__).parse_args()
    if "WORLD_SIZE" not in os.environ:
        sys.exit("start it with torchrun, on a host with two CUDA GPUs or more")
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    outside = OutsideMemory(rank)
    torch.cuda.set_device(rank)
    torch.cuda.mem_get_info()
    if rank == 0:
        print_conditions(*gpus_and_torch(ranks))
        print("memory of rank 0")
    outside.tell("context")
    compute(outside)
    communicate(outside, rank, ranks)


def compute(outside: OutsideMemory) -> None:
    """Run kernels of several libraries."""
    square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    outside.tell("random numbers")
    square @ square
    outside.tell("product")
    heads = torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    outside.tell("attention and its backward")
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    outside.tell("step in float32")
    nn.Conv2d(64, 64, 3).cuda()(torch.randn(8, 64, 56, 56, device="cuda")).sum().backward()
    outside.tell("convolution and its backward")


def communicate(outside: OutsideMemory, rank: int, ranks: int) -> None:
    """Run each collective in one group, then in further groups."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.barrier()
    outside.tell("first group, barrier")
    tensor = torch.randn(64 * MIB, device="cuda")
    shard, received = tensor.new_empty(len(tensor) // ranks), torch.empty_like(tensor)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(tensor, shard)
    dist.reduce_scatter_tensor(shard, tensor)
    outside.tell("all-reduce, all-gather, reduce-scatter")
    dist.broadcast(tensor, 0)
    outside.tell("broadcast")
    dist.all_to_all_single(received, tensor)
    outside.tell("all-to-all")
    exchange(tensor, received, rank ^ 1, None)
    outside.tell("send and receive")
    for number in ("second", "third"):
        group = dist.new_group(list(range(ranks)))
        dist.all_reduce(tensor, group=group)
        outside.tell(f"{number} group, all-reduce")
        exchange(tensor, received, rank ^ 1, group)
        outside.tell("send and receive there")
    dist.destroy_process_group()


def exchange(sent: Tensor, received: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    """Send to a peer and receive from it, in one batch."""
    calls = [
        dist.P2POp(dist.isend, sent, peer, group=group),
        dist.P2POp(dist.irecv, received, peer, group=group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


if __name__ == "__main__":
    main()
