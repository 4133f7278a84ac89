"""Which backward passes of a step communicate: the last of each round of micro-batches.

Micro-batches of a round add to the same gradients. A round ends with the step, or where the script
clears what a backward has left, to compute gradients anew before it steps: sharpness-aware
minimisation takes two rounds a step (arXiv:2010.01412). The last of a round is the last forward
that a backward followed: evaluations that record gradients have none.

Steps repeat, so the rounds of two steps running are taken to be those of the next. Until they are
known, every backward communicates, which comes to the same sum.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from onerank.ir.errors import CaptureError


class Rounds:
    """The micro-batches of a model since its last step, and in the steps before."""

    def __init__(self) -> None:
        self._ends: list[bool] = []  # whether each forward is the last micro-batch of its round
        self._newest = -1  # the last of them that a backward followed
        self._last: list[bool] = []
        self._expected: list[bool] = []
        self._filled: list[nn.Parameter] = []

    @property
    def knows_next(self) -> bool:
        """Whether the steps before had as many micro-batches as this one with the next."""
        return len(self._ends) < len(self._expected)

    @property
    def within_step(self) -> bool:
        """Whether a micro-batch began since the last step."""
        return bool(self._ends)

    def begin_micro_batch(self) -> bool:
        """Return whether the backward of the forward that begins communicates."""
        if self._ends and self._filled and all(map(cleared, self._filled)):
            self._ends[self._newest] = True
            self._filled = []
        self._ends.append(False)
        number = len(self._ends) - 1
        return number >= len(self._expected) or self._expected[number]

    def end_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of a backward; see what has gradients, while the rounds are not known."""
        self._newest = len(self._ends) - 1
        if not self._expected:
            self._filled = [one for one in parameters if one.grad is not None]

    def refuse_fewer(self) -> None:
        """Raise where a step ends before the backward that was to communicate.

        Raises:
            CaptureError: it has fewer micro-batches than the steps before.
        """
        taken, known = len(self._ends), len(self._expected)
        if 0 < taken < known:
            raise CaptureError(
                f"a step of {taken} micro-batches followed steps of {known}: gradients are "
                "communicated in a step's last backward, which is known from the steps before. "
                "Let every step take as many micro-batches"
            )

    def end_step(self) -> None:
        """Learn from a step which rounds the next will have."""
        if not self._ends:
            return
        taken, known = len(self._ends), len(self._expected)
        self._ends[self._newest] = True
        if taken != known:
            self._expected = self._ends if self._ends == self._last else []
            self._last = [] if known else self._ends
        self._ends, self._newest, self._filled = [], -1, []


def cleared(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient is gone, or zero in every element of this rank."""
    if parameter.grad is None:
        return True
    local = getattr(parameter.grad, "to_local", None)
    gradient: Tensor = parameter.grad if local is None else local()
    return not gradient.any()
