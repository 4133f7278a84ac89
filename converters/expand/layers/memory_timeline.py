"""Allocations of a deeper model: each layer's blocks repeated, resident memory extrapolated.

Blocks of memory at a depth that was not captured: the deepest capture's, copied with its layers.

Of the deepest capture's allocations and frees a layer has those from its first allocation to the
next layer's. What a layer allocates its copy allocates too; it is freed as many layers away as in
the capture, or at the same place outside of the layers. What an operator outside allocates follows
the shallowest and the deepest capture: as many blocks grow on a line, more are repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.converters.expand.layers.layer_period import LayerPlan
from onerank.converters.expand.layers.nonlayer_nodes import (
    DepthExtrapolation,
    NonlayerChanges,
    align,
)
from onerank.ir import Blocks, Measurement, MemoryLog

Moment = tuple[int, int, int]
"""Place in the composed course: start of the copied stretch, turn of the copy in it, event."""

NONE = -1


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a log, its node as a row of the graph."""

    bytes: int
    memory_class: int
    made: int
    freed: int
    row: int
    phase: int
    pool: int
    spare: int
    lingers: int


@dataclass(frozen=True, slots=True)
class _Copied:
    """Events that appear again: [first, stop), `copies` times more, before or after themselves."""

    first: int
    stop: int
    copies: int
    before: bool


@dataclass(frozen=True, slots=True)
class Copying:
    """Nodes of the deepest capture that are copied: of layers in a pass, or a unit of a loop."""

    nodes: Sequence[int]
    copies: int
    before: bool


@dataclass(frozen=True, slots=True)
class Copies:
    """All nodes that are copied, and (node of the capture, number of its copy) -> id."""

    of: Sequence[Copying]
    number: Mapping[tuple[int, int], int]


@dataclass(slots=True)
class MemoryTimeline:
    """The deepest capture's events: where each layer's are, and which appear again.

    Attributes:
        first: (pass, layer) -> its first event.
        stop: (pass, layer) -> where they end.
        at_layer: event -> (pass, layer), of those within layers.
        copied: event -> the stretch it is in, of those that appear again.
        frees: event -> the block it frees.
    """

    plan: LayerPlan
    depth: int
    first: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    stop: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    at_layer: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    copied: dict[int, _Copied] = field(default_factory=dict[int, _Copied])
    frees: dict[int, Block] = field(default_factory=dict[int, Block])

    def tags(self, event: int) -> range:
        """Return the numbers of an event's instances: 0, and those of its copies."""
        span = self.copied.get(event)
        return range(1 if span is None else span.copies + 1)

    def moment(self, event: int, tag: int) -> Moment:
        """Return when an instance of an event comes."""
        span = self.copied.get(event)
        if span is None:
            return event, 0, event
        tag = min(tag, span.copies)
        return span.first, span.copies - tag if span.before else tag, event

    def freed(self, made: int, tag: int, freed: int) -> Moment:
        """Return when an instance of a block is freed."""
        if made in self.at_layer and freed in self.at_layer:
            return self._freed_in_layer(self.at_layer[made][1], tag, freed)
        span = self.copied.get(made)
        if span is None:
            return self.moment(freed, tag)
        if made not in self.at_layer and tag < span.copies and self._let_go_next(made, freed):
            return self.moment(span.first + freed - span.stop, tag + 1)
        return self.moment(freed, tag)

    def _let_go_next(self, made: int, freed: int) -> bool:
        """Whether a loop lets go of what it made in its next turn."""
        span = self.copied[made]
        like = self.frees.get(span.first + freed - span.stop)
        return (
            span.stop <= freed < span.stop + span.stop - span.first
            and like is not None
            and like.bytes == self.frees[freed].bytes
            and like.made < span.first
        )

    def _freed_in_layer(self, layer: int, tag: int, freed: int) -> Moment:
        walk, other = self.at_layer[freed]
        if other == layer:
            return self.moment(freed, tag)
        number = self.plan.layer(layer, tag) + other - layer
        captured, copy = self.plan.instance(min(max(number, 0), self.depth - 1))
        where = walk, captured
        event = self.first[where] + freed - self.first[walk, other]
        return self.moment(min(event, self.stop[where] - 1), copy)


