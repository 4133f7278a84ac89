"""Turn linked events into the nodes and edges of a graph.

Every edge runs forward in launch order (host events: in call order), so no cycle can arise.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import msgspec

from onerank.converters.kineto.alone import Alone
from onerank.converters.kineto.calls import Recorded, end_of_wait, recorded_calls, wait_is_known
from onerank.converters.kineto.communication import Communication, from_kernel
from onerank.converters.kineto.device import GpuOp, Wait, Waits
from onerank.converters.kineto.host import HostOp, HostTimeline, micro_batches
from onerank.converters.kineto.lanes import Draft, Lane, lane_at
from onerank.converters.kineto.leaves import leaves
from onerank.converters.kineto.load import EtNode
from onerank.converters.kineto.memory import Memory
from onerank.converters.kineto.report import Conversion
from onerank.ir import (
    UNKNOWN,
    Evidence,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Phase,
    ProcessGroup,
    Reason,
)


def assemble(
    *,
    timeline: HostTimeline,
    gpu: list[GpuOp],
    waits: Waits,
    memory: Memory,
    alone: Alone,
    job: Job,
    timing: str,
    et_path: str,
) -> tuple[Graph, Conversion]:
    """Build the graph; the report counts what was linked and what was left out."""
    marked = recorded_calls(timeline, gpu, et_path)
    emulation = [op for op in gpu if op.in_mark >= 0]
    own = [op for op in gpu if op.in_mark < 0]
    work = _Assembly(timeline, alone)
    kept = _kept_operators(timeline, cpu_only=not own)
    host = {op.index: work.host(op) for op in kept}

    streams = work.streams(own)
    threads = work.threads(kept, host)
    if own:
        work.own_time(kept, host)
        work.launches(own, host)
        unplaced = work.calls_on_streams(marked, host, streams)
    else:
        unplaced = work.calls_on_threads(marked, kept, host, threads)
    for lane in streams.values():
        work.chain(lane, Reason.STREAM_ORDER)
    for lane in threads.values():
        work.chain(lane, Reason.PROGRAM_ORDER)
    work.handovers(kept, host)
    syncs, idle = work.waits(waits.found, streams, threads)
    lost = work.memory(memory, host, cpu_only=not own)

    calls = [call.communication for call in marked] + work.measured
    graph = work.build(_with_groups(job, calls))
    backward = [op for op in kept if op.phase is Phase.BACKWARD]
    report = Conversion(
        gpu_ops=len(gpu),
        gpu_ops_linked=dict(Counter(op.rule for op in own if op.operator)),
        gpu_ops_unlinked=dict(Counter(op.rule for op in own if not op.operator)),
        gpu_ops_left_out=(len(emulation), sum(op.duration_ns for op in emulation)),
        host_ops=sum(op.is_operator for op in timeline),
        host_ops_kept=len(kept),
        host_ops_without_record=sum(op.et is None for op in kept),
        host_ops_left_out=_left_out(timeline, host),
        communication=len(calls),
        backward_ops=len(backward),
        backward_ops_with_module=sum(bool(op.module) for op in backward),
        memory_events=memory.events,
        memory_events_outside=memory.outside,
        memory_events_elsewhere=memory.elsewhere,
        syncs=syncs,
        syncs_left_out=dict(waits.unused + idle),
        timing=timing,
    )
    if lost:
        report.notes.append(f"{lost} bytes allocated or freed on threads without operators")
    if waits.inferred:
        report.notes.append(
            f"which record {waits.inferred} waits for an event refer to is inferred from the order "
            "of the event ids; the driver does not tell"
        )
    blocking = sum(call.communication.asynchronous for call in unplaced)
    if blocking:
        report.notes.append(
            f"{blocking} asynchronous calls are taken as blocking: the trace does not tell what "
            "they overlap"
        )
    return graph, report


def _kept_operators(timeline: HostTimeline, *, cpu_only: bool) -> list[HostOp]:
    if cpu_only:
        return [timeline.ops[index] for index in leaves(timeline)]
    return [op for op in timeline if op.is_operator and op.in_mark < 0 and not op.is_wait]


def _left_out(timeline: HostTimeline, host: dict[int, Draft]) -> dict[str, int]:
    reasons = Counter[str]()
    for op in timeline:
        if not op.is_operator or op.index in host:
            continue
        recorder = op.in_mark >= 0 or op.is_wait
        reasons["emulates communication" if recorder else "not a leaf, a view or free"] += 1
    return dict(reasons)


class _Assembly:
    """Collects drafts and edges; each method adds one sort of them."""

    def __init__(self, timeline: HostTimeline, alone: Alone) -> None:
        self._timeline = timeline
        self._alone = alone
        self._drafts: list[Draft] = []
        self._edges: list[tuple[Draft, Draft, Reason]] = []
        self._micro_batches = micro_batches(timeline)
        self._threads = {thread: number for number, thread in enumerate(timeline.threads)}
        self._asynchronous: dict[str, Draft] = {}
        self.measured: list[Communication] = []

    def edge(self, source: Draft, target: Draft, reason: Reason) -> None:
        """Let `target` wait for `source`."""
        if source is not target:
            self._edges.append((source, target, reason))

    def _draft(self, start_ns: int, end_ns: int, launch_ns: int, **columns: Any) -> Draft:
        draft = Draft(start_ns, end_ns, launch_ns, columns)
        self._drafts.append(draft)
        return draft

    def host(self, op: HostOp) -> Draft:
        """Add a host operator, its duration whole; `own_time` takes the callees' off."""
        return self._draft(
            op.start_ns,
            op.end_ns,
            op.start_ns,
            name=op.name,
            op=op.name,
            kind=Kind.HOST_OP,
            thread=self._threads[op.thread],
            duration_ns=op.end_ns - op.start_ns,
            evidence=Evidence.MEASURED,
            **self._context(op),
            **_operands(op.et),
        )

    def _context(self, op: HostOp) -> dict[str, Any]:
        return {
            "module": op.module,
            "phase": op.phase,
            "micro_batch": self._micro_batches.get(op.index, -1),
        }

    def own_time(self, kept: list[HostOp], host: dict[int, Draft]) -> None:
        """Take from every operator the time of the operators and marks it calls."""
        for op in self._timeline:
            if not (op.index in host or op.is_mark):
                continue
            if caller := self.enclosing(op, host):
                caller.columns["duration_ns"] -= op.end_ns - op.start_ns
        for op in kept:
            columns = host[op.index].columns
            columns["duration_ns"] = max(0, columns["duration_ns"])

    def enclosing(self, op: HostOp, host: dict[int, Draft]) -> Draft | None:
        """Return the nearest draft of an operator that called `op`."""
        parent = op.parent
        while parent >= 0 and parent not in host:
            parent = self._timeline.ops[parent].parent
        return host[parent] if parent >= 0 else None

    def streams(self, gpu: list[GpuOp]) -> dict[tuple[int, int], Lane]:
        """Add the GPU operations, as one lane per stream in the order of their start."""
        lanes: dict[tuple[int, int], Lane] = {}
        for op in sorted(gpu, key=lambda op: op.start_ns):
            args = op.event.args
            lane = lanes.setdefault((args.device, args.stream), Lane())
            communication = from_kernel(op.event, op.operator)
            columns: dict[str, Any] = {"name": op.event.name, "kind": op.kind}
            if communication is not None:
                self.measured.append(communication)
                columns |= _communication_columns(communication)
            elif op.operator is not None:
                columns |= _operands(op.operator.et)
            if op.operator is not None:
                columns |= {"op": op.operator.name, **self._context(op.operator)}
            if communication is None:
                columns["alone_ns"] = self._alone.get(op.key, UNKNOWN)
            if op.kind is not Kind.KERNEL:
                columns["bytes_written"] = args.bytes
                columns["bytes_read"] = args.bytes if op.kind is Kind.MEMCPY else 0
            lane.drafts.append(
                self._draft(
                    op.start_ns,
                    op.start_ns + op.duration_ns,
                    op.launch_ns,
                    stream=args.stream,
                    duration_ns=op.duration_ns,
                    evidence=Evidence.MEASURED,
                    grid=str(args.grid) if args.grid else "",
                    block=str(args.block) if args.block else "",
                    **columns,
                )
            )
        return lanes

    def launches(self, gpu: list[GpuOp], host: dict[int, Draft]) -> None:
        """Let every GPU operation wait for the operator that launched it."""
        by_start = sorted(gpu, key=lambda op: op.start_ns)
        drafts = [draft for draft in self._drafts if "stream" in draft.columns]
        for op, draft in zip(by_start, drafts, strict=True):
            if op.operator is not None and op.operator.index in host:
                self.edge(host[op.operator.index], draft, Reason.LAUNCH)

    def calls_on_streams(
        self,
        calls: list[Recorded],
        host: dict[int, Draft],
        streams: dict[tuple[int, int], Lane],
    ) -> list[Recorded]:
        """Add recorded calls where their stand-ins ran; return those that had none.

        The latter are put behind what was launched before them, as if they blocked.
        """
        unplaced: list[Recorded] = []
        for call in calls:
            draft = self.communication(call)
            if call.stand_ins:
                args = call.stand_ins[0].event.args
                streams.setdefault((args.device, args.stream), Lane()).insert_by_start(draft)
            else:
                lane_at(streams, draft.launch_ns).insert_by_launch(draft)
                unplaced.append(call)
            if launcher := self.enclosing(call.op, host):
                self.edge(launcher, draft, Reason.LAUNCH)
        return unplaced

    def calls_on_threads(
        self,
        calls: list[Recorded],
        kept: list[HostOp],
        host: dict[int, Draft],
        threads: dict[int | str, Lane],
    ) -> list[Recorded]:
        """Add the calls recorded on a CPU; return those taken as blocking."""
        by_start = sorted(kept, key=lambda op: op.start_ns)
        unplaced: list[Recorded] = []
        for call in calls:
            draft = self.communication(call)
            if call.communication.asynchronous and wait_is_known(call):
                self._beside(call, draft, threads)
                if behind := end_of_wait(call, by_start):
                    self.edge(draft, host[behind.index], Reason.SYNC)
            else:
                threads.setdefault(call.op.thread, Lane()).insert_by_launch(draft)
                unplaced.append(call)
        return unplaced

    def communication(self, call: Recorded) -> Draft:
        """Add a recorded call.

        It takes the time of what stood in for it on the network it was captured for; without one
        it takes none, since nobody was there to talk to.
        """
        op, columns = call.op, _communication_columns(call.communication)
        start = end = launch = op.start_ns
        if call.stand_ins:
            first, last = call.stand_ins[0], call.stand_ins[-1]
            start = end = first.start_ns
            launch = first.launch_ns
            columns["stream"] = first.event.args.stream
            if call.paced:
                end = last.start_ns + last.duration_ns
                columns |= {"duration_ns": end - start, "evidence": Evidence.SCALED}
        columns |= _tensors(op.et)
        return self._draft(start, end, launch, **columns, **self._context(op))

    def _beside(self, call: Recorded, draft: Draft, threads: dict[int | str, Lane]) -> None:
        """Let an asynchronous call on a CPU start behind what its thread and group did before."""
        draft.columns["thread"] = self._threads[call.op.thread]
        lane = threads.get(call.op.thread)
        if lane and (before := lane.last_launched(draft.launch_ns)):
            self.edge(before, draft, Reason.PROGRAM_ORDER)
        if earlier := self._asynchronous.get(call.communication.group):
            self.edge(earlier, draft, Reason.STREAM_ORDER)
        self._asynchronous[call.communication.group] = draft

    def threads(self, kept: list[HostOp], host: dict[int, Draft]) -> dict[int | str, Lane]:
        """Return one lane of host drafts per thread, in call order."""
        lanes: dict[int | str, Lane] = {}
        for op in kept:
            lanes.setdefault(op.thread, Lane()).drafts.append(host[op.index])
        return lanes

    def chain(self, lane: Lane, reason: Reason) -> None:
        """Let each draft of a lane wait for the one before."""
        for source, target in pairwise(lane.drafts):
            self.edge(source, target, reason)

    def handovers(self, kept: list[HostOp], host: dict[int, Draft]) -> None:
        """Let autograd's thread wait for the one that called backward, and the other way round."""
        ordered = sorted(kept, key=lambda op: op.start_ns)
        for before, after in pairwise(ordered):
            if before.thread == after.thread or before.end_ns > after.start_ns:
                continue
            if Phase.BACKWARD in (before.phase, after.phase):
                self.edge(host[before.index], host[after.index], Reason.SYNC)

    def waits(
        self,
        waits: list[Wait],
        streams: dict[tuple[int, int], Lane],
        threads: dict[int | str, Lane],
    ) -> tuple[int, Counter[str]]:
        """Add the edges of the synchronisations; return how many, and those that gave none."""
        made = 0
        idle = Counter[str]()
        for wait in waits:
            if wait.waiting_stream is None:
                lane = threads.get(wait.thread)
                waiter = lane.first_launched(wait.end_ns) if lane else None
            else:
                waiters = [lane for (_, s), lane in streams.items() if s == wait.waiting_stream]
                waiter = waiters[0].first_launched(wait.start_ns) if waiters else None
            if waiter is None:
                idle["nothing follows that waits"] += 1
                continue
            before = made
            for (_, stream), lane in streams.items():
                if wait.stream not in (None, stream) or stream == wait.waiting_stream:
                    continue
                source = lane.last_launched(wait.horizon_ns)
                if source is not None:
                    self.edge(source, waiter, Reason.SYNC)
                    made += 1
            if made == before:
                idle["nothing was launched before on the stream waited for"] += 1
        return made, idle

    def memory(self, memory: Memory, host: dict[int, Draft], *, cpu_only: bool) -> int:
        """Add bytes allocated and freed to the operators; return the bytes that found none.

        Outside any node, a free belongs to the node before it, an allocation too; on a CPU, where
        only leaves are nodes, an allocation belongs to the leaf that it precedes.
        """
        kept = sorted(host)
        lost = 0
        for account, column, onward in (
            (memory.allocated, "bytes_allocated", cpu_only),
            (memory.freed, "bytes_freed", False),
        ):
            for index, size in account.items():
                op = self._timeline.ops[index]
                draft = host.get(index) or self.enclosing(op, host)
                if draft is None:
                    span = self._timeline.threads[op.thread]
                    near = _nearest(kept, index, span, onward=onward)
                    draft = None if near is None else host[near]
                if draft is None:
                    lost += size
                else:
                    draft.columns[column] = draft.columns.get(column, 0) + size
        return lost

    def build(self, job: Job) -> Graph:
        """Number the drafts by start and build the graph; time starts at zero."""
        self._drafts.sort(key=lambda draft: draft.start_ns)
        zero = self._drafts[0].start_ns if self._drafts else 0
        builder = GraphBuilder()
        for draft in self._drafts:
            draft.index = builder.add(start_ns=draft.start_ns - zero, **draft.columns)
        for source, target, reason in self._edges:
            builder.edge(source.index, target.index, reason)
        return builder.build(job)


