"""Files of ranks that run the same step: find the differences, and patch a template for each rank.

The nodes of such files are equal except for the attributes that name a group or a peer. If the
template, filled with another rank's groups and peers, equals that rank's file byte for byte, the
file needs no parsing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.ir.arrays import I64, U8
from onerank.ir.chakra.bytes_columns import nested, varint
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMM_RECV_NODE,
    COMM_SEND_NODE,
    AttributeProto,
)
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, parse_raw_node
from onerank.ir.chakra.records import Record, record_of


@dataclass(frozen=True, slots=True)
class _Layout:
    """The bytes of a file for one combination of ending sizes.

    Attributes:
        octets: bytes of the file.
        places: per slot, the position of each byte of each of its endings, int64[size, endings].
        values: current value of each slot.
    """

    octets: U8
    places: list[I64]
    values: list[bytes]


class Template:
    """Messages of which some end in bytes that differ from rank to rank.

    Args:
        messages: the metadata and the nodes; messages with a slot come without their ending.
        slots: index of a message -> index of the value that it ends in.
    """

    def __init__(self, messages: Sequence[bytes], slots: Mapping[int, int]) -> None:
        self._slots = sorted(slots.items())
        self._messages = [messages[place] for place, _ in self._slots]
        self._between: list[bytes] = []
        begin = 0
        for place, _ in [*self._slots, (len(messages), 0)]:
            framed = (varint(len(message)) + message for message in messages[begin:place])
            self._between.append(b"".join(framed))
            begin = place + 1
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def fill(self, values: Sequence[bytes]) -> U8:
        """Return the file's bytes with `values[slot]` as endings.

        The next call may overwrite the returned array.
        """
        sizes = tuple(len(value) for value in values)
        if sizes not in self._layouts:
            self._layouts[sizes] = self._lay(sizes)
        layout = self._layouts[sizes]
        for slot, (value, positions) in enumerate(zip(values, layout.places, strict=True)):
            current = layout.values[slot]
            if positions.size and current != value:
                # The ranks of consecutive files mostly differ in their last digit.
                for place, octet in enumerate(value):
                    if not current or octet != current[place]:
                        layout.octets[positions[place]] = octet
                layout.values[slot] = value
        return layout.octets

    def _lay(self, sizes: tuple[int, ...]) -> "_Layout":
        """Lay the messages out for endings of these sizes."""
        parts = [self._between[0]]
        length = len(parts[0])
        places: list[list[int]] = [[] for _ in sizes]
        for (_, slot), message, following in zip(
            self._slots, self._messages, self._between[1:], strict=True
        ):
            head = varint(len(message) + sizes[slot]) + message
            places[slot].append(length + len(head))
            parts += [head, bytes(sizes[slot]), following]
            length += len(head) + sizes[slot] + len(following)
        # An array over a bytearray is writable; an array over bytes is not.
        octets = np.frombuffer(bytearray().join(parts), dtype=np.uint8)
        begins = [np.array(begin_list, dtype=np.int64) for begin_list in places]
        spans = [
            np.arange(size)[:, None] + begin_list
            for begin_list, size in zip(begins, sizes, strict=True)
        ]
        return _Layout(octets, spans, [b""] * len(sizes))


PEERS = frozenset({"pg_name", "comm_src", "comm_dst"})
"""Attributes that name a group or a peer."""

_COMMUNICATION_TYPES = (COMM_COLL_NODE, COMM_SEND_NODE, COMM_RECV_NODE)

# Bytes of the longest length prefix: a varint32 has at most 5 digits of 7 bits.
_MOST_LENGTH_BYTES = 5


class RankDiff:
    """A parsed file as a template, to which the files of other ranks are compared.

    Nodes with the same encoded groups and peers share a slot; slots are numbered in order of
    appearance.

    Args:
        path: a readable Chakra file.

    Attributes:
        slots: slot of each node; None for a node that does not communicate.
    """

    def __init__(self, path: Path) -> None:
        with ChakraFile(path) as file:
            messages = [file.metadata, *file.nodes()]
        self.slots: list[int | None] = []
        self._numbers: dict[bytes, int] = {}
        self._bodies: list[bytes] = []
        self._firsts: list[int] = []
        for place, message in enumerate(messages):
            body, ending = _split(message) if place else (message, b"")
            slot = None
            if ending:
                slot = self._numbers.setdefault(ending, len(self._numbers))
                if slot == len(self._firsts):
                    self._firsts.append(place)
            self._bodies.append(body)
            self.slots.append(slot)
        filled = {place: slot for place, slot in enumerate(self.slots) if slot is not None}
        self._template = Template(self._bodies, filled)
        self._begins: dict[tuple[int, ...], int] = {}
        del self.slots[0]

    @property
    def template_endings(self) -> list[bytes]:
        """The endings of the template file itself, by slot."""
        return list(self._numbers)

    def endings(self, octets: bytes) -> list[bytes] | None:
        """Return the endings of another file, by slot; None if the files differ elsewhere too."""
        endings: list[bytes] = []
        for place in self._firsts:
            begin = self._begin(tuple(map(len, endings)))
            # The lengths of the endings so far tell where the next slot's first node begins.
            length, first = _length(octets, begin)
            last = first + length
            endings.append(octets[min(first + len(self._bodies[place]), last) : last])
        filled = self._template.fill(endings)
        if len(filled) != len(octets):
            return None
        return endings if np.array_equal(filled, np.frombuffer(octets, np.uint8)) else None

    def record(self, node: int, ending: bytes) -> Record | None:
        """Return a node with the group and peers of another file; None for an invalid `ending`.

        A valid ending has the attributes of the template's ending, in the same order and types.

        Args:
            node: index in the file.
            ending: contents of its slot in the other file.
        """
        slot = self.slots[node]
        assert slot is not None, f"node {node} does not communicate"
        try:
            peers = _peers(ending)
            if peers != _peers(self.template_endings[slot]):
                return None
            return record_of(node, self._bodies[node + 1] + ending)
        except UNREADABLE:
            return None

    def _begin(self, sizes: tuple[int, ...]) -> int:
        """Return where the first node of the next slot begins if the endings have these sizes."""
        begin = self._begins.get(sizes)
        if begin is None:
            begin = 0
            until = self._firsts[len(sizes)]
            for body, slot in zip(self._bodies[:until], [None, *self.slots], strict=False):
                size = len(body) + (0 if slot is None else sizes[slot])
                begin += len(varint(size)) + size
            self._begins[sizes] = begin
        return begin


def _split(message: bytes) -> tuple[bytes, bytes]:
    """Split a communication node before its first attribute that names a group or a peer.

    The second part is empty for other nodes, and for nodes whose attributes are not their last
    fields.
    """
    # A search for the names costs less than parsing, and compute nodes need no parsing.
    if not any(name.encode() in message for name in PEERS):
        return message, b""
    node = parse_raw_node(message)
    names = [AttributeProto.FromString(content).name for content in node.attr]
    first = next((place for place, name in enumerate(names) if name in PEERS), None)
    if node.type not in _COMMUNICATION_TYPES or first is None:
        return message, b""
    ending = b"".join(nested(content) for content in node.attr[first:])
    body = message.removesuffix(ending)
    # Another tool may encode the attributes differently, or write other fields after them.
    try:
        is_whole = body != message and parse_raw_node(body).attr == node.attr[:first]
    except UNREADABLE:
        is_whole = False
    return (body, ending) if is_whole else (message, b"")


def _peers(ending: bytes) -> bytes:
    """Return an ending whose group and peer attributes keep only their names and types."""
    node = parse_raw_node(ending)
    for place, content in enumerate(node.attr):
        attribute = AttributeProto.FromString(content)
        if attribute.name in PEERS:
            node.attr[place] = f"{attribute.name} {attribute.WhichOneof('value')}".encode()
    return node.SerializeToString()


def _length(octets: bytes, begin: int) -> tuple[int, int]:
    """Return a message's length and where its bytes begin; (0, `begin`) without a valid length."""
    length = 0
    for place, octet in enumerate(octets[begin : begin + _MOST_LENGTH_BYTES]):
        length |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return length, begin + place + 1
    return 0, begin
