"""Link each GPU operation to the host operator that launched it.

A script may launch work outside any operator: a CUDA graph replay, or a custom kernel. Such a
launch call becomes a host event itself, because otherwise its kernels would have no predecessor on
the host.
"""

import re
from dataclasses import dataclass, fields, replace

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import (
    NONE,
    HostTimeline,
    host_timeline,
    named,
)
from onerank.converters.sources.kineto.read.trace_columns import (
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
from onerank.ir.arrays import I64, Mask, unique_values


def with_unattributed_launches(
    trace: KinetoTrace, timeline: HostTimeline
) -> tuple[KinetoTrace, HostTimeline]:
    """Add the launch calls outside any operator or mark to the host events of a trace."""
    launches = trace.launches
    rows = unique_values(last_of(launches.correlation, trace.gpu.correlation))
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
        stream=zeros - 1,
        python_calls=np.zeros(len(rows), dtype=np.int32),
    )
    columns = {
        spec.name: np.concatenate([getattr(trace.host, spec.name), getattr(calls, spec.name)])
        for spec in fields(calls)
    }
    trace = replace(trace, host=replace(trace.host, **columns))
    return trace, host_timeline(trace)


EMULATION_PREFIX = "onerank_standin_"
"""Name prefix of the kernels that `capture.collective_kernels` launches for collectives."""

PACED_KERNEL_PREFIX = "onerank_standin_paced"
"""Name prefix of those that take as long as the collective would on a network."""

# Names of NCCL kernels vary by version and vendor (`ncclKernel_*`, `ncclDevKernel_*`,
# `ncclSymkDevKernel_*`; RCCL's `ncclDevKernel_Generic`). They show only that a kernel is NCCL's:
# collective, size and type come from the arguments.
NCCL_KERNEL = re.compile(r"(nccl|msccl)\w*Kernel", re.IGNORECASE)

GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
"""Calls that launch a CUDA graph."""


def is_communication(name: str) -> bool:
    """Return whether a kernel of this name is NCCL's, or emulates a call."""
    return name.startswith(EMULATION_PREFIX) or NCCL_KERNEL.match(name) is not None


KINDS = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET}

KIND_OF_CATEGORY = np.array([KINDS[category] for category in GPU_CATEGORIES], dtype=np.uint8)

KERNEL_CATEGORY = GPU_CATEGORIES.index("kernel")

CLOCK_NS = 5_000
"""How far the clocks of GPU and host may be apart."""

_RULES = ("external id", "enclosing operator", "no operator", "no launch")

_EXTERNAL_ID, _ENCLOSING_OPERATOR, _NO_OPERATOR, _NO_LAUNCH = range(len(_RULES))

