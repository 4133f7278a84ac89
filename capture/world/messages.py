"""What ranks send to one another by value: objects, and small tensors of integers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

STEPS = 2
"""Steps whose messages are found; the last one's are repeated."""

Address = int | tuple[int, int]
"""A rank; or for what all ranks of a group get, how many they are and the hash of their tuple."""


def group_address(ranks: tuple[int, ...]) -> Address:
    """Return the address of all ranks of a group, the same in every process."""
    return len(ranks), hash(ranks)


class Messages(Protocol):
    """Python objects that ranks send to one another, and the values of small integer tensors."""

    @property
    def heard(self) -> bool:
        """Whether what this process's rank sends is of use to anyone."""
        ...

    def send(self, to: Address, objects: list[Any]) -> None:
        """Note what this process's rank sends to a rank, or to all of a group."""
        ...

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return what rank `src` sends next to this process's rank, or to all of a group."""
        ...

    def skip(self, src: int, to: Address) -> None:
        """Take note that what rank `src` sends next to all of a group need not be known."""
        ...

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        ...


@dataclass(frozen=True)
class Wanted:
    """The message number `index` from a rank to an address, and the rank that waits for it."""

    src: int
    to: Address
    index: int
    waiting: int


Act = Callable[[int, Messages], None]
"""Runs the script as another rank, with messages of its own."""
