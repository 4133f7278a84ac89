"""Run a script unchanged, up to the step at which the capture is complete."""

import contextlib
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Protocol

import torch

from onerank.capture.patches import patched
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.window_observations import Observations
from onerank.capture.script.before_first_step import BeforeFirstStep
from onerank.capture.script.error_hints import (
    UNCHANGED,
    ModelChanges,
    explained,
    library_line,
    script_line,
)
from onerank.capture.script.inference_steps import MeasuredForward
from onerank.capture.script.optimizer_steps import OptimizerSteps, after_step
from onerank.ir.errors import CaptureError, OneRankError, ScriptError
from onerank.ir.notes import Note

_EVICTION_INTERVAL_S = 1e-4

# How often a script may catch the exception that ends it before it is evicted.
_MAX_CAUGHT_ENDS = 3


@dataclass(frozen=True)
class Script:
    """A script of the user, as `python` is called with it.

    Attributes:
        path: its file.
        args: its command-line arguments.
        module: its name as a module, to run it like `python -m`; None runs the file.
    """

    path: Path
    args: Sequence[str] = ()
    module: str | None = None


class Eviction:
    """Raises exceptions in the main thread until the script ends.

    Args:
        ending: creates an exception.
        below: function that runs the script.
    """

    # The script's `except:` catches a single exception. Of many, one arrives while that handler
    # runs, or between two iterations of the loop around it, where nothing catches it. The handler
    # of the alarm looks at the stack, so that it raises only while code of the script runs. An
    # exception in the code that restores `__main__`, the arguments and the directory afterwards
    # would leave them as the script had them.

    def __init__(self, ending: Callable[[], BaseException], below: Callable[..., object]) -> None:
        self._ending = ending
        self._below = below.__code__
        self._before: Any = None
        self.begun = False

    def begin(self) -> None:
        """Begin to raise; outside of the main thread, which receives signals, do nothing."""
        if self.begun or threading.current_thread() is not threading.main_thread():
            return
        self.begun = True
        self._before = signal.signal(signal.SIGALRM, self._raise)
        signal.setitimer(signal.ITIMER_REAL, _EVICTION_INTERVAL_S, _EVICTION_INTERVAL_S)

    def notes(self) -> list[Note]:
        """Return the note that the script did not end by itself, if so."""
        text = f"the script caught its end {_MAX_CAUGHT_ENDS} times and continued, so it was "
        return [Note(f"{text}interrupted", code="script-caught-end")] if self.begun else []

    def _raise(self, _: int, frame: FrameType | None) -> None:
        in_script = False
        while frame is not None and frame.f_code is not self._below:
            in_script = in_script or _is_main(frame)
            frame = frame.f_back
        if in_script and frame is not None:
            raise self._ending()

    def __enter__(self) -> "Eviction":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.begun:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)


def _is_main(frame: FrameType) -> bool:
    """Return whether a frame is that of a script's or a module's statements as `__main__`."""
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"


