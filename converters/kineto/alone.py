"""How long kernels take with no communication beside them.

A capture that paces its collectives records one more window, in which they only leave markers. Its
kernels pair up with those of the profiled window: operator by operator, as `adopt` pairs windows,
and within an operator in launch order, where the names agree.
"""

from collections import defaultdict
from collections.abc import Iterable

from onerank.converters.kineto.adopt import pairs
from onerank.converters.kineto.device import GpuOp, link
from onerank.converters.kineto.host import HostOp, HostTimeline
from onerank.converters.kineto.load import HOST_CATEGORIES, KinetoTrace

Alone = dict[tuple[int, int], int]
"""`GpuOp.key` of the profiled window -> nanoseconds alone."""


def alone_durations(
    timeline: HostTimeline, gpu: Iterable[GpuOp], alone: KinetoTrace
) -> tuple[Alone, int]:
    """Return the durations alone, and how many GPU operations found no partner.

    Args:
        timeline: host events of the profiled window.
        gpu: its GPU operations.
        alone: the window without communication beside.
    """
    events = (e for e in alone.events if e.cat in HOST_CATEGORIES and e.ph == "X")
    other_timeline = HostTimeline(events)
    own = [op for op in gpu if op.in_mark < 0]
    launched = _by_operator(own)
    other_launched = _by_operator(op for op in link(alone.events, other_timeline) if op.in_mark < 0)
    found: Alone = {}
    for mine, other in zip(_by_thread(timeline), _by_thread(other_timeline), strict=False):
        for op, twin in pairs(mine, other):
            kernels, others = launched.get(op.index, []), other_launched.get(twin.index, [])
            for kernel, its_twin in zip(kernels, others, strict=False):
                if kernel.event.name == its_twin.event.name:
                    found[kernel.key] = its_twin.duration_ns
    return found, len(own) - len(found)


def _by_operator(gpu: Iterable[GpuOp]) -> dict[int, list[GpuOp]]:
    made: dict[int, list[GpuOp]] = defaultdict(list)
    for op in gpu:
        if op.operator is not None:
            made[op.operator.index].append(op)
    return made


def _by_thread(timeline: HostTimeline) -> list[list[HostOp]]:
    """Host events outside of marks per thread, the threads in the order of their first event."""
    spans = sorted(timeline.threads.values(), key=lambda span: timeline.ops[span[0]].start_ns)
    return [[op for op in timeline.ops[span.start : span.stop] if op.in_mark < 0] for span in spans]
