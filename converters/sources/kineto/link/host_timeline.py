"""Host events as call trees, one per thread, joined with the nodes of the execution trace.

`join` pairs events and nodes by record id, or by order within a thread if the ids do not match.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.read.execution_trace import load_execution_trace
from onerank.converters.sources.kineto.read.schema import (
    Args,
    ExecutionTrace,
    HostRows,
    KinetoTrace,
    last_of,
)
from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

MODULE_SCOPE = "onerank::module::"
MODEL_SCOPE = "onerank::model::"
"""Scope around calls of a model whose class name occurs twice; its number distinguishes them."""
COMM_MARK = "onerank::comm"
WAIT_MARK = "onerank::wait"
RUN = "gloo:"
NONE = -1
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


# A public pair of files without record ids (DLRM) aligns 984 to 988 of 988 operators.
MIN_ALIGNED_SHARE = 0.95
"""Share of operators that must align by order if the Kineto trace has no record ids."""

MIN_ALIGNED_SHARE_OTHER_RUN = 0.99
"""Share of operators that must align by order if record ids show two different runs."""

_EQUAL_NAMES = 4  # consecutive equal names after which two sequences count as aligned again

_MAX_THREADS = 256  # the longest of each file; comparing all pairs takes threads^2 steps

_MAX_SKIPPED = 64  # consecutive events that only one of the files may have


def _skip_to_equal(names: list[int], et_names: list[int]) -> tuple[int, int]:
    """Return how many names of each sequence to skip until they agree; 1 and 1 if they never do."""
    for total in range(1, _MAX_SKIPPED):
        for skipped in range(total + 1):
            et_skipped = total - skipped
            following = names[skipped : skipped + _EQUAL_NAMES]
            if following and following == et_names[et_skipped : et_skipped + _EQUAL_NAMES]:
                return skipped, et_skipped
    return 1, 1


def _align_names(names: list[int], et_names: list[int]) -> tuple[list[int], list[int]]:
    """Return the places of equal names in both sequences, in order."""
    places: list[int] = []
    et_places: list[int] = []
    window = _MAX_SKIPPED + _EQUAL_NAMES
    place, et_place = 0, 0
    while place < len(names) and et_place < len(et_names):
        if names[place] == et_names[et_place]:
            places.append(place)
            et_places.append(et_place)
            place += 1
            et_place += 1
            continue
        skipped, et_skipped = _skip_to_equal(
            names[place : place + window], et_names[et_place : et_place + window]
        )
        place += skipped
        et_place += et_skipped
    return places, et_places


def align(timeline: HostTimeline, et: ExecutionTrace) -> tuple[I64, float]:
    """Align host events with execution trace nodes by the order of names in each thread.

    Returns:
        Each host event's row in the execution trace or NONE, int64[n]; the share of operators that
        have a row.
    """
    rows = np.full(len(timeline), NONE)
    et_threads = {
        # The observer numbers nodes as they begin, so ids give the call order that the file's order
        # need not.
        int(et.tid[members[0]]): members[np.argsort(et.id[members], kind="stable")]
        for members in groups(et.tid)
    }
    name_counts: dict[int, Counter[int]] = {
        tid: Counter(et.name[et_rows].tolist()) for tid, et_rows in et_threads.items()
    }
    # The files number threads differently. The longest thread chooses first, by the names that it
    # shares with each thread of the execution trace.
    spans = sorted(timeline.threads.values(), key=len, reverse=True)
    longest = sorted(name_counts, key=lambda tid: len(et_threads[tid]), reverse=True)
    name_counts = {tid: name_counts[tid] for tid in sorted(longest[:_MAX_THREADS])}
    for span in spans[:_MAX_THREADS]:
        names = timeline.rows.name[span.start : span.stop]
        span_counts: Counter[int] = Counter(names.tolist())
        shared = {tid: (span_counts & counts).total() for tid, counts in name_counts.items()}
        tid = max(shared, key=shared.__getitem__, default=None)
        # Threads without a common name (data loaders, monitoring) stay without a partner.
        if tid is None or not shared[tid]:
            continue
        et_rows = et_threads.pop(tid)
        del name_counts[tid]
        places, et_places = _align_names(names.tolist(), et.name[et_rows].tolist())
        rows[np.array(places, dtype=np.int64) + span.start] = et_rows[et_places]
    operators = timeline.rows.is_operator
    aligned = int((operators & (rows != NONE)).sum())
    return rows, aligned / max(int(operators.sum()), 1)


def join(
    timeline: HostTimeline, et: ExecutionTrace, kineto: Path
) -> tuple[ExecutionTrace, list[Note]]:
    """Set the execution trace node of every host event, by record id, else by order.

    Args:
        timeline: the host events; `timeline.et` is set.
        et: the execution trace.
        kineto: the file of the host events, for messages.

    Returns:
        The execution trace, read again with all operands if events were aligned by order; notes.

    Raises:
        TraceError: there are no operators, or too few align.
    """
    rows = timeline.rows
    operators = int(rows.is_operator.sum())
    both = f"{kineto} and {et.path}"
    if not operators:
        raise TraceError(
            f"{kineto}: has no operators: profile with ProfilerActivity.CPU",
            code="trace-no-operators",
        )
    # Record ids are 0 if no execution trace observer ran during the profile.
    if not rows.rf_id[rows.is_operator].any():
        reason = f"the Kineto trace has no `Record function id` on any of its {operators} operators"
        error = f"{both} cannot be linked: {reason}"
        return _join_by_order(timeline, et, reason, error, MIN_ALIGNED_SHARE)
    # The record function id is the only key that both files share. Kineto's `External id` equals it
    # by accident only.
    et_row = last_of(et.rf_id, rows.rf_id)
    known = et_row >= 0
    equal = known.copy()
    equal[known] = et.name[et_row[known]] == rows.name[known]
    different = np.flatnonzero(known & ~equal)
    # Record ids of another run join operators at random; a few may differ in one run.
    if not equal.any() or len(different) > int(equal.sum()) // 10:
        example = ""
        if len(different):
            strings = timeline.strings
            pairs = zip(
                rows.name[different].tolist(), et.name[et_row[different]].tolist(), strict=True
            )
            (name, et_name), _ = Counter(pairs).most_common(1)[0]
            example = f" (for example {strings[name]!r} against {strings[et_name]!r})"
        reason = (
            f"of the {known.sum()} record ids they share, {len(different)} name different "
            f"operators{example}"
        )
        error = f"{both} are of different runs: {reason}"
        return _join_by_order(timeline, et, reason, error, MIN_ALIGNED_SHARE_OTHER_RUN)
    timeline.et = np.where(equal, et_row, NONE)
    return et, []


def _join_by_order(
    timeline: HostTimeline, et: ExecutionTrace, reason: str, error: str, min_share: float
) -> tuple[ExecutionTrace, list[Note]]:
    """Set the execution trace nodes of host events by the order of operators in each thread.

    Args:
        timeline: the host events; `timeline.et` is set.
        et: the execution trace.
        reason: why record ids do not join the two files.
        error: beginning of the error message.
        min_share: share of the operators that must align.

    Raises:
        TraceError: too few operators align.
    """
    rows, share = align(timeline, et)
    operators = int(timeline.rows.is_operator.sum())
    aligned = int((timeline.rows.is_operator & (rows >= 0)).sum())
    if share < min_share:
        raise TraceError(
            f"{error}. Only {aligned} of {operators} operators ({share:.1%}) align by order, "
            f"expected {min_share:.0%}. Record both in one window: start an ExecutionTraceObserver "
            "inside torch.profiler.profile()",
            code="trace-et-mismatch",
        )
    timeline.et = rows
    if not et.whole:  # operands were kept by record ids
        et = load_execution_trace(et.path, timeline.strings)
    return et, [
        Note(
            f"{aligned} of {operators} operators ({share:.2%}) are aligned with the execution "
            f"trace by their order in each thread, because {reason}",
            code="operators-aligned-by-order",
        )
    ]
