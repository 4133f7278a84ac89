"""Measure a call: the kernels it launches, from torch's profiler, and its time.

The time is that of CUDA-graph replays between CUDA events, after the clocks have settled. A
profiler would add host time to short calls.
"""

import bisect
import functools
import itertools
import random
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from onerank.capture.bench.bench_call import BenchCall
from onerank.capture.profiling.profiled_windows import unparsed
from onerank.capture.profiling.step_timers import Stopwatch

_LABEL = "onerank::bench::"

# A captured step contains profiled times, so predictions use the profiled time of a call. One
# repetition would carry the noise of one launch.
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Launched:
    """The GPU operations that one call launched.

    Attributes:
        names: names of the kernels, copies and fills, in order of launch.
        times_ns: median time of each.
        inside: the innermost operator that launched each.
    """

    names: tuple[str, ...]
    times_ns: tuple[int, ...]
    inside: tuple[str, ...]


def launched(
    calls: Sequence[Callable[[], Any]],
    op: Sequence[str],
    *,
    on_gpu: bool,
    flush: Callable[[], Any],
) -> list[tuple[Launched, Launched]]:
    """Return what each call launches with a cold and with a warm cache.

    On a CPU, which launches nothing, a call's operator counts as its kernel.

    Args:
        calls: functions that have run once. Each runs `REPEATS` times after a flush of the cache,
            and each time once more with the cache that this run left.
        op: operator of each call.
        on_gpu: whether they run on a CUDA device.
        flush: evicts the cache.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    recorded = profile(activities=activities, acc_events=True)
    with unparsed(recorded):
        # After a call at the power limit the clock is low for a while. In one order a call would
        # follow the same one each time: 94 calls of attention on two H200s agree within 7%, in
        # another order within 17% (benchmarks/results/2026-11-28-profiled-order-h200.txt).
        for repeat in range(REPEATS):
            for number in random.Random(repeat).sample(range(len(calls)), len(calls)):
                call = calls[number]
                for cold in (True, False):
                    # Within the profile and outside of the label: the copy that flushes the cache
                    # is no kernel of the call.
                    if cold:
                        flush()
                    with record_function(f"{_LABEL}{2 * number + (not cold)}"):
                        call()
                    if on_gpu:
                        torch.cuda.synchronize()
    results: Any = recorded.profiler
    events = list(results.kineto_results.events())
    runs = _device(events) if on_gpu else _host(events, op)
    return [
        (_merged(runs.get(2 * number, [])), _merged(runs.get(2 * number + 1, [])))
        for number in range(len(calls))
    ]


# (kernel, ns, operator) of one repetition, in the order of launch.
_Run = list[tuple[str, int, str]]


def _device(events: list[Any]) -> dict[int, list[_Run]]:
    """Return what each repetition of each label launched, by the launches' correlation."""
    labels, operators, launches = [], [], []
    kernels: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            # The profiler reports a label once more, as a range on the GPU.
            if not name.startswith(_LABEL):
                kernels[event.correlation_id()].append(event)
        elif name.startswith(_LABEL):
            labels.append(event)
        elif name.startswith(("cuda", "cu", "hip")) and "::" not in name:
            launches.append(event)
        elif "::" in name:
            operators.append(event)
    launches.sort(key=_start)
    operators.sort(key=_start)
    runs: dict[int, list[_Run]] = defaultdict(list)
    for label in sorted(labels, key=_start):
        begin = label.start_ns()
        end = begin + label.duration_ns()
        inside = _between(operators, begin, end)
        runs[int(label.name()[len(_LABEL) :])].append(
            [
                (kernel.name(), kernel.duration_ns(), _innermost(inside, launch.start_ns()))
                for launch in _between(launches, begin, end)
                for kernel in kernels.get(launch.correlation_id(), [])
            ]
        )
    return runs


def _between(events: list[Any], begin: int, end: int) -> list[Any]:
    """Return the events, ordered by start, that begin between two times in ns."""
    first = bisect.bisect_left(events, begin, key=_start)
    return events[first : bisect.bisect_right(events, end, key=_start)]


def _start(event: Any) -> int:
    return event.start_ns()


def _innermost(operators: Sequence[Any], when: int) -> str:
    """Return the name of the operator that began last among those that run at `when`, in ns."""
    running = (
        operator.name()
        for operator in reversed(operators)
        if operator.start_ns() <= when <= operator.start_ns() + operator.duration_ns()
    )
    return next(running, "")


