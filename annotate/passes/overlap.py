"""The overlap of communication and compute: as far as data dependencies allow, or none."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.passes.data_dependencies import (
    CallDependencies,
    CommDependencies,
    Lanes,
    find_dependencies,
)
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Reason
from onerank.ir.arrays import I64, Mask
from onerank.ir.edges import one_per_pair, topological_order
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note
from onerank.ir.start_delays import launches

CHOICES = ("as-captured", "on", "off")
"""Overlap of communication and compute: as captured, as far as data allow, or none."""


class IssueSlot(NamedTuple):
    """When and where a communication call is issued.

    Attributes:
        after_rank: rank of the compute node after which the call is issued.
        launcher: host operator that issues it; UNKNOWN for none.
        before: previous call on its stream; UNKNOWN for none.
        stream: its stream.
    """

    after_rank: int
    launcher: int
    before: int
    stream: int


def issue_slots(graph: Graph, lanes: Lanes, dependencies: CommDependencies) -> dict[int, IssueSlot]:
    """Return the issue slots of the calls that move, in an order in which they can be issued.

    A call is issued directly after its last dependency, as by a hook; if nothing in the step wrote
    its inputs, it is issued where the script issues it. The calls of a stream therefore change
    their order, in the same way on each rank. Sends and receives keep their order, and so do the
    calls of a group with ranks of other pipeline stages, because these ranks have other graphs.
    """
    calls = sorted([*dependencies.of, *dependencies.fixed], key=lanes.rank.__getitem__)
    stream = _assign_streams(graph, calls, lanes)
    ordered, launcher_of = _ordered_streams(graph, stream), graph.launchers()
    issuing = _issuers(graph, lanes, launcher_of)
    after_rank, launcher, last_on_stream = dict[int, int](), dict[int, int](), dict[int, int]()
    for call in calls:
        call_dependencies = dependencies.of.get(call)
        has_writer = call_dependencies is not None and call_dependencies.has_writer
        after_rank[call] = (
            _last_dependency_rank(call_dependencies, lanes, after_rank)
            if call_dependencies is not None and has_writer
            else int(lanes.rank[call])
        )
        if stream[call] in ordered and stream[call] in last_on_stream:
            # Ranks of other stages have other graphs; were the order to change here, they would
            # issue these calls in another order and deadlock.
            after_rank[call] = max(after_rank[call], after_rank[last_on_stream[stream[call]]])
        launcher[call] = int(issuing[after_rank[call]] if has_writer else launcher_of[call])
        last_on_stream[stream[call]] = call
    # Ties keep the captured order, so that all ranks with the same graph agree.
    order = sorted(calls, key=lambda call: (after_rank[call], int(lanes.rank[call])))
    last_on_stream.clear()
    slots = dict[int, IssueSlot]()
    for call in order:
        slots[call] = IssueSlot(
            after_rank[call],
            launcher[call],
            last_on_stream.get(stream[call], UNKNOWN),
            stream[call],
        )
        last_on_stream[stream[call]] = call
    return slots


def _last_dependency_rank(
    dependencies: CallDependencies, lanes: Lanes, after_rank: Mapping[int, int]
) -> int:
    """Return the highest rank among the dependencies of a call; for calls, their issue rank."""
    ranks = [int(lanes.rank[node]) for node in dependencies.compute]
    return max([*ranks, *(after_rank[call] for call in dependencies.calls)])


def _issuers(graph: Graph, lanes: Lanes, launcher: I64) -> I64:
    """Return per rank the operator that issues calls there; `UNKNOWN` before the first launch.

    It is the operator that began last among those that launched kernels up to this rank: an outer
    operator may launch kernels after those of the operators that it calls.
    """
    node = lanes.order
    launched = (launcher[node] != UNKNOWN) & ~graph.communication[node]
    issued = np.where(launched, graph.nodes.start_ns[launcher[node]], UNKNOWN)
    latest = np.maximum.accumulate(issued)
    first = np.maximum.accumulate(np.where(issued == latest, np.arange(len(node)), 0))
    return np.where(latest == UNKNOWN, UNKNOWN, launcher[node][first])


def _assign_streams(graph: Graph, calls: list[int], lanes: Lanes) -> dict[int, int]:
    """Return the stream of each call.

    A call keeps its stream if no other group and no kernel uses that stream; otherwise it gets a
    stream of its group.
    """
    nodes = graph.nodes
    groups = defaultdict[int, set[int]](set)
    for call in calls:
        groups[int(nodes.stream[call])].add(int(nodes.group[call]))
    shared = set(nodes.stream[np.isin(lanes.of, np.flatnonzero(lanes.compute))].tolist())
    shared |= {stream for stream, users in groups.items() if len(users) > 1} | {UNKNOWN}
    group_stream = dict[int, int]()
    for call in calls:
        stream = int(nodes.stream[call])
        if stream not in shared:
            group_stream.setdefault(int(nodes.group[call]), stream)
    # The kernels of a CPU capture have stream 0.
    next_stream = max(int(nodes.stream.max()), 0) + 1
    assigned = dict[int, int]()
    for call in calls:
        stream, group = int(nodes.stream[call]), int(nodes.group[call])
        if stream in shared:
            if group not in group_stream:
                group_stream[group], next_stream = next_stream, next_stream + 1
            stream = group_stream[group]
        assigned[call] = stream
    return assigned


def _ordered_streams(graph: Graph, stream: dict[int, int]) -> set[int]:
    """Return the streams whose calls keep their order."""
    nodes, world = graph.nodes, graph.job.world
    point_to_point = np.isin(nodes.kind, (Kind.SEND, Kind.RECV))
    across_stages = set[int]()
    for group in {int(nodes.group[call]) for call in stream}:
        group_record = graph.job.group(graph.strings[group])
        ranks = group_record.ranks if group_record else range(world.size)
        if len({world.point(rank).get("pp", 0) for rank in ranks}) > 1:
            across_stages.add(group)
    return {
        stream_id
        for call, stream_id in stream.items()
        if point_to_point[call] or int(nodes.group[call]) in across_stages
    }


Pairs = list[tuple[int, int, int]]
"""(source, waiter, reason) of edges."""

_LANE_REASONS = (Reason.STREAM_ORDER, Reason.PROGRAM_ORDER)


def rewire(
    graph: Graph, lanes: Lanes, dependencies: CommDependencies, slots: Mapping[int, IssueSlot]
) -> Graph:
    """Return the graph with its calls at their issue slots.

    Args:
        graph: as captured.
        lanes: its lanes.
        dependencies: dependencies and dependents of its calls.
        slots: issue slot of each call, in an order in which they can be issued.
    """
    edges = graph.edges
    moved = np.zeros(len(graph), dtype=bool)
    moved[list(dependencies.of)] = True
    kept = ~moved[edges.source] & ~moved[edges.target]
    added = np.array(
        [
            *_bypass_edges(graph, lanes, moved),
            *_issue_edges(lanes, dependencies.of, slots),
            *_wait_edges(lanes, dependencies.waits, slots),
        ],
        dtype=np.int64,
    ).reshape(-1, 3)
    deduplicated = one_per_pair(
        np.concatenate([edges.source[kept], added[:, 0]]),
        np.concatenate([edges.target[kept], added[:, 1]]),
        np.concatenate([edges.reason[kept], added[:, 2].astype(np.uint8)]),
    )
    new_edges = Edges.from_pairs(len(graph), *deduplicated)
    return _move_calls(replace(graph, edges=new_edges), edges, dependencies.of, slots)


def _bypass_edges(graph: Graph, lanes: Lanes, moved: Mask) -> Pairs:
    """Return edges from the dependencies of a moved call to the nodes that waited for the call.

    Only the last of each lane is needed, except for nodes that launched a call. The next node of
    the same lane needs an edge only if the call was between the two.
    """
    edges = graph.edges
    offsets, sources = edges.offsets.tolist(), edges.source.tolist()
    # A launch orders the host, and ROOM kernels that compete for SMs; neither orders data.
    skipped = (launches(graph) | (edges.reason == Reason.ROOM)).tolist()
    dependencies_of = dict[int, dict[int, int]]()
    rank, key = lanes.rank.tolist(), _lane_keys(graph)
    calls = np.flatnonzero(moved)
    for call in calls[np.argsort(lanes.rank[calls])].tolist():
        latest = dependencies_of[call] = dict[int, int]()
        for edge in range(offsets[call], offsets[call + 1]):
            source = sources[edge]
            if skipped[edge]:
                continue
            for node in (
                dependencies_of[source].values() if source in dependencies_of else (source,)
            ):
                latest_known = latest.setdefault(key[node], node)
                if rank[node] > rank[latest_known]:
                    latest[key[node]] = node
    outgoing = moved[edges.source] & ~moved[edges.target] & (edges.reason != Reason.ROOM)
    rows = zip(
        *(column[outgoing].tolist() for column in (edges.source, edges.target, edges.reason)),
        strict=True,
    )
    return [
        (node, waiter, reason)
        for call, waiter, reason in rows
        for node in dependencies_of[call].values()
        if key[node] != key[waiter] or reason in _LANE_REASONS
    ]


def _lane_keys(graph: Graph) -> list[int]:
    """Return a number per node that identifies its stream or thread."""
    nodes = graph.nodes
    first = np.max(nodes.stream, initial=0) + 1
    on_thread = np.unique(nodes.thread, return_inverse=True)[1].reshape(-1) + first
    # A node on no stream and no thread is in order with no other.
    single = np.arange(len(graph)) + first + len(graph)
    on_thread = np.where(nodes.thread == UNKNOWN, single, on_thread)
    return np.where(nodes.stream == UNKNOWN, on_thread, nodes.stream).tolist()


def _issue_edges(
    lanes: Lanes, dependencies: Mapping[int, CallDependencies], slots: Mapping[int, IssueSlot]
) -> Pairs:
    """Return the edges to the calls: from launch, stream order and data dependencies."""
    edges: Pairs = []
    for call, slot in slots.items():
        if slot.before != UNKNOWN:
            edges.append((slot.before, call, Reason.STREAM_ORDER))
        if call not in dependencies:
            continue
        if slot.launcher != UNKNOWN:
            edges.append((slot.launcher, call, Reason.LAUNCH))
        last_on_lane = dict[int, int]()
        for node in sorted(dependencies[call].compute, key=lanes.rank.__getitem__):
            last_on_lane[int(lanes.of[node])] = node
        edges += [(node, call, Reason.SYNC) for node in last_on_lane.values()]
        edges += [(node, call, Reason.SYNC) for node in sorted(dependencies[call].calls)]
    return edges


def _wait_edges(
    lanes: Lanes, waits: list[tuple[int, int]], slots: Mapping[int, IssueSlot]
) -> Pairs:
    """Return the edges from the calls: per stream, only the last call that a node waits for."""
    issue_index = {call: number for number, call in enumerate(slots)}
    awaited = defaultdict[tuple[int, int], int](lambda: UNKNOWN)
    last = dict[tuple[int, int], int]()
    for call, node in waits:
        key = node, slots[call].stream
        if key not in last or issue_index[call] > issue_index[last[key]]:
            last[key] = call
    edges: Pairs = []
    for (node, stream), call in last.items():
        lane = int(lanes.of[node]), stream
        if issue_index[call] > awaited[lane] or not lanes.compute[lane[0]]:
            edges.append((call, node, Reason.SYNC))
            awaited[lane] = max(awaited[lane], issue_index[call])
    return edges


def _move_calls(
    graph: Graph,
    captured: Edges,
    dependencies: Mapping[int, CallDependencies],
    slots: Mapping[int, IssueSlot],
) -> Graph:
    """Return the graph with new streams and start times of the moved calls.

    Nodes that followed a moved call on its stream lose the overlap recorded with it.
    """
    nodes = graph.nodes
    stream, thread = nodes.stream.copy(), nodes.thread.copy()
    start, blocked = nodes.start_ns.copy(), nodes.blocked_ns.copy()
    moved = list(dependencies)
    from_moved = np.isin(captured.source, moved)
    follows = captured.target[from_moved & (captured.reason == Reason.STREAM_ORDER)]
    # Negative is a start before the predecessor's end, which was seen with a call that is no longer
    # there.
    blocked[follows] = np.maximum(blocked[follows], 0)
    stream[moved] = [slots[call].stream for call in moved]
    thread[moved], blocked[moved] = UNKNOWN, 0
    for call, slot in slots.items():
        if call not in dependencies:
            continue
        predecessors = [*dependencies[call].compute, *dependencies[call].calls]
        if slot.before != UNKNOWN and (predecessors or slot.before in dependencies):
            predecessors.append(slot.before)
        if predecessors:
            start[call] = max(start[node] + nodes.duration_ns[node] for node in predecessors)
    return graph.with_columns(stream=stream, thread=thread, start_ns=start, blocked_ns=blocked)


@dataclass(frozen=True, slots=True)
class MaximizeOverlap:
    """Overlap communication with compute as far as the data allow.

    A call starts when its inputs are written and nothing uses the memory that it writes. Compute
    waits for a call if it uses the call's result or overwrites its input. Streams, events and the
    host impose no further order. The host issues a call directly after the operator that wrote its
    data, as a hook would (see `issue_slots`), on a stream of its group. Kernels and host operators
    keep their captured order.
    """

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with these edges.

        All durations stay, also those of kernels that now overlap a call. Memory stays as captured,
        although calls would keep buffers longer. Calls without recorded tensors stay in place. A
        moved call starts when its data were ready in the capture; all other start times stay.

        Args:
            graph: captured, not coarsened.
            target: unused, since times are those of the graph.

        Raises:
            AnnotateError: the graph has no communication or no compute, is extrapolated, does not
                record the tensors of its calls, or its calls already overlap as far as possible.
        """
        del target
        _check(graph)
        lanes = Lanes.from_graph(graph)
        captured = lanes.before(graph.edges, lanes.order), lanes.after(graph.edges, lanes.order)
        dependencies = find_dependencies(graph, lanes, *captured)
        if not dependencies.of:
            raise AnnotateError(
                f"none of the {len(dependencies.fixed)} calls has recorded tensors, so its data "
                "dependencies are unknown\n  capture the step with `capture run`",
                code="overlap-no-operands",
            )
        rewired = rewire(graph, lanes, dependencies, issue_slots(graph, lanes, dependencies))
        order, leftover = topological_order(rewired.edges)
        assert not len(leftover), "calls are issued in an order that their data allow"
        calls = np.array(list(dependencies.of), dtype=np.int64)
        overlapped_before = lanes.count_overlapping(calls, *captured)
        overlapped_after = lanes.count_overlapping(
            calls, lanes.before(rewired.edges, order), lanes.after(rewired.edges, order)
        )
        if not (overlapped_after > overlapped_before).any():
            raise AnnotateError(
                f"none of the {len(calls)} calls can overlap more compute than it does: all "
                "compute that waits for a call needs its data",
                code="overlap-data-dependent",
            )
        measurement = rewired.job.measurement.untimed(
            _note(dependencies, overlapped_before, overlapped_after)
        )
        return replace(rewired, job=msgspec.structs.replace(rewired.job, measurement=measurement))


