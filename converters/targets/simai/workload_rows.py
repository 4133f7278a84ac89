"""Rows of a SimAI workload: the forward and backward work of each scope of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from onerank.converters.targets.simai.layer_slots import Call, Slot
from onerank.ir.errors import ExportError

LARGEST_NS = 2**31 - 128
"""The largest float32 below 2**31 ns, from which on SimAI hangs."""

_MOST_PARTS = 10_000
"""Of a cell: almost six hours."""


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """A line of the file.

    Attributes:
        name: without white space.
        forward_ns: forward compute, before its communication.
        input_ns: compute for the input's gradient, before its communication.
        weight_ns: compute for the weights' gradients, before its communication.
        calls: its communications, at most one per slot.
    """

    name: str
    forward_ns: int = 0
    input_ns: int = 0
    weight_ns: int = 0
    calls: dict[Slot, Call] = field(default_factory=dict[Slot, Call])

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """Forward, input's gradient, weights' gradients."""
        return self.forward_ns, self.input_ns, self.weight_ns

    def text(self) -> str:
        """Return the line: 12 columns. `dep` is not read, and `update_ns` is no compute."""
        cells = [self.name, "-1"]
        for slot, ns in zip(Slot, self.times_ns, strict=True):
            call = self.calls.get(slot)
            cells += [str(ns), *((call.name, str(call.size_bytes)) if call else ("NONE", "0"))]
        return " ".join([*cells, "0"])


@dataclass(slots=True)
class Scope:
    """What a layer or sub-module does in one micro-batch, as rows that fill up in order.

    Attributes:
        name: of its rows.
        forward: rows in the order of the forward.
        backward: rows in the order of the backward, which SimAI runs up the file.
        aside: calls whose only columns are others than those of their phase.
    """

    name: str
    forward: list[WorkloadRow] = field(default_factory=list[WorkloadRow])
    backward: list[WorkloadRow] = field(default_factory=list[WorkloadRow])
    aside: list[Call] = field(default_factory=list[Call])

    def compute(self, slot: Slot, ns: int) -> None:
        """Add compute; work after a blocking communication goes into a new row."""
        rows = self.forward if slot is Slot.FORWARD else self.backward
        blocked = Slot.FORWARD if slot is Slot.FORWARD else Slot.INPUT
        if not rows or (slot is not Slot.WEIGHT and blocked in rows[-1].calls):
            rows.append(WorkloadRow(self.name))
        newest = rows[-1]
        rows[-1] = {
            Slot.FORWARD: lambda: replace(newest, forward_ns=newest.forward_ns + ns),
            Slot.INPUT: lambda: replace(newest, input_ns=newest.input_ns + ns),
            Slot.WEIGHT: lambda: replace(newest, weight_ns=newest.weight_ns + ns),
        }[slot]()

    def communicate(self, call: Call, made_in: Slot) -> None:
        """Add a communication, made in the phase of `made_in`."""
        for piece in call.pieces():
            if made_in is Slot.FORWARD and piece.slot is not Slot.FORWARD:
                self.aside.append(piece)
                continue
            rows = self.forward if piece.slot is Slot.FORWARD else self.backward
            if not rows or piece.slot in rows[-1].calls:
                rows.append(WorkloadRow(self.name))
            rows[-1] = replace(rows[-1], calls={**rows[-1].calls, piece.slot: piece})

    def rows(self) -> list[WorkloadRow]:
        """Return forward and backward side by side, named apart."""
        pairs = zip_longest(self.forward, reversed(self.backward), fillvalue=WorkloadRow(self.name))
        rows = [
            WorkloadRow(self.name, there.forward_ns, back.input_ns, back.weight_ns,
                {**there.calls, **back.calls})
            for there, back in pairs
        ]  # fmt: skip
        rows += [WorkloadRow(self.name, calls={call.slot: call}) for call in self.aside]
        rows = [part for row in rows for part in _split(row)]
        if len(rows) == 1:
            return rows
        return [replace(row, name=f"{row.name}:{number}") for number, row in enumerate(rows)]


def all_rows(once: Iterable[Scope], micro_batches: Iterable[Sequence[Scope]]) -> list[WorkloadRow]:
    """Return all rows.

    Args:
        once: what a step has once; updates first, since they come last on the way back up.
        micro_batches: scopes of each, in the order of the forward.
    """
    scopes = [*once, *(scope for scopes in micro_batches for scope in scopes)]
    return [row for scope in scopes for row in scope.rows()]


def _split(row: WorkloadRow) -> list[WorkloadRow]:
    """Return a row, split into several if SimAI's cells cannot hold the times.

    Forward runs down the rows and backward up: so the last part keeps the forward's call, and the
    first part the others.

    Raises:
        ExportError: a cell is longer than any step.
    """
    count = max(1, -(-max(row.times_ns) // LARGEST_NS))
    if count > _MOST_PARTS:
        raise ExportError(
            f"the row {row.name!r} would compute {max(row.times_ns)} ns and a row of SimAI holds "
            f"{LARGEST_NS} ns, so it would take {count} rows: the trace's durations are no step's",
            code="simai-row-too-long",
        )
    parts: list[WorkloadRow] = []
    for at in range(count):
        forward, inputs, weights = (
            ns * (at + 1) // count - ns * at // count for ns in row.times_ns
        )
        calls = {
            slot: call
            for slot, call in row.calls.items()
            if at == (count - 1 if slot is Slot.FORWARD else 0)
        }
        parts.append(WorkloadRow(row.name, forward, inputs, weights, calls))
    return parts
