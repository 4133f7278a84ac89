"""The capture's recorded calls: what was asked for, what stood in for it, where it was awaited."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.columns import ExecutionTrace
from onerank.converters.kineto.communication import Communication, awaited, from_mark
from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.host import HostTimeline


@dataclass(slots=True, eq=False)
class Recorded:
    """A recorded call.

    Attributes:
        op: index of its mark.
        communication: what was asked for.
        stand_ins: rows of the kernels in its place, in the order of their start; none on a CPU.
        waits: indices of the marks of the waits for it, in order; torch's C++ code may wait
            without one.
    """

    op: int
    communication: Communication
    stand_ins: list[int] = field(default_factory=list[int])
    waits: list[int] = field(default_factory=list[int])


def recorded_calls(timeline: HostTimeline, gpu: GpuOps, et: ExecutionTrace) -> list[Recorded]:
    """Return the recorded calls in the order of their marks.

    Raises:
        TraceError: a mark does not hold what it should.
    """
    by_mark: dict[int, list[int]] = defaultdict(list)
    standing = np.flatnonzero(gpu.stands_in)
    standing = standing[np.argsort(gpu.rows.start_ns[standing], kind="stable")]
    for row, mark in zip(standing.tolist(), gpu.in_mark[standing].tolist(), strict=True):
        by_mark[mark].append(row)
    calls: list[Recorded] = []
    by_sequence: dict[int, Recorded] = {}
    for op in np.flatnonzero(timeline.is_mark).tolist():
        call = Recorded(op, from_mark(timeline, op, et), by_mark[op])
        calls.append(call)
        by_sequence[call.communication.sequence] = call
    waits = np.flatnonzero(timeline.is_wait)
    for op in waits[np.argsort(timeline.rows.start_ns[waits], kind="stable")].tolist():
        if call := by_sequence.get(awaited(timeline, op, et)):
            call.waits.append(op)
    return calls


def end_of_wait(call: Recorded, timeline: HostTimeline, kept: npt.NDArray[np.int64]) -> int:
    """Return the first kept operator that runs behind the wait for a call, -1 for no such.

    Where the wait left no mark, the call was issued by DDP's reducer, which waits for all its calls
    when backward ends: behind it lies the first operator that is not backward's.

    Args:
        call: an asynchronous call.
        timeline: the host events.
        kept: indices of the operators that are nodes, by start.
    """
    rows = timeline.rows
    if call.waits:
        wait = call.waits[0]
        after = kept[np.searchsorted(rows.start_ns[kept], rows.start_ns[wait]) :]
        found = np.flatnonzero(rows.thread[after] == rows.thread[wait])
    else:
        after = kept[np.searchsorted(rows.start_ns[kept], rows.end_ns[call.op]) :]
        found = np.flatnonzero(~timeline.in_functions[after])
    return int(after[found[0]]) if len(found) else -1


def wait_is_known(call: Recorded, timeline: HostTimeline) -> bool:
    """Whether it can be told where an asynchronous call is waited for, on a CPU."""
    return bool(call.waits) or bool(timeline.in_functions[call.op])
