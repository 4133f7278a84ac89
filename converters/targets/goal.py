"""Export graphs as the text of a GOAL schedule: a block of operations for each rank.

GOAL is the Group Operation Assembly Language that LogGOPSim runs. `calc` occupies a cpu for
nanoseconds, `send` and `recv` move bytes; `requires` waits for the end of another operation,
`irequires` for its start (Hoefler, Siebert, Lumsdaine 2009; the dialect that `txt2bin` of LogGOPSim
and ATLAHS reads). Each stream is a cpu, and communication has separate cpus.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from onerank.converters.expand.host_delays import (
    DELAY_NAME,
    insert_host_delays,
    require_gpu_work,
    storage_delays,
)
from onerank.converters.expand.ranks import RankGraph, check_all_equal
from onerank.converters.nccl import H100, Interconnect
from onerank.converters.targets.communication_placement import (
    Placement,
    place_communications,
    shift_rank,
    unequal_axis,
    world_of,
)
from onerank.converters.targets.goal_collectives import (
    SUPPORTED,
    CollectiveCall,
    Message,
    count_steps,
    messages,
)
from onerank.converters.targets.lower_step import (
    LoweredStep,
    check_peers,
    count_dropped,
    equalize_all_to_alls,
    even_all_to_alls,
    idle_time_note,
    lower_workload,
    tag_of,
    timed_compute,
)
from onerank.display import Displayed
from onerank.ir import Graph, Kind, World
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replacing

MOST_CPUS = 256
"""txt2bin stores the number of a cpu in one byte."""

SENDS, RECEIVES, HOST, STORAGE = "sends", "receives", "host", "storage"


@dataclass(frozen=True, slots=True)
class Machine:
    """The nodes of the simulated cluster, by which NCCL chooses algorithms.

    Attributes:
        gpus_per_node: number of consecutive ranks that share a node.
        interconnect: links between the GPUs.
    """

    gpus_per_node: int
    interconnect: Interconnect


@dataclass(frozen=True, slots=True)
class LoweredRank:
    """A lowered step and the ranks that run it.

    Attributes:
        graph: the graph that the step was lowered from.
        ranks: the ranks that run it.
        world: all ranks of the export.
        placements: placement of each communication, by graph index.
        step: the nodes, the same on all of `ranks`.
        cpus: cpu of each node of the step, by graph index.
        dropped: nodes that are not in the step, by reason.
    """

    graph: Graph
    ranks: Sequence[int]
    world: World
    placements: dict[int, Placement]
    step: LoweredStep
    cpus: dict[int, int]
    dropped: Counter[str]


def lower_rank(
    graph: Graph, world: World, ranks: Sequence[int], *, unequal_along: str = ""
) -> LoweredRank:
    """Lower a graph for the ranks that run it.

    Args:
        graph: one rank's step.
        world: all ranks of the export.
        ranks: the ranks that run the graph.
        unequal_along: as for `place_communications`.

    Raises:
        ExportError: the graph has no GPU work, its communication cannot be placed, or its streams
            and groups are more than GOAL's cpus.
        GraphError: the graph has a cycle.
    """
    require_gpu_work(graph)
    placements, dropped = place_communications(graph, world, SUPPORTED, unequal_along=unequal_along)
    lanes = _lanes(graph, placements)
    step = lower_workload(graph, lanes)
    cpu_of_lane: dict[Hashable, int] = {}
    cpus: dict[int, int] = {}
    for index in step.index:
        # The lane of a receive is a peer, tag and size. A cpu for each could exceed the limit.
        lane = RECEIVES if graph.node(index).kind is Kind.RECV else lanes[index]
        cpus[index] = cpu_of_lane.setdefault(lane, len(cpu_of_lane))
    if len(cpu_of_lane) > MOST_CPUS:
        raise ExportError(
            f"the graph has {len(cpu_of_lane)} streams and groups; GOAL has {MOST_CPUS} cpus",
            code="goal-too-many-cpus",
        )
    all_dropped = Counter(count_dropped(graph) | dropped)
    return LoweredRank(graph, ranks, world, placements, step, cpus, all_dropped)


def _lanes(graph: Graph, communications: Iterable[int]) -> list[Hashable | None]:
    """Return the lane of each node; None for nodes that do not reach the simulator."""
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        node = graph.node(index)
        lanes[index] = HOST if node.name == DELAY_NAME else ("compute", node.value("stream"))
    for index in storage_delays(graph).nonzero()[0].tolist():
        lanes[index] = STORAGE
    for index in communications:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            # Receives of one route stay in order; receives of others may complete before them.
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        elif node.kind is Kind.SEND:
            lanes[index] = SENDS
        else:
            lanes[index] = ("collectives", node.text("group"))
    return lanes


# Tags have 32 bits, and the highest is the wildcard.
_MOST_TAGS = 2**32 - 1

Route = tuple[int, int, int, int]
"""Source, destination, tag as captured, bytes."""


class TagAllocator:
    """Allocates tags that are unique in the job, and checks that communication matches.

    All members of a collective, and both ends of a message, get the same tag.
    """

    def __init__(self) -> None:
        self._next = 0
        self._calls: dict[tuple[tuple[int, ...], int], tuple[CollectiveCall, int]] = {}
        self._callers: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._messages: dict[tuple[Route, int], int] = {}
        self._sent: Counter[Route] = Counter()
        self._received: Counter[Route] = Counter()

    def call_tag(self, members: tuple[int, ...], instance: int, call: CollectiveCall) -> int:
        """Return the tag of the first step of a collective; step s has the tag plus s.

        Args:
            members: ranks of the group.
            instance: number of the call among those of the group.
            call: the call of one member.

        Raises:
            ExportError: another member calls another collective, or the tags are used up.
        """
        key = members, instance
        if key not in self._calls:
            # One tag per step, since two messages of a call can have the same ends.
            self._calls[key] = call, self._allocate(count_steps(call))
        known, tag = self._calls[key]
        if (known.collective, known.size_bytes) != (call.collective, call.size_bytes):
            raise ExportError(
                f"call {instance} of the ranks {list(members)} is {_call_text(known)} on one of "
                f"them and {_call_text(call)} on another\n  give the traces of one job",
                code="goal-calls-differ",
            )
        self._callers[key] += 1
        return tag

    def message_tag(self, route: Route, *, sends: bool) -> int:
        """Return the tag of a rank's next message on a route.

        Raises:
            ExportError: the tags are used up.
        """
        # The k-th send on a route meets the k-th receive, as in NCCL, which has no tags.
        counts = self._sent if sends else self._received
        key = route, counts[route]
        counts[route] += 1
        if key not in self._messages:
            self._messages[key] = self._allocate(1)
        return self._messages[key]

    def check(self) -> None:
        """Check that every send has a receive, and that every member makes each call.

        Raises:
            ExportError: a rank would wait for ever.
        """
        for route in self._sent | self._received:
            if self._sent[route] != self._received[route]:
                source, destination, _, size = route
                raise ExportError(
                    f"rank {source} sends {self._sent[route]} messages of {size} bytes to rank "
                    f"{destination}, which receives {self._received[route]}\n"
                    "  give the traces of one job, and of all its stages",
                    code="goal-unmatched-p2p",
                )
        for (members, instance), callers in self._callers.items():
            if callers != len(members):
                known, _ = self._calls[members, instance]
                raise ExportError(
                    f"{callers} of {len(members)} members make call {instance} of the ranks "
                    f"{list(members)}, {_call_text(known)}\n  give the traces of one job",
                    code="goal-calls-missing",
                )

    def _allocate(self, count: int) -> int:
        first = self._next
        self._next += count
        if self._next > _MOST_TAGS:
            raise ExportError(
                f"the job's communication takes over {_MOST_TAGS} tags, the most that GOAL's "
                "binary form can store\n  export fewer ranks or micro-batches",
                code="goal-too-many-tags",
            )
        return first


def _call_text(call: CollectiveCall) -> str:
    return f"{call.collective.name} of {call.size_bytes} bytes"


@dataclass(slots=True)
class RankBlock:
    """Writer of the operations of one rank.

    Attributes:
        lowered: the step that the rank runs.
        rank: the rank.
        tags: tags of the whole job.
        machine: the nodes of the cluster.
        lines: lines of the block.
        ends: label of the last operation of each node of the step.
        operations: number of operations.
        calls: number of calls of each group.
    """

    lowered: LoweredRank
    rank: int
    tags: TagAllocator
    machine: Machine
    lines: list[str] = field(default_factory=list[str])
    ends: list[int] = field(default_factory=list[int])
    operations: int = 0
    calls: Counter[tuple[int, ...]] = field(default_factory=Counter[tuple[int, ...]])

    def write(self) -> None:
        """Write all nodes of the step in issue order.

        Raises:
            ExportError: members of a group make different calls, or the tags are used up.
        """
        lowered = self.lowered
        for number, index in enumerate(lowered.step.index):
            predecessors = [self.ends[other] for other in lowered.step.waits_for[number]]
            node = lowered.graph.node(index)
            if index not in lowered.placements:
                calc = f"calc {node.duration_ns} cpu {lowered.cpus[index]}"
                self.ends.append(self._operation(calc, predecessors))
            elif node.kind is Kind.COLLECTIVE:
                self.ends.append(self._collective(index, predecessors))
            else:
                self.ends.append(self._message(index, predecessors))

    def _operation(self, text: str, predecessors: Sequence[int]) -> int:
        """Write an operation; return its label."""
        label = self.operations
        self.operations += 1
        self.lines.append(f"l{label}: {text}")
        self.lines += [f"l{label} requires l{other}" for other in predecessors]
        return label

    def _message(self, index: int, predecessors: Sequence[int]) -> int:
        """Write a send or receive; return its label."""
        lowered = self.lowered
        node = lowered.graph.node(index)
        peer = shift_rank(lowered.world, self.rank, lowered.placements[index].shift)
        size, sends = node.value("comm_bytes"), node.kind is Kind.SEND
        ends = (self.rank, peer) if sends else (peer, self.rank)
        tag = self.tags.message_tag((*ends, tag_of(node), size), sends=sends)
        text = _message_text(peer, size, tag, lowered.cpus[index], sends=sends)
        return self._operation(text, predecessors)

    def _collective(self, index: int, predecessors: Sequence[int]) -> int:
        """Write a collective as messages between two empty operations; return the last's label."""
        lowered = self.lowered
        node = lowered.graph.node(index)
        placement = lowered.placements[index]
        members = placement.group_ranks(lowered.world, self.rank)
        # The recorded root is a rank of the captured group; its position is that of all groups.
        captured = placement.group_ranks(lowered.world, lowered.graph.job.rank)
        call = CollectiveCall(
            node.collective,
            node.value("comm_bytes"),
            positions_by_node(members, self.machine.gpus_per_node),
            captured.index(node.root) if node.root in captured else 0,
            self.machine.interconnect,
        )
        # The empty operations at both ends give the collective one label to wait for it, and one
        # at which its first messages wait.
        instance = self.calls[members]
        self.calls[members] += 1
        tag = self.tags.call_tag(members, instance, call)
        cpu = lowered.cpus[index]
        begin = self._operation(f"calc 0 cpu {cpu}", predecessors)
        member_messages = messages(call, members.index(self.rank))
        first = self.operations
        for message in member_messages:
            text = _message_text(
                members[message.peer],
                message.size_bytes,
                tag + message.step,
                cpu,
                sends=message.sends,
            )
            label = self._operation(text, [first + other for other in message.after] or [begin])
            if message.started is not None:
                self.lines.append(f"l{label} irequires l{first + message.started}")
        last = [first + position for position in _last(member_messages)]
        return self._operation(f"calc 0 cpu {cpu}", last)