class WatchedForwards(Protocol):
    """Decides by the forwards of a script where the script ends."""

    @property
    def is_explicit(self) -> bool:
        """Whether the script's optimizer steps do not count."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the script has shown all that is needed."""
        ...

    @property
    def measured(self) -> Sequence[MeasuredForward]:
        """The captured forwards."""
        ...

    def watching(
        self,
        end_forward: Callable[[Windows], None],
        captured: Callable[[], None],
        refuse: Callable[[OneRankError], None],
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the script runs; arguments as for `InferenceSteps`."""
        ...

    def discard(self) -> None:
        """Forget the captured forwards, because the script trains."""
        ...

    def end(self, script: Path) -> bool:
        """Return whether the script showed all that is needed, at its end; may raise if not."""
        ...


class CaptureComplete(SystemExit):
    """Ends the script; a SystemExit, because `except Exception` does not catch it."""


class _ImmediateExit(SystemExit):
    """A call of os._exit, which would end the capture together with the script."""


def run_script(
    script: Script,
    windows: Windows,
    at_step: Callable[[Windows], None],
    *,
    changes: ModelChanges = UNCHANGED,
    before: BeforeFirstStep | None = None,
    inference: WatchedForwards | None = None,
) -> None:
    """Run `script` as `__main__` until the windows are complete.

    Args:
        script: the script.
        windows: receive every optimizer step.
        at_step: called with the windows after each step, before the windows end it.
        changes: what the capture changes in the script's models.
        before: observes the script until its first step.
        inference: captures forwards of a script that infers, or takes its model.

    Raises:
        ScriptError: the script raised, exited, took too few steps, or neither trained nor inferred.
    """
    eviction = Eviction(CaptureComplete, below=play_script)
    boundary = _Boundary(windows, at_step, eviction, before, inference)
    watched = before.observing(boundary.fail) if before else contextlib.nullcontext()
    try:
        with (
            after_step(boundary) as boundary.optimizers,
            boundary.watching_forwards(),
            _exits_seen(),
            _ending_children(),
            # Both handle the alarm: the eviction puts back the heartbeat's handler, which `watched`
            # removes.
            watched,
            eviction,
        ):
            play_script(script)
    except CaptureComplete:
        pass
    except (OneRankError, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as exit_:
        # A script that exits after the first structure step has shown all that is needed.
        windows.close()
        if not boundary.ended(script.path) and boundary.failure is None:
            raise _exited(exit_, script, windows, boundary.taken) from exit_
    except BaseException as error:  # CheckpointException of torch.distributed is no Exception
        # An error while the script ends does not affect a complete capture.
        if boundary.complete:
            return
        raise _raised(error, script.path, changes, boundary.taken) from error
    finally:
        windows.close()
    if boundary.failure is not None:
        raise boundary.failure
    boundary.observed.notes += eviction.notes()
    # Also after a normal return: a script may catch the exit, or step in another thread.
    if not boundary.ended(script.path):
        raise _too_few_steps(script.path, windows, boundary.taken)


class _Boundary:
    """Called after each optimizer step; ends the script when the windows are complete.

    Attributes:
        failure: the error that ended the script, kept because the script may catch it; else None.
        taken: optimizer steps so far.
        optimizers: the script's optimizers.
    """

    optimizers: OptimizerSteps

    def __init__(
        self,
        windows: Windows,
        at_step: Callable[[Windows], None],
        eviction: Eviction,
        before: BeforeFirstStep | None,
        inference: WatchedForwards | None,
    ) -> None:
        self.failure: OneRankError | None = None
        self._windows = windows
        self._at_step = at_step
        self._eviction = eviction
        self._before = before
        self._inference = inference
        self._process = os.getpid()
        self._ends = 0
        self.taken = 0
        self._skipped = False

    def __call__(self, *, skipped: bool) -> None:
        """End an optimizer step, and with the last of `optimizer_steps` a captured step.

        `skipped` is whether a loss scaler skipped the update.
        """
        if os.getpid() != self._process:
            return  # in a child that the script forked, which is not captured
        self.taken += 1
        if self._inference is not None:
            if self._inference.is_explicit:
                return  # the user names forwards, of a script that also trains
            self._inference.discard()
        self._skipped |= skipped
        if self.taken % self._windows.optimizer_steps and self.failure is None:
            return
        skipped, self._skipped = self._skipped, False
        if not self._windows.complete and self.failure is None:
            self._end_step(self._windows, skipped=skipped)
            if self._windows.complete:
                self._note_idle_optimizers()
            self.optimizers.begin()
        if self.failure is not None or self._windows.complete:
            self._leave_script()

    def _end_step(self, windows: Windows, *, skipped: bool = False) -> None:
        try:
            if self._before is not None:
                self._before.first_step_taken()
            self._at_step(windows)
            windows.boundary(skipped=skipped)
        except OneRankError as error:
            self.failure = error
        except OSError as error:  # from writing traces: the script does not run here
            self.failure = _unwritten(error)

    def _note_idle_optimizers(self) -> None:
        for idle in self.optimizers.idle():
            count = sum(each.numel() for group in idle.param_groups for each in group["params"])
            self._windows.observed.notes.append(
                Note(
                    f"{type(idle).__name__} of {count:,} parameters takes no step in the captured "
                    "step; if it steps once in N steps of the first optimizer, "
                    "--optimizer-steps N captures these N as one",
                    code="optimizer-idle",
                )
            )

    @property
    def complete(self) -> bool:
        """Whether all windows are complete: of the training step, or of the chosen forwards."""
        forwards = self._inference is not None and self._inference.complete
        return self._windows.complete or forwards

    @property
    def observed(self) -> Observations:
        """Observations of the last windows."""
        measured = self._inference.measured if self._inference is not None else []
        return measured[-1].windows.observed if measured else self._windows.observed

    def ended(self, script: Path) -> bool:
        """Return whether the capture is complete at the script's end.

        Raises:
            ScriptError: as for `InferenceSteps.end`.
        """
        forwards = self._inference is not None and self._inference.end(script)
        return self._windows.complete or forwards

    def watching_forwards(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the script's forwards are captured."""
        if self._inference is None:
            return contextlib.nullcontext()
        return self._inference.watching(self._end_forward, self._leave_script, self.fail)

    def _end_forward(self, windows: Windows) -> None:
        self._end_step(windows)
        if self.failure is not None:
            self._leave_script()

    def fail(self, error: OneRankError) -> None:
        """End the script with an error."""
        if os.getpid() == self._process:
            self.failure = self.failure or error
            self._leave_script()

    def _leave_script(self) -> NoReturn:
        self._ends += 1
        if self._ends > _MAX_CAUGHT_ENDS:
            self._eviction.begin()
        if self.failure is not None:
            raise self.failure
        in_main = threading.current_thread() is threading.main_thread()
        # A thread prints the traceback of any subclass of SystemExit.
        raise CaptureComplete if in_main else SystemExit


def _unwritten(error: OSError) -> CaptureError:
    """Return the error of a trace that could not be written."""
    path = error.filename or tempfile.gettempdir()
    return CaptureError(
        f"the traces could not be written: {path}: {error.strerror or error}\n"
        "  make room there, or let TMPDIR name a directory with room",
        code="capture-unwritten",
    )


@contextlib.contextmanager
def _ending_children() -> Generator[None]:
    """End children that the script forked where the script ends."""
    # Without a capture the interpreter would end there. A child must not continue with the capture.
    process, leave = os.getpid(), os._exit
    status = 0
    try:
        yield
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        raise
    except BaseException:
        status = 1
        if os.getpid() != process:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != process:
            sys.stdout.flush()
            sys.stderr.flush()
            leave(status)


def play_script(script: Script) -> None:
    """Run `script` as `__main__`, to its end."""
    with _as_main(script):
        if script.module is None:
            runpy.run_path(str(script.path), run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)


def _exited(exit_: SystemExit, script: Script, windows: Windows, taken: int) -> OneRankError:
    """Return the error of a script that exited after `taken` optimizer steps, too few."""
    # A launcher such as Hydra's prints what a script raised, and exits while it handles that.
    handled = exit_.__context__
    while handled is not None:
        if isinstance(handled, OneRankError):
            return handled
        handled = handled.__context__
    call = "os._exit" if isinstance(exit_, _ImmediateExit) else "sys.exit"
    where = script_line(exit_, script.path) + library_line(exit_, script.path)
    text = f"{where} called {call}({exit_.code!r}) after {_counted(windows, taken)}; "
    if taken:
        text += windows.steps_needed()
    else:
        args = shlex.join(script.args) or "none"
        text += f"let it train or infer: its arguments, after --, were {args}"
        # Scripts that count GPUs and see none often exit with 0.
        if not exit_.code and not torch.accelerator.is_available():
            text += ". This machine has no GPU; if the script needs one, capture where there is one"
    return ScriptError(text, code="script-exited")


def _raised(error: BaseException, script: Path, changes: ModelChanges, taken: int) -> ScriptError:
    """Return the error of a script that raised `error` after `taken` optimizer steps."""
    why = explained(error, script, changes)
    return ScriptError(
        f"{script} raised {type(error).__name__} after {_steps(taken)}: {why.message}",
        _own_traceback(error, script),
        code=why.code,
    )


def _too_few_steps(script: Path, windows: Windows, taken: int) -> ScriptError:
    """Return the error of a script that ended after `taken` optimizer steps, too few."""
    if taken == 0:
        return ScriptError(
            f"{script} ended without a step\n"
            "  training: call step() of a torch.optim optimizer, or of an object that holds the "
            "parameters, with finite gradients\n"
            "  inference: run the model under torch.inference_mode() or no_grad(); if the script "
            "also creates an optimizer, name the steps: --steps prefill,decode",
            code="script-no-step",
        )
    return ScriptError(
        f"{script} ended after {_counted(windows, taken)}; {windows.steps_needed()}",
        code="script-too-few-steps",
    )


def _counted(windows: Windows, taken: int) -> str:
    skipped = f" ({windows.skipped} skipped by a loss scaler)" if windows.skipped else ""
    return _steps(taken) + skipped


def _steps(count: int) -> str:
    return "1 optimizer step" if count == 1 else f"{count} optimizer steps"


def _own_traceback(error: BaseException, script: Path) -> str:
    """Format the traceback from the script's first frame on, after those of its causes."""
    name = str(script)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename == name), len(frames))
    lines = ["Traceback (most recent call last):\n"] if first < len(frames) else []
    lines += traceback.format_list(f for f in frames[first:] if f.filename != __file__)
    lines += traceback.format_exception_only(error)
    return _causes(error) + "".join(lines)


