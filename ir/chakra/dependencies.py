"""Encode and decode node dependencies: packed ids, and a reason byte per `data_deps` entry."""

from dataclasses import dataclass, field

import numpy as np

from onerank.ir.arrays import I64, U8, U64, Mask
from onerank.ir.chakra.attributes import members
from onerank.ir.chakra.field_scan import Buffer, Scan, Spans
from onerank.ir.edges import Edges
from onerank.ir.enums import Reason
from onerank.ir.errors import ChakraError
from onerank.ir.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Ids each node waits for, its `ctrl_deps` before its `data_deps`.

    Attributes:
        offsets: int64[n + 1], rows of `ids` and `reason`.
        ids: uint64[m].
        reason: uint8[m], CONTROL for a `ctrl_deps` entry.
    """

    offsets: I64
    ids: U64
    reason: U8


NONE = Dependencies(np.zeros(1, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint8))
"""Those of no nodes."""


def dependencies(nodes: Nodes, edges: Edges) -> Dependencies:
    """Return the ids each node waits for, control dependencies first, else in their order.

    Raises:
        ChakraError: a reason is not one of `Reason`.
    """
    is_invalid = (edges.reason < min(Reason)) | (edges.reason > max(Reason))
    if is_invalid.any():
        edge = int(np.argmax(is_invalid))
        raise ChakraError(
            f"node {nodes.id[edges.target[edge]]}: edge from node {nodes.id[edges.source[edge]]}"
            f" has reason {edges.reason[edge]}; expected one of {members(Reason)}",
            code="chakra-unknown-reason",
        )
    ids, reason = nodes.id[edges.source], edges.reason.astype(np.uint8, copy=False)
    if (reason == Reason.CONTROL).any():
        order = np.lexsort((reason != Reason.CONTROL, edges.target))
        ids, reason = ids[order], reason[order]
    return Dependencies(edges.offsets, ids, reason)


@dataclass(slots=True)
class _Part:
    """Some dependencies: the nodes and the ids they wait for."""

    node: I64
    id: U64

    @classmethod
    def of(cls, parts: "list[_Part]", nodes: Mask) -> "_Part":
        """Join the dependencies of the nodes that are marked."""
        node = np.concatenate([np.empty(0, dtype=np.int64), *(part.node for part in parts)])
        ids = np.concatenate([np.empty(0, dtype=np.uint64), *(part.id for part in parts)])
        keep = nodes[node]
        return cls(node, ids) if keep.all() else cls(node[keep], ids[keep])


@dataclass(slots=True)
class Collector:
    """Collects dependencies of nodes."""

    control: list[_Part] = field(default_factory=list[_Part])
    data: list[_Part] = field(default_factory=list[_Part])

    def add(self, begin: int, buffer: Buffer, found: Scan) -> None:
        """Add those of a block of nodes; what is not plain or not exact is marked in `found`."""
        for parts, spans in ((self.control, found.control), (self.data, found.data)):
            node, ids = _unpacked(buffer, spans, found)
            if len(node):
                parts.append(_Part(node + begin, ids))

    def join(
        self, plain: Mask, told: I64, octets: list[bytes], rest: I64, given: Dependencies
    ) -> tuple[Dependencies, Mask]:
        """Return all dependencies, and the nodes that encode their reasons like onerank, bool[n].

        Args:
            plain: nodes whose added dependencies are used, bool[n].
            told: index of each node's `data_dep_reasons` in `octets`, -1 for none.
            octets: values of that attribute.
            rest: the other nodes.
            given: dependencies of the other nodes.
        """
        control, data = _Part.of(self.control, plain), _Part.of(self.data, plain)
        reason, exact = _reasons(data.node, told, octets)
        node, ids = data.node, data.id
        if len(control.node) or len(rest):
            others = np.repeat(rest, np.diff(given.offsets))
            node = np.concatenate([control.node, node, others])
            ids = np.concatenate([control.id, ids, given.ids])
            control_reason = np.full(len(control.node), Reason.CONTROL, dtype=np.uint8)
            reason = np.concatenate([control_reason, reason, given.reason])
            order = np.argsort(node, kind="stable")
            node, ids, reason = node[order], ids[order], reason[order]
        offsets = np.zeros(len(plain) + 1, dtype=np.int64)
        np.cumsum(np.bincount(node, minlength=len(plain)), out=offsets[1:])
        return Dependencies(offsets, ids, reason), exact


def _places(spans: Spans) -> tuple[I64, I64]:
    """Return the row and the place of each byte that spans cover."""
    sizes = spans.last - spans.first
    ends = np.cumsum(sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.repeat(spans.first - ends + sizes, sizes) + np.arange(len(row))


def _unpacked(buffer: Buffer, spans: Spans, found: Scan) -> tuple[I64, U64]:
    """Return the row and the value of each packed varint."""
    row, position = _places(spans)
    ends = buffer.bytes[position] < 0x80
    begins = np.ones(len(row), dtype=bool)
    begins[1:] = ends[:-1]
    nonempty = np.flatnonzero(spans.last > spans.first)
    cut_short = nonempty[buffer.bytes[spans.last[nonempty] - 1] >= 0x80]
    found.plain[cut_short] = False
    row, position = row[begins], position[begins]
    read = buffer.varints(position)
    found.plain[row[~read.short]] = False
    found.exact[row[~read.minimal]] = False
    return row, read.value


def _reasons(node: I64, told: I64, octets: list[bytes]) -> tuple[U8, Mask]:
    """Return the reason of each `data_deps` entry, and the nodes that encode reasons like onerank.

    A missing reason is DATA.
    """
    reasons = np.full(len(node), Reason.DATA, dtype=np.uint8)
    exact = np.ones(len(told), dtype=bool)
    rows = np.flatnonzero(told >= 0)
    if not len(rows):
        return reasons, exact
    sizes = np.array([len(octet) for octet in octets], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    is_valid = np.array([max(octet, default=0) < Reason.CONTROL for octet in octets], dtype=bool)
    has_reason = np.array([any(octet) for octet in octets], dtype=bool)
    counts = np.bincount(node, minlength=len(told))
    fits = is_valid[told[rows]] & (sizes[told[rows]] == counts[rows])
    exact[rows[~fits | ~has_reason[told[rows]]]] = False
    rows = rows[fits]
    first = (np.cumsum(counts) - counts)[rows]
    targets = _places(Spans(first, first + counts[rows]))[1]
    begin = begins[told[rows]]
    source = _places(Spans(begin, begin + counts[rows]))[1]
    reasons[targets] = np.frombuffer(b"".join(octets), dtype=np.uint8)[source]
    return reasons, exact
