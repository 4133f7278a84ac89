"""Extrapolate the memory log and the resident memory to all layers.

An event is an allocation or a free. A layer owns the events of the deepest capture from its first
allocation to that of the next layer. A copy of a layer allocates the same blocks. It frees them at
the same distance in layers as in the capture, or at the same place outside the layers.

Blocks of operators outside the layers follow the shallowest and the deepest capture: equally many
blocks grow linearly, a surplus is repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from onerank.converters.expand.layers.captured_layers import LayeredGraph, LayerPlan
from onerank.converters.expand.layers.nonlayer_nodes import (
    DepthExtrapolation,
    NonlayerChanges,
    align,
)
from onerank.ir import Blocks, Measurement, MemoryLog

Moment = tuple[int, int, int]
"""Place in the composed timeline: start of the copied range, repetition in it, event."""

NONE = -1


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a memory log.

    Attributes:
        bytes: size.
        memory_class: number of the memory class.
        allocated: event that allocates it, NONE before the step.
        freed: event that frees it, NONE after the step.
        row: index of its node in the graph, NONE if unknown.
        phase: phase of the allocation.
        pool: allocator pool.
        spare: bytes that rounding adds.
        lingers: as in `Blocks`.
    """

    bytes: int
    memory_class: int
    allocated: int
    freed: int
    row: int
    phase: int
    pool: int
    spare: int
    lingers: int


@dataclass(frozen=True, slots=True)
class _RepeatedRange:
    """Events [first, stop) that repeat `copies` more times, before or after themselves."""

    first: int
    stop: int
    copies: int
    before: bool


@dataclass(frozen=True, slots=True)
class Copying:
    """Nodes of the deepest capture that are copied: layers of a pass, or a unit of a loop."""

    nodes: Sequence[int]
    copies: int
    before: bool


@dataclass(frozen=True, slots=True)
class Copies:
    """All copied nodes, and (captured node, number of its copy) -> id."""

    of: Sequence[Copying]
    number: Mapping[tuple[int, int], int]


@dataclass(slots=True)
class MemoryTimeline:
    """The events of a capture: those of each layer, and those that repeat.

    Attributes:
        first: (pass, layer) -> its first event.
        stop: (pass, layer) -> end of its events.
        at_layer: event -> (pass, layer), within layers.
        copied: event -> its repeated range.
        frees: event -> the block it frees.
    """

    plan: LayerPlan
    depth: int
    first: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    stop: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    at_layer: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    copied: dict[int, _RepeatedRange] = field(default_factory=dict[int, _RepeatedRange])
    frees: dict[int, Block] = field(default_factory=dict[int, Block])

    def tags(self, event: int) -> range:
        """Return the instance numbers of an event: 0 for itself, then its copies."""
        span = self.copied.get(event)
        return range(1 if span is None else span.copies + 1)

    def moment(self, event: int, tag: int) -> Moment:
        """Return the place of an instance of an event."""
        span = self.copied.get(event)
        if span is None:
            return event, 0, event
        # The block may come from a range with more copies than the range of its free.
        tag = min(tag, span.copies)
        # In a backward the copies run before their original, the last copy first.
        return span.first, span.copies - tag if span.before else tag, event

    def freed(self, allocated: int, tag: int, freed: int) -> Moment:
        """Return the place at which an instance of a block is freed."""
        if allocated in self.at_layer and freed in self.at_layer:
            return self._freed_in_layer(self.at_layer[allocated][1], tag, freed)
        span = self.copied.get(allocated)
        if span is None:
            return self.moment(freed, tag)
        if (
            allocated not in self.at_layer
            and tag < span.copies
            and self._freed_in_next_iteration(allocated, freed)
        ):
            return self.moment(span.first + freed - span.stop, tag + 1)
        return self.moment(freed, tag)

    def _freed_in_next_iteration(self, allocated: int, freed: int) -> bool:
        """Return whether a loop frees the block in its next iteration."""
        span = self.copied[allocated]
        previous = self.frees.get(span.first + freed - span.stop)
        return (
            span.stop <= freed < span.stop + span.stop - span.first
            and previous is not None
            and previous.bytes == self.frees[freed].bytes
            and previous.allocated < span.first
        )

    def _freed_in_layer(self, layer: int, tag: int, freed: int) -> Moment:
        number_of_pass, other = self.at_layer[freed]
        if other == layer:
            return self.moment(freed, tag)
        number = self.plan.layer(layer, tag) + other - layer
        # At an end of the model no layer has that distance; the nearest one frees the block.
        captured, copy = self.plan.instance(min(max(number, 0), self.depth - 1))
        layer_of_pass = number_of_pass, captured
        event = self.first[layer_of_pass] + freed - self.first[number_of_pass, other]
        # A first or last layer may have fewer events than the captured one.
        return self.moment(min(event, self.stop[layer_of_pass] - 1), copy)


