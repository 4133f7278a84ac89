"""Linking rules on traces small enough to read: each test states its events and what they mean."""

import json

import pytest
from notes import has_note
from raised import raises_code
from small_traces import Trace, edges

from onerank.ir import Collective, Evidence, Kind, Reason
from onerank.ir.errors import TraceError


def test_a_kernel_is_linked_by_external_id(tmp_path):
    trace = Trace()
    outer = trace.op("aten::linear", 0, 20)
    inner = trace.op("aten::mm", 5, 10)
    trace.launch(100, 8, external=inner)
    trace.kernel(100, 30, 5)
    graph, report = trace.convert(tmp_path)
    assert outer != inner
    assert report.gpu_ops_linked == {"external id": 1}
    assert edges(graph, Reason.LAUNCH) == {("aten::mm", "gemm")}
    assert edges(graph, Reason.PROGRAM_ORDER) == {("aten::linear", "aten::mm")}


def test_a_kernel_without_external_id_is_linked_to_the_operator_around_its_launch(tmp_path):
    trace = Trace()
    trace.op("aten::linear", 0, 20)
    trace.op("aten::mm", 5, 10)
    trace.launch(100, 8)
    trace.kernel(100, 30, 5)
    graph, report = trace.convert(tmp_path)
    assert report.gpu_ops_linked == {"enclosing operator": 1}
    assert edges(graph, Reason.LAUNCH) == {("aten::mm", "gemm")}


def test_one_graph_launch_starts_many_kernels(tmp_path):
    trace = Trace()
    op = trace.op("CompiledFxGraph", 0, 10)
    trace.launch(100, 5, external=op)
    for position in range(3):
        trace.kernel(100, 20 + 10 * position, 5, name=f"k{position}")
    graph, report = trace.convert(tmp_path)
    assert report.gpu_ops_linked == {"graph launch: external id": 3}
    assert edges(graph, Reason.STREAM_ORDER) == {("k0", "k1"), ("k1", "k2")}


def test_unlinked_operations_are_kept_and_counted(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.launch(100, 50)
    trace.kernel(100, 60, 5, name="outside")
    trace.kernel(999, 70, 5, name="orphan")
    graph, report = trace.convert(tmp_path)
    assert report.gpu_ops_unlinked == {"no operator": 1, "no launch": 1}
    assert graph.gpu_compute.sum() == 2


def test_a_trace_without_launches_keeps_its_kernels(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.kernel(1, 60, 5, name="first")
    trace.kernel(2, 70, 5, name="second")
    graph, report = trace.convert(tmp_path)
    assert report.gpu_ops_unlinked == {"no launch": 2}
    assert graph.nodes.duration_ns[graph.gpu_compute].tolist() == [5000, 5000]


def test_memsets_and_memcpys_carry_their_bytes(tmp_path):
    trace = Trace()
    op = trace.op("aten::copy_", 0, 10)
    trace.launch(100, 1, external=op)
    trace.launch(101, 2, external=op)
    trace.kernel(100, 20, 5, name="Memcpy DtoD", category="gpu_memcpy", bytes=4096)
    trace.kernel(101, 30, 5, name="Memset", category="gpu_memset", bytes=512)
    graph, _ = trace.convert(tmp_path)
    gpu = {graph.node(i).kind: i for i in range(len(graph)) if graph.gpu_compute[i]}
    assert graph.nodes.bytes_read[gpu[Kind.MEMCPY]] == 4096
    assert graph.nodes.bytes_written[gpu[Kind.MEMCPY]] == 4096
    assert graph.nodes.bytes_read[gpu[Kind.MEMSET]] == 0
    assert graph.nodes.bytes_written[gpu[Kind.MEMSET]] == 512


def test_nanoseconds_survive(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 1, external=op)
    trace.kernel(100, 20.001, 0.992)
    graph, _ = trace.convert(tmp_path)
    assert graph.nodes.duration_ns[graph.gpu_compute].tolist() == [992]


def test_own_time_leaves_out_the_operators_called(tmp_path):
    trace = Trace()
    trace.op("aten::linear", 0, 20)
    op = trace.op("aten::mm", 5, 10)
    trace.launch(100, 8, external=op)
    trace.kernel(100, 30, 5)
    graph, _ = trace.convert(tmp_path)
    host = dict(zip(graph.text("name"), graph.nodes.duration_ns.tolist(), strict=True))
    assert host["aten::linear"] == 10_000
    assert host["aten::mm"] == 10_000


def test_a_stream_sync_holds_the_host_back(tmp_path):
    trace = Trace()
    first = trace.op("aten::mm", 0, 10)
    trace.launch(100, 5, external=first)
    trace.kernel(100, 20, 50)
    trace.op("aten::item", 12, 70)
    trace.runtime("cudaStreamSynchronize", 101, 15, 60)
    trace.sync("Stream Sync", 20, correlation=101, stream=7)
    trace.op("aten::add", 90, 5)
    graph, report = trace.convert(tmp_path)
    assert report.syncs == 1
    assert edges(graph, Reason.SYNC) == {("gemm", "aten::add")}


def test_a_stream_waits_for_an_event_of_another(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 50)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 50, name="producer", stream=7)
    trace.runtime("cudaEventRecord", 101, 8)
    trace.launch(102, 10, external=op)
    trace.kernel(102, 70, 50, name="later", stream=7)
    trace.runtime("cudaStreamWaitEvent", 103, 12)
    trace.sync(
        "Stream Wait Event",
        12,
        correlation=103,
        stream=20,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=101,
    )
    trace.launch(104, 14, external=op)
    trace.kernel(104, 71, 5, name="consumer", stream=20)
    graph, _ = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("producer", "consumer")}


