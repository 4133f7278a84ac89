"""One rank's communication: what it issues, and what that waits for."""

from dataclasses import dataclass

from onerank.ir.check.contract import Call
from onerank.ir.check.structure import Dag

Channel = tuple[int, int, int, int]
"""What a send and its receive agree on: source, target, tag, bytes."""


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's file, reduced to its dependencies and its communication.

    Attributes:
        file: its name.
        dag: dependencies.
        calls: per node of `dag`, its communication; None for a node that completes at once.
        order: nodes as issued when nothing waits for another rank.
    """

    file: str
    dag: Dag
    calls: list[Call | None]
    order: list[int]

    def issued(self) -> list[Call]:
        """Return the communication in the order it is issued."""
        calls = (self.calls[node] for node in self.order)
        return [call for call in calls if call is not None]


def channel_of(call: Call) -> Channel:
    """Return the channel of a send or receive."""
    return call.source, call.target, call.tag, call.size


def group_text(name: str) -> str:
    """Return a group as a message names it."""
    return f"group {name}" if name else "the default group"
