"""The communication of one rank: what it issues and what each call waits for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from onerank.converters.targets.astra_sim.check.file_rules import Dag
from onerank.ir.enums import Collective

WORLD = ""
"""Name of the default group, which contains all ranks."""


class NodeType(IntEnum):
    """Chakra's node types."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    SEND = 5
    RECV = 6
    COLL = 7


@dataclass(frozen=True, slots=True)
class CommNode:
    """A communication node, reduced to what decides which calls of other ranks match it.

    Attributes:
        node: its id.
        type: SEND, RECV or COLL.
        size: bytes.
        collective: Chakra's number, -1 for a send or receive.
        group: name of the process group, `WORLD` for the default one.
        source: sending rank of a send or receive.
        target: receiving rank of a send or receive.
        tag: of a send or receive.
    """

    node: int
    type: NodeType
    size: int
    collective: int = -1
    group: str = WORLD
    source: int = -1
    target: int = -1
    tag: int = -1

    def __str__(self) -> str:
        if self.type == NodeType.COLL:
            group = f"group {self.group}" if self.group else "the default group"
            return f"node {self.node} ({name_of(self.collective)}, {self.size} bytes, {group})"
        verb = "send" if self.type == NodeType.SEND else "receive"
        return (
            f"node {self.node} ({verb}, {self.size} bytes, "
            f"rank {self.source} to {self.target}, tag {self.tag})"
        )


def name_of(collective: int) -> str:
    """Return a collective's name in lower case, or its number."""
    known = collective in Collective.__members__.values() and collective >= 0
    return Collective(collective).name.lower() if known else f"collective type {collective}"


Channel = tuple[int, int, int, int]
"""Values that a send and its receive have in common: source, target, tag, bytes."""

End = str | tuple[int, int]
"""The peers of a call: a group, or the source and target of a message."""


@dataclass(frozen=True, slots=True)
class CommProgram:
    """The communication of ranks whose files differ only in groups and peers.

    Attributes:
        dag: dependencies.
        order: nodes in issue order when no rank waits for another.
        calls: per node of `dag`, its communication on one of the ranks; None for a node that
            completes at once.
        slots: per node of `dag`, the slot of its communication; else None.
    """

    dag: Dag
    order: list[int]
    calls: list[CommNode | None]
    slots: list[int | None]


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's file, reduced to its dependencies and its communication.

    Attributes:
        file: its name.
        comm: the part that it shares with equal ranks.
        ends: group or peers of each slot.
    """

    file: str
    comm: CommProgram
    ends: Sequence[End]

    @classmethod
    def of(cls, file: str, dag: Dag, calls: list[CommNode | None], order: list[int]) -> "Program":
        """Return the program of a file; each distinct group or pair of ranks is a slot."""
        numbers: dict[End, int] = {}
        slots = [numbers.setdefault(end_of(call), len(numbers)) if call else None for call in calls]
        return cls(file, CommProgram(dag, order, calls, slots), list(numbers))

    def calls(self) -> list[CommNode | None]:
        """Return per node its communication."""
        pairs = zip(self.comm.calls, self.comm.slots, strict=True)
        return [
            call if call is None or slot is None else with_end(call, self.ends[slot])
            for call, slot in pairs
        ]

    def issued(self) -> list[CommNode]:
        """Return the communication in the order it is issued."""
        calls = self.calls()
        return [call for node in self.comm.order if (call := calls[node]) is not None]


def end_of(call: CommNode) -> End:
    """Return the group or the peers of a call."""
    return call.group if call.type == NodeType.COLL else (call.source, call.target)


def with_end(call: CommNode, end: End) -> CommNode:
    """Return the call with another group or peer."""
    if end == end_of(call):
        return call
    if isinstance(end, str):
        return replace(call, group=end)
    return replace(call, source=end[0], target=end[1])


def distinct_comms(programs: Iterable[Program]) -> list[CommProgram]:
    """Return the distinct shared parts of programs."""
    # By identity: equal ranks share one object, and comparing thousands of nodes would be slow.
    return list({id(program.comm): program.comm for program in programs}.values())


def channel_of(call: CommNode) -> Channel:
    """Return the channel of a send or receive."""
    return call.source, call.target, call.tag, call.size


def group_text(name: str) -> str:
    """Return a group as a message names it."""
    return f"group {name}" if name else "the default group"
