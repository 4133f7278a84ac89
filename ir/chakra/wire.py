"""The file: a varint32 length and a message, repeated; the first message is the metadata.

Errors of a file that cannot be read:

    ChakraError
    ├── EmptyFileError           no message at all
    ├── TruncatedError           the file ends inside a length or a message
    └── MissingMetadataError     the first message is not a GlobalMetadata
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.edges import I64
from onerank.ir.errors import ChakraError

UNREADABLE = (DecodeError, UnicodeDecodeError)
"""What protobuf raises for bytes that are not the message asked for."""

_JSON = re.compile(rb"[{\[]\s*[\"{\[}\]]")

_HEAD_BYTES = 1 << 10
_ZEROS = 3  # empty metadata, and two nodes alike
_LARGEST_MESSAGE = (1 << 31) - 1
"""Protobuf's own limit, bytes."""


class EmptyFileError(ChakraError):
    """The file holds no message at all."""


class TruncatedError(ChakraError):
    """The file ends inside a length or a message."""


class MissingMetadataError(ChakraError):
    """The first message is not a GlobalMetadata."""


@dataclass(frozen=True, slots=True)
class Messages:
    """A file and where its messages lie: the metadata, and one per node.

    Attributes:
        path: the file.
        octets: its bytes.
        first: byte at which each message begins, that of the metadata first, int64[n + 1].
        last: byte behind each message, int64[n + 1].
    """

    path: Path
    octets: bytes
    first: I64
    last: I64

    @property
    def metadata(self) -> bytes:
        """First message."""
        return self.octets[self.first[0] : self.last[0]]

    @property
    def nodes(self) -> list[bytes]:
        """The others, in order."""
        spans = zip(self.first[1:].tolist(), self.last[1:].tolist(), strict=True)
        return [self.octets[a:b] for a, b in spans]

    def place(self, node: int) -> str:
        """Name the file and the place of a node's message in it, to begin an error with."""
        return f"{self.path}: node {node} (message {node + 1}, byte {self.last[node]})"


