"""Host events as call trees, one per thread.

`host_timeline` orders the events of a trace into a `HostTimeline`. Later steps fill its columns:
`et_join` the node of the execution trace, `module_phase` the module and phase.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onerank.converters.sources.kineto.read.schema import Args
from onerank.converters.sources.kineto.read.trace_columns import (
    HostRows,
    KinetoTrace,
)
from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, Mask

# Names of the events that a capture records.
MODULE_SCOPE = "onerank::module::"
MODEL_SCOPE = "onerank::model::"
"""Scope around calls of a model whose class name occurs twice; its number distinguishes them."""
COMM_MARK = "onerank::comm"
WAIT_MARK = "onerank::wait"
RUN = "gloo:"
"""Prefix of torch's records of calls that Gloo ran."""

NONE = -1
"""Index of no event, and of no node of the execution trace."""

# Callers to climb one by one; few events of real traces have more above them.
_USUAL_DEPTH = 32


@dataclass(slots=True, eq=False)
class HostTimeline:
    """All host events, ordered by thread, then in call order (parents before callees).

    Attributes:
        rows: the events, n of them.
        strings: table of their names.
        calls: arguments of collectives, indexed by `rows.call`.
        threads: index of a thread in the trace's `threads` -> its events; threads in the file's
            order.
        parent: caller's index, NONE for none, int64[n].
        in_mark: index of the enclosing communication mark (itself included), or NONE, int64[n].
        et: row in the execution trace, or NONE, int64[n].
        operands: codes of values, shapes and types of the inputs, then of the outputs, for events
            without such a row, int32[6, n].
        module: codes, int32[n]; see `module_phase`.
        phase: `Phase`, int64[n].
        in_functions: events within autograd functions: backward without the callbacks at its end,
            bool[n].
        micro_batch: number of forward and backward events, NONE for others, int64[n].
        is_mark: the capture's records of communication calls.
        is_wait: the capture's records of waits for them.
        is_run: torch's records of calls that Gloo ran: they have no callees, and may end on another
            thread.
    """

    rows: HostRows
    strings: StringTable
    calls: list[Args]
    threads: dict[int, range]
    parent: I64
    in_mark: I64
    et: I64
    operands: I32
    module: I32
    phase: I64
    in_functions: Mask
    micro_batch: I64
    is_mark: Mask
    is_wait: Mask
    is_run: Mask

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_shapes(self) -> Mask:
        """Which events have operands, from the execution trace or the profiler, bool[n]."""
        return (self.et >= 0) | (self.operands[1] != 0)

    def name(self, index: int) -> str:
        """Return the name of an event."""
        return self.strings[int(self.rows.name[index])]

    def names(self) -> list[str]:
        """Return all names."""
        return self.strings.decode(self.rows.name)

    def named(self, test: Callable[[str], bool]) -> Mask:
        """Return which events have a name that passes `test`, bool[n]."""
        return named(self.rows.name, self.strings, test)

    def by_start(self) -> list[range]:
        """Return the events of each thread, the threads in the order of their first event."""
        start = self.rows.start_ns
        return sorted(self.threads.values(), key=lambda span: int(start[span.start]))

    def thread_numbers(self) -> I64:
        """Return the number of each place in the trace's `threads` that has events, else NONE."""
        numbers = np.full(max(self.threads, default=0) + 1, NONE)
        numbers[list(self.threads)] = np.arange(len(self.threads))
        return numbers

    def innermost(self, thread: I64, time_ns: I64) -> I64:
        """Return the innermost event of each thread that spans the time, NONE for none, int64[m].

        Args:
            thread: places in the trace's `threads`, int64[m].
            time_ns: int64[m].
        """
        index = self.last_before(thread, time_ns)
        ended = np.flatnonzero(index >= 0)
        for _ in range(_USUAL_DEPTH):
            ended = ended[self.rows.end_ns[index[ended]] < time_ns[ended]]
            index[ended] = self.parent[index[ended]]
            ended = ended[index[ended] >= 0]
            if not len(ended):
                return index
        index[ended] = self._first_to_reach(index[ended], time_ns[ended])
        return index

    def _first_to_reach(self, index: I64, time_ns: I64) -> I64:
        """Return the first of each event and its callers that ends at the time or later, or NONE.

        Climbing caller by caller takes depth x m steps, which a recursion a thousand calls deep
        makes quadratic. Tables of the 1, 2, 4, ... callers above take log2(depth) steps.
        """
        top = len(self)  # above all roots, and without end
        jumps = [np.append(np.where(self.parent >= 0, self.parent, top), top)]
        latest = [np.append(self.rows.end_ns, np.iinfo(np.int64).max)]
        while (jumps[-1] != top).any():
            latest.append(np.maximum(latest[-1], latest[-1][jumps[-1]]))
            jumps.append(jumps[-1][jumps[-1]])
        for jump, last in zip(reversed(jumps), reversed(latest), strict=True):
            index = np.where(last[index] < time_ns, jump[index], index)
        return np.where(index == top, NONE, index)

    def last_before(self, thread: I64, time_ns: I64) -> I64:
        """Return the last event of each thread that started at or before the time, or NONE."""
        index = np.full(len(thread), NONE)
        for queries in groups(thread):
            span = self.threads.get(int(thread[queries[0]]))
            if span is None:
                continue
            starts = self.rows.start_ns[span.start : span.stop]
            place = np.searchsorted(starts, time_ns[queries], side="right") - 1
            index[queries] = np.where(place >= 0, place + span.start, NONE)
        return index

    def operator(self, index: I64) -> I64:
        """Return the nearest operator at or above each event (annotations skipped), or NONE."""
        index = index.copy()
        annotations = np.flatnonzero(index >= 0)
        for _ in range(_USUAL_DEPTH):
            annotations = annotations[~self.rows.is_operator[index[annotations]]]
            index[annotations] = self.parent[index[annotations]]
            annotations = annotations[index[annotations] >= 0]
            if not len(annotations):
                return index
        is_operator = self.rows.is_operator
        nearest = np.where(is_operator, np.arange(len(self)), self.nearest(is_operator))
        index[annotations] = nearest[index[annotations]]
        return index

    def nearest(self, chosen: Mask) -> I64:
        """Return the nearest chosen caller of each event, or NONE, int64[n]."""
        caller = self.parent.copy()
        unresolved = np.flatnonzero(caller >= 0)
        # Each round doubles the number of skipped callers, so deep call trees take few rounds.
        while len(unresolved):
            unresolved = unresolved[~chosen[caller[unresolved]]]
            caller[unresolved] = caller[caller[unresolved]]
            unresolved = unresolved[caller[unresolved] >= 0]
        return caller

    def outermost(self, chosen: Mask) -> I64:
        """Return the outermost chosen event around each event, itself included, or NONE."""
        nearest = self.nearest(chosen)
        itself = np.where(chosen, np.arange(len(self)), NONE)
        outermost = np.where(nearest >= 0, nearest, itself)
        inner = np.flatnonzero(outermost >= 0)
        # As in `nearest`, each round doubles the number of skipped callers.
        while len(inner):
            inner = inner[outermost[outermost[inner]] != outermost[inner]]
            outermost[inner] = outermost[outermost[inner]]
        return outermost


