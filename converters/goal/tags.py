"""Tags: a number of its own for each step of each instance of each group."""

from collections import Counter

from onerank.converters.goal.decompose import Call, steps
from onerank.ir.errors import ExportError

_MOST = 2**32 - 1
"""Tags are 32 bits wide, and the highest means any."""

Ends = tuple[int, int, int, int]
"""Source, destination, tag as captured, bytes."""


class Tags:
    """Hands out tags, the same to all ranks that meet, and finds out who does not."""

    def __init__(self) -> None:
        self._next = 0
        self._calls: dict[tuple[tuple[int, ...], int], tuple[Call, int]] = {}
        self._left: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._messages: dict[tuple[Ends, int], int] = {}
        self._sent: Counter[Ends] = Counter()
        self._received: Counter[Ends] = Counter()

    def of_call(self, members: tuple[int, ...], instance: int, call: Call) -> int:
        """Return the tag of the first step of a group's call; that of step s is s more.

        Args:
            members: ranks of the group.
            instance: number of the call among those of the group.
            call: what is called.

        Raises:
            ExportError: another member calls something else.
        """
        key = members, instance
        if key not in self._calls:
            self._calls[key] = call, self._take(steps(call))
        known, tag = self._calls[key]
        if (known.collective, known.size_bytes) != (call.collective, call.size_bytes):
            raise ExportError(
                f"call {instance} of the ranks {list(members)} is {_named(known)} on one of them "
                f"and {_named(call)} on another: the traces are not of one job"
            )
        self._left[key] += 1
        return tag

    def of_message(self, ends: Ends, *, sends: bool) -> int:
        """Return the tag of the next such message of a rank."""
        seen = self._sent if sends else self._received
        key = ends, seen[ends]
        seen[ends] += 1
        if key not in self._messages:
            self._messages[key] = self._take(1)
        return self._messages[key]

    def check(self) -> None:
        """Check that all that is sent is received, and that groups are complete.

        Raises:
            ExportError: somebody would wait for ever.
        """
        for ends in self._sent | self._received:
            if self._sent[ends] != self._received[ends]:
                source, target, _, size = ends
                raise ExportError(
                    f"rank {source} sends {self._sent[ends]} messages of {size} bytes to rank "
                    f"{target}, which receives {self._received[ends]}: the traces are not of one "
                    "job, or leave out a stage"
                )
        for (members, instance), calls in self._left.items():
            if calls != len(members):
                known, _ = self._calls[members, instance]
                raise ExportError(
                    f"call {instance} of the ranks {list(members)}, {_named(known)}, is made by "
                    f"{calls} of them: the traces are not of one job"
                )

    def _take(self, count: int) -> int:
        first = self._next
        self._next += count
        if self._next > _MOST:
            raise ExportError(
                f"the job's communication takes over {_MOST} tags, the most GOAL's binary form "
                "holds: export fewer ranks or micro-batches"
            )
        return first


def _named(call: Call) -> str:
    return f"{call.collective.name} of {call.size_bytes} bytes"
