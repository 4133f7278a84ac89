"""Node messages for a simulator, written column by column."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from onerank.ir.chakra.attributes import encode_attribute
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata
from onerank.ir.chakra.pieces import ATTRIBUTE, Pieces, inner_of, nested, varint
from onerank.ir.edges import I64


def header(version: str) -> bytes:
    """Return a metadata message that holds a version alone."""
    return GlobalMetadata(version=version).SerializeToString()


def attribute(name: str, variant: str, value: object) -> bytes:
    """Return an attribute as a node holds it."""
    return nested(encode_attribute(name, variant, value))


class NodeWriter:
    """Writes `count` nodes, whose ids are 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self._pieces = Pieces(count)
        self._everyone = np.arange(count)

    def write_heads(
        self,
        names: Sequence[str],
        types: npt.NDArray[np.integer],
        data_deps: Sequence[Sequence[int]],
        duration_micros: I64,
    ) -> None:
        """Write what comes before the attributes.

        Raises:
            UnicodeEncodeError: a name has no UTF-8 form.
        """
        pieces = self._pieces
        rows = self._everyone[1:]
        pieces.add_numbers(rows, rows.astype(np.uint64), b"\x08")
        distinct = {name: place for place, name in enumerate(dict.fromkeys(names))}
        encoded = (name.encode() for name in distinct)
        table = [b"\x12" + varint(len(text)) + text if text else b"" for text in encoded]
        pieces.add_one_of(self._everyone, table, np.array([distinct[name] for name in names]))
        pieces.add_one_of(self._everyone, [b"\x18" + bytes((n,)) for n in range(8)], types)
        counts = np.array([len(awaited) for awaited in data_deps], dtype=np.int64)
        waiting = np.flatnonzero(counts)
        ids = np.array([*chain.from_iterable(data_deps)], dtype=np.uint64)
        pieces.add_lists(waiting, ids, counts[waiting], b"\x2a")
        lasting = np.flatnonzero(duration_micros)
        pieces.add_numbers(lasting, duration_micros[lasting].astype(np.uint64), b"\x38")

    def write_flag(self, name: str, *, value: bool) -> None:
        """Write an attribute that is the same on all nodes."""
        table = [attribute(name, "bool_val", value)]
        self._pieces.add_one_of(self._everyone, table, np.zeros_like(self._everyone))

    def write_integers(
        self, name: str, variant: str, rows: I64, values: npt.NDArray[np.integer]
    ) -> None:
        """Write an attribute of some nodes."""
        unsigned = values.astype(np.int64).view(np.uint64)
        self._pieces.add_messages(rows, unsigned, ATTRIBUTE, inner_of(name, variant))

    def messages(self) -> list[bytes]:
        """Return the messages."""
        return self._pieces.cut()
