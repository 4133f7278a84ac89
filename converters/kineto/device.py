"""GPU operations and the host operator that launched each."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.columns import GPU_CATEGORIES, GpuRows, KinetoTrace, last_of, pick
from onerank.converters.kineto.events import QUERIES, Records
from onerank.converters.kineto.host import NONE, HostTimeline, named
from onerank.ir import UNKNOWN, Kind

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

STAND_IN = "onerank_standin_"
"""How the kernels' names begin that `onerank.capture.standin` puts in a collective's place."""
PACED_STAND_IN = "onerank_standin_paced"

KINDS = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET}
KIND_OF_CATEGORY = np.array([KINDS[category] for category in GPU_CATEGORIES], dtype=np.uint8)
KERNEL_CATEGORY = GPU_CATEGORIES.index("kernel")

_RULES = ("external id", "enclosing operator", "no operator", "no launch")
_GRAPH = len(_RULES)


@dataclass(frozen=True, slots=True)
class GpuOps:
    """Kernels, memcpys and memsets, n of them, ordered by launch, then by start.

    Attributes:
        rows: the events.
        launch_ns: host time of the launch (the start, where no launch is recorded), int64[n].
        operator: index of the innermost host operator behind the launch, or NONE, int64[n].
        rule: how that was found, a place in `RULES`, int64[n].
        in_mark: index of the communication mark it was launched in, or NONE, int64[n].
        stands_in: which are the kernels that show when and where a recorded call would run.
        paced: of these, which took the time of a network.
        alone_ns: duration with no communication beside it, UNKNOWN where none was measured.
    """

    rows: GpuRows
    launch_ns: I64
    operator: I64
    rule: I64
    in_mark: I64
    stands_in: Mask
    paced: Mask
    alone_ns: I64

    def __len__(self) -> int:
        return len(self.rows)

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

    Rules, in order: `external id` (the launch or the operation carries the operator's),
    `enclosing operator` (innermost one on the launching thread at the time of the launch),
    each prefixed with `graph launch: ` where one launch started several operations;
    `no operator` where a launch stands outside any, `no launch` where none is recorded.
    """
    rows, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, rows.correlation)
    launched = launch >= 0
    launch_ns = rows.start_ns.copy()
    launch_ns[launched] = launches.start_ns[launch[launched]]
    order = np.lexsort((rows.start_ns, launch_ns))
    rows, launch, launched, launch_ns = (
        rows.take(order), launch[order], launched[order], launch_ns[order]
    )  # fmt: skip

    external = rows.external_id.copy()
    by_launch = launched & (external == 0)
    external[by_launch] = launches.external_id[launch[by_launch]]
    operator = last_of(timeline.rows.external_id, external, timeline.rows.is_operator)
    rule = np.zeros(len(rows), dtype=np.int64)
    asked = np.flatnonzero((operator < 0) & launched)
    operator[asked] = timeline.operator(_around(trace, timeline, launch[asked]))
    rule[asked] = 1
    rule[operator < 0] = np.where(launched, 2, 3)[operator < 0]
    _, places, counts = np.unique(rows.correlation, return_inverse=True, return_counts=True)
    rule[launched & (counts[places] > 1)] += _GRAPH

    in_mark = pick(timeline.in_mark, operator, NONE)
    stands_in = named(rows.name, trace.strings, lambda name: name.startswith(STAND_IN))
    asked = np.flatnonzero(stands_in & launched)  # no operator launches it
    in_mark[asked] = pick(timeline.in_mark, _around(trace, timeline, launch[asked]), NONE)
    return GpuOps(
        rows=rows,
        launch_ns=launch_ns,
        operator=operator,
        rule=rule,
        in_mark=in_mark,
        stands_in=stands_in & (in_mark >= 0),
        paced=named(rows.name, trace.strings, lambda name: name.startswith(PACED_STAND_IN)),
        alone_ns=np.full(len(rows), UNKNOWN),
    )


def _around(trace: KinetoTrace, timeline: HostTimeline, launch: I64) -> I64:
    """Return the innermost host event around each launch, or NONE."""
    launches = trace.launches
    return timeline.innermost(launches.thread[launch], launches.start_ns[launch])


@dataclass(frozen=True, slots=True)
class Wait:
    """A synchronisation: `waiter` must come after all that was launched before `horizon_ns`.

    Attributes:
        stream: stream waited for; None for all streams.
        horizon_ns: host time of the event record, or of the call.
        waiting_stream: stream that waits; None when the host does.
        thread: calling thread, a place in the trace's `threads`.
        start_ns: host time of the call.
        end_ns: host time at which the call returned.
    """

    stream: int | None
    horizon_ns: int
    waiting_stream: int | None
    thread: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Waits:
    """The synchronisations of a trace.

    Attributes:
        found: those that can be used, in the order of their calls.
        unused: those that cannot, by reason.
        inferred: how many of `found` name an event whose record the trace does not tell.
    """

    found: list[Wait] = field(default_factory=list[Wait])
    unused: Counter[str] = field(default_factory=Counter[str])
    inferred: int = 0


def waits(trace: KinetoTrace) -> Waits:
    """Return the synchronisations of the trace."""
    made = Waits()
    syncs, calls = trace.syncs, trace.launches
    if not len(syncs):
        return made
    call_of = last_of(calls.correlation, syncs.correlation).tolist()
    record_of = last_of(calls.correlation, np.maximum(syncs.wait_on_record, 0)).tolist()
    queries = named(calls.name, trace.strings, QUERIES.__contains__)
    records: Records | None = None
    for place, (name, own, waited_for, event) in enumerate(
        zip(
            trace.strings.decode(syncs.name),
            syncs.stream.tolist(),
            syncs.wait_on_stream.tolist(),
            syncs.wait_on_event.tolist(),
            strict=True,
        )
    ):
        call = call_of[place]
        if call < 0:
            made.unused["the call that waits is not in the trace"] += 1
            continue
        if queries[call]:
            made.unused["a query of an event waits for nothing"] += 1
            continue
        record: int = record_of[place]
        on_stream = name == "Stream Wait Event"
        waiting = own if on_stream else None
        stream = waited_for if waited_for >= 0 else own
        if record < 0 and (on_stream or name == "Event Sync"):
            records = records or Records(trace)
            record = records.record(event, call)
            if record < 0:
                made.unused["the trace does not tell which event record is waited for"] += 1
                continue
            recorded = records.stream(record, besides=waiting)
            if recorded is None:
                made.unused["the stream waits for its own work"] += 1
                continue
            stream = recorded
            made.inferred += 1
        made.found.append(
            Wait(
                stream=None if name == "Context Sync" or stream < 0 else stream,
                horizon_ns=int(calls.start_ns[record if record >= 0 else call]),
                waiting_stream=waiting,
                thread=int(calls.thread[call]),
                start_ns=int(calls.start_ns[call]),
                end_ns=int(calls.end_ns[call]),
            )
        )
    made.found.sort(key=lambda wait: wait.start_ns)
    return made
