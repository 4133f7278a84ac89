"""Allocations and frees of a trace, joined with the operator during which they happened."""

from dataclasses import dataclass, field

import numpy as np

from onerank.converters.kineto.blocks import BlockRows, blocks
from onerank.converters.kineto.columns import I64, MemoryRows, pick
from onerank.converters.kineto.history import History, told_by
from onerank.converters.kineto.host import NONE, HostTimeline
from onerank.ir import Phase

_CPU = 0

_ALIKE = 0.02
"""Share of the bytes allocated by which two like steps may differ."""


@dataclass(slots=True)
class Memory:
    """Bytes per host event, and the course of the device's total.

    Attributes:
        allocated: index of the host event -> bytes allocated during it, or after it in Python.
        freed: index of the host event -> bytes freed, likewise.
        events: allocations and frees on the device.
        outside: of these, those outside any operator.
        elsewhere: those of another kind of device, left out.
        peak_rise_bytes: highest level above that of the window's start.
        start_total_bytes: total of the allocator before the first event; 0 on a CPU, as below.
        peak_total_bytes: highest total the allocator reported; on a CPU it counts only what was
            allocated while a profiler ran.
        peak_reserved_bytes: most that the caching allocator had reserved, before the profiler came
            where the history tells; 0 on a CPU.
        blocks: the blocks behind these figures, None without events.
        note: a sentence where the allocator's history does not belong to these events, else "".
    """

    allocated: dict[int, int] = field(default_factory=dict[int, int])
    freed: dict[int, int] = field(default_factory=dict[int, int])
    events: int = 0
    outside: int = 0
    elsewhere: int = 0
    peak_rise_bytes: int = 0
    start_total_bytes: int = 0
    peak_total_bytes: int = 0
    peak_reserved_bytes: int = 0
    blocks: BlockRows | None = None
    note: str = ""


def on_device(rows: MemoryRows, *, on_gpu: bool) -> MemoryRows:
    """Return the events of one kind of device, in the order of their time."""
    chosen = np.flatnonzero((rows.device_type != _CPU) == on_gpu)
    order = np.lexsort((rows.event_index[chosen], rows.start_ns[chosen]))
    return rows.take(chosen[order])


def differing_steps(profile: MemoryRows, structure: MemoryRows) -> str:
    """Return a sentence where two windows' steps took unlike amounts of memory, else ""."""
    on_gpu = bool((structure.device_type != _CPU).any())
    taken = [on_device(rows, on_gpu=on_gpu).bytes for rows in (profile, structure)]
    ours, theirs = (int(sizes[sizes > 0].sum()) for sizes in taken)
    if abs(ours - theirs) <= _ALIKE * max(ours, theirs):
        return ""
    return (
        f"the step that gives times took {ours} bytes of memory and the one that gives shapes "
        f"{theirs}: the script's steps differ (in the shapes of its batches, for one), so that "
        "times and shapes do not belong together; let its batches be of one shape"
    )


def memory(
    rows: MemoryRows, timeline: HostTimeline, history: History | None = None, *, on_gpu: bool
) -> Memory:
    """Join the `[memory]` instants of one kind of device with operators, by thread and time.

    And with the allocator's history of the same step, where there is one.
    """
    mine = on_device(rows, on_gpu=on_gpu)
    found = Memory(events=len(mine), elsewhere=len(rows) - len(mine))
    if not len(mine):
        return found
    found.peak_rise_bytes = max(0, int(np.cumsum(mine.bytes).max()))
    if on_gpu:
        found.start_total_bytes = max(0, int(mine.allocated[0] - mine.bytes[0]))
    found.peak_total_bytes = max(0, int(mine.allocated.max()))
    found.peak_reserved_bytes = max(0, int(mine.reserved.max()))
    around = timeline.innermost(mine.thread, mine.start_ns)
    op = timeline.operator(around)
    outside = np.flatnonzero(op < 0)
    found.outside = len(outside)
    op[outside] = timeline.last_before(mine.thread[outside], mine.start_ns[outside])
    if history is not None and history.reserved_bytes:
        found.peak_reserved_bytes = history.reserved_bytes
    told = told_by(history, mine) if history is not None else None
    if history is not None and told is None:
        found.note = (
            f"the allocator's history of {len(history.action)} actions is of another course than "
            f"the profiler's {len(mine)} allocations and frees: of which stream a block is, is not "
            "known"
        )
    found.blocks = blocks(mine, timeline, around, op, told)
    for account, chosen in ((found.allocated, mine.bytes > 0), (found.freed, mine.bytes <= 0)):
        events = np.flatnonzero(chosen & (op >= 0))
        ops, places = np.unique(op[events], return_inverse=True)
        sizes = np.zeros(len(ops), dtype=np.int64)
        np.add.at(sizes, places, np.abs(mine.bytes[events]))
        account.update(zip(ops.tolist(), sizes.tolist(), strict=True))
    return found


