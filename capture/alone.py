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
from typing import Any, NoReturn, Protocol, TypeVar

from onerank.capture.windows.plan import Progress
from onerank.ir.errors import CaptureError, OneRankError

_T = TypeVar("_T")

_CHILD = (
    "import sys; sys.path[:] = filter(None, sys.argv.pop().split('\\n')); "
    "from onerank.capture.alone import answer; answer()"
)
_REQUEST, _RESULT = "request", "result"
GRACE_S = 30
"""How long what was interrupted has to remove its files."""


class Alone(Protocol):
    """Runs functions one at a time, each in a process of its own, as `run_alone` does."""

    def __call__(self, function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        """Return `function(*args, progress)`."""
        ...


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
    with asked(function, args) as directory:
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
        return answered(directory, function, status)


@contextlib.contextmanager
def asked(function: Callable[..., Any], args: tuple[Any, ...]) -> Generator[Path]:
    """Give a directory that says what is to be computed, and takes the result."""
    with _interrupted_by_sigterm(), tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        Path(directory, _REQUEST).write_bytes(pickle.dumps((function, args)))
        yield Path(directory)


def answered(directory: Path, function: Callable[..., _T], status: int) -> _T:
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
