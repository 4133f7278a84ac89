"""Rows of a SimAI workload: the work of each scope of the model, with its communication."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest

from onerank.converters.expand.pipeline import AXIS
from onerank.ir import Collective, Graph, Job, Kind, Node, ProcessGroup
from onerank.ir.errors import ExportError

COLLECTIVE_NAMES = {
    Collective.ALL_REDUCE: "ALLREDUCE",
    Collective.ALL_GATHER: "ALLGATHER",
    Collective.REDUCE_SCATTER: "REDUCESCATTER",
    Collective.ALL_TO_ALL: "ALLTOALL",
}
LARGEST_GATHER_BYTES = 16 << 30
"""Largest all-gather or reduce-scatter; with more SimAI exits with 0 and writes an empty report."""
# Largest plausible message: a pebibyte.
_MOST_BYTES = 1 << 50


class Slot(Enum):
    """A group of three columns of a row: compute, communication, bytes.

    The members are in the order of the columns.
    """

    FORWARD = "forward"
    INPUT = "input-gradient"
    WEIGHT = "weight-gradient"


@dataclass(frozen=True, slots=True)
class SlotCall:
    """A communication in a slot of a row.

    Attributes:
        slot: the columns.
        name: collective and group in SimAI's spelling.
        size_bytes: the whole message; for an all-gather and a reduce-scatter the full tensor.
    """

    slot: Slot
    name: str
    size_bytes: int

    def split(self) -> "list[SlotCall]":
        """Return calls within SimAI's limit that together move the same bytes."""
        if not self.name.startswith(("ALLGATHER", "REDUCESCATTER")):
            return [self]
        count = -(-self.size_bytes // LARGEST_GATHER_BYTES)
        # Differences of running sums, so that the parts add up to the whole size.
        return [
            SlotCall(
                self.slot,
                self.name,
                self.size_bytes * (at + 1) // count - self.size_bytes * at // count,
            )
            for at in range(count)
        ]


@dataclass(slots=True)
class Losses:
    """Communication that the format cannot express.

    Attributes:
        bytes_lost: per-rank bytes of the calls that are not in the file, by reason.
        calls_lost: number of these calls, by reason.
        moved: number of calls of other phases in the weight-gradient columns, by phase and group.
        messages: number of sends and receives of the pipeline.
        within_stage: bytes of each other send and receive.
    """

    bytes_lost: Counter[str] = field(default_factory=Counter[str])
    calls_lost: Counter[str] = field(default_factory=Counter[str])
    moved: Counter[str] = field(default_factory=Counter[str])
    messages: int = 0
    within_stage: list[int] = field(default_factory=list[int])

    def lose(self, reason: str, size_bytes: int) -> None:
        """Count a call that is not in the file."""
        self.bytes_lost[reason] += size_bytes
        self.calls_lost[reason] += 1


def leaves_stage(job: Job, node: Node) -> bool:
    """Return whether the other end of a send or receive is on another stage of the pipeline.

    If the job has a pipeline, a message whose other end is not recorded counts as one of it.
    """
    if job.world.sizes.get(AXIS, 1) == 1:
        return False
    peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
    if not 0 <= peer < job.world.size:
        return True
    return job.world.point(peer)[AXIS] != job.world.point(job.rank)[AXIS]


class SlotAssigner:
    """Assigns the collectives of one rank's graph to slots, and counts losses."""

    def __init__(self, graph: Graph, losses: Losses) -> None:
        self._graph = graph
        self._losses = losses
        self._groups: dict[str, tuple[str, int]] = {}

    def assign(self, node: Node, slot: Slot) -> SlotCall | None:
        """Return the SimAI call of a communication; None if the format has none.

        Args:
            node: the communication.
            slot: slot of the phase that issues it.

        Raises:
            ExportError: the communication has no plausible size, or its group is undefined.
        """
        size, losses = node.value("comm_bytes"), self._losses
        if node.kind is not Kind.COLLECTIVE:
            if leaves_stage(self._graph.job, node):
                losses.messages += 1
            else:
                losses.within_stage.append(max(size, 0))
            return None
        if size < 0:
            raise ExportError(
                f"node {node.id} ({node.name!r}) does not record how many bytes it moves\n"
                "  set its comm_bytes",
                code="export-no-bytes",
            )
        group, ranks = self._group(node)
        if size * ranks > _MOST_BYTES:
            raise ExportError(
                f"node {node.id} ({node.name!r}) moves {size} bytes among {ranks} ranks; expected "
                f"at most {_MOST_BYTES} in total\n  correct its comm_bytes",
                code="simai-too-many-bytes",
            )
        # SimAI silently reads unknown collectives and groups as NONE. Calls that it would drop are
        # counted instead.
        if ranks == 1:
            losses.lose("of a group of one rank", size)
        elif node.collective not in COLLECTIVE_NAMES:
            losses.lose(f"{node.collective.name.lower()}, which SimAI lacks", size)
        elif not group:
            losses.lose(f"of group {node.text('group')!r}, which SimAI has no name for", size)
        elif size == 0:
            losses.lose("of 0 bytes", size)
        else:
            # comm_bytes of an all-gather is the shard; SimAI counts the full tensor.
            full = size * (ranks if node.collective is Collective.ALL_GATHER else 1)
            return self._call(COLLECTIVE_NAMES[node.collective], group, full, slot)
        return None

    def _call(self, name: str, group: str, size: int, slot: Slot) -> SlotCall:
        # A name without suffix means the TP group in the forward and input-gradient columns and
        # the DP group in the weight-gradient column.
        if group == "ep":
            return SlotCall(slot, f"{name}_EP", size)
        if group == "edp":
            # SimAI has the DP groups in this column only.
            self._count_moved(slot, "edp")
            return SlotCall(Slot.WEIGHT, f"{name}_DP_EP", size)
        if group == "dp":
            self._count_moved(slot, "dp")
            return SlotCall(Slot.WEIGHT, name, size)
        # Without suffix the weight-gradient column would mean DP, so a TP call goes to the input
        # gradient.
        return SlotCall(Slot.INPUT if slot is Slot.WEIGHT else slot, name, size)

    def _count_moved(self, slot: Slot, group: str) -> None:
        if slot is not Slot.WEIGHT:
            self._losses.moved[f"{slot.value} of {group}"] += 1

    def _group(self, node: Node) -> tuple[str, int]:
        """Return a group's axis ("tp", "dp", "ep", "edp" or "") and its number of ranks."""
        name = node.text("group")
        if name not in self._groups:
            self._groups[name] = self._identify(self._graph.job.group(name), node)
        return self._groups[name]

    def _identify(self, group: ProcessGroup | None, node: Node) -> tuple[str, int]:
        """Return the axis whose line has the group's ranks; of several, the recorded axis."""
        world, rank = self._graph.job.world, self._graph.job.rank
        if group is None and node.text("group"):
            names = ", ".join(repr(group.name) for group in self._graph.job.groups) or "none"
            raise ExportError(
                f"node {node.id} ({node.name!r}) is of group {node.text('group')!r}; the job's "
                f"groups are {names}",
                code="export-unknown-group",
            )
        ranks = tuple(sorted(group.ranks)) if group else tuple(range(world.size))
        replicas = "+".join(axis for axis in world.sizes if axis not in ("tp", "pp"))
        lines = {"tp": "tp", "dp": replicas} if replicas else {"tp": "tp"}
        if world.ep > 1:
            lines |= {"ep": "ep", "edp": "edp"}
        axis = group.axis if group else ""
        # Several lines can have the same ranks, as those of ep and dp if ep equals dp.
        candidates = sorted(lines, key=lambda name: (name != axis, [*lines].index(name)))
        matches = (name for name in candidates if world.line(lines[name], rank) == ranks)
        return next(matches, ""), len(ranks)


# Times pass through float32, which has 24 bits: between 2**30 and 2**31 it represents multiples of
# 128 only.
LARGEST_NS = 2**31 - 128
"""Largest float32 below 2**31; SimAI hangs on cells of 2**31 ns or more."""

# Rows that a cell may be split into: almost six hours of compute.
_MOST_ROWS_PER_CELL = 10_000


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """A row of the file. The compute of a slot precedes its communication.

    Attributes:
        name: name without white space.
        forward_ns: forward compute.
        input_ns: compute of the input gradient.
        weight_ns: compute of the weight gradients.
        calls: communication, at most one call per slot.
    """

    name: str
    forward_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0
    calls: dict[Slot, SlotCall] = field(default_factory=dict[Slot, SlotCall])

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """Compute of the forward, the input gradient and the weight gradients."""
        return self.forward_ns, self.input_ns, self.weight_ns

    def text(self) -> str:
        """Return the line with its 12 columns."""
        # SimAI ignores `dep`, and `update_ns` delays what follows a communication instead of
        # counting as compute, so both have constant values.
        cells = [self.name, "-1"]
        for slot, ns in zip(Slot, self.times_ns, strict=True):
            call = self.calls.get(slot)
            cells += [str(ns), *((call.name, str(call.size_bytes)) if call else ("NONE", "0"))]
        return " ".join([*cells, "0"])


@dataclass(slots=True)
class ModuleRows:
    """The work of a layer or sub-module in one micro-batch, as rows that are filled in order.

    Attributes:
        name: name of the rows.
        forward: rows in forward order.
        backward: rows in backward order, which SimAI runs up the file.
        moved: forward calls whose group exists only in the weight-gradient columns.
    """

    name: str
    forward: list[WorkloadRow] = field(default_factory=list[WorkloadRow])
    backward: list[WorkloadRow] = field(default_factory=list[WorkloadRow])
    moved: list[SlotCall] = field(default_factory=list[SlotCall])

    def compute(self, slot: Slot, ns: int) -> None:
        """Add compute; work after a blocking communication goes into a new row."""
        # SimAI blocks on forward and input-gradient communication only.
        rows = self.forward if slot is Slot.FORWARD else self.backward
        blocked = Slot.FORWARD if slot is Slot.FORWARD else Slot.INPUT
        if not rows or (slot is not Slot.WEIGHT and blocked in rows[-1].calls):
            rows.append(WorkloadRow(self.name))
        row = rows[-1]
        if slot is Slot.FORWARD:
            rows[-1] = replace(row, forward_ns=row.forward_ns + ns)
        elif slot is Slot.INPUT:
            rows[-1] = replace(row, input_ns=row.input_ns + ns)
        else:
            rows[-1] = replace(row, weight_ns=row.weight_ns + ns)

    def communicate(self, call: SlotCall, issued_in: Slot) -> None:
        """Add a communication that the phase of `issued_in` issues."""
        for part in call.split():
            if issued_in is Slot.FORWARD and part.slot is not Slot.FORWARD:
                self.moved.append(part)
                continue
            rows = self.forward if part.slot is Slot.FORWARD else self.backward
            if not rows or part.slot in rows[-1].calls:
                rows.append(WorkloadRow(self.name))
            rows[-1] = replace(rows[-1], calls={**rows[-1].calls, part.slot: part})

    def rows(self) -> list[WorkloadRow]:
        """Return rows with the forward and the backward of this scope, with distinct names."""
        # SimAI runs the backward up the file: the last forward row is the first backward row.
        pairs = zip_longest(self.forward, reversed(self.backward), fillvalue=WorkloadRow(self.name))
        rows = [
            WorkloadRow(self.name, forward.forward_ns, backward.input_ns, backward.weight_ns,
                {**forward.calls, **backward.calls})
            for forward, backward in pairs
        ]  # fmt: skip
        rows += [WorkloadRow(self.name, calls={call.slot: call}) for call in self.moved]
        rows = [part for row in rows for part in _split(row)]
        if len(rows) == 1:
            return rows
        return [replace(row, name=f"{row.name}:{number}") for number, row in enumerate(rows)]


def all_rows(
    once: Iterable[ModuleRows], micro_batches: Iterable[Sequence[ModuleRows]]
) -> list[WorkloadRow]:
    """Return the rows of a step.

    Args:
        once: scopes that a step has once, the optimizer first.
        micro_batches: scopes of each micro-batch, in forward order.
    """
    # The backward runs up the file, so the optimizer's row at the top runs last.
    scopes = [*once, *(scope for scopes in micro_batches for scope in scopes)]
    return [row for scope in scopes for row in scope.rows()]


def _split(row: WorkloadRow) -> list[WorkloadRow]:
    """Return a row, split into several if a time exceeds SimAI's limit for a cell.

    Raises:
        ExportError: a time is implausibly long.
    """
    count = max(1, -(-max(row.times_ns) // LARGEST_NS))
    if count > _MOST_ROWS_PER_CELL:
        raise ExportError(
            f"the row {row.name!r} computes {max(row.times_ns)} ns; at {LARGEST_NS} ns per row of "
            f"SimAI it would take {count} rows, more than {_MOST_ROWS_PER_CELL}\n"
            "  correct the durations of the trace",
            code="simai-row-too-long",
        )
    parts: list[WorkloadRow] = []
    for at in range(count):
        forward, inputs, weights = (
            ns * (at + 1) // count - ns * at // count for ns in row.times_ns
        )
        # The forward runs down the rows and the backward up, so the last part gets the forward's
        # call and the first part the others.
        calls = {
            slot: call
            for slot, call in row.calls.items()
            if at == (count - 1 if slot is Slot.FORWARD else 0)
        }
        parts.append(WorkloadRow(row.name, forward, inputs, weights, calls))
    return parts
