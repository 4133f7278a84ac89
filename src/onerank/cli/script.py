"""The script of `capture run` and `capture verify`: its argument, its options, its streams.

SCRIPT is a file or, with -m, a module; the script's arguments come after `--`. The script runs in
this process and may close, redirect or replace the standard streams. Progress therefore goes to a
copy of the descriptor of stderr, and the command's streams are restored when the script has ended.
"""

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from onerank.capture.options import SCRIPT, Options
from onerank.cli.common import UsageError
from onerank.cli.dataclass_to_click import Command, SectionedCommand, with_options
from onerank.cli.terminal import visible
from onerank.option_fields import option


def script_of(module: str) -> tuple[Path, str]:
    """Return the file of a module, and the name to run it by, without importing anything.

    Raises:
        UsageError: no such module in the working directory or among installed packages.
    """
    directory = str(Path.cwd())
    # As `python -m` does; `onerank` itself starts with the directory of its script there.
    sys.path.insert(0, directory)
    try:
        places = _places(module)
    finally:
        sys.path.remove(directory)
    for place in places:
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py"), module
        if (place / "__main__.py").is_file():
            return place / "__main__.py", f"{module}.__main__"
    raise UsageError(
        f"-m {module}: no such module, or package with a __main__.py, in {directory} or installed; "
        "expected a name with dots, as in python -m package.train",
        code="script-no-module",
    )


def _places(module: str) -> list[Path]:
    """Return where a module could lie, without a suffix."""
    # `importlib.util.find_spec` of a submodule imports its package, and so the user's code.
    first, *submodules = module.split(".")
    specs = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:  # a file
        return [Path(spec.origin).with_suffix("")] if spec.origin and not submodules else []
    return [Path(place, *submodules) for place in spec.submodule_search_locations]


class ScriptCommand(SectionedCommand):
    """A command that runs a script; the script's arguments come after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown option may be one of the script's."""
        # The arguments are not parsed when click finds the unknown option.
        script = next((arg for arg in args if arg.endswith(".py")), "SCRIPT")
        spellings = {name for option in self.params for name in option.opts}
        own = args[: args.index("--") if "--" in args else len(args)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # click reads -tp as -t with the value p.
            for arg in own:
                if f"-{arg}" in spellings:
                    raise click.NoSuchOption(arg, possibilities=[f"-{arg}"], ctx=ctx) from None
            raise UsageError(
                f"{error.format_message()}\nA script's own arguments come after --: "
                f"{ctx.command_path} {script} ... -- {error.option_name} ...",
                ctx,
                code="script-arguments-unseparated",
            ) from None


class _Script(click.Path):
    """A file that exists, or with -m the name of a module."""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if ctx is not None and ctx.params.get("module"):
            return Path(value)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, kw_only=True)
class ScriptOptions:
    """How the SCRIPT argument names the script."""

    module: bool = option(
        "SCRIPT is a module's name, as in python -m.",
        "-m",
        "--module",
        heading=SCRIPT,
        default=False,
        is_eager=True,  # parsed before SCRIPT, whose type depends on it
    )

    def located(self, script: Path) -> tuple[Path, str | None]:
        """Return the file of SCRIPT and, of a module, the name to run it by.

        Raises:
            UsageError: there is no such module.
        """
        return script_of(str(script)) if self.module else (script, None)