def blocks_of(capture: LayeredGraph) -> list[Block] | None:
    """Return the blocks of a capture's memory log, None without one."""
    log = capture.graph.job.measurement.memory
    if log is None:
        return None
    row = {int(number): place for place, number in enumerate(capture.graph.nodes.id.tolist())}
    blocks = log.blocks
    rows = [row.get(number, NONE) for number in blocks.node]
    zeros = (0,) * len(blocks)
    columns = (
        *(blocks.bytes, blocks.memory_class, blocks.allocated_at, blocks.freed_at),
        *(rows, blocks.phase),
        *(blocks.pool or zeros, blocks.spare_bytes or zeros, blocks.lingers or zeros),
    )
    return [Block(*values) for values in zip(*columns, strict=True)]


def memory_timeline(
    deep: LayeredGraph, plan: LayerPlan, copying: Sequence[Copying], blocks: list[Block]
) -> MemoryTimeline | None:
    """Find the events of the layers and of the copied nodes; None if those of layers overlap."""
    allocations: dict[int, list[int]] = defaultdict(list)  # by node
    for block in blocks:
        if block.allocated >= 0 and block.row >= 0:
            allocations[block.row].append(block.allocated)
    in_order = sorted((event, row) for row, events in allocations.items() for event in events)
    timeline = MemoryTimeline(plan, deep.layers + plan.added)
    timeline.frees = {block.freed: block for block in blocks if block.freed >= 0}
    count = 1 + max((max(block.allocated, block.freed) for block in blocks), default=0)

    def end(inside: set[int], after: int) -> int:
        later = (event for event, row in in_order if event > after and row not in inside)
        return next(later, count)

    for number, layer_pass in enumerate(deep.passes):
        order = sorted(layer_pass.blocks, reverse=not layer_pass.ascending)
        starts = [min((e for row in layer_pass.blocks[layer] for e in allocations.get(row, ())),
                      default=NONE)
                  for layer in order]  # fmt: skip
        last = max(
            (e for row in layer_pass.blocks[order[-1]] for e in allocations.get(row, ())),
            default=NONE,
        )
        stops = [*starts[1:], end(set(layer_pass.blocks[order[-1]]), last)]
        for layer, start, stop in zip(order, starts, stops, strict=True):
            # A layer without an allocation has no place in the order of events.
            if start < 0 or stop <= start:
                return None
            timeline.first[number, layer], timeline.stop[number, layer] = start, stop
            for event in range(start, stop):
                if timeline.at_layer.setdefault(event, (number, layer)) != (number, layer):
                    return None
    for copied in copying:
        inside = set(copied.nodes)
        events = [event for row in inside for event in allocations.get(row, ())]
        if not events:
            continue
        start, stop = min(events), end(inside, max(events))
        if start in timeline.at_layer:
            where = {timeline.at_layer[event] for event in events if event in timeline.at_layer}
            stop = max(timeline.stop[layer_of_pass] for layer_of_pass in where)
        span = _RepeatedRange(start, stop, copied.copies, copied.before)
        for event in range(start, stop):
            if timeline.copied.setdefault(event, span) is not span:
                return None
    return timeline


RESIDENT = -2
"""Row of blocks that are allocated before the step and not freed within a layer."""


def compose_memory_log(
    shallow: LayeredGraph,
    deep: LayeredGraph,
    plan: LayerPlan,
    changes: NonlayerChanges,
    copies: Copies,
) -> MemoryLog | None:
    """Return the memory log of the whole model.

    Args:
        shallow: the capture with the fewest layers.
        deep: the capture with the most layers.
        plan: layers of `deep` that are copied.
        changes: changes outside the layers.
        copies: all copied nodes.

    Returns:
        The log; None if a capture has none, or the allocations of its layers overlap.
    """
    few, many = blocks_of(shallow), blocks_of(deep)
    log = deep.graph.job.measurement.memory
    if few is None or many is None or log is None:
        return None
    deep_timeline = memory_timeline(deep, plan, copies.of, many)
    shallow_timeline = memory_timeline(shallow, plan, (), few)
    if deep_timeline is None or shallow_timeline is None:
        return None
    instances: list[_Instance] = []
    for block, tags in _instances(few, shallow_timeline, many, deep_timeline, changes):
        for first, last in tags:
            allocated = freed = None
            if block.allocated >= 0:
                allocated = deep_timeline.moment(block.allocated, first)
            if block.freed >= 0:
                freed = deep_timeline.freed(block.allocated, last, block.freed)
            if allocated is not None and freed is not None:
                # A block that a neighbouring layer frees may move before its allocation at an end
                # of the model.
                freed = max(allocated, freed)
            # A block from before the step is recorded at the node that frees it.
            tag = first if allocated is not None else last
            node = copies.number.get((block.row, tag), copies.number.get((block.row, 0), NONE))
            instances.append(_Instance(block, allocated, freed, node))
    return _numbered(instances, log)


