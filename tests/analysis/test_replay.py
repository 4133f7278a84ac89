"""Replaying graphs: a real capture against its own measurement, and small graphs by hand."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from raised import raises_code

from onerank.analysis.step_time import replay, with_communication
from onerank.annotate.passes.host_time import scale_host
from onerank.cli import onerank as command
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import (
    Collective,
    Evidence,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    ProcessGroup,
    Reason,
    World,
)
from onerank.ir.replay import schedule

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def test_the_h200_capture_replays_within_two_percent(h200):
    done = replay(h200)
    assert done.measured_ns == 34_997_986
    assert abs(done.step_time_ns / done.measured_ns - 1) < 0.02
    assert done.compute_ns == 29_865_307  # one stream: no two kernels at once
    assert done.compute_ns + done.exposed_communication_ns + done.idle_ns == done.step_time_ns
    assert sum(share.time_ns for share in done.critical_path) == done.step_time_ns


def test_calls_that_block_a_cpu_hold_back_what_follows():
    """The capture on a CPU carried out its calls in no time; on a network they take some."""
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    done = replay(graph)
    assert done.measured_ns is not None
    assert abs(done.step_time_ns / done.measured_ns - 1) < 0.01
    slow = replay(graph, bandwidth_gb_per_s=0.1)
    calls = with_communication(graph, 0.1).nodes.duration_ns[graph.communication]
    assert slow.step_time_ns == done.step_time_ns + calls.sum()
    assert slow.exposed_communication_ns == calls.sum()


def test_a_slower_gpu_lengthens_the_replay(h200):
    """A slower GPU lengthens the replay although the start times in the trace stay."""
    twice = h200.with_columns(duration_ns=np.where(h200.gpu_compute, 2, 1) * h200.nodes.duration_ns)
    grown = replay(twice).step_time_ns - replay(h200).step_time_ns
    assert 0.9 * 29_865_307 < grown <= 29_865_307


def test_another_host_takes_other_times_between_its_operators(h200):
    """A captured step with 5 ms of waits for the host, 3.5 of them for launches."""
    measured = replay(h200)
    slower, free = (replay(scale_host(h200, factor)) for factor in (2.0, 0.0))
    assert scale_host(scale_host(h200, 2.0), 0.25).job.host_factor == 0.5
    back = replay(scale_host(scale_host(h200, 2.0), 0.5))
    assert back.step_time_ns == pytest.approx(measured.step_time_ns, abs=5_000)
    assert slower.compute_ns == measured.compute_ns == free.compute_ns
    assert slower.host_bound_ns > 4 * measured.host_bound_ns
    # the GPU's time, and the gap from one operation of the stream to the next
    gap = free.step_time_ns - free.compute_ns
    assert 0 < gap < 0.1 * free.compute_ns
    assert free.step_time_ns < measured.step_time_ns < slower.step_time_ns


def test_without_its_stream_order_it_replays_too_fast(h200):
    edges = h200.edges
    is_kept = edges.reason != Reason.STREAM_ORDER
    loose = type(edges).from_pairs(
        len(h200), edges.source[is_kept], edges.target[is_kept], edges.reason[is_kept]
    )
    broken = Graph(h200.nodes, loose, h200.strings, h200.job)
    assert replay(broken).step_time_ns < 0.9 * replay(h200).step_time_ns


def test_communication_by_bandwidth(h200):
    timed = with_communication(h200, 300.0)
    tp = np.flatnonzero(timed.communication)
    first = timed.node(int(tp[0]))
    assert first.collective is Collective.ALL_REDUCE
    expected = first.value("comm_bytes") * 2 * 3 / 4 / 300
    assert first.duration_ns == round(expected)
    done = replay(h200, bandwidth_gb_per_s=300.0)
    assert done.exposed_communication_ns == timed.nodes.duration_ns[tp].sum()


@pytest.mark.parametrize(
    ("kind", "expected_us"),
    [
        (Collective.ALL_REDUCE, 1500),  # 2 * 3/4 of 100 MB at 100 GB/s
        (Collective.REDUCE_SCATTER, 750),
        (Collective.REDUCE_SCATTER_BLOCK, 750),
        (Collective.ALL_TO_ALL, 750),
        (Collective.ALL_GATHER, 3000),  # three ranks' shards
        (Collective.GATHER, 3000),
        (Collective.SCATTER, 750),  # of which the root has all
        (Collective.BROADCAST, 1000),
        (Collective.REDUCE, 1000),
        (Collective.BARRIER, 0),
    ],
)
def test_each_collective_by_bus_bandwidth(kind: Collective, expected_us: int):
    """Four ranks that put in 100 MB each, as nccl-tests counts at 100 GB/s."""
    builder = GraphBuilder()
    columns = {"kind": Kind.COLLECTIVE, "collective": kind, "group": "tp"}
    builder.add(name="nccl", stream=20, comm_bytes=100_000_000, duration_ns=1, **columns)
    graph = builder.build(Job(world=World.of(tp=4), groups=(ProcessGroup("tp", (0, 1, 2, 3)),)))
    assert with_communication(graph, 100.0).nodes.duration_ns.tolist() == [expected_us * 1000]


def two_streams(*, waits: bool) -> Graph:
    """One kernel on each of two streams, launched 10 us apart, each 100 us long."""
    builder = GraphBuilder()
    host = [
        builder.add(name="op", kind=Kind.HOST_OP, thread=0, start_ns=start_ns, duration_ns=5_000)
        for start_ns in (0, 10_000)
    ]
    kernels = [
        builder.add(
            name="k", kind=Kind.KERNEL, stream=stream, start_ns=start_ns, duration_ns=100_000
        )
        for stream, start_ns in ((7, 4_000), (8, 14_000 + 90_000 * waits))
    ]
    builder.edge(host[0], host[1], Reason.PROGRAM_ORDER)
    for operator, kernel in zip(host, kernels, strict=True):
        builder.edge(operator, kernel, Reason.LAUNCH)
    if waits:
        builder.edge(kernels[0], kernels[1], Reason.SYNC)
    return builder.build(Job())


def test_streams_overlap_unless_an_edge_says_otherwise():
    free = schedule(two_streams(waits=False))
    assert free.start_ns.tolist() == [0, 10_000, 4_000, 14_000]
    waiting = schedule(two_streams(waits=True))
    assert waiting.start_ns.tolist() == [0, 10_000, 4_000, 104_000]
    done = replay(two_streams(waits=False))
    assert (done.step_time_ns, done.compute_ns, done.idle_ns) == (114_000, 110_000, 4_000)
    assert done.host_bound_ns == 4_000


def test_what_ran_before_an_operation_is_no_delay_of_what_it_waits_for():
    builder = GraphBuilder()
    other = builder.add(kind=Kind.KERNEL, stream=8, duration_ns=6000)
    received = builder.add(kind=Kind.RECV, comm_bytes=1)  # laid out before what it waits for
    first = builder.add(kind=Kind.KERNEL, stream=7, duration_ns=6000)
    second = builder.add(kind=Kind.KERNEL, stream=7, start_ns=6000, duration_ns=6000)
    builder.edge(other, received, Reason.SYNC)
    builder.edge(first, second, Reason.STREAM_ORDER)
    builder.edge(received, second, Reason.SYNC)
    assert replay(builder.build(Job())).step_time_ns == 12_000


def test_a_host_that_was_blocked_does_not_count_the_wait_as_its_own():
    """`item()` returns when the kernel ends: on a GPU twice as fast, so does the host."""
    builder = GraphBuilder()
    launch = builder.add(name="op", kind=Kind.HOST_OP, thread=0, start_ns=0, duration_ns=5_000)
    kernel = builder.add(
        name="k", kind=Kind.KERNEL, stream=7, start_ns=4_000, duration_ns=100_000,
        evidence=Evidence.MEASURED,
    )  # fmt: skip
    after = builder.add(name="n", kind=Kind.HOST_OP, thread=0, start_ns=107_000, duration_ns=1_000)
    builder.edge(launch, after, Reason.PROGRAM_ORDER)
    builder.edge(launch, kernel, Reason.LAUNCH)
    builder.edge(kernel, after, Reason.SYNC)
    graph = builder.build(Job())
    assert schedule(graph).start_ns.tolist()[:2] == [0, 4_000]
    assert schedule(graph).start_ns.tolist() == [0, 4_000, 107_000]
    fast = graph.with_columns(
        duration_ns=np.array([5_000, 50_000, 1_000]),
        evidence=np.array([Evidence.MEASURED, Evidence.SCALED, Evidence.MEASURED]),
    )
    # 3 us of waking up count as blocked, too
    assert replay(graph).step_time_ns - replay(fast).step_time_ns == 53_000


def test_command_writes_both_timelines(h200, tmp_path):
    trace, target = tmp_path / "step.et", tmp_path / "both.json.gz"
    h200.write(trace)
    arguments = ["replay", str(trace), "--perfetto", str(target), "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["measured_ns"] == 34_997_986
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"measured", "replayed"}
    shown = CliRunner().invoke(command, ["replay", str(trace)]).output
    assert "the replay is off by" in shown


def test_only_the_whole_step_as_measured_is_held_against_the_measurement(h200):
    assert replay(h200).measured_ns == 34_997_986
    assert replay(h200, bandwidth_gb_per_s=300).measured_ns is None  # the network is another


def communicating(**columns) -> Graph:
    builder = GraphBuilder()
    builder.add(name="c", kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE, **columns)
    builder.add(name="k", kind=Kind.KERNEL, duration_ns=5)
    groups = (ProcessGroup("tp", (0, 1), "tp"),)
    return builder.build(Job(world=World({"tp": 2}), groups=groups))


def test_what_cannot_be_replayed():
    with raises_code("replay-no-durations"):
        replay(communicating().with_columns(duration_ns=np.zeros(2, dtype=np.int64)))
    with raises_code("replay-unknown-communication"):
        replay(communicating(group="tp"), bandwidth_gb_per_s=100)
    with raises_code("replay-unknown-communication"):
        replay(communicating(group="dp", comm_bytes=8), bandwidth_gb_per_s=100)