@pytest.mark.parametrize("launched", [False, True])
def test_an_event_includes_what_its_stream_waits_for(tmp_path, launched):
    """Stream 20 waits for 7, and 30 for 20, which has launched something since or has not."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 80)

    def kernel(correlation: int, name: str, stream: int) -> None:
        trace.launch(correlation, correlation, external=op)
        trace.kernel(correlation, correlation + 5, 1, name=name, stream=stream)

    def wait(correlation: int, *, stream: int, on: int) -> None:
        trace.runtime("cudaEventRecord", correlation, correlation)
        trace.runtime("cudaStreamWaitEvent", correlation + 1, correlation + 1)
        ids = {"wait_on_stream": on, "wait_on_cuda_event_record_corr_id": correlation}
        time, waits = correlation + 1, {"correlation": correlation + 1, "stream": stream}
        trace.sync("Stream Wait Event", time, **waits, **ids)

    kernel(1, "older", 20)
    kernel(3, "producer", 7)
    wait(5, stream=20, on=7)
    if launched:
        kernel(8, "between", 20)
    wait(10, stream=30, on=20)
    kernel(13, "consumer", 30)
    graph, _ = trace.convert(tmp_path)
    if launched:
        expected = {("producer", "between"), ("between", "consumer")}
    else:
        expected = {("producer", "consumer"), ("older", "consumer")}
    assert edges(graph, Reason.SYNC) == expected


def test_backward_on_its_own_thread_is_handed_over_and_back(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 30, 10, tid=2)
    trace.op("aten::_foreach_add_", 60, 10)
    graph, _ = trace.convert(tmp_path)
    backward = "autograd::engine::evaluate_function: MmBackward0"
    assert edges(graph, Reason.SYNC) == {
        ("aten::mm", backward),
        (backward, "aten::_foreach_add_"),
    }


def test_nccl_kernels_are_collectives_by_their_arguments(tmp_path):
    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(
        100,
        20,
        500,
        name="ncclDevKernel_Generic(ncclDevKernelArgs)",
        stream=20,
        **{
            "Collective name": "_allgather_base",
            "In msg nelems": 1000,
            "dtype": "BFloat16",
            "Process Group Name": "3",
            "Process Group Description": "dp",
            "Process Group Ranks": "[0, 2, 4, 6]",
        },
    )
    graph, report = trace.convert(tmp_path)
    node = next(node for node in graph if node.kind is Kind.COLLECTIVE)
    assert report.communication == 1
    assert node.collective is Collective.ALL_GATHER
    assert node.value("comm_bytes") == 2000
    assert node.duration_ns == 500_000
    assert graph.job.group("dp").ranks == (0, 2, 4, 6)
    assert not graph.gpu_compute.any()


def test_rccl_kernels_take_their_arguments_from_the_operator(tmp_path):
    trace = Trace()
    comm = {"Collective name": "allreduce", "In msg nelems": 256, "dtype": "Float"}
    op = trace.op("record_param_comms", 0, 10, **comm)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 500, name="ncclDevKernel_Generic")
    graph, _ = trace.convert(tmp_path)
    assert not graph.gpu_compute.any()
    node = next(node for node in graph if node.kind is Kind.COLLECTIVE)
    assert node.collective is Collective.ALL_REDUCE
    assert node.value("comm_bytes") == 1024


def test_a_synchronisation_nothing_waits_behind_is_counted(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 50)
    trace.runtime("cudaStreamSynchronize", 101, 15, 60)
    trace.sync("Stream Sync", 20, correlation=101, stream=7)
    _, report = trace.convert(tmp_path)
    assert report.syncs == 0
    assert report.syncs_dropped == {"no node follows the wait": 1}


def test_an_operator_the_execution_trace_lacks_is_counted(tmp_path):
    trace = Trace()
    for position in range(20):
        trace.op("aten::mm", 10 * position, 5)
    trace.nodes.pop()
    _, report = trace.convert(tmp_path)
    assert report.host_ops_without_record == 1


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ({"Collective name": "telepathy", "dtype": "Float"}, "trace-unknown-collective"),
        ({"Collective name": "allreduce", "dtype": "Quaternion"}, "trace-unknown-dtype"),
        (
            {"Collective name": "send", "Dst Rank": 2**70},
            "trace-number-too-large",
        ),
        ({"Collective name": "allreduce", "In msg nelems": 2**63}, "trace-number-too-large"),
        ({"Collective name": "allreduce", "Group size": 2**31}, "trace-number-too-large"),
    ],
)
def test_unknown_communication_is_refused(tmp_path, kernel, code):
    from onerank.ir.errors import TraceError

    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5, **kernel)
    with raises_code(code, TraceError):
        trace.convert(tmp_path)


def overlapped(*, paced: bool, event: int = 50) -> Trace:
    """An asynchronous all-reduce on stream 13 overlaps a kernel of stream 7 and is then awaited.

    Event 50 is recorded on stream 7 before the call, event 51 on stream 13 after it.
    """
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 2, external=op)
    trace.kernel(100, 20, 50, name="before")
    trace.call(0, 12, 10, asynchronous=True)
    trace.runtime("cudaEventRecord", 101, 13)
    trace.wait_event(102, 15, event=event, stream=13)
    trace.launch(103, 17)
    name = "onerank_standin_paced" if paced else "onerank_standin_marker"
    trace.kernel(103, 71, 40, name=name, stream=13)
    trace.runtime("cudaEventRecord", 104, 19)
    op = trace.op("aten::add", 30, 10)
    trace.launch(105, 32, external=op)
    trace.kernel(105, 71, 30, name="concurrent")
    trace.wait_event(106, 50, event=event + 1, stream=7)
    op = trace.op("aten::mul", 60, 10)
    trace.launch(107, 62, external=op)
    trace.kernel(107, 112, 5, name="after")
    return trace


def test_a_stand_in_places_its_call(tmp_path):
    graph, report = overlapped(paced=True).convert(tmp_path)
    call = next(node for node in graph if node.kind is Kind.COLLECTIVE)
    assert call.value("stream") == 13
    assert call.value("start_ns") == 71_000
    assert call.duration_ns == 40_000
    assert call.evidence is Evidence.SCALED
    assert edges(graph, Reason.STREAM_ORDER) == {("before", "concurrent"), ("concurrent", "after")}
    assert edges(graph, Reason.SYNC) == {("before", "all_reduce"), ("all_reduce", "after")}
    assert not any("standin" in name for name in graph.text("name"))
    assert graph.gpu_compute.sum() == 3
    assert report.gpu_ops_dropped == (1, 40_000)
    assert not has_note(report.notes, "async-assumed-blocking")
    assert has_note(report.notes, "event-records-inferred", 2)


def test_a_marker_places_its_call_without_a_duration(tmp_path):
    graph, _ = overlapped(paced=False).convert(tmp_path)
    call = next(node for node in graph if node.kind is Kind.COLLECTIVE)
    assert (call.value("stream"), call.duration_ns, call.evidence) == (13, 0, Evidence.NONE)
    assert edges(graph, Reason.SYNC) == {("before", "all_reduce"), ("all_reduce", "after")}


def test_records_come_in_the_order_of_the_ids(tmp_path):
    """The first call is awaited after the second: the record just before belongs to the second."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 5)
    trace.launch(100, 2, external=op)
    trace.kernel(100, 10, 5, name="before")
    for sequence, (start, stream) in enumerate(((10, 13), (20, 14))):
        trace.call(sequence, start, 8, asynchronous=True, group=f"g{sequence}")
        trace.runtime("cudaEventRecord", start * 10, start + 1)
        trace.wait_event(start * 10 + 1, start + 2, event=60 + 2 * sequence, stream=stream)
        trace.launch(start * 10 + 2, start + 3)
        trace.kernel(start * 10 + 2, start + 10, 50, name="onerank_standin_paced", stream=stream)
        trace.runtime("cudaEventRecord", start * 10 + 3, start + 5)
    trace.wait_event(300, 40, event=61, stream=7)
    op = trace.op("aten::mul", 50, 10)
    trace.launch(301, 52, external=op)
    trace.kernel(301, 90, 5, name="after")
    graph, report = trace.convert(tmp_path)
    assert report.syncs == 3
    first = next(node for node in graph if node.text("group") == "g0")
    after_node = next(index for index in range(len(graph)) if graph.node(index).name == "after")
    awaited = [source for source, reason in graph.edges.of(after_node) if reason is Reason.SYNC]
    assert [graph.node(source).id for source in awaited] == [first.id]


