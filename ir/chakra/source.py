"""Node messages to be decoded, wherever they are."""

from collections.abc import Iterator
from typing import Protocol

from onerank.ir.chakra.distinct import packed
from onerank.ir.chakra.scan import Spans
from onerank.ir.chakra.words import Buffer
from onerank.ir.edges import I64

BLOCK = 4096
"""Most messages of a block."""


class Source(Protocol):
    """Node messages to be decoded."""

    def blocks(self) -> Iterator[tuple[Buffer, Spans]]:
        """Yield all messages, some at a time."""
        ...

    def take(self, rows: I64) -> list[bytes]:
        """Return some messages, by their places in ascending order."""
        ...

    def place(self, node: int) -> str:
        """Name a message, to begin an error with."""
        ...


class Packed:
    """Messages in memory."""

    def __init__(self, messages: list[bytes], name: str) -> None:
        self._messages, self._name = messages, name

    def blocks(self) -> Iterator[tuple[Buffer, Spans]]:
        """Yield all messages, some at a time."""
        for begin in range(0, len(self._messages), BLOCK):
            yield packed(self._messages[begin : begin + BLOCK])

    def take(self, rows: I64) -> list[bytes]:
        """Return some of the messages."""
        return [self._messages[row] for row in rows.tolist()]

    def place(self, node: int) -> str:
        """Name a message, to begin an error with."""
        return f"{self._name}[{node}]"
