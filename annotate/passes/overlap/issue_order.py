"""Order and stream of calls that wait for their data alone."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.passes.overlap.data_dependencies import Lanes, Need, Needs
from onerank.annotate.passes.resize.tensor_locations import launchers
from onerank.ir import UNKNOWN, Graph, Kind

I64 = npt.NDArray[np.int64]


class Turn(NamedTuple):
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


def turns_of(graph: Graph, lanes: Lanes, needs: Needs) -> dict[int, Turn]:
    """Return the turns of the calls that move, in an order in which they can be issued.

    A call is issued right behind the last of those it needs, as by a hook; where nothing in the
    step wrote what it reads, where the script issues it. So the calls of a stream change their
    order, on each rank alike; but sends and receives keep theirs, and so do the calls of a group of
    which ranks run other stages of a pipeline.
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
    turns = dict[int, Turn]()
    for call in order:
        turns[call] = Turn(at[call], launcher[call], last.get(stream[call], UNKNOWN), stream[call])
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