def test_an_event_older_than_the_trace_is_the_one_recorded_just_before(tmp_path):
    """NCCL records one event repeatedly; its id is far below those created in the trace."""
    trace = overlapped(paced=True)
    old = Trace()
    op = old.op("aten::mm", 0, 10)
    old.launch(100, 2, external=op)
    old.kernel(100, 20, 50, name="before")
    old.runtime("cudaEventRecord", 101, 13)
    old.wait_event(102, 15, event=3, stream=13)
    old.launch(103, 17, external=op)
    old.kernel(103, 71, 40, name="collective", stream=13)
    old.runtime("cudaEventRecord", 104, 19)
    old.wait_event(105, 21, event=99, stream=7)
    old.launch(106, 23, external=op)
    old.kernel(106, 112, 5, name="after")
    graph, _ = old.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("before", "collective"), ("collective", "after")}
    assert trace.events != old.events


def test_a_send_waits_for_the_backward_that_another_thread_launched(tmp_path):
    """A pipeline stage receives a gradient, runs its backward on autograd's thread, and sends."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 5)
    trace.launch(100, 2, external=op)
    trace.kernel(100, 10, 5, name="forward")

    def message(name: str, ts: float, start: float, *, stream: int) -> None:
        """As torch does it: an event for the message's stream, the message, an event after it."""
        first = round(ts) * 10
        op = trace.op(f"c10d::{name}", ts, 8)
        trace.runtime("cudaEventRecord", first, ts + 1)
        trace.wait_event(first + 1, ts + 2, event=3, stream=stream)
        trace.launch(first + 2, ts + 3, external=op)
        kernel = "ncclDevKernel_SendRecv"
        trace.kernel(first + 2, start, 20, name=kernel, stream=stream, message=name)
        trace.runtime("cudaEventRecord", first + 3, ts + 4)

    message("recv", 20, 30, stream=21)
    trace.wait_event(300, 29, event=99, stream=7)
    op = trace.op("autograd::engine::evaluate_function: MmBackward0", 32, 10, tid=2)
    trace.launch(301, 33, external=op, tid=2)
    trace.kernel(301, 55, 30, name="backward")
    message("send", 50, 86, stream=25)
    message("recv", 60, 87, stream=21)
    graph, _ = trace.convert(tmp_path)
    frame = graph.edges_frame()
    nodes = {int(number): i for i, number in enumerate(graph.nodes.id)}
    awaited = {
        (int(graph.nodes.start_ns[nodes[target]]), graph.node(nodes[source]).name)
        for source, target, reason in frame.iter_rows()
        if reason == "sync" and graph.nodes.stream[nodes[target]] in {21, 25}
    }
    assert awaited == {(30_000, "forward"), (86_000, "backward"), (87_000, "backward")}


