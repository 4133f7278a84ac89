"""Shared by all commands: argument types, errors with exit code 2, notes of traces.

`onerank --help` imports this module, so modules that import numpy, polars or torch are imported
inside functions.
"""

import atexit
import contextlib
import errno
import functools
import io
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import click

from onerank.cli.terminal import discard_stdout, flush_streams, reserve_standard_streams, say

if TYPE_CHECKING:
    from onerank.ir import Graph
    from onerank.ir.notes import Note


class UsageError(click.UsageError):
    """A command was called in a way that makes no sense; `code` is stable, as of other errors."""

    def __init__(self, message: str, ctx: click.Context | None = None, *, code: str) -> None:
        super().__init__(message, ctx)
        self.code = code


class InvalidValue(click.BadParameter):
    """The value of an option or argument is refused; `code` is stable, as of other errors."""

    def __init__(
        self,
        message: str,
        param: click.Parameter | None = None,
        ctx: click.Context | None = None,
        *,
        code: str,
        param_hint: str | None = None,
    ) -> None:
        super().__init__(message, ctx, param, param_hint)
        self.code = code


_CLICK_CODES: tuple[tuple[type[click.ClickException], str], ...] = (
    (click.NoSuchOption, "usage-unknown-option"),
    (click.MissingParameter, "usage-missing-value"),
    (click.BadParameter, "usage-invalid-value"),
    (click.UsageError, "usage-error"),
    (click.ClickException, "command-error"),
)
"""Codes of errors that click itself raises; subclasses come first."""


def usage_code(error: click.ClickException) -> str:
    """Return the stable code of an error in the arguments of a command."""
    if isinstance(error, UsageError | InvalidValue):
        return error.code
    return next(code for kind, code in _CLICK_CODES if isinstance(error, kind))


P = ParamSpec("P")

R = TypeVar("R")