def _message_text(peer: int, size: int, tag: int, cpu: int, *, sends: bool) -> str:
    operation, direction = ("send", "to") if sends else ("recv", "from")
    return f"{operation} {size}b {direction} {peer} tag {tag} cpu {cpu} nic 0"


@lru_cache(maxsize=4096)
def positions_by_node(members: tuple[int, ...], gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return for each node the positions of its GPUs in the group."""
    positions: dict[int, list[int]] = {}
    for position, rank in enumerate(members):
        positions.setdefault(rank // gpus_per_node, []).append(position)
    return tuple(tuple(of_node) for of_node in positions.values())


def _last(member_messages: Sequence[Message]) -> Iterator[int]:
    """Yield the positions of messages that no other message of the member waits for."""
    awaited = {position for message in member_messages for position in message.after}
    yield from (position for position in range(len(member_messages)) if position not in awaited)


GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, repr=False)
class GoalExport(Displayed):
    """Contents and limitations of an exported schedule.

    Attributes:
        path: the file.
        ranks: number of ranks.
        operations: number of `calc`, `send` and `recv` operations of all ranks.
        gpu_time_ns: summed GPU compute of the rank with most; includes host delays if the export
            has them.
        cpus: number of cpus of the rank with most: streams and communication lanes.
        algorithms: number of calls by collective and algorithm, the maximum over the ranks.
        dropped: nodes of the graph that are not in the schedule, by reason.
        notes: caveats for the reader of the simulator's figures.
    """

    path: Path
    ranks: int
    operations: int
    gpu_time_ns: int
    cpus: int
    algorithms: dict[str, int]
    dropped: dict[str, int]
    notes: list[Note]


def export_goal(
    graph: Graph,
    path: str | Path,
    *,
    ranks: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    interconnect: Interconnect = H100,
    host_time: bool = False,
    notes: Sequence[Note] = (),
) -> GoalExport:
    """Write the step of one rank as the step of every rank of its job.

    Args:
        graph: one rank's step, with GPU compute and communication.
        path: output file; it appears complete, or not at all.
        ranks: number of ranks; needed only for a graph whose job has no world.
        gpus_per_node: number of consecutive ranks that share a node.
        interconnect: links between the GPUs, by which NCCL chooses algorithms.
        host_time: insert host delays, see `insert_host_delays`; the host is a cpu.
        notes: caveats on how the graph was made.

    Raises:
        ExportError: the graph cannot represent all ranks.
        GraphError: the graph has a cycle.
        OSError: the file cannot be written.
    """
    check_all_equal(graph.job)
    world = world_of(graph.job, ranks)
    idle = [idle_time_note([graph])]
    if host_time:
        graph, idle = insert_host_delays(graph, ranks=world.size)
    graph, even_notes = even_all_to_alls(graph, world)
    lowered = lower_rank(graph, world, range(world.size))
    check_peers(graph, lowered.step, lowered.placements, world)
    notes = [*notes, *even_notes, *idle]
    return _write([lowered], Path(path), Machine(gpus_per_node, interconnect), notes)


def export_goal_ranks(
    rank_graphs: Sequence[RankGraph],
    path: str | Path,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    interconnect: Interconnect = H100,
    notes: Sequence[Note] = (),
) -> GoalExport:
    """Write the steps of unequal ranks, each for the ranks that it represents.

    Args:
        rank_graphs: graphs that together represent every rank of one world.
        path: as for `export_goal`.
        gpus_per_node: as for `export_goal`.
        interconnect: as for `export_goal`.
        notes: as for `export_goal`.

    Raises:
        ExportError: a step cannot run on its ranks, or the ranks' communication does not match.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    for entry in rank_graphs:
        world_of(entry.graph.job, None)
    world = rank_graphs[0].graph.job.world
    axis = unequal_axis(rank_graphs)
    equalized, even_notes = equalize_all_to_alls(rank_graphs, world, unequal_along=axis)
    lowered = [
        lower_rank(entry.graph, world, entry.ranks, unequal_along=axis) for entry in equalized
    ]
    has_delays = any(DELAY_NAME in entry.graph.strings.values for entry in equalized)
    idle = [] if has_delays else [idle_time_note([entry.graph for entry in equalized])]
    notes = [*notes, *even_notes, *idle]
    return _write(lowered, Path(path), Machine(gpus_per_node, interconnect), notes)


def _write(
    lowered_ranks: Sequence[LoweredRank], path: Path, machine: Machine, notes: Sequence[Note]
) -> GoalExport:
    if machine.gpus_per_node < 1:
        raise ExportError(
            f"{machine.gpus_per_node} GPUs per node: expected 1 or more", code="goal-gpus-per-node"
        )
    by_rank = {rank: lowered for lowered in lowered_ranks for rank in lowered.ranks}
    tags = TagAllocator()
    operations = 0
    with replacing(path) as file:
        file.write(f"num_ranks {len(by_rank)}\n".encode())
        # Block by block, so that only the text of a single rank is in memory.
        for rank in sorted(by_rank):
            block = RankBlock(by_rank[rank], rank, tags, machine)
            block.write()
            operations += block.operations
            _write_block(file, rank, block.lines)
        # Before the file appears: a call that some rank does not make hangs the simulator.
        tags.check()
    dropped = sum((lowered.dropped for lowered in lowered_ranks), Counter[str]())
    return GoalExport(
        path=path,
        ranks=len(by_rank),
        operations=operations,
        gpu_time_ns=max(
            int(lowered.graph.nodes.duration_ns[lowered.graph.gpu_compute].sum())
            for lowered in lowered_ranks
        ),
        cpus=max(len(set(lowered.cpus.values())) for lowered in lowered_ranks),
        algorithms=_algorithms(lowered_ranks, machine),
        dropped={reason: count for reason, count in dropped.items() if count},
        notes=[
            *notes,
            Note(
                "Messages are payload only: reductions and launches take no time, except for the "
                "simulator's o and g.",
                code="goal-payload-only",
            ),
            Note(
                f"Every {machine.gpus_per_node} consecutive ranks share a node, which determines "
                "NCCL's algorithms. Every rank has one interface, nic 0, for all its messages.",
                code="goal-node-placement",
            ),
        ],
    )


def _write_block(file: BinaryIO, rank: int, lines: Sequence[str]) -> None:
    file.write(("\n".join([f"rank {rank} {{", *lines, "}"]) + "\n").encode())


def _algorithms(lowered_ranks: Sequence[LoweredRank], machine: Machine) -> dict[str, int]:
    """Return the number of calls by collective and algorithm, the maximum over the ranks."""
    maximum: Counter[str] = Counter()
    for lowered in lowered_ranks:
        counts: Counter[str] = Counter()
        for index, placement in lowered.placements.items():
            node = lowered.graph.node(index)
            if node.kind is not Kind.COLLECTIVE:
                counts["point to point"] += 1
                continue
            members = placement.group_ranks(lowered.world, lowered.ranks[0])
            call = CollectiveCall(
                node.collective,
                node.value("comm_bytes"),
                positions_by_node(members, machine.gpus_per_node),
                interconnect=machine.interconnect,
            )
            counts[f"{node.collective.name.lower()} by {call.choice.algorithm}"] += 1
        # Counters join by the larger count.
        maximum |= counts
    return dict(maximum)
