"""The plan of a capture's windows, and what each of them is given."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onerank.capture.windows.observed import Observed
from onerank.capture.windows.scopes import Modules

TIMED = HOST = 3
"""Steps whose modules, or whose host, are timed: the least whose median is not an extreme."""

Progress = Callable[[str], None]
Window = Generator[None, bool, None]
"""Yields once per step of the script; is sent whether the step was skipped."""


class Others(Protocol):
    """The ranks beside this one: absent, or really there."""

    @property
    def paced(self) -> bool:
        """Whether absent ones' collectives take the time of a network, or leave a marker."""
        ...

    @paced.setter
    def paced(self, on: bool) -> None: ...

    @property
    def communicated(self) -> int:
        """Communication calls so far; 0 where nobody counts them."""
        ...

    def meet(self) -> bool:
        """Wait until those that are there have called this, too; return whether they did."""
        ...


@dataclass(frozen=True)
class Plan:
    """How many steps each window takes.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        pure: steps timed without a profiler.
        repeat: profiled steps.
        optimizer_steps: steps of the script's first optimizer that make one step here.
        settle: whether to go on until the steps are even, or like another; ranks that communicate
            must not, since each would stop at a step of its own.
    """

    warm_up: int = 3
    pure: int = 5
    repeat: int = 1
    optimizer_steps: int = 1
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps the windows need: their own, and one that warms the profiler up."""
        return self.warm_up + self.pure + TIMED + 1 + self.repeat + 1


@dataclass(frozen=True)
class Watch:
    """What the windows of one capture have in common.

    Attributes:
        plan: how many steps each takes.
        directory: where they write their traces.
        modules: what the script calls.
        progress: told in a few words what goes on.
        observed: what they see.
    """

    plan: Plan
    directory: Path
    modules: Modules
    progress: Progress
    observed: Observed
