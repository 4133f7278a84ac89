"""Notes: what a reader must know of a trace or a result, each with a stable code."""

from typing import Self

import msgspec


class Note(msgspec.Struct, frozen=True):
    """A statement on the quality of a trace or a result.

    A capture, a conversion or a re-costing stores notes in the trace, and later commands repeat
    them. Errors and warnings carry codes in the same way (`ir/errors.py`).

    Attributes:
        text: one sentence or more for the reader; it may change.
        code: stable name of the statement, such as "launch-queue-full".
    """

    text: str
    code: str

    def __str__(self) -> str:
        """Return the text, and the code in brackets."""
        return f"{self.text} [{self.code}]"

    def at(self, place: object) -> Self:
        """Return the note, with the same code, whose text begins with the place."""
        return type(self)(f"{place}: {self.text}", self.code)
