"""Waits for the host in jobs whose ranks differ: stages of a pipeline, classes of ranks."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from goal_machine import parse, run
from notes import codes, has_note, note_of
from stages import FORWARD_NS, INPUT_NS, OPTIMIZER_NS, WEIGHT_NS, captures

from onerank.cli import onerank
from onerank.converters.expand.host_delays import (
    DELAY_NAME,
    insert_host_delays,
    insert_host_delays_by_rank,
)
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.converters.targets.goal import export_goal_ranks
from onerank.display import time
from onerank.ir import (
    Collective,
    EmulatedCalls,
    Evidence,
    Graph,
    GraphBuilder,
    HostOverhead,
    Job,
    Kind,
    Measurement,
    Reason,
    World,
)
from onerank.ir.chakra import read_records
from onerank.ir.measurement import C10D_NS, NCCL_SYNCHRONOUS_NS

WAIT_NS = 100_000
WORK_NS = FORWARD_NS + INPUT_NS + WEIGHT_NS


def late(graph: Graph, operator: str) -> Graph:
    """Return a stage as captured by a host that was late for each kernel of an operator."""
    names, lasts = graph.text("op"), graph.nodes.duration_ns
    waited = np.array([WAIT_NS * (name == operator) for name in names])
    begins = np.cumsum(lasts + waited) - lasts
    first = int(begins[lasts > 0].min())
    measurement = Measurement(step_ns=(int((begins + lasts).max()) - first,))
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    delayed = graph.with_columns(start_ns=begins)
    return Graph(delayed.nodes, delayed.edges, delayed.strings, job)


def step_ns(graphs: list[Graph], schedule: str, micro_batches: int, path: Path) -> int:
    """Return the step of the slowest rank on a network that takes no time."""
    export_goal_ranks(expand(graphs, PipelineSchedule.parse(schedule), micro_batches), path)
    return max(run(parse(path)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_wait_inside_a_block_is_repeated_with_it(schedule: str, tmp_path: Path) -> None:
    graphs, notes = insert_host_delays_by_rank([late(graph, "weight") for graph in captures()])
    # (M + P - 1)(f + b), the backward 100 us longer
    expected = (8 + 3) * (WORK_NS + WAIT_NS) + OPTIMIZER_NS
    duration_ns = step_ns(graphs, schedule, 8, tmp_path / "job.goal")
    assert duration_ns == pytest.approx(expected, abs=1000)
    assert codes(notes) == ["host-delays"] * 3
    for rank, note in zip((0, 1, 3), notes, strict=True):
        assert has_note([note], "host-delays", f"Rank {rank} ", "300.000 us", "3 nodes")


def test_a_bubble_hides_waits(tmp_path: Path) -> None:
    """Delays precede all forwards but the step's first: the last rank waits for 7 of 8."""
    graphs, _ = insert_host_delays_by_rank([late(graph, "forward") for graph in captures()])
    duration_ns = step_ns(graphs, "1f1b", 8, tmp_path / "job.goal")
    expected = (8 + 3) * WORK_NS + 7 * WAIT_NS + OPTIMIZER_NS
    assert duration_ns == pytest.approx(expected, abs=1000)


def test_a_wait_goes_with_its_part_of_a_split_backward(tmp_path: Path) -> None:
    """ZB-V: M (f + b), and what comes before the first stage's first micro-batch is through."""
    late_ones = [late(graph, "input") for graph in captures(8)]
    graphs, _ = insert_host_delays_by_rank(late_ones)
    ranks = expand(graphs, PipelineSchedule.parse("zbv"), 8)
    waits = [rank_graph.graph.text("name").count(DELAY_NAME) for rank_graph in ranks]
    assert waits == [16] * 4  # before each input gradient of two chunks
    graph = ranks[0].graph
    names, ops = graph.text("name"), graph.text("op")
    for source, target in zip(
        graph.edges.source.tolist(), graph.edges.target.tolist(), strict=True
    ):
        if names[source] == DELAY_NAME and names[target] != DELAY_NAME:
            assert ops[target] == "input"


