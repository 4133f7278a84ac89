"""Emit the operations of one rank as lines of GOAL, with unique tags."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from onerank.converters.expand.host_delays import NAME
from onerank.converters.expand.preconditions import require_gpu_work, storage_delays
from onerank.converters.nccl import Interconnect
from onerank.converters.targets.expand_symmetry import Layout, Place, place
from onerank.converters.targets.goal.collective_algorithms import (
    SUPPORTED,
    Call,
    Message,
    messages,
    steps,
)
from onerank.converters.targets.lower import Step, count_left_out, lower, tag_of, timed_compute
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError

CPUS = 256
"""txt2bin holds the number of a cpu in a byte."""

SENDS, RECEIVES, HOST, STORAGE = "sends", "receives", "host", "storage"


@dataclass(frozen=True, slots=True)
class Part:
    """A step, the ranks that run it, where its communication goes, and each node's cpu."""

    graph: Graph
    ranks: Sequence[int]
    layout: Layout
    places: dict[int, Place]
    step: Step
    cpu: dict[int, int]
    left_out: Counter[str]


def part_of(graph: Graph, layout: Layout, ranks: Sequence[int], *, along: str = "") -> Part:
    """Lower a graph for the ranks that run it; `along` is as for `place`.

    Raises:
        ExportError: it cannot be run, or has more streams and groups than GOAL has cpus.
    """
    require_gpu_work(graph)
    places, dropped = place(graph, layout, SUPPORTED, along=along)
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        node = graph.node(index)
        lanes[index] = HOST if node.name == NAME else ("compute", node.value("stream"))
    for index in storage_delays(graph).nonzero()[0].tolist():
        lanes[index] = STORAGE
    for index in places:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        elif node.kind is Kind.SEND:
            lanes[index] = SENDS
        else:
            lanes[index] = ("collectives", node.text("group"))
    step = lower(graph, lanes)
    if not step.index:
        raise ExportError(
            f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes",
            code="export-empty-graph",
        )
    cpus: dict[Hashable, int] = {}
    cpu: dict[int, int] = {}
    for index in step.index:
        lane = RECEIVES if graph.node(index).kind is Kind.RECV else lanes[index]
        cpu[index] = cpus.setdefault(lane, len(cpus))
    if len(cpus) > CPUS:
        raise ExportError(
            f"the graph has {len(cpus)} streams and groups; GOAL has {CPUS} cpus",
            code="goal-too-many-cpus",
        )
    left_out = Counter(count_left_out(graph) | dropped)
    return Part(graph, ranks, layout, places, step, cpu, left_out)


_MOST = 2**32 - 1
"""Tags are 32 bits wide, and the highest means any."""

Ends = tuple[int, int, int, int]
"""Source, destination, tag as captured, bytes."""


class Tags:
    """Hands out tags, the same to all ranks that meet, and finds out who does not."""

    def __init__(self) -> None:
        self._next = 0
        self._calls: dict[tuple[tuple[int, ...], int], tuple[Call, int]] = {}
        self._left: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._messages: dict[tuple[Ends, int], int] = {}
        self._sent: Counter[Ends] = Counter()
        self._received: Counter[Ends] = Counter()

    def of_call(self, members: tuple[int, ...], instance: int, call: Call) -> int:
        """Return the tag of the first step of a group's call; that of step s is s more.

        Args:
            members: ranks of the group.
            instance: number of the call among those of the group.
            call: what is called.

        Raises:
            ExportError: another member calls something else.
        """
        key = members, instance
        if key not in self._calls:
            self._calls[key] = call, self._take(steps(call))
        known, tag = self._calls[key]
        if (known.collective, known.size_bytes) != (call.collective, call.size_bytes):
            raise ExportError(
                f"call {instance} of the ranks {list(members)} is {_named(known)} on one of them "
                f"and {_named(call)} on another: the traces are not of one job",
                code="goal-calls-differ",
            )
        self._left[key] += 1
        return tag

    def of_message(self, ends: Ends, *, sends: bool) -> int:
        """Return the tag of the next such message of a rank."""
        seen = self._sent if sends else self._received
        key = ends, seen[ends]
        seen[ends] += 1
        if key not in self._messages:
            self._messages[key] = self._take(1)
        return self._messages[key]

    def check(self) -> None:
        """Check that all that is sent is received, and that groups are complete.

        Raises:
            ExportError: somebody would wait for ever.
        """
        for ends in self._sent | self._received:
            if self._sent[ends] != self._received[ends]:
                source, target, _, size = ends
                raise ExportError(
                    f"rank {source} sends {self._sent[ends]} messages of {size} bytes to rank "
                    f"{target}, which receives {self._received[ends]}: the traces are not of one "
                    "job, or leave out a stage",
                    code="goal-unmatched-p2p",
                )
        for (members, instance), calls in self._left.items():
            if calls != len(members):
                known, _ = self._calls[members, instance]
                raise ExportError(
                    f"call {instance} of the ranks {list(members)}, {_named(known)}, is made by "
                    f"{calls} of them: the traces are not of one job",
                    code="goal-calls-missing",
                )

    def _take(self, count: int) -> int:
        first = self._next
        self._next += count
        if self._next > _MOST:
            raise ExportError(
                f"the job's communication takes over {_MOST} tags, the most GOAL's binary form "
                "holds: export fewer ranks or micro-batches",
                code="goal-too-many-tags",
            )
        return first


