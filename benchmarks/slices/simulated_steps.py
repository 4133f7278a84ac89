"""Compare simulated steps of captured slices with the real job (predicted_vs_real.py).

Columns of the table, each a step in ms and how far it is from the real one:

- real: median of the slowest rank's steps by CUDA events, no profiler; lowest and highest.
- slice: the same median of the slice on GPU 0, whose collectives are emulated.
- slowest: the job's step by the spread of the slice's steps (Measurement.slowest_step_ns).
- replay: `onerank replay` of the slice in steady state. It starts from the measured step, so it
  repeats `slice` unless the slice is re-costed. Of pipeline stages: `onerank replay --cluster`.
- ASTRA, GPU time: the exported kernels and ASTRA-sim's communication.
- ASTRA, host time: the same with --include-host-delays.
- LogGOPSim, host time: the GOAL export with --include-host-delays, messages eager.

ASTRA-sim and LogGOPSim get a network of one bandwidth and one latency, fitted to the measured times
of the job's own collectives. Those times include the reductions, so ASTRA-sim's memory time is off.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import onerank
from benchmarks.slices import slice_comparison as compared
from onerank.analysis.step_time import replay
from onerank.capture.bench.measure_link import fit_latency_and_bytes
from onerank.capture.collective_kernels.network import Curve, Network, load_network
from onerank.converters.expand.host_delays import insert_host_delays_by_rank
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import RankGraph, expand_ranks
from onerank.converters.nccl import wire_bytes
from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.exporter import export_astra_sim, export_astra_sim_ranks
from onerank.converters.targets.goal import export_goal, export_goal_ranks
from onerank.ir import Graph
from onerank.ir.steady_state import job_step_ns
from onerank.plan import cluster
from onerank.plan.job_replay import replay_job

Call = tuple[str, int, int]
"""Name, ranks of the group, input bytes of a rank."""

STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send": lambda _: 1,
}

"""Messages that follow each other in a call, as ASTRA-sim and the GOAL export have it."""


def link_for(network: Network, graphs: Sequence[Graph]) -> tuple[float, float]:
    """Return the latency in ns of a message and the bandwidth in GB/s, for the calls of graphs.

    Each call has the times that were measured in groups of its own group's size.
    """
    calls: Counter[Call] = Counter()
    for graph in graphs:
        for index in np.flatnonzero(graph.communication).tolist():
            node = graph.node(index)
            is_message = node.kind.name != "COLLECTIVE"
            name = "send" if is_message else node.collective.name.lower().removesuffix("_block")
            if name in STEPS:
                group = graph.job.group(node.text("group"))
                # A message has two ends, however many stages the group has.
                size = len(group.ranks) if group else graph.job.world.size
                ranks = 2 if is_message else size
                calls[name, ranks, int(node.value("comm_bytes"))] += 1
    times = {call: 1e3 * curve(network, *call[:2]).time_us(call[2]) for call in calls}
    weights = {call: count / times[call] for call, count in calls.items()}
    # The smallest measured call of each kind has a small weight, so that the latency is determined.
    least = 1e-3 * min(weights.values())
    for name, ranks in {call[:2] for call in calls}:
        smallest, time_us = curve(network, name, ranks).points[0]
        times.setdefault((name, ranks, smallest), 1e3 * time_us)
        weights.setdefault((name, ranks, smallest), least)
    latency, ns_per_byte = fit_latency_and_bytes(
        [(STEPS[name](ranks), wire_bytes(name, size, ranks)) for name, ranks, size in weights],
        [times[call] for call in weights],
        [*weights.values()],
    )
    return latency, 1 / max(ns_per_byte, 1e-9)


def curve(network: Network, call: str, ranks: int) -> Curve:
    """Return the measured times of a call by size, in groups of this size."""
    measured = network.link("", ranks).measured
    if call not in measured:
        raise SystemExit(f"the link was not measured for {call} of {ranks} ranks")
    return measured[call]


def compare(directory: Path) -> None:
    """Print the table of a captured directory, and write it as JSON next to the results."""
    results = json.loads((directory / "results.json").read_text())
    network = load_network(directory / "network.toml")
    _conditions(results)
    columns = ("slice", "slowest", "replay", *SIMULATED)
    print(f"{'form':16}{'real, ms':>30}" + "".join(f"{name:>24}" for name in columns))
    table: dict[str, Any] = {}
    for name, form in results["forms"].items():
        source = results["forms"][form.get("real_of", name)].get("real")
        owner = form.get("slices_of", name)
        slices = results["forms"][owner].get("slices")
        if not source or not slices:
            print(f"{name:16} incomplete: {'; '.join(form['errors'])[:200]}")
            continue
        slowest = max(source, key=lambda rank: rank["step_ns"])
        real = slowest["step_ns"] / 1e6
        low, high = (edge(slowest["steps_ns"]) / 1e6 for edge in (min, max))
        paths = [directory / owner / record["trace"] for record in slices]
        simulated = predictions(paths, form, results, network)
        # A stage's own step waits for no other stage.
        piped = "--pp" in results["forms"][owner]["slice_command"]
        simulated["slice"] = None if piped else slices[0]["step_ns"] / 1e6
        slowest = job_step_ns(onerank.read(paths[0]), results["gpus"])
        simulated["slowest"] = slowest / 1e6 if slowest and not piped else None
        simulated["slices"] = [record["step_ns"] / 1e6 for record in slices]
        table[name] = {"real_ms": real, "low_ms": low, "high_ms": high, **simulated}
        table[name] |= parts(directory, name, form, results)
        cells = "".join(f"{_cell(simulated.get(column), real):>24}" for column in columns)
        print(f"{name:16}{f'{real:.3f} ({low:.3f} - {high:.3f})':>30}{cells}", flush=True)
        print(f"{'':16}{_network_and_gpus(simulated)}")
    _print_errors(table, columns)
    _print_parts(table)
    (directory / "predicted.json").write_text(json.dumps(table, indent=1) + "\n")


def parts(directory: Path, name: str, form: Any, results: Any) -> dict[str, Any]:
    """Return what the slices say of a rank's compute, communication and memory, and the real rank.

    Compute and exposed communication are of the profiled steps, memory is the allocator's peak.
    Without a schedule each slice is compared with the real rank of its number; with one only the
    spread of the real ranks is given.
    """
    real_form = form.get("real_of", name)
    real = results["forms"][real_form]["real"]
    steps = [rank["step_ns"] for rank in real]
    row: dict[str, Any] = {"spread": max(steps) / min(steps) - 1, "ranks": []}
    if form["schedule"]:
        return row
    owner = form.get("slices_of", name)
    for record in results["forms"][owner]["slices"]:
        pair = [
            onerank.read(directory / owner / record["trace"]),
            onerank.read(directory / real_form / real[record["rank"]]["trace"]),
        ]
        replays = [replay(graph) for graph in pair]
        row["ranks"].append(
            {
                "rank": record["rank"],
                "compute_ms": [compared.compute_ms(graph) for graph in pair],
                "exposed_ms": [done.exposed_communication_ns / 1e6 for done in replays],
                "peak_gb": [compared.peak_gb(graph) for graph in pair],
                "step_ms": [compared.step_ms(graph) for graph in pair],
            }
        )
    return row


def _print_errors(table: dict[str, Any], columns: Sequence[str]) -> None:
    print("\nabsolute error over the forms: median, largest")
    for column in columns:
        errors = [
            abs(row[column] / row["real_ms"] - 1) for row in table.values() if row.get(column)
        ]
        if errors:
            print(f"{column:24}{np.median(errors):>8.1%}{max(errors):>8.1%}  {len(errors)} forms")


def _print_parts(table: dict[str, Any]) -> None:
    columns = ("compute_ms", "exposed_ms", "peak_gb", "step_ms")
    print("\nslice and real rank, each on the same GPU; spread: slowest over fastest real rank")
    print(f"{'form':16}{'spread':>8}{'rank':>6}" + "".join(f"{column:>30}" for column in columns))
    for name, row in table.items():
        print(f"{name:16}{row['spread']:>8.1%}" + ("" if row["ranks"] else "     -"))
        for rank in row["ranks"]:
            cells = ""
            for column in columns:
                slice_value, real_value = rank[column]
                gap = f"{slice_value / real_value - 1:+.2%}" if real_value else "-"
                cells += f"{f'{slice_value:.3f} {real_value:.3f} ({gap})':>30}"
            print(f"{'':24}{rank['rank']:>6}{cells}")


def kernels(directory: Path) -> None:
    """Print the differences between slices and real ranks, for forms with a slice per rank."""
    results = json.loads((directory / "results.json").read_text())
    _conditions(results)
    for name, form in results["forms"].items():
        owners = {"real": form.get("real_of", name), "slices": form.get("slices_of", name)}
        records = {kind: results["forms"][owner].get(kind, []) for kind, owner in owners.items()}
        if len(records["real"]) != len(records["slices"]) or form["schedule"]:
            continue  # a schedule's ranks do other work than a stage's capture
        real, slices = (
            [onerank.read(directory / owner / record["trace"]) for record in records[kind]]
            for kind, owner in owners.items()
        )
        stages = {
            slices[0].job.world.point(rank).get("pp"): rank for rank in range(len(slices))[::-1]
        }
        for rank in sorted(stages.values()):
            print(name if len(stages) == 1 else f"{name}, rank {rank}")
            compared.compare(slices[rank], slices, real, rank)
        for kind, graphs in (("slice", slices), ("real", real)):
            for rank, graph in enumerate(graphs):
                compared.sensors(f"{kind}, rank {rank}", graph)
        print()


def _conditions(results: Any) -> None:
    form = next(form for form in results["forms"].values() if form.get("slices"))
    versions = ", ".join(f"{k} {v}" for k, v in form["slices"][0]["versions"].items())
    print(f"{results['date']}, {versions}; link: {results['link']}")
    print(
        f"slices on {results['slices_on']}; {results['micro_batches']} micro-batches of pipelines\n"
    )
    for name, form in results["forms"].items():
        print(f"{name:16}real  {form.get('real_command', 'as ' + form.get('real_of', '-'))}")
        print(f"{'':16}slice {form.get('slice_command', 'as ' + form.get('slices_of', '-'))}")
    print()


def _network_and_gpus(simulated: dict[str, Any]) -> str:
    text = f"network: {simulated['network']}"
    per_gpu = simulated.get("ASTRA, host time, each", [])
    if len(per_gpu) > 1:
        text += "; by GPU, slice: " + ", ".join(f"{step:.3f}" for step in simulated["slices"])
        text += "; ASTRA, host time: " + ", ".join(f"{step / 1e6:.3f}" for step in per_gpu if step)
    return text


def _cell(ms: float | None, real: float) -> str:
    return "-" if ms is None else f"{ms:.3f} ({ms / real - 1:+.1%})"


@dataclass(frozen=True)
class Job:
    """The input of a simulator.

    Attributes:
        graphs: slices, one for each class of equal ranks.
        schedule: pipeline schedule; "" for none.
        micro_batches: micro-batches of the pipeline.
        latency_ns: latency of a message.
        bandwidth_gb_per_s: bandwidth of the link.
    """

    graphs: Sequence[Graph]
    schedule: str
    micro_batches: int
    latency_ns: float
    bandwidth_gb_per_s: float

    def ranks(self, *, host_time: bool, one_at_a_time: bool) -> list[RankGraph] | None:
        """Return the graphs of all ranks; None if the first graph represents all ranks."""
        graphs = self.graphs
        if not self.schedule and len(graphs) == 1:
            return None
        if host_time:
            graphs, _ = insert_host_delays_by_rank(graphs, one_at_a_time=one_at_a_time)
        if not self.schedule:
            return expand_ranks(graphs)
        return expand(graphs, PipelineSchedule.parse(self.schedule), self.micro_batches)


def predictions(paths: Sequence[Path], form: Any, results: Any, network: Network) -> dict[str, Any]:
    """Return steps in ms by column; of the slice on GPU 0, if it represents all ranks."""
    schedule = form["schedule"]
    graphs = [onerank.read(path) for path in paths]
    on_cpu = graphs[0].job.device.type == "cpu"
    if on_cpu:  # a dry run
        graphs = [onerank.recost(graph, "H100") for graph in graphs]
    latency, bandwidth = link_for(network, graphs)
    simulated: dict[str, Any] = {"network": f"{bandwidth:.2f} GB/s, {latency:.0f} ns a message"}
    single_class = not schedule and not form["one_job"]
    if single_class:
        simulated["replay"] = _replayed_ns(graphs[0]) / 1e6
    elif schedule:
        link = cluster.ClusterLink(bandwidth, latency / 1e3)
        fitted = cluster.ClusterNetwork(results["gpus"], link, link)
        job = replay_job(graphs, fitted, PipelineSchedule.parse(schedule), results["micro_batches"])
        simulated["replay"] = job.step_ns / 1e6
    for column, (simulate, host_time, nvlink_active) in SIMULATED.items():
        if on_cpu and host_time and simulate is astra_sim:
            continue
        slices = graphs
        if nvlink_active:
            slices = [
                with_links for graph in graphs if (with_links := compared.with_nvlink_active(graph))
            ]
            if len(slices) < len(graphs):
                continue
        jobs = [
            Job(part, schedule, results["micro_batches"], latency, bandwidth)
            for part in ([[graph] for graph in slices] if single_class else [slices])
        ]
        steps = [simulate(job, host_time=host_time and not on_cpu) for job in jobs]
        simulated[column] = None if steps[0] is None else steps[0] / 1e6
        simulated[f"{column}, each"] = steps
    return simulated


def _replayed_ns(graph: Graph) -> int:
    replayed = replay(graph)
    steady = replayed.steady_state
    return steady.step_ns if steady is not None else replayed.step_time_ns


def astra_sim(job: Job, *, host_time: bool) -> int | None:
    """Return the step of ASTRA-sim's slowest rank in ns, None without its binary."""
    binary = os.environ.get("ASTRA_SIM_BIN")
    if not binary:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        network = SimulatedNetwork(job.bandwidth_gb_per_s, job.latency_ns, memory_gb_per_s=None)
        rank_graphs = job.ranks(host_time=host_time, one_at_a_time=True)
        if rank_graphs is None:
            export_astra_sim(job.graphs[0], scratch, host_time=host_time, network=network)
        else:
            export_astra_sim_ranks(rank_graphs, scratch, network=network)
        output = _said([f"{scratch}/run.sh", "roofline", str(Path(binary).resolve())])
    return max(int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", output))


def loggopsim(job: Job, *, host_time: bool) -> int | None:
    """Return the step of LogGOPSim's slowest rank in ns, None without its binaries."""
    place = os.environ.get("LOGGOPSIM_DIR")
    if not place:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        goal, binary = Path(scratch) / "job.goal", Path(scratch) / "job.bin"
        rank_graphs = job.ranks(host_time=host_time, one_at_a_time=False)
        if rank_graphs is None:
            export_goal(job.graphs[0], goal, host_time=host_time)
        else:
            export_goal_ranks(rank_graphs, goal)
        _said([f"{place}/txt2bin", "-i", str(goal), "-o", str(binary)])
        model = f"-L {round(job.latency_ns)} -o 0 -g 0 -S 2147483647"
        model += f" -G {1 / job.bandwidth_gb_per_s:.12f}"
        output = _said([f"{place}/LogGOPSim", "-f", str(binary), *model.split()])
    return max(int(end) for end in re.findall(r"Host \d+: (\d+)", output))


SIMULATED = {
    "ASTRA, GPU time": (astra_sim, False, False),
    "ASTRA, host time": (astra_sim, True, False),
    "ASTRA, NVLink active": (astra_sim, True, True),
    "LogGOPSim, host time": (loggopsim, True, False),
}

"""Column -> simulator, whether the GPU waits for its host, whether the slices' NVLinks are active.
"""


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
