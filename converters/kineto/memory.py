"""Allocations and frees of a trace, joined with the operator during which they happened."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from onerank.converters.kineto.host import HostTimeline, micro_batches
from onerank.converters.kineto.load import Event
from onerank.ir import Phase

_CPU = 0


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
        peak_total_bytes: highest total the allocator reported; on a CPU it counts only what was
            allocated while a profiler ran.
    """

    allocated: dict[int, int] = field(default_factory=dict[int, int])
    freed: dict[int, int] = field(default_factory=dict[int, int])
    events: int = 0
    outside: int = 0
    elsewhere: int = 0
    peak_rise_bytes: int = 0
    peak_total_bytes: int = 0


def memory(events: Iterable[Event], timeline: HostTimeline, *, on_gpu: bool) -> Memory:
    """Join the `[memory]` instants of one kind of device with operators, by thread and time."""
    found = Memory()
    level = 0
    instants = [event for event in events if event.name == "[memory]"]
    for event in sorted(instants, key=lambda e: (e.start_ns, e.args.event_index)):
        if (event.args.memory_device_type != _CPU) != on_gpu:
            found.elsewhere += 1
            continue
        found.events += 1
        size = event.args.memory_bytes
        level += size
        found.peak_rise_bytes = max(found.peak_rise_bytes, level)
        found.peak_total_bytes = max(found.peak_total_bytes, event.args.memory_allocated)
        around = timeline.innermost(event.tid, event.start_ns)
        op = timeline.operator(around) if around else None
        if op is None:
            found.outside += 1
            op = timeline.last_before(event.tid, event.start_ns) or around
        if op is not None:
            account = found.allocated if size > 0 else found.freed
            account[op.index] = account.get(op.index, 0) + abs(size)
    return found


def activations(
    events: Iterable[Event], timeline: HostTimeline, *, on_gpu: bool
) -> tuple[int, ...]:
    """Return the bytes each micro-batch allocated in its forward and held as its backward began.

    What was freed meanwhile but allocated before (gradients, by zero_grad) does not count.
    """
    spans: dict[int, dict[Phase, int]] = {}
    for index, micro_batch in micro_batches(timeline).items():
        op = timeline.ops[index]
        begins = spans.setdefault(micro_batch, {})
        begins[op.phase] = min(op.start_ns, begins.get(op.phase, op.start_ns))
    complete = [span for _, span in sorted(spans.items()) if len(span) == 2]
    instants = sorted(
        (
            event
            for event in events
            if event.name == "[memory]" and (event.args.memory_device_type != _CPU) == on_gpu
        ),
        key=lambda e: (e.start_ns, e.args.event_index),
    )
    held: list[int] = []
    position = 0
    for span in complete:
        live: dict[int, int] = {}
        while position < len(instants) and instants[position].start_ns < span[Phase.BACKWARD]:
            event = instants[position]
            position += 1
            if event.start_ns < span[Phase.FORWARD]:
                continue
            if event.args.memory_bytes > 0:
                live[event.args.memory_address] = event.args.memory_bytes
            else:
                live.pop(event.args.memory_address, None)
        held.append(sum(live.values()))
    return tuple(held)
