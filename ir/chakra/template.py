"""A file of which only a few values change from one rank to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.pieces import varint
from onerank.ir.edges import I64, U8


@dataclass(frozen=True, slots=True)
class _Laid:
    """A file laid out for endings of some sizes.

    Attributes:
        octets: its bytes.
        places: of each slot, where each byte of each of its endings lies, int64[size, endings].
        values: what each slot holds now.
    """

    octets: U8
    places: list[I64]
    values: list[bytes]


class Template:
    """Messages, some of which end in bytes that are filled in for each rank.

    Args:
        messages: the metadata and the nodes, those with an ending without it.
        slots: place of a message -> which of the values it ends in.
    """

    def __init__(self, messages: Sequence[bytes], slots: Mapping[int, int]) -> None:
        self._slots = sorted(slots.items())
        self._messages = [messages[place] for place, _ in self._slots]
        self._between: list[bytes] = []
        begin = 0
        for place, _ in [*self._slots, (len(messages), 0)]:
            framed = (varint(len(one)) + one for one in messages[begin:place])
            self._between.append(b"".join(framed))
            begin = place + 1
        self._laid: dict[tuple[int, ...], _Laid] = {}

    def fill(self, values: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """Return the file's bytes with `values[slot]` as endings; they hold until the next call."""
        sizes = tuple(len(value) for value in values)
        if sizes not in self._laid:
            self._laid[sizes] = self._lay(sizes)
        laid = self._laid[sizes]
        for slot, (value, at) in enumerate(zip(values, laid.places, strict=True)):
            held = laid.values[slot]
            if at.size and held != value:
                for place, octet in enumerate(value):
                    if not held or octet != held[place]:  # of numbers in turn, mostly the last
                        laid.octets[at[place]] = octet
                laid.values[slot] = value
        return laid.octets

    def _lay(self, sizes: tuple[int, ...]) -> "_Laid":
        """Lay the messages out for endings of these sizes."""
        parts = [self._between[0]]
        length = len(parts[0])
        places: list[list[int]] = [[] for _ in sizes]
        for (_, slot), message, after in zip(
            self._slots, self._messages, self._between[1:], strict=True
        ):
            head = varint(len(message) + sizes[slot]) + message
            places[slot].append(length + len(head))
            parts += [head, bytes(sizes[slot]), after]
            length += len(head) + sizes[slot] + len(after)
        octets = np.frombuffer(bytearray().join(parts), dtype=np.uint8)
        begins = [np.array(at, dtype=np.int64) for at in places]
        spans = [np.arange(size)[:, None] + at for at, size in zip(begins, sizes, strict=True)]
        return _Laid(octets, spans, [b""] * len(sizes))
