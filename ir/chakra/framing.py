"""The framing of a Chakra file: length-prefixed messages, read in chunks.

A file is a sequence of varint32 lengths and messages, as Chakra's `encodeMessage` writes them; the
metadata comes first. Errors of unreadable files:

    ChakraError
    ├── EmptyFileError           no message at all
    ├── TruncatedError           the file ends inside a length or a message
    └── MissingMetadataError     the first message is not a GlobalMetadata
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from onerank.ir.arrays import I64
from onerank.ir.chakra.bytes_columns import varint
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.chakra.field_scan import PADDING, Buffer, Spans, cut, packed
from onerank.ir.errors import ChakraError
from onerank.ir.input_files import check_regular

UNREADABLE = (DecodeError, UnicodeDecodeError)
"""Protobuf's exceptions for bytes that are not the expected message."""


class EmptyFileError(ChakraError):
    """The file contains no message at all."""


class TruncatedError(ChakraError):
    """The file ends inside a length or a message."""


class MissingMetadataError(ChakraError):
    """The first message is not a GlobalMetadata."""


def frame(messages: Iterable[bytes]) -> bytes:
    """Return the bytes of a file of `messages`: each after its length as a varint."""
    return b"".join(part for message in messages for part in (varint(len(message)), message))


class RawNode(Protocol):
    """A `Node` whose name, operands and attributes are left as bytes.

    Nested messages, texts and bytes have the same wire type (2), so this class reads the same
    files. Parsing costs less, and repeated attributes are decoded once. `inputs` and `outputs` are
    declared repeated: protobuf merges a message field that occurs several times, and here the
    parts stay separate until the reader merges them.
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
        """Return the same bytes as the `Node` with this content."""
        ...


def _raw_node() -> Any:
    """Return the message class of `RawNode`: Chakra's `Node` with other field types."""
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
        # The enum is not in this file's pool; int32 has the same encoding.
        if spec.name == "type":
            spec.type = field.TYPE_INT32
        spec.ClearField("type_name")
    # A separate pool keeps the second definition out of protobuf's default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("RawNode"))


_CLASS = _raw_node()

make_raw_node = cast("Callable[..., RawNode]", _CLASS)

parse_raw_node = cast("Callable[[bytes], RawNode]", _CLASS.FromString)

BLOCK = 4096
"""Most messages of a block."""


class MessageSource(Protocol):
    """A source of node messages for `decode_nodes.decode`."""

    def blocks(self) -> Iterator[tuple[Buffer, Spans]]:
        """Yield all messages in blocks."""
        ...

    def take(self, rows: I64) -> list[bytes]:
        """Return the messages at some indices, which ascend."""
        ...

    def place(self, node: int) -> str:
        """Return where a message is, as the beginning of an error message."""
        ...


class Packed:
    """Messages in memory."""

    def __init__(self, messages: list[bytes], name: str) -> None:
        self._messages, self._name = messages, name

    def blocks(self) -> Iterator[tuple[Buffer, Spans]]:
        """Yield all messages in blocks."""
        for begin in range(0, len(self._messages), BLOCK):
            yield packed(self._messages[begin : begin + BLOCK])

    def take(self, rows: I64) -> list[bytes]:
        """Return the messages at some indices."""
        return [self._messages[row] for row in rows.tolist()]

    def place(self, node: int) -> str:
        """Return where a message is, as the beginning of an error message."""
        return f"{self._name}[{node}]"


# Bytes read at a time: few enough to stay in a processor's cache.
_CHUNK = 2 << 20

_JSON = re.compile(rb"[{\[]\s*[\"{\[}\]]")

# Bytes of a file that are inspected before the rest is read.
_HEAD_BYTES = 1 << 10

# Leading zero bytes that are refused: empty metadata, then two empty nodes with the same id.
_ZEROS = 3

# Protobuf's own limit, bytes.
_LARGEST_MESSAGE = (1 << 31) - 1


