"""Exports run on ASTRA-sim itself: set ASTRA_SIM_BIN to its congestion-unaware binary."""

import os
import re
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from notes import has_note, note_of
from stages import OPTIMIZER_NS, captures

import onerank
from onerank.annotate import recost
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.exporter import (
    AstraSimExport,
    export_astra_sim,
    export_astra_sim_ranks,
)
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    HostOverhead,
    Job,
    Kind,
    ProcessGroup,
    RankClass,
    Reason,
    World,
)
from onerank.ir.chakra import read_records

BIN = os.environ.get("ASTRA_SIM_BIN", "")

CAPTURES = sorted(path.parent for path in Path(__file__).parents[4].glob("traces/*/job.json"))

EXECUTED = 'type = "basic_file_sink_mt"\nfilename = "executed.txt"\ntruncate = true'

pytestmark = pytest.mark.skipif(
    not BIN,
    reason="ASTRA_SIM_BIN is not set: name the binary AstraSim_Analytical_Congestion_Unaware",
)


def run(exported: AstraSimExport, encoding: str) -> tuple[dict[int, int], dict[int, int]]:
    """Run an export, tracing every node; return GPU time and cycles of each rank."""
    system = "system_roofline.json" if encoding == "roofline" else "system.json"
    text = (exported.directory / system).read_text()
    (exported.directory / system).write_text(
        text.replace('"trace-enabled": 0', '"trace-enabled": 1')
    )
    logging = exported.directory / "logging.toml"
    text = logging.read_text().replace('type = "null_sink_mt"', EXECUTED)
    logging.write_text(text.replace('flush_level = "info"', 'flush_level = "debug"'))
    process = subprocess.run(
        [exported.directory / "run.sh", encoding, Path(BIN).resolve()],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    finished = re.findall(r"sys\[(\d+)\] finished, (\d+) cycles", process.stdout)
    assert sorted(int(rank) for rank, _ in finished) == list(range(exported.ranks))
    prefix = "workload_roofline" if encoding == "roofline" else "workload"
    executed: defaultdict[int, list[int]] = defaultdict(list)
    with (exported.directory / "executed.txt").open() as lines:
        for line in lines:
            if issued := re.search(r"issue,sys->id=(\d+), tick=\d+, node->id=(\d+),", line):
                executed[int(issued[1])].append(int(issued[2]))
    for rank in range(exported.ranks):
        nodes = read_records(exported.directory / f"{prefix}.{rank}.et").nodes
        assert sorted(executed[rank]) == [node.id for node in nodes]
    gpu_time = re.findall(r"sys\[(\d+)\], GPU time: (\d+)", process.stdout)
    return (
        {int(rank): int(time) for rank, time in gpu_time},
        {int(rank): int(cycles) for rank, cycles in finished},
    )


def step_of_four_ranks() -> Graph:
    """Return 12 layers on two axes with every supported collective, a ring and small kernels."""
    builder = GraphBuilder()
    kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    kinds += (Collective.ALL_TO_ALL,)
    newest = host = None
    for layer in range(12):
        launch = builder.add(name="aten::mm", kind=Kind.HOST_OP, duration_ns=9000)
        if host is not None:
            builder.edge(host, launch, Reason.PROGRAM_ORDER)
        host = launch
        gemm = builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=12_345 + layer * 7)
        builder.edge(launch, gemm, Reason.LAUNCH)
        if newest is not None:
            builder.edge(newest, gemm, Reason.STREAM_ORDER)
        collective = builder.add(
            name="nccl",
            kind=Kind.COLLECTIVE,
            collective=kinds[layer % 4],
            comm_bytes=(1 << 20) + layer,
            group=("tp", "dp", "all")[layer % 3],
            stream=20,
        )
        builder.edge(gemm, collective, Reason.SYNC)
        send = builder.add(
            name="send", kind=Kind.SEND, comm_dst=3, comm_tag=layer, comm_bytes=4096, stream=21
        )
        builder.edge(gemm, send, Reason.SYNC)
        receive = builder.add(
            name="recv", kind=Kind.RECV, comm_src=3, comm_tag=layer, comm_bytes=4096, stream=22
        )
        small = builder.add(name="add", kind=Kind.KERNEL, stream=7, duration_ns=333)
        builder.edge(gemm, small, Reason.STREAM_ORDER)
        newest = builder.add(name="norm", kind=Kind.KERNEL, stream=7, duration_ns=1777)
        builder.edge(small, newest, Reason.STREAM_ORDER)
        builder.edge(collective, newest, Reason.SYNC)
        builder.edge(receive, newest, Reason.SYNC)
    groups = (
        ProcessGroup("tp", (0, 1), "tp"),
        ProcessGroup("dp", (1, 3), "dp"),
        ProcessGroup("all", (0, 1, 2, 3), "world"),
    )
    return builder.build(Job(world=World({"tp": 2, "dp": 2}), rank=1, groups=groups))