@dataclass(frozen=True, slots=True)
class _Instance:
    """A block of the whole model, and the places of its allocation and free."""

    block: Block
    allocated: Moment | None
    freed: Moment | None
    node: int


def _instances(
    few: list[Block],
    few_timeline: MemoryTimeline,
    many: list[Block],
    many_timeline: MemoryTimeline,
    changes: NonlayerChanges,
) -> Iterator[tuple[Block, list[tuple[int, int]]]]:
    """Yield the blocks of the whole model with their instances.

    An instance is (copy of the allocating event, copy of the freeing event).
    """
    few_blocks, many_blocks = _by_node(few, few_timeline), _by_node(many, many_timeline)
    partner = {b: a for a, b in changes.pairs}
    for row, blocks in many_blocks.items():
        if row != RESIDENT and row not in partner:
            # Memory that Python allocates after a loop is recorded for the last operator of the
            # loop, and exists once: the previous repetition has no block of that size.
            previous = many_blocks.get(changes.before.get(row, NONE), [])
            sizes = Counter(block.bytes for block in previous)
            for block in blocks:
                event = block.allocated if block.allocated >= 0 else block.freed
                tags = many_timeline.tags(event)
                repeats = row not in changes.before or sizes[block.bytes] > 0
                sizes[block.bytes] -= 1
                yield block, [(tag, tag) for tag in (tags if repeats else tags[:1])]
            continue
        others = few_blocks[row if row == RESIDENT else partner[row]]
        for block, more in _grown(others, blocks, changes.extrapolation):
            yield block, [(0, tag) for tag in range(more + 1)]


def _by_node(blocks: list[Block], timeline: MemoryTimeline) -> dict[int, list[Block]]:
    """Return row -> blocks of a node; `RESIDENT` has those from before the step."""
    by_node: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        resident = block.allocated < 0 and block.freed not in timeline.at_layer
        by_node[RESIDENT if resident else block.row].append(block)
    return by_node


def _grown(
    few: list[Block], many: list[Block], extrapolation: DepthExtrapolation
) -> Iterator[tuple[Block, int]]:
    """Yield blocks with extrapolated sizes, and the number of their further repetitions."""
    if len(few) == len(many):
        for block, other in zip(few, many, strict=True):
            yield (
                replace(
                    other,
                    bytes=extrapolation.value(block.bytes, other.bytes),
                    spare=extrapolation.value(block.spare, other.spare),
                ),
                0,
            )
        return
    before, after = (
        [(block.bytes, block.memory_class) for block in blocks] for blocks in (few, many)
    )
    alignment = align(before, after, extrapolation.periods_between)
    units = [] if alignment is None else alignment.units
    repeated = {at for start, length in units for at in range(start, start + length)}
    yield from (
        (block, extrapolation.periods_beyond * (at in repeated)) for at, block in enumerate(many)
    )
    if alignment is None and many:
        total = extrapolation.value(
            *(sum(block.bytes for block in blocks) for blocks in (few, many))
        )
        # Blocks that no rule matches still grow: one more block keeps their total on the line.
        missing_bytes = total - sum(block.bytes for block in many)
        if missing_bytes > 0:
            yield replace(many[-1], bytes=missing_bytes, spare=0), 0