def test_overlapping_streams_share_the_time_that_they_take_together(tmp_path: Path) -> None:
    """In a simulator that runs one operation at a time: 1000 and 1000 ns take 1500 together."""
    builder = GraphBuilder()
    builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    builder.add(name="copy", kind=Kind.KERNEL, stream=20, start_ns=500, duration_ns=1000)
    builder.add(name="norm", kind=Kind.KERNEL, stream=7, start_ns=1900, duration_ns=100)
    graph = builder.build(Job(measurement=Measurement(step_ns=(1800,))))
    shared, notes = insert_host_delays(graph, one_at_a_time=True)
    lasts = dict(zip(shared.text("name"), shared.nodes.duration_ns.tolist(), strict=True))
    assert lasts == {"gemm": 750, "copy": 750, "norm": 100, DELAY_NAME: 200}
    note_of(notes, "host-delays-divided-overlap", 500)
    delayed, notes = insert_host_delays(graph)
    assert delayed.nodes.duration_ns.tolist() == [1000, 1000, 200, 100]
    assert codes(notes) == ["host-delays"]
    exported = export_astra_sim(graph, tmp_path, ranks=2, host_time=True)
    assert exported.gpu_time_ns == 1800  # the median step
    note_of(exported.notes, "compute-on-several-streams", 2)


def test_equal_ranks_wait_for_the_slowest_of_them(tmp_path: Path) -> None:
    """Two gemms with 500 ns between them, and an emulated call; the steps are 2100 to 2600 ns."""
    builder = GraphBuilder()
    builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    call = {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_REDUCE, "comm_bytes": 64}
    call |= {"stream": 8, "start_ns": 1000, "duration_ns": 100}
    builder.add(name="all_reduce", evidence=Evidence.SCALED, **call)
    builder.add(name="norm", kind=Kind.KERNEL, stream=7, start_ns=1600, duration_ns=500)
    steps = (2100, 2200, 2300, 2400, 2500, 2600)
    job = Job(world=World({"tp": 2}), measurement=Measurement(step_ns=steps))
    graph = builder.build(job)
    alone, notes = insert_host_delays(graph)
    assert alone.nodes.duration_ns[alone.text("name").index(DELAY_NAME)] == 2350 - 1600
    assert codes(notes) == ["host-delays"]
    slowest_ns = round(2100 + 0.5**0.5 * 500)
    _, notes = insert_host_delays(graph, ranks=2)
    note_of(notes, "host-delays", f"waits {time(slowest_ns - 1600)}")
    note_of(notes, "host-delays-slowest-rank", time(slowest_ns - 2350), "2 ranks")
    exported = export_astra_sim(graph, tmp_path, host_time=True)
    note_of(exported.notes, "host-delays-slowest-rank", time(slowest_ns - 2350))
    # The ranks of a real job have waited already.
    evidence = np.full(len(graph), Evidence.MEASURED)
    _, notes = insert_host_delays(graph.with_columns(evidence=evidence), ranks=2)
    assert codes(notes) == ["host-delays"]


def test_communication_keeps_its_order(tmp_path: Path) -> None:
    """A reduce-scatter whose gradient was late, followed by a gather without a delay."""
    builder = GraphBuilder()
    gemm = builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    norm = builder.add(name="norm", kind=Kind.KERNEL, stream=7, start_ns=1500, duration_ns=500)
    builder.edge(gemm, norm, Reason.STREAM_ORDER)
    for stream, kind, start in (
        (8, Collective.REDUCE_SCATTER, 2000),
        (9, Collective.ALL_GATHER, 2100),
    ):
        columns = {"kind": Kind.COLLECTIVE, "collective": kind, "comm_bytes": 64}
        call = builder.add(name=kind.name, stream=stream, start_ns=start, **columns)
        if kind is Collective.REDUCE_SCATTER:
            builder.edge(norm, call, Reason.SYNC)
    graph = builder.build(Job(measurement=Measurement(step_ns=(2000,))))
    export_astra_sim(graph, tmp_path, ranks=2, host_time=True)
    names = [node.name for node in read_records(tmp_path / "workload.0.et").nodes]
    assert names == ["gemm", DELAY_NAME, "norm", "REDUCE_SCATTER", "ALL_GATHER"]


