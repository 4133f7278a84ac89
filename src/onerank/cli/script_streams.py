"""The standard streams while a script runs in this process, and the progress shown next to it.

A script may close, redirect or replace the standard streams. Progress therefore goes to a copy of
the descriptor of stderr, and the command's own streams are restored when the script has ended.
"""

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Callable, Generator
from typing import Any, TextIO

from onerank.cli.terminal import visible

_CLEAR_LINE = "\r\x1b[K"

_COUNTER = re.compile(r", step \d+ of \d+$")
"""Ends a message that replaces its predecessor on a terminal."""


@contextlib.contextmanager
def script_streams(*, stdout_to_stderr: bool) -> Generator[Callable[[str], None]]:
    """Yield a progress callback for a script that runs in this context.

    Args:
        stdout_to_stderr: whether what the script and its subprocesses print goes to stderr,
            because stdout receives the command's JSON.
    """
    _flush()
    saved = {number: os.dup(number) for number in (0, 1, 2) if _is_open(number)}
    shown = os.fdopen(os.dup(2), "w", errors="backslashreplace") if 2 in saved else None
    if stdout_to_stderr and 2 in saved:
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
    """Let a crash in a library (SIGSEGV, SIGABRT) print the line of the script that led there."""
    if shown is None or faulthandler.is_enabled():
        yield
        return
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
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, None, or no stream
            stream.flush()


def _restore(name: str, number: int) -> None:
    """Set `sys.NAME` to the interpreter's own stream, or to a new one if that was closed."""
    stream: Any = getattr(sys, f"__{name}__")
    if stream is None or stream.closed:
        stream = open(number, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        setattr(sys, f"__{name}__", stream)
    setattr(sys, name, stream)


@contextlib.contextmanager
def _progress(shown: TextIO | None) -> Generator[Callable[[str], None]]:
    """Yield what shows a message: on a line of its own, but counted steps of a terminal on one."""
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
        """Let the script's writes to `sys.NAME` start on a line of their own."""
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
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
