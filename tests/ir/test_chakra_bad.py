"""Chakra files that cannot be read: what is said of each."""

from pathlib import Path
from typing import Any

import pytest
from chakra_files import write_messages
from raised import raises_code

from onerank.ir import (
    chakra,
)
from onerank.ir.chakra import EmptyFileError, MissingMetadataError, TruncatedError
from onerank.ir.chakra.et_def_pb2 import (
    COMP_NODE,
    GlobalMetadata,
    Node,
)
from onerank.ir.chakra.framing import frame
from onerank.ir.chakra.records import Attribute, _proto
from onerank.ir.errors import ChakraError

METADATA = frame([GlobalMetadata(version="1.0.0").SerializeToString()])  # 8 bytes
BAD_NAME = b"\x12\x02\xff\xfe"
BAD_FILES: dict[str, tuple[bytes, type[ChakraError], str, str]] = {
    "empty": (
        b"",
        EmptyFileError,
        "chakra-empty-file",
        "",
    ),
    "cut_length": (
        METADATA + b"\x80",
        TruncatedError,
        "chakra-truncated",
        "byte 9",
    ),
    "cut_message": (
        METADATA + b"\x05\x08\x01",
        TruncatedError,
        "chakra-truncated",
        "5 bytes",
    ),
    "long_length": (
        METADATA + b"\xff\xff\xff\xff\xff\x01",
        ChakraError,
        "chakra-message-too-long",
        "message 1 at byte 8",
    ),
    "over_the_limit": (
        METADATA + b"\xff\xff\xff\xff\x0f",
        ChakraError,
        "chakra-message-too-long",
        "message 1 at byte 8",
    ),
    "not_a_node": (
        METADATA + frame([b"\x08\x01", b"\x08"]),
        ChakraError,
        "chakra-bad-node",
        "node 1 (message 2, byte 11)",
    ),
    "bad_attribute": (
        METADATA + frame([b"\x52\x01\x0a"]),
        ChakraError,
        "chakra-bad-node",
        "node 0 (message 1, byte 8)",
    ),
    "bad_operands": (
        METADATA + frame([b"\x42\x01\x0a"]),
        ChakraError,
        "chakra-bad-node",
        "node 0 (message 1, byte 8)",
    ),
    "name_not_utf8": (
        METADATA + frame([BAD_NAME]),
        ChakraError,
        "chakra-bad-node",
        "node 0 (message 1, byte 8)",
    ),
    "node_first": (
        frame([Node(id=1, name="k", type=COMP_NODE).SerializeToString()]),
        MissingMetadataError,
        "chakra-no-metadata",
        "message 0 (byte 0)",
    ),
    "node_of_id_0_first": (
        frame([Node(name="kernel", type=COMP_NODE).SerializeToString()]),
        MissingMetadataError,
        "chakra-no-metadata",
        "message 0 (byte 0)",
    ),
    "neither_first": (
        frame([b"\x0a"]),
        ChakraError,
        "chakra-bad-metadata",
        "message 0 (byte 0)",
    ),
    "gzip": (
        b"\x1f\x8b\x08\x00" + bytes(20),
        ChakraError,
        "chakra-compressed",
        "",
    ),
    "json": (
        b'{\n  "schema": "1.1.1-chakra.0.0.4", "nodes": []\n}\n',
        ChakraError,
        "chakra-is-json",
        "",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("read", [chakra.read, chakra.read_records])
def test_bad_file(name: str, read: Any, tmp_path: Path):
    data, error, code, place = BAD_FILES[name]
    path = tmp_path / f"{name}.et"
    path.write_bytes(data)
    with pytest.raises(ChakraError) as caught:
        read(path)
    assert type(caught.value) is error
    assert caught.value.code == code
    assert str(caught.value).startswith(f"{path}: ")
    assert place in str(caught.value)


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
    with raises_code("graph-repeated-id", naming=(f"{path}: ", "nodes 0 and 2", "id 5")):
        chakra.read(path)
    assert [record.id for record in chakra.read_records(path).nodes] == [5, 0, 5]


@pytest.mark.parametrize("field", ["ctrl_deps", "data_deps"])
def test_edge_to_no_node(field: str, tmp_path: Path):
    waiting = Node(id=6)
    getattr(waiting, field).extend([4, 2**64 - 1])
    path = write_messages(tmp_path / "in.et", GlobalMetadata(), Node(id=4), waiting, Node(id=9))
    with raises_code("graph-dangling-edge", naming=(f"{path}: node 6", f"node {2**64 - 1}")):
        chakra.read(path)


def test_cycle_is_read_and_left_to_the_graph(tmp_path: Path):
    path = write_messages(
        tmp_path / "in.et", GlobalMetadata(), Node(id=1, data_deps=[2]), Node(id=2, data_deps=[1])
    )
    graph = chakra.read(path)
    with raises_code("graph-cycle", naming="node 1 waits for node 2 waits for node 1"):
        graph.topological_order()


def test_a_value_that_its_attribute_cannot_hold():
    with raises_code("chakra-attribute-value", naming=("t.et: node 1", "size", "'many'")):
        _proto("size", Attribute("int64_val", "many"), "t.et: node 1")


def test_a_damaged_name_that_another_overrides_is_refused_when_its_node_changes(tmp_path: Path):
    path, output = tmp_path / "in.et", tmp_path / "out.et"
    node = Node(id=7, name="kernel", type=COMP_NODE, duration_micros=1)
    path.write_bytes(METADATA + frame([BAD_NAME + node.SerializeToString()]))
    graph = chakra.read(path)
    assert graph.text("name") == ["kernel"]
    longer = graph.with_columns(duration_ns=graph.nodes.duration_ns + 1000)
    with raises_code("chakra-bad-node", naming=("node 7",)):
        longer.write(output)
    assert not output.exists()
