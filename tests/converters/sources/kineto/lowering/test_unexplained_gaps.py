"""Delays of GPU operations and their host for which the trace has no call and no event."""

import numpy as np
import pytest
from notes import has_note, note_of
from small_traces import Trace, edges

from onerank import read
from onerank.analysis.step_time import replay
from onerank.converters.sources.kineto import Sources, convert
from onerank.ir import Graph, Kind, Phase, Reason
from onerank.ir.replay import schedule


def two_streams(first: tuple[float, float], second: tuple[float, float]) -> Trace:
    """One operator launches a kernel on each of two streams at 5 and 6 us; (start, duration)."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    for correlation, (start, duration) in enumerate((first, second), 1):
        trace.launch(correlation, 4 + correlation, external=op)
        trace.kernel(correlation, start, duration, name=f"k{correlation}", stream=6 + correlation)
    return trace


def faster(graph: Graph) -> Graph:
    """Return the graph with a GPU of twice the speed."""
    nodes = graph.nodes
    on_gpu = nodes.kind != Kind.HOST_OP
    return graph.with_columns(
        duration_ns=np.where(on_gpu, nodes.duration_ns // 2, nodes.duration_ns)
    )


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ((520, 50), Reason.SYNC),  # the first ended at 515
        ((500, 50), Reason.ROOM),  # the first runs 15 us more: its last 3%
        ((300, 50), None),  # in its midst
        ((30, 50), None),  # no later than a launch takes
    ],
)
def test_what_begins_as_another_stream_ends_waited_for_it(tmp_path, second, reason):
    graph, report = two_streams((15, 500), second).convert(tmp_path)
    for one in (Reason.SYNC, Reason.ROOM):
        assert edges(graph, one) == ({("k1", "k2")} if one == reason else set())
    assert has_note(report.notes, "gaps-explained", 1) == (reason is not None)
    assert has_note(report.notes, "gaps-unexplained", 0.293) == (second[0] == 300)  # 300 - 7
    assert replay(graph).step_time_ns == 1000 * max(515, sum(second))


def test_one_that_was_left_room_keeps_its_lead_on_another_gpu(tmp_path):
    graph, _ = two_streams((15, 500), (500, 50)).convert(tmp_path)
    times = schedule(faster(graph))
    ends = dict(zip(graph.text("name"), times.end_ns.tolist(), strict=True))
    assert ends["k1"] == 15_000 + 250_000
    assert ends["k2"] == ends["k1"] - 15_000 + 25_000
    graph.write(tmp_path / "t.et")
    assert replay(read(tmp_path / "t.et")) == replay(graph)


def test_work_that_the_trace_lacks_is_noted_and_kept(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 3005, 5)
    trace.kernel(100, 5010, 5)
    graph, report = trace.convert(tmp_path)
    longest = "2.999 ms before 'gemm' at 0.000 ms", "2.000 ms before 'gemm' at 2.005 ms"
    note = note_of(report.notes, "gaps-unexplained", 2, 4.999, *longest)
    done = replay(graph)
    assert (done.step_time_ns, done.unexplained_ns) == (5_015_000, 4_999_000)
    kineto_only, report = convert(Sources(tmp_path / "kineto.json"))
    lacking = note_of(report.notes, "gaps-unexplained", 2, 4.999, *longest)
    assert lacking.text == note.text.replace("keeps", "lacks")
    assert replay(kineto_only).unexplained_ns == 0


def test_kernels_of_a_stream_that_overlap_are_replayed_so(tmp_path):
    """Programmatic dependent launch: `next` begins 20 us before `long` ends; `short` within both.

    `last` begins after `next`, which outlasts `short`.
    """
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    for correlation, (name, start, duration) in enumerate(
        [("long", 15, 100), ("next", 95, 60), ("short", 100, 5), ("last", 156, 10)], 1
    ):
        trace.launch(correlation, 4 + correlation, external=op)
        trace.kernel(correlation, start, duration, name=name)
    graph, report = trace.convert(tmp_path)
    assert has_note(report.notes, "gpu-operations-overlap", 2, 4)
    order = edges(graph, Reason.STREAM_ORDER)
    chain = {("long", "next"), ("next", "short"), ("short", "last")}
    assert order == chain | {("long", "last"), ("next", "last")}
    assert replay(graph).step_time_ns == 166_000
    ends = dict(zip(graph.text("name"), schedule(faster(graph)).end_ns.tolist(), strict=True))
    assert ends["next"] == 15_000 + 50_000 - 20_000 + 30_000
    assert ends["last"] >= ends["next"] + 5_000


@pytest.mark.parametrize(
    "copy", ["Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)"]
)
def test_a_call_that_waits_for_its_own_copy_is_no_work_of_the_host(tmp_path, copy):
    """The copy's call returns 5 us after the copy; from pinned memory, at once."""
    pageable = "Pageable" in copy
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 20, 1000)
    item = trace.op("aten::item", 15, 1030 if pageable else 10)
    trace.runtime("cudaMemcpyAsync", 2, 18, 1010 if pageable else 5)
    trace.kernel(2, 1021, 2, name=copy, category="gpu_memcpy")
    if pageable:
        trace.op("aten::add", 1050, 10)
    assert item == 2
    graph, _ = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == ({(copy, "aten::add")} if pageable else set())
    times = dict(zip(graph.text("name"), graph.nodes.duration_ns.tolist(), strict=True))
    waited = 1023 - 18  # until the copy had ended
    assert times["aten::item"] == 1000 * (1030 - waited if pageable else 10)
    done, half = replay(graph), replay(faster(graph))
    assert done.step_time_ns == (1_060_000 if pageable else 1_023_000)
    assert half.step_time_ns == pytest.approx(done.step_time_ns - 501_000, abs=1_000)


