"""Overlap communication with compute as far as data dependencies allow."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.passes.overlap.data_dependencies import Lanes, Need, Needs, needs_of
from onerank.annotate.passes.remove_nodes import one_per_pair
from onerank.annotate.passes.resize.tensor_locations import launchers
from onerank.ir import UNKNOWN, Edges, Graph, Kind, Reason
from onerank.ir.edges import topological_order
from onerank.ir.errors import AnnotateError
from onerank.ir.replay.scheduler import launches

I64 = npt.NDArray[np.int64]


class IssueSlot(NamedTuple):
    """A call's turn.

    Attributes:
        at: rank of what computes and the call is issued behind.
        launcher: operator of the host that issues it; UNKNOWN for none.
        before: the call before it on its stream; UNKNOWN for none.
        stream: its stream.
    """

    at: int
    launcher: int
    before: int
    stream: int


def turns_of(graph: Graph, lanes: Lanes, needs: Needs) -> dict[int, IssueSlot]:
    """Return the issue slots of the calls that move, in an order in which they can be issued.

    A call is issued directly after the last of its dependencies, as by a hook; if nothing in the
    step wrote its inputs, where the script issues it. So the calls of a stream change their order,
    on each rank in the same way. Sends and receives keep their order, and so do the calls of a
    group with ranks of other pipeline stages.
    """
    calls = sorted([*needs.of, *needs.fixed], key=lanes.rank.__getitem__)
    stream = _streams(graph, calls, lanes)
    keeps, by = _keeping_order(graph, stream), launchers(graph)
    issuing = _issuing(graph, lanes, by)
    at, launcher, last = dict[int, int](), dict[int, int](), dict[int, int]()
    for call in calls:
        need = needs.of.get(call)
        made = need is not None and need.made
        at[call] = _behind(need, lanes, at) if need is not None and made else int(lanes.rank[call])
        if stream[call] in keeps and stream[call] in last:
            at[call] = max(at[call], at[last[stream[call]]])
        launcher[call] = int(issuing[at[call]] if made else by[call])
        last[stream[call]] = call
    order = sorted(calls, key=lambda call: (at[call], int(lanes.rank[call])))
    last.clear()
    turns = dict[int, IssueSlot]()
    for call in order:
        turns[call] = IssueSlot(
            at[call], launcher[call], last.get(stream[call], UNKNOWN), stream[call]
        )
        last[stream[call]] = call
    return turns


def _behind(need: Need, lanes: Lanes, at: Mapping[int, int]) -> int:
    """Return the rank of the last that a call needs; of a call what that is issued behind."""
    ranks = [int(lanes.rank[node]) for node in need.compute]
    return max([*ranks, *(at[call] for call in need.calls)])


def _issuing(graph: Graph, lanes: Lanes, by: I64) -> I64:
    """Return per rank the operator that began last of those that launched kernels up to it.

    A call that is issued behind these is launched as it ends: an operator may launch behind what it
    calls. `UNKNOWN` before the first.
    """
    node = lanes.order
    launched = (by[node] != UNKNOWN) & ~graph.communication[node]
    begun = np.where(launched, graph.nodes.start_ns[by[node]], UNKNOWN)
    latest = np.maximum.accumulate(begun)
    first = np.maximum.accumulate(np.where(begun == latest, np.arange(len(node)), 0))
    return np.where(latest == UNKNOWN, UNKNOWN, by[node][first])


def _streams(graph: Graph, calls: list[int], lanes: Lanes) -> dict[int, int]:
    """Return the stream of each call.

    That on which it ran, if no other group's call and no kernel did; else one for its group.
    """
    nodes = graph.nodes
    groups = defaultdict[int, set[int]](set)
    for call in calls:
        groups[int(nodes.stream[call])].add(int(nodes.group[call]))
    shared = set(nodes.stream[np.isin(lanes.of, np.flatnonzero(lanes.compute))].tolist())
    shared |= {stream for stream, users in groups.items() if len(users) > 1} | {UNKNOWN}
    own = dict[int, int]()
    for call in calls:
        stream = int(nodes.stream[call])
        if stream not in shared:
            own.setdefault(int(nodes.group[call]), stream)
    following = max(int(nodes.stream.max()), 0) + 1  # a CPU capture's kernels get stream 0
    found = dict[int, int]()
    for call in calls:
        stream, group = int(nodes.stream[call]), int(nodes.group[call])
        if stream in shared:
            if group not in own:
                own[group], following = following, following + 1
            stream = own[group]
        found[call] = stream
    return found


def _keeping_order(graph: Graph, stream: dict[int, int]) -> set[int]:
    """Return the streams whose calls keep their order."""
    nodes, world = graph.nodes, graph.job.world
    pairs = np.isin(nodes.kind, (Kind.SEND, Kind.RECV))
    unlike = set[int]()
    for group in {int(nodes.group[call]) for call in stream}:
        known = graph.job.group(graph.strings[group])
        ranks = known.ranks if known else range(world.size)
        if len({world.point(rank).get("pp", 0) for rank in ranks}) > 1:
            unlike.add(group)
    return {
        number for call, number in stream.items() if pairs[call] or int(nodes.group[call]) in unlike
    }


Mask = npt.NDArray[np.bool_]

Pairs = list[tuple[int, int, int]]
"""(source, waiter, reason) of edges."""

_IN_A_LANE = (Reason.STREAM_ORDER, Reason.PROGRAM_ORDER)


def rewired(graph: Graph, lanes: Lanes, needs: Needs, turns: Mapping[int, IssueSlot]) -> Graph:
    """Return the graph with its calls at their turns.

    Args:
        graph: as captured.
        lanes: its lanes.
        needs: what its calls need, and who needs them.
        turns: of each call, in an order in which they can be issued.
    """
    edges = graph.edges
    moved = np.zeros(len(graph), dtype=bool)
    moved[list(needs.of)] = True
    stays = ~moved[edges.source] & ~moved[edges.target]
    more = np.array(
        [
            *_around(graph, lanes, moved),
            *_issues(lanes, needs.of, turns),
            *_waits(lanes, needs.waits, turns),
        ],
        dtype=np.int64,
    ).reshape(-1, 3)
    made = one_per_pair(
        np.concatenate([edges.source[stays], more[:, 0]]),
        np.concatenate([edges.target[stays], more[:, 1]]),
        np.concatenate([edges.reason[stays], more[:, 2].astype(np.uint8)]),
    )
    joined = Edges.from_pairs(len(graph), *made)
    return _placed(replace(graph, edges=joined), edges, needs.of, turns)


def _around(graph: Graph, lanes: Lanes, moved: Mask) -> Pairs:
    """Return edges from the dependencies of a moved call to the nodes that waited for the call.

    Only the last of each lane is needed, except for nodes that launched a call. The next node of
    the same lane needs an edge only if the call was between the two.
    """
    edges = graph.edges
    offsets, sources = edges.offsets.tolist(), edges.source.tolist()
    skipped = (launches(graph) | (edges.reason == Reason.ROOM)).tolist()
    behind = dict[int, dict[int, int]]()
    rank, key = lanes.rank.tolist(), _keys(graph)
    calls = np.flatnonzero(moved)
    for call in calls[np.argsort(lanes.rank[calls])].tolist():
        last = behind[call] = dict[int, int]()
        for edge in range(offsets[call], offsets[call + 1]):
            source = sources[edge]
            if skipped[edge]:
                continue
            for node in behind[source].values() if source in behind else (source,):
                known = last.setdefault(key[node], node)
                if rank[node] > rank[known]:
                    last[key[node]] = node
    chosen = moved[edges.source] & ~moved[edges.target] & (edges.reason != Reason.ROOM)
    rows = zip(
        *(column[chosen].tolist() for column in (edges.source, edges.target, edges.reason)),
        strict=True,
    )
    return [
        (node, waiter, reason)
        for call, waiter, reason in rows
        for node in behind[call].values()
        if key[node] != key[waiter] or reason in _IN_A_LANE
    ]


def _keys(graph: Graph) -> list[int]:
    """Return a number per node that identifies its stream or thread."""
    nodes = graph.nodes
    first = np.max(nodes.stream, initial=0) + 1
    on_thread = np.unique(nodes.thread, return_inverse=True)[1].reshape(-1) + first
    alone = np.arange(len(graph)) + first + len(graph)
    on_thread = np.where(nodes.thread == UNKNOWN, alone, on_thread)
    return np.where(nodes.stream == UNKNOWN, on_thread, nodes.stream).tolist()


def _issues(lanes: Lanes, needs: Mapping[int, Need], turns: Mapping[int, IssueSlot]) -> Pairs:
    """Return the edges to the calls: by their launch, their stream and their data."""
    made: Pairs = []
    for call, turn in turns.items():
        if turn.before != UNKNOWN:
            made.append((turn.before, call, Reason.STREAM_ORDER))
        if call not in needs:
            continue
        if turn.launcher != UNKNOWN:
            made.append((turn.launcher, call, Reason.LAUNCH))
        last = dict[int, int]()
        for node in sorted(needs[call].compute, key=lanes.rank.__getitem__):
            last[int(lanes.of[node])] = node
        made += [(node, call, Reason.SYNC) for node in last.values()]
        made += [(node, call, Reason.SYNC) for node in sorted(needs[call].calls)]
    return made


def _waits(lanes: Lanes, waits: list[tuple[int, int]], turns: Mapping[int, IssueSlot]) -> Pairs:
    """Return the edges from the calls: of those of a stream the last that a node waits for."""
    place = {call: number for number, call in enumerate(turns)}
    known = defaultdict[tuple[int, int], int](lambda: UNKNOWN)
    last = dict[tuple[int, int], int]()
    for call, node in waits:
        key = node, turns[call].stream
        if key not in last or place[call] > place[last[key]]:
            last[key] = call
    made: Pairs = []
    for (node, stream), call in last.items():
        lane = int(lanes.of[node]), stream
        if place[call] > known[lane] or not lanes.compute[lane[0]]:
            made.append((call, node, Reason.SYNC))
            known[lane] = max(known[lane], place[call])
    return made


def _placed(
    graph: Graph, captured: Edges, needs: Mapping[int, Need], turns: Mapping[int, IssueSlot]
) -> Graph:
    """Return the graph with stream and start of the calls that moved.

    Who followed one of them on its stream no longer began so long before its end.
    """
    nodes = graph.nodes
    stream, thread = nodes.stream.copy(), nodes.thread.copy()
    start, queued = nodes.start_ns.copy(), nodes.blocked_ns.copy()
    moved = list(needs)
    of_moved = np.isin(captured.source, moved)
    follows = captured.target[of_moved & (captured.reason == Reason.STREAM_ORDER)]
    queued[follows] = np.maximum(queued[follows], 0)
    stream[moved] = [turns[call].stream for call in moved]
    thread[moved], queued[moved] = UNKNOWN, 0
    for call, turn in turns.items():
        if call not in needs:
            continue
        behind = [*needs[call].compute, *needs[call].calls]
        if turn.before != UNKNOWN and (behind or turn.before in needs):
            behind.append(turn.before)
        if behind:
            start[call] = max(start[node] + nodes.duration_ns[node] for node in behind)
    return graph.with_columns(stream=stream, thread=thread, start_ns=start, blocked_ns=queued)


@dataclass(frozen=True, slots=True)
class MaximizeOverlap:
    """Overlap communication with compute as far as the data allow.

    A call starts when its inputs are written and nothing uses the memory that it writes. Compute
    waits for a call if it uses the call's result or overwrites its input. Streams, events and the
    host impose no further order. The host issues a call directly after the operator that made its
    data, as a hook would (see `turns_of`), on a stream of its group. Kernels and host operators
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
        needs = needs_of(graph, lanes, *captured)
        if not needs.of:
            raise AnnotateError(
                f"none of the graph's {len(needs.fixed)} calls tells which tensors it uses, so "
                "what could run beside it is not known; capture the step with `capture run`",
                code="overlap-no-operands",
            )
        made = rewired(graph, lanes, needs, turns_of(graph, lanes, needs))
        order, leftover = topological_order(made.edges)
        assert not len(leftover), "calls are issued in an order that their data allow"
        calls = np.array(list(needs.of), dtype=np.int64)
        was = lanes.beside(calls, *captured)
        now = lanes.beside(calls, lanes.before(made.edges, order), lanes.after(made.edges, order))
        if not (now > was).any():
            raise AnnotateError(
                "no communication can run beside more compute than it does: what waits for each of "
                f"the {len(calls)} calls needs its data",
                code="overlap-data-dependent",
            )
        told = made.job.measurement.untimed(_note(needs, was, now))
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _check(graph: Graph) -> None:
    """Refuse graphs in which nothing can overlap, or data cannot be followed.

    Raises:
        AnnotateError: it is one.
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
            "the trace was extrapolated, so its copied layers name the tensors of others; for "
            "--overlap on capture all layers",
            code="overlap-extrapolated-trace",
        )


def _note(needs: Needs, was: I64, now: I64) -> str:
    """Say how many calls moved, and how many did not."""
    moved = now > was
    unread = ~moved & np.isin(list(needs.of), list(needs.unread))
    rest = ~moved & ~unread
    parts = (
        (int(moved.sum()), "beside more compute than captured"),
        (int((rest & (now > 0)).sum()), "beside it already as far as their data allow"),
        (int((rest & (now == 0)).sum()), "exposed, as what follows needs their data"),
        (int(unread.sum()), "awaited as captured, as nothing in the step reads what they write"),
        (len(needs.fixed), "as captured, as they tell no tensors"),
    )
    told = "; ".join(f"{count} {what}" for count, what in parts if count)
    return (
        f"Overlap on: of {len(needs.of) + len(needs.fixed)} calls {told}. Kernels beside them last "
        "as captured (beside communication they take longer), and memory is as captured."
    )
