"""Find ranks that would wait for each other forever, by running the workload without times."""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onerank.converters.targets.astra_sim.check.comm_programs import (
    Channel,
    CommNode,
    NodeType,
    Program,
    channel_of,
    group_text,
    name_of,
)
from onerank.converters.targets.astra_sim.check.findings import Report


@dataclass(slots=True)
class RankState:
    """Progress of one rank.

    Attributes:
        waits: per node, how many of its dependencies are unfinished.
        left: unfinished nodes.
        computing: heap of ready nodes that complete at once.
        communicating: heap of ready collectives and sends.
        in_flight: the collective that the rank waits in.
        receiving: ready receives whose message was not sent.
    """

    waits: list[int]
    left: int
    computing: list[int] = field(default_factory=list[int])
    communicating: list[int] = field(default_factory=list[int])
    in_flight: int | None = None
    receiving: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class Rendezvous:
    """One collective of a group.

    Attributes:
        group: its group.
        place: number of earlier collectives of the group.
        arrived: rank -> node that it issued.
    """

    group: str
    place: int
    arrived: dict[int, int] = field(default_factory=dict[int, int])


class CommRun:
    """A run of all ranks by ASTRA-sim's rules of issue; compute and messages take no time.

    Ready nodes are issued lowest id first, one collective or send at a time per rank. A send
    completes when issued, a receive when its send was issued, a collective when all members
    have issued theirs.
    """

    def __init__(self, programs: Sequence[Program], members: dict[str, tuple[int, ...]]) -> None:
        self.programs = programs
        self._calls = [program.calls() for program in programs]
        self.members = members
        self.states = [RankState(p.comm.dag.waits.copy(), len(p.comm.dag.ids)) for p in programs]
        self.open_collectives: dict[tuple[str, int], Rendezvous] = {}
        self.places: Counter[tuple[int, str]] = Counter()
        self.sent: Counter[Channel] = Counter()
        self.expected: dict[Channel, deque[tuple[int, int]]] = defaultdict(deque)
        self._runnable: deque[int] = deque(range(len(programs)))

    def finish(self) -> None:
        """Run until no rank can proceed."""
        for rank, state in enumerate(self.states):
            for node, waits in enumerate(state.waits):
                if waits == 0:
                    self._make_ready(rank, node)
        while self._runnable:
            self._advance(self._runnable.popleft())

    def calls(self, rank: int) -> list[CommNode | None]:
        """Return the communication of each node of a rank."""
        return self._calls[rank]

    def call(self, rank: int, node: int) -> CommNode:
        """Return the communication of a node."""
        call = self._calls[rank][node]
        assert call is not None, f"node {node} of rank {rank} is not communication"
        return call

    def _advance(self, rank: int) -> None:
        state = self.states[rank]
        while True:
            # Communication first: ASTRA-sim issues whatever is free before any compute node ends.
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
                # A message that has arrived completes its receive at once, but only after the
                # rank has issued its next communication, as in ASTRA-sim's event loop.
                heapq.heappush(state.computing, node)
            else:
                state.receiving.add(node)
                self.expected[channel].append((rank, node))
        else:
            heapq.heappush(state.communicating, node)

    def _complete(self, rank: int, node: int) -> None:
        state = self.states[rank]
        state.left -= 1
        dag = self.programs[rank].comm.dag
        for follower in dag.followers[dag.starts[node] : dag.starts[node + 1]]:
            state.waits[follower] -= 1
            if state.waits[follower] == 0:
                self._make_ready(rank, follower)

    def _issue(self, rank: int, node: int) -> None:
        call = self.call(rank, node)
        if call.type == NodeType.SEND:
            # A send is eager: it frees the rank for its next communication without a receive.
            self._send(channel_of(call))
            self._complete(rank, node)
            return
        place = self.places[rank, call.group]
        self.places[rank, call.group] += 1
        key = (call.group, place)
        collective = self.open_collectives.setdefault(key, Rendezvous(*key))
        collective.arrived[rank] = node
        self.states[rank].in_flight = node
        # Members that disagree never finish in ASTRA-sim, so the collective stays open and is
        # reported.
        if len(collective.arrived) == len(self.members[call.group]) and self.agrees(collective):
            del self.open_collectives[key]
            for member, its_node in collective.arrived.items():
                self.states[member].in_flight = None
                self._complete(member, its_node)
                self._runnable.append(member)

    def _send(self, channel: Channel) -> None:
        waiting = self.expected.get(channel)
        if not waiting:
            self.sent[channel] += 1
            return
        rank, node = waiting.popleft()
        self.states[rank].receiving.remove(node)
        self._complete(rank, node)
        self._runnable.append(rank)

    def agrees(self, collective: Rendezvous) -> bool:
        """Return whether the ranks that arrived have issued the same type and size."""
        return len({self.shape(rank, node) for rank, node in collective.arrived.items()}) == 1

    def shape(self, rank: int, node: int) -> tuple[int, int]:
        """Return type and size of a collective."""
        call = self.call(rank, node)
        return call.collective, call.size


