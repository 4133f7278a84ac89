"""The windows of a capture: which steps of the script are watched, and how.

Each instrument disturbs what the next would see, so each has steps of its own: warm-up, pure
(nothing but a mark per step: step time), host (each step begins with an idle GPU, as the profiled
one does: what the host takes without a profiler), timed (marks at each layer and sub-module: their
times without a profiler), profiled (Kineto: times and memory, as often as asked for), alone (where
collectives hold the GPU: Kineto once more, without that), structure (Kineto and execution trace:
operators, shapes, record ids). Host time is never read from the structure window, whose observer
slows every operator tenfold.

A window is a generator: each `yield` lets the script take one step, and tells whether a GradScaler
skipped the optimizer's part of it. Such a step is no step of training: its window takes another.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import profile

from onerank.capture.clock import StepClock
from onerank.capture.history import StepsHistory, recorded
from onerank.capture.module_clock import ModuleClock
from onerank.capture.observed import Observed
from onerank.capture.profilers import execution_trace, kineto
from onerank.capture.scopes import Modules
from onerank.capture.sensors import SensorSampler
from onerank.capture.step_memory import StepMemory
from onerank.capture.unlike_steps import ModelCalls, note_of
from onerank.converters.kineto import ALONE, STRUCTURE, profile_name

PLAIN_EXECUTION_TRACE = "et.json"  # the observer writes no gzip

SETTLED_SPREAD = 0.02
MAX_WARM_UP_FACTOR = 4

TIMED = HOST = 3
"""Steps whose modules, or whose host, are timed: the least whose median is not an extreme."""

_UNLIKE_TRIES = 7
"""How many more steps the last window may see, until one does the work of the profiled one."""

Progress = Callable[[str], None]
Window = Generator[None, bool, None]
"""Yields once per step of the script; is sent whether the step was skipped."""


class Others(Protocol):
    """The ranks beside this one: absent, or really there."""

    @property
    def paced(self) -> bool:
        """Whether absent ones' collectives take the time of a network, or leave a marker."""
        ...

    @paced.setter
    def paced(self, on: bool) -> None: ...

    def meet(self) -> bool:
        """Wait until those that are there have called this, too; return whether they did."""
        ...


