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
"""The dependencies of zero nodes."""


def dependencies(nodes: Nodes, edges: Edges) -> Dependencies:
    """Return the ids each node waits for: control dependencies first, otherwise in edge order.

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
    # `ctrl_deps` is field 4 of Node and `data_deps` field 5, and fields are written in this order.
    # `lexsort` is stable, so the order within each list stays.
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
        """Join the dependencies of the nodes in the mask `nodes`."""
        node = np.concatenate([np.empty(0, dtype=np.int64), *(part.node for part in parts)])
        ids = np.concatenate([np.empty(0, dtype=np.uint64), *(part.id for part in parts)])
        keep = nodes[node]
        return cls(node, ids) if keep.all() else cls(node[keep], ids[keep])


@dataclass(slots=True)
class DependencyCollector:
    """Collects the dependencies of nodes, block by block."""

    control: list[_Part] = field(default_factory=list[_Part])
    data: list[_Part] = field(default_factory=list[_Part])

    def add(self, begin: int, buffer: Buffer, fields: Scan) -> None:
        """Add the dependencies of a block whose first node has index `begin`.

        Clears `fields.plain` for lists that cannot be read here, and `fields.exact` for lists that
        onerank would encode differently.
        """
        for parts, spans in ((self.control, fields.control), (self.data, fields.data)):
            node, ids = _unpacked(buffer, spans, fields)
            if len(node):
                parts.append(_Part(node + begin, ids))

    def join(
        self,
        plain: Mask,
        reasons_index: I64,
        reason_bytes: list[bytes],
        unparsed: I64,
        unparsed_dependencies: Dependencies,
    ) -> tuple[Dependencies, Mask]:
        """Return all dependencies, and which nodes encode their reasons like onerank, bool[n].

        Args:
            plain: nodes whose added dependencies are used, bool[n].
            reasons_index: index of each node's `data_dep_reasons` in `reason_bytes`, -1 for none.
            reason_bytes: distinct values of that attribute.
            unparsed: indices of the other nodes.
            unparsed_dependencies: dependencies of the other nodes.
        """
        control, data = _Part.of(self.control, plain), _Part.of(self.data, plain)
        reason, exact = _reasons(data.node, reasons_index, reason_bytes)
        node, ids = data.node, data.id
        if len(control.node) or len(unparsed):
            unparsed_node = np.repeat(unparsed, np.diff(unparsed_dependencies.offsets))
            node = np.concatenate([control.node, node, unparsed_node])
            ids = np.concatenate([control.id, ids, unparsed_dependencies.ids])
            control_reason = np.full(len(control.node), Reason.CONTROL, dtype=np.uint8)
            reason = np.concatenate([control_reason, reason, unparsed_dependencies.reason])
            # A stable sort keeps each node's `ctrl_deps` before its `data_deps`.
            order = np.argsort(node, kind="stable")
            node, ids, reason = node[order], ids[order], reason[order]
        offsets = np.zeros(len(plain) + 1, dtype=np.int64)
        np.cumsum(np.bincount(node, minlength=len(plain)), out=offsets[1:])
        return Dependencies(offsets, ids, reason), exact


def _places(spans: Spans) -> tuple[I64, I64]:
    """Return the row and the position of each byte that the spans cover."""
    sizes = spans.last - spans.first
    ends = np.cumsum(sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.repeat(spans.first - ends + sizes, sizes) + np.arange(len(row))


def _unpacked(buffer: Buffer, spans: Spans, fields: Scan) -> tuple[I64, U64]:
    """Return the row and the value of each packed varint.

    A repeated number field is packed in proto3: one length-delimited field of varints. The unpacked
    form is valid too (protobuf, "Encoding", packed repeated fields), but `scan` does not find it
    under this tag, so that protobuf parses such nodes.
    """
    row, position = _places(spans)
    # The last byte of a varint is the one without the continuation bit.
    ends = buffer.bytes[position] < 0x80
    begins = np.ones(len(row), dtype=bool)
    begins[1:] = ends[:-1]
    nonempty = np.flatnonzero(spans.last > spans.first)
    # A list whose last byte still has a continuation bit would borrow its digits from the next
    # field.
    cut_short = nonempty[buffer.bytes[spans.last[nonempty] - 1] >= 0x80]
    fields.plain[cut_short] = False
    row, position = row[begins], position[begins]
    varints = buffer.varints(position)
    fields.plain[row[~varints.short]] = False
    fields.exact[row[~varints.minimal]] = False
    return row, varints.value


def _reasons(node: I64, reasons_index: I64, reason_bytes: list[bytes]) -> tuple[U8, Mask]:
    """Return the reason of each `data_deps` entry, and which nodes encode reasons like onerank.

    An entry without a reason is DATA. So are all entries of a node whose attribute has another
    number of bytes than `data_deps` has entries, or contains a byte that is not a reason.
    """
    reasons = np.full(len(node), Reason.DATA, dtype=np.uint8)
    exact = np.ones(len(reasons_index), dtype=bool)
    rows = np.flatnonzero(reasons_index >= 0)
    if not len(rows):
        return reasons, exact
    sizes = np.array([len(octet) for octet in reason_bytes], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    is_valid = np.array(
        [max(octet, default=0) < Reason.CONTROL for octet in reason_bytes], dtype=bool
    )
    has_reason = np.array([any(octet) for octet in reason_bytes], dtype=bool)
    counts = np.bincount(node, minlength=len(reasons_index))
    fits = is_valid[reasons_index[rows]] & (sizes[reasons_index[rows]] == counts[rows])
    exact[rows[~fits | ~has_reason[reasons_index[rows]]]] = False
    rows = rows[fits]
    first = (np.cumsum(counts) - counts)[rows]
    targets = _places(Spans(first, first + counts[rows]))[1]
    begin = begins[reasons_index[rows]]
    source = _places(Spans(begin, begin + counts[rows]))[1]
    reasons[targets] = np.frombuffer(b"".join(reason_bytes), dtype=np.uint8)[source]
    return reasons, exact
