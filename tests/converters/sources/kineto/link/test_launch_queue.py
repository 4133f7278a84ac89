"""Launches that wait for queue room: a simulated host and GPU, written as a trace."""

from pathlib import Path

import numpy as np
import pytest
from notes import has_note, note_of
from small_traces import Trace

from onerank.analysis.step_time import replay
from onerank.converters.sources.kineto import Sources, convert, convert_directory
from onerank.ir import Evidence, Graph, Reason

OPERATOR, LAUNCH_AT, LAUNCH, GAP, RELEASE = 10.0, 3.0, 4.0, 2.0, 6.0  # microseconds
TRACES = Path(__file__).parents[5] / "traces"


def run(kernels: list[float], depth: int, lull: int = -1) -> Trace:
    """Launch kernels in sequence on a GPU whose queue takes `depth` unfinished ones.

    Args:
        kernels: durations in microseconds.
        depth: room in the queue.
        lull: number of an operator in whose launch the host is busy for 100 us with other things.
    """
    trace = Trace()
    now, gpu = 0.0, 0.0
    ends: list[float] = []
    for number, duration in enumerate(kernels):
        launch = now + LAUNCH_AT
        returns = launch + (100 if number == lull else LAUNCH)
        if number >= depth:
            returns = max(returns, ends[number - depth] + RELEASE)
        trace.op("aten::mul", now, returns + OPERATOR - LAUNCH_AT - LAUNCH - now)
        trace.runtime("cudaLaunchKernel", number + 1, launch, returns - launch)
        begins = max(gpu, launch + 8)
        trace.kernel(number + 1, begins, duration)
        gpu = begins + duration
        ends.append(gpu)
        now = returns + OPERATOR - LAUNCH_AT - LAUNCH + GAP
    return trace


def queued(graph: Graph) -> list[tuple[int, int]]:
    """Return (kernel, operator) of each wait, numbered among their kind."""
    of = np.cumsum(graph.gpu_compute) - 1
    host = np.cumsum(~graph.gpu_compute) - 1
    edges = graph.edges
    chosen = edges.reason == Reason.LAUNCH_QUEUE
    pairs = zip(edges.source[chosen].tolist(), edges.target[chosen].tolist(), strict=True)
    return [(int(of[source]), int(host[target])) for source, target in pairs]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return run([50.0] * 700, depth=300).convert(tmp_path_factory.mktemp("full"))


def test_a_launch_that_waited_waits_for_the_operation_that_made_room(full):
    graph, report = full
    waits = queued(graph)
    # the host takes 12 us a launch and a kernel 50 us, so the queue is full from launch 394 on
    assert waits[0] == (94, 395)
    assert {operator - kernel for kernel, operator in waits} == {301}  # the next operator waits
    assert len(waits) == 699 - 394
    note_of(report.notes, "launch-queue-full", len(waits) + 1, 300)


def test_an_operator_does_not_count_the_wait_as_its_own(full):
    graph, _ = full
    assert set(graph.nodes.duration_ns[~graph.gpu_compute].tolist()) == {10_000}


def test_it_replays_as_measured_and_the_wait_shrinks_with_the_kernels(full, tmp_path):
    graph, _ = full
    done = replay(graph)
    assert done.measured_ns is not None
    assert abs(done.step_time_ns / done.measured_ns - 1) < 0.001
    on_gpu = graph.gpu_compute
    for kernel, bound in ((20.0, "gpu"), (6.0, "host")):
        faster = graph.with_columns(
            duration_ns=np.where(on_gpu, round(kernel * 1000), graph.nodes.duration_ns),
            evidence=np.where(on_gpu, np.uint8(Evidence.SCALED), graph.nodes.evidence),
        )
        truth = replay(run([kernel] * 700, depth=300).convert(tmp_path)[0]).measured_ns
        assert truth is not None
        assert abs(replay(faster).step_time_ns / truth - 1) < 0.01, bound


def test_a_host_that_is_never_that_far_ahead_waits_for_nothing(tmp_path):
    graph, report = run([50.0] * 700, depth=900, lull=500).convert(tmp_path)
    assert queued(graph) == []
    assert not has_note(report.notes, "launch-queue-full")


def test_a_slow_call_while_few_are_pending_is_the_operators_own(tmp_path):
    graph, _ = run([14.0] * 400, depth=300, lull=200).convert(tmp_path)
    assert queued(graph) == []
    assert graph.nodes.duration_ns[~graph.gpu_compute].max() == 106_000


def test_the_h200_capture_never_fills_its_queue():
    graph, _ = convert_directory(TRACES / "h200-llama-8b-4l-tp4")
    assert queued(graph) == []


def test_without_operators_nothing_is_said_to_wait(tmp_path):
    kineto, _ = run([50.0] * 700, depth=300).write(tmp_path)
    graph, report = convert(Sources(kineto, None))
    assert queued(graph) == []
    assert not has_note(report.notes, "launch-queue-full")


def test_a_hosts_wait_for_an_event_is_counted(tmp_path):
    trace = run([50.0] * 3, depth=300)
    trace.runtime("cudaEventSynchronize", 99, 400, 5)
    _, report = trace.convert(tmp_path)
    reason = "the host's wait for an event: the trace does not record which event"
    assert report.syncs_dropped == {reason: 1}