def test_a_query_of_an_event_is_no_wait(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 2, external=op)
    trace.kernel(100, 20, 50)
    trace.runtime("cudaEventQuery", 101, 15)
    trace.sync("Event Sync", 15, correlation=101, wait_on_cuda_event_id=7)
    trace.op("aten::add", 30, 5)
    graph, report = trace.convert(tmp_path)
    assert not edges(graph, Reason.SYNC)
    assert report.syncs_dropped == {"an event query does not wait": 1}


def on_a_cpu(*, wait: bool, phase: str = "") -> Trace:
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    if phase:
        trace.op(f"{phase}: MmBackward0", 11, 30)
    trace.call(0, 12, 5, asynchronous=True)
    trace.op("aten::add", 20, 10)
    if wait:
        trace.mark("onerank::wait", 32, 2, sequence=0)
    trace.op("aten::mul", 50, 10)
    return trace


def test_what_a_tensor_subclass_runs_on_fake_tensors_is_no_work(tmp_path):
    """As DTensor does under torch 2.11 for each new scalar."""
    trace = Trace()
    trace.op("aten::addcdiv_", 0, 100)
    trace.op("PythonSubclass", 1, 98)
    trace.op("aten::addcdiv_", 10, 50)  # what would it return?
    trace.op("PythonDispatchMode", 11, 48)
    trace.op("aten::addcdiv_", 12, 40)
    trace.op("aten::addcdiv", 13, 30)
    trace.op("aten::empty_permuted", 14, 20)
    trace.op("aten::addcdiv_", 70, 10)  # of the local tensor
    trace.op("PythonDispatchMode", 110, 20)  # of the script's: it counts FLOPs, say
    trace.op("aten::mm", 112, 10)
    graph, _ = trace.convert(tmp_path)
    durations = zip(graph.text("name"), graph.nodes.duration_ns.tolist(), strict=True)
    assert list(durations) == [("aten::addcdiv_", 10_000), ("aten::mm", 10_000)]


