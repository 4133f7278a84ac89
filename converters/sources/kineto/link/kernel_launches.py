"""Link each GPU operation to the host operator that launched it.

A script may launch work outside any operator: a CUDA graph replay, or a kernel of its own. Such a
launch call becomes a host event itself, because otherwise its kernels would have no predecessor on
the host.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.link.host_timeline import (
    NONE,
    HostTimeline,
    host_timeline,
    named,
)
from onerank.converters.sources.kineto.read.schema import (
    GPU_CATEGORIES,
    NO_CALL,
    OWN_CALL,
    GpuRows,
    HostRows,
    KinetoTrace,
    last_of,
    pick,
)
from onerank.ir import UNKNOWN, Kind


def with_unattributed_launches(
    trace: KinetoTrace, timeline: HostTimeline
) -> tuple[KinetoTrace, HostTimeline]:
    """Return both with the calls that launched something outside of any operator or mark."""
    launches = trace.launches
    rows = np.unique(last_of(launches.correlation, trace.gpu.correlation))
    rows = rows[rows >= 0]
    around = timeline.innermost(launches.thread[rows], launches.start_ns[rows])
    marked = pick(timeline.in_mark, around, NONE) >= 0
    rows = rows[(timeline.operator(around) < 0) & ~marked]
    if not len(rows):
        return trace, timeline
    zeros = np.zeros(len(rows), dtype=np.int64)
    calls = HostRows(
        name=launches.name[rows],
        is_operator=zeros.astype(bool),
        thread=launches.thread[rows],
        start_ns=launches.start_ns[rows],
        end_ns=launches.end_ns[rows],
        rf_id=zeros,
        external_id=zeros,
        sequence=zeros - 1,
        forward_thread=zeros,
        event_index=zeros + OWN_CALL,
        call=zeros + NO_CALL,
        operands=np.zeros((len(rows), 3), dtype=np.int32),
    )
    columns = {
        spec.name: np.concatenate([getattr(trace.host, spec.name), getattr(calls, spec.name)])
        for spec in fields(calls)
    }
    trace = replace(trace, host=replace(trace.host, **columns))
    return trace, host_timeline(trace)


I64 = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]

STAND_IN = "onerank_standin_"
"""Name prefixes of the kernels that `capture.collective_kernels` launches for collectives."""

PACED_STAND_IN = "onerank_standin_paced"

KINDS = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET}

KIND_OF_CATEGORY = np.array([KINDS[category] for category in GPU_CATEGORIES], dtype=np.uint8)

KERNEL_CATEGORY = GPU_CATEGORIES.index("kernel")

CLOCK_NS = 5_000
"""How far the clocks of GPU and host may be apart."""

_RULES = ("external id", "enclosing operator", "no operator", "no launch")

_NO_OPERATOR = _RULES.index("no operator")

_GRAPH = len(_RULES)


@dataclass(frozen=True, slots=True)
class GpuOps:
    """Kernels, memcpys and memsets, n of them, ordered by launch, then by start.

    Attributes:
        rows: the events.
        launch_ns: host time of the launch; without a recorded launch its latest possible time,
            int64[n].
        returned_ns: return time of the launch call, UNKNOWN if not recorded.
        thread: launching thread, an index into the trace's `threads`; NONE if not recorded.
        operator: index of the innermost host operator around the launch, of the launch call itself
            if it is outside any operator, or NONE, int64[n].
        rule: how that was found, an index into `RULES`, int64[n].
        in_mark: index of the communication mark it was launched in, or NONE, int64[n].
        stands_in: kernels that mark time and stream of a recorded call.
        paced: those of them that took the time of a network.
        uncontended_ns: duration without concurrent communication, UNKNOWN if not measured.
    """

    rows: GpuRows
    launch_ns: I64
    returned_ns: I64
    thread: I64
    operator: I64
    rule: I64
    in_mark: I64
    stands_in: Mask
    paced: Mask
    uncontended_ns: I64

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def linked(self) -> Mask:
        """Operations linked to an operator, and not only to a launch call, bool[n]."""
        return (self.operator >= 0) & (self.rule % _GRAPH < _NO_OPERATOR)

    def rules(self, chosen: Mask) -> dict[str, int]:
        """Return how many of the chosen ones were linked by each rule."""
        distinct, first, counts = np.unique(
            self.rule[chosen], return_index=True, return_counts=True
        )
        order = np.argsort(first)
        pairs = zip(distinct[order].tolist(), counts[order].tolist(), strict=True)
        return {_rule(rule): count for rule, count in pairs}


def _rule(rule: int) -> str:
    return f"graph launch: {_RULES[rule - _GRAPH]}" if rule >= _GRAPH else _RULES[rule]


def link(trace: KinetoTrace, timeline: HostTimeline) -> GpuOps:
    """Link every GPU operation to its operator.

    Rules, in order: `external id` (the launch or the operation carries the operator's, which ran
    then: torch up to 2.0 gives ids twice),
    `enclosing operator` (innermost one on the launching thread at the time of the launch),
    each prefixed with `graph launch: ` where one launch started several operations;
    `no operator` where a launch stands outside any, `no launch` where none is recorded.
    """
    rows, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, rows.correlation)
    launched = launch >= 0
    launch_ns = launch_times(trace)
    order = np.lexsort((rows.start_ns, launch_ns))
    rows, launch, launched, launch_ns = (
        rows.take(order), launch[order], launched[order], launch_ns[order]
    )  # fmt: skip

    external = rows.external_id.copy()
    by_launch = launched & (external == 0)
    external[by_launch] = launches.external_id[launch[by_launch]]
    operator = last_of(timeline.rows.external_id, external, timeline.rows.is_operator)
    operator[_outside(timeline, operator, launch_ns, launched)] = NONE
    rule = np.zeros(len(rows), dtype=np.int64)
    asked = np.flatnonzero((operator < 0) & launched)
    around = _around(trace, timeline, launch[asked])
    operator[asked] = timeline.operator(around)
    rule[asked] = 1
    rule[operator < 0] = np.where(launched, 2, 3)[operator < 0]
    calls = (operator[asked] < 0) & (pick(timeline.rows.event_index, around, 0) == OWN_CALL)
    operator[asked[calls]] = around[calls]
    _, places, counts = np.unique(rows.correlation, return_inverse=True, return_counts=True)
    rule[launched & (counts[places] > 1)] += _GRAPH

    in_mark = pick(timeline.in_mark, operator, NONE)
    stands_in = named(rows.name, trace.strings, lambda name: name.startswith(STAND_IN))
    asked = np.flatnonzero(stands_in & launched)  # no operator launches it
    in_mark[asked] = pick(timeline.in_mark, _around(trace, timeline, launch[asked]), NONE)
    lost = ~launched & (operator < 0) & (in_mark < 0)
    lost = np.flatnonzero(lost & ~_backlog(rows, launched))
    if len(lost) and launched.any():
        operator[lost] = _at_start(trace, timeline, rows, np.where(launched, launch, NONE), lost)
    return GpuOps(
        rows=rows,
        launch_ns=launch_ns,
        returned_ns=np.where(launched, pick(launches.end_ns, launch, UNKNOWN), UNKNOWN),
        thread=np.where(launched, pick(launches.thread, launch, NONE), NONE),
        operator=operator,
        rule=rule,
        in_mark=in_mark,
        stands_in=stands_in & (in_mark >= 0),
        paced=named(rows.name, trace.strings, lambda name: name.startswith(PACED_STAND_IN)),
        uncontended_ns=np.full(len(rows), UNKNOWN),
    )


def launch_times(trace: KinetoTrace) -> I64:
    """Return when the host issued each GPU operation, int64[n].

    An operation without a launch was issued before the next one on its stream and before it
    started; if it precedes all launched ones, before the first call of the trace.
    """
    rows, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, rows.correlation)
    known = launch >= 0
    times = np.where(known, pick(launches.start_ns, launch, 0), rows.start_ns)
    if known.all():
        return times
    first_call_ns = launches.start_ns.min(initial=np.iinfo(np.int64).max)
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    ends = np.flatnonzero(np.diff(rows.stream[order]) | np.diff(rows.device[order])) + 1
    for lane in np.split(order, ends):
        first_behind = np.minimum.accumulate(times[lane][::-1])[::-1]
        times[lane] = np.where(known[lane], times[lane], first_behind)
        backlog = int(np.argmax(known[lane]))  # of what no call launched, nothing is
        times[lane[:backlog]] = np.minimum(times[lane[:backlog]], first_call_ns)
    return times


def _median(values: I64, default: int) -> int:
    return int(np.median(values)) if len(values) else default


def _backlog(rows: GpuRows, launched: Mask) -> Mask:
    """Return which operations ran before the first that was launched within the trace.

    On a stream of which no launch is in the trace, none.
    """
    first = np.full(len(rows), np.iinfo(np.int64).min)
    for stream in np.unique(rows.stream[~launched]).tolist():
        own = rows.stream == stream
        if (own & launched).any():
            first[own] = rows.start_ns[own & launched].min()
    return ~launched & (rows.start_ns < first)


def _at_start(
    trace: KinetoTrace, timeline: HostTimeline, rows: GpuRows, launch: I64, lost: I64
) -> I64:
    """Return for operations without a launch what the host did when they can have been launched.

    That is the usual time before they start, on the thread that launched last then. NONE for those
    that began behind another on their stream: these may have been launched at any time before.

    Args:
        trace: the trace.
        timeline: its host events.
        rows: its GPU operations.
        launch: row of each one's launch, or NONE.
        lost: which to look for.
    """
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    ended = rows.start_ns + rows.duration_ns
    idle_ns = np.full(len(rows), np.iinfo(np.int64).max)
    behind = (np.diff(rows.stream[order]) == 0) & (np.diff(rows.device[order]) == 0)
    idle_ns[order[1:][behind]] = (rows.start_ns[order[1:]] - ended[order[:-1]])[behind]
    calls = np.sort(launch[launch >= 0])
    calls = calls[np.argsort(trace.launches.start_ns[calls], kind="stable")]
    took = (rows.start_ns - pick(trace.launches.start_ns, launch, 0))[launch >= 0]
    usual = _median(took[(took >= 0) & (took < idle_ns[launch >= 0])], CLOCK_NS)
    at = rows.start_ns[lost] - usual
    before = np.searchsorted(trace.launches.start_ns[calls], at, side="right") - 1
    thread = trace.launches.thread[calls[np.maximum(before, 0)]]
    found = timeline.operator(timeline.last_before(thread, at))
    return np.where(idle_ns[lost] > CLOCK_NS, found, NONE)


def _outside(timeline: HostTimeline, operator: I64, launch_ns: I64, launched: Mask) -> Mask:
    """Return which operations' operators did not run at the launch, or began behind the start."""
    known = operator >= 0
    begun = pick(timeline.rows.start_ns, operator, 0) - CLOCK_NS
    ended = pick(timeline.rows.end_ns, operator, 0) + CLOCK_NS
    return known & ((launch_ns < begun) | (launched & (launch_ns > ended)))


def _around(trace: KinetoTrace, timeline: HostTimeline, launch: I64) -> I64:
    """Return the innermost host event around each launch, or NONE."""
    launches = trace.launches
    return timeline.innermost(launches.thread[launch], launches.start_ns[launch])
