"""Replay ranks together: one loop handles the events of all in the order of time.

A rank waits for others in its receives and in the collectives that it shares with them. Such a call
starts as in a replay of its rank alone, and holds its stream and its multiprocessors, but makes no
progress until the operations that it waits for have started on the other ranks.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.ir import Graph, Kind
from onerank.ir.arrays import I64
from onerank.ir.errors import ExportError
from onerank.ir.rank_schedule import RankSchedule, SharedCalls
from onerank.ir.replay import ReplayedRank, ReplayTimes
from onerank.plan.cluster import ClusterNetwork


@dataclass(frozen=True, slots=True)
class JointRanks:
    """Ranks that are replayed together.

    Attributes:
        graphs: of the ranks, by place.
        places: rank of the job -> place of the graph that represents it; other ranks are not
            waited for.
    """

    graphs: Sequence[Graph]
    places: Mapping[int, int]


_Operation = tuple[int, int]
"""A node of a rank: (place of the rank in `JointRanks`, node)."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Operations of which some wait for others: a message, or a collective.

    Attributes:
        awaited: operations that must start; the send of a message, or a call on all its ranks.
        waiting: operations that make no progress before; the receive, or again all calls. An
            operation waits in one rendezvous at most.
        transfer_ns: time from the last start of the awaited operations until the others progress.
    """

    awaited: tuple[_Operation, ...]
    waiting: tuple[_Operation, ...]
    transfer_ns: int = 0


@dataclass(frozen=True, slots=True)
class JointTimes:
    """A rank's step, replayed with the other ranks.

    Attributes:
        times: of its nodes.
        arrival_ns: time when the last other rank reached each node's call, or when its message
            arrived, int64[n]; 0 for a node that waits for no other rank.
    """

    times: ReplayTimes
    arrival_ns: I64


def find_rendezvous(job: JointRanks, network: ClusterNetwork) -> list[Rendezvous]:
    """Return the messages between the ranks, and the collectives that several of them share.

    Args:
        job: the ranks.
        network: times the messages.

    Raises:
        ExportError: the ranks make other calls than their peers.
    """
    return [*_messages(job, network), *_shared_collectives(job)]


def _messages(job: JointRanks, network: ClusterNetwork) -> list[Rendezvous]:
    """Return the messages: each receive waits for the send of its turn.

    A send completes in the background.
    """
    graphs, places = job.graphs, job.places
    # Sender, receiver and tag -> node and bytes of each call, in the order of the rank.
    sends: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    receives: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for place, graph in enumerate(graphs):
        for index in _ordered(graph, Kind.SEND, Kind.RECV):
            node = graph.node(index)
            is_send = node.kind is Kind.SEND
            peer = places.get(node.value("comm_dst" if is_send else "comm_src"), place)
            call, tag = (index, max(0, node.value("comm_bytes"))), node.value("comm_tag")
            if peer != place:
                (sends[place, peer, tag] if is_send else receives[peer, place, tag]).append(call)
    messages: list[Rendezvous] = []
    for sender, receiver, tag in sorted({*sends, *receives}):
        sent, received = sends[sender, receiver, tag], receives[sender, receiver, tag]
        ends = graphs[sender].job.rank, graphs[receiver].job.rank
        if [size for _, size in sent] != [size for _, size in received]:
            raise ExportError(
                f"rank {ends[0]} sends {len(sent)} messages of {sum(size for _, size in sent)} "
                f"bytes to rank {ends[1]}, which receives {len(received)} of "
                f"{sum(size for _, size in received)}, or others\n"
                "  give traces of one job and one step",
                code="pipeline-unmatched-message",
            )
        messages += [
            Rendezvous(
                ((sender, send),),
                ((receiver, receive),),
                round(network.time_ns("send", size, ends)),
            )
            for (send, size), (receive, _) in zip(sent, received, strict=True)
        ]
    return messages


def _shared_collectives(job: JointRanks) -> list[Rendezvous]:
    """Return the collectives whose group contains several of the ranks.

    Such a call, as of a gradient norm, begins when the last of its ranks reaches it. So does a
    ring's exchange, although it waits for its neighbours alone.
    """
    calls: dict[tuple[int, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    members: dict[tuple[int, ...], set[int]] = {}
    for place, graph in enumerate(job.graphs):
        for index in _ordered(graph, Kind.COLLECTIVE):
            group = graph.job.group(graph.node(index).text("group"))
            if group is None:
                continue
            ranks = group.ranks
            if ranks not in members:
                members[ranks] = {job.places[rank] for rank in ranks if rank in job.places}
            if len(members[ranks]) > 1:
                calls[ranks][place].append(index)
    collectives: list[Rendezvous] = []
    for ranks, by_place in calls.items():
        places = sorted(members[ranks])
        counts = {job.graphs[place].job.rank: len(by_place[place]) for place in places}
        if len({*counts.values()}) > 1:
            listed = ", ".join(f"{count} of rank {rank}" for rank, count in counts.items())
            raise ExportError(
                f"ranks make different numbers of collective calls in the group of the ranks "
                f"{list(ranks)}: {listed}\n  give traces of one job and one step",
                code="pipeline-unmatched-collective",
            )
        for nodes in zip(*(by_place[place] for place in places), strict=True):
            operations = tuple(zip(places, nodes, strict=True))
            collectives.append(Rendezvous(operations, operations))
    return collectives


def _ordered(graph: Graph, *kinds: Kind) -> list[int]:
    """Return the nodes of some kinds in the order of their rank."""
    order = graph.topological_order()
    return order[np.isin(graph.nodes.kind[order], [int(kind) for kind in kinds])].tolist()


def replay_together(
    job: JointRanks,
    replayed: Sequence[ReplayedRank],
    floors: Sequence[I64],
    rendezvous: Sequence[Rendezvous],
) -> list[JointTimes]:
    """Return the step of each rank.

    Args:
        job: the ranks.
        replayed: ready for scheduling, by place.
        floors: earliest start in ns of each node of each rank, int64[n] by place.
        rendezvous: in which the ranks wait for each other.

    Raises:
        ExportError: ranks wait for each other.
    """
    schedules = [
        rank.begin(floor, _shared_calls(place, len(graph), rendezvous))
        for place, (rank, floor, graph) in enumerate(zip(replayed, floors, job.graphs, strict=True))
    ]
    _JointEvents(schedules, rendezvous).run()
    if any(schedule.unfinished for schedule in schedules):
        raise _deadlock(job, schedules, rendezvous)
    return [
        JointTimes(rank.times_of(schedule), np.array(schedule.arrival_ns, dtype=np.int64))
        for rank, schedule in zip(replayed, schedules, strict=True)
    ]


def _shared_calls(place: int, count: int, rendezvous: Sequence[Rendezvous]) -> SharedCalls:
    """Return which of a rank's `count` nodes wait for other ranks, or are awaited."""
    waits, awaited = [False] * count, [False] * count
    for each in rendezvous:
        for other, node in each.waiting:
            if other == place:
                waits[node] = True
        for other, node in each.awaited:
            if other == place:
                awaited[node] = True
    return SharedCalls(waits, awaited)


