"""Report what a script does before its first step, and refuse one that never takes a step.

Minutes may pass before the first optimizer step of a large model: imports, downloads, construction,
the first forward. Each of these is reported once, and the script's current line every ten seconds.
"""

import contextlib
import linecache
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.script.error_hints import META_ADVICE
from onerank.capture.script.optimizer_steps import (
    after_backward,
    existing_optimizers,
    optimizer_exists,
)
from onerank.ir.errors import ScriptError

HEARTBEAT_S = 10.0

MOST_BACKWARDS = 64
"""Backward passes before a script without an optimizer is refused.

Scripts rarely run more before they create an optimizer: pruning scores and Fisher matrices take a
few batches.
"""

MOST_FORWARDS = 1024
"""Forwards before a script without a backward is refused: an evaluation may precede training."""

# Count from which powers of two are reported; below, the heartbeat is enough.
_FIRST_REPORT = 16


class BeforeFirstStep:
    """Observes a script until its first optimizer step.

    Args:
        script: path of the script.
        progress: receives a line per event.
        modules: reports the calls of the script's models.
    """

    def __init__(self, script: Path, progress: Progress, modules: Modules) -> None:
        self._script = script
        self._progress = progress
        self._modules = modules
        self._started = time.monotonic()
        self._last_report = self._started
        self._reporting = False
        self._stepped = False
        self._refuse: Callable[[ScriptError], None] = _raise
        self._forwards = 0
        self._backwards = 0
        self._model = ""
        self._earlier = existing_optimizers()

    @contextlib.contextmanager
    def observing(self, refuse: Callable[[ScriptError], None]) -> Generator[None]:
        """Observe the script that runs in this context; `refuse` ends it with an error."""
        self._refuse = refuse
        self._modules.on_model_call.append(self._before_forward)
        try:
            with after_backward(self._after_backward), self._heartbeat():
                yield
        finally:
            self._modules.on_model_call.remove(self._before_forward)

    def first_step_taken(self) -> None:
        """Stop observing.

        Raises:
            ScriptError: the model is on the meta device, where nothing is computed.
        """
        if self._stepped:
            return
        self._stepped = True
        parameters = [p for module, _ in self._modules for p in module.parameters(recurse=False)]
        if parameters and all(parameter.is_meta for parameter in parameters):
            raise ScriptError(
                f"{self._script}: all {len(parameters)} parameters are on the meta device, so a "
                f"step computes nothing\n  {META_ADVICE}",
                code="script-meta-model",
            )

    def _before_forward(self, model: nn.Module, _: Arguments) -> None:
        if self._stepped:
            return
        self._forwards += 1
        if self._forwards == 1:
            self._model = type(model).__name__
            self._report(f"{self._model} built with {_parameters(model)}; first forward")
        elif not self._backwards:
            count = f"{self._forwards} forwards of {self._model}"
            self._report_power_of_two(self._forwards, f"{count} and no backward pass so far")
            if self._forwards == MOST_FORWARDS and not optimizer_exists(self._earlier):
                self._refuse(
                    ScriptError(
                        f"{self._script}: {count}, no backward pass and no optimizer: the script "
                        "neither trains nor infers without gradients\n  a script that infers: "
                        "call the model under torch.inference_mode(), or name its steps "
                        "(--steps prefill,decode). A script that trains: call loss.backward() and "
                        "optimizer.step()",
                        code="script-no-step",
                    )
                )

    def _after_backward(self) -> None:
        if self._stepped:
            return
        self._backwards += 1
        if self._backwards == 1:
            seconds = time.monotonic() - self._started
            self._report(f"first backward pass done, {seconds:.1f} s after the start")
        count = f"{self._backwards} backward passes"
        self._report_power_of_two(self._backwards, f"{count} and no optimizer step so far")
        if self._backwards == MOST_BACKWARDS and not optimizer_exists(self._earlier):
            self._refuse(
                ScriptError(
                    f"{self._script}: {count}, and there is no optimizer\n  a step ends where a "
                    "torch.optim optimizer, or an object with the parameters in its attributes, "
                    "runs its method step(): move a manual update into such a method",
                    code="script-no-step",
                )
            )

    def _report_power_of_two(self, count: int, text: str) -> None:
        if count >= _FIRST_REPORT and not count & (count - 1):
            self._report(text)

    def _report(self, text: str) -> None:
        self._reporting = True
        try:
            self._progress(text)
        finally:
            self._reporting = False
            self._last_report = time.monotonic()

    @contextlib.contextmanager
    def _heartbeat(self) -> Generator[None]:
        """Report the script's current line while nothing else is reported."""
        # An alarm and not a thread: forks of a process with several threads may deadlock, and
        # scripts fork data-loader workers. A script that uses the alarm itself takes it over.
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGALRM, self._alarm)
        # System calls of C libraries are then restarted.
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, HEARTBEAT_S, HEARTBEAT_S)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGALRM) == self._alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _alarm(self, _: int, frame: FrameType | None) -> None:
        if self._stepped:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        # The alarm may interrupt a report halfway.
        if self._reporting or time.monotonic() - self._last_report < HEARTBEAT_S / 2:
            return
        place = self._current_line(frame)
        self._report(f"{place}, {time.monotonic() - self._started:.0f} s after the start")

    def _current_line(self, frame: FrameType | None) -> str:
        names = {str(self._script), str(self._script.resolve())}
        while frame is not None:
            if frame.f_code.co_filename in names:
                text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                return f"{self._script.name} line {frame.f_lineno}: {text}"
            frame = frame.f_back
        return f"still in {self._script.name}"


def _raise(error: ScriptError) -> None:
    raise error


def _parameters(model: nn.Module) -> str:
    parameters: list[Any] = list(model.parameters())
    # Of a DTensor, the local shard.
    count = sum(getattr(p, "_local_tensor", p).numel() for p in parameters)
    return f"{count:,} parameters on this rank"