def test_a_step_longer_than_the_profiled_one_had_slower_kernels() -> None:
    """Under the profiler 1800 ns, 200 of them idle, which are the most there can be; else 2120."""
    builder = GraphBuilder()
    builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    builder.add(name="norm", kind=Kind.KERNEL, stream=7, start_ns=1200, duration_ns=600)
    measured = Measurement(step_ns=(2120,), profiled_step_ns=1800)
    graph, notes = insert_host_delays(builder.build(Job(measurement=measured)))
    assert graph.nodes.duration_ns.tolist() == [1200, 200, 720]  # kernels a fifth longer
    note_of(notes, "host-delays", 200, "1 nodes", "profiled step", "1.800 us")
    note_of(notes, "host-delays-slower-compute", "2.120 us", "320 ns", 20.0)


def test_the_commands_take_several_traces(tmp_path: Path) -> None:
    for graph in captures(2):
        late(graph, "weight").write(tmp_path / f"t.{graph.job.rank}.et")
    traces = [str(tmp_path / f"t.{rank}.et") for rank in (0, 1)]
    pipeline = ["--schedule", "1f1b", "--micro-batches", "4", "--include-host-delays"]
    for simulator, output in (("astra-sim", "workload"), ("goal", "job.goal")):
        done = CliRunner().invoke(
            onerank,
            ["export", simulator, *traces, *pipeline, "-o", str(tmp_path / output), "--json"],
        )
        assert done.exit_code == 0, done.output
        summary = msgspec.json.decode(done.output)
        assert summary["gpu_time_ns"] == pytest.approx(
            4 * (WORK_NS + WAIT_NS) + OPTIMIZER_NS, abs=99
        )
        assert not has_note(summary["notes"], "idle-time-not-exported")


def test_delays_leave_out_the_host_time_of_the_emulation() -> None:
    builder, last = GraphBuilder(), None
    for place in range(3):
        op = builder.add(
            name="c10d::allreduce_", kind=Kind.HOST_OP, start_ns=50_000 * place, thread=1
        )
        call = {"kind": Kind.COLLECTIVE, "evidence": Evidence.SCALED, "stream": 8}
        launched = builder.add(
            name="all_reduce", **call, start_ns=50_000 * place + 5000, duration_ns=1000
        )
        kernel = builder.add(
            name="gemm",
            kind=Kind.KERNEL,
            stream=7,
            start_ns=50_000 * place + 5000,
            duration_ns=1000,
        )
        for target in (launched, kernel):
            builder.edge(op, target, Reason.LAUNCH)
        if last is not None:
            builder.edge(last, op, Reason.PROGRAM_ORDER)
        last = op
    overhead = HostOverhead(host_factor=1.0, inter_step_host_ns=50_000, residual_ns=0)
    waits = {}
    for excess_ns in (0, 7000):
        host_ns = 3 * (NCCL_SYNCHRONOUS_NS - C10D_NS + excess_ns)
        emulated = EmulatedCalls(synchronous=3, asynchronous=0, waits=0, host_ns=host_ns)
        measurement = Measurement(host_overhead=overhead, emulated_calls=emulated)
        delayed, notes = insert_host_delays(builder.build(Job(measurement=measurement)))
        is_delay = np.array([name == DELAY_NAME for name in delayed.text("name")])
        waits[excess_ns] = int(delayed.nodes.duration_ns[is_delay].sum())
        assert has_note(notes, "host-delays-emulated-calls", "7.000 us") == bool(excess_ns)
    assert waits[0] - waits[7000] == 2 * 7000  # the third call ends the step
