"""Chakra as JSON, as Chakra's own jsonizer prints it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError

from onerank.ir.atomic_write import replace_file
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, frame
from onerank.ir.errors import ChakraError, first_line

_HEAD_BYTES = 1 << 16


def to_json(path: str | Path) -> str:
    """Return a Chakra `.et` file as JSON text, the metadata first.

    Raises:
        ChakraError: the file is no Chakra trace.
        OSError: the file cannot be read.
    """
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
    """Write the `.et` file that a Chakra JSON file spells out; return how many nodes it has.

    Raises:
        ChakraError: a value is not JSON, or not what Chakra's schema has in that place.
        OSError: a file cannot be read or written.
    """
    metadata: bytes | None = None
    nodes: list[bytes] = []
    for line, value in _values(source):
        message = GlobalMetadata() if metadata is None else Node()
        try:
            ParseDict(value, message)
        except (ParseError, TypeError, ValueError) as error:
            kind = "metadata" if metadata is None else f"node {len(nodes)}"
            raise ChakraError(
                f"{source}: line {line}: the {kind} is not what Chakra's schema has: {error}",
                code="chakra-json-schema",
            ) from error
        if metadata is None:
            metadata = message.SerializeToString()
        else:
            nodes.append(message.SerializeToString())
    if metadata is None:
        raise ChakraError(
            f"{source}: the file is empty; expected Chakra's messages as JSON",
            code="chakra-json-empty",
        )
    replace_file(target, frame([metadata, *nodes]))
    return len(nodes)


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file and the lines they begin on."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.lstrip()[:1] not in (b"{", b""):
        raise ChakraError(
            f"{path}: line 1: not JSON: expected an object, found {head[:8]!r}",
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
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            # Python refuses numbers of over 4300 digits by a plain ValueError.
            reason = "nested too deep" if isinstance(error, RecursionError) else first_line(error)
            reason = error.msg if isinstance(error, json.JSONDecodeError) else reason
            raise ChakraError(
                f"{path}: line {line}: not JSON: {reason}", code="chakra-json-malformed"
            ) from error
        yield line, value
