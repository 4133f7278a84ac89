"""Run a function in a process of its own, fresh or forked from a preloaded one.

Run functions in processes forked off one that has imported what they need, and done nothing.

A fresh interpreter takes seconds to import torch and transformers. Runs that are forked off a
process which has imported them inherit nothing of each other: that process, the stem, runs nothing
itself. It is forked off the process of a command before that has begun any work, so that a run sees
what it would see if the command made it itself.

Variables of the environment that Python reads as it starts, or torch on import (PYTHONHASHSEED,
TORCH_COMPILE_DISABLE), are those of the command: runs that need others take `run_isolated`.
"""

import atexit
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import torch

from onerank.capture.profiling.window_plan import Progress
from onerank.ir.errors import CaptureError, OneRankError

_T = TypeVar("_T")

_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.argv.pop().split('\\n')); "
    "from onerank.capture.isolation import answer; answer()"
)

_REQUEST, _RESULT = "request", "result"

GRACE_S = 30
"""How long what was interrupted has to remove its files."""


class ProcessRunner(Protocol):
    """Runs functions one at a time, each in a process of its own, as `run_isolated` does."""

    def __call__(self, function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        """Return `function(*args, progress)`."""
        ...


def run_isolated(
    function: Callable[..., _T],
    *args: Any,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> _T:
    """Return `function(*args, progress)` as a fresh interpreter computes it.

    Args:
        function: a function of a module, importable by its name.
        args: what it gets first; they must pickle, and so must its result.
        progress: gets what the function tells, as it tells it.
        environment: variables the interpreter gets beside ours.

    Raises:
        Exception: what the function raised.
        CaptureError: the interpreter died.
    """
    with request(function, args) as directory:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, directory, str(write), "\n".join(sys.path)],
                pass_fds=[write],
                env={**os.environ, **(environment or {})},
            )
        finally:
            os.close(write)
        teller = threading.Thread(target=_tell, args=(read, progress), daemon=True)
        teller.start()
        try:
            status = process.wait()
        finally:
            _end(process)
        teller.join(timeout=1)  # a process that a script left behind may hold the pipe
        return response(directory, function, status)


@contextlib.contextmanager
def request(function: Callable[..., Any], args: tuple[Any, ...]) -> Generator[Path]:
    """Give a directory that says what is to be computed, and takes the result."""
    with _interrupted_by_sigterm(), tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        Path(directory, _REQUEST).write_bytes(pickle.dumps((function, args)))
        yield Path(directory)


def response(directory: Path, function: Callable[..., _T], status: int) -> _T:
    """Return the result that a process left, or raise what the function raised.

    Args:
        directory: as `asked` gave it.
        function: what was asked for.
        status: of the process at its end; of a signal, less than 0.

    Raises:
        CaptureError: it left none.
    """
    result = directory / _RESULT
    if not result.exists():
        told = f"signal {-status}" if status < 0 else f"status {status}"
        raise CaptureError(
            f"the process that ran {function.__name__} ended with {told} and no result; what "
            "it printed last says why"
        )
    outcome, value = pickle.loads(result.read_bytes())
    if outcome == "raised":
        raise value
    return value


def beginning(name: str, progress: Progress) -> Progress:
    """Let what a run tells begin with its name."""
    return lambda text: progress(f"{name}: {text}")


@contextlib.contextmanager
def errors_of(name: str) -> Generator[None]:
    """Let the message of an error begin with the name of the run that it comes from."""
    try:
        yield
    except OneRankError as error:
        error.args = (f"{name}: {error}",)
        raise


def answer() -> None:
    """Compute what the parent asked for; the interpreter's command line says where it lies."""
    with contextlib.suppress(KeyboardInterrupt):  # the parent tells of it
        directory, write = Path(sys.argv[1]), int(sys.argv[2])
        with os.fdopen(write, "w", buffering=1) as told:

            def progress(text: str) -> None:
                with contextlib.suppress(OSError):
                    told.write(text.replace("\n", " ") + "\n")

            compute(directory, progress)


