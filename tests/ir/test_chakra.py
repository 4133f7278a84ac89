"""Chakra files: what is written for which column, records, and writing all or nothing."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chakra_files import FOREIGN, attr, attributes_of, kernels, nodes_of, write_messages, written
from raised import raises_code

from onerank.ir import (
    Collective,
    Evidence,
    GraphBuilder,
    Job,
    Kind,
    Phase,
    Reason,
    chakra,
)
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMM_RECV_NODE,
    COMM_SEND_NODE,
    COMP_NODE,
    GlobalMetadata,
    IOInfo,
    Node,
)

SCHEMA_FOLDER = Path(chakra.__file__).parent


# What is written


def test_kernel_has_every_column_as_an_attribute(tmp_path: Path):
    builder = GraphBuilder()
    builder.add(
        id=2**64 - 1,
        kind=Kind.KERNEL,
        name="gemm",
        op="aten::mm",
        stream=7,
        start_ns=1500,
        duration_ns=2250,
        evidence=Evidence.MEASURED,
        module="layers.0",
        phase=Phase.BACKWARD,
        micro_batch=3,
        input_values="[[1]]",
        input_shapes="[[2,2]]",
        output_types='["bf16"]',
        flops=10**15,
        bytes_read=64,
        bytes_written=32,
        instructions=10**12,
        bytes_allocated=512,
        bytes_freed=256,
        grid="[1,1,1]",
        block="[128,1,1]",
    )
    assert written(builder.build(Job()), tmp_path) == [
        Node(
            id=2**64 - 1,
            name="gemm",
            type=COMP_NODE,
            start_time_micros=1,
            duration_micros=2,
            inputs=IOInfo(values="[[1]]", shapes="[[2,2]]"),
            outputs=IOInfo(types='["bf16"]'),
            attr=[
                attr("is_cpu_op", bool_val=False),
                attr("op", string_val="aten::mm"),
                attr("stream", int64_val=7),
                attr("start_ns", int64_val=1500),
                attr("duration_ns", int64_val=2250),
                attr("evidence", string_val="measured"),
                attr("module", string_val="layers.0"),
                attr("phase", string_val="backward"),
                attr("micro_batch", int32_val=3),
                attr("flops", int64_val=10**15),
                attr("bytes_read", int64_val=64),
                attr("bytes_written", int64_val=32),
                attr("instructions", int64_val=10**12),
                attr("bytes_allocated", int64_val=512),
                attr("bytes_freed", int64_val=256),
                attr("grid", string_val="[1,1,1]"),
                attr("block", string_val="[128,1,1]"),
            ],
        )
    ]


def test_communication_has_the_attributes_simulators_read(tmp_path: Path):
    builder = GraphBuilder()
    builder.add(kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE, comm_bytes=4096, group="tp")
    builder.add(kind=Kind.SEND, comm_bytes=8, comm_src=0, comm_dst=1, comm_tag=5)
    builder.add(kind=Kind.RECV, comm_bytes=8, comm_src=1, comm_dst=0, comm_tag=6)
    collective, send, receive = written(builder.build(Job()), tmp_path)
    assert [collective.type, send.type, receive.type] == [
        COMM_COLL_NODE,
        COMM_SEND_NODE,
        COMM_RECV_NODE,
    ]
    assert list(collective.attr) == [
        attr("is_cpu_op", bool_val=False),
        attr("comm_type", int64_val=0),
        attr("comm_size", int64_val=4096),
        attr("pg_name", string_val="tp"),
    ]
    assert list(send.attr) == [
        attr("is_cpu_op", bool_val=False),
        attr("comm_size", int64_val=8),
        attr("comm_src", int32_val=0),
        attr("comm_dst", int32_val=1),
        attr("comm_tag", int32_val=5),
    ]
    assert attributes_of(receive)[2:] == [("comm_src", 1), ("comm_dst", 0), ("comm_tag", 6)]


@pytest.mark.parametrize(
    ("kind", "node_type", "attributes"),
    [
        (Kind.HOST_OP, 4, [("is_cpu_op", True)]),
        (Kind.KERNEL, 4, [("is_cpu_op", False)]),
        (Kind.MEMCPY, 4, [("is_cpu_op", False), ("gpu_op", "memcpy")]),
        (Kind.MEMSET, 4, [("is_cpu_op", False), ("gpu_op", "memset")]),
        (Kind.COLLECTIVE, 7, [("is_cpu_op", False)]),
        (Kind.SEND, 5, [("is_cpu_op", False)]),
        (Kind.RECV, 6, [("is_cpu_op", False)]),
        (Kind.MEM_LOAD, 2, []),
        (Kind.MEM_STORE, 3, []),
        (Kind.METADATA, 1, []),
        (Kind.INVALID, 0, []),
    ],
)
def test_kind(kind: Kind, node_type: int, attributes: list[tuple[str, Any]], tmp_path: Path):
    builder = GraphBuilder()
    builder.add(kind=kind)
    (node,) = written(builder.build(Job()), tmp_path)
    assert (node.type, attributes_of(node)) == (node_type, attributes)
    back = chakra.read(tmp_path / "out.et")
    assert back.node(0).kind is kind
    assert back.nodes.foreign[0] is None


def test_control_edges_are_ctrl_deps_and_all_others_data_deps(tmp_path: Path):
    builder = GraphBuilder()
    for _ in range(4):
        builder.add(kind=Kind.KERNEL)
    builder.edge(2, 3, Reason.STREAM_ORDER)
    builder.edge(1, 3, Reason.CONTROL)
    builder.edge(0, 3, Reason.DATA)
    builder.edge(0, 1, Reason.DATA)
    nodes = written(builder.build(Job()), tmp_path)
    assert (list(nodes[3].ctrl_deps), list(nodes[3].data_deps)) == ([1], [2, 0])
    assert attributes_of(nodes[3])[-1] == ("data_dep_reasons", b"\x02\x00")
    assert attributes_of(nodes[1]) == [("is_cpu_op", False)]
    assert chakra.read(tmp_path / "out.et").edges.of(3) == [
        (1, Reason.CONTROL),
        (2, Reason.STREAM_ORDER),
        (0, Reason.DATA),
    ]


def test_reasons_that_do_not_match_the_edges_are_not_used(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et",
        GlobalMetadata(),
        Node(id=1),
        Node(id=2, data_deps=[1], attr=[attr("data_dep_reasons", bytes_val=b"\x02\x02")]),
        Node(id=3, data_deps=[1], attr=[attr("data_dep_reasons", bytes_val=b"\x07")]),
        Node(id=4, data_deps=[1], attr=[attr("data_dep_reasons", bytes_val=b"\x03")]),
    )
    edges = chakra.read(path).edges
    assert [edges.of(node) for node in (1, 2, 3)] == [
        [(0, Reason.DATA)],
        [(0, Reason.DATA)],
        [(0, Reason.SYNC)],
    ]


# Time


def test_rounding_remainder_is_carried_forward(tmp_path: Path):
    nodes = written(kernels([1400, 1400, 1400, 1400, 1400], stream=7), tmp_path)
    # exact ends 1400, 2800, 4200, 5600, 7000 round to 1, 3, 4, 6, 7
    assert [node.duration_micros for node in nodes] == [1, 2, 1, 2, 1]
    assert chakra.read(tmp_path / "out.et").nodes.duration_ns.tolist() == [1400] * 5


def test_each_lane_carries_its_own_remainder(tmp_path: Path):
    builder = GraphBuilder()
    for stream in (7, 20, 7, 20):
        builder.add(kind=Kind.KERNEL, stream=stream, duration_ns=400)
    for thread in (1, 2, 1, 2):
        builder.add(kind=Kind.HOST_OP, thread=thread, duration_ns=700)
    nodes = written(builder.build(Job()), tmp_path)
    # 400, 800 round to 0, 1; 700, 1400 round to 1, 1
    assert [node.duration_micros for node in nodes] == [0, 0, 1, 1, 1, 1, 0, 0]


def test_whole_microseconds_stay_and_need_no_attribute(tmp_path: Path):
    nodes = written(kernels([600, 5000, 600, 5000]), tmp_path)
    assert [node.duration_micros for node in nodes] == [1, 5, 0, 5]
    assert [attributes_of(node)[1:] for node in nodes] == [
        [("duration_ns", 600)],
        [],
        [("duration_ns", 600)],
        [],
    ]


def test_start_is_floored_and_kept_exactly(tmp_path: Path):
    graph = kernels([0, 0, 0]).with_columns(start_ns=np.array([999, 1000, 1001]))
    nodes = written(graph, tmp_path)
    assert [node.start_time_micros for node in nodes] == [0, 1, 1]
    assert [attributes_of(node)[1:] for node in nodes] == [
        [("start_ns", 999)],
        [],
        [("start_ns", 1001)],
    ]
    assert chakra.read(tmp_path / "out.et").nodes.start_ns.tolist() == [999, 1000, 1001]


def test_times_over_the_range_of_nanoseconds_become_the_largest(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et",
        GlobalMetadata(),
        Node(id=1, duration_micros=2**64 - 1, start_time_micros=9_223_372_036_854_776),
    )
    graph = chakra.read(path)
    assert graph.nodes.duration_ns.tolist() == [2**63 - 1]
    assert graph.nodes.start_ns.tolist() == [2**63 - 1]
    assert written(graph, tmp_path) == nodes_of(path)


# Values that do not fit


@pytest.mark.parametrize(
    ("columns", "code", "names"),
    [
        ({"start_ns": -1}, "chakra-negative-time", ("start_ns is -1",)),
        ({"duration_ns": -5}, "chakra-negative-time", ("duration_ns is -5",)),
        ({"kind": 99}, "chakra-unknown-enum", ("kind is 99", "0 (HOST_OP), 1 (KERNEL)")),
        ({"phase": 4}, "chakra-unknown-enum", ("phase is 4", "0 (NONE), 1 (FORWARD)")),
        ({"evidence": 9}, "chakra-unknown-enum", ("evidence is 9", "0 (NONE), 1 (DATASHEET)")),
        ({"collective": 10}, "chakra-unknown-enum", ("collective is 10", "-1 (NONE)")),
        ({"name": "a\ud800"}, "chakra-not-utf8", ("name", "position 1")),
        ({"module": "\udfff"}, "chakra-not-utf8", ("module", "position 0")),
        ({"input_types": "\udfff"}, "chakra-not-utf8", ("inputs", "position 0")),
    ],
)
def test_value_that_chakra_cannot_hold(
    columns: dict[str, Any], code: str, names: tuple[str, ...], tmp_path: Path
):
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL)
    builder.add(id=3, **({"kind": Kind.KERNEL} | columns))
    with raises_code(code, naming=("node 3: ", *names)):
        builder.build(Job()).write(tmp_path / "out.et")
    assert os.listdir(tmp_path) == []


def test_edge_reason_that_is_none(tmp_path: Path):
    graph = kernels([0, 0])
    edges = type(graph.edges).from_pairs(
        2, np.array([0]), np.array([1]), np.array([17], dtype=np.uint8)
    )
    with raises_code("chakra-unknown-reason", naming=("node 1", "node 0", "17")):
        dataclasses.replace(graph, edges=edges).write(tmp_path / "out.et")


def test_two_nodes_of_one_id_are_not_written(tmp_path: Path):
    builder = GraphBuilder()
    builder.add(id=4, kind=Kind.KERNEL)
    builder.add(id=4, kind=Kind.KERNEL)
    with raises_code("graph-repeated-id", naming="2 nodes have id 4"):
        builder.build(Job()).write(tmp_path / "out.et")


# Records


def test_records(tmp_path: Path):
    other = Node(id=8, name="n", ctrl_deps=[7, 7], data_deps=[99], attr=[attr("empty")])
    path = write_messages(
        tmp_path / "in.et",
        GlobalMetadata(version="0.1", attr=[attr("pid", uint64_val=3)]),
        FOREIGN,
        other,
    )
    records = chakra.read_records(str(path))
    assert (records.path, records.version) == (path, "0.1")
    assert records.metadata == {"pid": chakra.Attribute("uint64_val", 3)}
    first, second = records.nodes
    assert first == chakra.Record(
        position=0,
        id=7,
        name="all_reduce",
        type=7,
        ctrl_deps=(),
        data_deps=(),
        duration_micros=0,
        attributes={
            "rf_id": chakra.Attribute("int64_val", 0),
            "comm_size": chakra.Attribute("float_val", 1.5),
            "pg_name": chakra.Attribute("string_val", ""),
            "comm_type": chakra.Attribute("int64_val", 7),
            "duration_ns": chakra.Attribute("int64_val", 10),
            "stream": chakra.Attribute("int64_val", -1),
            "involved_dim": chakra.Attribute("int32_list", (1, 0)),
        },
    )
    assert (second.position, second.ctrl_deps, second.data_deps) == (1, (7, 7), (99,))
    assert second.attributes == {"empty": chakra.Attribute("", None)}


# Writing is all or nothing


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_file_and_nothing_else(
    interruption: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "out.et"
    path.write_bytes(b"old")

    def fail(source: Path, target: Path) -> None:
        assert source.parent == target.parent == tmp_path
        raise interruption

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(interruption)):
        kernels([1]).write(path)
    assert os.listdir(tmp_path) == ["out.et"]
    assert path.read_bytes() == b"old"


def test_written_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "out.et"
    path.write_bytes(b"old")
    kernels([1000]).write(path)
    assert os.listdir(tmp_path) == ["out.et"]
    assert chakra.read(path).nodes.duration_ns.tolist() == [1000]


def test_device_file_is_written_to_not_replaced():
    kernels([1]).write(os.devnull)
    assert not Path(os.devnull).is_file()


def test_nodes_that_share_a_long_text_are_written_in_chunks(tmp_path: Path):
    builder = GraphBuilder()
    text = "[" + "1, " * 30_000 + "1]"
    for _ in range(400):
        builder.add(kind=Kind.KERNEL, name="multi_tensor_apply_kernel", input_values=text)
    graph, path = builder.build(Job()), tmp_path / "trace.et"
    tracemalloc.start()
    graph.write(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 400 * len(text)  # 36 MB
    assert peak_bytes < 12_000_000
    assert chakra.read(path).text("input_values") == [text] * 400


# The generated code


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None,
    reason="grpcio-tools is not installed (it is in the dev extra)",
)
def test_generated_code_is_what_the_schema_gives(tmp_path: Path):
    command = ["-m", "grpc_tools.protoc", f"-I{SCHEMA_FOLDER}", f"--python_out={tmp_path}"]
    subprocess.run([sys.executable, *command, f"--pyi_out={tmp_path}", "et_def.proto"], check=True)
    for name in ("et_def_pb2.py", "et_def_pb2.pyi"):
        assert (SCHEMA_FOLDER / name).read_text() == (tmp_path / name).read_text()