def report_stalls(run: CommRun, report: Report) -> None:
    """Report why the ranks that did not finish a run wait."""
    stalled = [rank for rank, state in enumerate(run.states) if state.left]
    if not stalled:
        return
    end = f"; {_ranks(stalled)} of {len(run.states)} never finish"
    blocked: dict[int, list[tuple[int, int]]] = {rank: [] for rank in stalled}
    at_fault: set[int] = set()
    for collective in run.open_collectives.values():
        absent = [rank for rank in run.members[collective.group] if rank not in collective.arrived]
        gone = [rank for rank in absent if rank not in blocked]
        if not run.agrees(collective):
            _report_mismatch(run, collective, end, report)
            at_fault.update(collective.arrived)
        elif gone:
            _report_missing(run, collective, gone, end, report)
            at_fault.update(collective.arrived)
        else:
            for rank, node in collective.arrived.items():
                blocked[rank].extend((other, node) for other in absent)
    unsent = _unsent(run)
    for rank in stalled:
        for node in sorted(run.states[rank].receiving):
            channel = channel_of(run.call(rank, node))
            if channel in unsent:
                blocked[rank].append((channel[0], node))
            else:
                at_fault.add(rank)
    # Ranks that wait for a rank with a fault are not at fault themselves.
    blocked.update({rank: [] for rank in at_fault})
    for ring in _rings(blocked):
        rank, node = ring[0][0], ring[0][2]
        waits = ", ".join(
            f"rank {waiter} waits in {run.call(waiter, its)} for rank {other}"
            for waiter, other, its in ring
        )
        report.add(
            "deadlock",
            run.programs[rank].file,
            run.programs[rank].comm.dag.ids[node],
            f"{waits}{end}; number the nodes so that all members issue in one order",
        )


def _report_mismatch(run: CommRun, collective: Rendezvous, end: str, report: Report) -> None:
    shapes = {rank: run.shape(rank, node) for rank, node in sorted(collective.arrived.items())}
    usual = Counter(shapes.values()).most_common(1)[0][0]
    model = next(rank for rank, shape in shapes.items() if shape == usual)
    odd = next(rank for rank, shape in shapes.items() if shape != usual)
    call = run.call(odd, collective.arrived[odd])
    report.add(
        "collective-mismatch",
        run.programs[odd].file,
        call.node,
        f"collective {collective.place + 1} of {group_text(collective.group)}: rank {odd} waits in "
        f"{call}, rank {model} in {run.call(model, collective.arrived[model])}{end}; "
        "type and bytes must be equal",
    )


def _report_missing(
    run: CommRun, collective: Rendezvous, gone: list[int], end: str, report: Report
) -> None:
    rank, node = min(collective.arrived.items())
    call = run.call(rank, node)
    report.add(
        "collective-missing",
        run.programs[rank].file,
        call.node,
        f"collective {collective.place + 1} of {group_text(collective.group)}: {_ranks(gone)} "
        f"finished without issuing it, rank {rank} waits in {call}{end}; "
        f"add the {name_of(call.collective)} there or remove it here",
    )


def _unsent(run: CommRun) -> set[Channel]:
    """Return the channels on which a stalled rank would still send."""
    unsent: set[Channel] = set()
    for rank, state in enumerate(run.states):
        ready = set(state.communicating)
        for node, call in enumerate(run.calls(rank)):
            unfinished = state.waits[node] or node in ready
            if unfinished and call is not None and call.type == NodeType.SEND:
                unsent.add(channel_of(call))
    return unsent


def _rings(blocked: dict[int, list[tuple[int, int]]]) -> list[list[tuple[int, int, int]]]:
    """Return rings of waiting ranks as (rank, rank waited for, node); no rank is in two rings."""
    rings: list[list[tuple[int, int, int]]] = []
    finished: set[int] = set()
    for first in blocked:
        # A depth-first search without recursion, since a ring can be as long as the world. `path`
        # maps the ranks from `first` on, in order, to the step that each took.
        path: dict[int, tuple[int, int]] = {}
        rest: dict[int, Iterator[tuple[int, int]]] = {}
        rank: int | None = None if first in finished else first
        while rank is not None:
            if rank not in rest:
                rest[rank] = iter(blocked[rank])
            path.pop(rank, None)
            step = next(rest[rank], None)
            if step is None:
                finished.add(rank)
                rank = next(reversed(path), None)
            elif step[0] in path or step[0] == rank:
                path[rank] = step
                ring = list(path)[list(path).index(step[0]) :]
                rings.append([(member, *path[member]) for member in ring])
                finished.update(path)
                rank = None
            else:
                path[rank] = step
                rank = rank if step[0] in finished else step[0]
    return rings


def _ranks(ranks: list[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(named)}"
