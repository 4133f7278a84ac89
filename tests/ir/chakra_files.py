"""Chakra files for tests: written message by message, and taken apart."""

from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from onerank.ir import (
    Graph,
    GraphBuilder,
    Job,
    Kind,
)
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    AttributeProto,
    Int32List,
    IOInfo,
    Node,
)
from onerank.ir.chakra.framing import ChakraFile, frame


def write_messages(path: Path, *messages: Message) -> Path:
    path.write_bytes(frame(message.SerializeToString() for message in messages))
    return path


def nodes_of(path: Path) -> list[Node]:
    with ChakraFile(path) as file:
        return [Node.FromString(message) for message in file.nodes()]


def metadata_of(path: Path) -> bytes:
    with ChakraFile(path) as file:
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
