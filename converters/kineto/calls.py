"""The capture's recorded calls: what was asked for, what stood in for it, where it was awaited."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from onerank.converters.kineto.communication import Communication, awaited, from_mark
from onerank.converters.kineto.device import PACED_STAND_IN, GpuOp
from onerank.converters.kineto.host import HostOp, HostTimeline
from onerank.ir import Phase


@dataclass(slots=True, eq=False)
class Recorded:
    """A recorded call.

    Attributes:
        op: its mark.
        communication: what was asked for.
        stand_ins: the kernels in its place, in the order of their start; none on a CPU.
        waits: marks of the waits for it, in order; torch's C++ code may wait without one.
    """

    op: HostOp
    communication: Communication
    stand_ins: list[GpuOp] = field(default_factory=list[GpuOp])
    waits: list[HostOp] = field(default_factory=list[HostOp])

    @property
    def paced(self) -> bool:
        """Whether what stood in for it took the time of a network."""
        return any(op.event.name.startswith(PACED_STAND_IN) for op in self.stand_ins)


def recorded_calls(timeline: HostTimeline, gpu: Iterable[GpuOp], et_path: str) -> list[Recorded]:
    """Return the recorded calls in the order of their marks.

    Raises:
        TraceError: a mark does not hold what it should.
    """
    by_mark: dict[int, list[GpuOp]] = defaultdict(list)
    for op in gpu:
        if op.stands_in:
            by_mark[op.in_mark].append(op)
    calls: list[Recorded] = []
    by_sequence: dict[int, Recorded] = {}
    for op in timeline:
        if op.is_mark:
            stand_ins = sorted(by_mark[op.index], key=lambda kernel: kernel.start_ns)
            call = Recorded(op, from_mark(op, et_path), stand_ins)
            calls.append(call)
            by_sequence[call.communication.sequence] = call
    for op in sorted(timeline, key=lambda op: op.start_ns):
        if op.is_wait and (call := by_sequence.get(awaited(op, et_path))):
            call.waits.append(op)
    return calls


def end_of_wait(call: Recorded, kept: list[HostOp]) -> HostOp | None:
    """Return the first kept operator that runs behind the wait for a call, None for no such.

    Where the wait left no mark, the call was issued by DDP's reducer, which waits for all its calls
    when backward ends: behind it lies the first operator that is not backward's.

    Args:
        call: an asynchronous call.
        kept: operators that are nodes, by start.
    """
    if call.waits:
        wait = call.waits[0]
        return next(
            (op for op in kept if op.thread == wait.thread and op.start_ns >= wait.start_ns), None
        )
    return next(
        (op for op in kept if op.start_ns >= call.op.end_ns and op.phase is not Phase.BACKWARD),
        None,
    )


def wait_is_known(call: Recorded) -> bool:
    """Whether it can be told where an asynchronous call is waited for, on a CPU."""
    return bool(call.waits) or call.op.phase is Phase.BACKWARD