def blocks_of(one: LayeredGraph) -> list[Block] | None:
    log = one.graph.job.measurement.memory
    if log is None:
        return None
    row = {int(number): place for place, number in enumerate(one.graph.nodes.id.tolist())}
    told = log.blocks
    rows = [row.get(number, NONE) for number in told.node]
    none = (0,) * len(told)
    columns = (
        *(told.bytes, told.memory_class, told.allocated_at, told.freed_at, rows, told.phase),
        *(told.pool or none, told.spare_bytes or none, told.lingers or none),
    )
    return [Block(*values) for values in zip(*columns, strict=True)]


def course_of(
    deep: LayeredGraph, plan: LayerPlan, copying: Sequence[Copying], blocks: list[Block]
) -> MemoryTimeline | None:
    """Find the events of the layers and of what is copied; None where they are in no order."""
    own: dict[int, list[int]] = defaultdict(list)  # by node
    for block in blocks:
        if block.made >= 0 and block.row >= 0:
            own[block.row].append(block.made)
    made = sorted((event, row) for row, several in own.items() for event in several)
    found = MemoryTimeline(plan, deep.layers + plan.added)
    found.frees = {block.freed: block for block in blocks if block.freed >= 0}
    events = 1 + max((max(block.made, block.freed) for block in blocks), default=0)

    def end(inside: set[int], after: int) -> int:
        return next((event for event, row in made if event > after and row not in inside), events)

    for walk, one in enumerate(deep.passes):
        order = sorted(one.blocks, reverse=not one.ascending)
        starts = [min((e for row in one.blocks[layer] for e in own.get(row, ())), default=NONE)
                  for layer in order]  # fmt: skip
        last = max((e for row in one.blocks[order[-1]] for e in own.get(row, ())), default=NONE)
        stops = [*starts[1:], end(set(one.blocks[order[-1]]), last)]
        for layer, start, stop in zip(order, starts, stops, strict=True):
            if start < 0 or stop <= start:
                return None
            found.first[walk, layer], found.stop[walk, layer] = start, stop
            for event in range(start, stop):
                if found.at_layer.setdefault(event, (walk, layer)) != (walk, layer):
                    return None
    for copied in copying:
        inside = set(copied.nodes)
        mine = [event for row in inside for event in own.get(row, ())]
        if not mine:
            continue
        start, stop = min(mine), end(inside, max(mine))
        if start in found.at_layer:
            where = {found.at_layer[event] for event in mine if event in found.at_layer}
            stop = max(found.stop[one] for one in where)
        span = _Copied(start, stop, copied.copies, copied.before)
        for event in range(start, stop):
            if found.copied.setdefault(event, span) is not span:
                return None
    return found


OUTSIDE = -2
"""In place of a node's row: held before the step, and let go outside of layers."""


def composed_log(
    shallow: LayeredGraph,
    deep: LayeredGraph,
    plan: LayerPlan,
    changes: NonlayerChanges,
    copies: Copies,
) -> MemoryLog | None:
    """Return the allocations and frees of a step at the model's own depth.

    Args:
        shallow: the capture of least layers.
        deep: that of most.
        plan: which of its layers are copied.
        changes: what changes outside of them.
        copies: all nodes that are copied.

    Returns:
        The log; None where a capture has none, or its layers allocate in no order.
    """
    few, many = blocks_of(shallow), blocks_of(deep)
    log = deep.graph.job.measurement.memory
    if few is None or many is None or log is None:
        return None
    course = course_of(deep, plan, copies.of, many)
    other = course_of(shallow, plan, (), few)
    if course is None or other is None:
        return None
    found: list[_Instance] = []
    for block, tags in _instances(few, other, many, course, changes):
        for begins, ends in tags:
            made = course.moment(block.made, begins) if block.made >= 0 else None
            freed = course.freed(block.made, ends, block.freed) if block.freed >= 0 else None
            if made is not None and freed is not None:
                freed = max(made, freed)
            tag = begins if made is not None else ends
            node = copies.number.get((block.row, tag), copies.number.get((block.row, 0), NONE))
            found.append(_Instance(block, made, freed, node))
    return _numbered(found, log)