def test_a_kernel_launched_behind_what_its_operator_called_waits_for_that(tmp_path):
    trace = Trace()
    trace.op("compiled region", 0, 2000)
    trace.op("aten::slow", 10, 1800)
    trace.launch(1, 1900)
    trace.kernel(1, 1910, 5)
    graph, _ = trace.convert(tmp_path)
    assert edges(graph, Reason.LAUNCH) == {("compiled region", "gemm")}
    assert ("aten::slow", "gemm") in edges(graph, Reason.PROGRAM_ORDER)
    assert replay(graph).step_time_ns == 1_915_000


def test_such_a_kernel_is_no_later_than_its_launch_on_a_faster_gpu(tmp_path):
    """It was queued after a kernel of 1500 us, and began 10 us after its end."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 15, 1500)
    trace.op("outer", 20, 200)
    trace.op("aten::empty", 30, 120)
    trace.launch(2, 160)
    trace.kernel(2, 1525, 40)
    trace.op("aten::add", 230, 10)
    graph, _ = trace.convert(tmp_path)
    assert replay(graph).step_time_ns == 1_565_000
    assert replay(faster(graph)).step_time_ns == 15_000 + 750_000 + 20_000


def test_a_thread_begins_as_long_as_measured_behind_what_began_before(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.op("aten::add", 60, 10, tid=2)
    op = trace.op("aten::mul", 80, 10, tid=2)
    trace.launch(1, 85, external=op, tid=2)
    trace.kernel(1, 95, 50)
    graph, _ = trace.convert(tmp_path)
    assert ("aten::mm", "aten::add") in edges(graph, Reason.PROGRAM_ORDER)
    assert replay(graph).step_time_ns == 145_000


def test_gradient_functions_of_older_torch_are_backward(tmp_path):
    """Traces before torch 1.10 have no `autograd::engine::evaluate_function` events."""
    trace = Trace()
    trace.op("aten::mm", 0, 50, **{"Sequence number": 3})
    trace.op("MmBackward", 60, 50, tid=2, **{"Sequence number": 3, "Fwd thread id": 1})
    trace.op("aten::mm", 70, 20, tid=2)
    op = trace.op("aten::add_", 120, 10)
    trace.launch(1, 125, external=op)
    trace.kernel(1, 135, 5)
    graph, _ = trace.convert(tmp_path)
    phases = [Phase(one).name for one in graph.nodes.phase.tolist()]
    assert phases[:4] == ["FORWARD", "BACKWARD", "BACKWARD", "NONE"]
    assert {("aten::mm", "MmBackward"), ("aten::mm", "aten::add_")} <= edges(graph, Reason.SYNC)


def test_a_stream_waits_for_the_event_that_was_recorded_just_before(tmp_path):
    """The times show no cause: `other` starts long after `first` has ended."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 90)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 15, 20, name="first", stream=7)
    trace.runtime("cudaEventRecord", 2, 8)
    trace.runtime("cudaStreamWaitEvent", 3, 10)
    trace.launch(4, 12, external=op)
    trace.kernel(4, 36, 5, name="same", stream=7)
    trace.launch(5, 80, external=op)
    trace.kernel(5, 95, 10, name="other", stream=9)
    trace.runtime("cudaStreamWaitEvent", 6, 82)  # for an unknown event
    trace.launch(7, 84, external=op)
    trace.kernel(7, 106, 10, name="last", stream=9)
    graph, report = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("first", "other")}
    assert report.syncs == 1
    assert replay(graph).step_time_ns == 116_000