def _causes(error: BaseException) -> str:
    """Format the exceptions that led to another one, as Python prints them; "" for none."""
    # A library often raises another error from the first one, and its text does not name the cause.
    if error.__cause__ is not None:
        cause, relation = error.__cause__, "direct cause of the following exception"
    elif error.__context__ is not None and not error.__suppress_context__:
        cause, relation = error.__context__, None
    else:
        return ""
    joint = (
        f"The above exception was the {relation}:"
        if relation
        else "During handling of the above exception, another exception occurred:"
    )
    return "".join(traceback.format_exception(cause)) + f"\n{joint}\n\n"


@contextlib.contextmanager
def _as_main(script: Script) -> Generator[None]:
    """Set argv and the import path as `python` does for a script, and restore them at the end.

    The working directory is restored too, because paths of the user are relative to it.
    """
    argv, path, directory = sys.argv, list(sys.path), Path.cwd()
    sys.argv = [str(script.path), *script.args]
    sys.path.insert(0, str(directory if script.module else script.path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(directory)


@contextlib.contextmanager
def _exits_seen() -> Generator[None]:
    """Make os._exit raise in this process, and exit in children that the script forks."""
    original, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:
            original(status)
        raise _ImmediateExit(status)

    with patched("os", {"_exit": leave}):
        yield


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Generator[None]:
    """Set environment variables while the context lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
