"""Chakra files: nodes per CPU second, and a rank's step written for 1024 ranks.

    python -m benchmarks.speed.chakra_io [FOLDER]

Reads and writes the real H200 capture in traces/ and 20 copies of it one after another, each copy
in memory of its own; once as captured and once without operands (what a GPU-only graph of
another tool holds): CPU time of the process, user and system, the best of the runs that two
seconds hold, five at least.

Then expands a step of 20k nodes to tp 8 x dp 128, and writes the same bytes from memory: once each
without counting, so that the system has its memory for files, then in pairs, each going first by
turns. Printed: wall time and CPU time of each, the latter in the process and in the system, and
the median of the pairs' ratios. Both spend nearly all in the system, which finds memory for two
gigabytes of files: on a disk one turn, of either, takes several times as long as the next; in
memory (FOLDER /dev/shm) turns are equal. FOLDER (default: the system's for temporary files) should
not be a network drive.
"""

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import parser_of, print_conditions, version_of
from benchmarks.speed.repeated_graph import copies
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.lower_for_astra_sim import SUPPORTED, lower_for_astra_sim
from onerank.converters.targets.astra_sim.write_traces import Workload, write_ranks
from onerank.converters.targets.communication_placement import (
    number_groups,
    place_communications,
    world_of,
)
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    ProcessGroup,
    Reason,
    World,
)
from onerank.ir.chakra import read, write

CAPTURE = Path(__file__).parents[2] / "traces/h200-llama-8b-4l-tp4"
RUNS = 5
SECONDS = 2
PAIRS = 10
MB = 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", nargs="?", help="where to write; default: the system's")
    folder = parser.parse_args().folder
    print_conditions(version_of("protobuf"))
    captured = convert_directory(CAPTURE)[0]
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        print(f"{'':28} {'nodes':>7} {'bytes/node':>10} {'read/CPU s':>11} {'write/CPU s':>11}")
        for name, graph in {
            "capture": captured,
            "capture x 20": copies(captured, 20),
            "without operands x 20": copies(without_operands(captured), 20),
        }.items():
            report(name, graph, Path(directory, "graph.et"))
        expansion(Path(directory))


def report(name: str, graph: Graph, path: Path) -> None:
    def rewrite() -> None:
        path.unlink(missing_ok=True)
        write(graph, path)

    count = len(graph)
    writing = best(rewrite)
    reading = best(lambda: read(path))
    per_node = path.stat().st_size / count
    rates = f"{count / reading:11,.0f} {count / writing:11,.0f}"
    print(f"{name:28} {count:7,} {per_node:10.0f} {rates}")


def best(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest run: at least RUNS, for at least SECONDS."""
    times: list[float] = []
    while len(times) < RUNS or sum(times) < SECONDS:
        began = cpu()
        work()
        times.append(cpu() - began)
    return min(times)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def without_operands(graph: Graph) -> Graph:
    columns = [f"{side}_{part}" for side in ("input", "output") for part in PARTS]
    return graph.with_columns(**{name: np.zeros(len(graph), np.int32) for name in columns})


PARTS = ("values", "shapes", "types")


def expansion(folder: Path) -> None:
    """Time the expansion of a step to 1024 ranks against writing the same bytes from memory."""
    graph = benchmark_step()
    ranks = graph.job.world.size
    began = time.perf_counter()
    world = world_of(graph.job, None)
    placements, _ = place_communications(graph, world, SUPPORTED)
    all_ranks = range(ranks)
    groups = number_groups(
        world, [(placement, all_ranks) for placement in set(placements.values())]
    )
    numbers = {members: number for number, members in groups.items()}
    step = lower_for_astra_sim(graph, placements)
    workload = Workload(graph, step, placements, world, all_ranks, numbers)
    prepared = time.perf_counter() - began
    count = len(workload.step)
    print(f"\nstep of {count:,} nodes, {len(placements):,} of them collectives, for {ranks} ranks")
    print(f"lowered, placed, groups numbered in {prepared:.2f} s; after that, by turns:")
    write_ranks(workload, folder / "step", roofline=False)
    sizes = [(folder / f"step.{rank}.et").stat().st_size for rank in all_ranks]
    octets = (folder / f"step.{sizes.index(max(sizes))}.et").read_bytes()
    clear(folder)

    def expand() -> None:
        write_ranks(workload, folder / "step", roofline=False)

    def plain() -> None:
        for rank, size in enumerate(sizes):
            with (folder / f"step.{rank}.et").open("wb", buffering=0) as file:
                file.write(memoryview(octets)[:size])

    plain()
    clear(folder)
    print(f"{sum(sizes) / MB:,.0f} MB; wall, CPU in the process + in the system, seconds:")
    ratios: list[tuple[float, float]] = []
    for turn in range(PAIRS):
        took: dict[Callable[[], None], Durations] = {}
        order = (expand, plain) if turn % 2 else (plain, expand)
        for work in order:
            took[work] = timed(work)
            clear(folder)
        expanded, written = took[expand], took[plain]
        ratios.append((expanded.wall / written.wall, expanded.cpu / written.cpu))
        first = "expansion first" if order[0] is expand else "writing first"
        print(
            f"  expanded {expanded}, the bytes written {written}: x{ratios[-1][0]:.2f} "
            f"(x{ratios[-1][1]:.2f} CPU), {first}"
        )
    for name, pair in (
        ("wall", [ratio for ratio, _ in ratios]),
        ("CPU", [ratio for _, ratio in ratios]),
    ):
        print(
            f"  {name}: median x{statistics.median(pair):.2f} ({min(pair):.2f} to {max(pair):.2f})"
        )


class Durations(NamedTuple):
    """Seconds: wall, CPU in the process, CPU in the system."""

    wall: float
    user: float
    system: float

    @property
    def cpu(self) -> float:
        return self.user + self.system

    def __str__(self) -> str:
        return f"{self.wall:.2f}, {self.user:.2f} + {self.system:.2f}"


def timed(work: Callable[[], object]) -> Durations:
    began, wall = os.times(), time.perf_counter()
    work()
    ended, wall = os.times(), time.perf_counter() - wall
    return Durations(wall, ended.user - began.user, ended.system - began.system)


def clear(folder: Path) -> None:
    for path in folder.glob("step.*.et"):
        path.unlink()


def benchmark_step() -> Graph:
    """Return 20k nodes of tp 8 x dp 128: 9 kernels, then a collective, and again."""
    builder = GraphBuilder()
    newest = builder.add(name="first", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    for number in range(19_999):
        if number % 10 == 9:
            group = "dp" if number % 100 == 99 else "tp"
            columns = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_REDUCE}
            columns |= {"group": group, "comm_bytes": 4096 + number, "stream": 20}
        else:
            columns = {"kind": Kind.KERNEL, "stream": 7, "duration_ns": 1000 + 37 * number % 90_000}
        node = builder.add(name=f"kernel_{number % 60}_of_a_name_as_long_as_most", **columns)
        builder.edge(newest, node, Reason.STREAM_ORDER)
        newest = node
    world = World.of(tp=8, dp=128)
    groups = tuple(ProcessGroup(axis, world.line(axis, 0), axis) for axis in ("tp", "dp"))
    return builder.build(Job(world=world, groups=groups))


if __name__ == "__main__":
    main()
