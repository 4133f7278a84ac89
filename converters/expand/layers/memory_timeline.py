"""Extrapolate the memory log and the resident memory to all layers.

An event is an allocation or a free. A layer owns the events of the deepest capture from its first
allocation to that of the next layer. A copy of a layer allocates the same blocks. It frees them at
the same distance in layers as in the capture, or at the same place outside the layers.

Blocks of operators outside the layers follow the shallowest and the deepest capture: equally many
blocks grow linearly, a surplus is repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from onerank.converters.expand.layers.captured_layers import LayeredGraph, LayerPlan
from onerank.converters.expand.layers.nonlayer_nodes import (
    DepthExtrapolation,
    NonlayerChanges,
    align,
)
from onerank.ir import Blocks, Measurement, MemoryLog
from onerank.ir.arrays import I64, Mask

NONE = -1


@dataclass(frozen=True, slots=True)
class LoggedBlock:
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
    """All copied nodes.

    Attributes:
        of: the sections that are copied together.
        number: id of each captured node and of its copies, NONE where there is no such copy:
            int64[nodes, 1 + copies].
    """

    of: Sequence[Copying]
    number: I64


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
    frees: dict[int, LoggedBlock] = field(default_factory=dict[int, LoggedBlock])

    def is_freed_in_next_iteration(self, block: LoggedBlock) -> bool:
        """Return whether a loop outside the layers frees the block in its next iteration."""
        span = self.copied.get(block.allocated)
        if span is None or block.freed < 0 or block.allocated in self.at_layer:
            return False
        previous = self.frees.get(span.first + block.freed - span.stop)
        return (
            span.stop <= block.freed < span.stop + span.stop - span.first
            and previous is not None
            and previous.bytes == self.frees[block.freed].bytes
            and previous.allocated < span.first
        )


class _Places:
    """Places of events and their copies in the composed timeline, for many events at once.

    A place is an int64[3]: start of the repeated range, repetition in it, event. Places sort by
    time.
    """

    def __init__(self, timeline: MemoryTimeline, events: int) -> None:
        self._plan, self._depth = timeline.plan, timeline.depth
        self._start = np.arange(events)
        self._stop, self._copies = np.zeros((2, events), dtype=np.int64)
        self._before = np.zeros(events, dtype=bool)
        for event, span in timeline.copied.items():
            self._start[event], self._stop[event] = span.first, span.stop
            self._copies[event], self._before[event] = span.copies, span.before
        self._pass, self._layer = np.full((2, events), NONE)
        for event, (number, layer) in timeline.at_layer.items():
            self._pass[event], self._layer[event] = number, layer
        shape = (1 + max((number for number, _ in timeline.first), default=0),
                 1 + max((layer for _, layer in timeline.first), default=0))  # fmt: skip
        self._first_of, self._stop_of = np.full((2, *shape), NONE)
        for layer_of_pass, first in timeline.first.items():
            self._first_of[layer_of_pass] = first
            self._stop_of[layer_of_pass] = timeline.stop[layer_of_pass]

    def of(self, event: I64, tag: I64) -> I64:
        """Return the places of instances of events: int64[n, 3]."""
        copies = self._copies[event]
        # The block may come from a range with more copies than the range of its free.
        tag = np.minimum(tag, copies)
        # In a backward the copies run before their original, the last copy first.
        repetition = np.where(self._before[event], copies - tag, tag)
        return np.stack([self._start[event], repetition, event], axis=1)

    def freed(self, allocated: I64, tag: I64, freed: I64, in_next_iteration: Mask) -> I64:
        """Return the places at which instances of blocks are freed: int64[n, 3].

        Args:
            allocated: events that allocate the blocks, NONE before the step.
            tag: numbers of the instances.
            freed: events that free the blocks.
            in_next_iteration: whether a loop frees a block in its next iteration.
        """
        event, copy = freed.copy(), tag.copy()
        later = in_next_iteration & (tag < self._copies[allocated])
        event[later] += self._start[allocated[later]] - self._stop[allocated[later]]
        copy[later] += 1
        layer = np.where(allocated >= 0, self._layer[allocated], NONE)
        other = self._layer[freed]
        moved = np.flatnonzero((layer >= 0) & (other >= 0) & (layer != other))
        plan, number_of_pass, other = self._plan, self._pass[freed[moved]], other[moved]
        number = plan.layers(layer[moved], tag[moved]) + other - layer[moved]
        # At an end of the model no layer has that distance; the nearest one frees the block.
        captured, copy[moved] = plan.instances(np.clip(number, 0, self._depth - 1))
        at = self._first_of[number_of_pass, captured] + freed[moved]
        at -= self._first_of[number_of_pass, other]
        # A first or last layer may have fewer events than the captured one.
        event[moved] = np.minimum(at, self._stop_of[number_of_pass, captured] - 1)
        return self.of(event, copy)


def blocks_of(capture: LayeredGraph) -> list[LoggedBlock] | None:
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
    return [LoggedBlock(*values) for values in zip(*columns, strict=True)]


def memory_timeline(
    deep: LayeredGraph, plan: LayerPlan, copying: Sequence[Copying], blocks: list[LoggedBlock]
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
    repeated = [*_repeated_blocks(few, shallow_timeline, many, deep_timeline, changes)]
    return _composed(repeated, deep_timeline, copies.number, log)


class _RepeatedBlock(NamedTuple):
    """A block of the whole model.

    Attributes:
        block: as captured.
        instances: number of instances.
        frees_only: whether only its free repeats: a block from before the step.
    """

    block: LoggedBlock
    instances: int
    frees_only: bool


def _repeated_blocks(
    few: list[LoggedBlock],
    few_timeline: MemoryTimeline,
    many: list[LoggedBlock],
    many_timeline: MemoryTimeline,
    changes: NonlayerChanges,
) -> Iterator[_RepeatedBlock]:
    """Yield the blocks of the whole model."""
    few_blocks, many_blocks = _by_node(few, few_timeline), _by_node(many, many_timeline)
    partner = {b: a for a, b in changes.pairs}
    for row, blocks in many_blocks.items():
        if row != RESIDENT and row not in partner:
            # Memory that Python allocates after a loop is recorded for the last operator of the
            # loop, and exists once: the previous repetition has no block of that size.
            previous = many_blocks.get(changes.before.get(row, NONE), [])
            sizes = Counter(block.bytes for block in previous)
            for block in blocks:
                span = many_timeline.copied.get(
                    block.allocated if block.allocated >= 0 else block.freed
                )
                repeats = row not in changes.before or sizes[block.bytes] > 0
                sizes[block.bytes] -= 1
                copies = span.copies if span is not None and repeats else 0
                yield _RepeatedBlock(block, 1 + copies, frees_only=False)
            continue
        others = few_blocks[row if row == RESIDENT else partner[row]]
        for block, more in _grown(others, blocks, changes.extrapolation):
            yield _RepeatedBlock(block, 1 + more, frees_only=True)


def _by_node(blocks: list[LoggedBlock], timeline: MemoryTimeline) -> dict[int, list[LoggedBlock]]:
    """Return row -> blocks of a node; `RESIDENT` has those from before the step."""
    by_node: dict[int, list[LoggedBlock]] = defaultdict(list)
    for block in blocks:
        resident = block.allocated < 0 and block.freed not in timeline.at_layer
        by_node[RESIDENT if resident else block.row].append(block)
    return by_node


def _grown(
    few: list[LoggedBlock], many: list[LoggedBlock], extrapolation: DepthExtrapolation
) -> Iterator[tuple[LoggedBlock, int]]:
    """Yield blocks with extrapolated sizes, and the number of their further repetitions."""
    if len(few) == len(many):
        for block, other in zip(few, many, strict=True):
            if (block.bytes, block.spare) == (other.bytes, other.spare):
                yield other, 0
                continue
            sizes = {
                "bytes": extrapolation.value(block.bytes, other.bytes),
                "spare": extrapolation.value(block.spare, other.spare),
            }
            yield replace(other, **sizes), 0
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


def _composed(
    repeated: Sequence[_RepeatedBlock], timeline: MemoryTimeline, number: I64, log: MemoryLog
) -> MemoryLog:
    """Return a log with all instances of the blocks, its events in order and numbered.

    Args:
        repeated: the blocks.
        timeline: events of the deepest capture.
        number: as in `Copies`.
        log: of the deepest capture.
    """
    blocks = [each.block for each in repeated]
    count = np.array([each.instances for each in repeated], dtype=np.int64)
    of = np.repeat(np.arange(len(blocks)), count)
    last = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    first = np.where(np.array([each.frees_only for each in repeated], dtype=bool)[of], 0, last)

    def column(name: str) -> I64:
        return np.array([getattr(block, name) for block in blocks], dtype=np.int64)[of]

    allocated, freed, row = column("allocated"), column("freed"), column("row")
    in_next = np.array([*map(timeline.is_freed_in_next_iteration, blocks)], dtype=bool)[of]
    places = _Places(timeline, log.events)
    begins, ends = np.flatnonzero(allocated >= 0), np.flatnonzero(freed >= 0)
    begun_at = np.zeros((len(of), 3), dtype=np.int64)
    begun_at[begins] = places.of(allocated[begins], first[begins])
    ended_at = places.freed(allocated[ends], last[ends], freed[ends], in_next[ends])
    # A block that a neighbouring layer frees may move before its allocation at an end of the model.
    early = (allocated[ends] >= 0) & _precedes(ended_at, begun_at[ends])
    ended_at[early] = begun_at[ends][early]
    place = _event_numbers(len(of), (begins, ends), (begun_at[begins], ended_at))
    # A block from before the step is recorded at the node that frees it.
    node = _nodes_of_instances(row, np.where(allocated >= 0, first, last), number)
    # A block from before the step has no allocation, so its free places it.
    rows = np.argsort(np.where(place[:, 0] >= 0, place[:, 0], place[:, 1]), kind="stable")

    def values(column: I64) -> tuple[int, ...]:
        return tuple(column[rows].tolist())

    def unless_zero(column: I64) -> tuple[int, ...]:
        return values(column) if column.any() else ()

    return MemoryLog(
        Blocks(
            bytes=values(column("bytes")),
            memory_class=values(column("memory_class")),
            allocated_at=values(place[:, 0]),
            freed_at=values(place[:, 1]),
            node=values(node),
            phase=values(column("phase")),
            pool=unless_zero(column("pool")),
            spare_bytes=unless_zero(column("spare")),
            lingers=unless_zero(column("lingers")),
        ),
        events=len(begins) + len(ends),
        settings=log.settings,
    )


def _event_numbers(count: int, instances: tuple[I64, I64], moments: tuple[I64, I64]) -> I64:
    """Return the numbers of each instance's allocation and free; NONE for none, int64[count, 2].

    Args:
        count: instances.
        instances: those that are allocated, and those that are freed.
        moments: when, as from `_Places`, of each.
    """
    at = np.concatenate(instances)
    kind = np.repeat([0, 1], [len(part) for part in instances])
    order = np.lexsort((at, kind, *np.concatenate(moments).T[::-1]))
    number = np.full((count, 2), NONE, dtype=np.int64)
    number[at[order], kind[order]] = np.arange(len(order))
    return number


def _nodes_of_instances(row: I64, copy: I64, number: I64) -> I64:
    """Return the composed node of each instance of a block, NONE without one, int64[n].

    Args:
        row: node of the block in the deepest capture, or NONE, int64[n].
        copy: copy of that node, int64[n]. If the composed graph lacks the copy, the original node
            is returned.
        number: as in `Copies`.
    """
    copies = number.shape[1]
    node = number[row, np.minimum(copy, copies - 1)]
    node = np.where((node == NONE) | (copy >= copies), number[row, 0], node)
    node[row == NONE] = NONE
    return node


def _precedes(places: I64, others: I64) -> Mask:
    """Return whether each place, int64[n, 3], is before the other one."""
    before = np.zeros(len(places), dtype=bool)
    equal = np.ones(len(places), dtype=bool)
    for level, other in zip(places.T, others.T, strict=True):
        before |= equal & (level < other)
        equal &= level == other
    return before


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
