"""`onerank check` of a workload of many ranks: seconds of each rank's two files.

    python -m benchmarks.speed.check_scale [--kernels] FOLDER RANKS [RANKS ...]

Writes the step of the real H200 capture in traces/ (871 nodes that ASTRA-sim runs, 700 kB a rank;
with --kernels 61 nodes made for it, 12 kB) for tp 4 x dp RANKS/4, one collective in ten moved to
the dp groups, below FOLDER; checks it in a separate process; and removes it again.
"""

import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import parser_of, print_conditions
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
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

# VmHWM and not ru_maxrss: Linux carries ru_maxrss over the exec, so it includes the memory of
# the process that started the check.
CHECK = """
import sys
from onerank.cli import onerank
try:
    onerank(["check", sys.argv[1]])
finally:
    lines = open("/proc/self/status").read().splitlines()
    print(next(line for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""

CAPTURE = Path(__file__).parents[2] / "traces/h200-llama-8b-4l-tp4"
TP = 4


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kernels", action="store_true", help="a generated step of 61 nodes")
    parser.add_argument("folder", type=Path, help="where to write the workload")
    parser.add_argument("ranks", type=int, nargs="+")
    options = parser.parse_args()
    graph = kernels() if options.kernels else convert_directory(CAPTURE)[0]
    folder = options.folder / "onerank-check"
    print_conditions()
    print(f"{'ranks':>8} {'nodes':>6} {'MB':>7} {'CPU s':>8} {'wall s':>8} {'peak MB':>8}")
    for ranks in options.ranks:
        if ranks < TP or ranks % TP:
            sys.exit(f"{ranks} ranks: give a multiple of {TP}")
        exported = export_astra_sim(spread(graph, ranks), folder)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        began, used = time.perf_counter(), cpu()
        check = [sys.executable, "-c", CHECK, str(folder)]
        checked = subprocess.run(check, check=True, capture_output=True, text=True)
        wall, used = time.perf_counter() - began, cpu() - used
        peak = int(checked.stderr.split()[-2]) * 1024 / 1e6  # "VmHWM: 51904 kB"
        print(f"{ranks:8,} {exported.nodes:6,} {size:7,.0f} {used:8.1f} {wall:8.1f} {peak:8,.0f}")
        shutil.rmtree(folder)


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def spread(graph: Graph, ranks: int) -> Graph:
    """Return the step with a world of `ranks`, every tenth collective one of its replicas."""
    world = World.of(tp=TP, dp=ranks // TP)
    groups = tuple(ProcessGroup(axis, world.line(axis, 0), axis) for axis in ("tp", "dp"))
    strings, group = graph.strings.copy(), graph.nodes.group.copy()
    group[np.flatnonzero(graph.mask(Kind.COLLECTIVE))[::10]] = strings.intern("dp")
    job = msgspec.structs.replace(graph.job, world=world, groups=groups)
    return Graph(replace(graph.nodes, group=group), graph.edges, strings, job)


def kernels() -> Graph:
    """Return 49 kernels and 12 collectives in a chain."""
    builder = GraphBuilder()
    newest = builder.add(name="first", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    for number in range(60):
        columns = {"kind": Kind.KERNEL, "stream": 7, "duration_ns": 1000 + number}
        if number % 5 == 4:
            columns = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_REDUCE, "stream": 20}
            columns |= {"group": "tp", "comm_bytes": 4096 + number}
        node = builder.add(name=f"kernel_{number}", **columns)
        builder.edge(newest, node, Reason.STREAM_ORDER)
        newest = node
    return builder.build(Job())


if __name__ == "__main__":
    main()
