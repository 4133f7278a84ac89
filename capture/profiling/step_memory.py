"""Memory of the profiled steps, and the influence of Python's garbage collector on it.

Tensors in reference cycles live until the collector runs. It runs after a number of allocations of
Python objects, so at another point in each step and under each instrument. The peak would depend on
chance.
"""

import contextlib
import gc
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import msgspec
import torch

from onerank.capture.profiling.allocator_snapshots import (
    NOTHING,
    Pools,
    StepHistory,
    StepsHistory,
    held_in,
    history_of,
    is_complete,
    lingering_as,
    steps_recorded,
)
from onerank.capture.profiling.observations import Observed
from onerank.capture.profiling.resident_tensors import holdings, sizes_of
from onerank.converters.sources.kineto import History, history_name

_NOTED_SHARE = 0.01
"""Share of the peak memory below which collector runs get no note."""


class Collector:
    """Measures the memory that Python's garbage collector frees in a step.

    Attributes:
        most_bytes: the largest amount freed by one run since the step began.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._before = 0

    def begin_step(self) -> None:
        """Reset `most_bytes` at the begin of a step."""
        self.most_bytes = 0

    def note(self, peak_bytes: int) -> str:
        """Return a note on the last step; "" if the collector freed under 1% of the peak."""
        if self.most_bytes < _NOTED_SHARE * peak_bytes:
            return ""
        return (
            f"tensors in reference cycles wait for Python's garbage collector, which freed up to "
            f"{self.most_bytes} bytes at once: peak memory depends on when it runs, in the job as "
            "in this capture, and may differ by as much from step to step"
        )

    def _called(self, phase: Literal["start", "stop"], _: object) -> None:
        allocated = torch.cuda.memory_allocated()
        if phase == "start":
            self._before = allocated
        self.most_bytes = max(self.most_bytes, self._before - allocated)

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Measure collector runs while the context lasts."""
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)


class StepMemory:
    """Writes resident memory to `observed`, and the allocator history of each profiled step.

    A profiler changes how long freed memory lingers and how much memory is reserved, so both are
    taken from the steps before the profiler starts.
    """

    def __init__(self, observed: Observed, directory: Path) -> None:
        self._observed = observed
        self._directory = directory
        self._pools = Pools()
        self._reserved_bytes = 0
        self._unprofiled: History | None = None

    @contextlib.contextmanager
    def unprofiled(self) -> Generator[StepsHistory | None]:
        """Record the steps inside; the last one gives how long freed memory lingers."""
        with steps_recorded(on_gpu=self._observed.on_gpu) as history:
            yield history
            last = history.last() if history is not None else None
        if last is not None:
            self._unprofiled = history_of(NOTHING, last, torch.cuda.current_device(), self._pools)

    def note_reserved(self) -> None:
        """Store the peak of the allocator's reserved memory so far."""
        if self._observed.on_gpu:
            self._reserved_bytes = torch.cuda.max_memory_reserved()

    def at_start(self, history: StepHistory) -> int:
        """Write the memory resident at the begin of a step to `observed`; return its bytes."""
        storages = holdings("cuda" if self._observed.on_gpu else "cpu")
        self._observed.resident_bytes = sizes_of(storages)
        if not self._observed.on_gpu:
            return sum(sum(sizes) for sizes in self._observed.resident_bytes.values())
        if history.before is not None:
            device = torch.cuda.current_device()
            sizes_and_pools = held_in(history.before, device, storages, self._pools)
            self._observed.resident_bytes, self._observed.resident_pools = sizes_and_pools
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes allocated since the step began; 0 on a CPU, which reports none."""
        return torch.cuda.max_memory_allocated() if self._observed.on_gpu else 0

    def keep(self, history: StepHistory, number: int) -> None:
        """Write the allocator history of a profiled step, if one was recorded."""
        if history.before is None or history.after is None:
            return
        device = torch.cuda.current_device()
        snapshots = history.before, history.after
        if not is_complete(*snapshots, device):
            self._observed.notes.append(
                f"profiled step {number + 1}: the memory history that the script records is "
                "incomplete for this step, so the streams of its blocks are not known"
            )
            return
        recorded_history = history_of(*snapshots, device, self._pools, self._reserved_bytes)
        if self._unprofiled is not None:
            recorded_history = lingering_as(recorded_history, self._unprofiled)
        if not recorded_history.lingers and recorded_history.action:
            self._observed.notes.append(
                f"profiled step {number + 1}: how long memory lingers without a profiler is not "
                "known; it is taken as under the profiler"
            )
        (self._directory / history_name(number)).write_bytes(msgspec.json.encode(recorded_history))

    def compare_peaks(self) -> None:
        """Add a note if the peaks of the profiled steps differ."""
        peaks = self._observed.peak_memory_bytes
        if len(set(peaks)) > 1:
            self._observed.notes.append(
                f"peak memory differs between profiled steps, from {min(peaks)} to {max(peaks)} "
                "bytes; the graph records the largest"
            )
