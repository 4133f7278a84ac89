"""Run a function in a separate process: a fresh interpreter, or a fork of the command.

A capture must not inherit memory, caches or tuned kernels of another capture. A kernel that kills
its process must not end the command. Both run in processes of `multiprocessing`:

- `run_isolated` starts a fresh interpreter ("spawn"). Use it where environment variables decide
  how Python, torch or a driver start, such as `TORCH_COMPILE_DISABLE`.
- `forked_processes` yields a runner whose processes are forks of a command that has imported torch
  and done nothing else.

"forkserver" with torch preloaded replaces neither. Its processes have imported torch with the
environment of the server, so environment variables come too late. Against a fork it imports torch
a second time, because the command needs torch to unpickle the results. Seconds until a process
that needs `onerank.capture.capture_script` answers (torch 2.13 for CPU, two busy cores, 2026-11-25;
the import takes 2.4 s of CPU):

    process    fork    forkserver    fresh interpreter
    first      0.05    5.0           5.0 to 6.5
    later      0.03    0.04          4.2 to 6.4

`fake_world/sender_processes.py` starts its processes itself: they inherit the state of the captured
rank, which does not pickle, and exchange messages with it in both directions.
"""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from onerank.capture.profiling.window_plan import Progress
from onerank.ir.errors import CaptureError

_T = TypeVar("_T")

GRACE_S = 30
"""Time for an interrupted process to remove its files before it is killed, in seconds."""

_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>

# Interval in which a silent process is checked for its end, in seconds.
_POLL_S = 1

_EVENT, _RETURNED, _RAISED, _BAD_FORK = "event", "returned", "raised", "bad fork"


class BadForkError(Exception):
    """The process is a fork of a process that had called the driver of a GPU."""


@dataclass(frozen=True)
class _Call:
    """A function call, and the state of the command that it runs with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    directory: str
    path: list[str]


class ProcessRunner(Protocol):
    """Runs functions one at a time, each in a separate process, as `run_isolated` does."""

    def __call__(self, function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        """Return `function(*args, progress)`."""
        ...


class ProcessDiedError(CaptureError):
    """A process ended without a result.

    Attributes:
        exit_code: as of `multiprocessing.Process`: negative for a signal.
    """

    def __init__(self, function: str, exit_code: int) -> None:
        cause = f"signal {-exit_code}" if exit_code < 0 else f"status {exit_code}"
        super().__init__(
            f"the process that ran {function} ended with {cause} and no result\n"
            "  its last output, above, names the cause",
            code="capture-process-died",
        )
        self.exit_code = exit_code


def run_isolated(
    function: Callable[..., _T],
    *args: Any,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> _T:
    """Return `function(*args, progress)` as a fresh interpreter computes it.

    Args:
        function: a function of a module, importable by its name.
        args: its first arguments; they and the result must pickle.
        progress: receives the messages that the function reports, while it runs.
        environment: environment variables of the interpreter, on top of the current ones.

    Raises:
        Exception: what the function raised.
        ProcessDiedError: the interpreter died.
    """
    with process_events(function, args, environment=environment) as events:
        return _last(events, progress)


@contextlib.contextmanager
def forked_processes() -> Generator[ProcessRunner]:
    """Yield a runner like `run_isolated` whose processes are forks of this one.

    A fork does not import torch again, which takes 5 s. It serves while this process has one
    thread and has not called the driver of a GPU: a driver works in no fork of a process that
    called it. Otherwise the runner starts fresh interpreters.
    """
    forks = sys.platform == "linux" and threading.active_count() == 1

    def run(function: Callable[..., _T], *args: Any, progress: Progress) -> _T:
        nonlocal forks
        if forks:
            with process_events(function, args, method="fork") as events:
                try:
                    return _last(events, progress)
                except BadForkError:
                    forks = False
        return run_isolated(function, *args, progress=progress)

    yield run


@contextlib.contextmanager
def process_events(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    environment: Mapping[str, str] | None = None,
    method: Literal["spawn", "fork"] = "spawn",
) -> Generator[Iterator[tuple[str, Any]]]:
    """Start `function(*args, report)` in a process; yield what it reports as it runs.

    Leaving the context ends the process: it is interrupted, and killed `GRACE_S` later.

    Args:
        function: a function of a module, importable by its name.
        args: its first arguments. The last one, `report`, takes any object that pickles.
        environment: environment variables of the process, on top of the current ones.
        method: start method of `multiprocessing`.

    Yields:
        Pairs of "event" and a reported object; the last is "returned" and the result.

    Raises:
        Exception: what the function raised.
        ProcessDiedError: the process died.
    """
    context: Any = multiprocessing.get_context(method)
    variables = {**os.environ, **(environment or {})}
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_run,
        args=(sender, _Call(function, tuple(args), variables, str(Path.cwd()), list(sys.path))),
    )
    with sigterm_interrupts():
        # A fork would inherit what is buffered, and print it again.
        sys.stdout.flush()
        sys.stderr.flush()
        with unseen_by_spawned_processes(variables):
            process.start()
        # Only when the child alone holds the sending end does its death end a `recv` here.
        sender.close()
        try:
            yield _events(receiver, process, function.__name__)
        finally:
            end_process(process)
            receiver.close()


@contextlib.contextmanager
def frozen_objects() -> Generator[None]:
    """Exclude the objects that exist now, such as those of the imports, from garbage collection.

    A full collection of torch's and transformers' objects takes 0.1 to 0.5 s. In a fork it also
    writes to each object that it tracks, which copies the pages that the processes share.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def named_progress(name: str, progress: Progress) -> Progress:
    """Return a progress callback that prefixes each message with the name of a run."""
    return lambda text: progress(f"{name}: {text}")


