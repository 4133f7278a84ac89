"""Chakra files of other tools: what is unchanged is written back byte for byte."""

import dataclasses
from pathlib import Path

import numpy as np
from chakra_files import FOREIGN, attr, nodes_of, write_messages, written
from raised import raises_code

from onerank.ir import (
    Collective,
    Graph,
    Kind,
    chakra,
)
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMP_NODE,
    GlobalMetadata,
    Int32List,
    IOInfo,
    Node,
)
from onerank.ir.chakra.framing import frame, make_raw_node


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
    original = Node(id=1, attr=[attr("comm_size", uint32_val=1)])
    graph = chakra.read(write_messages(tmp_path / "in.et", GlobalMetadata(), original))
    (node,) = written(graph.with_columns(comm_bytes=np.array([2**40])), tmp_path)
    assert list(node.attr) == [attr("comm_size", int64_val=2**40)]


def test_change_next_to_a_negative_start_that_the_file_had(tmp_path: Path):
    original = Node(id=1, start_time_micros=4, attr=[attr("start_ns", int64_val=-9)])
    graph = chakra.read(write_messages(tmp_path / "in.et", GlobalMetadata(), original))
    assert graph.nodes.start_ns.tolist() == [-9]
    (node,) = written(graph.with_columns(name=["n"]), tmp_path)
    assert node == Node(id=1, name="n", start_time_micros=4, attr=[attr("start_ns", int64_val=-9)])
    with raises_code("chakra-negative-time", naming="node 1: start_ns is -8"):
        graph.with_columns(start_ns=np.array([-8])).write(tmp_path / "out.et")


def test_negative_time_in_a_file_of_ours_is_kept(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 1")])
    original = Node(id=1, attr=[attr("start_ns", int64_val=-1)])
    graph = chakra.read(write_messages(tmp_path / "in.et", metadata, original))
    assert graph.nodes.start_ns.tolist() == [-1]
    assert written(graph, tmp_path) == [original]


def test_node_type_that_chakra_does_not_have(tmp_path: Path):
    message = make_raw_node(id=1, type=99).SerializeToString()
    path = tmp_path / "in.et"
    path.write_bytes(frame([b"", message]))
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
    part = dataclasses.replace(
        graph,
        nodes=graph.nodes.take(keep),
        edges=type(graph.edges)(
            np.array([0, 0, 3]), np.array([0, 0, 0]), graph.edges.reason[[3, 4, 5]]
        ),
    )
    assert written(part, tmp_path) == [Node(id=2, attr=[attr("x", string_val="y")]), FROM_2]


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
    message = make_raw_node(
        id=1,
        inputs=[
            IOInfo(values="a", shapes="old").SerializeToString(),
            IOInfo(shapes="new").SerializeToString(),
        ],
    )
    path = tmp_path / "in.et"
    path.write_bytes(frame([b"", message.SerializeToString()]))
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
