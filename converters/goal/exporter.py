"""Export graphs as the text of a GOAL schedule: a block of operations for each rank.

`calc` runs for nanoseconds on a cpu, `send` and `recv` move bytes; `requires` waits for the end of
another operation, `irequires` for its start (Hoefler, Siebert, Lumsdaine 2009; as `txt2bin` of
LogGOPSim and ATLAHS reads it). Each stream is a cpu, and communication has cpus of its own.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from onerank.converters.astra_sim.expand import Layout, Place, layout_of, place
from onerank.converters.astra_sim.lower import Step, lower
from onerank.converters.astra_sim.notes import NO_IDLE_TIME, count_left_out, timed_compute
from onerank.converters.astra_sim.peers import check_peers, tag_of
from onerank.converters.astra_sim.uneven import UNEVEN, levelled
from onerank.converters.distinct import check_all_alike
from onerank.converters.goal.decompose import SUPPORTED, Call, Message, messages
from onerank.converters.goal.tags import Tags
from onerank.converters.gpu_time import require_gpu_work
from onerank.converters.host_time import NAME, with_host_time
from onerank.converters.pipeline import RankGraph
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError
from onerank.ir.files import replacing

GPUS_PER_NODE = 8
CPUS = 256
"""txt2bin holds the number of a cpu in a byte."""
SENDS, RECEIVES, HOST = "sends", "receives", "host"
messages = lru_cache(maxsize=4096)(messages)


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        path: the file.
        ranks: number of ranks.
        operations: lines that calculate, send or receive, of all ranks.
        gpu_time_ns: summed GPU compute per rank, of the rank with most; with host time its waits
            for the host too.
        cpus: streams and lanes of communication, of the rank with most.
        algorithms: collective and algorithm -> calls of the rank with most.
        left_out: what of the graph is not in the schedule -> how many nodes.
        notes: sentences a reader of the simulator's figures should know.
    """

    path: Path
    ranks: int
    operations: int
    gpu_time_ns: int
    cpus: int
    algorithms: dict[str, int]
    left_out: dict[str, int]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Part:
    """A step, the ranks that run it, where its communication goes, and each node's cpu."""

    graph: Graph
    ranks: Sequence[int]
    layout: Layout
    places: dict[int, Place]
    step: Step
    cpu: dict[int, int]
    left_out: Counter[str]


def export(
    graph: Graph,
    path: str | Path,
    *,
    ranks: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    capability: int = 90,
    host_time: bool = False,
    notes: Sequence[str] = (),
) -> Export:
    """Write the step that `graph` holds for every rank of its job.

    Args:
        graph: one rank's step, with GPU compute and communication.
        path: file to write; it appears complete, or not at all.
        ranks: number of ranks; needed only for a graph whose job has no world.
        gpus_per_node: consecutive ranks that share a node.
        capability: compute capability of the GPUs, 90 for an H100; NCCL's choice depends on it.
        host_time: let the GPU wait for its host as it did, see `with_host_time`; the host is a cpu.
        notes: sentences to add to the export's own.

    Raises:
        ExportError: the graph cannot be run on all ranks alike.
        GraphError: the graph has a cycle.
        OSError: the file cannot be written.
    """
    check_all_alike(graph.job)
    layout = layout_of(graph.job, ranks)
    idle = f"{NO_IDLE_TIME}."
    if host_time:
        graph, idle = with_host_time(graph)
    part = _part(graph, layout, range(layout.ranks))
    check_peers(graph, part.step, part.places, layout)
    return _write([part], Path(path), gpus_per_node, capability, [*notes, idle])


def export_ranks(
    made: Sequence[RankGraph],
    path: str | Path,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    capability: int = 90,
    notes: Sequence[str] = (),
) -> Export:
    """Write the steps of a pipeline's ranks, each for the ranks it holds for; else as `export`.

    Args:
        made: graphs that together hold for every rank of one world.
        path: as for `export`.
        gpus_per_node: as for `export`.
        capability: as for `export`.
        notes: as for `export`.

    Raises:
        ExportError: as for `export`.
        OSError: the file cannot be written.
    """
    given = [(one.graph, layout_of(one.graph.job, None), one.ranks) for one in made]
    graphs, changed = levelled(given, along=given[0][1].apart)
    parts = [
        _part(graph, layout, ranks, along=layout.apart)
        for graph, (_, layout, ranks) in zip(graphs, given, strict=True)
    ]
    waiting = any(NAME in graph.strings.values for graph in graphs)
    idle = [] if waiting else [f"{NO_IDLE_TIME}."]
    told = [*notes, *([UNEVEN] if changed else []), *idle]
    return _write(parts, Path(path), gpus_per_node, capability, told)