class _JointEvents:
    """The events of all ranks, in the order of time.

    Args:
        schedules: of the ranks, by place.
        rendezvous: in which they wait for each other.
    """

    def __init__(self, schedules: Sequence[RankSchedule], rendezvous: Sequence[Rendezvous]) -> None:
        self._schedules, self._rendezvous = schedules, rendezvous
        self._of_awaited = {
            operation: number
            for number, each in enumerate(rendezvous)
            for operation in each.awaited
        }
        # Of each rendezvous: awaited operations that have not started, and the last start.
        self._missing = [len(each.awaited) for each in rendezvous]
        self._last_start_ns = [0] * len(rendezvous)
        # (time of the next event, place). An arrival moves a rank's next event, so that entries can
        # be outdated; the schedule has the valid time.
        self._queue: list[tuple[float, int]] = []

    def run(self) -> None:
        """Handle events until no rank has one: all have ended, or they wait for each other."""
        schedules, queue = self._schedules, self._queue
        for place in range(len(schedules)):
            self._follow_starts(place)
            self._queue_next(place)
        while queue:
            event_ns, place = heapq.heappop(queue)
            schedule = schedules[place]
            if event_ns != schedule.next_event_ns:
                continue
            # Most events concern one rank, which goes on while no other has an earlier event.
            until_ns = queue[0][0] if queue else math.inf
            schedule.handle_event()
            while not schedule.started and schedule.next_event_ns < until_ns:
                schedule.handle_event()
            self._follow_starts(place)
            self._queue_next(place)

    def _queue_next(self, place: int) -> None:
        event_ns = self._schedules[place].next_event_ns
        if math.isfinite(event_ns):
            heapq.heappush(self._queue, (event_ns, place))

    def _follow_starts(self, place: int) -> None:
        """Let operations progress whose last awaited operation has just started on a rank.

        An arrival can start operations of other ranks at once, which are followed, too.
        """
        places = [place]
        while places:
            place = places.pop()
            schedule = self._schedules[place]
            started = schedule.started.copy()
            schedule.started.clear()
            for node in started:
                number = self._of_awaited[place, node]
                last_ns = max(self._last_start_ns[number], schedule.start_ns[node])
                self._last_start_ns[number] = last_ns
                self._missing[number] -= 1
                if self._missing[number]:
                    continue
                each = self._rendezvous[number]
                for other, waiting in each.waiting:
                    self._schedules[other].arrive(waiting, last_ns + each.transfer_ns)
                    self._queue_next(other)
                    places.append(other)


def _deadlock(
    job: JointRanks, schedules: Sequence[RankSchedule], rendezvous: Sequence[Rendezvous]
) -> ExportError:
    """Return the error of ranks that wait for each other, with the call of each."""
    of_waiting = {operation: each for each in rendezvous for operation in each.waiting}
    lines: list[str] = []
    for place, schedule in enumerate(schedules):
        for node in schedule.waiting_nodes()[:1]:
            places = sorted({other for other, _ in of_waiting[place, node].awaited} - {place})
            ranks = ", ".join(str(job.graphs[other].job.rank) for other in places)
            graph = job.graphs[place]
            lines.append(
                f"  rank {graph.job.rank} waits in {graph.node(node).text('name')} (node {node}) "
                f"for rank {ranks}\n"
            )
    return ExportError(
        "the ranks wait for each other: each has started a call that another one never reaches\n"
        f"{''.join(lines)}  give traces of one job and one step",
        code="pipeline-deadlock",
    )
