"""The course of a capture's allocations and frees: where each layer's are, what appears again."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onerank.converters.depths.outline import Outline
from onerank.converters.depths.plan import Plan

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
class Course:
    """The deepest capture's events: where each layer's are, and which appear again.

    Attributes:
        first: (pass, layer) -> its first event.
        stop: (pass, layer) -> where they end.
        at_layer: event -> (pass, layer), of those within layers.
        copied: event -> the stretch it is in, of those that appear again.
        frees: event -> the block it frees.
    """

    plan: Plan
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


def blocks_of(one: Outline) -> list[Block] | None:
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
    deep: Outline, plan: Plan, copying: Sequence[Copying], blocks: list[Block]
) -> Course | None:
    """Find the events of the layers and of what is copied; None where they are in no order."""
    own: dict[int, list[int]] = defaultdict(list)  # by node
    for block in blocks:
        if block.made >= 0 and block.row >= 0:
            own[block.row].append(block.made)
    made = sorted((event, row) for row, several in own.items() for event in several)
    found = Course(plan, deep.layers + plan.added)
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