def _host(events: list[Any], op: Sequence[str]) -> dict[int, list[_Run]]:
    runs: dict[int, list[_Run]] = defaultdict(list)
    for event in events:
        if event.name().startswith(_LABEL):
            number = int(event.name()[len(_LABEL) :])
            name = op[number // 2]
            runs[number].append([(name, max(1, event.duration_ns()), name)])
    return runs


def _merged(runs: list[_Run]) -> Launched:
    """Return the median over the repetitions that launch what the last one launches."""
    if not runs or not runs[-1]:
        return Launched((), (), ())
    names = tuple(name for name, _, _ in runs[-1])
    equal_runs = [run for run in runs if tuple(name for name, _, _ in run) == names]
    times = tuple(
        max(1, round(statistics.median(times)))
        for times in zip(*([ns for _, ns, _ in run] for run in equal_runs), strict=True)
    )
    return Launched(names, times, tuple(inner for _, _, inner in runs[-1]))


# A replay contains so many calls that it lasts this long, but at most `_MAX_CALLS`.
_REPLAY_NS = 400_000
_MAX_CALLS = 256

_MAX_QUEUED = 512  # the driver's queue holds about a thousand launches

# A GPU may wait for the host between calls shorter than this. They are queued behind a kernel that
# waits _WAIT_CYCLES per call, about 10 us: longer than the host takes to launch one.
_HOST_NS = 10_000
_WAIT_CYCLES = 20_000

# Replays before the first sample, while the clocks settle.
_SETTLE_S = 0.02

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

    On a GPU they are replays of a CUDA graph; a CPU runs them one after another.

    Args:
        calls: one function for each copy of the operands; they take turns.
        on_gpu: whether they run on the current CUDA device.
        queued: whether to queue the calls behind a waiting kernel instead of making a graph.
            Copies by the driver need it: a copy of 512 MiB took 392 us in a graph and 254 us
            outside of one on an H200.

    Attributes:
        calls_per_replay: calls in one replay.
    """

    def __init__(self, calls: Calls, *, on_gpu: bool, queued: bool = False) -> None:
        self._calls = calls
        self._queued = queued and on_gpu
        self._on_gpu = on_gpu
        self._watch = Stopwatch(on_gpu=on_gpu)
        self.calls_per_replay = len(calls)
        self._at_once = 1
        self._host_bound = True
        self._replay = self._recorded(self.calls_per_replay)
        call_ns = max(1, min(self._timed_ns(2)))
        self._at_once = max(1, min(_REPLAYS_AT_ONCE, 8 * _REPLAY_NS // (call_ns * len(calls))))
        self._host_bound = self._queued or call_ns < _HOST_NS
        rounds = _REPLAY_NS // (call_ns * len(calls))
        rounds = min(rounds, max(1, _MAX_CALLS // len(calls)))
        if rounds > 1:
            self.calls_per_replay = rounds * len(calls)
            self._replay = self._recorded(self.calls_per_replay)

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
        return timing_of(samples)

    def sustain(self, seconds: float) -> Timing:
        """Run without a pause for `seconds`; return the time of a call in the second half."""
        # Replays are queued before the previous ones end: a GPU that waits for its host between
        # small calls draws less power than one that computes without a pause.
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
        return timing_of([max(1, round(time / self.calls_per_replay)) for time in times])

    def _recorded(self, count: int) -> Callable[[], None]:
        """Return a function that runs `count` calls: the replay of a graph, or a loop."""
        turns = [self._calls[at % len(self._calls)] for at in range(count)]

        def run_all() -> None:
            for call in turns:
                call()

        if not self._on_gpu or self._queued:
            return run_all
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_recording_stream(torch.cuda.current_device())):
            # Libraries set up per-stream state on first use; that must not enter the graph.
            turns[0]()
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                run_all()
            finally:
                graph.capture_end()
        return graph.replay

    def _timed_ns(self, count: int) -> list[int]:
        """Return the mean time of a call in each of `count` consecutive replays, in ns."""
        if self._queued:
            count = max(1, min(count, _MAX_QUEUED // self.calls_per_replay))
        if self._on_gpu and self._host_bound:
            wait: Any = torch.cuda._sleep
            wait(_WAIT_CYCLES * self.calls_per_replay * count)
        marks = [self._watch.mark()]
        for _ in range(count):
            self._replay()
            marks.append(self._watch.mark())
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = itertools.pairwise(marks)
        return [max(1, round(self._watch.between(a, b) / self.calls_per_replay)) for a, b in pairs]


# CUDA captures no graph on the default stream. All graphs share one stream, because cuBLAS keeps a
# workspace per stream.
@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def timing_of(samples: Sequence[int]) -> Timing:
    """Return median and percentiles of samples in ns."""
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0], 1)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    median = round(statistics.median(samples))
    return Timing(median, min(median, round(tenths[0])), max(median, round(tenths[-1])),
                  len(samples))  # fmt: skip


Cache = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a call.

    Attributes:
        call: the call, with its layout.
        launched: the kernels it launched.
        timing: time of the call.
        l2: whether its operands were in the last-level cache.
        sm_clock_mhz: median during a sustained run; otherwise read right after the replays.
        temperature_c: temperature right after the replays.
        power_w: power of the board during a sustained run; otherwise None.
        date: end of the measurement, UTC.
    """

    call: BenchCall
    launched: Launched
    timing: Timing
    l2: Cache
    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    date: str


NO_TIME = "no time was left"


@dataclass(slots=True)
class Account:
    """Counts of the requested calls by outcome.

    Attributes:
        requested: number of calls to measure.
        done: measured calls.
        other_kernels: operator -> calls that launched other kernels than in the trace, in every
            layout.
        failed: reason -> calls that could not be measured.
        inner: "outer > inner" -> calls of an outer operator whose kernels an inner one launches.
        untried: reason -> calls that were not tried, or not finished.
    """

    requested: int = 0
    done: int = 0
    other_kernels: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    inner: Counter[str] = field(default_factory=Counter[str])
    untried: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: "Account") -> None:
        """Add the finished calls of another account; `requested` and `untried` stay."""
        self.done += other.done
        self.other_kernels.update(other.other_kernels)
        self.failed.update(other.failed)
        self.inner.update(other.inner)
