"""The operations of one rank, as lines of GOAL."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from onerank.converters.astra_sim.peers import tag_of
from onerank.converters.goal.decompose import Call, Message, messages
from onerank.converters.goal.part import Part
from onerank.converters.goal.tags import Tags
from onerank.converters.nccl import Board
from onerank.ir import Kind


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
    board: Board
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
            self.board,
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
