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
from onerank.capture.profiling.resident_tensors import holdings, sizes_of
from onerank.capture.profiling.window_plan import Observed
from onerank.converters.sources.kineto import History, history_name

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
        """Count while the context lasts."""
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)


class StepMemory:
    """Tells in `observed` what is held; keeps the allocator's history of each profiled step.

    A profiler changes how long memory lingers and how much is reserved: both are of the steps
    before it came.
    """

    def __init__(self, observed: Observed, directory: Path) -> None:
        self._observed = observed
        self._directory = directory
        self._pools = Pools()
        self._reserved_bytes = 0
        self._unprofiled: History | None = None

    @contextlib.contextmanager
    def unprofiled(self) -> Generator[StepsHistory | None]:
        """Record the steps inside, the last of which tells how long memory lingers."""
        with steps_recorded(on_gpu=self._observed.on_gpu) as history:
            yield history
            last = history.last() if history is not None else None
        if last is not None:
            self._unprofiled = history_of(NOTHING, last, torch.cuda.current_device(), self._pools)

    def note_reserved(self) -> None:
        """Take the most bytes that the allocator has reserved so far."""
        if self._observed.on_gpu:
            self._reserved_bytes = torch.cuda.max_memory_reserved()

    def at_start(self, history: StepHistory) -> int:
        """Tell what is held as a step begins; return the bytes."""
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
        """Write what the allocator did in a profiled step, if it was recorded."""
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
        """Note that the peaks of the profiled steps differ, if they do."""
        peaks = self._observed.peak_memory_bytes
        if len(set(peaks)) > 1:
            self._observed.notes.append(
                f"peak memory differs between profiled steps, from {min(peaks)} to {max(peaks)} "
                "bytes; the graph records the largest"
            )