@dataclass(frozen=True)
class Plan:
    """How many steps each window takes.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        pure: steps timed without a profiler.
        repeat: profiled steps.
        optimizer_steps: steps of the script's first optimizer that make one step here.
        settle: whether to go on until the steps are even, or like another; ranks that communicate
            must not, since each would stop at a step of its own.
    """

    warm_up: int = 3
    pure: int = 5
    repeat: int = 1
    optimizer_steps: int = 1
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps the windows need: their own, and one that warms the profiler up."""
        return self.warm_up + self.pure + TIMED + 1 + self.repeat + 1


class Windows:
    """Walks through the windows; `boundary` is called after every step."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        modules: Modules,
        progress: Progress,
        others: Others | None = None,
    ) -> None:
        self.observed = Observed()
        self.steps = 0
        self.skipped = 0
        self.complete = False
        self._plan = plan
        self._directory = directory
        self._modules = modules
        self._progress = progress
        self._others = others
        self._memory = StepMemory(self.observed, directory)
        self._calls = ModelCalls(modules)
        self._profiled_calls = 0
        self._structured = False
        self._schedule = self._windows()
        self._allocated = _gpu_allocations()

    def boundary(self, *, skipped: bool = False) -> None:
        """End a step of the script and begin the next; sets `complete` after the last.

        Args:
            skipped: whether a GradScaler left the optimizer's step out.
        """
        begun = self.steps > 0
        self.steps += 1
        self.skipped += skipped
        self._calls.end_step()
        try:
            if begun:
                self._schedule.send(skipped)
            else:
                next(self._schedule)
        except StopIteration:
            self._end()

    @property
    def optimizer_steps(self) -> int:
        """Steps of the script's first optimizer that make one."""
        return self._plan.optimizer_steps

    @property
    def least_steps(self) -> int:
        """Steps of the optimizer that the script must take for the windows to complete."""
        steps = self._plan.least_steps
        if self.observed.on_gpu:
            paced = self._others is not None and self._others.paced
            steps += HOST + (2 if paced else 0)
        return steps * self.optimizer_steps

    def close(self) -> None:
        """Leave a window that the script ended in, the last one with what it has."""
        self._schedule.close()
        if self._structured and not self.complete:
            self._end()

    def _end(self) -> None:
        self.complete = True
        each = self._calls.by_step
        if unlike := note_of(each, self._profiled_calls, self._plan.optimizer_steps):
            self.observed.notes.append(unlike)
        if self.skipped:
            self.observed.notes.append(
                f"{self.skipped} of {self.steps} steps were skipped by a GradScaler, which "
                "found gradients infinite: none of them is part of what was measured"
            )

    def _windows(self) -> Window:
        """Walk through the windows; the script took its first step before the start."""
        self.observed.on_gpu = _gpu_allocations() > self._allocated
        yield from self._warm_up()
        yield from self._pure()
        if self.observed.on_gpu:
            yield from self._host()
        yield from self._timed()
        yield from self._profiler_warm_up()
        for number in range(self._plan.repeat):
            yield from self._profiled(number)
        self._memory.compare_peaks()
        if self.observed.on_gpu and self._others is not None and self._others.paced:
            yield from self._alone(self._others)
        yield from self._structure()

    def _warm_up(self) -> Window:
        with self._memory.unprofiled() as history:
            yield from self._until_settled(history)

    def _until_settled(self, history: StepsHistory | None) -> Window:
        settles = self.observed.on_gpu and self._plan.settle
        limit = self._plan.warm_up * (MAX_WARM_UP_FACTOR if settles else 1)
        clock = StepClock(on_gpu=self.observed.on_gpu)
        clock.mark()
        for step in range(2, limit + 1):
            last = clock.durations_ns()[-3:] if self.observed.on_gpu else ()
            if step > self._plan.warm_up and len(last) == 3 and _spread(last) < SETTLED_SPREAD:
                return
            self._progress(f"warm-up, step {step} of {limit}")
            if history is not None:
                history.begin()
            skipped = yield
            clock.mark(counts=not skipped)
        last = clock.durations_ns()[-3:]
        if len(last) == 3 and _spread(last) >= SETTLED_SPREAD:
            self.observed.notes.append(
                f"the last three warm-up steps still differed by {_spread(last):.1%}"
            )

    def _pure(self) -> Window:
        clock = StepClock(on_gpu=self.observed.on_gpu)
        sampler = SensorSampler()
        with sampler.sampling() if self.observed.on_gpu else contextlib.nullcontext():
            yield from self._steps("pure", self._plan.pure, clock)
            self.observed.step_ns = clock.durations_ns()
        self._memory.note_reserved()
        self.observed.sensors = sampler.result()
        if sampler.missing:
            self.observed.notes.append(sampler.missing)

    def _host(self) -> Window:
        while (taken := len(self.observed.host_step_ns)) < HOST:
            self._progress(f"host alone, step {taken + 1} of {HOST}")
            torch.cuda.synchronize()
            begun = time.perf_counter_ns()
            skipped = yield
            if not skipped:
                self.observed.host_step_ns.append(time.perf_counter_ns() - begun)

    def _timed(self) -> Window:
        clock = StepClock(on_gpu=self.observed.on_gpu)
        modules = ModuleClock(self._modules, on_gpu=self.observed.on_gpu)
        with modules.running():
            yield from self._steps("timed by module", TIMED, clock, modules)
        self.observed.timed_step_ns = clock.durations_ns()
        self.observed.scopes = modules.times()

    def _steps(
        self, what: str, count: int, clock: StepClock, modules: ModuleClock | None = None
    ) -> Window:
        """Let the script take `count` steps that count, with a mark before and after each."""
        clock.mark()
        taken = 0
        while taken < count:
            self._progress(f"{what}, step {taken + 1} of {count}")
            skipped = yield
            clock.mark(counts=not skipped)
            if modules is not None:
                modules.end_step(counts=not skipped)
            taken += not skipped

    def _profiler_warm_up(self) -> Window:
        self._progress("profiler warm-up")
        with self._kineto(record_shapes=False):
            yield

    def _profiled(self, number: int) -> Window:
        skipped = True
        while skipped:
            of = f" {number + 1} of {self._plan.repeat}" if self._plan.repeat > 1 else ""
            self._progress(f"profiled step{of}: times and memory")
            on_gpu = self.observed.on_gpu
            clock = StepClock(on_gpu=on_gpu)
            with self._kineto(record_shapes=False) as profiler, recorded(on_gpu=on_gpu) as history:
                start = self._memory.at_start(history)
                self._meet()
                clock.mark()
                begun = time.perf_counter_ns()
                skipped = yield
                host_ns = time.perf_counter_ns() - begun
                clock.mark()
                step_ns = clock.durations_ns()[0]
                peak = self._memory.peak()
                history.end()
            if not skipped:
                self._profiled_calls = self._calls.by_step[-1]
                self.observed.start_memory_bytes.append(start)
                self.observed.peak_memory_bytes.append(peak)
                self.observed.profiled_step_ns.append(step_ns)
                self.observed.profiled_host_ns.append(host_ns)
                profiler.export_chrome_trace(str(self._directory / profile_name(number)))
                self._memory.keep(history, number)

    def _alone(self, others: Others) -> Window:
        """Profile a step in which collectives leave markers alone, after one to settle in."""
        self._progress("profiled step: kernels with no communication beside them")
        others.paced = False
        try:
            yield
            skipped = True
            while skipped:
                with self._kineto(record_shapes=False) as profiler:
                    skipped = yield
                if not skipped:
                    profiler.export_chrome_trace(str(self._directory / ALONE))
        finally:
            others.paced = True

    def _structure(self) -> Window:
        """Take the structure of a step that does the work of the profiled one.

        Each try is kept until a later one has ended: the script may end before that.
        """
        begun = self._directory / f"begun.{PLAIN_EXECUTION_TRACE}"
        skipped, alike, tries = True, False, 0
        try:
            while skipped or (self._plan.settle and not alike and tries <= _UNLIKE_TRIES):
                tries += 1
                self._progress("structure step: operators and shapes")
                trace = execution_trace(begun)
                with trace as observer, self._kineto(record_shapes=True) as profiler:
                    observer.start()
                    skipped = yield
                    observer.stop()
                alike = self._calls.by_step[-1] == self._profiled_calls
                if not skipped:
                    profiler.export_chrome_trace(str(self._directory / STRUCTURE))
                    begun.replace(self._directory / PLAIN_EXECUTION_TRACE)
                    self._structured = True
        finally:
            begun.unlink(missing_ok=True)

    def _meet(self) -> None:
        """Begin with the other ranks: instruments take each another time to set up.

        A collective that waits for a late rank slows the kernels beside it meanwhile.
        """
        if self._others is not None and not self._others.meet():
            self.observed.notes.append(
                "a profiled step began before all ranks had come: where its collectives wait for "
                "them, the kernels beside are slower than in other steps"
            )

    def _kineto(self, *, record_shapes: bool) -> contextlib.AbstractContextManager[profile]:
        return kineto(self._modules, on_gpu=self.observed.on_gpu, record_shapes=record_shapes)


def _gpu_allocations() -> int:
    """Return how often this process has asked for memory of a GPU.

    A context alone tells nothing of the script: the process may have had it before.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    stats = map(torch.cuda.memory_stats, range(torch.cuda.device_count()))
    return sum(of_one.get("allocation.all.allocated", 0) for of_one in stats)


def _spread(durations_ns: tuple[int, ...]) -> float:
    return (max(durations_ns) - min(durations_ns)) / statistics.median(durations_ns)
