"""Run a function in a Python of its own, so that no run inherits anything from the one before."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from onerank.capture.windows.plan import Progress
from onerank.ir.errors import CaptureError, OneRankError

_T = TypeVar("_T")

_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.argv.pop().split('\\n')); "
    "from onerank.capture.alone import answer; answer()"
)
_GRACE_S = 30


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
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, request, str(write), "\n".join(sys.path)],
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
        request, write = Path(sys.argv[1]), int(sys.argv[2])
        function, args = pickle.loads(request.read_bytes())
        with os.fdopen(write, "w", buffering=1) as told:

            def progress(text: str) -> None:
                with contextlib.suppress(OSError):
                    told.write(text.replace("\n", " ") + "\n")

            try:
                outcome = "returned", function(*args, progress)
            except Exception as error:  # noqa: BLE001  raised again by the parent
                error.__cause__ = error.__context__ = error.__traceback__ = None
                outcome = "raised", error
            part = request.with_name("part")
            part.write_bytes(pickle.dumps(outcome))
            part.rename(request.with_name("result"))


def _tell(read: int, progress: Progress) -> None:
    with os.fdopen(read) as told:
        for line in told:
            progress(line.rstrip("\n"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that was not waited for: it removes its files when it is interrupted."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