def test_an_event_that_the_times_contradict_is_not_waited_for(tmp_path):
    trace = two_streams((15, 500), (30, 50))
    trace.runtime("cudaEventRecord", 3, 5.3, 0.1)
    trace.runtime("cudaStreamWaitEvent", 4, 5.6, 0.1)
    graph, report = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == set()
    assert sum(report.syncs_dropped.values()) == 1


def test_what_was_queued_before_the_trace_is_not_what_waits(tmp_path):
    """`queued` has no launch: the wait at 10 us is that of `next`, launched after it."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 40)
    trace.kernel(90, 2, 60, name="queued", stream=9)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 15, 20, name="first", stream=7)
    trace.runtime("cudaEventRecord", 2, 8)
    trace.runtime("cudaStreamWaitEvent", 3, 10)
    trace.launch(4, 12, external=op)
    trace.kernel(4, 63, 10, name="next", stream=9)
    graph, report = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("first", "next")}
    assert not has_note(report.notes, "edges-of-cycle-dropped")


def test_a_host_that_begins_behind_its_gpu_does_so_in_a_replay(tmp_path):
    """A kernel launched before the trace begins 50 us before the first operator."""
    trace = Trace()
    trace.kernel(90, 0, 30, name="queued")
    op = trace.op("aten::mm", 50, 10)
    trace.launch(1, 55, external=op)
    trace.kernel(1, 65, 20)
    graph, _ = trace.convert(tmp_path)
    done = replay(graph)
    assert done.step_time_ns == 85_000
    assert sum(share.time_ns for share in done.critical_path) == done.step_time_ns


def test_the_gap_behind_what_an_operation_was_queued_behind_is_its_own(tmp_path):
    """12 us here, 2 us there; the last was launched into an idle stream."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    for correlation, start in enumerate((20, 132, 234), 1):
        trace.launch(correlation, correlation, external=op)
        trace.kernel(correlation, start, 100)
    late = trace.op("aten::add", 330, 8)
    trace.launch(4, 335, external=late)
    trace.kernel(4, 341, 10)
    graph, _ = trace.convert(tmp_path)
    kernels = schedule(graph).start_ns[graph.gpu_compute].tolist()
    assert kernels == [20_000, 132_000, 234_000, 341_000]


@pytest.mark.parametrize(
    ("recorded", "waited", "edge"),
    [
        ([20.0], 21.0, {("first", "other")}),
        (
            [10.0, 20.0],
            21.0,
            {("first", "other")},
        ),  # a record for another wait, soon after the launch
        ([10.0, 1500.0], 1501.0, set()),  # long after it: the event may be another stream's
    ],
)
def test_a_record_behind_another_is_of_what_was_launched_lately(tmp_path, recorded, waited, edge):
    trace = Trace()
    op = trace.op("aten::mm", 0, 1700)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 15, 20, name="first", stream=7)
    for number, at in enumerate(recorded):
        trace.runtime("cudaEventRecord", 2 + number, at)
    trace.runtime("cudaStreamWaitEvent", 8, waited)
    trace.launch(9, 1600, external=op)
    trace.kernel(9, 1610, 10, name="other", stream=9)
    graph, _ = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == edge
