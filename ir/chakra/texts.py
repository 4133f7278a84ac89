"""Text columns in UTF-8."""

import numpy as np

from onerank.ir.chakra.attributes import FIELDS, IO_COLUMNS
from onerank.ir.chakra.pieces import sized
from onerank.ir.edges import I64
from onerank.ir.errors import ChakraError
from onerank.ir.nodes import TEXT_COLUMNS, Nodes, Objects
from onerank.ir.strings import Codes, StringTable


class Texts:
    """Text columns in UTF-8, each distinct text encoded once."""

    def __init__(self, nodes: Nodes, strings: StringTable) -> None:
        used = np.zeros(len(strings), dtype=bool)
        for column in TEXT_COLUMNS:
            used[getattr(nodes, column)] = True
        self._octets = np.full(len(strings), b"", dtype=object)
        self._sizes = np.zeros(len(strings), dtype=np.int64)
        codes: Codes = np.flatnonzero(used).astype(np.int32)
        try:
            octets = list(map(str.encode, strings.decode(codes)))
        except UnicodeEncodeError:
            raise _not_unicode(nodes, strings) from None
        self._octets[codes], self._sizes[codes] = sized(octets)

    def of(self, codes: Codes) -> tuple[Objects, I64]:
        """Return the texts of some codes, object[n] of bytes, and their sizes, int64[n]."""
        return self._octets[codes], self._sizes[codes]

    def sizes(self, codes: Codes) -> I64:
        """Return how many bytes the texts of some codes have, int64[n]."""
        return self._sizes[codes]


def _not_unicode(nodes: Nodes, strings: StringTable) -> ChakraError:
    """Return the error for the first text without a UTF-8 form."""
    named = {field.column: field.attribute for field in FIELDS}
    named |= {column: side for side, columns in IO_COLUMNS.items() for column in columns}
    for column in TEXT_COLUMNS:
        codes, first = np.unique(getattr(nodes, column), return_index=True)
        for code, row in zip(codes.tolist(), first.tolist(), strict=True):
            try:
                strings[code].encode()
            except UnicodeEncodeError as error:
                return ChakraError(
                    f"node {nodes.id[row]}: {named.get(column, column)} has no UTF-8 form"
                    f" ({error}); replace that character"
                )
    raise AssertionError("every text has a UTF-8 form")
