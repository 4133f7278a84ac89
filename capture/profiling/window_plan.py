"""How many steps each measurement window of a capture takes.

This module does not import torch: the command line reads the options from it to print help.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from onerank.option_fields import option

MODULES = HOST = 3
"""Steps of the module and host windows: three is the least whose median is not an extreme."""

Progress = Callable[[str], None]

StepChoice = int | Literal["prefill", "decode", "draft", "verify"]
"""A step of a script that infers: the first of a kind, or a forward by number."""


_STEPS: Any = {"heading": "How a step is measured", "minimum": 1, "show_default": True}


@dataclass(frozen=True)
class WindowPlan:
    """How many steps each window takes; the fields with help are options of `capture run`.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        timed_steps: steps timed without a profiler.
        repeat: profiled steps.
        optimizer_steps: steps of the script's first optimizer per captured step.
        settle: whether to take more steps until their durations agree and the structure step
            does the work of the profiled one; False for ranks of a real job, each of which
            would stop at a different step.
    """

    warm_up: int = option(
        "Steps before anything is measured; on a GPU at least, until times settle.",
        default=3,
        **_STEPS,
    )
    timed_steps: int = option("Steps timed without a profiler: the step time.", default=5, **_STEPS)
    repeat: int = option(
        "Profiled steps; each node gets the median of its durations, and their spread.",
        default=1,
        **_STEPS,
    )
    optimizer_steps: int = option(
        "Steps of the first optimizer that make one step.", default=1, **_STEPS
    )
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps that all windows take together, with one that warms up the profiler."""
        return self.warm_up + self.timed_steps + MODULES + 1 + self.repeat + 1


def more_steps(plan: WindowPlan, *counts: str) -> str:
    """Return the advice for a script that ended before its capture was complete.

    Args:
        plan: steps of each window.
        counts: fields that the number of needed steps grows with. Those at their minimum of one
            step are not named.
    """
    options = [
        f"--{spec.name.replace('_', '-')}"
        for spec in fields(plan)
        if spec.name in counts and getattr(plan, spec.name) > 1
    ]
    lower = f", or lower {', '.join(options)}" if options else ""
    return f"let the script take more steps{lower}"
