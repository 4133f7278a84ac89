"""Host time of a collective: NCCL's calls, the recorder's emulated calls, torch's fake group.

    torchrun --nproc-per-node 2 -m benchmarks.slices.collective_host_overhead
    python -m benchmarks.slices.collective_host_overhead [--rounds 5]

The first form, on a host with two CUDA GPUs, measures NCCL. The second measures the recorder as
rank 0 of 2, and torch's `fake` process group, which returns at once: c10d's overhead without any
work. It runs each in processes of their own, in turn, on a GPU if there is one and else on the CPU.
It prints the time in us until a call returns, and of the wait for its handle: medians of 60 calls,
of these the median over the rounds.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions, version_of

CALLS = 60  # fewer than the launches that a stream takes before the host waits
ELEMENTS = {"cuda": 1 << 18, "cpu": 1 << 8}  # of a shard; a CPU copies them while it issues
BUSBW_GB_PER_S = 300.0
IMPLEMENTATIONS = ("recorder", "fake")
MODULE = "benchmarks.slices.collective_host_overhead"  # what the processes of a round run

Times = dict[str, tuple[float, float]]


class NoMessages:
    """The messages of a script that distributes itself and sends no integers."""

    collects_sends = False

    def next_step(self) -> None:
        """Do nothing: no message belongs to a step."""


def main() -> None:
    """Print a line for each kind of call."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=IMPLEMENTATIONS, help="print its times as JSON")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options.only)))
        return
    under_torchrun = "WORLD_SIZE" in os.environ
    rounds = options.rounds
    if under_torchrun:
        columns = {"NCCL": median_of([run("NCCL") for _ in range(rounds)])}
    else:
        samples: dict[str, list[Times]] = {name: [] for name in IMPLEMENTATIONS}
        # In turn: the speed of a processor drifts.
        for _ in range(rounds):
            for name in IMPLEMENTATIONS:
                command = [sys.executable, "-m", MODULE, "--only", name]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                samples[name].append(json.loads(output.splitlines()[-1]))
        columns = {name: median_of(times) for name, times in samples.items()}
    if os.environ.get("RANK", "0") == "0":
        on_gpu = torch.cuda.is_available()
        print_conditions(*(gpus_and_torch() if on_gpu else [version_of("torch")]))
        print("us of the host per call (and per wait)")
        print(f"{'':28}" + "".join(f"{name:>18}" for name in columns))
        for call in next(iter(columns.values())):
            cells = [cell(times[call]) for times in columns.values()]
            print(f"{call:28}" + "".join(f"{text:>18}" for text in cells), flush=True)


def cell(times: tuple[float, float]) -> str:
    """Return the text of a call and its wait; no wait for a call that has waited itself."""
    issue, wait = times
    return f"{issue:.1f} ({wait:.1f})" if wait else f"{issue:.1f}      "


def median_of(rounds: list[Times]) -> Times:
    """Return the median of each time over the rounds."""
    return {
        name: (
            statistics.median(times[name][0] for times in rounds),
            statistics.median(times[name][1] for times in rounds),
        )
        for name in rounds[0]
    }


@functools.cache
def started(implementation: str) -> torch.device:
    """Create the process group, and return the device of the tensors."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(rank)
    if implementation == "NCCL":
        if not on_gpu:
            sys.exit("NCCL needs two CUDA GPUs")
        dist.init_process_group(backend, device_id=device)
    elif implementation == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        from onerank.capture.collective_kernels import CollectiveEmulation, uniform
        from onerank.capture.fake_world.recorder import Recorder

        messages: Any = NoMessages()
        emulation = CollectiveEmulation(uniform(BUSBW_GB_PER_S)) if on_gpu else None
        recorder = Recorder(0, 2, messages, emulation)
        recorder.start()
        dist.init_process_group(backend, rank=0, world_size=2)
        for _ in range(3):  # the first steps search sums for rows of absent ranks
            recorder.next_step()
    return device


def run(implementation: str) -> Times:
    """Return the us of each call and of its wait."""
    device = started(implementation)
    return {name: measure(once) for name, once in calls(device).items()}


def calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the calls to measure, by name; those that return a handle are waited for."""
    gathered, shard = (torch.randn(n * ELEMENTS[device.type], device=device) for n in (2, 1))
    world: Any = dist.group.WORLD
    peer = 1 - dist.get_rank()
    mesh = init_device_mesh(device.type, (2,))
    partial = DTensor.from_local(shard, mesh, [Partial()])

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, shard, peer), dist.P2POp(dist.irecv, gathered, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def coalesced() -> Any:
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            dist.all_reduce(gathered)
            dist.all_reduce(shard)
        return manager

    return {
        "all-gather, async": lambda: dist.all_gather_into_tensor(gathered, shard, async_op=True),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, shard),
        "reduce-scatter, async": lambda: dist.reduce_scatter_tensor(shard, gathered, async_op=True),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, gathered),
        "all-reduce, async": lambda: dist.all_reduce(gathered, async_op=True),
        "all-reduce": lambda: dist.all_reduce(gathered),
        "two all-reduces, coalesced": coalesced,
        "send and receive, batched": exchange,
        "functional all-reduce": lambda: functional.wait_tensor(
            functional.all_reduce(shard, "sum", world)
        ),
        "DTensor, partial to whole": lambda: partial.redistribute(mesh, [Replicate()]).to_local(),
    }


def measure(once: Callable[[], Any]) -> tuple[float, float]:
    """Return the us of a call and of its wait."""
    issues: list[float] = []
    waits: list[float] = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        work = once()
        issued = time.perf_counter()
        if hasattr(work, "wait") and not isinstance(work, torch.Tensor):
            work.wait()
            waits.append((time.perf_counter() - issued) * 1e6)
        issues.append((issued - begun) * 1e6)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return statistics.median(issues), statistics.median(waits) if waits else 0.0


if __name__ == "__main__":
    main()
