"""Traces as other versions and vendors write them: what is spelled otherwise is read as well."""

import json

import pytest
from small_traces import Trace, edges

from onerank.converters.kineto import Sources, convert, stream
from onerank.ir import Kind, Reason
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
    assert "events of unknown categories are left out: 2 of category 'my_tool'" in report.notes


def test_an_event_that_is_read_may_not(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.events += [foreign("a", "kernel")]
    with pytest.raises(TraceError, match=r"Expected `int`, got `str` - at `.*args.bytes`"):
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
    """As torch up to 2.0 does: the other operator of that id began behind the kernel."""
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
    note = "events of unknown categories are left out: 1 of category 'mtia_ccp_events'"
    assert note in report.notes
