"""Which step of a script is recorded without a device."""

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from onerank.capture.no_device.emulated_process import EmulatedProcess
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.no_device.raw_traces import write_log
from onerank.capture.profiling.measurement_windows import CountedSteps
from onerank.capture.profiling.module_scopes import MODEL_PREFIX, SCOPE_PREFIX, Modules
from onerank.capture.profiling.window_observations import Observations, RepeatedForward
from onerank.capture.profiling.window_plan import Progress, WindowPlan, more_steps
from onerank.converters.sources.kineto import EXECUTION_TRACE, STRUCTURE, history_name

UNRECORDED = 2
"""Steps before the recorded one: the first creates optimizer states, and in the second DDP orders
its buckets by the first's backward, and ZeRO still computes a checksum of its weights. Two equal
steps also show the rounds of micro-batches. A DDP of a static graph orders its buckets in the
third, so there the fourth is recorded."""


class _Scopes:
    """Records module calls."""

    def __init__(self, operators: FakeOperators, log: EventLog) -> None:
        self._operators = operators
        self._log = log
        self._open: list[list[Any]] = []

    def enter(self, path: str, model: int) -> None:
        """Begin a module's forward."""
        # A checkpoint calls modules within a node.
        self._operators.follow_backward()
        names = [f"{MODEL_PREFIX}{model}"] if model else []
        names.append(SCOPE_PREFIX + path)
        self._open.append([self._log.begin(name, "user_annotation") for name in names])

    def leave(self) -> None:
        """End the innermost forward."""
        if not self._open:  # the forward began before the recorded step
            return
        for event in reversed(self._open.pop()):
            self._log.end(event)


