"""Linking rules on traces small enough to read: each test states its events and what they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from onerank.converters.kineto import Conversion, Sources, convert
from onerank.ir import Collective, Graph, Kind, Reason

SCHEMA = "1.1.1-chakra.0.0.4"


class Trace:
    """A Kineto trace and its execution trace, written event by event; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []

    def op(self, name: str, ts: float, dur: float, *, tid: int = 1, **args: Any) -> int:
        rf_id = len(self.nodes) + 1
        ids = {"External id": rf_id, "Record function id": rf_id, "Ev Idx": rf_id, **args}
        self._event("cpu_op", name, ts, dur, tid, ids)
        empty = {"values": [], "shapes": [], "types": [], "strides": []}
        attrs = [{"name": "rf_id", "type": "uint64", "value": rf_id}]
        self.nodes.append(
            {
                "id": rf_id + 1,
                "name": name,
                "ctrl_deps": 1,
                "inputs": empty,
                "outputs": empty,
                "attrs": attrs,
            }
        )
        return rf_id

    def launch(self, correlation: int, ts: float, *, external: int = 0, tid: int = 1) -> None:
        args = {"correlation": correlation, "External id": external}
        self._event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, args)

    def kernel(
        self, correlation: int, ts: float, dur: float, *, stream: int = 7, **args: Any
    ) -> None:
        args = {"correlation": correlation, "stream": stream, "device": 0, **args}
        category = args.pop("category", "kernel")
        self._event(category, args.pop("name", "gemm"), ts, dur, stream, args)

    def sync(self, name: str, ts: float, **args: Any) -> None:
        self._event("cuda_sync", name, ts, 1, 0, args)

    def runtime(self, name: str, correlation: int, ts: float, dur: float = 1) -> None:
        self._event("cuda_runtime", name, ts, dur, 1, {"correlation": correlation})

    def _event(  # noqa: PLR0917
        self, cat: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def convert(self, directory: Path) -> tuple[Graph, Conversion]:
        kineto, et = directory / "kineto.json", directory / "et.json"
        kineto.write_text(json.dumps({"traceEvents": self.events, "INFO": ["a", "b"]}))
        et.write_text(json.dumps({"schema": SCHEMA, "nodes": self.nodes}))
        return convert(Sources(kineto, et))


def edges(graph: Graph, reason: Reason) -> set[tuple[str, str]]:
    frame = graph.edges_frame()
    names = dict(zip(graph.nodes.id.tolist(), graph.text("name"), strict=True))
    rows = frame.filter(frame["reason"] == reason.name.lower()).iter_rows()
    return {(names[source], names[target]) for source, target, _ in rows}


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
    assert report.syncs_left_out == {"nothing follows that waits": 1}


def test_an_operator_the_execution_trace_lacks_is_counted(tmp_path):
    trace = Trace()
    for position in range(20):
        trace.op("aten::mm", 10 * position, 5)
    trace.nodes.pop()
    _, report = trace.convert(tmp_path)
    assert report.host_ops_without_record == 1


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        ({"Collective name": "telepathy", "dtype": "Float"}, "unknown collective 'telepathy'"),
        ({"Collective name": "allreduce", "dtype": "Quaternion"}, "unknown dtype 'Quaternion'"),
    ],
)
def test_unknown_communication_is_named(tmp_path, kernel, complaint):
    from onerank.ir.errors import TraceError

    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5, **kernel)
    with pytest.raises(TraceError, match=complaint):
        trace.convert(tmp_path)