def test_both_encodings_of_four_ranks(tmp_path: Path) -> None:
    exported = export_astra_sim(step_of_four_ranks(), tmp_path)
    assert exported.gpu_time_ns == 12 * (12_345 + 333 + 1777) + 7 * 66
    exact, _ = run(exported, "roofline")
    assert exact == dict.fromkeys(range(4), exported.gpu_time_ns)
    rounded, _ = run(exported, "micros")
    assert all(abs(time - exported.gpu_time_ns) < 1000 for time in rounded.values())


def test_bandwidth_and_latency_are_those_of_the_options(tmp_path: Path) -> None:
    builder = GraphBuilder()
    columns = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_GATHER}
    builder.add(name="all_gather", comm_bytes=45_000_000, **columns)
    exported = export_astra_sim(
        builder.build(Job()), tmp_path, ranks=4, network=SimulatedNetwork(450, 500)
    )
    _, cycles = run(exported, "micros")
    # 3 steps of a ring: 45 MB at 450 GB/s are 100,000 ns, and 500 ns of latency;
    # ASTRA-sim adds its endpoint delay of 10 ns to each step
    assert set(cycles.values()) <= set(range(3 * 100_500, 3 * 100_500 + 50))


def test_a_measured_bus_bandwidth_has_the_reductions_in_it(tmp_path: Path) -> None:
    """2 (n - 1) / n of the bytes at the bus bandwidth, as nccl-tests reckons it."""
    builder = GraphBuilder()
    columns = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_REDUCE}
    builder.add(name="all_reduce", comm_bytes=40_000_000, **columns)
    network = SimulatedNetwork(300, 1000, memory_gb_per_s=None)
    exported = export_astra_sim(builder.build(Job()), tmp_path, ranks=4, network=network)
    _, cycles = run(exported, "micros")
    # 60 MB at 300 GB/s, 6 messages of 1 us latency and ASTRA-sim's own 10 ns
    assert set(cycles.values()) <= set(range(200_000 + 6 * 1000, 200_000 + 6 * 1000 + 150))
    note_of(exported.notes, "assumed-network", "reductions included")


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "step_ns"),
    [
        # (M + P - 1) (f + b): 4 ranks of one stage each, 1 ms forward and 2 ms backward
        ("1f1b", 8, (8 + 3) * 3_000_000),
        ("1f1b", 2, (2 + 3) * 3_000_000),
        ("gpipe", 8, (8 + 3) * 3_000_000),
        # (M + (P - 1) / V) (f + b): 8 stages of half the work
        ("interleaved:2", 8, (8 + 3 / 2) * 3_000_000),
        # M (f + b) and no bubble but until the first stage's first micro-batch has come through
        ("zbv", 8, (8 + 3 / 6) * 3_000_000),
    ],
)
def test_a_pipeline_s_step_is_the_closed_form(schedule, micro_batches, step_ns, tmp_path):
    """Communication takes next to nothing: 64 bytes at 1 TB/s, no latency."""
    parsed = PipelineSchedule.parse(schedule)
    graphs = captures(4 * parsed.chunks, scale=parsed.chunks)
    ranks = expand(graphs, parsed, micro_batches)
    exported = export_astra_sim_ranks(ranks, tmp_path, network=SimulatedNetwork(1000, 0))
    gpu_time, cycles = run(exported, "roofline")
    assert gpu_time[1] == micro_batches * 3_000_000 + OPTIMIZER_NS
    assert max(cycles.values()) == pytest.approx(step_ns + OPTIMIZER_NS, abs=20_000)