def job_options(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Return a decorator that gives a command SCRIPT, its arguments and the options of a capture.

    The command gets them as `script`, `args`, `named` (`ScriptOptions`) and `job` (`Options`).

    Args:
        without: options of a capture that the command does not offer.
    """
    script = _Script(exists=True, dir_okay=False, path_type=Path)

    def decorate(command: Command) -> Command:
        command = with_options(Options, "job", without=without)(command)
        command = with_options(ScriptOptions, "named")(command)
        command = click.argument("args", nargs=-1, metavar="[-- ARGS]")(command)
        return click.argument("script", type=script)(command)

    return decorate


_CLEAR_LINE = "\r\x1b[K"

# Ends a message that replaces its predecessor on a terminal.
_COUNTER = re.compile(r", (step \d+ of \d+|[\d,]+( of about [\d,]+)? operators)$")


@contextlib.contextmanager
def script_streams(*, stdout_to_stderr: bool) -> Generator[Callable[[str], None]]:
    """Yield a progress callback for a script that runs in this context.

    Args:
        stdout_to_stderr: whether what the script and its subprocesses print goes to stderr,
            because stdout receives the command's JSON.
    """
    # A buffer that is flushed after `dup2` would arrive at the other stream.
    _flush()
    # Copies, since the script may close or redirect the descriptors.
    saved = {number: os.dup(number) for number in (0, 1, 2) if _is_open(number)}
    shown = os.fdopen(os.dup(2), "w", errors="backslashreplace") if 2 in saved else None
    if stdout_to_stderr and 2 in saved:
        # The descriptor and not `sys.stdout`: subprocesses and C++ code write to it, too.
        os.dup2(2, 1)
    try:
        with _progress(shown) as progress, _crashes_named(shown):
            yield progress
    finally:
        # What the script printed and did not flush goes where its other output went.
        if stdout_to_stderr and {1, 2} <= saved.keys():
            os.dup2(saved[2], 1)
            _flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        _restore("stdout", 1)
        _restore("stderr", 2)
        _flush()
        if shown is not None:
            shown.close()


@contextlib.contextmanager
def _crashes_named(shown: TextIO | None) -> Generator[None]:
    """Print the script's traceback if a library crashes the process (SIGSEGV, SIGABRT)."""
    # A script or PYTHONFAULTHANDLER may have enabled it with another stream.
    if shown is None or faulthandler.is_enabled():
        yield
        return
    # To the copy, since the script may close stderr before it crashes.
    faulthandler.enable(shown)
    try:
        yield
    finally:
        faulthandler.disable()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A stream may be closed, None, or no stream at all.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _restore(name: str, number: int) -> None:
    """Set `sys.NAME` to the interpreter's original stream, or to a new one if that was closed."""
    stream: Any = getattr(sys, f"__{name}__")
    if stream is None or stream.closed:
        # As for Python's stderr, text that the stream cannot encode is escaped and raises no error.
        stream = open(number, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        setattr(sys, f"__{name}__", stream)
    setattr(sys, name, stream)


@contextlib.contextmanager
def _progress(shown: TextIO | None) -> Generator[Callable[[str], None]]:
    """Yield the function that shows a message.

    Each message is a line. On a terminal a counter replaces the line of the count before it.
    """
    if shown is None:
        yield lambda _: None
        return
    if not shown.isatty():
        yield lambda text: print(f"\u00b7 {visible(text)}", file=shown, flush=True)
        return
    live = _LiveLine(shown)
    with live.shared_with("stdout"), live.shared_with("stderr"):
        yield live.show
    live.end()


class _LiveLine:
    """The last line of a terminal, which the next message of the same kind replaces."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._kind: str | None = None
        self._at_start = True

    def show(self, text: str) -> None:
        """Show a message; a counted step replaces the step shown before it."""
        kind = _COUNTER.sub("", text) if _COUNTER.search(text) else None
        if self._kind is not None:
            self._write(_CLEAR_LINE if kind == self._kind else "\n")
        elif not self._at_start:
            self._write("\n")
        self._write(f"\u00b7 {visible(text)}" + ("" if kind is not None else "\n"))
        self._kind, self._at_start = kind, True

    def end(self) -> None:
        """Keep the line that is shown."""
        if self._kind is not None:
            self._write("\n")
            self._kind = None

    def interrupted_by(self, text: str) -> None:
        """Make room for output of the script."""
        if text:
            self.end()
            self._at_start = text.endswith("\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._terminal.write(text)
            self._terminal.flush()

    @contextlib.contextmanager
    def shared_with(self, name: str) -> Generator[None]:
        """Let the script's writes to `sys.NAME` start on a new line."""
        stream: Any = getattr(sys, name)
        setattr(sys, name, _SharedStream(stream, self))
        try:
            yield
        finally:
            setattr(sys, name, stream)


class _SharedStream:
    """A stream of the script that shares its terminal with a live line."""

    def __init__(self, stream: TextIO, live: _LiveLine) -> None:
        self._stream = stream
        self._live = live

    def write(self, text: str) -> int:
        """Write to the stream, below the live line."""
        self._live.interrupted_by(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __iter__(self) -> Any:
        # `iter()` looks up the method on the class, where `__getattr__` has no effect.
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
