"""Traces as other versions and vendors write them, with other names and types of fields."""

import json
from pathlib import Path

import pytest
from notes import has_note, note_of
from raised import raises_code
from small_traces import Trace, edges

from onerank.analysis.step_time import replay
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.sources.kineto import Sources, convert
from onerank.converters.sources.kineto.read import json_stream as stream
from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.exporter import export_astra_sim_ranks
from onerank.ir import Graph, Kind, Reason
from onerank.ir.errors import TraceError


def test_amd_gives_numbers_of_runtime_calls_as_text(tmp_path):
    trace = Trace()
    op = trace.op("aten::copy_", 0, 10)
    trace.runtime("hipMemcpyWithStream", 100, 5)
    trace.events[-1]["args"] |= {"bytes": "4096", "External id": str(op), "kind": "2"}
    trace.kernel(100, 20, 5, category="gpu_memcpy", bytes="4096", device="0", stream="0")
    graph, report = trace.convert(tmp_path)
    copy = next(node for node in graph if node.kind is Kind.MEMCPY)
    assert report.gpu_ops_linked == {"external id": 1}
    assert copy.value("bytes_read") == copy.value("bytes_written") == 4096


def test_a_process_that_used_two_gpus_is_noted_and_replayed_at_once(tmp_path):
    trace = Trace()
    for device in (0, 1):
        trace.op("aten::mm", 10 * device, 5)
        trace.launch(100 + device, 10 * device + 2)
        trace.kernel(100 + device, 20, 50, device=device)
    graph, report = trace.convert(tmp_path)
    note_of(report.notes, "several-gpus", "1 on GPU 0", "1 on GPU 1")
    assert replay(graph).step_time_ns < 90_000  # two kernels of 50 us


def foreign(name: str, category: str = "my_tool") -> dict[str, object]:
    args = {"bytes": "12 MB", "stream": ["a"]}
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": 1, "dur": 1, "args": args}


@pytest.mark.parametrize("piece", [200, 1 << 20])
def test_an_event_that_is_not_read_may_hold_anything(tmp_path, piece, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece)
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.events += [foreign("a"), {"ph": "M", "name": "b", "args": None}, foreign("c")]
    trace.launch(100, 5)
    trace.kernel(100, 20, 5)
    graph, report = trace.convert(tmp_path)
    assert graph.text("name") == ["aten::mm", "gemm"]
    note_of(report.notes, "events-of-unknown-category", "2 of category 'my_tool'")


