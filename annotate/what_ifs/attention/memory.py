"""Memory of attention taken apart: what forward keeps, and what a call holds while it runs."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.memory.held import most_in_use
from onerank.annotate.what_ifs.attention.eager import Bytes
from onerank.ir import Blocks, Graph, Measurement, MemoryClass, MemoryLog, Phase


class AttentionCall(NamedTuple):
    """A call of attention: when it began, what it takes, and which pass it is."""

    start_ns: int
    takes: Bytes
    is_backward: bool


def with_scores(graph: Graph, calls: Sequence[AttentionCall]) -> tuple[Measurement, str]:
    """Return the measurement with the blocks of eager attention, and a sentence on the peak.

    A backward call frees what the last forward call not yet freed has kept: backward runs in the
    opposite order.
    """
    measured = graph.job.measurement
    log = measured.memory
    if log is None:
        none = msgspec.structs.replace(measured, peak_memory_bytes=0, activation_bytes=())
        kept = sum(call.takes.kept for call in calls if not call.is_backward)
        return none, f"its calls keep {kept} bytes for backward, and the peak is not known."
    before = most_in_use(log)
    made = _with_blocks(log, calls, _moments(graph, log, [call.start_ns for call in calls]))
    more = most_in_use(made) - before
    kept = sum(call.takes.kept for call in calls if not call.is_backward)
    micro_batches = max(1, len(measured.activation_bytes))
    changed = msgspec.structs.replace(
        measured,
        memory=made,
        peak_memory_bytes=measured.peak_memory_bytes + more,
        activation_bytes=tuple(b + kept // micro_batches for b in measured.activation_bytes),
    )
    return changed, f"the peak of memory rises by {more} bytes."


def _moments(graph: Graph, log: MemoryLog, starts: list[int]) -> list[int]:
    """Return at which event of the log each time is: the first of a node that started later."""
    order = np.argsort(graph.nodes.id)
    ids = np.array(log.blocks.node, dtype=np.int64)
    at = np.array(log.blocks.allocated_at, dtype=np.int64)
    known = (ids >= 0) & (at >= 0)
    sorted_ids = graph.nodes.id[order].astype(np.int64)
    place = np.minimum(np.searchsorted(sorted_ids, ids[known]), len(order) - 1)
    there = sorted_ids[place] == ids[known]
    events = at[known][there]
    times = graph.nodes.start_ns[order[place[there]]]
    by_event = np.argsort(events)
    events, times = events[by_event], np.maximum.accumulate(times[by_event])
    first = np.searchsorted(times, np.array(starts), side="left")
    return [int(events[one]) if one < len(events) else log.events for one in first.tolist()]


def _with_blocks(log: MemoryLog, calls: Sequence[AttentionCall], moments: list[int]) -> MemoryLog:
    """Return the log with the blocks of the calls; events later than each move back."""
    marks: list[tuple[int, int, int]] = []  # (old event, block, +1 allocated or -1 freed)
    sizes: list[tuple[int, MemoryClass, Phase]] = []
    held: list[int] = []
    for call, moment in sorted(zip(calls, moments, strict=True), key=lambda one: one[0].start_ns):
        phase = Phase.BACKWARD if call.is_backward else Phase.FORWARD
        own = call.takes.backward if call.is_backward else call.takes.forward
        if not call.is_backward:
            held.append(len(sizes))
            sizes.append((call.takes.kept, MemoryClass.ACTIVATIONS, phase))
            marks.append((moment, len(sizes) - 1, 1))
        sizes.append((own, MemoryClass.WORKSPACE, phase))
        marks += [(moment, len(sizes) - 1, 1), (moment, len(sizes) - 1, -1)]
        if call.is_backward and held:
            marks.append((moment, held.pop(), -1))
    position = np.array([mark[0] for mark in marks], dtype=np.int64)
    shift = np.searchsorted(np.sort(position), np.arange(log.events + 1), side="right")
    blocks = log.blocks
    old = {name: [at + int(shift[at]) if at >= 0 else at for at in getattr(blocks, name)]
           for name in ("allocated_at", "freed_at")}  # fmt: skip
    order = np.argsort(position, kind="stable")
    place = np.empty(len(marks), dtype=np.int64)
    place[order] = position[order] + np.arange(len(marks))
    new = {1: dict[int, int](), -1: dict[int, int]()}
    for (_, block, sign), at in zip(marks, place.tolist(), strict=True):
        new[sign][block] = at
    count = len(sizes)
    made = Blocks(
        bytes=(*blocks.bytes, *(size for size, _, _ in sizes)),
        memory_class=(*blocks.memory_class, *(int(sort) for _, sort, _ in sizes)),
        allocated_at=(*old["allocated_at"], *(new[1][one] for one in range(count))),
        freed_at=(*old["freed_at"], *(new[-1].get(one, -1) for one in range(count))),
        node=(*blocks.node, *[-1] * count),
        phase=(*blocks.phase, *(int(phase) for _, _, phase in sizes)),
    )
    return MemoryLog(made, log.events + len(marks))
