"""Run the communication of all ranks together, without time, until it ends or stalls."""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from onerank.converters.targets.astra_sim.check.comm_programs import (
    Call,
    Channel,
    NodeType,
    Program,
    channel_of,
)


@dataclass(slots=True)
class RankState:
    """How far one rank has come."""

    waits: list[int]
    left: int
    computing: list[int] = field(default_factory=list[int])
    communicating: list[int] = field(default_factory=list[int])
    in_flight: int | None = None
    receiving: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Rendezvous:
    """One collective of a group: the node each member has issued for it."""

    group: str
    place: int
    arrived: dict[int, int] = field(default_factory=dict[int, int])


class Run:
    """Runs all ranks without time: ASTRA-sim's rules of issue, with computation instantaneous.

    Ready nodes are issued lowest id first, one collective or send at a time per rank. A send
    completes when issued, a receive when its send was issued, a collective when all members
    have issued theirs.
    """

    def __init__(self, programs: Sequence[Program], members: dict[str, tuple[int, ...]]) -> None:
        self.programs = programs
        self._calls = [program.calls() for program in programs]
        self.members = members
        self.states = [
            RankState(p.course.dag.waits.copy(), len(p.course.dag.ids)) for p in programs
        ]
        self.meetings: dict[tuple[str, int], Rendezvous] = {}
        self.places: Counter[tuple[int, str]] = Counter()
        self.sent: Counter[Channel] = Counter()
        self.expected: dict[Channel, deque[tuple[int, int]]] = defaultdict(deque)
        self.awake: deque[int] = deque(range(len(programs)))

    def finish(self) -> None:
        """Run until no rank can go on."""
        for rank, state in enumerate(self.states):
            for node, waits in enumerate(state.waits):
                if waits == 0:
                    self._make_ready(rank, node)
        while self.awake:
            self._advance(self.awake.popleft())

    def calls(self, rank: int) -> list[Call | None]:
        """Return the communication of each node of a rank."""
        return self._calls[rank]

    def call(self, rank: int, node: int) -> Call:
        """Return the communication of a node."""
        call = self._calls[rank][node]
        assert call is not None, f"node {node} of rank {rank} is not communication"
        return call

    def _advance(self, rank: int) -> None:
        state = self.states[rank]
        while True:
            if state.communicating and state.in_flight is None:
                self._issue(rank, heapq.heappop(state.communicating))
            elif state.computing:
                self._complete(rank, heapq.heappop(state.computing))
            else:
                return

    def _make_ready(self, rank: int, node: int) -> None:
        state = self.states[rank]
        call = self._calls[rank][node]
        if call is None:
            heapq.heappush(state.computing, node)
        elif call.type == NodeType.RECV:
            channel = channel_of(call)
            if self.sent[channel]:
                self.sent[channel] -= 1
                # It completes like a computation: at once, but after what is issued now.
                heapq.heappush(state.computing, node)
            else:
                state.receiving.add(node)
                self.expected[channel].append((rank, node))
        else:
            heapq.heappush(state.communicating, node)

    def _complete(self, rank: int, node: int) -> None:
        state = self.states[rank]
        state.left -= 1
        dag = self.programs[rank].course.dag
        for follower in dag.followers[dag.starts[node] : dag.starts[node + 1]]:
            state.waits[follower] -= 1
            if state.waits[follower] == 0:
                self._make_ready(rank, follower)

    def _issue(self, rank: int, node: int) -> None:
        call = self.call(rank, node)
        if call.type == NodeType.SEND:
            self._send(channel_of(call))
            self._complete(rank, node)
            return
        place = self.places[rank, call.group]
        self.places[rank, call.group] += 1
        key = (call.group, place)
        meeting = self.meetings.setdefault(key, Rendezvous(*key))
        meeting.arrived[rank] = node
        self.states[rank].in_flight = node
        if len(meeting.arrived) == len(self.members[call.group]) and self.agrees(meeting):
            del self.meetings[key]
            for member, its_node in meeting.arrived.items():
                self.states[member].in_flight = None
                self._complete(member, its_node)
                self.awake.append(member)

    def _send(self, channel: Channel) -> None:
        waiting = self.expected.get(channel)
        if not waiting:
            self.sent[channel] += 1
            return
        rank, node = waiting.popleft()
        self.states[rank].receiving.remove(node)
        self._complete(rank, node)
        self.awake.append(rank)

    def agrees(self, meeting: Rendezvous) -> bool:
        """Whether all who arrived have issued the same type and size."""
        return len({self.shape(rank, node) for rank, node in meeting.arrived.items()}) == 1

    def shape(self, rank: int, node: int) -> tuple[int, int]:
        """Return type and size of a collective."""
        call = self.call(rank, node)
        return call.collective, call.size
