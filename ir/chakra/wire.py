"""What a file is made of: a varint32 length and a message, repeated; the metadata comes first.

Errors of a file that cannot be read:

    ChakraError
    ├── EmptyFileError           no message at all
    ├── TruncatedError           the file ends inside a length or a message
    └── MissingMetadataError     the first message is not a GlobalMetadata
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from onerank.ir.chakra.et_def_pb2 import Node
from onerank.ir.errors import ChakraError

UNREADABLE = (DecodeError, UnicodeDecodeError)
"""What protobuf raises for bytes that are not the message asked for."""


class EmptyFileError(ChakraError):
    """The file holds no message at all."""


class TruncatedError(ChakraError):
    """The file ends inside a length or a message."""


class MissingMetadataError(ChakraError):
    """The first message is not a GlobalMetadata."""


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