def _named(call: Call) -> str:
    return f"{call.collective.name} of {call.size_bytes} bytes"


@dataclass(slots=True)
class RankBlock:
    """Writes the operations of one rank.

    Attributes:
        lines: of its block.
        ends: label of the operation that ends each node of the step.
        operations: how many there are.
        instances: calls of each group so far.
    """

    part: Part
    rank: int
    tags: Tags
    gpus_per_node: int
    interconnect: Interconnect
    lines: list[str] = field(default_factory=list[str])
    ends: list[int] = field(default_factory=list[int])
    operations: int = 0
    instances: Counter[tuple[int, ...]] = field(default_factory=Counter[tuple[int, ...]])

    def write(self) -> None:
        """Write all nodes of the step, in its order."""
        graph = self.part.graph
        for number, index in enumerate(self.part.step.index):
            awaited = [self.ends[other] for other in self.part.step.waits_for[number]]
            node = graph.node(index)
            if index not in self.part.places:
                cpu = self.part.cpu[index]
                self.ends.append(self._operation(f"calc {node.duration_ns} cpu {cpu}", awaited))
            elif node.kind is Kind.COLLECTIVE:
                self.ends.append(self._collective(index, awaited))
            else:
                self.ends.append(self._message(index, awaited))

    def _operation(self, text: str, awaited: Sequence[int]) -> int:
        label = self.operations
        self.operations += 1
        self.lines.append(f"l{label}: {text}")
        self.lines += [f"l{label} requires l{other}" for other in awaited]
        return label

    def _message(self, index: int, awaited: Sequence[int]) -> int:
        node, layout = self.part.graph.node(index), self.part.layout
        peer = layout.shifted(self.rank, self.part.places[index].shift)
        size, sends = node.value("comm_bytes"), node.kind is Kind.SEND
        ends = (self.rank, peer) if sends else (peer, self.rank)
        tag = self.tags.of_message((*ends, tag_of(node), size), sends=sends)
        cpu = self.part.cpu[index]
        return self._operation(_moves(peer, size, tag, cpu, sends=sends), awaited)

    def _collective(self, index: int, awaited: Sequence[int]) -> int:
        node = self.part.graph.node(index)
        members = self.part.places[index].group(self.part.layout, self.rank)
        captured = self.part.places[index].group(self.part.layout, self.part.layout.rank)
        root = node.root
        call = Call(
            node.collective,
            node.value("comm_bytes"),
            nodes_of(members, self.gpus_per_node),
            captured.index(root) if root in captured else 0,
            self.interconnect,
        )
        instance = self.instances[members]
        self.instances[members] += 1
        tag = self.tags.of_call(members, instance, call)
        cpu = self.part.cpu[index]
        begin = self._operation(f"calc 0 cpu {cpu}", awaited)
        own = messages(call, members.index(self.rank))
        first = self.operations
        for message in own:
            text = _moves(members[message.peer], message.size_bytes, tag + message.step, cpu,
                          sends=message.sends)  # fmt: skip
            label = self._operation(text, [first + other for other in message.after] or [begin])
            if message.behind is not None:
                self.lines.append(f"l{label} irequires l{first + message.behind}")
        return self._operation(f"calc 0 cpu {cpu}", [first + last for last in _last(own)])


def _moves(peer: int, size: int, tag: int, cpu: int, *, sends: bool) -> str:
    what, to = ("send", "to") if sends else ("recv", "from")
    return f"{what} {size}b {to} {peer} tag {tag} cpu {cpu} nic 0"


@lru_cache(maxsize=4096)
def nodes_of(members: tuple[int, ...], gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the members by node."""
    found: dict[int, list[int]] = {}
    for position, rank in enumerate(members):
        found.setdefault(rank // gpus_per_node, []).append(position)
    return tuple(tuple(positions) for positions in found.values())


def _last(own: Sequence[Message]) -> Iterator[int]:
    """Yield the places that no other message of the member waits for."""
    awaited = {place for message in own for place in message.after}
    yield from (place for place in range(len(own)) if place not in awaited)