class ChakraFile:
    """An open file. Its metadata has been parsed, its nodes have not.

    Attributes:
        path: path of the file.
        metadata: first message of the file.

    Raises:
        ChakraError: the path is not a regular file, or the file is empty, cut short, compressed,
            JSON, or lacks its metadata.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # The size of a pipe is unknown, and it cannot be read again at an offset.
        check_regular(self.path, error=ChakraError)
        # Unbuffered: chunks are larger than Python's buffer, which would copy every one.
        self._file: BinaryIO = self.path.open("rb", buffering=0)
        try:
            self._size = self._file.seek(0, 2)
            _refuse_early(self.path, self._read(0, _HEAD_BYTES))
            self._starts: list[I64] = []
            self._first: list[I64] = []
            self._last: list[I64] = []
            self._begin = 0
            self.metadata = self._read_metadata()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self) -> Iterator[tuple[Buffer, Spans]]:
        """Yield the node messages in blocks.

        Raises:
            ChakraError: the file ends inside a message, or is damaged.
        """
        self._starts, self._first, self._last = [], [], []
        number, ends_empty = 1, False
        for octets, base, starts in self._chunks(self._begin, number):
            buffer = Buffer(octets)
            begins = np.array(starts, dtype=np.int64)
            lengths = buffer.varints(begins)
            first = begins + lengths.length
            last = first + lengths.value.astype(np.int64)
            # proto3 omits an id of 0, so one empty node is possible; two would share that id. This
            # stops at a file of zeros before it fills the memory.
            is_empty = np.concatenate([[ends_empty], first == last])
            repeated_empty = np.flatnonzero(is_empty[1:] & is_empty[:-1])
            if len(repeated_empty):
                pair = int(repeated_empty[0])
                raise _two_empty(self.path, number + pair - 1, base + starts[pair])
            number, ends_empty = number + len(starts), bool(is_empty[-1])
            self._starts.append(begins + base)
            self._first.append(first + base)
            self._last.append(last + base)
            yield buffer, Spans(first, last)

    def nodes(self) -> Iterator[bytes]:
        """Yield the node messages.

        Raises:
            ChakraError: the file ends inside a message, or is damaged.
        """
        for buffer, spans in self.blocks():
            yield from cut(buffer, spans)

    def take(self, rows: I64) -> list[bytes]:
        """Return the messages at some indices, which ascend. `blocks` must be exhausted before."""
        if not len(rows):
            return []
        first, last = np.concatenate(self._first)[rows], np.concatenate(self._last)[rows]
        messages: list[bytes] = []
        begin = 0
        while begin < len(rows):
            offset = int(first[begin])
            end = max(int(np.searchsorted(last, offset + _CHUNK, side="right")), begin + 1)
            octets = self._read(offset, int(last[end - 1]) - offset)
            spans = zip(first[begin:end].tolist(), last[begin:end].tolist(), strict=True)
            messages += [octets[a - offset : b - offset] for a, b in spans]
            begin = end
        return messages

    def place(self, node: int) -> str:
        """Return the file and the position of a message, as the beginning of an error message."""
        starts = np.concatenate(self._starts)
        return f"{self.path}: node {node} (message {node + 1}, byte {starts[node]})"

    def _read(self, begin: int, size: int) -> bytes:
        self._file.seek(begin)
        # An unbuffered read may return fewer bytes than requested.
        parts = [self._file.read(size)]
        while len(parts[-1]) and sum(map(len, parts)) < size:
            parts.append(self._file.read(size - sum(map(len, parts))))
        return b"".join(parts) if len(parts) > 1 else parts[0]

    def _read_metadata(self) -> bytes:
        if not self._size:
            raise EmptyFileError(
                f"{self.path}: the file is empty; a Chakra trace starts with a GlobalMetadata"
                " message",
                code="chakra-empty-file",
            )
        head = self._read(0, _HEAD_BYTES)
        self._begin = self._needed(head, 0, 0)
        _, first = self._length(head, 0, 0, 0)
        message = self._read(first, self._begin - first)
        _require_metadata(self.path, message)
        return message

    def _chunks(self, begin: int, number: int) -> Iterator[tuple[bytes, int, list[int]]]:
        """Yield (bytes, their offset in the file, offsets of whole messages within the bytes).

        At least `PADDING` bytes follow the last message.
        """
        read_bytes = self._chunk(begin)
        while begin < self._size:
            octets = self._read(begin, read_bytes)
            limit = len(octets) - PADDING
            if begin + len(octets) >= self._size or len(octets) < read_bytes:
                limit, octets = len(octets), octets + bytes(PADDING)
                # The file may have been cut while it is read.
                self._size = begin + limit
            position = 0
            while True:
                starts, end = _boundaries(octets, position, limit)
                if not starts:
                    break
                yield octets, begin, starts
                number += len(starts)
                position = end
            begin += position
            read_bytes = self._chunk(begin)
            # The message at `begin` is longer than a chunk, or its length is damaged.
            if position == 0:
                read_bytes = self._needed(octets[:limit], begin, number) + PADDING

    def _chunk(self, begin: int) -> int:
        """Return how many bytes to read at `begin`."""
        remaining = self._size - begin
        # Every block has a fixed cost, so a remainder below half a chunk joins the last chunk: a
        # capture of 3 MB is one block instead of a second one of 152 nodes.
        return remaining if remaining < _CHUNK * 3 // 2 else _CHUNK

    def _needed(self, octets: bytes, begin: int, number: int) -> int:
        """Return the size of the message at `begin`, its length prefix included."""
        length, first = self._length(octets, 0, begin, number)
        remaining = self._size - begin - first
        if length > remaining:
            raise TruncatedError(
                f"{self.path}: message {number} at byte {begin} declares {length} bytes,"
                f" but the file has {remaining} left; it was cut short,"
                " or is not a Chakra trace",
                code="chakra-truncated",
            )
        return first + length

    def _length(self, octets: bytes, start: int, base: int, message: int) -> tuple[int, int]:
        """Return the length of the message at `start` of `octets`, and where its bytes begin."""
        length = 0
        # A varint32 has at most 5 bytes.
        for place, shift in enumerate(range(0, 35, 7), start):
            if place == len(octets):
                raise TruncatedError(
                    f"{self.path}: the file ends at byte {base + place}, inside the length of"
                    f" message {message} that starts at byte {base + start}; it was cut short:"
                    " copy or write it again",
                    code="chakra-truncated",
                )
            byte = octets[place]
            length |= (byte & 0x7F) << shift
            if byte < 0x80 and length <= _LARGEST_MESSAGE:
                return length, place + 1
            if byte < 0x80:
                break
        raise ChakraError(
            f"{self.path}: the length of message {message} at byte {base + start} is over"
            f" {_LARGEST_MESSAGE} bytes, protobuf's limit; the file is damaged, or is not a Chakra"
            " trace",
            code="chakra-message-too-long",
        )


def _boundaries(octets: bytes, position: int, limit: int) -> tuple[list[int], int]:
    """Return where the messages begin that end at or before `limit`, and where the last ends."""
    starts: list[int] = []
    add = starts.append
    for _ in range(BLOCK):
        # The zero byte after the last message reads as an empty one that ends past the limit.
        size = octets[position]
        if size < 0x80:
            end = position + 1 + size
        else:
            second = octets[position + 1]
            if second < 0x80:
                # 2 bytes of length; its low digit still has the continuation bit: 2 - 128 = -126.
                end = position + size + (second << 7) - 126
            else:
                end = _end_of_long(octets, position)
        if end > limit:
            break
        add(position)
        position = end
    return starts, position


def _end_of_long(octets: bytes, position: int) -> int:
    """Return the end of a message whose length has over two digits; past any limit if damaged."""
    length = 0
    for place in range(5):
        byte = octets[position + place]
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80 and length <= _LARGEST_MESSAGE:
            return position + place + 1 + length
        if byte < 0x80:
            break
    return position + (1 << 62)


def _two_empty(path: Path, message: int, byte: int) -> ChakraError:
    return ChakraError(
        f"{path}: messages {message} and {message + 1} (byte {byte}) are empty, so both would be "
        "nodes with id 0; the file is damaged, or is not a Chakra trace",
        code="chakra-empty-messages",
    )


def _refuse_early(path: Path, data: bytes) -> None:
    """Refuse a file whose first bytes are not a Chakra trace's, before the rest is read."""
    _refuse_other_formats(path, data)
    if data[:_ZEROS] == bytes(_ZEROS):
        raise _two_empty(path, 1, 2)


