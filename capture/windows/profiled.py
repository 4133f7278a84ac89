"""The windows under a profiler: profiled steps, one with nothing beside it, and the structure."""

import contextlib
import time
from collections.abc import Generator
from pathlib import Path

from torch.profiler import ExecutionTraceObserver, profile

from onerank.capture.windows.clock import StepClock
from onerank.capture.windows.history import recorded
from onerank.capture.windows.nested import deepen, operators_beside_nested
from onerank.capture.windows.plan import Others, Watch, Window
from onerank.capture.windows.profilers import execution_trace, kineto, write
from onerank.capture.windows.step_memory import StepMemory
from onerank.capture.windows.unlike_steps import Work, WorkOfSteps
from onerank.converters.sources.kineto import ALONE, STRUCTURE, profile_name

PLAIN_EXECUTION_TRACE = "et.json"  # the observer writes no gzip

_UNLIKE_TRIES = 7
"""How many more steps the last window may see, until one does the work of the profiled one."""
_MOST_PASSED = 7
"""How many steps behind skipped ones may pass by: where every other is skipped, all would."""


class ProfiledWindows:
    """Traces of steps, into the directory; what they held and took, into `observed`.

    Attributes:
        work: that of the last profiled step.
        structured: whether a step's structure was taken.
    """

    def __init__(
        self, watch: Watch, memory: StepMemory, steps: WorkOfSteps, others: Others | None
    ) -> None:
        self.work = Work(0, 0)
        self.structured = False
        self._plan = watch.plan
        self._directory = watch.directory
        self._modules = watch.modules
        self._progress = watch.progress
        self._observed = watch.observed
        self._memory = memory
        self._steps = steps
        self._others = others
        self._passed = 0
        self._beside_nested = 0

    def warm_up(self) -> Window:
        """Profile a step that nobody keeps: the first sets the profiler up."""
        self._progress("profiler warm-up")
        with self._kineto(record_shapes=False):
            skipped = yield
        yield from self._behind(skipped=skipped)

    def step(self, number: int) -> Window:
        """Profile times and memory of a step, the `number`-th from 0."""
        skipped = True
        while skipped:
            of = f" {number + 1} of {self._plan.repeat}" if self._plan.repeat > 1 else ""
            self._progress(f"profiled step{of}: times and memory")
            on_gpu = self._observed.on_gpu
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
                self.work = self._steps.by_step[-1]
                self._observed.start_memory_bytes.append(start)
                self._observed.peak_memory_bytes.append(peak)
                self._observed.profiled_step_ns.append(step_ns)
                self._observed.profiled_host_ns.append(host_ns)
                self._beside_nested = operators_beside_nested(profiler)
                write(profiler, self._directory / profile_name(number))
                self._memory.keep(history, number)
            yield from self._behind(skipped=skipped)

    def alone(self, others: Others) -> Window:
        """Profile a step in which collectives leave markers alone, after one to settle in."""
        self._progress("profiled step: kernels with no communication beside them")
        others.paced = False
        try:
            skipped = yield
            yield from self._behind(skipped=skipped)
            skipped = True
            while skipped:
                with self._kineto(record_shapes=False) as profiler:
                    skipped = yield
                if not skipped:
                    write(profiler, self._directory / ALONE)
                yield from self._behind(skipped=skipped)
        finally:
            others.paced = True

    def structure(self) -> Window:
        """Take the structure of a step that does the work of the profiled one.

        Each try is kept until a later one has ended: the script may end before that.
        """
        begun = self._directory / f"begun.{PLAIN_EXECUTION_TRACE}"
        skipped, alike, tries = True, False, 0
        try:
            while skipped or (self._plan.settle and not alike and tries <= _UNLIKE_TRIES):
                tries += 1
                self._progress("structure step: operators and shapes")
                trace = self._execution_trace(begun)
                with trace as observer, self._kineto(record_shapes=True) as profiler:
                    observer.start()
                    skipped = yield
                    observer.stop()
                alike = self._steps.by_step[-1] == self.work
                if not skipped:
                    write(profiler, self._directory / STRUCTURE)
                    begun.replace(self._directory / PLAIN_EXECUTION_TRACE)
                    self.structured = True
                yield from self._behind(skipped=skipped)
        finally:
            begun.unlink(missing_ok=True)

    def _behind(self, *, skipped: bool) -> Window:
        """Let the step behind a skipped one pass by, which may make up for that.

        DeepSpeed's ZeRO-3 gathers parameters as it steps; behind a skipped step the next forward
        does.
        """
        while skipped and self._passed < _MOST_PASSED:
            self._passed += 1
            self._progress("a step behind one that a loss scaler skipped passes by")
            skipped = yield

    def _meet(self) -> None:
        """Begin with the other ranks: instruments take each another time to set up.

        A collective that waits for a late rank slows the kernels beside it meanwhile.
        """
        if self._others is not None and not self._others.meet():
            self._observed.notes.append(
                "a profiled step began before all ranks had come: where its collectives wait for "
                "them, the kernels beside are slower than in other steps"
            )

    @contextlib.contextmanager
    def _execution_trace(self, file: Path) -> Generator[ExecutionTraceObserver]:
        with execution_trace(file) as observer:
            if self._beside_nested:
                deepen(self._beside_nested, on_gpu=self._observed.on_gpu)
            yield observer

    def _kineto(self, *, record_shapes: bool) -> contextlib.AbstractContextManager[profile]:
        return kineto(self._modules, on_gpu=self._observed.on_gpu, record_shapes=record_shapes)