def _numbered(instances: list[_Instance], log: MemoryLog) -> MemoryLog:
    """Return a log with all allocations and frees in order and numbered."""
    moments = [
        (moment, kind, at)
        for at, instance in enumerate(instances)
        for kind, moment in enumerate((instance.allocated, instance.freed))
        if moment is not None
    ]
    place = {(at, kind): number for number, (_, kind, at) in enumerate(sorted(moments))}
    rows = [
        (place.get((at, 0), NONE), place.get((at, 1), NONE), instance.node, instance.block)
        for at, instance in enumerate(instances)
    ]
    # A block from before the step has no allocation, so its free places it.
    rows.sort(key=lambda row: row[0] if row[0] >= 0 else row[1])
    allocated, freed, node, blocks = zip(*rows, strict=True) if rows else ((), (), (), ())

    def unless_zero(column: tuple[int, ...]) -> tuple[int, ...]:
        return column if any(column) else ()

    return MemoryLog(
        Blocks(
            bytes=tuple(block.bytes for block in blocks),
            memory_class=tuple(block.memory_class for block in blocks),
            allocated_at=allocated,
            freed_at=freed,
            node=node,
            phase=tuple(block.phase for block in blocks),
            pool=unless_zero(tuple(block.pool for block in blocks)),
            spare_bytes=unless_zero(tuple(block.spare for block in blocks)),
            lingers=unless_zero(tuple(block.lingers for block in blocks)),
        ),
        events=len(moments),
        settings=log.settings,
    )


Sizes = dict[str, tuple[int, ...]]


class ResidentMemory(NamedTuple):
    """Bytes and pool of each storage by memory class, as in `Measurement`."""

    bytes: Sizes
    pools: Sizes


class BucketSizes(NamedTuple):
    """Bytes of DDP's gradient buckets in both captures and in the whole model."""

    shallow: list[int]
    deep: list[int]
    whole: list[int]


NO_BUCKETS = BucketSizes([], [], [])


def resident_at_depth(
    shallow: Measurement,
    deep: Measurement,
    extrapolation: DepthExtrapolation,
    buckets: BucketSizes = NO_BUCKETS,
) -> ResidentMemory:
    """Return the resident memory of the whole model; empty if a capture records none.

    A surplus of storages in the deeper capture is repeated. A storage whose size differs (a flat
    buffer of all parameters) is extrapolated linearly. Gradient buckets follow their own sizes.
    """
    sizes: Sizes = {}
    pools: Sizes = {}
    if not shallow.resident_bytes or not deep.resident_bytes:
        return ResidentMemory(sizes, pools)
    for name in deep.resident_bytes:
        few, many = _storages(shallow, name), _storages(deep, name)
        of_buckets = [_buckets_in(*pair) for pair in ((few, buckets.shallow), (many, buckets.deep))]
        # DDP's reducer owns the buckets: they are neither parameters nor gradients of the model.
        has_buckets = name == "other" and all(of_buckets)
        if has_buckets:
            few, many = few - of_buckets[0], many - of_buckets[1]
        storages = _extrapolated_storages(few, many, extrapolation)
        if storages is not None and has_buckets:
            pool = min(pool for _, pool in of_buckets[1])
            storages = sorted([*storages, *((size, pool) for size in buckets.whole)], reverse=True)
        if storages is None:
            return ResidentMemory({}, {})
        sizes[name] = tuple(size for size, _ in storages)
        pools[name] = tuple(pool for _, pool in storages)
    return ResidentMemory(sizes, pools if deep.resident_pools else {})


def _storages(measured: Measurement, name: str) -> Counter[tuple[int, int]]:
    sizes = measured.resident_bytes.get(name, ())
    pools = measured.resident_pools.get(name, ()) or (0,) * len(sizes)
    return Counter(zip(sizes, pools, strict=True))


def _buckets_in(storages: Counter[tuple[int, int]], sizes: list[int]) -> Counter[tuple[int, int]]:
    """Return the storages that are buckets; empty unless every bucket has a storage of its size."""
    missing = Counter(sizes)
    of_buckets = Counter[tuple[int, int]]()
    for (size, pool), count in storages.items():
        matched = min(count, missing[size])
        of_buckets[size, pool] += matched
        missing[size] -= matched
    return Counter() if missing.total() else +of_buckets


def _extrapolated_storages(
    few: Counter[tuple[int, int]], many: Counter[tuple[int, int]], extrapolation: DepthExtrapolation
) -> list[tuple[int, int]] | None:
    """Return (bytes, pool) of each storage, largest first; None if the deep capture has fewer."""
    # Storages of both captures, such as the embedding, do not depend on the depth.
    kept = few & many
    other = sorted((few - kept).elements(), reverse=True)
    surplus = sorted((many - kept).elements(), reverse=True)
    # A storage that exists only in the shallow capture follows no line.
    if len(other) > len(surplus):
        return None
    storages = Counter(kept)
    for (before, _), (after, pool) in zip(other, surplus, strict=False):
        storages[extrapolation.value(before, after), pool] += 1
    for storage, count in Counter(surplus[len(other) :]).items():
        storages[storage] += extrapolation.value(0, count)
    return sorted(storages.elements(), reverse=True)
