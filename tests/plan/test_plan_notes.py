"""The table of a plan names every row that a note concerns."""

from types import SimpleNamespace
from typing import Any

from onerank.cli.commands import plan
from onerank.ir.notes import Note


def test_a_note_names_all_its_rows() -> None:
    shared, other = Note("waits", code="plan-host-bound"), Note("fits", code="plan-may-not-fit")
    outcomes: list[Any] = [
        SimpleNamespace(notes=(shared,)),
        SimpleNamespace(notes=(shared, other)),
        SimpleNamespace(notes=()),
        SimpleNamespace(notes=(shared,)),
    ]
    notes = plan._notes(outcomes)
    assert [text.split(":")[0] for text in notes] == ["rows 1, 2, 4", "row 2"]
    del outcomes[2]
    assert plan._notes(outcomes)[0].startswith("all rows:")
