"""Host events as call trees, one per thread, with the module and phase each belongs to."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onerank.converters.kineto.load import Args, EtNode, Event
from onerank.ir import Phase

MODULE_SCOPE = "onerank::module::"
COMM_MARK = "onerank::comm"
WAIT_MARK = "onerank::wait"
_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATES = "::AccumulateGrad"
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


@dataclass(slots=True)
class HostOp:
    """A host event in its thread's call tree; `parent` is the index of its caller."""

    index: int
    name: str
    is_operator: bool
    thread: int | str
    start_ns: int
    end_ns: int
    args_rf_id: int
    external_id: int
    sequence: int
    forward_thread: int
    args: Args
    parent: int = -1
    et: EtNode | None = None
    module: str = ""
    phase: Phase = Phase.NONE
    in_mark: int = -1
    """Index of the enclosing communication mark (itself included), or -1."""

    @property
    def is_mark(self) -> bool:
        """Whether the event is the capture's record of a collective."""
        return self.name == COMM_MARK

    @property
    def is_wait(self) -> bool:
        """Whether the event is the capture's record of a wait for an asynchronous call."""
        return self.name == WAIT_MARK


class HostTimeline:
    """All host events, ordered by thread, then in call order (parents before callees)."""

    def __init__(self, events: Iterable[Event]) -> None:
        by_thread: dict[int | str, list[Event]] = {}
        for event in events:
            by_thread.setdefault(event.tid, []).append(event)
        self.ops: list[HostOp] = []
        self.threads: dict[int | str, range] = {}
        self._starts: dict[int | str, list[int]] = {}
        for thread, members in by_thread.items():
            first = len(self.ops)
            self._add_thread(thread, members)
            self.threads[thread] = range(first, len(self.ops))
            self._starts[thread] = [op.start_ns for op in self.ops[first:]]

    def _add_thread(self, thread: int | str, events: list[Event]) -> None:
        events.sort(key=lambda e: (e.start_ns, -e.end_ns, e.args.event_index))
        stack: list[HostOp] = []
        for event in events:
            start = event.start_ns
            while stack and stack[-1].end_ns <= start:
                stack.pop()
            op = HostOp(
                index=len(self.ops),
                name=event.name,
                is_operator=event.cat == "cpu_op",
                thread=thread,
                start_ns=start,
                end_ns=event.end_ns,
                args_rf_id=event.args.rf_id,
                external_id=event.args.external_id,
                sequence=event.args.sequence,
                forward_thread=event.args.forward_thread,
                args=event.args,
            )
            if stack:
                op.parent = stack[-1].index
                op.in_mark = stack[-1].in_mark
            if op.is_mark:
                op.in_mark = op.index
            self.ops.append(op)
            stack.append(op)

    def __iter__(self) -> Iterator[HostOp]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def innermost(self, thread: int | str, time_ns: int) -> HostOp | None:
        """Return the innermost event of `thread` that spans `time_ns`."""
        position = bisect_right(self._starts.get(thread, []), time_ns) - 1
        if position < 0:
            return None
        op = self.ops[self.threads[thread][position]]
        while op.end_ns < time_ns:
            if op.parent < 0:
                return None
            op = self.ops[op.parent]
        return op

    def last_before(self, thread: int | str, time_ns: int) -> HostOp | None:
        """Return the last event of `thread` that started at or before `time_ns`."""
        position = bisect_right(self._starts.get(thread, []), time_ns) - 1
        return self.ops[self.threads[thread][position]] if position >= 0 else None

    def operator(self, op: HostOp) -> HostOp | None:
        """Return the nearest operator at or above `op` (annotations skipped)."""
        while not op.is_operator:
            if op.parent < 0:
                return None
            op = self.ops[op.parent]
        return op


def attribute(timeline: HostTimeline) -> None:
    """Set module and phase of every host event.

    Forward: the enclosing module scope. Backward: the module of the last forward operator with
    the same (thread, sequence number), which autograd passes on; the accumulation of a parameter's
    gradient, which has none, follows what produced it at once (autograd gives it precedence) and
    has its module. Threads are walked in the order of their start, so that forward threads come
    before the autograd thread they start.
    A module scope within backward recomputes a checkpoint: backward too, and a forward whose own
    backward may follow.
    """
    modules: dict[tuple[int, int], str] = {}
    recomputing = [False] * len(timeline)
    threads = sorted(timeline.threads.values(), key=lambda span: timeline.ops[span[0]].start_ns)
    for span in threads:
        producer = ""
        for index in span:
            op = timeline.ops[index]
            parent = timeline.ops[op.parent] if op.parent >= 0 else None
            op.module = parent.module if parent else ""
            op.phase = parent.phase if parent else Phase.NONE
            recomputing[index] = recomputed = parent is not None and recomputing[parent.index]
            if op.name.startswith(MODULE_SCOPE):
                op.module = op.name.removeprefix(MODULE_SCOPE)
                recomputing[index] = op.phase is Phase.BACKWARD
                if op.phase is not Phase.BACKWARD:
                    op.phase = Phase.FORWARD
            elif op.name.startswith(_OPTIMIZER):
                op.phase = Phase.OPTIMIZER
            elif op.name.startswith(_BACKWARD):
                op.phase = Phase.BACKWARD
                accumulates = op.name.endswith(_ACCUMULATES)
                known = modules.get((op.forward_thread, op.sequence), "")
                op.module = producer = known or (producer if accumulates else "")
            elif op.sequence >= 0 and (op.phase in (Phase.NONE, Phase.FORWARD) or recomputed):
                if not recomputed:
                    op.phase = Phase.FORWARD
                if op.et is not None:
                    modules[op.et.attribute("tid"), op.sequence] = op.module


def micro_batches(timeline: HostTimeline) -> dict[int, int]:
    """Return the micro-batch of every forward and backward event, by index.

    A new one begins where a module's forward follows a backward; operators outside of modules (a
    running sum of the loss) begin one only in a trace without modules.
    """
    scoped = any(op.name.startswith(MODULE_SCOPE) for op in timeline)
    result: dict[int, int] = {}
    current, backward = 0, False
    for op in sorted(timeline.ops, key=lambda op: op.start_ns):
        if op.phase is Phase.BACKWARD:
            backward = True
        elif op.phase is not Phase.FORWARD:
            continue
        elif backward and (not scoped or op.name.startswith(MODULE_SCOPE)):
            current, backward = current + 1, False
        result[op.index] = current
    return result
