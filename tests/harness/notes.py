"""Find a note by its stable code and the numbers and names in it, never by its wording."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from onerank.ir.notes import Note

Named = str | int | float
"""What a note must name: a number, as a whole number of the text, or a part of the text."""


def codes(notes: Iterable[Any]) -> list[str]:
    """Return the codes of notes, which may come from a command's JSON."""
    return [note.code for note in _notes(notes)]


def has_note(notes: Iterable[Any], code: str, *naming: Named) -> bool:
    """Return whether a note with this code names all of `naming`."""
    return any(note.code == code and _names(note, naming) for note in _notes(notes))


def note_of(notes: Iterable[Any], code: str, *naming: Named) -> Note:
    """Return the only note with this code, which must name all of `naming`."""
    matching = [note for note in _notes(notes) if note.code == code]
    assert len(matching) == 1, f"{len(matching)} of {codes(notes)} are {code}"
    (note,) = matching
    missing = [name for name in naming if not _names(note, (name,))]
    assert not missing, f"{missing} not in: {note}"
    return note


def _notes(notes: Iterable[Any]) -> list[Note]:
    return [Note(**note) if isinstance(note, Mapping) else note for note in notes]


def _names(note: Note, naming: Iterable[Named]) -> bool:
    numbers = {float(text) for text in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", note.text)}
    return all(name in note.text if isinstance(name, str) else name in numbers for name in naming)
