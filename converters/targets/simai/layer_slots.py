"""The column, collective and group of each communication in a SimAI row."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from onerank.ir import Collective, Graph, Kind, Node, ProcessGroup
from onerank.ir.errors import ExportError

NAMES = {
    Collective.ALL_REDUCE: "ALLREDUCE",
    Collective.ALL_GATHER: "ALLGATHER",
    Collective.REDUCE_SCATTER: "REDUCESCATTER",
    Collective.ALL_TO_ALL: "ALLTOALL",
}
LARGEST_GATHER_BYTES = 16 << 30
"""Beyond it SimAI leaves an empty report for all-gathers and reduce-scatters, exit code 0."""
_MOST_BYTES = 1 << 50


class Slot(Enum):
    """A group of columns: compute, communication, its bytes."""

    FORWARD = "forward"
    INPUT = "input-gradient"
    WEIGHT = "weight-gradient"


@dataclass(frozen=True, slots=True)
class Call:
    """A communication in a row.

    Attributes:
        slot: its columns.
        name: collective and group, as SimAI writes them.
        size_bytes: the whole message; of an all-gather and a reduce-scatter the full tensor.
    """

    slot: Slot
    name: str
    size_bytes: int

    def pieces(self) -> "list[Call]":
        """Return calls that SimAI can run and that together move the same bytes."""
        if not self.name.startswith(("ALLGATHER", "REDUCESCATTER")):
            return [self]
        count = -(-self.size_bytes // LARGEST_GATHER_BYTES)
        return [
            Call(self.slot, self.name, self.size_bytes * (at + 1) // count - done)
            for at in range(count)
            for done in [self.size_bytes * at // count]
        ]


@dataclass(slots=True)
class Losses:
    """What of the communication the format cannot say.

    Attributes:
        bytes_lost: why a call is not in the file -> per-rank bytes of all such calls.
        calls_lost: the same reason -> how many they are.
        moved: calls in the weight-gradient columns that other phases make.
        messages: sends and receives of the pipeline.
    """

    bytes_lost: Counter[str] = field(default_factory=Counter[str])
    calls_lost: Counter[str] = field(default_factory=Counter[str])
    moved: Counter[str] = field(default_factory=Counter[str])
    messages: int = 0

    def lose(self, reason: str, size_bytes: int) -> None:
        """Count a call that the file lacks."""
        self.bytes_lost[reason] += size_bytes
        self.calls_lost[reason] += 1


class Slots:
    """Places the calls of one rank's graph."""

    def __init__(self, graph: Graph, losses: Losses) -> None:
        self._graph = graph
        self._losses = losses
        self._groups: dict[str, tuple[str, int]] = {}

    def place(self, node: Node, slot: Slot) -> Call | None:
        """Return the SimAI call for a communication, None if there is none.

        Raises:
            ExportError: the communication has no recorded bytes, or its group is not known.
        """
        size, losses = node.value("comm_bytes"), self._losses
        if node.kind is not Kind.COLLECTIVE:
            losses.messages += 1
            return None
        if size < 0:
            raise ExportError(
                f"node {node.id} ({node.name!r}) does not say how many bytes it moves; set its "
                "comm_bytes",
                code="export-no-bytes",
            )
        group, ranks = self._group(node)
        if size * ranks > _MOST_BYTES:
            raise ExportError(
                f"node {node.id} ({node.name!r}) moves {size} bytes among {ranks} ranks, more than "
                "any network: the trace's comm_bytes is damaged",
                code="simai-too-many-bytes",
            )
        if ranks == 1:
            losses.lose("of a group of one rank", size)
        elif node.collective not in NAMES:
            losses.lose(f"{node.collective.name.lower()}, which SimAI lacks", size)
        elif not group:
            losses.lose(f"of group {node.text('group')!r}, which SimAI has no name for", size)
        elif size == 0:
            losses.lose("of 0 bytes", size)
        else:
            full = size * (ranks if node.collective is Collective.ALL_GATHER else 1)
            return self._call(NAMES[node.collective], group, full, slot)
        return None

    def _call(self, name: str, group: str, size: int, slot: Slot) -> Call:
        if group == "ep":
            return Call(slot, f"{name}_EP", size)
        if group == "edp":
            self._count_moved(slot, "edp")
            return Call(Slot.WEIGHT, f"{name}_DP_EP", size)
        if group == "dp":
            self._count_moved(slot, "dp")
            return Call(Slot.WEIGHT, name, size)
        return Call(Slot.INPUT if slot is Slot.WEIGHT else slot, name, size)  # a group of tp

    def _count_moved(self, slot: Slot, group: str) -> None:
        if slot is not Slot.WEIGHT:
            self._losses.moved[f"{slot.value} of {group}"] += 1

    def _group(self, node: Node) -> tuple[str, int]:
        """Return "tp", "dp", "ep" or "edp" ("" for another) and the number of ranks."""
        name = node.text("group")
        if name not in self._groups:
            self._groups[name] = self._known(self._graph.job.group(name), node)
        return self._groups[name]

    def _known(self, group: ProcessGroup | None, node: Node) -> tuple[str, int]:
        world, rank = self._graph.job.world, self._graph.job.rank
        if group is None and node.text("group"):
            known = ", ".join(repr(group.name) for group in self._graph.job.groups) or "none"
            raise ExportError(
                f"node {node.id} ({node.name!r}) is of group {node.text('group')!r}; the job's "
                f"groups are {known}",
                code="export-unknown-group",
            )
        ranks = tuple(sorted(group.ranks)) if group else tuple(range(world.size))
        replicas = "+".join(axis for axis in world.sizes if axis not in ("tp", "pp"))
        lines = {"tp": "tp", "dp": replicas} if replicas else {"tp": "tp"}
        if world.ep > 1:
            lines |= {"ep": "ep", "edp": "edp"}
        axis = group.axis if group else ""
        wanted = sorted(lines, key=lambda one: (one != axis, [*lines].index(one)))
        found = (one for one in wanted if world.line(lines[one], rank) == ranks)
        return next(found, ""), len(ranks)