class _StepProgress:
    """Reports the steps, and the operators so far within a long one after the first.

    `BeforeFirstStep` reports the script's line during the first.

    Args:
        report: receives a short description.
        operators: count what the script runs.
        steps: number of steps.
    """

    INTERVAL_S = 10.0
    """Time between two reports within a step."""

    def __init__(self, report: Progress, operators: FakeOperators, steps: int) -> None:
        self._report = report
        self._operators = operators
        self.steps = steps
        self._begun = operators.count
        self._message = ""
        self._expected = 0  # operators of the step before
        self._next_s = 0.0

    def begin(self, step: int) -> None:
        """Report that a step begins, counted from 1."""
        count = self._operators.count
        # During the first step the script also builds its model and optimizer states.
        self._expected = count - self._begun if step > 2 else 0
        self._begun = count
        self._message = f"step {step} of {self.steps} on shapes alone"
        self._report(self._message)
        self._next_s = time.monotonic() + self.INTERVAL_S
        self._operators.listener = self._report_count if step > 1 else None

    def end(self) -> None:
        """Report no more operators."""
        self._operators.listener = None

    def _report_count(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self.INTERVAL_S
        expected = f" of about {self._expected:,}" if self._expected else ""
        count = self._operators.count - self._begun
        self._report(f"{self._message}, {count:,}{expected} operators")


class StepRecorder(CountedSteps):
    """Lets the script take its steps and records the last ones; in the place of `Windows`.

    Args:
        process: runs the script on shapes alone.
        plan: optimizer steps of each step; its windows do not exist without a device.
        directory: where the traces are written.
        modules: records module calls.
        progress: receives a short description of each phase.
        unrecorded: steps before the recorded ones.
        recorded: number of successive steps to record, each into a separate directory if there
            are several.
        forward: as for `Windows`.
        on_gpu: ignored; as for `Windows`.

    Attributes:
        observed: what the job's record needs; of several recorded steps, of the last.
        steps: steps so far.
        skipped: how many of them a loss scaler skipped.
        complete: whether all steps are recorded.
        results: directory and observations of each recorded step.
    """

    def __init__(
        self,
        process: EmulatedProcess,
        plan: WindowPlan,
        directory: Path,
        modules: Modules,
        progress: Progress,
        _: object = None,
        *,
        unrecorded: int = UNRECORDED,
        recorded: int = 1,
        forward: RepeatedForward | None = None,
        on_gpu: object = None,
    ) -> None:
        super().__init__()
        self.complete = False
        self._process = process
        self._plan = plan
        self._directory = directory
        self._modules = modules
        self._progress = progress
        self._taken = 0
        self._rebuilds = 0
        self._unrecorded = unrecorded
        self._recorded = recorded
        self.results: list[tuple[Path, Observations]] = []
        self._forward = forward
        self._step_progress = _StepProgress(progress, process.operators, unrecorded + recorded)
        self._step_progress.begin(1)

    @property
    def optimizer_steps(self) -> int:
        """Steps of the script's first optimizer per captured step."""
        return self._plan.optimizer_steps

    @property
    def least_steps(self) -> int:
        """Steps of the optimizer that the script must take."""
        return (self._unrecorded + self._recorded) * self.optimizer_steps

    def steps_needed(self) -> str:
        """Return how many steps the capture needs and how a script can provide them.

        Windows of a measured capture, such as warm-up, do not exist without a device.
        """
        return (
            f"a capture without a device needs at least {self.least_steps} (the last is recorded)\n"
            f"  {more_steps(self._plan, 'optimizer_steps')}"
        )

    def boundary(self, *, skipped: bool = False) -> None:
        """End a step of the script and begin the next.

        Raises:
            ScriptError: a loss scaler skipped more than 100 consecutive steps.
        """
        self._count_step(skipped=skipped)
        if self._taken >= self._unrecorded and self._process.rebuilds.count > self._rebuilds:
            # The next step is recorded instead: in a long run none rebuilds buckets.
            self._unrecorded = self._taken + 1
            self._step_progress.steps += 1
        self._taken += not skipped
        if self._taken > self._unrecorded and not skipped:
            self._end_recorded()
            if self.complete:
                return
        self._step_progress.begin(self._taken + 1)
        if self._forward is not None:
            self._forward.restore()
        if self._taken >= self._unrecorded:  # again, if the recorded step was skipped or dropped
            self._begin_recorded()

    def _begin_recorded(self) -> None:
        # Compiled code on fake tensors leaves cycles that hold saved tensors: of a GPT-2 0.8 GB
        # of logits, which on an H100 are free when the step ends.
        gc.collect()
        log = self._process.log
        self._modules.listener = _Scopes(self._process.operators, log)
        caches = self._forward.cache_tensors() if self._forward is not None else ()
        # Before recording begins: what lives now is resident throughout the step.
        self.observed.resident_bytes = self._process.resident_bytes(caches)
        self.observed.start_memory_bytes[:] = [log.memory.allocated_bytes]
        self._rebuilds = self._process.rebuilds.count
        log.begin_step()

    def _end_recorded(self) -> None:
        log = self._process.log
        log.end_step()
        self._step_progress.end()
        self._modules.listener = None
        self._process.check()
        self.observed.peak_memory_bytes[:] = [log.memory.peak_allocated_bytes]
        self.observed.profiled_step_ns[:] = [0]
        self._progress("writing the recorded step")
        directory = self._directory
        if self._recorded > 1:
            directory /= f"step-{len(self.results)}"
            directory.mkdir()
        files = (directory / name for name in (STRUCTURE, EXECUTION_TRACE, history_name(0)))
        write_log(log, *files)
        self.observed.generated_work = log.generated_work()
        self.results.append((directory, _of_this_step(self.observed)))
        self.complete = len(self.results) == self._recorded
        if not self.complete:
            return
        # All steps share the list of notes.
        self.observed.notes += self._process.notes()
        self._note_skipped("; no skipped step was recorded")

    def close(self) -> None:
        """Do nothing: an incomplete step is no capture."""


def _of_this_step(observed: Observations) -> Observations:
    """Return the observations of a step, which later steps do not change; the notes are shared."""
    return replace(
        observed,
        start_memory_bytes=[*observed.start_memory_bytes],
        peak_memory_bytes=[*observed.peak_memory_bytes],
        profiled_step_ns=[*observed.profiled_step_ns],
    )
