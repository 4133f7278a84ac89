"""Communication of a workload, reduced to what decides whom it meets."""

from dataclasses import dataclass
from enum import IntEnum

from onerank.ir.kinds import Collective

WORLD = ""
"""Name under which a collective on the default group is kept."""


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
class Call:
    """A communication node, reduced to what decides whom it meets.

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
