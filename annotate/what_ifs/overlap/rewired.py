"""A graph whose calls wait for their data alone, and are waited for where these are used."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.contract import one_per_pair
from onerank.annotate.what_ifs.overlap.lanes import Lanes
from onerank.annotate.what_ifs.overlap.needs import Need, Needs
from onerank.annotate.what_ifs.overlap.turns import Turn
from onerank.ir import UNKNOWN, Edges, Graph, Reason
from onerank.ir.replay.start_delays import launches

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Pairs = list[tuple[int, int, int]]
"""(source, waiter, reason) of edges."""

_IN_A_LANE = (Reason.STREAM_ORDER, Reason.PROGRAM_ORDER)


def rewired(graph: Graph, lanes: Lanes, needs: Needs, turns: Mapping[int, Turn]) -> Graph:
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
    """Return edges by which who waited for a moved call waits for what it waited for.

    Of each lane the last alone, but for what launched a call. Who follows on the same lane need not
    be told, but where the call was between the two.
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
    """Return a number per node, the same on a stream or a thread, and of nobody else's."""
    nodes = graph.nodes
    first = np.max(nodes.stream, initial=0) + 1
    on_thread = np.unique(nodes.thread, return_inverse=True)[1].reshape(-1) + first
    alone = np.arange(len(graph)) + first + len(graph)
    on_thread = np.where(nodes.thread == UNKNOWN, alone, on_thread)
    return np.where(nodes.stream == UNKNOWN, on_thread, nodes.stream).tolist()


def _issues(lanes: Lanes, needs: Mapping[int, Need], turns: Mapping[int, Turn]) -> Pairs:
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


def _waits(lanes: Lanes, waits: list[tuple[int, int]], turns: Mapping[int, Turn]) -> Pairs:
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
    graph: Graph, captured: Edges, needs: Mapping[int, Need], turns: Mapping[int, Turn]
) -> Graph:
    """Return the graph with stream and start of the calls that moved.

    Who followed one of them on its stream no longer began so long before its end.
    """
    nodes = graph.nodes
    stream, thread = nodes.stream.copy(), nodes.thread.copy()
    start, queued = nodes.start_ns.copy(), nodes.queued_ns.copy()
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
    return graph.with_columns(stream=stream, thread=thread, start_ns=start, queued_ns=queued)
