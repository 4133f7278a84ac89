"""Shared by all commands: errors with exit code 2, consoles, progress bars, JSON output."""

import atexit
import contextlib
import errno
import functools
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import click

if TYPE_CHECKING:
    from rich.progress import TaskID

P = ParamSpec("P")

R = TypeVar("R")

TRACE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _OutputFile(click.Path):
    """A file or directory to write; an unwritable place is reported before any work is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self.dir_okay and str(value).endswith(os.sep):
            self.fail(f"'{value}' names a directory; name the file to write.", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        parent = path.parent
        if path.exists() and not path.is_file():
            return path  # a pipe or a device: nothing is put beside it
        if not self.dir_okay and not parent.exists() and parent.parent.is_dir():
            parent = parent.parent  # the output's directory is made with it
        if not parent.is_dir():
            self.fail(f"'{path}': there is no directory '{parent}'; make it first.", param, ctx)
        try:  # os.access says yes to root, of /proc and of read-only mounts too
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            why = error.strerror or error
            self.fail(f"'{path}': nothing can be written to '{parent}': {why}.", param, ctx)
        return path


class _TraceFile(_OutputFile):
    """A Chakra trace to write. Simulators open only `.et`, and `.json` means Chakra's JSON."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if path.suffix != ".et" and (path.is_file() or not path.exists()):
            named = path.with_suffix(".et")
            self.fail(f"'{path}': a Chakra trace is named .et: '{named}', say.", param, ctx)
        return path


class _Number(click.FloatRange):
    """A range of numbers that `nan` is not in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is no number of a known size.", param, ctx)
        return number


GB_PER_S = _Number(min=1e-3, max=1e6)
"""A bandwidth in GB/s, from 1 MB/s on: at less than that times have no place in 64 bits."""

LATENCY_NS = _Number(min=0, max=1e12)

MINUTES = _Number(min=0, min_open=True)

GIGABYTES = _Number(min=0, max=1000)

BYTES = click.IntRange(0, 2**62)

OUTPUT = _OutputFile(dir_okay=False, writable=True)

TRACE_OUTPUT = _TraceFile(dir_okay=False, writable=True)

OUTPUT_DIRECTORY = _OutputFile(file_okay=False, writable=True)

OUTPUT_OR_DIRECTORY = _OutputFile(writable=True)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


# EFBIG: `ulimit -f` and file systems with a size limit report it where a disk would be full.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors a user can mend into a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            from onerank.ir.errors import (
                OneRankError,
                ScriptError,  # late: numpy comes with it
            )

            if isinstance(error, ScriptError) and error.script_traceback:
                click.echo(error.script_traceback.rstrip(), err=True)
            if isinstance(error, BrokenPipeError):
                raise  # whoever read the output has enough; click ends in silence
            if isinstance(error, OSError):
                place = f"{error.filename}: " if error.filename else ""
                code = "disk-full" if error.errno in _DISK_FULL else "file-access"
                click.echo(f"error[{code}]: {place}{error.strerror or error}", err=True)
            elif isinstance(error, OneRankError):
                click.echo(f"error[{error.code}]: {error}", err=True)
            elif isinstance(error, MemoryError):
                given = ", ".join(str(value) for value in _inputs(kwargs))
                click.echo(f"error: this machine's memory is too small for {given}", err=True)
            else:
                raise
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted: nothing was written", err=True)
            sys.exit(130)

    return wrapped


def _inputs(given: Mapping[str, Any]) -> list[Path]:
    """Return the files among a command's arguments that are there, and so are no output."""
    found: list[Path] = []
    for value in given.values():
        some = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
        found += [one for one in some if isinstance(one, Path) and one.is_file()]
    return found


def keep_inputs(output: Path, *inputs: Path | None) -> None:
    """Refuse to write over what is read.

    Raises:
        UsageError: `output` is one of `inputs`.
    """
    for path in inputs:
        if path is not None and output.exists() and output.samefile(path):
            raise click.UsageError(f"--output {output} is the input {path}; name another file")


def console(*, err: bool = False) -> Any:
    """Return a rich console; on a pipe it is wide enough for every table."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False)
    return made if made.is_terminal else Console(stderr=err, highlight=False, width=120)


@contextlib.contextmanager
def stdout_to_stderr() -> Generator[None]:
    """Let what the script prints, its subprocesses included, go to stderr: stdout is our JSON's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def print_json(data: Any) -> None:
    """Print a record as JSON; paths become strings."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str)).decode())


def progress(message: str) -> None:
    """Print progress to stderr, so that a pipe receives only the result."""
    click.echo(f"· {message}", err=True)


_FILES_PER_UPDATE = 50


@contextlib.contextmanager
def advancing(total: int, what: str) -> Generator[Callable[[], Any]]:
    """Show a bar; yield what advances it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(err=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def counting_files() -> Generator[Callable[[str, int, int], None]]:
    """Show a progress bar for each set of files; yield the callback for each file read.

    The callback takes the name of the set, the number of files read, and their total.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console(err=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def told(name: str, done: int, files: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"reading {name}", total=files)
            if done % _FILES_PER_UPDATE == 0 or done == files:
                bar.update(tasks[name], completed=done)

        yield told


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
