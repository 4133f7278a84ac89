"""Messages read and written as columns, compared with protobuf one message at a time.

Input: the nodes of real captures, intact and with one byte changed, removed or inserted.
"""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from raised import raises_code

from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph, StringTable
from onerank.ir.chakra.attributes import whole_micros
from onerank.ir.chakra.bytes_columns import varint, varint_lengths, varints
from onerank.ir.chakra.decode_nodes import Decoded, decode, decode_each
from onerank.ir.chakra.dependencies import dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.et_def_pb2 import AttributeProto, Node
from onerank.ir.chakra.field_scan import PADDING, Buffer
from onerank.ir.chakra.framing import Packed
from onerank.ir.nodes import TEXT_COLUMNS, Nodes

TRACES = Path(__file__).parents[2] / "traces"
EDGES_OF_VARINTS = [0, 1, *(2 ** (7 * n) + d for n in range(1, 9) for d in (-1, 0)), 2**64 - 1]


@pytest.fixture(scope="module")
def captured() -> list[tuple[Graph, list[bytes]]]:
    """Return the graphs of the real captures and their nodes' messages."""
    captures: list[tuple[Graph, list[bytes]]] = []
    for job in sorted(TRACES.glob("*/job.json")):
        graph = convert_directory(job.parent)[0]
        encoder = Encoder(graph.nodes, dependencies(graph.nodes, graph.edges), graph.strings)
        captures.append((graph, encoder.encode(np.arange(len(graph))).cut()))
    return captures


def place(index: int) -> str:
    return f"node {index}"


def assert_same(messages: list[bytes]) -> Decoded:
    """Read messages by columns and by protobuf, and compare; return the result by columns."""
    strings, reference_strings = StringTable(), StringTable()
    read = decode(Packed(messages, "node"), strings)
    nodes, waits = decode_each(messages, reference_strings, place)
    for spec in dataclasses.fields(Nodes):
        actual, expected = getattr(read.nodes, spec.name), getattr(nodes, spec.name)
        if spec.name in TEXT_COLUMNS:
            actual, expected = strings.decode(actual), reference_strings.decode(expected)
        else:
            actual, expected = actual.tolist(), expected.tolist()
        assert actual == expected, spec.name
    for part in ("offsets", "ids", "reason"):
        assert getattr(read.dependencies, part).tolist() == getattr(waits, part).tolist()
    return read


def test_real_nodes_are_read_equally_and_known_to_be_ours(captured):
    for _, messages in captured:
        assert assert_same(messages).exact.all()


def test_bytes_are_those_protobuf_writes(captured):
    for _, messages in captured:
        for message in messages:
            assert Node.FromString(message).SerializeToString(deterministic=True) == message


@pytest.mark.parametrize("seed", range(8))
def test_damaged_nodes_are_read_equally_or_refused_equally(captured, seed):
    """Of 300 nodes, each with one byte changed, those are exact that are written back."""
    rng = random.Random(seed)
    readable: list[bytes] = []
    for _ in range(300):
        message = bytearray(rng.choice(captured[seed % len(captured)][1]))
        position = rng.randrange(len(message))
        match rng.randrange(4):
            case 0:
                message[position] ^= 1 << rng.randrange(8)
            case 1:
                del message[position]
            case 2:
                message.insert(position, rng.randrange(256))
            case _:
                message[position] = rng.randrange(256)
        damaged = bytes(message)
        try:
            Node.FromString(damaged)
        except (DecodeError, UnicodeDecodeError):
            with raises_code("chakra-bad-node", naming="node[0]"):
                decode(Packed([damaged], "node"), StringTable())
        else:
            readable.append(damaged)
    assert len(readable) > 30
    read = assert_same(readable)
    assert_exact_ones_are_written_back(read, readable)


def assert_exact_ones_are_written_back(read: Decoded, messages: list[bytes]) -> None:
    micros = read.duration_micros.astype(np.int64)
    is_exact = read.exact & (whole_micros(read.nodes) == micros)
    rows = np.flatnonzero(is_exact)
    strings = StringTable()
    nodes = decode(Packed(messages, "node"), strings).nodes
    written = Encoder(nodes, read.dependencies, strings).encode(rows).cut()
    assert written == [messages[row] for row in rows]