def _last(events: Iterator[tuple[str, Any]], progress: Progress) -> Any:
    for kind, value in events:
        if kind == _EVENT:
            progress(value)
        else:
            return value
    raise AssertionError("a process ends with its result or an error")


def _events(receiver: Connection, process: Any, name: str) -> Iterator[tuple[str, Any]]:
    while True:
        # A process that the script started may outlive the child and keep the pipe open. So the end
        # of the child is checked too, not only the end of the pipe.
        if not wait([receiver], timeout=_POLL_S) and process.is_alive():
            continue
        try:
            if not receiver.poll():
                raise EOFError
            kind, value = receiver.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise ProcessDiedError(name, process.exitcode) from None
        if kind == _BAD_FORK:
            raise BadForkError
        if kind != _EVENT:
            process.join(GRACE_S)  # it runs the exit handlers of the script
        if kind == _RAISED:
            raise value
        yield kind, value
        if kind == _RETURNED:
            return


def _run(sender: Connection, call: _Call) -> None:
    """Run the function in the new process as the command itself would."""
    _forget_exit_handlers()
    # The script may choose a start method, and test whether it runs in the main process.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    if (torch := sys.modules.get("torch")) is not None and torch.cuda._is_in_bad_fork():
        sender.send((_BAD_FORK, None))
        return
    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.directory)
    sys.path[:] = call.path
    _draw_seeds()

    def report(event: Any) -> None:
        # It fails if the command that listened has ended.
        with contextlib.suppress(OSError):
            sender.send((_EVENT, event))

    try:
        end_with_parent()
        with frozen_objects():
            outcome = _RETURNED, call.function(*call.args, report)
    except KeyboardInterrupt:  # the command reports the interruption
        outcome = None
    except Exception as error:  # noqa: BLE001  raised again by the command
        error.__cause__ = error.__context__ = error.__traceback__ = None
        outcome = _RAISED, error
    if outcome is not None:
        sender.send(outcome)
    sender.close()
    exit_handlers: Any = atexit
    exit_handlers._run_exitfuncs()  # a fork ends without them


def end_with_parent() -> None:
    """Interrupt this process when the process that started it ends, even by a kill; Linux only.

    Raises:
        KeyboardInterrupt: it has ended already.
    """
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None:
        return
    # As in `end_process`, an interrupted process removes its temporary files. Linux sends the
    # signal when the thread that started this process ends; it waits in `process_events`.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    # The signal is sent only for an end after the call.
    if os.getppid() != parent.pid:
        raise KeyboardInterrupt


def _forget_exit_handlers() -> None:
    """Drop the command's exit handlers: a fork would remove its temporary directories."""
    handlers: Any = atexit
    handlers._clear()
    finalizers: Any = weakref.finalize
    finalizers._registry.clear()
    finalizers._registered_with_atexit = False


def _draw_seeds() -> None:
    """Seed this process's generators anew: forks share the state of the command's generators."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


@contextlib.contextmanager
def unseen_by_spawned_processes(variables: dict[str, str]) -> Generator[None]:
    """Start a process that imports neither the caller's `__main__` nor files of its directory.

    multiprocessing imports `__main__` again in each child: a user's script without a
    `if __name__ == "__main__"` would capture again there. Without PYTHONSAFEPATH a child's
    interpreter finds a file `random.py` of the current directory before the standard library's.
    """
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(variables, PYTHONSAFEPATH="1")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def sigterm_interrupts() -> Generator[None]:
    """Treat a scheduler's SIGTERM like Ctrl-C: children end, temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    process = os.getpid()

    def interrupt(*_: object) -> None:
        if os.getpid() == process:
            raise KeyboardInterrupt
        # A worker that the script forked inherits this handler and ends as it would without it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    before: Any = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def end_process(process: Any) -> None:
    """End a process that still runs: an interrupted one removes its temporary files."""
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
    process.join()
    process.close()
