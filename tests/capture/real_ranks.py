"""Ranks that really communicate, each a process, over Gloo on this machine."""

import gc
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from own_process import forkserver_context
from torch import multiprocessing


def run_ranks(act: Callable[[int, Any], None], size: int) -> dict[Any, Any]:
    """Let `act(rank, results)` of a test module run as each rank; return the results of all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with forkserver_context().Manager() as manager:
        results = manager.dict()
        multiprocessing.start_processes(
            _one_rank, args=(act, size, port, results), nprocs=size, start_method="forkserver"
        )
        return dict(results)


def _one_rank(
    rank: int, act: Callable[[int, Any], None], size: int, port: int, results: Any
) -> None:
    gc.freeze()  # what was imported: a collection would copy the pages that it lies in
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    act(rank, results)
    dist.barrier()  # none leaves while another is at work
    dist.destroy_process_group()
