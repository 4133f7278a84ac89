"""Chakra as JSON: messages as Chakra's jsonizer prints them, and the graphs its feeder reads.

A jsonizer's file is a sequence of objects: the metadata, then one per node. A feeder's file is one
object with a list `workload_graph` (`src/feeder/json_node.cpp` of mlcommons/chakra).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, frame
from onerank.ir.chakra.metadata import VERSION
from onerank.ir.errors import ChakraError, first_line
from onerank.ir.output_files import replace_file

_HEAD_BYTES = 1 << 16


def to_json(path: str | Path) -> str:
    """Return a Chakra `.et` file as JSON text, the metadata first.

    Raises:
        ChakraError: the file is no Chakra trace.
        OSError: the file cannot be read.
    """
    # Not at the top: its import takes time that only JSON files need.
    from google.protobuf.json_format import MessageToJson

    with ChakraFile(path) as file:
        texts = [MessageToJson(GlobalMetadata.FromString(file.metadata))]
        for number, message in enumerate(file.nodes()):
            try:
                texts.append(MessageToJson(Node.FromString(message)))
            except UNREADABLE as error:
                raise ChakraError(
                    f"{file.place(number)} is not a Chakra Node: {error}", code="chakra-bad-node"
                ) from error
    return "\n".join([*texts, ""])


def from_json(source: Path, target: Path) -> int:
    """Convert a Chakra JSON file to an `.et` file; return its number of nodes.

    Raises:
        ChakraError: a value is not JSON, or does not match Chakra's schema.
        OSError: a file cannot be read or written.
    """
    metadata: bytes | None = None
    nodes: list[bytes] = []
    for line, value in _values(source):
        if metadata is None and _WORKLOAD_GRAPH in value:
            messages = _workload_messages(value, f"{source}: line {line}")
            replace_file(target, frame(messages))
            return len(messages) - 1
        if metadata is None:
            metadata = _parsed(value, GlobalMetadata(), f"{source}: line {line}: the metadata")
        else:
            nodes.append(_parsed(value, Node(), f"{source}: line {line}: the node {len(nodes)}"))
    if not metadata and not nodes:
        raise ChakraError(
            f"{source}: no metadata and no node; expected Chakra's messages as JSON",
            code="chakra-json-empty",
        )
    replace_file(target, frame([metadata or b"", *nodes]))
    return len(nodes)


_WORKLOAD_GRAPH = "workload_graph"

# Key of a node in a feeder's file -> field of Chakra's Node; other keys are attributes.
_NODE_FIELDS = {
    "Id": "id",
    "Name": "name",
    "NodeType": "type",
    "ctrlDeps": "ctrl_deps",
    "data_deps": "data_deps",
    "runtime": "duration_micros",
}

# Number attributes -> their type in Chakra's converter and feeder.
_VARIANTS = {
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_priority": "int32_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
}


def _workload_messages(content: dict[str, Any], place: str) -> list[bytes]:
    """Return the metadata and the nodes of a feeder's file; other keys become attributes."""
    extra_keys = {name: value for name, value in content.items() if name != _WORKLOAD_GRAPH}
    node_list: Any = content[_WORKLOAD_GRAPH]
    if not isinstance(node_list, list):
        raise ChakraError(
            f"{place}: {_WORKLOAD_GRAPH} is not a list of nodes", code="chakra-json-schema"
        )
    records = cast("list[Any]", node_list)
    metadata: Any = {"version": VERSION, "attr": _attributes(extra_keys)}
    messages = [_parsed(metadata, GlobalMetadata(), f"{place}: the metadata")]
    for number, record in enumerate(records):
        where = f"{place}: node {number} of {_WORKLOAD_GRAPH}"
        if not isinstance(record, dict) or "Id" not in record or "NodeType" not in record:
            raise ChakraError(
                f"{where}: expected an object with Id and NodeType", code="chakra-json-schema"
            )
        node = cast("dict[str, Any]", record)
        fields = {field: node[key] for key, field in _NODE_FIELDS.items() if key in node}
        extra_keys = {name: value for name, value in node.items() if name not in _NODE_FIELDS}
        messages.append(_parsed({**fields, "attr": _attributes(extra_keys)}, Node(), where))
    return messages


def _parsed(value: dict[str, Any], message: Any, place: str) -> bytes:
    from google.protobuf.json_format import ParseDict, ParseError

    try:
        ParseDict(value, message)
    except (ParseError, TypeError, ValueError) as error:
        raise ChakraError(
            f"{place} does not match Chakra's schema: {error}", code="chakra-json-schema"
        ) from error
    return message.SerializeToString()


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, **_value(name, value)} for name, value in values.items()]


def _value(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return {"bool_val": value}
    if isinstance(value, int):
        return {_VARIANTS.get(name, "int64_val"): value}
    if isinstance(value, float):
        return {"double_val": value}
    return {"string_val": value if isinstance(value, str) else json.dumps(value)}


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file and the lines they begin on."""
    # Only the head at first: a file that is not JSON may be large.
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.lstrip()[:1] not in (b"{", b""):
        raise ChakraError(
            f"{path}: line 1: not JSON: expected an object, not {head[:8]!r}",
            code="chakra-json-malformed",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChakraError(
            f"{path}: byte {error.start} is not UTF-8; expected JSON", code="chakra-json-not-utf8"
        ) from error
    decoder, position, line, counted = json.JSONDecoder(), 0, 1, 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return
        # From the last place on: counting from the start for each value would take quadratic time.
        line, counted = line + text.count("\n", counted, position), position
        try:
            # Not `json.loads`, which rejects text after the first value: a jsonizer writes a
            # sequence.
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # Python raises a plain ValueError for numbers of more than 4,300 digits.
            reason = "nested too deep" if isinstance(error, RecursionError) else first_line(error)
            reason = error.msg if isinstance(error, json.JSONDecodeError) else reason
            raise ChakraError(
                f"{path}: line {line}: not JSON: {reason}", code="chakra-json-malformed"
            ) from error
        yield line, value