def _part(graph: Graph, layout: Layout, ranks: Sequence[int], *, along: str = "") -> _Part:
    require_gpu_work(graph)
    places, dropped = place(graph, layout, along=along, supported=SUPPORTED)
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        node = graph.node(index)
        lanes[index] = HOST if node.name == NAME else ("compute", node.value("stream"))
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
        raise ExportError(f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes")
    cpus: dict[Hashable, int] = {}
    cpu: dict[int, int] = {}
    for index in step.index:
        lane = RECEIVES if graph.node(index).kind is Kind.RECV else lanes[index]
        cpu[index] = cpus.setdefault(lane, len(cpus))
    if len(cpus) > CPUS:
        raise ExportError(f"the graph has {len(cpus)} streams and groups; GOAL has {CPUS} cpus")
    left_out = Counter(count_left_out(graph) | dropped)
    return _Part(graph, ranks, layout, places, step, cpu, left_out)


@dataclass(slots=True)
class _Rank:
    """Writes the operations of one rank.

    Attributes:
        lines: of its block.
        ends: label of the operation that ends each node of the step.
        operations: how many there are.
        instances: calls of each group so far.
    """

    part: _Part
    rank: int
    tags: Tags
    gpus_per_node: int
    capability: int
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
        root = node.value("comm_src")
        call = Call(
            node.collective,
            node.value("comm_bytes"),
            _nodes(members, self.gpus_per_node),
            captured.index(root) if root in captured else 0,
            self.capability,
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
def _nodes(members: tuple[int, ...], gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the members by node."""
    found: dict[int, list[int]] = {}
    for position, rank in enumerate(members):
        found.setdefault(rank // gpus_per_node, []).append(position)
    return tuple(tuple(positions) for positions in found.values())


def _last(own: Sequence[Message]) -> Iterator[int]:
    """Yield the places that no other message of the member waits for."""
    awaited = {place for message in own for place in message.after}
    yield from (place for place in range(len(own)) if place not in awaited)


def _write(
    parts: Sequence[_Part], path: Path, gpus_per_node: int, capability: int, told: Sequence[str]
) -> Export:
    if gpus_per_node < 1:
        raise ExportError(f"{gpus_per_node} GPUs per node: expected 1 or more")
    of = {rank: part for part in parts for rank in part.ranks}
    tags = Tags()
    operations = 0
    with replacing(path) as file:
        file.write(f"num_ranks {len(of)}\n".encode())
        for rank in sorted(of):
            block = _Rank(of[rank], rank, tags, gpus_per_node, capability)
            block.write()
            operations += block.operations
            _write_block(file, rank, block.lines)
        tags.check()
    left_out = sum((part.left_out for part in parts), Counter[str]())
    return Export(
        path=path,
        ranks=len(of),
        operations=operations,
        gpu_time_ns=max(
            int(part.graph.nodes.duration_ns[part.graph.gpu_compute].sum()) for part in parts
        ),
        cpus=max(len(set(part.cpu.values())) for part in parts),
        algorithms=_algorithms(parts, gpus_per_node, capability),
        left_out={what: count for what, count in left_out.items() if count},
        notes=[
            *told,
            "Messages are payload alone: reductions take no time, and neither does starting one "
            "but for the simulator's own o and g.",
            f"Ranks {gpus_per_node} by {gpus_per_node} share a node: that chooses NCCL's "
            "algorithms. Every rank has one interface, nic 0, for all its messages.",
        ],
    )


def _write_block(file: BinaryIO, rank: int, lines: Sequence[str]) -> None:
    file.write(("\n".join([f"rank {rank} {{", *lines, "}"]) + "\n").encode())


def _algorithms(parts: Sequence[_Part], gpus_per_node: int, capability: int) -> dict[str, int]:
    """Return how many calls of each sort the rank with most makes."""
    most: Counter[str] = Counter()
    for part in parts:
        found: Counter[str] = Counter()
        for index, placed in part.places.items():
            node = part.graph.node(index)
            if node.kind is not Kind.COLLECTIVE:
                found["point to point"] += 1
                continue
            members = placed.group(part.layout, part.ranks[0])
            nodes = _nodes(members, gpus_per_node)
            call = Call(node.collective, node.value("comm_bytes"), nodes, capability=capability)
            found[f"{node.collective.name.lower()} by {call.choice.algorithm}"] += 1
        most |= found
    return dict(most)
