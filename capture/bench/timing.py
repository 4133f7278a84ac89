"""The time of a call: CUDA-graph replays between CUDA events, after the clocks have settled."""

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onerank.capture.profiling.clock import Stopwatch

_REPLAY_NS = 400_000
"""A replay holds so many calls that it lasts this long, but at most `_MAX_CALLS`."""
_MAX_CALLS = 256

_MAX_QUEUED = 512  # the driver's queue holds about a thousand launches

# A GPU may wait for the host between calls shorter than this. They are queued behind a kernel that
# waits _WAIT_CYCLES per call, about 10 us: longer than the host takes to launch one.
_HOST_NS = 10_000
_WAIT_CYCLES = 20_000

_SETTLE_S = 0.02
"""Replays before the first sample, while the clocks settle."""

# Sampling ends after _SAMPLING_S with _SAMPLES samples, or after _LONG_S with _MIN_SAMPLES.
_SAMPLING_S, _SAMPLES = 0.025, 20
_LONG_S, _MIN_SAMPLES = 0.3, 5

_REPLAYS_AT_ONCE = 8
_REPLAYS_AHEAD = 4

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call in ns: median, 10th and 90th percentile of the samples, and their number."""

    median_ns: int
    p10_ns: int
    p90_ns: int
    samples: int


class Replays:
    """Calls that run repeatedly with nothing between them.

    On a GPU they are replays of a CUDA graph; a CPU makes them one after another.

    Args:
        calls: one function for each copy of the operands; they take turns.
        on_gpu: whether they run on the current CUDA device.
        queued: whether to queue the calls behind a waiting kernel instead of making a graph.
            Copies by the driver need it: a copy of 512 MiB took 392 us in a graph and 254 us
            outside of one on an H200.
    """

    def __init__(self, calls: Calls, *, on_gpu: bool, queued: bool = False) -> None:
        self._calls = calls
        self._queued = queued and on_gpu
        self._on_gpu = on_gpu
        self._watch = Stopwatch(on_gpu=on_gpu)
        self.made = len(calls)
        self._at_once = 1
        self._host_bound = True
        self._replay = self._recorded(self.made)
        call_ns = max(1, min(self._timed_ns(2)))
        self._at_once = max(1, min(_REPLAYS_AT_ONCE, 8 * _REPLAY_NS // (call_ns * len(calls))))
        self._host_bound = self._queued or call_ns < _HOST_NS
        rounds = _REPLAY_NS // (call_ns * len(calls))
        rounds = min(rounds, max(1, _MAX_CALLS // len(calls)))
        if rounds > 1:
            self.made = rounds * len(calls)
            self._replay = self._recorded(self.made)

    def timing(self) -> Timing:
        """Return the time of a call, after the clocks settled under it."""
        begin = time.monotonic()
        while time.monotonic() < begin + _SETTLE_S:
            self._timed_ns(self._at_once)
        samples: list[int] = []
        begin = time.monotonic()
        while (spent := time.monotonic() - begin) < _SAMPLING_S or (
            len(samples) < (_SAMPLES if spent < _LONG_S else _MIN_SAMPLES)
        ):
            samples += self._timed_ns(self._at_once)
        return summary(samples)

    def sustain(self, seconds: float) -> Timing:
        """Run without a pause for `seconds`; return the time of a call in the second half."""
        # Replays are queued before the previous ones end: a GPU that waits for its host between
        # small calls draws the power of an idle one.
        begin = time.monotonic()
        marks: deque[Any] = deque([self._watch.mark()])
        samples: list[tuple[float, int]] = []
        while (now := time.monotonic()) < begin + seconds or len(samples) < _MIN_SAMPLES:
            self._replay()
            marks.append(self._watch.mark())
            if len(marks) > _REPLAYS_AHEAD:
                oldest = marks.popleft()
                self._watch.wait(marks[0])
                samples.append((now, self._watch.between(oldest, marks[0])))
        if self._on_gpu:
            torch.cuda.synchronize()
        settled_samples = [ns for when, ns in samples if when >= begin + seconds / 2]
        times = settled_samples or [ns for _, ns in samples]
        return summary([max(1, round(time / self.made)) for time in times])

    def _recorded(self, count: int) -> Callable[[], None]:
        """Return a function that makes `count` calls: the replay of a graph, or a loop."""
        turns = [self._calls[at % len(self._calls)] for at in range(count)]

        def make() -> None:
            for turn in turns:
                turn()

        if not self._on_gpu or self._queued:
            return make
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_recording_stream(torch.cuda.current_device())):
            # Libraries set up per-stream state on first use; that must not enter the graph.
            turns[0]()
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                make()
            finally:
                graph.capture_end()
        return graph.replay

    def _timed_ns(self, count: int) -> list[int]:
        """Return the mean time of a call in each of `count` consecutive replays, in ns."""
        if self._queued:
            count = max(1, min(count, _MAX_QUEUED // self.made))
        if self._on_gpu and self._host_bound:
            wait: Any = torch.cuda._sleep  # pyright: ignore[reportPrivateUsage]
            wait(_WAIT_CYCLES * self.made * count)
        marks = [self._watch.mark()]
        for _ in range(count):
            self._replay()
            marks.append(self._watch.mark())
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = itertools.pairwise(marks)
        return [max(1, round(self._watch.between(a, b) / self.made)) for a, b in pairs]


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def summary(samples: Sequence[int]) -> Timing:
    """Return median and percentiles of samples in ns."""
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0], 1)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    median = round(statistics.median(samples))
    return Timing(median, min(median, round(tenths[0])), max(median, round(tenths[-1])),
                  len(samples))  # fmt: skip