def _check(graph: Graph) -> None:
    """Raise for graphs in which nothing can overlap or data dependencies are unknown.

    Raises:
        AnnotateError: the graph has no communication, no compute, or extrapolated layers.
    """
    compute, communicates = compute_mask(graph).any(), graph.communication.any()
    if not compute or not communicates:
        lacking = "communication" if compute else "compute"
        raise AnnotateError(
            f"the graph has no {lacking}, so there is nothing to overlap",
            code="overlap-nothing-to-overlap",
        )
    if graph.job.measurement.depths is not None:
        raise AnnotateError(
            "the trace was extrapolated, so its copied layers name tensors of other layers\n"
            "  capture all layers for `--overlap on`",
            code="overlap-extrapolated-trace",
        )


def _note(dependencies: CommDependencies, before: I64, after: I64) -> Note:
    """Return a note on the numbers of calls that moved and stayed."""
    moved = after > before
    unread = ~moved & np.isin(list(dependencies.of), list(dependencies.unread))
    unmoved = ~moved & ~unread
    parts = (
        (int(moved.sum()), "overlap more compute than captured"),
        (int((unmoved & (after > 0)).sum()), "already overlap as much as their data allow"),
        (
            int((unmoved & (after == 0)).sum()),
            "are exposed, because the next compute needs their data",
        ),
        (
            int(unread.sum()),
            "are awaited as captured, because nothing in the step reads their results",
        ),
        (len(dependencies.fixed), "stay as captured, because their tensors are not recorded"),
    )
    counts = "; ".join(f"{count} {state}" for count, state in parts if count)
    return Note(
        f"Overlap on: of {len(dependencies.of) + len(dependencies.fixed)} calls, {counts}. "
        "Overlapping kernels keep their captured times, although contention would slow them, and "
        "memory is as captured.",
        code="overlap-on",
    )