def groups(keys: I64) -> list[I64]:
    """Return the places of each distinct key, the keys in ascending order, places too."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)


def named(codes: I32, strings: StringTable, test: Callable[[str], bool]) -> Mask:
    """Return which codes are of strings that pass `test`, called once per distinct string."""
    occurs, passed = np.zeros(len(strings), dtype=bool), np.zeros(len(strings), dtype=bool)
    occurs[codes] = True
    distinct = np.flatnonzero(occurs)
    passed[distinct] = [test(strings[code]) for code in distinct.tolist()]
    return passed[codes]


def host_timeline(trace: KinetoTrace) -> HostTimeline:
    """Order the host events of a trace into call trees."""
    rows = trace.host
    distinct, first = np.unique(rows.thread, return_index=True)
    appearance = np.empty(len(trace.threads), dtype=np.int64)
    # Threads in the order in which the file names them.
    appearance[distinct] = first
    # At equal starts the longer event is the caller; equal intervals keep the file's order.
    order = np.lexsort((rows.event_index, -rows.end_ns, rows.start_ns, appearance[rows.thread]))
    rows = rows.take(order)
    bounds = np.flatnonzero(np.diff(rows.thread, prepend=NONE)).tolist()
    spans = [range(low, high) for low, high in zip(bounds, [*bounds, len(rows)][1:], strict=True)]
    starts: list[int] = rows.start_ns.tolist()
    ends: list[int] = rows.end_ns.tolist()
    is_run = named(rows.name, trace.strings, lambda name: name.startswith(RUN))
    runs = frozenset(np.flatnonzero(is_run).tolist())
    parents: list[int] = []
    for span in spans:
        stack: list[int] = []
        for index in span:
            start = starts[index]
            # An event that ends as another starts is no caller of it: Kineto rounds to its clock's
            # unit.
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            parents.append(stack[-1] if stack else NONE)
            # A run of Gloo may outlast the event around it, so nothing can be its callee.
            if index not in runs:
                stack.append(index)
    is_mark = named(rows.name, trace.strings, COMM_MARK.__eq__)
    marks: list[int] = []
    if is_mark.any():
        marked: list[bool] = is_mark.tolist()
        for index, parent in enumerate(parents):
            marks.append(index if marked[index] else marks[parent] if parent >= 0 else NONE)
    count = len(rows)
    return HostTimeline(
        rows=rows,
        strings=trace.strings,
        calls=trace.calls,
        threads={int(rows.thread[span.start]): span for span in spans},
        parent=np.array(parents, dtype=np.int64),
        in_mark=np.array(marks, dtype=np.int64) if marks else np.full(count, NONE),
        et=np.full(count, NONE),
        operands=np.zeros((6, count), dtype=np.int32),
        module=np.zeros(count, dtype=np.int32),
        phase=np.zeros(count, dtype=np.int64),
        in_functions=np.zeros(count, dtype=bool),
        micro_batch=np.full(count, NONE),
        is_mark=is_mark,
        is_wait=named(rows.name, trace.strings, WAIT_MARK.__eq__),
        is_run=is_run,
    )
