"""A Chakra file as plain records, to inspect files that do not form a valid graph."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from onerank.ir.atomic_write import replace_file
from onerank.ir.chakra.attributes import variant_of
from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, IOInfo, Node
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, frame, parse_raw_node
from onerank.ir.chakra.metadata import decode_job
from onerank.ir.chakra.reader import not_a_node
from onerank.ir.errors import ChakraError


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
class Records:
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


def read_records(path: str | Path) -> Records:
    """Read a Chakra `.et` file without making a graph of it.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        OSError: the file cannot be read.
    """
    seen: dict[bytes, tuple[str, Attribute]] = {}
    nodes: list[Record] = []
    with ChakraFile(path) as file:
        metadata = GlobalMetadata.FromString(file.metadata)
        decode_job(file.metadata, f"{file.path}: message 0 (byte 0)")
        for position, message in enumerate(file.nodes()):
            try:
                nodes.append(record_of(position, message, seen))
            except UNREADABLE as error:
                raise not_a_node(file.place(position), error) from error
    attributes = {given.name: _attribute(given) for given in metadata.attr}
    return Records(file.path, metadata.version, attributes, nodes)


def write_records(records: Records) -> None:
    """Write `records.path`; it appears under its name only when complete.

    Raises:
        ChakraError: a value does not fit its variant or Chakra's schema.
        OSError: the file cannot be written.
    """
    place = str(records.path)
    encoded: dict[tuple[str, str, object], AttributeProto] = {}
    metadata = GlobalMetadata(version=records.version)
    metadata.attr.extend(_proto(name, given, place) for name, given in records.metadata.items())
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
        for name, given in record.attributes.items():
            key = (name, given.variant, given.value)
            if key not in encoded:
                encoded[key] = _proto(name, given, f"{place}: node {record.id}")
            node.attr.append(encoded[key])
        messages.append(node.SerializeToString())
    replace_file(records.path, frame(messages))


def _proto(name: str, given: Attribute, place: str) -> AttributeProto:
    proto = AttributeProto(name=name)
    try:
        if given.variant.endswith("_list"):
            getattr(proto, given.variant).values.extend(given.value)
        elif given.variant:
            setattr(proto, given.variant, given.value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ChakraError(
            f"{place}: attribute {name} cannot hold {given.value!r} as {given.variant}: {error}",
            code="chakra-attribute-value",
        ) from error
    return proto


def record_of(
    position: int, message: bytes, seen: dict[bytes, tuple[str, Attribute]] | None = None
) -> Record:
    """Return a node's message as a record.

    Args:
        position: its place among the nodes.
        message: its bytes.
        seen: attributes read before, by their bytes; grows.

    Raises:
        DecodeError, UnicodeDecodeError: the bytes are no Node.
    """
    seen = {} if seen is None else seen
    node = parse_raw_node(message)
    for info in (*node.inputs, *node.outputs):
        IOInfo.FromString(info)
    attributes: dict[str, Attribute] = {}
    for content in node.attr:
        entry = seen.get(content)
        if entry is None:
            given = AttributeProto.FromString(content)
            entry = seen[content] = (given.name, _attribute(given))
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


def _attribute(given: AttributeProto) -> Attribute:
    variant = variant_of(given)
    if not variant:
        return Attribute("", None)
    value = getattr(given, variant)
    return Attribute(variant, tuple(value.values) if variant.endswith("_list") else value)