def test_an_event_that_is_read_may_not(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.events += [foreign("a", "kernel")]
    with raises_code("trace-malformed", TraceError):
        trace.convert(tmp_path)


def test_an_event_without_a_time_is_refused(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    del trace.events[0]["ts"]
    with raises_code("trace-bad-time", TraceError):
        trace.convert(tmp_path)


def test_torch_1_8_has_other_categories_and_ids(tmp_path):
    trace = Trace()
    trace.annotation("ProfilerStep#3", 0, 100)
    op = trace.op("aten::mm", 5, 20, tid="17")
    trace.launch(100, 8, external=op, tid=17)
    trace.kernel(100, 30, 5)
    trace.kernel(0, 40, 5, category="gpu_memset", name="Memset (Device)", bytes=64)
    old = {"cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime",
           "kernel": "Kernel", "gpu_memset": "Memset"}  # fmt: skip
    for event in trace.events:
        event["cat"] = old[event["cat"]]
        args = event["args"]
        args.pop("Record function id", None)
        if event["cat"] == "Runtime":
            args["external id"] = args.pop("External id")
    graph, report = trace.convert(tmp_path, step="3")
    assert graph.text("name") == ["aten::mm", "gemm", "Memset (Device)"]
    assert edges(graph, Reason.LAUNCH) == {("aten::mm", "gemm")}
    assert (report.gpu_ops_linked, report.gpu_ops_unlinked) == (
        {"external id": 1},
        {"no launch": 1},
    )
    kineto, _ = trace.write(tmp_path)
    graph, _ = convert(Sources(kineto))
    assert [node.kind for node in graph] == [Kind.KERNEL, Kind.MEMSET]


def test_an_external_id_given_twice_names_the_operator_that_ran(tmp_path):
    """As torch up to 2.0 does: the other operator with that id began after the kernel."""
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    later = trace.op("aten::add", 1000, 10)
    trace.launch(100, 5, external=later)
    trace.kernel(100, 20, 5)
    graph, report = trace.convert(tmp_path)
    assert edges(graph, Reason.LAUNCH) == {("aten::mm", "gemm")}
    assert report.gpu_ops_linked == {"enclosing operator": 1}


def test_a_byte_order_mark_is_passed_over(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    for path in trace.write(tmp_path):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    graph, _ = convert(Sources(tmp_path / "kineto.json", tmp_path / "et.json"))
    assert graph.text("name") == ["aten::mm"]


def test_events_of_another_device_are_counted(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.kernel(1, 20, 5, category="mtia_ccp_events")
    kineto = tmp_path / "kineto.json"
    kineto.write_text(json.dumps({"traceEvents": trace.events}))
    _, report = convert(Sources(kineto))
    note_of(report.notes, "events-of-unknown-category", "1 of category 'mtia_ccp_events'")


def call(group: str, description: str, ranks: str, at: float) -> tuple[float, dict[str, object]]:
    fields = {"Collective name": "allreduce", "In msg nelems": 100, "dtype": "Float"}
    fields |= {"Process Group Name": group, "Process Group Description": description}
    return at, fields | {"Process Group Ranks": ranks}


def distributed(rank: int, size: int, *groups: dict[str, object]) -> dict[str, object]:
    return {"distributedInfo": {"rank": rank, "world_size": size, "pg_config": groups}}


def converted(tmp_path: Path, calls: list[tuple[float, dict[str, object]]], **rest: object):
    trace = Trace()
    number, at = 0, 0.0
    for number, (at, args) in enumerate(calls, 1):
        op = trace.op("record_param_comms", at, 10)
        trace.launch(number, at + 5, external=op)
        trace.kernel(number, at + 20, 5, name="ncclDevKernel_AllReduce", stream=20, **args)
    trace.kernel(number + 1, at + 50, 5)
    return convert(Sources(*trace.write(tmp_path, **rest)))


def test_groups_of_one_description_are_distinguished(tmp_path):
    """PyTorch describes a group as `undefined` if the script gives no description."""
    calls = [
        call("1", "undefined", "[0, 1]", 0),
        call("2", "undefined", "[0, 2]", 100),
        call("3", "mesh", "[0, 1, 2, 3]", 200),
        call("4", "mesh", "[0, 3]", 300),
        call("5", "experts", "[0]", 400),
    ]
    graph, _ = converted(tmp_path, calls)
    assert {group.name: group.ranks for group in graph.job.groups} == {
        "1": (0, 1), "2": (0, 2), "mesh 3": (0, 1, 2, 3), "mesh 4": (0, 3), "experts": (0,),
    }  # fmt: skip


def test_the_world_is_the_grid_that_the_groups_span(tmp_path):
    """Rank 5 of 16: pairs of neighbours, then four ranks 2 apart; no group spans 8."""
    calls = [
        call("7", "mesh_tp", "[4, 5]", 0),
        call("9", "undefined", "[1, 3, ...", 100),
        call("1", "default_pg", "", 200),
    ]
    world = {"pg_name": "1", "pg_desc": "default_pg", "ranks": [*range(16)]}
    lines = {"pg_name": "9", "pg_desc": "undefined", "ranks": [1, 3, 5, 7]}
    job = converted(tmp_path, calls, **distributed(5, 16, world, lines))[0].job
    assert job.rank == 5
    assert job.world.sizes == {"tp": 2, "axis1": 4, "other": 2}
    axes = {group.name: group.axis for group in job.groups}
    assert axes == {"mesh_tp": "tp", "9": "axis1", "default_pg": "world"}
    assert job.group("9").ranks == (1, 3, 5, 7)


@pytest.mark.parametrize(
    "fields",
    [{"rank": 9, "world_size": 4}, {"rank": 0, "world_size": 2**70}, {"rank": "none"}, [1], "text"],
)
def test_an_invalid_world_is_ignored(tmp_path, fields):
    graph, report = converted(tmp_path, [call("1", "", "[0, 1]", 0)], distributedInfo=fields)
    assert (graph.job.world.size, graph.job.rank) == (1, 0)
    assert has_note(report.notes, "distributed-info-ignored")


def test_recordings_of_all_ranks_are_exported_each_as_itself(tmp_path):
    """Rank 1 calls 300 us later than rank 0."""
    graphs: list[Graph] = []
    for rank, later in ((1, 300), (0, 0)):
        (directory := tmp_path / str(rank)).mkdir()
        calls = [call("1", "default_pg", "[0, 1]", at) for at in (0, 100 + later)]
        graphs.append(converted(directory, calls, **distributed(rank, 2))[0])
    exported = export_astra_sim_ranks(expand_ranks(graphs), tmp_path / "out")
    assert (exported.ranks, check(tmp_path / "out")) == (2, [])
    with raises_code("ranks-incomplete"):
        expand_ranks([graphs[0]])
    with raises_code("ranks-duplicate-rank"):
        expand_ranks([graphs[0], graphs[0]])


def two_streams(waits: str) -> Trace:
    """Stream 9 starts 3 us after stream 7 is done at 120 us, launched long before."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 40)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 20, 100, name="first", stream=7)
    trace.runtime(waits, 2, 10, 1)
    trace.launch(3, 15, external=op)
    trace.kernel(3, 123, 10, name="second", stream=9)
    return trace


@pytest.mark.parametrize(("call", "syncs"), [("cudaStreamWaitEvent", 1), ("cudaEventQuery", 0)])
def test_a_stream_that_started_as_another_ended_waited_for_it(tmp_path, call, syncs):
    """The wait follows from a call for an event; without a call, only from the late start."""
    graph, report = two_streams(call).convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("first", "second")}
    assert report.syncs == syncs
    assert has_note(report.notes, "gaps-explained") == (not syncs)


def test_a_host_that_came_back_as_a_stream_ended_waited_for_it(tmp_path):
    trace = two_streams("cudaStreamWaitEvent")
    trace.runtime("cudaEventSynchronize", 4, 50, 75)
    trace.op("aten::add", 130, 5)
    graph, _ = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("first", "second"), ("first", "aten::add")}


def test_what_was_launched_before_the_trace_began(tmp_path):
    """`comm` waited for `before`, and `after` for `comm`; the trace has no launch of them."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 40)
    trace.kernel(91, 0, 50, name="before", stream=7)
    trace.kernel(92, 53, 100, name="comm", stream=9)
    trace.kernel(93, 158, 10, name="after", stream=7)
    for correlation, stream_number in ((1, 7), (2, 9)):
        trace.launch(correlation, 5, external=op)
        trace.kernel(correlation, 200, 10, name=f"new {stream_number}", stream=stream_number)
    graph, report = trace.convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {("before", "comm"), ("comm", "after")}
    assert report.gpu_ops_unlinked == {"no launch": 3}
    assert edges(graph, Reason.LAUNCH) == {("aten::mm", "new 7"), ("aten::mm", "new 9")}


def test_a_launch_outside_of_operators_is_a_node_of_the_host(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.runtime("cudaGraphLaunch", 100, 500, 20)
    for place in range(2):
        trace.kernel(100, 530 + 10 * place, 5, name=f"k{place}")
    graph, report = trace.convert(tmp_path)
    assert report.gpu_ops_unlinked == {"graph launch: no operator": 2}
    assert (report.host_ops, report.host_ops_kept) == (1, 1)
    assert graph.text("name") == ["aten::mm", "cudaGraphLaunch", "k0", "k1"]
    assert edges(graph, Reason.LAUNCH) == {("cudaGraphLaunch", "k0"), ("cudaGraphLaunch", "k1")}
    note_of(report.notes, "launches-outside-operators", 1)
    assert replay(graph).step_time_ns == 545_000


def test_calls_by_gloo_in_a_trace_of_a_gpu_are_dropped(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5)
    trace.op("gloo:all_reduce", 12, 30, tid=2)
    graph, report = trace.convert(tmp_path)
    assert not graph.communication.any()
    note_of(report.notes, "gloo-calls-dropped", 1)


def test_an_operator_that_outlasts_its_caller_is_noted(tmp_path):
    """Up to a tenth of the operators may; more are refused."""
    trace = Trace()
    for place in range(10):
        trace.op("aten::add", 100 * place, 50)
    trace.op("aten::mul", 20, 60)
    for correlation in range(10):
        trace.launch(correlation, 100 * correlation + 5)
        trace.kernel(correlation, 100 * correlation + 10, 5)
    _, report = trace.convert(tmp_path)
    note_of(report.notes, "operators-overlap", 1, 11, 30_000)
    trace.op("aten::mul", 220, 60)
    with raises_code("trace-events-overlap", TraceError):
        trace.convert(tmp_path)


def test_an_allocator_history_of_other_actions_is_not_used(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.memory(2, 512, 512)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5)
    kineto, et = trace.write(tmp_path)
    history = tmp_path / "history.json"
    history.write_text('{"action": [0, 0], "address": [1, 2], "bytes": [512, 512], "pool": [0, 0]}')
    _, report = convert(Sources(kineto, et, profiles=(kineto,), histories=(history,)))
    note_of(report.notes, "memory-history-mismatch", 2, 1)


def test_a_trace_of_the_gpu_alone(tmp_path):
    trace = Trace()
    trace.launch(100, 5)
    trace.kernel(100, 20, 5)
    for operators in (False, True):
        graph, _ = convert(Sources(trace.write(tmp_path)[0], operators=operators))
        assert graph.text("name")[-1] == "gemm"


def test_a_trace_in_which_nothing_computes_is_refused(tmp_path):
    trace = Trace()
    trace.op("aten::empty", 0, 10)
    with raises_code("trace-no-compute", TraceError):
        trace.convert(tmp_path)
