"""Rows of a SimAI workload: the forward and backward work of each scope of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from onerank.converters.targets.simai.layer_slots import Slot, SlotCall
from onerank.ir.errors import ExportError

LARGEST_NS = 2**31 - 128
"""Largest float32 below 2**31; SimAI hangs on cells of 2**31 ns or more."""

_MOST_ROWS_PER_CELL = 10_000
"""Rows that a cell may be split into: almost six hours of compute."""


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
class Scope:
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


def all_rows(once: Iterable[Scope], micro_batches: Iterable[Sequence[Scope]]) -> list[WorkloadRow]:
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
