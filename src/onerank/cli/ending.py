"""End the process beside threads that a captured script left at work."""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def ends_beside_threads(command: Callable[P, R]) -> Callable[P, R]:
    """End at once where the command leaves daemon threads of a script behind.

    The interpreter stops such a thread wherever it is as it shuts down; inside torch's C++ that
    aborts the process, after the trace is written.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        before = set(threading.enumerate())
        try:
            result = command(*args, **kwargs)
        except SystemExit as exit_:
            _leave_beside(before, exit_.code)
            raise
        _leave_beside(before, 0)
        return result

    return wrapped


def _leave_beside(before: set[threading.Thread], code: Any) -> None:
    left = [thread for thread in threading.enumerate() if thread.daemon and thread not in before]
    if left and isinstance(code, int):
        exits: Any = atexit
        exits._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
