"""A slice on one GPU against the real job on several, in one run on one host.

    python benchmarks/slice_vs_real.py [--slice "--busbw-gbps 300"] -- SCRIPT --tp 4 [-- ARGS]

What follows -- is for `capture run`. First the real job runs under torchrun, one GPU a rank, each
measured in windows like those of `capture run`; then `capture run` makes the slice of --rank (0)
on GPU 0 alone. Last, one such slice on each GPU at once: as warm as the real job, and each held
against the real rank of its own GPU, so that what GPUs of one host differ by is left out. Printed:
kernels by name and count, collectives in issue order, summed compute, classes, memory, step, and
what NVML told. Step times are CUDA events without a profiler.
"""

import argparse
import datetime
import os
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import onerank
from onerank.annotate import characterise
from onerank.ir import Graph, Kind, Reason, Sensors
from onerank.summary import shares_by_class

WINDOWS = ["--warm-up", "10", "--pure-steps", "20"]


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("slice_vs_real"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--slice", default="", help="options of the slice alone")
    parser.add_argument("run", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        sys.exit(f"needs {given.ranks} CUDA GPUs, found {torch.cuda.device_count()}")
    given.output.mkdir(parents=True, exist_ok=True)
    script, *rest = given.run[given.run[:1] == ["--"] :]
    command = ["onerank", "capture", "run", script, *WINDOWS]
    real = run_real(given, command, rest)
    sliced = run_slice(given, command, rest)
    at_once = run_slices(given, command, rest)
    conditions(given, [script, *rest], sliced)
    compare(sliced, at_once, real, given.rank)
    print()
    sensors("slice", sliced)
    for gpu, graph in enumerate(at_once):
        sensors(f"slice at once, GPU {gpu}", graph)
    for rank, graph in enumerate(real):
        sensors(f"real, rank {rank}", graph)


def run_real(given: argparse.Namespace, command: list[str], rest: list[str]) -> list[Graph]:
    """Return the graphs of all ranks of the real job."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(given.ranks), "-m"]
    output = ["--real", "-o", str(given.output / "real.et")]
    quietly([*launch, *command, *output, *rest])
    return [onerank.read(given.output / f"real.{rank}.et") for rank in range(given.ranks)]


def run_slice(given: argparse.Namespace, command: list[str], rest: list[str]) -> Graph:
    """Return the graph of the slice on GPU 0."""
    trace = given.output / f"slice.{given.rank}.et"
    quietly(slice_command(given, command, rest, trace))
    return onerank.read(trace)


def run_slices(given: argparse.Namespace, command: list[str], rest: list[str]) -> list[Graph]:
    """Return the graphs of the same slice made on every GPU, all at once."""
    traces = [given.output / f"at_once.{gpu}.et" for gpu in range(given.ranks)]
    with ThreadPoolExecutor(given.ranks) as pool:
        for gpu, trace in enumerate(traces):
            pool.submit(quietly, slice_command(given, command, rest, trace), gpu)
    return [onerank.read(trace) for trace in traces]


def slice_command(
    given: argparse.Namespace, command: list[str], rest: list[str], trace: Path
) -> list[str]:
    """Return the command that makes the slice of --rank."""
    output = ["--rank", str(given.rank), *shlex.split(given.slice), "-o", str(trace)]
    return [sys.executable, "-m", *command, *output, *rest]


def quietly(command: list[str], gpu: int | None = None) -> None:
    """Run a command, on one GPU alone if told which; show what it said if it fails."""
    seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **seen}
    )
    if done.returncode:
        print(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", flush=True)
        os._exit(1)  # the other processes of a pool would be waited for


def conditions(given: argparse.Namespace, run: list[str], sliced: Graph) -> None:
    """Print what the figures hold for."""
    versions = ", ".join(f"{k} {v}" for k, v in sliced.job.measurement.versions.items())
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    machine = f"{given.ranks} x {sliced.job.device.name}"
    print(f"{datetime.date.today()}, {machine}, {versions}, NCCL {nccl}")
    print(f"{shlex.join(run)}; slice of rank {given.rank} {given.slice}\n")


def sensors(label: str, graph: Graph) -> None:
    """Print what NVML told while the pure steps ran."""
    read = graph.job.device.sensors or Sensors(samples=0)
    clock, power, heat = read.sm_clock_mhz, read.power_mw, read.temperature_c
    if clock is None or power is None or heat is None:
        print(f"{label:24} NVML does not tell")
        return
    print(
        f"{label:24} SM {clock.median} MHz ({clock.low} - {clock.high}), "
        f"{power.median / 1000:.0f} W, {heat.median} C"
    )


def compare(sliced: Graph, at_once: list[Graph], real: list[Graph], rank: int) -> None:
    """Print the table."""
    stage = sliced.job.world.point(rank).get("pp")
    same = [r for r in range(len(real)) if sliced.job.world.point(r).get("pp") == stage]
    alike = [real[r] for r in same]
    mine, theirs = kernels(sliced), kernels(real[rank])
    print(f"{'':34}{'slice':>16}{f'real, rank {rank}':>16}{'real, ranks alike':>24}"
          f"{'slice - median':>16}{'at once - same GPU':>20}")  # fmt: skip

    def row(label: str, figure: Callable[[Graph], float], form: str = ".3f") -> None:
        """Print one figure of the slice beside those of the real ranks that do the same."""
        own, peers = figure(sliced), [figure(graph) for graph in alike]
        median = statistics.median(peers)
        spread = f"{min(peers):{form}} - {max(peers):{form}}"
        gap = f"{own / median - 1:+.2%}" if median else "-"
        paired = [figure(at_once[r]) / figure(real[r]) - 1 for r in same if figure(real[r])]
        pair = f"{statistics.median(paired):+.2%}" if paired else "-"
        print(f"{label:34}{own:>16{form}}{figure(real[rank]):>16{form}}{spread:>24}{gap:>16}"
              f"{pair:>20}")  # fmt: skip

    row("GPU operations besides comm.", lambda graph: sum(kernels(graph).values()), "d")
    for name in sorted({*mine, *theirs}):
        if mine[name] != theirs[name]:
            print(f"  {mine[name]:4} against {theirs[name]:4} of {name[:90]}")
    calls, real_calls = collectives(sliced), collectives(real[rank])
    print(f"{'collectives, in issue order':34}{len(calls):>16}{len(real_calls):>16}"
          f"{'the same' if calls == real_calls else 'DIFFERENT':>24}")  # fmt: skip
    if calls != real_calls:
        for call in sorted({*calls, *real_calls}):
            if calls.count(call) != real_calls.count(call):
                print(f"  {calls.count(call):4} against {real_calls.count(call):4} of {call}")
    beside = overlapping(real[rank])
    row("summed compute, ms", compute_ms)
    row("  beside no communication, ms", lambda graph: compute_ms(graph) - time_ms(graph, beside))
    for name in [share.name for share in shares_by_class(characterise(sliced))]:
        row(f"  {name}, ms", lambda graph, name=name: class_ms(graph, name))
    row("peak memory, GB", peak_gb, ".6f")
    row("step, CUDA events, ms", step_ms)
    row("communication, ms", comm_ms)


def kernels(graph: Graph) -> Counter[str]:
    """Count GPU operations that are not communication, by name."""
    return Counter(
        name for name, gpu in zip(graph.text("name"), graph.gpu_compute, strict=True) if gpu
    )


def collectives(graph: Graph) -> list[str]:
    """Return the communication calls in the order they were asked for."""
    calls = np.flatnonzero(graph.communication)
    asked = graph.nodes.start_ns.copy()
    launch = graph.edges.reason == Reason.LAUNCH
    asked[graph.edges.target[launch]] = graph.nodes.start_ns[graph.edges.source[launch]]
    found = []
    for index in calls[np.argsort(asked[calls], kind="stable")]:
        node = graph.node(int(index))
        kind = node.collective.name if node.kind is Kind.COLLECTIVE else node.kind.name
        group = graph.job.group(node.text("group"))
        ranks = sorted(group.ranks) if group else "?"
        found.append(f"{kind.lower()} of {node.value('comm_bytes')} bytes among {ranks}")
    return found


def overlapping(graph: Graph) -> set[tuple[str, int]]:
    """Return the GPU operations that run while communication does, as (name, which of them)."""
    start, end = graph.nodes.start_ns, graph.nodes.start_ns + graph.nodes.duration_ns
    calls = np.flatnonzero(graph.communication & (graph.nodes.duration_ns > 0))
    return {
        key
        for key, index in occurrences(graph)
        if ((start[calls] < end[index]) & (end[calls] > start[index])).any()
    }


def occurrences(graph: Graph) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield (name, which of that name) and index of every GPU operation besides communication."""
    seen = Counter[str]()
    names = graph.text("name")
    for index in np.flatnonzero(graph.gpu_compute).tolist():
        yield (names[index], seen[names[index]]), index
        seen[names[index]] += 1


def time_ms(graph: Graph, chosen: set[tuple[str, int]]) -> float:
    """Return the summed time of the operations chosen by `overlapping`."""
    indices = [index for key, index in occurrences(graph) if key in chosen]
    return float(graph.nodes.duration_ns[indices].sum() / 1e6)


def compute_ms(graph: Graph) -> float:
    """Return the summed time of GPU operations that are not communication."""
    return float(graph.nodes.duration_ns[graph.gpu_compute].sum() / 1e6)


def class_ms(graph: Graph, name: str) -> float:
    """Return the summed time of one class of work."""
    shares = {share.name: share.time_ns for share in shares_by_class(characterise(graph))}
    return shares.get(name, 0) / 1e6


def peak_gb(graph: Graph) -> float:
    """Return the allocator's peak."""
    return graph.job.measurement.peak_memory_bytes / 1e9


def step_ms(graph: Graph) -> float:
    """Return the median step without a profiler."""
    return (graph.job.measurement.median_step_ns or 0) / 1e6


def comm_ms(graph: Graph) -> float:
    """Return the summed time of communication kernels."""
    return float(graph.nodes.duration_ns[graph.communication].sum() / 1e6)


if __name__ == "__main__":
    main()