@dataclass(frozen=True, slots=True)
class _Instance:
    """A block at the model's own depth, and when it is allocated and freed."""

    block: Block
    made: Moment | None
    freed: Moment | None
    node: int


def _instances(
    few: list[Block],
    other: MemoryTimeline,
    many: list[Block],
    course: MemoryTimeline,
    changes: NonlayerChanges,
) -> Iterator[tuple[Block, list[tuple[int, int]]]]:
    """Yield the blocks as they are at the model's depth, with their instances.

    An instance is the copy of the event that allocates, and the copy of the one that frees. What
    Python allocates behind a loop counts for its last operator, and is there once.
    """
    mine, lasting = _by_node(few, other), _by_node(many, course)
    partner = {b: a for a, b in changes.pairs}
    for row, blocks in lasting.items():
        if row != OUTSIDE and row not in partner:
            like = Counter(one.bytes for one in lasting.get(changes.before.get(row, NONE), []))
            for block in blocks:
                tags = course.tags(block.made if block.made >= 0 else block.freed)
                again = row not in changes.before or like[block.bytes] > 0
                like[block.bytes] -= 1
                yield block, [(tag, tag) for tag in (tags if again else tags[:1])]
            continue
        others = mine[row if row == OUTSIDE else partner[row]]
        for block, more in _grown(others, blocks, changes.stretch):
            yield block, [(0, tag) for tag in range(more + 1)]


def _by_node(blocks: list[Block], course: MemoryTimeline) -> dict[int, list[Block]]:
    """Group blocks by their nodes; those held before and let go outside of layers in one."""
    found: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        held = block.made < 0 and block.freed not in course.at_layer
        found[OUTSIDE if held else block.row].append(block)
    return found


def _grown(
    few: list[Block], many: list[Block], stretch: DepthExtrapolation
) -> Iterator[tuple[Block, int]]:
    """Yield blocks in the sizes, and how often more, that two captures tell."""
    if len(few) == len(many):
        for one, other in zip(few, many, strict=True):
            yield (
                replace(
                    other,
                    bytes=stretch.number(one.bytes, other.bytes),
                    spare=stretch.number(one.spare, other.spare),
                ),
                0,
            )
        return
    before, after = ([(one.bytes, one.memory_class) for one in blocks] for blocks in (few, many))
    found = align(before, after, stretch.between)
    units = [] if found is None else found.units
    again = {at for start, length in units for at in range(start, start + length)}
    yield from ((one, stretch.beyond * (at in again)) for at, one in enumerate(many))
    if found is None and many:
        total = stretch.number(*(sum(one.bytes for one in blocks) for blocks in (few, many)))
        more = total - sum(one.bytes for one in many)
        if more > 0:
            yield replace(many[-1], bytes=more, spare=0), 0


def _numbered(found: list[_Instance], log: MemoryLog) -> MemoryLog:
    """Put all allocations and frees in order, and number them."""
    moments = [
        (moment, sort, at)
        for at, one in enumerate(found)
        for sort, moment in enumerate((one.made, one.freed))
        if moment is not None
    ]
    place = {(at, sort): number for number, (_, sort, at) in enumerate(sorted(moments))}
    rows = [
        (place.get((at, 0), NONE), place.get((at, 1), NONE), one.node, one.block)
        for at, one in enumerate(found)
    ]
    rows.sort(key=lambda row: row[0] if row[0] >= 0 else row[1])
    made, freed, node, blocks = zip(*rows, strict=True) if rows else ((), (), (), ())

    def unless_zero(column: tuple[int, ...]) -> tuple[int, ...]:
        return column if any(column) else ()

    return MemoryLog(
        Blocks(
            bytes=tuple(one.bytes for one in blocks),
            memory_class=tuple(one.memory_class for one in blocks),
            allocated_at=made,
            freed_at=freed,
            node=node,
            phase=tuple(one.phase for one in blocks),
            pool=unless_zero(tuple(one.pool for one in blocks)),
            spare_bytes=unless_zero(tuple(one.spare for one in blocks)),
            lingers=unless_zero(tuple(one.lingers for one in blocks)),
        ),
        events=len(moments),
        settings=log.settings,
    )


