"""How many steps each measurement window of a capture takes."""

from collections.abc import Callable
from dataclasses import dataclass

TIMED = HOST = 3

"""Steps of the module and host windows: three is the least whose median is not an extreme."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class WindowPlan:
    """How many steps each window takes.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        pure: steps timed without a profiler.
        repeat: profiled steps.
        optimizer_steps: steps of the script's first optimizer per captured step.
        settle: whether to take more steps until their durations agree and the structure step
            does the work of the profiled one; False for ranks of a real job, each of which
            would stop at a different step.
    """

    warm_up: int = 3
    pure: int = 5
    repeat: int = 1
    optimizer_steps: int = 1
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps that all windows take together, with one that warms up the profiler."""
        return self.warm_up + self.pure + TIMED + 1 + self.repeat + 1