def compute(directory: Path, progress: Progress) -> None:
    """Compute what was asked for in a directory, and leave the result there."""
    function, args = pickle.loads((directory / _REQUEST).read_bytes())
    try:
        outcome = "returned", function(*args, progress)
    except Exception as error:  # noqa: BLE001  raised again by the parent
        error.__cause__ = error.__context__ = error.__traceback__ = None
        outcome = "raised", error
    part = directory / "part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(directory / _RESULT)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Generator[None]:
    """Let a scheduler's SIGTERM do what Ctrl-C does: nothing goes on then, and keeps the GPU."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield
        return

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _tell(read: int, progress: Progress) -> None:
    with os.fdopen(read) as told:
        for line in told:
            progress(line.rstrip("\n"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that was not waited for: it removes its files when it is interrupted."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_exit = os._exit  # the script may see another

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def forked_runs() -> Generator[ProcessRunner]:
    """Give what runs functions as `run_isolated` does, in forks of this process as it is now.

    For the process of a command, before any work. Where it cannot be forked safely, it gives
    `run_isolated`.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        yield run_isolated
        return
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    stem = os.fork()
    if stem == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    runs = _Runs(stem, ours)
    try:
        yield runs if ours.recv() else run_isolated
    finally:
        runs.end()


class _Runs:
    """The stem, as the process that asks sees it."""

    def __init__(self, stem: int, stage: Connection) -> None:
        self._stem: int | None = stem
        self._stage = stage

    def __call__(self, function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        """Return `function(*args, progress)`."""
        with request(function, args) as directory:
            try:
                self._stage.send(directory)
                while isinstance(told := self._stage.recv(), str):
                    progress(told)
            except (EOFError, BrokenPipeError):
                raise CaptureError(
                    f"the process that is forked to run {function.__name__} was killed"
                ) from None
            except BaseException:
                self.end()
                raise
            return response(directory, function, told)

    def end(self) -> None:
        """End the stem, and the run that it waits for."""
        if self._stem is not None:
            stem, self._stem = self._stem, None
            self._stage.close()
            os.kill(stem, signal.SIGTERM)
            os.waitpid(stem, 0)


def _serve(asker: Connection) -> NoReturn:
    """Fork a process for each run that is asked for, until the asker hangs up."""
    interrupted: Any = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker tells of it
    running: list[int] = []

    def leave(*_: object) -> NoReturn:
        for run in running:
            _interrupt(run)
        _exit(0)

    terminated: Any = signal.signal(signal.SIGTERM, leave)
    try:
        # once the driver of a GPU was called, it works in no fork
        asker.send(not torch.cuda._is_in_bad_fork())  # pyright: ignore
        while True:
            directory = asker.recv()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            run = os.fork()
            if run == 0:
                signal.signal(signal.SIGINT, interrupted)
                signal.signal(signal.SIGTERM, terminated)
                _answer(directory, asker)
            running.append(run)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            _, status = os.waitpid(run, 0)
            running.clear()
            asker.send(os.waitstatus_to_exitcode(status))
    except (EOFError, ConnectionError):  # the asker is done, or gone
        pass
    except OSError:  # no process could be forked
        traceback.print_exc()
    finally:
        leave()


def _interrupt(run: int) -> None:
    """End a run that nobody waits for: it removes its files when it is interrupted."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(run, signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        while os.waitpid(run, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(run, signal.SIGKILL)
            time.sleep(0.01)


def _answer(directory: Path, asker: Connection) -> NoReturn:
    """Compute what was asked for, and end this process as an interpreter ends."""

    def progress(text: str) -> None:
        with contextlib.suppress(OSError):
            asker.send(text)

    status = 1
    try:
        with contextlib.suppress(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            np.random.seed()  # each process draws its own seeds, as `random` does by itself
            torch.default_generator.seed()
            gc.collect()  # it writes to all objects: their pages are copied now, not in a step
            compute(directory, progress)
        status = 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ending: Any = threading
        ending._shutdown()
        ending = atexit
        ending._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  the frames above are the asker's
        traceback.print_exc()
    finally:
        _exit(status)