def activations(rows: MemoryRows, timeline: HostTimeline, *, on_gpu: bool) -> tuple[int, ...]:
    """Return the bytes each micro-batch allocated in its forward and held as its backward began.

    What was freed meanwhile but allocated before (gradients, by zero_grad) does not count. Where
    micro-batches overlap, what was allocated between their forwards counts for none of them.
    """
    spans = _spans(timeline)
    mine = on_device(rows, on_gpu=on_gpu)
    owners = _owners(spans, mine, timeline)
    starts, sizes = mine.start_ns.tolist(), mine.bytes.tolist()
    addresses = mine.address.tolist()
    live: dict[int, tuple[int, int]] = {}
    total = dict.fromkeys(spans, 0)
    held: dict[int, int] = {}
    position = 0
    for number in sorted(spans, key=lambda number: spans[number][1]):
        while position < len(starts) and starts[position] < spans[number][1]:
            owner, size = live.pop(addresses[position], (NONE, 0))
            if owner >= 0:
                total[owner] -= size
            if sizes[position] > 0 and owners[position] >= 0:
                live[addresses[position]] = (owners[position], sizes[position])
                total[owners[position]] += sizes[position]
            position += 1
        held[number] = total[number]
    return tuple(held[number] for number in spans)


def _owners(
    spans: dict[int, tuple[int, int]], mine: MemoryRows, timeline: HostTimeline
) -> list[int]:
    """Return the micro-batch for which each allocation counts, NONE for none.

    Of micro-batches that follow each other, all that comes between forward and backward; of others,
    what comes within a forward.
    """
    numbers = np.array([*spans], dtype=np.int64)
    forward, backward = np.array([*spans.values()], dtype=np.int64).reshape(-1, 2).T
    if (forward[1:] >= backward[:-1]).all():
        last = np.searchsorted(forward, mine.start_ns, side="right") - 1
        inside = (last >= 0) & (mine.start_ns < pick(backward, last, 0))
        return np.where(inside, pick(numbers, last, NONE), NONE).tolist()
    around = timeline.innermost(mine.thread, mine.start_ns)
    told = np.where(pick(timeline.phase, around, NONE) == Phase.FORWARD, around, NONE)
    owners = pick(timeline.micro_batch, told, NONE)
    return np.where(np.isin(owners, numbers), owners, NONE).tolist()


def _spans(timeline: HostTimeline) -> dict[int, tuple[int, int]]:
    """Return when forward and backward begin, by the number of each micro-batch that has both."""
    micro_batch = timeline.micro_batch
    count = int(micro_batch.max()) + 1 if len(micro_batch) else 0
    latest = np.iinfo(np.int64).max
    begins: list[I64] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        chosen = (timeline.phase == phase) & (micro_batch >= 0)
        first = np.full(count, latest)
        np.minimum.at(first, micro_batch[chosen], timeline.rows.start_ns[chosen])
        begins.append(first)
    pairs = zip(begins[0].tolist(), begins[1].tolist(), strict=True)
    return {number: pair for number, pair in enumerate(pairs) if latest not in pair}
