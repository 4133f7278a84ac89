"""Run the measurement windows of a capture: which steps are observed, and by which instrument.

Each instrument disturbs the others, so each observes separate steps:

- warm-up
- timed: one mark per step, for the step time
- host: each step begins with an idle GPU, as a profiled step does, for the host time
- modules: marks at layers and sub-modules, for their times
- profiled: Kineto, for times and memory, repeated on request
- uncontended: Kineto without emulated collectives, if those occupy the GPU
- structure: Kineto and execution trace, for operators, shapes and record ids

Host time is never read from the structure window: the execution trace observer makes every operator
20 to 40 times slower (111 us against 3 to 6 us under Kineto, torch 2.13 on a CPU). The profiled
windows are in `profiled_windows`.

A window is a generator. Each `yield` lets the script take one step and returns whether a GradScaler
skipped the optimizer. A skipped step is not a training step, so its window takes another one. Steps
before the first training step belong to no window.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Generator
from pathlib import Path

import torch

from onerank.capture.profiling.allocator_snapshots import LastStepHistory
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.nvml import SensorSampler
from onerank.capture.profiling.profiled_windows import ProfiledWindows
from onerank.capture.profiling.step_memory import CollectorMemory, StepMemory
from onerank.capture.profiling.step_timers import ModuleTimer, StepTimer
from onerank.capture.profiling.step_variance import (
    StepWork,
    WorkOfSteps,
    input_spread,
    note_of,
    note_of_drift,
    note_of_inputs,
    note_of_overflow,
)
from onerank.capture.profiling.window_observations import (
    Observations,
    OtherRanks,
    RepeatedForward,
    Window,
    WindowContext,
)
from onerank.capture.profiling.window_plan import HOST, MODULES, Progress, WindowPlan, more_steps
from onerank.ir.errors import ScriptError
from onerank.ir.notes import Note

# Consecutive skipped steps after which a script is refused, because it would run forever. A scale
# of 2^16 halved 100 times is far below float16's range.
_MOST_SKIPPED = 100


class CountedSteps:
    """Counts the steps of a script, and those that a loss scaler skipped.

    Attributes:
        observed: observations so far; receives the notes.
        steps: steps so far.
        skipped: how many of them a loss scaler skipped.
    """

    def __init__(self) -> None:
        self.observed = Observations()
        self.steps = 0
        self.skipped = 0
        self._consecutive_skips = 0

    def _count_step(self, *, skipped: bool) -> None:
        """Count a step.

        Raises:
            ScriptError: a loss scaler skipped more than 100 consecutive steps.
        """
        self.steps += 1
        self.skipped += skipped
        self._consecutive_skips = self._consecutive_skips + 1 if skipped else 0
        if self._consecutive_skips > _MOST_SKIPPED:
            raise ScriptError(
                f"a loss scaler skipped {self._consecutive_skips} steps in a row "
                f"(limit {_MOST_SKIPPED}): the gradients are infinite or NaN at any scale. "
                "Without real peers the values differ from the job's: capture with "
                "a smaller learning rate, or in bfloat16",
                code="script-scaler-skips",
            )

    def _note_skipped(self, consequence: str) -> None:
        """Add a note if steps were skipped.

        Args:
            consequence: what the note says next, with the punctuation before it.
        """
        if self.skipped:
            text = f"{self.skipped} of {self.steps} steps were skipped by a loss scaler"
            self.observed.notes.append(Note(f"{text}{consequence}", code="steps-skipped"))


class Windows(CountedSteps):
    """Runs the windows one after another; `boundary` is called after every step of the script.

    Attributes:
        observed: observations so far.
        steps: steps of the script so far.
        skipped: steps that a loss scaler skipped.
        complete: whether all windows are done.
    """

    def __init__(
        self,
        plan: WindowPlan,
        directory: Path,
        modules: Modules,
        progress: Progress,
        others: OtherRanks | None = None,
        *,
        forward: RepeatedForward | None = None,
        on_gpu: bool | None = None,
    ) -> None:
        """Prepare the windows of a script.

        Args:
            plan: number of steps of each window.
            directory: receives their traces.
            modules: modules of the script.
            progress: called with a short description of each step.
            others: the other ranks of the job.
            forward: as in `WindowContext`.
            on_gpu: whether the steps run on a GPU; None finds out whether the first step does.
        """
        super().__init__()
        self.complete = False
        self._plan = plan
        self._progress = progress
        self._begun = False
        self._others = others
        self._memory = StepMemory(self.observed, directory, forward)
        self._work = WorkOfSteps(modules, lambda: others.communicated if others else 0)
        self._modules = modules
        context = WindowContext(
            plan, directory, modules, progress, self.observed, self._work, forward
        )
        self._unprofiled = UnprofiledWindows(context, self._memory, others)
        self._profiled = ProfiledWindows(context, self._memory, others)
        self._schedule = self._windows()
        self._on_gpu = on_gpu
        self._allocated = _gpu_allocations()

    def boundary(self, *, skipped: bool = False) -> None:
        """End a step of the script and begin the next; sets `complete` after the last.

        Args:
            skipped: whether a GradScaler skipped the optimizer's step.

        Raises:
            ScriptError: a loss scaler skipped more than 100 consecutive steps.
        """
        self._count_step(skipped=skipped)
        self._work.end_step()
        try:
            if self._begun:
                self._schedule.send(skipped)
            elif not skipped:
                # The windows begin after the first step that trains: that step creates the
                # optimizer's states, and would be slower than the others.
                self._begun = True
                next(self._schedule)
        except StopIteration:
            self._end()

    @property
    def optimizer_steps(self) -> int:
        """Steps of the script's first optimizer per captured step."""
        return self._plan.optimizer_steps

    @property
    def least_steps(self) -> int:
        """Steps of the optimizer that the script must take for the windows to complete."""
        steps = self._plan.least_steps
        if self.observed.on_gpu:
            paced = self._others is not None and self._others.paced
            steps += HOST + (2 if paced else 0)
        return steps * self.optimizer_steps

    def steps_needed(self) -> str:
        """Return how many steps the capture needs and how a script can provide them."""
        uneven = ", more on a GPU whose steps are still uneven" if self.observed.on_gpu else ""
        return (
            f"a capture needs at least {self.least_steps} (warm-up, timed, timed by "
            f"module, profiled, structure){uneven}\n"
            f"  {more_steps(self._plan, 'warm_up', 'timed_steps', 'repeat', 'optimizer_steps')}"
        )

    def close(self) -> None:
        """Close the current window; if a structure step is on disk, the capture is complete."""
        self._schedule.close()
        self._work.close()
        if self._profiled.structured and not self.complete:
            self._end()

    def _end(self) -> None:
        self.complete = True
        if self._profiled.structured:
            self._profiled.select()
            self._memory.compare_peaks()
            self._keep_equal_shapes()
        plan, work = self._plan, self._work.by_step
        if variance_note := note_of(work, self._profiled.work, plan.optimizer_steps, plan.warm_up):
            self.observed.notes.append(variance_note)
        if overflow_note := note_of_overflow(self._modules):
            self.observed.notes.append(overflow_note)
        self._note_skipped(
            " because of infinite gradients; no skipped step is part of the measurement"
        )

    def _keep_equal_shapes(self) -> None:
        """Drop the unprofiled times of steps whose inputs have other shapes than the graph's."""
        observed, captured = self.observed, self._profiled.work
        if note := note_of_inputs(self._work.by_step, captured, observed.step_work):
            observed.notes.append(note)
        observed.input_spread = input_spread(self._work.by_step, captured)
        equal = [work.has_inputs_of(captured) for work in observed.step_work]
        # If no step is equal, the median over other shapes is the only known step time.
        if any(equal):
            observed.step_ns = tuple(itertools.compress(observed.step_ns, equal))
        # Only a GPU's steps settle, and steps of several shapes have no common trend.
        if observed.on_gpu and any(equal):
            drift_note = note_of_drift(observed.step_ns)
            observed.notes += [drift_note] if drift_note else []
        equal = [work.has_inputs_of(captured) for work in observed.host_step_work]
        observed.host_step_ns = [*itertools.compress(observed.host_step_ns, equal)]

    def _windows(self) -> Window:
        """Run the windows in order; the script's first training step is before the first window."""
        allocated = _gpu_allocations() > self._allocated
        self.observed.on_gpu = allocated if self._on_gpu is None else self._on_gpu
        yield from self._unprofiled.warm_up()
        yield from self._unprofiled.timed()
        if self.observed.on_gpu:
            yield from self._unprofiled.host()
        yield from self._unprofiled.modules()
        # All unprofiled windows come first: a profiler changes how much memory is reserved.
        yield from self._profiled.warm_up()
        for _ in range(self._plan.repeat):
            yield from self._profiled.step()
        if self.observed.on_gpu and self._others is not None and self._others.paced:
            yield from self._profiled.uncontended(self._others)
        yield from self._profiled.structure()


