"""Compare ASTRA-sim's time of every kept trace with the step that `onerank replay` predicts.

    ASTRA_SIM_BIN=.../AstraSim_Analytical_Congestion_Unaware \
        python -m benchmarks.slices.simulated_traces

Each trace in traces/ is exported for all ranks of its job, at 450 GB/s of bus bandwidth and no
latency, and runs in ASTRA-sim in both encodings. A capture on a CPU is first re-costed for an H100.
A trace that does not represent all ranks is listed with the error of its export. Columns, in ms:

- busy: GPU compute and exposed communication of `onerank replay --busbw-gb-s 450`.
- GPU: ASTRA-sim without host delays, exact encoding; and its difference from `busy`.
- micros: the same in whole microseconds, and its difference from the exact encoding.
- step: the steady-state step of the same replay.
- host: ASTRA-sim with --include-host-delays, and its difference from `step`.
"""

import gzip
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onerank
from benchmarks.harness import parser_of, print_conditions
from onerank.analysis.step_time import replay
from onerank.converters.expand.host_delays import insert_host_delays_by_rank
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.sources.kineto.rank_directory import convert_ranks, ranks_in
from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.exporter import export_astra_sim, export_astra_sim_ranks
from onerank.ir import Graph
from onerank.ir.errors import OneRankError

TRACES = Path(__file__).parents[2] / "traces"
BANDWIDTH_GB_PER_S = 450.0


def main() -> None:
    parser_of(__doc__).parse_args()
    binary = Path(os.environ.get("ASTRA_SIM_BIN", "")).resolve()
    if not binary.is_file():
        sys.exit("ASTRA_SIM_BIN is not set: name AstraSim_Analytical_Congestion_Unaware")
    print_conditions()
    print(
        f"{'trace':44}{'ranks':>6}{'nodes':>7}{'busy':>9}{'GPU':>9}{'':>8}{'micros':>9}{'':>8}"
        f"{'step':>9}{'host':>9}"
    )
    for name, graphs in kept_traces():
        try:
            print(_row(name, graphs, binary), flush=True)
        except OneRankError as error:
            print(f"{name:44} not exported: {error.code}")


def kept_traces() -> Iterator[tuple[str, list[Graph]]]:
    """Yield name and graphs, one per class of equal ranks, of each trace in traces/."""
    for directory in sorted(path for path in TRACES.iterdir() if path.is_dir()):
        packed = sorted(directory.glob("*.et.gz"))
        for path in packed:
            with tempfile.NamedTemporaryFile(suffix=".et") as plain:
                plain.write(gzip.decompress(path.read_bytes()))
                plain.flush()
                yield f"{directory.name}/{path.name}", [onerank.read(plain.name)]
        if packed:
            continue
        if (directory / "profile.json.gz").is_file():
            graph, _ = convert_directory(directory)
            if graph.job.device.type == "cpu":
                graph = onerank.recost(graph, "H100")
            yield directory.name, [graph]
        else:
            with tempfile.TemporaryDirectory() as scratch:
                convert_ranks(ranks_in(directory), Path(scratch))
                yield (
                    directory.name,
                    [onerank.read(path) for path in sorted(Path(scratch).glob("*.et"))],
                )


def _row(name: str, graphs: Sequence[Graph], binary: Path) -> str:
    predicted = [replay(graph, bandwidth_gb_per_s=BANDWIDTH_GB_PER_S) for graph in graphs]
    busy = max(step.compute_ns + step.exposed_communication_ns for step in predicted)
    ranks, nodes, exact = _simulate(graphs, binary, "roofline", host_time=False)
    micros = _simulate(graphs, binary, "micros", host_time=False)[2]
    row = (
        f"{name:44}{ranks:6}{nodes:7}{busy / 1e6:9.3f}{exact / 1e6:9.3f}{exact / busy - 1:+8.2%}"
        f"{micros / 1e6:9.3f}{micros / exact - 1:+8.3%}"
    )
    steps = [step.steady_state.step_ns for step in predicted if step.steady_state]
    if len(steps) < len(graphs):
        return f"{row}{'-':>9}{'-':>9}"
    host = _simulate(graphs, binary, "roofline", host_time=True)[2]
    return f"{row}{max(steps) / 1e6:9.3f}{host / 1e6:9.3f}{host / max(steps) - 1:+8.2%}"


def _simulate(
    graphs: Sequence[Graph], binary: Path, encoding: str, *, host_time: bool
) -> tuple[int, int, int]:
    """Return ranks, nodes of the largest rank, and the slowest rank's time in ns."""
    network = SimulatedNetwork(BANDWIDTH_GB_PER_S, latency_ns=0, memory_gb_per_s=None)
    with tempfile.TemporaryDirectory() as scratch:
        if len(graphs) == 1:
            exported = export_astra_sim(graphs[0], scratch, host_time=host_time, network=network)
        else:
            if host_time:
                graphs, _ = insert_host_delays_by_rank(graphs, one_at_a_time=True)
            exported = export_astra_sim_ranks(expand_ranks(graphs), scratch, network=network)
        command = [f"{scratch}/run.sh", encoding, str(binary)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    cycles = [int(match) for match in re.findall(r"finished, (\d+) cycles", run.stdout)]
    return exported.ranks, exported.nodes, max(cycles)


if __name__ == "__main__":
    main()
