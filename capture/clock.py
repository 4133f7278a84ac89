"""Time steps without a profiler: CUDA events on a GPU, the monotonic clock on a CPU."""

import time
from typing import Any

import torch


class StepClock:
    """Marks step boundaries; never waits for the GPU until the durations are read."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark a boundary on the current stream."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter_ns())

    def durations_ns(self) -> tuple[int, ...]:
        """Return the time between each two marks, in nanoseconds."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if not self._on_gpu:
            return tuple(after - before for before, after in pairs)
        torch.cuda.synchronize()
        return tuple(round(before.elapsed_time(after) * 1e6) for before, after in pairs)