def split(path: str | Path) -> Messages:
    """Read a file and cut it into messages; the metadata is known to parse, the nodes are not.

    Raises:
        ChakraError: the file is empty, cut short, compressed, JSON, or lacks its metadata.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        _refuse_early(path, file.read(_HEAD_BYTES))
    data = path.read_bytes()
    first: list[int] = []
    last: list[int] = []
    position, size = 0, len(data)
    while position < size:
        start = position
        length = data[position]
        position += 1
        if length > 0x7F:
            if position < size and data[position] < 0x80:
                length += (data[position] << 7) - 0x80
                position += 1
            else:
                length, position = _length(path, data, start, len(first))
        if length > size - position:
            raise TruncatedError(
                f"{path}: message {len(first)} at byte {start} is {length} bytes long by its"
                f" own account, but {size - position} are left in the file; it was cut short,"
                " or is no Chakra trace"
            )
        if length == 0 and len(first) > 1 and first[-1] == last[-1]:
            raise _two_empty(path, len(first) - 1, start)
        first.append(position)
        position += length
        last.append(position)
    if not first:
        raise EmptyFileError(
            f"{path}: the file is empty; a Chakra trace starts with a GlobalMetadata message"
        )
    messages = Messages(path, data, np.array(first), np.array(last))
    _require_metadata(path, messages.metadata)
    return messages


def _length(path: Path, data: bytes, start: int, message: int) -> tuple[int, int]:
    """Return the length of a message, and where it begins."""
    length = 0
    for place, shift in enumerate(range(0, 35, 7), start):
        if place == len(data):
            raise TruncatedError(
                f"{path}: the file ends at byte {place}, inside the length of message"
                f" {message} that starts at byte {start}; it was cut short,"
                " copy or write it again"
            )
        byte = data[place]
        length |= (byte & 0x7F) << shift
        if byte < 0x80 and length <= _LARGEST_MESSAGE:
            return length, place + 1
        if byte < 0x80:
            break
    raise _too_long(path, message, start)


def _too_long(path: Path, message: int, start: int) -> ChakraError:
    return ChakraError(
        f"{path}: the length of message {message} at byte {start} is over {_LARGEST_MESSAGE}"
        " bytes, protobuf's limit; the file is damaged, or is no Chakra trace"
    )


def _two_empty(path: Path, message: int, byte: int) -> ChakraError:
    return ChakraError(
        f"{path}: messages {message} and {message + 1} (byte {byte}) are empty, so that both "
        "would be a node of id 0; the file is damaged, or is no Chakra trace"
    )


def _refuse_early(path: Path, data: bytes) -> None:
    """Refuse what the first bytes show to be no Chakra trace, before the rest is read."""
    _refuse_other_formats(path, data)
    if data[:_ZEROS] == bytes(_ZEROS):
        raise _two_empty(path, 1, 2)


def _refuse_other_formats(path: Path, data: bytes) -> None:
    if data.startswith(b"\x1f\x8b\x08"):
        raise ChakraError(f"{path}: the file is gzip-compressed; gunzip it first")
    if _JSON.match(data):  # "{" alone may be the length, 123, of the metadata
        text = data[:256].decode("utf-8", "replace")
        if all(char.isprintable() or char in "\t\n\r" for char in text):
            raise ChakraError(
                f"{path}: the file is JSON; expected Chakra's protobuf (.et):"
                " convert the trace first"
            )


def _require_metadata(path: Path, message: bytes) -> None:
    place = f"{path}: message 0 (byte 0)"
    try:
        metadata = GlobalMetadata.FromString(message)
    except UNREADABLE as error:
        if _is_node(message):
            raise _node_first(place) from error
        raise ChakraError(
            f"{place} is not a GlobalMetadata ({error}); the file is damaged, or is no Chakra trace"
        ) from error
    if len(UnknownFieldSet(metadata)) and _is_node(message):
        raise _node_first(place)


def _node_first(place: str) -> MissingMetadataError:
    return MissingMetadataError(
        f"{place} is a Node; expected a GlobalMetadata, which must come first: readers take the"
        " first message for it whatever it is, and this node would be lost"
    )


def _is_node(message: bytes) -> bool:
    try:
        return not len(UnknownFieldSet(Node.FromString(message)))
    except UNREADABLE:
        return False


def frame(messages: Iterable[bytes]) -> bytes:
    """Return the bytes of a file that holds `messages`, each behind its length."""
    parts: list[bytes] = []
    for message in messages:
        length = len(message)
        while length > 0x7F:
            parts.append(_BYTES[length & 0x7F | 0x80])
            length >>= 7
        parts.append(_BYTES[length])
        parts.append(message)
    return b"".join(parts)


_BYTES = [bytes((value,)) for value in range(256)]


class RawNode(Protocol):
    """A `Node` whose name, operands and attributes are left as bytes.

    A nested message and a bytes field look the same in a file, so parsing this costs less, and
    attributes that repeat need decoding once. `inputs` and `outputs` are repeated: the parts of
    a message given in pieces are merged by joining them.
    """

    id: int
    name: bytes
    type: int
    ctrl_deps: list[int]
    data_deps: list[int]
    start_time_micros: int
    duration_micros: int
    inputs: list[bytes]
    outputs: list[bytes]
    attr: list[bytes]

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes, those of the `Node` with the same content."""
        ...


def _raw_node() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="onerank/raw_node.proto", syntax="proto3")
    message = file.message_type.add()
    Node.DESCRIPTOR.CopyToProto(message)
    message.name = "RawNode"
    for spec in message.field:
        if spec.name in ("name", "inputs", "outputs", "attr"):
            spec.type = field.TYPE_BYTES
        if spec.name in ("inputs", "outputs"):
            spec.label = field.LABEL_REPEATED
        if spec.name == "type":
            spec.type = field.TYPE_INT32
        spec.ClearField("type_name")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("RawNode"))


_CLASS = _raw_node()
make_raw_node = cast("Callable[..., RawNode]", _CLASS)
parse_raw_node = cast("Callable[[bytes], RawNode]", _CLASS.FromString)