Sizes = dict[str, tuple[int, ...]]


class ResidentMemory(NamedTuple):
    """Class of memory -> bytes, and pool, of each storage: as `Measurement` has them."""

    bytes: Sizes
    pools: Sizes


class BucketSizes(NamedTuple):
    """Bytes of DDP's buckets: in both captures, and at the model's own depth."""

    shallow: list[int]
    deep: list[int]
    made: list[int]


NO_BUCKETS = BucketSizes([], [], [])


def held_at_depth(
    shallow: Measurement,
    deep: Measurement,
    stretch: DepthExtrapolation,
    buckets: BucketSizes = NO_BUCKETS,
) -> ResidentMemory:
    """Return what is held at the model's own depth; nothing where a capture does not tell.

    Storages that the deeper capture has more of are repeated; what has another size in each (a flat
    buffer of all parameters) is on the line through both. Buckets do neither.
    """
    sizes: Sizes = {}
    pools: Sizes = {}
    if not shallow.resident_bytes or not deep.resident_bytes:
        return ResidentMemory(sizes, pools)
    for name in deep.resident_bytes:
        few, many = _storages(shallow, name), _storages(deep, name)
        own = [_buckets_in(*pair) for pair in ((few, buckets.shallow), (many, buckets.deep))]
        apart = name == "other" and all(own)
        if apart:
            few, many = few - own[0], many - own[1]
        found = _grown_held(few, many, stretch)
        if found is not None and apart:
            pool = min(pool for _, pool in own[1])
            found = sorted([*found, *((size, pool) for size in buckets.made)], reverse=True)
        if found is None:
            return ResidentMemory({}, {})
        sizes[name] = tuple(size for size, _ in found)
        pools[name] = tuple(pool for _, pool in found)
    return ResidentMemory(sizes, pools if deep.resident_pools else {})


def _storages(measured: Measurement, name: str) -> Counter[tuple[int, int]]:
    sizes = measured.resident_bytes.get(name, ())
    pools = measured.resident_pools.get(name, ()) or (0,) * len(sizes)
    return Counter(zip(sizes, pools, strict=True))


def _buckets_in(storages: Counter[tuple[int, int]], sizes: list[int]) -> Counter[tuple[int, int]]:
    """Return the storages that are buckets; none where not all of these sizes are there."""
    left = Counter(sizes)
    found = Counter[tuple[int, int]]()
    for (size, pool), count in storages.items():
        taken = min(count, left[size])
        found[size, pool] += taken
        left[size] -= taken
    return Counter() if left.total() else +found


def _grown_held(
    few: Counter[tuple[int, int]], many: Counter[tuple[int, int]], stretch: DepthExtrapolation
) -> list[tuple[int, int]] | None:
    """Return (bytes, pool) of each storage, the largest first; None where fewer are held deeper."""
    kept = few & many
    other = sorted((few - kept).elements(), reverse=True)
    surplus = sorted((many - kept).elements(), reverse=True)
    if len(other) > len(surplus):
        return None
    found = Counter(kept)
    for (before, _), (after, pool) in zip(other, surplus, strict=False):
        found[stretch.number(before, after), pool] += 1
    for storage, count in Counter(surplus[len(other) :]).items():
        found[storage] += stretch.number(0, count)
    return sorted(found.elements(), reverse=True)
