"""Two ranks exchange activations by batch_isend_irecv, as pipeline schedules do; one step recorded.

torchrun --nproc-per-node 2 record.py DIRECTORY
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

RANK = int(os.environ["RANK"])
PEER = 1 - RANK
DEVICE = torch.device("cuda", RANK)
MICRO_BATCHES = 4


def make() -> torch.nn.Sequential:
    """Return four layers of 4096 by 4096."""
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(4096, 4096, device=DEVICE, dtype=torch.bfloat16)]
        layers += [torch.nn.GELU()]
    return torch.nn.Sequential(*layers)


def exchange(
    sent: list[torch.Tensor], received: list[torch.Tensor], *, receive_first: bool = False
) -> list[dist.Work]:
    """Send to the peer and receive from it in one batch."""
    calls = [dist.P2POp(dist.isend, one, PEER) for one in sent]
    calls += [dist.P2POp(dist.irecv, one, PEER) for one in received]
    return dist.batch_isend_irecv(calls[::-1] if receive_first else calls)


def step(layers: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Exchange in batches during a backward, by single messages, and two tensors in a batch."""
    optimizer.zero_grad()
    got = fresh = x
    for _ in range(MICRO_BATCHES):
        fresh = torch.empty_like(x)
        y = layers(got if RANK else x)
        works = exchange([y.detach()], [fresh], receive_first=RANK == 1)
        y.float().square().mean().backward()
        for work in works:
            work.wait()
        got = fresh
    if RANK == 0:
        dist.send(x, PEER)
        dist.recv(fresh, PEER)
    else:
        dist.recv(fresh, PEER)
        dist.send(x, PEER)
    large, small = torch.empty_like(x), torch.empty(4096, device=DEVICE)
    for work in exchange([x, torch.randn(4096, device=DEVICE)], [large, small]):
        work.wait()
    loss = large.float().mean() + small.mean()
    optimizer.step()
    dist.all_reduce(loss)


def main(directory: str) -> None:
    """Run steps and record the last."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    layers = make()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, fused=True)
    x = torch.randn(2048, 4096, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(10):
        step(layers, optimizer, x)
    observer = ExecutionTraceObserver().register_callback(f"{directory}/et.rank{RANK}.json")
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=2, active=1),
        on_trace_ready=lambda p: p.export_chrome_trace(f"{directory}/kineto.rank{RANK}.json"),
        execution_trace_observer=observer,
    ) as profiler:
        for _ in range(4):
            step(layers, optimizer, x)
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
