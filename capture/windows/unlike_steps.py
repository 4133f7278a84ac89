"""Steps that do unlike work: of critics and generators, of rollouts and updates.

A step goes from one step() of the script's first optimizer to the next. Where that is not what the
script repeats, the numbers of models it calls in each tell so.
"""

import itertools
from collections.abc import Sequence

from onerank.capture.windows.scopes import Modules


class ModelCalls:
    """How often the steps of a script call models."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._at_ends: list[int] = []

    def end_step(self) -> None:
        """Take note that a step ends."""
        self._at_ends.append(self._modules.calls)

    @property
    def by_step(self) -> list[int]:
        """Calls in each step but the first, which also sets up."""
        return [end - begin for begin, end in itertools.pairwise(self._at_ends)]


def period_of(calls: Sequence[int]) -> int | None:
    """Return after how many steps `calls`, of each step one number, repeat; None if not seen."""
    for period in range(1, len(calls) // 2 + 1):
        if all(one == later for one, later in zip(calls, calls[period:], strict=False)):
            return period
    return None


def note_of(calls: Sequence[int], profiled: int, optimizer_steps: int) -> str:
    """Return what to tell of steps that call models unlike often, "" if they are alike.

    Args:
        calls: calls of models in each step.
        profiled: those of the step that the graph has.
        optimizer_steps: steps of the optimizer that are one step of the capture.
    """
    if len(set(calls)) < 2:
        return ""
    period = period_of(calls)
    what = "one step" if optimizer_steps == 1 else f"{optimizer_steps} steps"
    again = (
        f"they repeat every {period}: --optimizer-steps {optimizer_steps * period} captures "
        "those as one"
        if period
        else "--optimizer-steps N captures N of the optimizer's as one"
    )
    return (
        f"steps do unlike work: they call models {min(calls)} to {max(calls)} times, the one in "
        f"this graph {profiled}. A step is {what} of the script's first optimizer; {again}"
    )