# `cudaGraphLaunch` and `hipGraphLaunch` start many operations: 6,264 of the 7,866 GPU operations of
# a public trace come from graph launches.
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
        rule: rule that gave the operator, an index into `_RULES`, plus `_GRAPH` if a graph launch
            started the operation, int64[n].
        in_mark: index of the communication mark around the launch, or NONE, int64[n].
        emulates: kernels that emulate a recorded call, on its stream, bool[n].
        paced: kernels that emulate a call and take its time on a network, bool[n].
        uncontended_ns: duration without concurrent communication, UNKNOWN if not measured.
    """

    rows: GpuRows
    launch_ns: I64
    returned_ns: I64
    thread: I64
    operator: I64
    rule: I64
    in_mark: I64
    emulates: Mask
    paced: Mask
    uncontended_ns: I64

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def linked(self) -> Mask:
        """Operations linked to an operator, and not only to a launch call, bool[n]."""
        return (self.operator >= 0) & (self.rule % _GRAPH < _NO_OPERATOR)

    @property
    def by_graph(self) -> Mask:
        """Operations that the launch of a CUDA graph started, bool[n]."""
        return self.rule >= _GRAPH

    def rules(self, chosen: Mask) -> dict[str, int]:
        """Return the number of chosen operations by rule, in the order of first use."""
        distinct, first, counts = np.unique(
            self.rule[chosen], return_index=True, return_counts=True
        )
        order = np.argsort(first)
        pairs = zip(distinct[order].tolist(), counts[order].tolist(), strict=True)
        return {_rule(rule): count for rule, count in pairs}


def _rule(rule: int) -> str:
    by_graph, number = divmod(rule, _GRAPH)
    return f"graph launch: {_RULES[number]}" if by_graph else _RULES[number]


@dataclass(frozen=True, slots=True)
class _LaunchedRows:
    """GPU operations, n of them, ordered by launch, then by start.

    Attributes:
        rows: the events.
        launch: row of each one's launch call, or NONE, int64[n].
        launch_ns: see `GpuOps`.
    """

    rows: GpuRows
    launch: I64
    launch_ns: I64

    @classmethod
    def of(cls, trace: KinetoTrace) -> "_LaunchedRows":
        """Return the GPU operations of a trace with their launches."""
        launch = last_of(trace.launches.correlation, trace.gpu.correlation)
        launch_ns = launch_times(trace)
        order = np.lexsort((trace.gpu.start_ns, launch_ns))
        return cls(trace.gpu.take(order), launch[order], launch_ns[order])

    @property
    def launched(self) -> Mask:
        """Whether the trace has the launch call of each, bool[n]."""
        return self.launch >= 0


def link(trace: KinetoTrace, timeline: HostTimeline) -> GpuOps:
    """Link every GPU operation to its operator.

    Rules, in order:

    - `external id`: the launch or the operation carries the id of an operator that ran at the time
      of the launch.
    - `enclosing operator`: the innermost operator on the launching thread at the time of the
      launch.
    - `no operator`: the launch is outside any operator.
    - `no launch`: the trace has no launch call.

    The prefix `graph launch: ` means that a graph launch started the operation.
    """
    gpu_ops, launches = _LaunchedRows.of(trace), trace.launches
    rows, launch, launched = gpu_ops.rows, gpu_ops.launch, gpu_ops.launched
    operator, rule = _operators_and_rules(trace, timeline, gpu_ops)
    in_mark, emulates = _communication_marks(trace, timeline, gpu_ops, operator)
    lost = ~launched & (operator < 0) & (in_mark < 0)
    lost = np.flatnonzero(lost & ~_started_before_first_launch(rows, launched))
    # Without any recorded launch there is no usual delay between launch and start to apply.
    if len(lost) and launched.any():
        operator[lost] = _operators_by_start(trace, timeline, rows, launch, lost)
    return GpuOps(
        rows=rows,
        launch_ns=gpu_ops.launch_ns,
        returned_ns=np.where(launched, pick(launches.end_ns, launch, UNKNOWN), UNKNOWN),
        thread=np.where(launched, pick(launches.thread, launch, NONE), NONE),
        operator=operator,
        rule=rule,
        in_mark=in_mark,
        emulates=emulates,
        paced=named(rows.name, trace.strings, lambda name: name.startswith(PACED_KERNEL_PREFIX)),
        uncontended_ns=np.full(len(rows), UNKNOWN),
    )


def _operators_and_rules(
    trace: KinetoTrace, timeline: HostTimeline, gpu_ops: _LaunchedRows
) -> tuple[I64, I64]:
    """Return the operator of each GPU operation and the rule that gave it, as in `GpuOps`."""
    rows, launches = gpu_ops.rows, trace.launches
    launch, launched = gpu_ops.launch, gpu_ops.launched
    # An operation carries the id of the innermost operator around its launch. If the operation
    # lacks it, its launch may have it.
    external = rows.external_id.copy()
    by_launch = launched & (external == 0)
    external[by_launch] = launches.external_id[launch[by_launch]]
    operator = last_of(timeline.rows.external_id, external, timeline.rows.is_operator)
    # torch up to 2.0 gives some external ids twice: check that the operator ran at the launch.
    operator[_ran_at_another_time(timeline, operator, gpu_ops.launch_ns, launched)] = NONE
    rule = np.full(len(rows), _EXTERNAL_ID, dtype=np.int64)
    unlinked = np.flatnonzero((operator < 0) & launched)
    around = _events_around_launches(trace, timeline, launch[unlinked])
    operator[unlinked] = timeline.operator(around)
    rule[unlinked] = _ENCLOSING_OPERATOR
    rule[operator < 0] = np.where(launched, _NO_OPERATOR, _NO_LAUNCH)[operator < 0]
    # A launch outside any operator is a host event itself: `with_unattributed_launches` adds it.
    calls = (operator[unlinked] < 0) & (pick(timeline.rows.event_index, around, 0) == OWN_CALL)
    operator[unlinked[calls]] = around[calls]
    _, places, counts = np.unique(rows.correlation, return_inverse=True, return_counts=True)
    # Several operations of one correlation come from one `cudaGraphLaunch`; `graph_replays` gives
    # each a correlation, and keeps the call's name.
    graph_calls = named(launches.name, trace.strings, lambda name: name.startswith(GRAPH_LAUNCHES))
    by_graph = pick(graph_calls, launch, default=False)
    rule[launched & (by_graph | (counts[places] > 1))] += _GRAPH
    return operator, rule


def _communication_marks(
    trace: KinetoTrace, timeline: HostTimeline, gpu_ops: _LaunchedRows, operator: I64
) -> tuple[I64, Mask]:
    """Return the mark around each launch, and which kernels emulate a call, as in `GpuOps`."""
    in_mark = pick(timeline.in_mark, operator, NONE)
    emulates = named(
        gpu_ops.rows.name, trace.strings, lambda name: name.startswith(EMULATION_PREFIX)
    )
    # No operator launches an emulating kernel: its mark is around the launch call itself.
    emulating = np.flatnonzero(emulates & gpu_ops.launched)
    around = _events_around_launches(trace, timeline, gpu_ops.launch[emulating])
    in_mark[emulating] = pick(timeline.in_mark, around, NONE)
    return in_mark, emulates & (in_mark >= 0)


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
    for stream_rows in np.split(order, ends):
        next_launch = np.minimum.accumulate(times[stream_rows][::-1])[::-1]
        # A stream runs in launch order, so the next recorded launch bounds those without a record.
        times[stream_rows] = np.where(known[stream_rows], times[stream_rows], next_launch)
        # argmax is 0 on a stream without any recorded launch, which then has no backlog.
        backlog = int(np.argmax(known[stream_rows]))
        times[stream_rows[:backlog]] = np.minimum(times[stream_rows[:backlog]], first_call_ns)
    return times


def _median(values: I64, default: int) -> int:
    return int(np.median(values)) if len(values) else default


def _started_before_first_launch(rows: GpuRows, launched: Mask) -> Mask:
    """Return which operations started before the first launched one of their stream, bool[n].

    A stream without any recorded launch has none.
    """
    streams, place = np.unique(rows.stream, return_inverse=True)
    never = np.iinfo(np.int64).max
    first = np.full(len(streams), never)
    np.minimum.at(first, place[launched], rows.start_ns[launched])
    return ~launched & (first[place] != never) & (rows.start_ns < first[place])


def _operators_by_start(
    trace: KinetoTrace, timeline: HostTimeline, rows: GpuRows, launch: I64, lost: I64
) -> I64:
    """Return the likely operator of GPU operations without a recorded launch, NONE if unknown.

    The launch is assumed to precede the start by the median delay of other operations, on the
    thread that launched last before. An operation that started right after another of its stream
    may have been launched at any earlier time, so its operator is unknown.

    Args:
        trace: the trace.
        timeline: its host events.
        rows: its GPU operations.
        launch: row of each operation's launch, or NONE.
        lost: indices of the operations in question, int64[m].
    """
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    ended = rows.start_ns + rows.duration_ns
    idle_ns = np.full(len(rows), np.iinfo(np.int64).max)
    follows = (np.diff(rows.stream[order]) == 0) & (np.diff(rows.device[order]) == 0)
    idle_ns[order[1:][follows]] = (rows.start_ns[order[1:]] - ended[order[:-1]])[follows]
    calls = np.sort(launch[launch >= 0])
    calls = calls[np.argsort(trace.launches.start_ns[calls], kind="stable")]
    delay_ns = (rows.start_ns - pick(trace.launches.start_ns, launch, 0))[launch >= 0]
    # Only operations on an idle stream start as soon as they are launched.
    usual_ns = _median(delay_ns[(delay_ns >= 0) & (delay_ns < idle_ns[launch >= 0])], CLOCK_NS)
    launched_ns = rows.start_ns[lost] - usual_ns
    before = np.searchsorted(trace.launches.start_ns[calls], launched_ns, side="right") - 1
    thread = trace.launches.thread[calls[np.maximum(before, 0)]]
    operator = timeline.operator(timeline.last_before(thread, launched_ns))
    return np.where(idle_ns[lost] > CLOCK_NS, operator, NONE)


def _ran_at_another_time(
    timeline: HostTimeline, operator: I64, launch_ns: I64, launched: Mask
) -> Mask:
    """Return which operations' operators did not run at the time of the launch, bool[n].

    Without a recorded launch, only the operator's start is compared.
    """
    known = operator >= 0
    begun = pick(timeline.rows.start_ns, operator, 0) - CLOCK_NS
    ended = pick(timeline.rows.end_ns, operator, 0) + CLOCK_NS
    return known & ((launch_ns < begun) | (launched & (launch_ns > ended)))


def _events_around_launches(trace: KinetoTrace, timeline: HostTimeline, launch: I64) -> I64:
    """Return the innermost host event around each launch, or NONE."""
    launches = trace.launches
    return timeline.innermost(launches.thread[launch], launches.start_ns[launch])
