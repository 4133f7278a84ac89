"""Time without a profiler: CUDA events on a GPU, the monotonic clock on a CPU."""

import time
from typing import Any

import torch


class Stopwatch:
    """Marks points in time; marking never waits for the GPU.

    Args:
        on_gpu: whether to mark with CUDA events on the current stream or with the host's clock.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def mark(self) -> Any:
        """Return a mark of the current point in time."""
        if not self.on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Block until a mark is reached."""
        if self.on_gpu:
            mark.synchronize()

    def between(self, before: Any, after: Any) -> int:
        """Return the nanoseconds between two marks; the GPU must have reached both."""
        return round(before.elapsed_time(after) * 1e6) if self.on_gpu else after - before


class StepClock:
    """Measures step durations from marks between steps."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._watch = Stopwatch(on_gpu=on_gpu)
        self._marks: list[Any] = []
        self._counts: list[bool] = []

    def mark(self, *, counts: bool = True) -> None:
        """Mark the boundary of two steps; `counts` says whether to keep the one that ends."""
        self._marks.append(self._watch.mark())
        self._counts.append(counts)

    def durations_ns(self) -> tuple[int, ...]:
        """Return the durations, in nanoseconds, of the steps marked with `counts`."""
        if self._watch.on_gpu:
            torch.cuda.synchronize()
        steps = zip(self._marks, self._marks[1:], self._counts[1:], strict=False)
        return tuple(
            self._watch.between(before, after) for before, after, counts in steps if counts
        )
