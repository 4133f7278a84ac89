"""Windows without a profiler: warm-up, timed, host-timed and module-timed steps."""

import contextlib
import statistics
import time
from collections.abc import Generator

import torch

from onerank.capture.profiling.allocator_snapshots import StepsHistory
from onerank.capture.profiling.clock import StepClock
from onerank.capture.profiling.module_clock import ModuleClock
from onerank.capture.profiling.nvml import SensorSampler
from onerank.capture.profiling.observations import Watch, Window
from onerank.capture.profiling.step_memory import Collector, StepMemory
from onerank.capture.profiling.step_variance import Work
from onerank.capture.profiling.window_plan import HOST, TIMED

SETTLED_SPREAD = 0.02
MAX_WARM_UP_FACTOR = 4


class UnprofiledWindows:
    """Write times of steps, of their modules and of the host to `observed`."""

    def __init__(self, watch: Watch, memory: StepMemory) -> None:
        self._plan = watch.plan
        self._modules = watch.modules
        self._progress = watch.progress
        self._observed = watch.observed
        self._memory = memory
        self._works = watch.steps.by_step

    def warm_up(self) -> Window:
        """Run warm-up steps, on a GPU until the durations of the last three differ by under 2%."""
        collector = Collector()
        watching = collector.watching() if self._observed.on_gpu else contextlib.nullcontext()
        with self._memory.unprofiled() as history, watching:
            yield from self._until_settled(history, collector)
        if self._observed.on_gpu and (note := collector.note(torch.cuda.max_memory_allocated())):
            self._observed.notes.append(note)

    def _until_settled(self, history: StepsHistory | None, collector: Collector) -> Window:
        settles = self._observed.on_gpu and self._plan.settle
        limit = self._plan.warm_up * (MAX_WARM_UP_FACTOR if settles else 1)
        clock = StepClock(on_gpu=self._observed.on_gpu)
        clock.mark()
        step = 2
        while step <= limit:
            last = clock.durations_ns()[-3:] if self._observed.on_gpu else ()
            if step > self._plan.warm_up and len(last) == 3 and _spread(last) < SETTLED_SPREAD:
                return
            self._progress(f"warm-up, step {step} of {limit}")
            if history is not None:
                history.begin()
            collector.begin_step()
            skipped = yield
            clock.mark(counts=not skipped)
            step += not skipped
        last = clock.durations_ns()[-3:]
        if len(last) == 3 and _spread(last) >= SETTLED_SPREAD:
            self._observed.notes.append(
                f"the last three warm-up steps still differed by {_spread(last):.1%}"
            )

    def pure(self) -> Window:
        """Time steps with one mark between two of them and no other instrument."""
        clock = StepClock(on_gpu=self._observed.on_gpu)
        sampler = SensorSampler()
        with sampler.sampling() if self._observed.on_gpu else contextlib.nullcontext():
            self._observed.step_work = yield from self._steps("pure", self._plan.pure, clock)
            self._observed.step_ns = clock.durations_ns()
        self._memory.note_reserved()
        self._observed.sensors = sampler.result()
        if sampler.missing:
            self._observed.notes.append(sampler.missing)

    def host(self) -> Window:
        """Measure the host time of steps that begin with an idle GPU."""
        while (taken := len(self._observed.host_step_ns)) < HOST:
            self._progress(f"host time, step {taken + 1} of {HOST}")
            torch.cuda.synchronize()
            begun = time.perf_counter_ns()
            skipped = yield
            if not skipped:
                self._observed.host_step_ns.append(time.perf_counter_ns() - begun)
                self._observed.host_step_work.append(self._works[-1])

    def timed(self) -> Window:
        """Time the layers and sub-modules of steps."""
        clock = StepClock(on_gpu=self._observed.on_gpu)
        modules = ModuleClock(self._modules, on_gpu=self._observed.on_gpu)
        with modules.running():
            yield from self._steps("timed by module", TIMED, clock, modules)
        self._observed.timed_step_ns = clock.durations_ns()
        self._observed.scopes = modules.times()

    def _steps(
        self, label: str, count: int, clock: StepClock, modules: ModuleClock | None = None
    ) -> Generator[None, bool, list[Work]]:
        """Let the script take `count` steps that are not skipped, with a mark between steps.

        Returns:
            Work of each of these steps.
        """
        clock.mark()
        works: list[Work] = []
        while len(works) < count:
            self._progress(f"{label}, step {len(works) + 1} of {count}")
            skipped = yield
            clock.mark(counts=not skipped)
            if modules is not None:
                modules.end_step(counts=not skipped)
            if not skipped:
                works.append(self._works[-1])
        return works


def _spread(durations_ns: tuple[int, ...]) -> float:
    return (max(durations_ns) - min(durations_ns)) / statistics.median(durations_ns)
