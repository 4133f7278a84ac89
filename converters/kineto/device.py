"""GPU operations and the host operator that launched each."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from onerank.converters.kineto.events import QUERIES, Records
from onerank.converters.kineto.host import HostOp, HostTimeline
from onerank.converters.kineto.load import GPU_CATEGORIES, LAUNCH_CATEGORIES, Event
from onerank.ir import Kind

STAND_IN = "onerank_standin_"
"""How the kernels' names begin that `onerank.capture.standin` puts in a collective's place."""
PACED_STAND_IN = "onerank_standin_paced"

KINDS = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET}


@dataclass(frozen=True, slots=True)
class GpuOp:
    """A kernel, memcpy or memset; `operator` is the innermost host operator behind its launch."""

    event: Event
    kind: Kind
    start_ns: int
    duration_ns: int
    launch_ns: int
    operator: HostOp | None
    rule: str
    in_mark: int = -1
    """Index of the communication mark it was launched in, -1 outside of any."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from every other in its trace: correlation and start."""
        return self.event.args.correlation, self.start_ns

    @property
    def stands_in(self) -> bool:
        """Whether it is the kernel that shows when and where a recorded call would run."""
        return self.in_mark >= 0 and self.event.name.startswith(STAND_IN)


def link(events: Iterable[Event], timeline: HostTimeline) -> list[GpuOp]:
    """Link every GPU operation to its operator; ordered by launch, then by start.

    Rules, in order: `external id` (the launch or the operation carries the operator's),
    `enclosing operator` (innermost one on the launching thread at the time of the launch),
    each prefixed with `graph launch: ` where one launch started several operations;
    `no operator` where a launch stands outside any, `no launch` where none is recorded.
    """
    gpu: list[Event] = []
    launches: dict[int, Event] = {}
    for event in events:
        if event.cat in GPU_CATEGORIES:
            gpu.append(event)
        elif event.cat in LAUNCH_CATEGORIES and event.args.correlation:
            launches[event.args.correlation] = event
    by_external_id = {op.external_id: op for op in timeline if op.is_operator and op.external_id}
    per_launch = Counter(event.args.correlation for event in gpu)
    linked = [_link_one(event, launches, by_external_id, per_launch, timeline) for event in gpu]
    return sorted(linked, key=lambda op: (op.launch_ns, op.start_ns))


def _link_one(
    event: Event,
    launches: dict[int, Event],
    by_external_id: dict[int, HostOp],
    per_launch: Counter[int],
    timeline: HostTimeline,
) -> GpuOp:
    launch = launches.get(event.args.correlation) if event.args.correlation else None
    external_id = event.args.external_id or (launch.args.external_id if launch else 0)
    operator = by_external_id.get(external_id)
    rule = "external id"
    if operator is None and launch is not None:
        around = timeline.innermost(launch.tid, launch.start_ns)
        operator = timeline.operator(around) if around else None
        rule = "enclosing operator"
    in_mark = -1 if operator is None else operator.in_mark
    if launch is not None and event.name.startswith(STAND_IN):  # no operator launches it
        around = timeline.innermost(launch.tid, launch.start_ns)
        in_mark = around.in_mark if around else -1
    if operator is None:
        rule = "no operator" if launch else "no launch"
    if launch is not None and per_launch[event.args.correlation] > 1:
        rule = f"graph launch: {rule}"
    return GpuOp(
        event=event,
        kind=KINDS[event.cat],
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        launch_ns=launch.start_ns if launch else event.start_ns,
        operator=operator,
        rule=rule,
        in_mark=in_mark,
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """A synchronisation: `waiter` must come after all that was launched before `horizon_ns`.

    Attributes:
        stream: stream waited for; None for all streams.
        horizon_ns: host time of the event record, or of the call.
        waiting_stream: stream that waits; None when the host does.
        thread: calling thread.
        start_ns: host time of the call.
        end_ns: host time at which the call returned.
    """

    stream: int | None
    horizon_ns: int
    waiting_stream: int | None
    thread: int | str
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


def waits(events: Iterable[Event]) -> Waits:
    """Return the synchronisations of the trace."""
    events = list(events)
    calls: dict[int, Event] = {}
    syncs: list[Event] = []
    for event in events:
        if event.cat in LAUNCH_CATEGORIES and event.args.correlation:
            calls[event.args.correlation] = event
        elif event.cat == "cuda_sync":
            syncs.append(event)
    made = Waits()
    records: Records | None = None
    for sync in syncs:
        call = calls.get(sync.args.correlation)
        if call is None:
            made.unused["the call that waits is not in the trace"] += 1
            continue
        if call.name in QUERIES:
            made.unused["a query of an event waits for nothing"] += 1
            continue
        record = calls.get(sync.args.wait_on_record)
        on_stream = sync.name == "Stream Wait Event"
        waiting = sync.args.stream if on_stream else None
        stream = sync.args.wait_on_stream if sync.args.wait_on_stream >= 0 else sync.args.stream
        if record is None and (on_stream or sync.name == "Event Sync"):
            records = records or Records(events)
            record = records.record(sync.args.wait_on_event, call)
            if record is None:
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
                stream=None if sync.name == "Context Sync" or stream < 0 else stream,
                horizon_ns=record.start_ns if record else call.start_ns,
                waiting_stream=waiting,
                thread=call.tid,
                start_ns=call.start_ns,
                end_ns=call.end_ns,
            )
        )
    made.found.sort(key=lambda wait: wait.start_ns)
    return made