MESSAGES = {
    "fields out of order": b"\x18\x04\x08\x01",
    "a field twice": b"\x08\x01\x08\x02",
    "an unknown field": b"\x08\x01\x58\x07",
    "a group": b"\x08\x01\x5b\x08\x01\x5c",
    "dependencies that are not packed": b"\x08\x01\x28\x05\x28\x06",
    "dependencies in two parts": b"\x08\x01\x2a\x01\x05\x2a\x01\x06",
    "an empty list of dependencies": b"\x08\x01\x2a\x00",
    "a number of ten bytes": b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    "a number longer than it need be": b"\x08\x81\x00",
    "a length longer than it need be": b"\x12\x81\x00a",
    "a zero that is written": b"\x08\x00\x12\x00",
    "a type that there is not": b"\x18\x63",
    "operands without texts": b"\x42\x00",
    "operands out of order": b"\x42\x06\x12\x01a\x0a\x01b",
    "an attribute within operands": b"\x42\x07\x12\x01a\x52\x02\x48\x07",
    "operands given twice": b"\x42\x03\x0a\x01a\x42\x03\x12\x01b",
    "an attribute without a value": b"\x52\x04\x0a\x02op",
    "an attribute without a name": b"\x52\x02\x48\x07",
    "an empty attribute": b"\x52\x00",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_unusual_messages(name):
    message = MESSAGES[name]
    assert not assert_same([message, b"\x08\x07"]).exact[0]
    Node.FromString(message)  # what protobuf refuses is no test of reading


@pytest.mark.parametrize(
    "attributes",
    [
        [AttributeProto(name="stream", uint32_val=7)],
        [AttributeProto(name="stream", int64_val=7), AttributeProto(name="stream", int64_val=8)],
        [AttributeProto(name="stream", int64_val=7), AttributeProto(name="stream", int32_val=8)],
        [AttributeProto(name="stream", string_val="7")],
        [AttributeProto(name="stream", int64_val=-1)],
        [AttributeProto(name="stream", int64_val=-5)],
        [AttributeProto(name="stream", int64_val=2**62)],
        [AttributeProto(name="samples", int32_val=2**31 - 1)],
        [AttributeProto(name="comm_type", int64_val=10)],
        [AttributeProto(name="op", string_val="")],
        [AttributeProto(name="op", bytes_val=b"aten::mm")],
        [AttributeProto(name="phase", string_val="sideways")],
        [AttributeProto(name="phase", string_val="none")],
        [AttributeProto(name="gpu_op", string_val="memcpy"), AttributeProto(name="is_cpu_op")],
        [AttributeProto(name="is_cpu_op", bool_val=True)] * 2,
        [AttributeProto(name="duration_ns", int64_val=3000)],
        [AttributeProto(name="data_dep_reasons", bytes_val=b"\x01\x02")],
        [AttributeProto(name="data_dep_reasons", bytes_val=b"\x07")],
        [AttributeProto(name="data_dep_reasons", bytes_val=b"\x00")],
        [AttributeProto(name="rf_id", int64_val=5), AttributeProto(name="op", string_val="a")],
        [AttributeProto(name="module", string_val="a"), AttributeProto(name="op", string_val="b")],
        [AttributeProto(name="a name of more than twenty-four bytes", string_val="x")],
        [AttributeProto(name="op", string_val="ä", doc_string="what launched it")],
        [AttributeProto(name=f"x{number}", int64_val=1) for number in range(100)],
    ],
    ids=lambda attributes: attributes[0].name[:12],
)
def test_attributes_that_we_do_not_write(attributes):
    node = Node(id=3, name="n", type=4, data_deps=[1], attr=attributes)
    assert not assert_same([node.SerializeToString(), b""]).exact[0]


def test_texts_that_are_not_utf_8():
    for message in (b"\x12\x01\xff", b"\x42\x03\x0a\x01\xff", b"\x42\x03\x12\x01\xff"):
        with raises_code("chakra-bad-node", naming="node[1]"):
            decode(Packed([b"\x08\x01", message], "node"), StringTable())


def test_varints():
    octets = b"".join(varint(value) for value in EDGES_OF_VARINTS)
    lengths = [len(varint(value)) for value in EDGES_OF_VARINTS]
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    read = Buffer(octets + bytes(PADDING)).varints(first)
    small = [value < 2**56 for value in EDGES_OF_VARINTS]
    assert read.short.tolist() == small
    assert read.minimal[small].all()
    assert read.value[small].tolist() == [v for v in EDGES_OF_VARINTS if v < 2**56]
    assert read.length[small].tolist() == [n for n, s in zip(lengths, small, strict=True) if s]
    digits, sizes = varints(np.array(EDGES_OF_VARINTS, dtype=np.uint64))
    assert sizes.tolist() == lengths
    assert varint_lengths(np.array(EDGES_OF_VARINTS[:-1], dtype=np.int64)).tolist() == lengths[:-1]
    assert b"".join(bytes(row[:n]) for row, n in zip(digits, sizes, strict=True)) == octets


def test_no_messages():
    read = decode(Packed([], "node"), StringTable())
    assert (len(read.nodes), read.dependencies.offsets.tolist()) == (0, [0])


def test_bytes_that_are_types_of_outputs_in_one_message_and_a_field_of_their_own_in_another():
    read = assert_same([b"\x4a\x06\x12\x01a\x1a\x01b", b"\x4a\x03\x12\x01a\x1a\x01b"])
    assert read.nodes.output_shapes[0] == read.nodes.output_shapes[1] > 0
    assert read.nodes.output_types[0] > 0 == read.nodes.output_types[1]