def test_what_autocast_calls_again_is_the_work_and_its_casts(tmp_path):
    """`addmm` of float32 under autocast: three casts, then `addmm` of their results."""
    trace = Trace()
    trace.op("aten::addmm", 0, 100)
    for start in (1, 11, 21):
        trace.op("aten::to", start, 9)
        trace.op("aten::_to_copy", start + 1, 8)
        trace.op("aten::copy_", start + 2, 7)
    trace.op("aten::addmm", 31, 60)
    trace.op("aten::copy_", 32, 2)  # its bias
    graph, _ = trace.convert(tmp_path)
    durations = zip(graph.text("name"), graph.nodes.duration_ns.tolist(), strict=True)
    assert list(durations) == [*[("aten::copy_", 7_000)] * 3, ("aten::addmm", 60_000)]


def test_on_a_cpu_a_wait_mark_ends_the_overlap(tmp_path):
    graph, report = on_a_cpu(wait=True).convert(tmp_path)
    assert edges(graph, Reason.PROGRAM_ORDER) == {
        ("aten::mm", "aten::add"),
        ("aten::add", "aten::mul"),
        ("aten::mm", "all_reduce"),
    }
    assert edges(graph, Reason.SYNC) == {("all_reduce", "aten::mul")}
    assert not has_note(report.notes, "async-assumed-blocking")


def test_on_a_cpu_ddp_waits_where_backward_ends(tmp_path):
    trace = on_a_cpu(wait=False, phase="autograd::engine::evaluate_function")
    graph, _ = trace.convert(tmp_path)
    assert ("all_reduce", "aten::mul") in edges(graph, Reason.SYNC)
    assert ("all_reduce", "aten::add") not in edges(graph, Reason.SYNC)


def test_on_a_cpu_a_call_without_a_wait_blocks(tmp_path):
    graph, report = on_a_cpu(wait=False).convert(tmp_path)
    assert ("all_reduce", "aten::add") in edges(graph, Reason.PROGRAM_ORDER)
    assert has_note(report.notes, "async-assumed-blocking", 1)


def test_a_wait_mark_without_a_call_is_refused(tmp_path):
    trace = on_a_cpu(wait=True)
    trace.nodes[-2]["inputs"]["values"] = [json.dumps({"number": 0})]
    with raises_code("trace-mark-not-json", TraceError):
        trace.convert(tmp_path)


def test_kernels_get_their_uncontended_time(tmp_path):
    uncontended = Trace()
    for (name, start, external), duration in zip(
        (("before", 2, "aten::mm"), ("concurrent", 32, "aten::add"), ("other", 62, "aten::mul")),
        (45, 25, 5),
        strict=True,
    ):
        op = uncontended.op(external, start - 2, 10)
        uncontended.launch(start, start, external=op)
        uncontended.kernel(start, 10 * start, duration, name=name)
    path = tmp_path / "uncontended.json"
    path.write_text(json.dumps({"traceEvents": uncontended.events}))
    graph, report = overlapped(paced=True).convert(tmp_path, uncontended=path)
    figures = {
        node.name: node.value("uncontended_ns") for node in graph if node.kind is Kind.KERNEL
    }
    assert figures == {"before": 45_000, "concurrent": 25_000, "after": -1}
    assert has_note(report.notes, "uncontended-time-unknown", 1)
