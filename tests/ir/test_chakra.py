"""Chakra files: what is written for which column, and what is said of files that are none."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from onerank.ir import (
    Annotation,
    Collective,
    Device,
    Evidence,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    Module,
    Phase,
    Pipeline,
    ProcessGroup,
    RankClass,
    Reason,
    World,
    chakra,
)
from onerank.ir.chakra import EmptyFileError, MissingMetadataError, TruncatedError
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMM_RECV_NODE,
    COMM_SEND_NODE,
    COMP_NODE,
    AttributeProto,
    GlobalMetadata,
    Int32List,
    IOInfo,
    Node,
)
from onerank.ir.chakra.file import File
from onerank.ir.chakra.wire import frame, make_raw_node
from onerank.ir.errors import ChakraError, GraphError

SCHEMA_FOLDER = Path(chakra.__file__).parent


def write_messages(path: Path, *messages: Message) -> Path:
    path.write_bytes(frame(message.SerializeToString() for message in messages))
    return path


def nodes_of(path: Path) -> list[Node]:
    with File(path) as file:
        return [Node.FromString(message) for message in file.nodes()]


def metadata_of(path: Path) -> bytes:
    with File(path) as file:
        return file.metadata


def attributes_of(node: Node) -> list[tuple[str, Any]]:
    return [(a.name, getattr(a, a.WhichOneof("value") or "name")) for a in node.attr]


def written(graph: Graph, folder: Path) -> list[Node]:
    graph.write(folder / "out.et")
    return nodes_of(folder / "out.et")


def kernels(durations: list[int], **columns: Any) -> Graph:
    builder = GraphBuilder()
    for duration in durations:
        builder.add(kind=Kind.KERNEL, duration_ns=duration, **columns)
    return builder.build(Job())


def attr(name: str, **value: Any) -> AttributeProto:
    return AttributeProto(name=name, **value)


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
        Node(id=3, data_deps=[1], attr=[attr("data_dep_reasons", bytes_val=b"\x06")]),
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
    ("columns", "message"),
    [
        (
            {"start_ns": -1},
            "node 3: start_ns is -1; Chakra's times are unsigned: shift the times so that none"
            " is negative",
        ),
        ({"duration_ns": -5}, "node 3: duration_ns is -5; Chakra's times are unsigned"),
        ({"kind": 99}, "node 3: kind is 99; expected one of 0 (HOST_OP), 1 (KERNEL)"),
        ({"phase": 4}, "node 3: phase is 4; expected one of 0 (NONE), 1 (FORWARD)"),
        ({"evidence": 9}, "node 3: evidence is 9; expected one of 0 (NONE), 1 (DATASHEET)"),
        ({"collective": 10}, "node 3: collective is 10; expected one of -1 (NONE)"),
        ({"name": "a\ud800"}, "node 3: name has no UTF-8 form ("),
        ({"module": "\udfff"}, "node 3: module has no UTF-8 form ("),
        ({"input_types": "\udfff"}, "node 3: inputs has no UTF-8 form ("),
    ],
)
def test_value_that_chakra_cannot_hold(columns: dict[str, Any], message: str, tmp_path: Path):
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL)
    builder.add(id=3, **({"kind": Kind.KERNEL} | columns))
    with pytest.raises(ChakraError) as caught:
        builder.build(Job()).write(tmp_path / "out.et")
    assert str(caught.value).startswith(message)
    assert os.listdir(tmp_path) == []


def test_edge_reason_that_is_none(tmp_path: Path):
    graph = kernels([0, 0])
    edges = type(graph.edges).from_pairs(
        2, np.array([0]), np.array([1]), np.array([17], dtype=np.uint8)
    )
    with pytest.raises(ChakraError, match="node 1: edge from node 0 has reason 17; expected one"):
        dataclasses.replace(graph, edges=edges).write(tmp_path / "out.et")


def test_two_nodes_of_one_id_are_not_written(tmp_path: Path):
    builder = GraphBuilder()
    builder.add(id=4, kind=Kind.KERNEL)
    builder.add(id=4, kind=Kind.KERNEL)
    with pytest.raises(GraphError, match="2 nodes have id 4; ids must be unique"):
        builder.build(Job()).write(tmp_path / "out.et")


# The job


JOB = Job(
    world=World({"tp": 4, "dp": 2}),
    rank=3,
    groups=(ProcessGroup("tp", (0, 1, 2, 3), "tp"),),
    device=Device("cuda", "NVIDIA H200", 150, 132),
    measurement=Measurement((5, 6), 7, 8, 9, {"torch": "2.11"}, ("a note",)),
    annotations=(Annotation("h100", "ratio", "NVIDIA H200", {"scaled": [1, 2.5, None]}),),
    modules=(Module("layers.0.fc", "Linear", "mlp", "layers.0"),),
    pipeline=Pipeline(0, (2, 1)),
    classes=(RankClass(3, {"pp": (0,)}),),
)


def test_job_is_the_metadata(tmp_path: Path):
    GraphBuilder().build(JOB).write(tmp_path / "out.et")
    metadata = GlobalMetadata.FromString(metadata_of(tmp_path / "out.et"))
    assert metadata == GlobalMetadata(
        version="1.0.0",
        attr=[
            attr("schema", string_val="onerank 1"),
            attr("world", string_val='{"sizes":{"tp":4,"dp":2}}'),
            attr("rank", string_val="3"),
            attr("process_groups", string_val='[{"name":"tp","ranks":[0,1,2,3],"axis":"tp"}]'),
            attr(
                "device",
                string_val='{"type":"cuda","name":"NVIDIA H200","memory_bytes":150,"sm_count":132}',
            ),
            attr(
                "measurement",
                string_val='{"step_ns":[5,6],"profiled_step_ns":7,"peak_memory_bytes":8,'
                '"start_memory_bytes":9,"versions":{"torch":"2.11"},"notes":["a note"]}',
            ),
            attr(
                "annotations",
                string_val='[{"target":"h100","model":"ratio","source":"NVIDIA H200",'
                '"details":{"scaled":[1,2.5,null]}}]',
            ),
            attr(
                "modules",
                string_val='[{"path":"layers.0.fc","type":"Linear","role":"mlp",'
                '"layer":"layers.0"}]',
            ),
            attr("pipeline", string_val='{"stage":0,"layers":[2,1]}'),
            attr("rank_classes", string_val='[{"representative":3,"where":{"pp":[0]}}]'),
        ],
    )
    back = chakra.read(tmp_path / "out.et")
    assert (back.job, back.foreign, len(back)) == (JOB, None, 0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (attr("world", string_val='{"sizes":{"tp":"four"}}'), "Expected `int`, got `str`"),
        (attr("world", string_val="{"), "Input data was truncated"),
        (attr("world", int64_val=8), "its type is int64_val, not string_val"),
        (attr("world"), "its type is not set, not string_val"),
    ],
)
def test_job_attribute_of_ours_that_does_not_decode(
    given: AttributeProto, reason: str, tmp_path: Path
):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 1"), given])
    path = write_messages(tmp_path / "in.et", metadata)
    for read in (chakra.read, chakra.read_records):
        with pytest.raises(ChakraError) as caught:
            read(path)
        assert str(caught.value).startswith(
            f"{path}: message 0 (byte 0): metadata attribute 'world' is not what onerank writes"
            f" there: {reason}"
        )


def test_same_attribute_in_another_tools_file_is_left_alone(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("world", int64_val=8), attr("device", string_val="x")])
    path = write_messages(tmp_path / "in.et", metadata)
    graph = chakra.read(path)
    assert graph.job == Job()
    graph.write(tmp_path / "out.et")
    assert metadata_of(tmp_path / "out.et") == metadata.SerializeToString()


def test_changed_job_is_written_into_another_tools_metadata(tmp_path: Path):
    metadata = GlobalMetadata(
        version="9", attr=[attr("world", int64_val=8), attr("rank", string_val="1")]
    )
    path = write_messages(tmp_path / "in.et", metadata)
    graph = chakra.read(path)
    assert graph.job.rank == 1
    changed = dataclasses.replace(graph, job=Job(world=World({"tp": 2}), rank=5))
    changed.write(tmp_path / "out.et")
    assert GlobalMetadata.FromString(metadata_of(tmp_path / "out.et")) == GlobalMetadata(
        version="9",
        attr=[
            attr("world", int64_val=8),
            attr("rank", string_val="5"),
            attr("world", string_val='{"sizes":{"tp":2}}'),
        ],
    )
    assert chakra.read(tmp_path / "out.et").job == changed.job


def test_file_of_a_later_schema(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 2")])
    path = write_messages(tmp_path / "in.et", metadata)
    with pytest.raises(ChakraError, match="schema 'onerank 2', this onerank reads 'onerank 1'"):
        chakra.read(path)


def test_job_without_json_form(tmp_path: Path):
    job = Job(annotations=(Annotation("t", "m", "s", {"bad": object()}),))
    with pytest.raises(ChakraError, match="the job's annotations has no JSON form"):
        GraphBuilder().build(job).write(tmp_path / "out.et")


# Files of other tools


FOREIGN = Node(
    id=7,
    name="all_reduce",
    type=COMM_COLL_NODE,
    duration_micros=0,
    inputs=IOInfo(),
    attr=[
        attr("rf_id", int64_val=0),
        attr("comm_size", uint64_val=1024, doc_string="bytes"),
        attr("pg_name", string_val=""),
        attr("comm_size", float_val=1.5),
        attr("comm_type", int64_val=0),
        attr("duration_ns", int64_val=10),
        attr("stream", int64_val=-1),
        attr("involved_dim", int32_list=Int32List(values=[1, 0])),
        attr("comm_type", int64_val=7),
    ],
)


def foreign_graph(folder: Path) -> Graph:
    return chakra.read(write_messages(folder / "in.et", GlobalMetadata(version="0"), FOREIGN))


def test_columns_of_another_tools_node(tmp_path: Path):
    node = foreign_graph(tmp_path).node(0)
    assert node.collective is Collective.REDUCE_SCATTER
    assert (node.value("comm_bytes"), node.duration_ns, node.value("stream")) == (1024, 10, -1)


def test_unchanged_node_is_written_as_it_was(tmp_path: Path):
    assert written(foreign_graph(tmp_path), tmp_path) == [FOREIGN]


def test_changed_columns_are_written_where_they_stood(tmp_path: Path):
    graph = foreign_graph(tmp_path).with_columns(
        duration_ns=np.array([2600]),
        comm_bytes=np.array([2048]),
        flops=np.array([5]),
        group=["tp"],
        collective=np.array([-1]),
    )
    (node,) = written(graph, tmp_path)
    assert node == Node(
        id=7,
        name="all_reduce",
        type=COMM_COLL_NODE,
        duration_micros=3,
        inputs=IOInfo(),
        attr=[
            attr("rf_id", int64_val=0),
            attr("comm_size", uint64_val=2048, doc_string="bytes"),
            attr("pg_name", string_val="tp"),
            attr("comm_size", float_val=1.5),
            attr("duration_ns", int64_val=2600),
            attr("stream", int64_val=-1),
            attr("involved_dim", int32_list=Int32List(values=[1, 0])),
            attr("flops", int64_val=5),
        ],
    )


def test_integer_too_large_for_the_type_it_had_gets_ours(tmp_path: Path):
    given = Node(id=1, attr=[attr("comm_size", uint32_val=1)])
    graph = chakra.read(write_messages(tmp_path / "in.et", GlobalMetadata(), given))
    (node,) = written(graph.with_columns(comm_bytes=np.array([2**40])), tmp_path)
    assert list(node.attr) == [attr("comm_size", int64_val=2**40)]


def test_change_beside_a_negative_start_that_the_file_had(tmp_path: Path):
    given = Node(id=1, start_time_micros=4, attr=[attr("start_ns", int64_val=-9)])
    graph = chakra.read(write_messages(tmp_path / "in.et", GlobalMetadata(), given))
    assert graph.nodes.start_ns.tolist() == [-9]
    (node,) = written(graph.with_columns(name=["n"]), tmp_path)
    assert node == Node(id=1, name="n", start_time_micros=4, attr=[attr("start_ns", int64_val=-9)])
    with pytest.raises(ChakraError, match="node 1: start_ns is -8"):
        graph.with_columns(start_ns=np.array([-8])).write(tmp_path / "out.et")


def test_negative_time_in_a_file_of_ours_is_kept(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 1")])
    given = Node(id=1, attr=[attr("start_ns", int64_val=-1)])
    graph = chakra.read(write_messages(tmp_path / "in.et", metadata, given))
    assert graph.nodes.start_ns.tolist() == [-1]
    assert written(graph, tmp_path) == [given]


def test_node_type_that_chakra_does_not_have(tmp_path: Path):
    given = make_raw_node(id=1, type=99).SerializeToString()
    path = tmp_path / "in.et"
    path.write_bytes(frame([b"", given]))
    graph = chakra.read(path)
    assert graph.node(0).kind is Kind.INVALID
    graph.write(tmp_path / "out.et")
    assert (tmp_path / "out.et").read_bytes() == path.read_bytes()


def test_part_of_a_foreign_graph_loses_the_edges_it_lost(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et",
        GlobalMetadata(),
        Node(id=1),
        Node(id=2, ctrl_deps=[1, 1], data_deps=[1], attr=[attr("x", string_val="y")]),
        Node(id=3, ctrl_deps=[2], data_deps=[2, 2]),
    )
    graph = chakra.read(path)
    assert written(graph, tmp_path) == nodes_of(path)
    keep = np.array([1, 2])
    rest = dataclasses.replace(
        graph,
        nodes=graph.nodes.take(keep),
        edges=type(graph.edges)(
            np.array([0, 0, 3]), np.array([0, 0, 0]), graph.edges.reason[[3, 4, 5]]
        ),
    )
    assert written(rest, tmp_path) == [Node(id=2, attr=[attr("x", string_val="y")]), FROM_2]


FROM_2 = Node(id=3, ctrl_deps=[2], data_deps=[2, 2])


def test_node_without_is_cpu_op_is_a_kernel_as_astra_sim_takes_it(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et",
        GlobalMetadata(),
        Node(id=1, type=COMP_NODE),
        Node(id=2, type=COMP_NODE, attr=[attr("is_cpu_op", bool_val=True)]),
        Node(id=3, type=COMP_NODE, attr=[attr("is_cpu_op", int32_val=1)]),
        Node(id=4, type=COMM_COLL_NODE, attr=[attr("is_cpu_op", bool_val=True)]),
    )
    kinds = [node.kind for node in chakra.read(path)]
    assert kinds == [Kind.KERNEL, Kind.HOST_OP, Kind.HOST_OP, Kind.COLLECTIVE]


def test_operands_given_in_pieces_are_merged(tmp_path: Path):
    given = make_raw_node(
        id=1,
        inputs=[
            IOInfo(values="a", shapes="old").SerializeToString(),
            IOInfo(shapes="new").SerializeToString(),
        ],
    )
    path = tmp_path / "in.et"
    path.write_bytes(frame([b"", given.SerializeToString()]))
    graph = chakra.read(path)
    assert (graph.text("input_values"), graph.text("input_shapes")) == (["a"], ["new"])


def test_file_of_metadata_alone(tmp_path: Path):
    path = write_messages(tmp_path / "in.et", GlobalMetadata(version="1.0.0"))
    assert len(chakra.read(path)) == 0


def test_bytes_of_a_node_and_of_its_raw_form_are_the_same():
    raw = make_raw_node(
        id=FOREIGN.id,
        name=b"all_reduce",
        type=FOREIGN.type,
        inputs=[b""],
        attr=[given.SerializeToString() for given in FOREIGN.attr],
    )
    assert raw.SerializeToString() == FOREIGN.SerializeToString()


# Files that cannot be read


METADATA = frame([GlobalMetadata(version="1.0.0").SerializeToString()])  # 8 bytes
BAD_NAME = b"\x12\x02\xff\xfe"
BAD_FILES: dict[str, tuple[bytes, type[ChakraError], str]] = {
    "empty": (
        b"",
        EmptyFileError,
        "the file is empty; a Chakra trace starts with a GlobalMetadata message",
    ),
    "cut_length": (
        METADATA + b"\x80",
        TruncatedError,
        "the file ends at byte 9, inside the length of message 1 that starts at byte 8; it was"
        " cut short, copy or write it again",
    ),
    "cut_message": (
        METADATA + b"\x05\x08\x01",
        TruncatedError,
        "message 1 at byte 8 is 5 bytes long by its own account, but 2 are left in the file; it"
        " was cut short, or is no Chakra trace",
    ),
    "long_length": (
        METADATA + b"\xff\xff\xff\xff\xff\x01",
        ChakraError,
        "the length of message 1 at byte 8 is over 2147483647 bytes, protobuf's limit; the file"
        " is damaged, or is no Chakra trace",
    ),
    "over_the_limit": (
        METADATA + b"\xff\xff\xff\xff\x0f",
        ChakraError,
        "the length of message 1 at byte 8 is over 2147483647 bytes, protobuf's limit",
    ),
    "not_a_node": (
        METADATA + frame([b"\x08\x01", b"\x08"]),
        ChakraError,
        "node 1 (message 2, byte 11) is not a Chakra Node: ",
    ),
    "bad_attribute": (
        METADATA + frame([b"\x52\x01\x0a"]),
        ChakraError,
        "node 0 (message 1, byte 8) is not a Chakra Node: ",
    ),
    "bad_operands": (
        METADATA + frame([b"\x42\x01\x0a"]),
        ChakraError,
        "node 0 (message 1, byte 8) is not a Chakra Node: ",
    ),
    "name_not_utf8": (
        METADATA + frame([BAD_NAME]),
        ChakraError,
        "node 0 (message 1, byte 8) is not a Chakra Node: a text in it is not UTF-8 ",
    ),
    "node_first": (
        frame([Node(id=1, name="k", type=COMP_NODE).SerializeToString()]),
        MissingMetadataError,
        "message 0 (byte 0) is a Node; expected a GlobalMetadata, which must come first",
    ),
    "node_of_id_0_first": (
        frame([Node(name="kernel", type=COMP_NODE).SerializeToString()]),
        MissingMetadataError,
        "message 0 (byte 0) is a Node; expected a GlobalMetadata, which must come first",
    ),
    "neither_first": (
        frame([b"\x0a"]),
        ChakraError,
        "message 0 (byte 0) is not a GlobalMetadata (",
    ),
    "gzip": (
        b"\x1f\x8b\x08\x00" + bytes(20),
        ChakraError,
        "the file is gzip-compressed; gunzip it first",
    ),
    "json": (
        b'{\n  "schema": "1.1.1-chakra.0.0.4", "nodes": []\n}\n',
        ChakraError,
        "the file is JSON; expected Chakra's protobuf (.et): convert the trace first",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("read", [chakra.read, chakra.read_records])
def test_bad_file(name: str, read: Any, tmp_path: Path):
    data, error, message = BAD_FILES[name]
    path = tmp_path / f"{name}.et"
    path.write_bytes(data)
    with pytest.raises(ChakraError) as caught:
        read(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: {message}")


def test_metadata_with_fields_of_a_later_chakra_is_metadata(tmp_path: Path):
    path = tmp_path / "in.et"
    path.write_bytes(frame([b"\x0a\x031.1\x5a\x01x"]))  # field 11, a text
    graph = chakra.read(path)
    graph.write(tmp_path / "out.et")
    assert (tmp_path / "out.et").read_bytes() == path.read_bytes()


def test_metadata_of_123_bytes_is_not_taken_for_json(tmp_path: Path):
    path = write_messages(tmp_path / "in.et", GlobalMetadata(version="v" * 121))
    assert path.read_bytes()[:1] == b"{"
    assert chakra.read_records(path).version == "v" * 121


def test_two_nodes_of_one_id(tmp_path: Path):
    path = write_messages(tmp_path / "in.et", GlobalMetadata(), Node(id=5), Node(), Node(id=5))
    with pytest.raises(GraphError) as caught:
        chakra.read(path)
    assert str(caught.value) == (
        f"{path}: nodes 0 and 2 of the file both have id 5; ids must be unique, number them again"
    )
    assert [record.id for record in chakra.read_records(path).nodes] == [5, 0, 5]


@pytest.mark.parametrize("field", ["ctrl_deps", "data_deps"])
def test_edge_to_no_node(field: str, tmp_path: Path):
    waiting = Node(id=6)
    getattr(waiting, field).extend([4, 2**64 - 1])
    path = write_messages(tmp_path / "in.et", GlobalMetadata(), Node(id=4), waiting, Node(id=9))
    with pytest.raises(GraphError) as caught:
        chakra.read(path)
    assert str(caught.value) == (
        f"{path}: node 6 waits for node {2**64 - 1}, which is not in the file (1 such edges);"
        " add the node or drop the edge"
    )


def test_cycle_is_read_and_left_to_the_graph(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et", GlobalMetadata(), Node(id=1, data_deps=[2]), Node(id=2, data_deps=[1])
    )
    graph = chakra.read(path)
    with pytest.raises(GraphError, match="node 1 waits for node 2 waits for node 1"):
        graph.topological_order()


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


def test_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "out.et"
    path.write_bytes(b"old")
    kernels([1000]).write(path)
    assert os.listdir(tmp_path) == ["out.et"]
    assert chakra.read(path).nodes.duration_ns.tolist() == [1000]


def test_device_file_is_written_to_not_replaced():
    kernels([1]).write(os.devnull)
    assert not Path(os.devnull).is_file()


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
