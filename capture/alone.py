"""Run a function in a Python of its own, so that no run inherits anything from the one before."""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from onerank.capture.windows import Progress
from onerank.ir.errors import CaptureError

_T = TypeVar("_T")

_CHILD = "from onerank.capture.alone import answer; answer()"


def run_alone(
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
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        request, result = Path(directory, "request"), Path(directory, "result")
        request.write_bytes(pickle.dumps((function, args)))
        read, write = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, request, result, str(write)],
            pass_fds=[write],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            | dict(environment or {}),
        )
        os.close(write)
        teller = threading.Thread(target=_tell, args=(read, progress), daemon=True)
        teller.start()
        try:
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        teller.join()
        if not result.exists():
            raise CaptureError(
                f"the process that ran {function.__name__} ended with status {status} and no "
                "result; what it printed last says why"
            )
        outcome, value = pickle.loads(result.read_bytes())
    if outcome == "raised":
        raise value
    return value


def answer() -> None:
    """Compute what the parent asked for; the interpreter's command line says where it lies."""
    request, result, write = sys.argv[1:4]
    function, args = pickle.loads(Path(request).read_bytes())
    with os.fdopen(int(write), "w", buffering=1) as told:

        def progress(text: str) -> None:
            told.write(text.replace("\n", " ") + "\n")

        try:
            outcome = "returned", function(*args, progress)
        except Exception as error:  # noqa: BLE001  raised again by the parent
            error.__cause__ = error.__context__ = error.__traceback__ = None
            outcome = "raised", error
        Path(result).write_bytes(pickle.dumps(outcome))


def _tell(read: int, progress: Progress) -> None:
    with os.fdopen(read) as told:
        for line in told:
            progress(line.rstrip("\n"))