def _nearest(kept: list[int], index: int, span: range, *, onward: bool) -> int | None:
    """Return the kept index before `index` (after it when `onward`) within its thread's span."""
    mine = kept[bisect_left(kept, span.start) : bisect_left(kept, span.stop)]
    position = bisect_left(mine, index) - (not onward)
    return mine[min(max(position, 0), len(mine) - 1)] if mine else None


def _operands(et: EtNode | None) -> dict[str, str]:
    if et is None:
        return {}
    text: Callable[[msgspec.Raw], str] = lambda raw: bytes(raw).decode()  # noqa: E731
    return {
        "input_values": text(et.inputs.values),
        "input_shapes": text(et.inputs.shapes),
        "input_types": text(et.inputs.types),
        "output_values": text(et.outputs.values),
        "output_shapes": text(et.outputs.shapes),
        "output_types": text(et.outputs.types),
    }


def _tensors(mark: EtNode | None) -> dict[str, str]:
    """Return the tensors of a recorded call; what follows them in its mark is the call as JSON."""
    if mark is None:
        return {}
    columns = {
        "input_values": mark.inputs.values,
        "input_shapes": mark.inputs.shapes,
        "input_types": mark.inputs.types,
    }
    decoded = {name: msgspec.json.decode(raw) for name, raw in columns.items()}
    return {name: msgspec.json.encode(given[:-1]).decode() for name, given in decoded.items()}


def _communication_columns(communication: Communication) -> dict[str, Any]:
    return {
        "name": communication.name,
        "kind": communication.kind,
        "collective": communication.collective,
        "comm_bytes": communication.bytes,
        "group": communication.group,
        "comm_src": communication.src,
        "comm_dst": communication.dst,
        "comm_tag": communication.tag,
    }


def _with_groups(job: Job, calls: Iterable[Communication]) -> Job:
    """Add the groups that calls name and the job does not know."""
    known = {group.name: group for group in job.groups}
    for call in calls:
        if call.group and call.group not in known and call.group_ranks:
            known[call.group] = ProcessGroup(call.group, call.group_ranks)
    return msgspec.structs.replace(job, groups=tuple(known.values()))
