"""A slice on one GPU against the real job on several, in one run on one host.

    python benchmarks/slice_vs_real.py --ranks 4 [-o DIR] SCRIPT [-- ARGS...]

First the real job runs under torchrun on all GPUs, each rank measured in windows like those of
`capture run`; then `capture run` makes the slice of rank 0 on GPU 0 alone. Printed: kernels by
name and count, collectives in issue order, summed compute, classes, memory, step. Step times are
CUDA events without a profiler. Needs as many CUDA GPUs as ranks.
"""

import argparse
import datetime
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import onerank
from onerank.annotate import characterise
from onerank.ir import Graph, Kind
from onerank.summary import shares_by_class

HERE = Path(__file__).parent


def main() -> None:
    """Run both and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--flavour", choices=["megatron", "hf"], default="megatron")
    parser.add_argument("-o", "--output", type=Path, default=Path("slice_vs_real"))
    parser.add_argument("script")
    parser.add_argument("args", nargs="*")
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        sys.exit(f"needs {given.ranks} CUDA GPUs, found {torch.cuda.device_count()}")
    given.output.mkdir(parents=True, exist_ok=True)
    real = run_real(given)
    sliced = run_slice(given)
    conditions(given, sliced)
    compare(sliced, real)


def run_real(given: argparse.Namespace) -> list[Graph]:
    """Return the graphs of all ranks of the real job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(given.ranks), str(HERE / "real_rank.py")]
    command += [str(given.output), given.flavour, given.script, *given.args]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [onerank.read(given.output / f"real.{rank}.et") for rank in range(given.ranks)]


def run_slice(given: argparse.Namespace) -> Graph:
    """Return the graph of the slice on GPU 0."""
    trace = given.output / "slice.0.et"
    code = "from onerank.cli import capture; capture()"
    command = [sys.executable, "-c", code, "run", given.script, "--tp", str(given.ranks)]
    command += ["--tp-flavour", given.flavour, "--warm-up", "10", "--pure-steps", "20"]
    command += ["-o", str(trace), "--", *given.args]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return onerank.read(trace)


def conditions(given: argparse.Namespace, sliced: Graph) -> None:
    """Print what the figures hold for."""
    versions = ", ".join(f"{k} {v}" for k, v in sliced.job.measurement.versions.items())
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    machine = f"{given.ranks} x {sliced.job.device.name}"
    print(f"{datetime.date.today()}, {machine}, {versions}, NCCL {nccl}")
    print(f"{Path(given.script).name} {' '.join(given.args)}; flavour {given.flavour}\n")


def compare(sliced: Graph, real: list[Graph]) -> None:
    """Print the table."""
    mine, theirs = kernels(sliced), [kernels(graph) for graph in real]
    print(f"{'':34}{'slice':>16}{'real, rank 0':>16}{'real, all ranks':>24}{'slice - median':>16}")
    row("GPU operations besides comm.", sum(mine.values()), [sum(k.values()) for k in theirs], "d")
    for rank in range(1):
        for name in sorted({*mine, *theirs[rank]}):
            if mine[name] != theirs[rank][name]:
                print(f"  {mine[name]:4} against {theirs[rank][name]:4} of {name[:90]}")
    calls, real_calls = collectives(sliced), collectives(real[0])
    print(f"{'collectives, in issue order':34}{len(calls):>16}{len(real_calls):>16}"
          f"{'the same' if calls == real_calls else 'DIFFERENT':>24}")  # fmt: skip
    if calls != real_calls:
        for call in sorted({*calls, *real_calls}):
            if calls.count(call) != real_calls.count(call):
                print(f"  {calls.count(call):4} against {real_calls.count(call):4} of {call}")
    row("summed compute, ms", compute_ms(sliced), [compute_ms(graph) for graph in real])
    names = [share.name for share in shares_by_class(characterise(sliced))]
    for name in names:
        row(f"  {name}, ms", class_ms(sliced, name), [class_ms(graph, name) for graph in real])
    row("peak memory, GB", peak_gb(sliced), [peak_gb(graph) for graph in real], ".6f")
    row("step, CUDA events, ms", step_ms(sliced), [step_ms(graph) for graph in real])
    row("communication, ms", comm_ms(sliced), [comm_ms(graph) for graph in real])


def row(label: str, mine: float, theirs: list[float], form: str = ".3f") -> None:
    """Print one figure of the slice beside those of the real ranks."""
    median = statistics.median(theirs)
    spread = f"{min(theirs):{form}} - {max(theirs):{form}}"
    gap = f"{(mine - median) / median:+.2%}" if median else "-"
    print(f"{label:34}{mine:>16{form}}{theirs[0]:>16{form}}{spread:>24}{gap:>16}")


def kernels(graph: Graph) -> Counter[str]:
    """Count GPU operations that are not communication, by name."""
    return Counter(
        name for name, gpu in zip(graph.text("name"), graph.gpu_compute, strict=True) if gpu
    )


def collectives(graph: Graph) -> list[str]:
    """Return the communication calls in the order they were asked for."""
    found = []
    for index in np.flatnonzero(graph.communication):
        node = graph.node(int(index))
        kind = node.collective.name if node.kind is Kind.COLLECTIVE else node.kind.name
        found.append(f"{kind.lower()} of {node.value('comm_bytes')} bytes")
    return found


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