def _refuse_other_formats(path: Path, data: bytes) -> None:
    if data.startswith(b"\x1f\x8b\x08"):
        raise ChakraError(
            f"{path}: the file is gzip-compressed; gunzip it first, or convert it if it is a "
            "profiler's (`onerank convert`)",
            code="chakra-compressed",
        )
    # A lone "{" is also the length prefix of metadata of 123 bytes, so more must look like JSON.
    if _JSON.match(data):
        text = data[:256].decode("utf-8", "replace")
        if all(char.isprintable() or char in "\t\n\r" for char in text):
            raise ChakraError(
                f"{path}: the file is JSON; expected Chakra's protobuf (.et):"
                " convert the trace first (`onerank convert`)",
                code="chakra-is-json",
            )


def _require_metadata(path: Path, message: bytes) -> None:
    place = f"{path}: message 0 (byte 0)"
    try:
        metadata = GlobalMetadata.FromString(message)
    except UNREADABLE as error:
        if _is_node(message):
            raise _node_first(place) from error
        raise ChakraError(
            f"{place} is not a GlobalMetadata ({error}); the file is damaged, or is not a Chakra "
            "trace",
            code="chakra-bad-metadata",
        ) from error
    # Protobuf may parse a Node as GlobalMetadata: fields with other numbers or wire types become
    # unknown fields.
    if len(UnknownFieldSet(metadata)) and _is_node(message):
        raise _node_first(place)


def _node_first(place: str) -> MissingMetadataError:
    return MissingMetadataError(
        f"{place} is a Node; expected a GlobalMetadata, which must come first: readers interpret"
        " the first message as metadata, and this node would be lost",
        code="chakra-no-metadata",
    )


def _is_node(message: bytes) -> bool:
    try:
        return not len(UnknownFieldSet(Node.FromString(message)))
    except UNREADABLE:
        return False