def _gpu_allocations() -> int:
    """Count the GPU memory allocations of this process."""
    # An initialized context does not show that the script uses the GPU: the process may have
    # created it earlier. Allocations since then do.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0
    stats = map(torch.cuda.memory_stats, range(torch.cuda.device_count()))
    return sum(counters.get("allocation.all.allocated", 0) for counters in stats)


SETTLED_SPREAD = 0.02
"""Relative spread of three steps below which a GPU has warmed up."""

MAX_WARM_UP_FACTOR = 4
"""Limit of warm-up steps, in multiples of the requested ones: some scripts never settle."""


class UnprofiledWindows:
    """Write times of steps, of their modules and of the host to `observed`."""

    def __init__(
        self, context: WindowContext, memory: StepMemory, others: OtherRanks | None = None
    ) -> None:
        self._call_times = others.call_times if others is not None else None
        self._plan = context.plan
        self._modules = context.modules
        self._progress = context.progress
        self._observed = context.observed
        self._memory = memory
        self._works = context.steps.by_step
        self._forward = context.forward

    def warm_up(self) -> Window:
        """Run warm-up steps, on a GPU until the durations of the last three differ by under 2%."""
        collector = CollectorMemory()
        watching = collector.watching() if self._observed.on_gpu else contextlib.nullcontext()
        with self._memory.unprofiled() as history, watching:
            yield from self._until_settled(history, collector)
        if self._observed.on_gpu and (note := collector.note(torch.cuda.max_memory_allocated())):
            self._observed.notes.append(note)

    def _until_settled(self, history: LastStepHistory | None, collector: CollectorMemory) -> Window:
        settles = self._observed.on_gpu and self._plan.settle
        limit = self._plan.warm_up * (MAX_WARM_UP_FACTOR if settles else 1)
        clock = StepTimer(on_gpu=self._observed.on_gpu)
        clock.mark()
        # The first training step is before the windows, and warms up too.
        step = 2
        while step <= limit:
            # Only a GPU takes steps to settle, and reading the durations synchronises with it.
            last = clock.durations_ns()[-3:] if self._observed.on_gpu else ()
            if step > self._plan.warm_up and len(last) == 3 and _spread(last) < SETTLED_SPREAD:
                return
            self._progress(f"warm-up, step {step} of {limit}")
            if history is not None:
                history.begin()
            collector.begin_step()
            self._prepare_step(clock)
            skipped = yield
            clock.mark(counts=not skipped)
            step += not skipped
        last = clock.durations_ns()[-3:]
        if len(last) == 3 and _spread(last) >= SETTLED_SPREAD:
            self._observed.notes.append(
                Note(
                    f"the last three warm-up steps still differed by {_spread(last):.1%}",
                    code="warm-up-unsettled",
                )
            )

    def timed(self) -> Window:
        """Time steps with one mark between two of them and no other instrument."""
        clock = StepTimer(on_gpu=self._observed.on_gpu)
        sampler = SensorSampler()
        sampling = sampler.connected() if self._observed.on_gpu else contextlib.nullcontext()
        with sampling, self._modules.only_models_hooked():
            self._observed.step_work = yield from self._steps(
                "timed", self._plan.timed_steps, clock, sampler=sampler
            )
            self._observed.step_ns = clock.durations_ns()
        # Before the profiler, which reserves memory differently.
        self._memory.note_reserved()
        self._observed.sensors = sampler.result()
        if sampler.missing:
            self._observed.notes.append(Note(sampler.missing, code="sensors-not-read"))

    def host(self) -> Window:
        """Measure the host time of steps that begin with an idle GPU."""
        times = self._call_times
        with self._modules.only_models_hooked():
            if times is not None:
                times.enabled = True
            steps = yield from self._host_steps()
        if times is not None:
            times.enabled = False
            self._observed.emulated_calls = times.per_step(steps)

    def _host_steps(self) -> Generator[None, bool, int]:
        """Let the script take `HOST` steps that are not skipped; return the number of all."""
        steps = 0
        while (taken := len(self._observed.host_step_ns)) < HOST:
            self._progress(f"host time, step {taken + 1} of {HOST}")
            if self._forward is not None:
                self._forward.restore()
            # As before a profiled step: the converter compares the host times of the two, to learn
            # how much the profiler slows the host.
            torch.cuda.synchronize()
            begun = time.perf_counter_ns()
            skipped = yield
            steps += 1
            if not skipped:
                self._observed.host_step_ns.append(time.perf_counter_ns() - begun)
                self._observed.host_step_work.append(self._works[-1])
        return steps

    def modules(self) -> Window:
        """Time the layers and sub-modules of steps."""
        clock = StepTimer(on_gpu=self._observed.on_gpu)
        modules = ModuleTimer(self._modules, on_gpu=self._observed.on_gpu)
        with modules.running():
            yield from self._steps("timed by module", MODULES, clock, modules)
        self._observed.timed_step_ns = clock.durations_ns()
        self._observed.scopes = modules.times()

    def _steps(
        self,
        label: str,
        count: int,
        clock: StepTimer,
        modules: ModuleTimer | None = None,
        sampler: SensorSampler | None = None,
    ) -> Generator[None, bool, list[StepWork]]:
        """Let the script take `count` steps that are not skipped, with a mark between steps.

        Returns:
            Work of each of these steps.
        """
        clock.mark()
        works: list[StepWork] = []
        while len(works) < count:
            self._progress(f"{label}, step {len(works) + 1} of {count}")
            sampled = sampler is not None and sampler.sample_if_due()
            self._prepare_step(clock, sampled=sampled)
            skipped = yield
            clock.mark(counts=not skipped)
            if modules is not None:
                modules.end_step(counts=not skipped)
            if not skipped:
                works.append(self._works[-1])
        return works

    def _prepare_step(self, clock: StepTimer, *, sampled: bool = False) -> None:
        """Restore what a repeated forward changed.

        No step's time includes this, nor the reading of sensors before the call (`sampled`).
        """
        if self._forward is not None:
            self._forward.restore()
        if self._forward is not None or sampled:
            clock.mark(counts=False)


def _spread(durations_ns: tuple[int, ...]) -> float:
    return (max(durations_ns) - min(durations_ns)) / statistics.median(durations_ns)