class _Input(click.Path):
    """A file or a directory to read. A pipe is refused, because opening it can block forever."""

    def __init__(self, *, dir_okay: bool = False) -> None:
        super().__init__(exists=True, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        bundle = Path(os.fsdecode(value))
        # Not `serving.bundle.MANIFEST`: its module takes long to load.
        if not self.dir_okay and (bundle / "bundle.json").is_file():
            raise InvalidValue(
                f"'{bundle}' is a bundle; name a trace of one step, such as {bundle}/traces/1.et, "
                f"or draw it: onerank report {bundle}",
                param,
                ctx,
                code="input-is-bundle",
            )
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.is_file() and not path.is_dir():
            raise InvalidValue(
                f"'{path}' is a pipe or a device; expected a file.",
                param,
                ctx,
                code="input-no-file",
            )
        return path


TRACE = INPUT = _Input()

INPUT_OR_DIRECTORY = _Input(dir_okay=True)

INPUT_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


class _OutputFile(click.Path):
    """A file or directory to write; an unwritable place is reported before any work is done."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self.dir_okay and str(value).endswith(os.sep):
            raise InvalidValue(
                f"'{value}' names a directory; name the file to write.",
                param,
                ctx,
                code="output-is-directory",
            )
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        parent = path.parent
        if path.exists() and not path.is_file():
            # A pipe or a device is written directly, without a temporary file.
            return path
        if not self.dir_okay and not parent.exists() and parent.parent.is_dir():
            # `output_files.replacing` creates one missing directory.
            parent = parent.parent
        if not parent.is_dir():
            raise InvalidValue(
                f"'{path}': there is no directory '{parent}'; create it first.",
                param,
                ctx,
                code="output-no-directory",
            )
        # For root, os.access reports /proc and read-only mounts as writable.
        try:
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            why = error.strerror or error
            raise InvalidValue(
                f"'{path}': '{parent}' is not writable: {why}.",
                param,
                ctx,
                code="output-not-writable",
            ) from None
        return path


class _TraceFile(_OutputFile):
    """A Chakra trace to write. Simulators open only `.et`, and `.json` means Chakra's JSON."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if path.suffix != ".et" and (path.is_file() or not path.exists()):
            suggestion = path.with_suffix(".et")
            raise InvalidValue(
                f"'{path}': the name of a Chakra trace ends in .et, such as '{suggestion}'.",
                param,
                ctx,
                code="output-not-et",
            )
        return path


class Number(click.FloatRange):
    """A range of finite numbers; click's own range accepts `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            raise InvalidValue(
                f"'{value}' is not a finite number.", param, ctx, code="number-not-finite"
            )
        return number


GB_PER_S = Number(min=1e-3, max=1e6)
"""A bandwidth in GB/s, at least 1 MB/s: below that, times in ns would exceed 64 bits."""

# At most 1,000 s, far above any network's.
LATENCY_NS = Number(min=0, max=1e12)

POSITIVE = Number(min=0, min_open=True)

GIGABYTES = Number(min=0, max=1000)

# Bytes are an int64 column of a graph; half its range leaves room for the sum of two.
BYTES = click.IntRange(0, 2**62)

OUTPUT = _OutputFile(dir_okay=False, writable=True)

TRACE_OUTPUT = _TraceFile(dir_okay=False, writable=True)

OUTPUT_DIRECTORY = _OutputFile(file_okay=False, writable=True)

OUTPUT_OR_DIRECTORY = _OutputFile(writable=True)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


# `ulimit -f` and file systems with a size limit report EFBIG instead of ENOSPC.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that a user can correct into a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with exit_on_errors(kwargs):
            return command(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def exit_on_errors(arguments: Mapping[str, Any]) -> Generator[None]:
    """Print an error that a user can correct, and exit with code 2.

    Args:
        arguments: the command's arguments; the message of a MemoryError lists their files.
    """
    try:
        with _interrupts_unwrapped():
            yield
    except Exception as error:
        # Imported only here, because `onerank.ir` imports numpy, which delays every command.
        from onerank.ir.errors import (
            OneRankError,
            ScriptError,
        )

        if isinstance(error, ScriptError) and error.script_traceback:
            say(error.script_traceback.rstrip(), err=True)
        # A BrokenPipeError is an OSError, but no error of the user: `onerank show t.et | head`.
        if isinstance(error, BrokenPipeError):
            raise  # click exits without a message
        if isinstance(error, OSError):
            place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
            code = "disk-full" if error.errno in _DISK_FULL else "file-access"
            say(f"error[{code}]: {place}{error.strerror or error}", err=True)
        elif isinstance(error, OneRankError):
            say(f"error[{error.code}]: {error}", err=True)
        elif isinstance(error, MemoryError):
            inputs = ", ".join(str(value) for value in _inputs(arguments))
            say(f"error[out-of-memory]: this machine has too little memory for {inputs}", err=True)
        else:
            raise
        if isinstance(error, OSError) and not error.filename:
            # stdout may be the stream that cannot be written.
            discard_stdout()
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        # A command that has stored something says so as the text of the exception.
        say(f"interrupted: {str(interrupt) or 'nothing was written'}", err=True)
        sys.exit(130)  # as a shell reports SIGINT: 128 + 2


@contextlib.contextmanager
def _interrupts_unwrapped() -> Generator[None]:
    """Raise KeyboardInterrupt in place of an error that one caused."""
    try:
        yield
    except Exception as error:
        # An extension module that is interrupted while it is imported raises ImportError from it
        # (pybind11). A function in C that ignores the interrupt and returns raises SystemError.
        cause: BaseException | None = error
        seen: set[int] = set()
        # `raise error from error` makes an error its own cause.
        while cause is not None and id(cause) not in seen:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt(*cause.args) from error
            seen.add(id(cause))
            cause = cause.__cause__ or cause.__context__
        raise


def interrupted(store: Path) -> KeyboardInterrupt:
    """Return the interrupt of a command that stores results, which says whether there are any.

    Args:
        store: directory of the results, which the first one creates.
    """
    if not store.is_dir() or not any(store.iterdir()):
        return KeyboardInterrupt()
    return KeyboardInterrupt("results so far are stored: the same command goes on from there")


def _inputs(arguments: Mapping[str, Any]) -> list[Path]:
    """Return the existing files among a command's arguments: its inputs, not its output."""
    files: list[Path] = []
    for value in arguments.values():
        values = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
        files += [item for item in values if isinstance(item, Path) and item.is_file()]
    return files


class ReportingMain(click.Command):
    """A command that also reports errors in its arguments, which occur before it runs."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run as click does; print every error with hidden characters escaped."""
        # Tests and other programs call a command as a function and handle its errors.
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        reserve_standard_streams()
        with exit_on_errors({}):
            try:
                # click's standalone mode prints errors itself, without a code and with hidden
                # characters.
                code = super().main(*args, standalone_mode=False, **extra)
                # None if it was closed before the process started.
                if sys.stdout is not None:
                    # The interpreter's flush at exit would report a full disk as exit code 120.
                    sys.stdout.flush()
            except click.exceptions.Abort as abort:
                # click turns Ctrl-C into Abort, and would exit with 1 where a shell expects 130.
                raise KeyboardInterrupt from abort
            except click.ClickException as error:
                text = io.StringIO()
                error.show(file=text)
                # click formats usage and hint itself; only the label of the message is replaced.
                coded = text.getvalue().replace("Error: ", f"error[{usage_code(error)}]: ", 1)
                say(coded, err=True, newline=False)
                sys.exit(error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


def keep_inputs(output: Path, *inputs: Path | None) -> None:
    """Refuse to overwrite an input.

    Raises:
        UsageError: `output` is one of `inputs`.
    """
    for path in inputs:
        # Compares files, not names: a link or another spelling may lead to the input.
        if path is not None and output.exists() and output.samefile(path):
            raise UsageError(
                f"--output {output} is the input {path}; name another file", code="output-is-input"
            )


def read_trace(path: Path, *, seen: "set[Note] | None" = None) -> "Graph":
    """Read a trace and repeat its notes on stderr: results are no better than their trace.

    Commands that show the trace's summary print the notes there, and read with `onerank.read`.

    Args:
        path: a Chakra `.et` file.
        seen: notes that are not repeated; receives those of this trace.
    """
    import onerank

    graph = onerank.read(path)
    repeat_notes(graph, seen=seen)
    return graph


def repeat_notes(graph: "Graph", *, seen: "set[Note] | None" = None) -> None:
    """Print a trace's notes on stderr, except those in `seen`, which receives them."""
    known: set[Note] = set() if seen is None else seen
    for note in graph.job.measurement.notes:
        if note not in known:
            known.add(note)
            # Notes go to stderr, so that a pipe receives only the result.
            say(f"note[{note.code}]: {note.text}", err=True)


def ends_despite_threads(command: Callable[P, R]) -> Callable[P, R]:
    """Exit without interpreter shutdown if a script's daemon threads still run.

    At shutdown the interpreter stops such a thread at any point. Inside torch's C++ code that
    aborts the process, although the trace has been written.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # A program that calls the command as a function may have daemon threads, which do not
        # count.
        before = set(threading.enumerate())
        try:
            result = command(*args, **kwargs)
        except SystemExit as exit_:
            _exit_despite(before, exit_.code)
            raise
        _exit_despite(before, 0)
        return result

    return wrapped


def _exit_despite(before: set[threading.Thread], code: Any) -> None:
    running = [thread for thread in threading.enumerate() if thread.daemon and thread not in before]
    if running and isinstance(code, int):
        # `os._exit` skips exit handlers, which remove temporary directories, and flushes nothing.
        exits: Any = atexit
        exits._run_exitfuncs()
        flush_streams()
        os._exit(code)
