"""Blocks of memory at a depth that was not captured: the deepest capture's, copied with its layers.

Of the deepest capture's allocations and frees a layer has those from its first allocation to the
next layer's. What a layer allocates its copy allocates too; it is freed as many layers away as in
the capture, or at the same place outside of the layers. What an operator outside allocates follows
the shallowest and the deepest capture: as many blocks grow on a line, more are repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from onerank.converters.depths.course import (
    NONE,
    Block,
    Copies,
    Course,
    Moment,
    blocks_of,
    course_of,
)
from onerank.converters.depths.growth import Stretch, align
from onerank.converters.depths.outline import Outline
from onerank.converters.depths.outside import Outside
from onerank.converters.depths.plan import Plan
from onerank.ir import Blocks, MemoryLog

OUTSIDE = -2
"""In place of a node's row: held before the step, and let go outside of layers."""


def composed_log(
    shallow: Outline,
    deep: Outline,
    plan: Plan,
    changes: Outside,
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
    other: Course,
    many: list[Block],
    course: Course,
    changes: Outside,
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


def _by_node(blocks: list[Block], course: Course) -> dict[int, list[Block]]:
    """Group blocks by their nodes; those held before and let go outside of layers in one."""
    found: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        held = block.made < 0 and block.freed not in course.at_layer
        found[OUTSIDE if held else block.row].append(block)
    return found


def _grown(few: list[Block], many: list[Block], stretch: Stretch) -> Iterator[tuple[Block, int]]:
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
