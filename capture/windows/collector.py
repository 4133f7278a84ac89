"""Memory that waits for Python's garbage collector: with it the peak is a matter of luck.

Tensors in reference cycles stay until the collector runs, which it does after so many objects made:
at other moments from step to step, and beside instruments.
"""

import contextlib
import gc
from collections.abc import Generator
from typing import Literal

import torch

_WORTH_TELLING = 0.01
"""Of the peak."""


class Collector:
    """What runs of the collector free in a step.

    Attributes:
        most_bytes: the most that one run freed since the step began.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._before = 0

    def begin_step(self) -> None:
        """Take note that a step begins."""
        self.most_bytes = 0

    def note(self, peak_bytes: int) -> str:
        """Return what to tell of the last step; "" of what is no part of the peak to speak of."""
        if self.most_bytes < _WORTH_TELLING * peak_bytes:
            return ""
        return (
            f"tensors wait in reference cycles for Python's garbage collector, which freed up to "
            f"{self.most_bytes} bytes at once: the peak of memory depends on when it runs, in the "
            "job as here, and may differ by as much from step to step"
        )

    def _called(self, phase: Literal["start", "stop"], _: object) -> None:
        held = torch.cuda.memory_allocated()
        if phase == "start":
            self._before = held
        self.most_bytes = max(self.most_bytes, self._before - held)

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Count while the context lasts."""
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)
