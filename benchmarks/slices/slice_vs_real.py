"""Compare a slice on one GPU with the real job on several, in one run on one host.

    python -m benchmarks.slices.slice_vs_real [--slice "--busbw-gb-s 300"] -- SCRIPT
        --tp 4 [-- ARGS]

What follows -- is for `capture run`. First the real job runs under torchrun, one GPU a rank, each
measured in windows like those of `capture run`; then `capture run` makes the slice of --rank (0)
on GPU 0 alone. Last, one such slice on each GPU at once: as warm as the real job, and each
compared with the real rank of the same GPU, so differences between GPUs cancel. With
--each only these are made, of each GPU's own rank, as pipelines want it: a table for each rank.
Printed: kernels by name and count, collectives in issue order, summed compute, classes, memory,
step, and NVML samples. Step times are CUDA events without a profiler.

Megatron-LM and DeepSpeed, for two GPUs (--ranks 2 before the --):

    benchmarks/jobs/megatron_core.py --tp 2 -- --tp 2 --sp
    benchmarks/jobs/megatron_core.py --dp 2 -- --dist-opt --overlap
    benchmarks/jobs/megatron_core.py --pp 2 -- --pp 2 --micro-batches 4     (with --each)
    benchmarks/jobs/deepspeed_zero.py --torchrun --dp 2 -- --zero 3

They need `pip install megatron-core deepspeed`; their first lines list other requirements.
"""

import argparse
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import onerank
from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from benchmarks.slices.slice_comparison import compare, sensors
from onerank.ir import Graph

WINDOWS = ["--warm-up", "10", "--timed-steps", "20", "--repeat", "3"]


def main() -> None:
    """Run both and print the comparison."""
    parser = parser_of(__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("slice_vs_real"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="slices of all ranks, at once alone")
    parser.add_argument("--slice", default="", help="options of the slice alone")
    parser.add_argument("run", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        sys.exit(f"needs {arguments.ranks} CUDA GPUs, found {torch.cuda.device_count()}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    script, *script_options = arguments.run[arguments.run[:1] == ["--"] :]
    command = ["onerank", "capture", "run", script, *WINDOWS]
    real = run_real(arguments, command, script_options)
    sliced = None if arguments.each else run_slice(arguments, command, script_options)
    at_once = run_slices(arguments, command, script_options)
    conditions(arguments, [script, *script_options], at_once[0])
    if sliced is not None:
        compare(sliced, at_once, real, arguments.rank)
    for rank in range(arguments.ranks) if arguments.each else ():
        print(f"rank {rank}")
        compare(at_once[rank], at_once, real, rank)
    print()
    if sliced is not None:
        sensors("slice", sliced)
    for gpu, graph in enumerate(at_once):
        sensors(f"slice at once, GPU {gpu}", graph)
    for rank, graph in enumerate(real):
        sensors(f"real, rank {rank}", graph)


def run_real(
    arguments: argparse.Namespace, command: list[str], script_options: list[str]
) -> list[Graph]:
    """Return the graphs of all ranks of the real job."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(arguments.ranks), "-m"]
    output = ["--record-real-job", "-o", str(arguments.output / "real.et")]
    quietly([*launch, *command, *output, *script_options])
    return [onerank.read(arguments.output / f"real.{rank}.et") for rank in range(arguments.ranks)]


def run_slice(
    arguments: argparse.Namespace, command: list[str], script_options: list[str]
) -> Graph:
    """Return the graph of the slice on GPU 0."""
    trace = arguments.output / f"slice.{arguments.rank}.et"
    quietly(slice_command(arguments, command, script_options, arguments.rank, trace))
    return onerank.read(trace)


def run_slices(
    arguments: argparse.Namespace, command: list[str], script_options: list[str]
) -> list[Graph]:
    """Return the graphs of slices made on every GPU at once: the same, or each of its own rank."""
    traces = [arguments.output / f"at_once.{gpu}.et" for gpu in range(arguments.ranks)]
    with ThreadPoolExecutor(arguments.ranks) as pool:
        for gpu, trace in enumerate(traces):
            rank = gpu if arguments.each else arguments.rank
            pool.submit(
                quietly, slice_command(arguments, command, script_options, rank, trace), gpu
            )
    return [onerank.read(trace) for trace in traces]


def slice_command(
    arguments: argparse.Namespace,
    command: list[str],
    script_options: list[str],
    rank: int,
    trace: Path,
) -> list[str]:
    """Return the command that makes the slice of a rank."""
    output = ["--rank", str(rank), *shlex.split(arguments.slice), "-o", str(trace)]
    return [sys.executable, "-m", *command, *output, *script_options]


def quietly(command: list[str], gpu: int | None = None) -> None:
    """Run a command, if requested with only one GPU visible; print its output if it fails."""
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **visible}
    )
    if done.returncode:
        print(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}", flush=True)
        os._exit(1)  # a normal exit would wait for the other processes of the pool


def conditions(arguments: argparse.Namespace, run: list[str], sliced: Graph) -> None:
    """Print the date, the machine, the versions and the command."""
    print_conditions(*gpus_and_torch(arguments.ranks))
    versions = ", ".join(f"{k} {v}" for k, v in sliced.job.measurement.versions.items())
    print(f"slice captured on {sliced.job.device.name} with {versions}")
    slices = "slices of all ranks" if arguments.each else f"slice of rank {arguments.rank}"
    print(f"{shlex.join(run)}; {slices} {arguments.slice}\n")


if __name__ == "__main__":
    main()
