"""A Chakra file as plain records, to inspect files that do not form a valid graph."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from onerank.ir.chakra.attributes import variant_of
from onerank.ir.chakra.decode_nodes import not_a_node
from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, IOInfo, Node
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, frame, parse_raw_node
from onerank.ir.chakra.metadata import decode_job
from onerank.ir.errors import ChakraError
from onerank.ir.output_files import replace_file


@dataclass(frozen=True, slots=True)
class Attribute:
    """Value of an attribute.

    Attributes:
        variant: its type in the file ("int64_val"), "" when no value is set.
        value: number, bool, str, bytes, a tuple of these for a list, None when not set.
    """

    variant: str
    value: object


@dataclass(frozen=True, slots=True)
class Record:
    """A node as the file has it.

    Attributes:
        position: place among the nodes, from 0.
        id: its id.
        name: its name.
        type: number of Chakra's NodeType.
        ctrl_deps: ids, in the file's order.
        data_deps: ids, in the file's order.
        duration_micros: duration in microseconds.
        attributes: by name; of two with one name, the last.
    """

    position: int
    id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    duration_micros: int
    attributes: dict[str, Attribute]


@dataclass(frozen=True, slots=True)
class ChakraRecords:
    """A file's metadata and nodes.

    Attributes:
        path: the file.
        version: version in the metadata.
        metadata: attributes of the metadata by name; of two with one name, the last.
        nodes: the nodes in the file's order.
    """

    path: Path
    version: str
    metadata: dict[str, Attribute]
    nodes: list[Record]


def read_records(path: str | Path) -> ChakraRecords:
    """Read a Chakra `.et` file without making a graph of it.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        OSError: the file cannot be read.
    """
    parsed: dict[bytes, tuple[str, Attribute]] = {}
    nodes: list[Record] = []
    with ChakraFile(path) as file:
        metadata = GlobalMetadata.FromString(file.metadata)
        decode_job(file.metadata, f"{file.path}: message 0 (byte 0)")
        for position, message in enumerate(file.nodes()):
            try:
                nodes.append(record_of(position, message, parsed))
            except UNREADABLE as error:
                raise not_a_node(file.place(position), error) from error
    attributes = {attribute.name: _attribute(attribute) for attribute in metadata.attr}
    return ChakraRecords(file.path, metadata.version, attributes, nodes)


def write_records(records: ChakraRecords) -> None:
    """Write `records.path`; it appears under its name only when complete.

    Raises:
        ChakraError: a value does not fit its variant or Chakra's schema.
        OSError: the file cannot be written.
    """
    place = str(records.path)
    encoded: dict[tuple[str, str, object], AttributeProto] = {}
    metadata = GlobalMetadata(version=records.version)
    metadata.attr.extend(
        _proto(name, attribute, place) for name, attribute in records.metadata.items()
    )
    messages = [metadata.SerializeToString()]
    for record in records.nodes:
        node = Node(
            id=record.id,
            name=record.name,
            type=cast("Any", record.type),
            ctrl_deps=record.ctrl_deps,
            data_deps=record.data_deps,
            duration_micros=record.duration_micros,
        )
        for name, attribute in record.attributes.items():
            # Nodes repeat most attributes, so each distinct one is built and checked only once.
            key = (name, attribute.variant, attribute.value)
            if key not in encoded:
                encoded[key] = _proto(name, attribute, f"{place}: node {record.id}")
            node.attr.append(encoded[key])
        messages.append(node.SerializeToString())
    replace_file(records.path, frame(messages))


def _proto(name: str, attribute: Attribute, place: str) -> AttributeProto:
    proto = AttributeProto(name=name)
    try:
        if attribute.variant.endswith("_list"):
            getattr(proto, attribute.variant).values.extend(attribute.value)
        elif attribute.variant:
            setattr(proto, attribute.variant, attribute.value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ChakraError(
            f"{place}: attribute {name} cannot hold {attribute.value!r} as {attribute.variant}:"
            f" {error}",
            code="chakra-attribute-value",
        ) from error
    return proto


def record_of(
    position: int, message: bytes, parsed: dict[bytes, tuple[str, Attribute]] | None = None
) -> Record:
    """Return a node's message as a record.

    Args:
        position: its place among the nodes.
        message: its bytes.
        parsed: attributes parsed before, by their bytes; the function adds to it.

    Raises:
        DecodeError, UnicodeDecodeError: the bytes are no Node.
    """
    parsed = {} if parsed is None else parsed
    node = parse_raw_node(message)
    # `parse_raw_node` leaves operands as bytes, so a malformed one fails only when it is parsed.
    for info in (*node.inputs, *node.outputs):
        IOInfo.FromString(info)
    attributes: dict[str, Attribute] = {}
    for content in node.attr:
        entry = parsed.get(content)
        if entry is None:
            proto = AttributeProto.FromString(content)
            entry = parsed[content] = (proto.name, _attribute(proto))
        attributes[entry[0]] = entry[1]
    return Record(
        position,
        node.id,
        node.name.decode(),
        node.type,
        tuple(node.ctrl_deps),
        tuple(node.data_deps),
        node.duration_micros,
        attributes,
    )


def _attribute(proto: AttributeProto) -> Attribute:
    variant = variant_of(proto)
    if not variant:
        return Attribute("", None)
    value = getattr(proto, variant)
    return Attribute(variant, tuple(value.values) if variant.endswith("_list") else value)