def test_an_uneven_exchange_takes_as_long_as_its_busiest_rank(tmp_path: Path) -> None:
    """Four ranks, two classes; the busiest receives 90 MB, and the ranks compute 1 and 2 ms."""
    world = World.of(dp=4, ep=2)
    classes = tuple(RankClass(place, {"ep": (place,)}) for place in (0, 1))
    graphs: list[Graph] = []
    for rank, sent, received in ((0, 45_000_000, 90_000_000), (1, 45_000_000, 9_000_000)):
        builder = GraphBuilder()
        ns = 1_000_000 * (rank + 1)
        gemm = builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=ns)
        values = f'[[1,1,0,{sent},1,"cuda:0"],[2,2,0,{received},1,"cuda:0"]]'
        columns = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_TO_ALL, "group": "ep"}
        moved = builder.add(
            name="all_to_all", comm_bytes=sent, input_values=values, stream=8, **columns
        )
        builder.edge(gemm, moved, Reason.SYNC)
        group = ProcessGroup("ep", world.line("ep", rank), "ep")
        graphs.append(builder.build(Job(world, rank, groups=(group,), classes=classes)))
    exported = export_astra_sim_ranks(
        expand_ranks(graphs), tmp_path, network=SimulatedNetwork(450, 500)
    )
    gpu_time, cycles = run(exported, "roofline")
    assert gpu_time == {0: 1_000_000, 1: 2_000_000, 2: 1_000_000, 3: 2_000_000}
    # the later rank's 2 ms, then half of 90 MB to the other rank at 450 GB/s, and 500 ns
    assert 2_100_500 <= max(cycles.values()) <= 2_100_550


@pytest.mark.parametrize("raw", CAPTURES, ids=lambda path: path.name)
def test_real_captures(raw: Path, tmp_path: Path) -> None:
    """Rank 0 as captured, for all ranks; a CPU capture as an H100 would run it."""
    graph, _ = convert_directory(raw)
    if graph.job.device.type == "cpu":
        graph = recost(graph, "H100")
    exported = export_astra_sim(graph, tmp_path)
    exact, _ = run(exported, "roofline")
    assert exact == dict.fromkeys(range(4), exported.gpu_time_ns)
    rounded, _ = run(exported, "micros")
    assert all(abs(time - exported.gpu_time_ns) < 1000 for time in rounded.values())


def test_kernels_take_their_time_in_steady_state(tmp_path: Path) -> None:
    """A slice whose GPU sets the pace: each kernel rounded to a nanosecond, as the replay does."""
    raw = next(raw for raw in CAPTURES if raw.name.startswith("h200"))
    graph = in_steady_state(convert_directory(raw)[0], 1.0538)
    kernels = graph.nodes.duration_ns[graph.compute]
    exported = onerank.export.astra_sim(graph, tmp_path)
    assert has_note(exported.notes, "steady-state-kernels")
    exact, _ = run(exported, "roofline")
    assert exact == dict.fromkeys(range(4), int(np.rint(kernels * 1.0538).sum()))


def in_steady_state(graph: Graph, factor: float) -> Graph:
    """Return the graph with a factor on its kernels."""
    overhead = HostOverhead(1.0, 0, residual_ns=1_000_000, kernel_factor=factor)
    measurement = msgspec.structs.replace(graph.job.measurement, host_overhead=overhead)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


def test_host_time_makes_the_step_last_what_was_measured(tmp_path: Path) -> None:
    """On a network that takes next to no time, the H200 capture's step without the profiler."""
    graph, _ = convert_directory(next(raw for raw in CAPTURES if raw.name.startswith("h200")))
    exported = export_astra_sim(
        graph, tmp_path, host_time=True, network=SimulatedNetwork(1e6, 0, 1e6)
    )
    _, cycles = run(exported, "roofline")
    step_ns = graph.job.measurement.median_step_ns
    assert max(cycles.values()) == pytest.approx(step_ns, rel=0.01)