@dataclass(frozen=True, slots=True)
class SerializeOverlap:
    """Remove all overlap of communication and compute.

    Device work follows the order of issue: the start of the launching operator or, without a
    launch, of the work itself. Where compute and communication follow each other in that order,
    the later waits for the earlier (reason SYNC). Compute on several streams, and communication of
    several groups, still overlap among themselves.
    """

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with these edges, and kernels at their uncontended times if known.

        Starts stay as captured: they keep the order, and edges determine the times.

        Args:
            graph: captured, not coarsened.
            target: unused, since times are those of the graph.

        Raises:
            AnnotateError: the graph has no communication or no compute, or its edges already
                separate them.
        """
        del target
        source, waiter = _separating_edges(graph)
        edges = graph.edges
        exists = np.isin(waiter * len(graph) + source, edges.target * len(graph) + edges.source)
        source, waiter = source[~exists], waiter[~exists]
        if not len(source):
            raise AnnotateError(
                "no communication overlaps compute in this graph: its edges already separate them",
                code="serialize-already-serial",
            )
        sync = np.full(len(source), Reason.SYNC, dtype=np.uint8)
        new_edges = Edges.from_pairs(
            len(graph),
            np.concatenate([edges.source, source]),
            np.concatenate([edges.target, waiter]),
            np.concatenate([edges.reason, sync]),
        )
        duration, evidence = graph.nodes.duration_ns.copy(), graph.nodes.evidence
        uncontended = graph.nodes.uncontended_ns
        # Only measured durations include contention; a predicted one has none to remove.
        known = compute_mask(graph) & (uncontended != UNKNOWN) & (evidence == Evidence.MEASURED)
        duration[known] = uncontended[known]
        serialized = replace(graph, edges=new_edges).with_columns(duration_ns=duration)
        note = Note(
            f"Overlap off: {len(source)} added edges make communication and compute wait for each "
            f"other in issue order; {int(known.sum())} kernels have the time measured without "
            "concurrent communication.",
            code="overlap-off",
        )
        measurement = serialized.job.measurement.untimed(note)
        _, leftover = topological_order(new_edges)
        if len(leftover):
            raise AnnotateError(
                f"the issue order contradicts the edges of {len(leftover)} nodes, so communication "
                "and compute cannot be serialized in it\n  convert the trace again",
                code="serialize-order-conflict",
            )
        return replace(
            serialized, job=msgspec.structs.replace(serialized.job, measurement=measurement)
        )


def _separating_edges(graph: Graph) -> tuple[I64, I64]:
    """Return (earlier, later) of the edges that separate compute from communication.

    In issue order, the graph alternates between sections of compute and of communication. The
    first node of each stream in a section waits for the last node of each stream in the section
    before; the edges of the streams imply the rest.
    """
    nodes = graph.nodes
    compute, communicates = compute_mask(graph), graph.communication
    if not compute.any() or not communicates.any():
        lacking = "communication" if compute.any() else "compute"
        raise AnnotateError(
            f"the graph has no {lacking}, so there is no overlap to remove",
            code="serialize-nothing-overlaps",
        )
    device = np.flatnonzero(compute | communicates)
    order = device[_in_issue_order(graph, device)]
    is_call = communicates[order]
    section = np.cumsum(np.concatenate([[0], is_call[1:] != is_call[:-1]]))
    # Threads get negative numbers, which no stream has.
    lane = np.where(nodes.stream[order] != UNKNOWN, nodes.stream[order], -1 - nodes.thread[order])
    last = _last_of(section, lane)
    first = len(section) - 1 - _last_of(section[::-1], lane[::-1])
    ends, starts = last[section[last] < section[-1]], first[section[first] > 0]
    begin = np.searchsorted(section[starts], section[ends] + 1)
    count = np.searchsorted(section[starts], section[ends] + 1, side="right") - begin
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    earlier, later = np.repeat(ends, count), starts[np.repeat(begin, count) + offset]
    # Nodes of one stream are ordered by its edges.
    across_lanes = lane[earlier] != lane[later]
    return order[earlier[across_lanes]], order[later[across_lanes]]


def _last_of(section: I64, lane: I64) -> I64:
    """Return the position of the last node of each lane in each section, ascending by section."""
    keys = np.stack([section, lane])
    _, position = np.unique(keys[:, ::-1], axis=1, return_index=True)
    last = np.sort(len(section) - 1 - position)
    return last[np.argsort(section[last], kind="stable")]


def _in_issue_order(graph: Graph, device: I64) -> I64:
    """Return positions of device nodes in the order in which they were issued."""
    edges, start = graph.edges, graph.nodes.start_ns
    issued = start.copy()
    launches = edges.reason == Reason.LAUNCH
    issued[edges.target[launches]] = start[edges.source[launches]]
    issued = np.where(graph.nodes.kind == Kind.HOST_OP, start, issued)
    return np.lexsort((start[device], issued[device]))
