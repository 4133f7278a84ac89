"""What nodes wait for, as messages hold it: packed ids, and an octet per `data_deps` entry."""

from dataclasses import dataclass, field

import numpy as np

from onerank.ir.chakra.scan import Scan, Spans
from onerank.ir.chakra.words import Buffer, Mask
from onerank.ir.edges import I64, U8
from onerank.ir.kinds import Reason
from onerank.ir.nodes import U64


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


@dataclass(slots=True)
class _Part:
    """Some dependencies: the node, the id it waits for, the reason."""

    node: I64
    id: U64
    reason: U8

    def of(self, nodes: Mask) -> "_Part":
        """Return the dependencies of the nodes that are marked."""
        keep = nodes[self.node]
        return self if keep.all() else _Part(self.node[keep], self.id[keep], self.reason[keep])


@dataclass(slots=True)
class Collector:
    """Collects dependencies of `count` nodes."""

    count: int
    parts: list[_Part] = field(default_factory=list[_Part])

    def add(self, begin: int, buffer: Buffer, found: Scan, reasons: tuple[I64, Spans]) -> None:
        """Add those of a block of nodes; what is not plain or not exact is marked in `found`."""
        control, control_ids = _unpacked(buffer, found.control, found)
        data, data_ids = _unpacked(buffer, found.data, found)
        told = _reasons(buffer, np.bincount(data, minlength=len(found.plain)), found, reasons)
        node = np.concatenate([control, data])
        ids = np.concatenate([control_ids, data_ids])
        reason = np.concatenate([np.full(len(control), Reason.CONTROL, dtype=np.uint8), told])
        if len(control):
            order = np.argsort(node, kind="stable")
            node, ids, reason = node[order], ids[order], reason[order]
        self.parts.append(_Part(node + begin, ids, reason))

    def join(self, plain: Mask, rest: I64, given: Dependencies) -> Dependencies:
        """Return all: of `plain` nodes what was added, of the nodes `rest` what is given."""
        parts = [part.of(plain) for part in self.parts]
        if len(rest):
            node = np.repeat(rest, np.diff(given.offsets))
            parts.append(_Part(node, given.ids, given.reason))
        node = np.concatenate([np.empty(0, dtype=np.int64), *(part.node for part in parts)])
        ids = np.concatenate([np.empty(0, dtype=np.uint64), *(part.id for part in parts)])
        reason = np.concatenate([np.empty(0, dtype=np.uint8), *(part.reason for part in parts)])
        if len(rest):
            order = np.argsort(node, kind="stable")
            node, ids, reason = node[order], ids[order], reason[order]
        offsets = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(np.bincount(node, minlength=self.count), out=offsets[1:])
        return Dependencies(offsets, ids, reason)


def _places(spans: Spans) -> tuple[I64, I64]:
    """Return the row and the place of each byte that spans cover."""
    sizes = spans.last - spans.first
    ends = np.cumsum(sizes)
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.repeat(spans.first - ends + sizes, sizes) + np.arange(len(row))


def _unpacked(buffer: Buffer, spans: Spans, found: Scan) -> tuple[I64, U64]:
    """Return the row and the value of each packed varint."""
    row, place = _places(spans)
    ends = buffer.bytes[place] < 0x80
    begins = np.ones(len(row), dtype=bool)
    begins[1:] = ends[:-1]
    given = np.flatnonzero(spans.last > spans.first)
    cut_short = given[buffer.bytes[spans.last[given] - 1] >= 0x80]
    found.plain[cut_short] = False
    row, place = row[begins], place[begins]
    read = buffer.varints(place)
    found.plain[row[~read.short]] = False
    found.exact[row[~read.minimal]] = False
    return row, read.value


def _reasons(buffer: Buffer, counts: I64, found: Scan, reasons: tuple[I64, Spans]) -> U8:
    """Return the reason of each `data_deps` entry: DATA where none is told, or not for each."""
    made = np.full(int(counts.sum()), Reason.DATA, dtype=np.uint8)
    rows, spans = reasons
    fits = spans.last - spans.first == counts[rows]
    found.exact[rows[~fits]] = False
    rows, spans = rows[fits], Spans(spans.first[fits], spans.last[fits])
    row, place = _places(spans)
    octets = buffer.bytes[place]
    bad = np.bincount(row[octets >= Reason.CONTROL], minlength=len(rows)) > 0
    says = np.bincount(row[octets > 0], minlength=len(rows)) > 0
    found.exact[rows[bad | ~says]] = False
    entries = Spans(*_entries(counts, rows))
    good = ~bad[row]
    made[_places(entries)[1][good]] = octets[good]
    return made


def _entries(counts: I64, rows: I64) -> tuple[I64, I64]:
    ends = np.cumsum(counts)[rows]
    return ends - counts[rows], ends
