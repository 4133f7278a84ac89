"""Run functions in processes forked off one that has imported what they need, and done nothing.

A fresh interpreter takes seconds to import torch and transformers. Runs that are forked off a
process which has imported them inherit nothing of each other: that process, the stem, runs nothing
itself. It is forked off the process of a command before that has begun any work, so that a run sees
what it would see if the command made it itself.

Variables of the environment that Python reads as it starts, or torch on import (PYTHONHASHSEED,
TORCH_COMPILE_DISABLE), are those of the command: runs that need others take `run_alone`.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from onerank.capture.alone import GRACE_S, Alone, answered, asked, compute, run_alone
from onerank.capture.windows.plan import Progress
from onerank.ir.errors import CaptureError

_T = TypeVar("_T")

_exit = os._exit  # the script may see another
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def forked_runs() -> Generator[Alone]:
    """Give what runs functions as `run_alone` does, in forks of this process as it is now.

    For the process of a command, before any work. Where it cannot be forked safely, it gives
    `run_alone`.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        yield run_alone
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
        yield runs if ours.recv() else run_alone
    finally:
        runs.end()


class _Runs:
    """The stem, as the process that asks sees it."""

    def __init__(self, stem: int, stage: Connection) -> None:
        self._stem: int | None = stem
        self._stage = stage

    def __call__(self, function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        """Return `function(*args, progress)`."""
        with asked(function, args) as directory:
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
            return answered(directory, function, told)

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
