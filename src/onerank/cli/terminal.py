"""Everything that commands print: escaped text, JSON, progress, and the state of the streams.

Names of kernels, modules and groups come from other people's files, and a path can hold any bytes.
`visible` escapes what would change the terminal or hide text, and no text is ever rich markup.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onerank.display import HIDDEN, visible, visible_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def say(text: str, *, err: bool = False, newline: bool = True) -> None:
    """Print text to stdout or stderr, escaped as `visible` does."""
    click.echo(visible(text), err=err, nl=newline)


def progress(message: str) -> None:
    """Print progress to stderr, so that a pipe receives only the result."""
    # The script that is captured may have closed stderr, which must not end the capture.
    with contextlib.suppress(OSError, ValueError):
        say(f"· {message}", err=True)


def print_json(data: Any) -> None:
    """Print a record as JSON; paths become strings, hidden characters JSON's escapes."""
    import msgspec

    try:
        octets = msgspec.json.encode(data, enc_hook=_path_text)
    except UnicodeEncodeError:  # a text from a path that is not UTF-8
        octets = json.dumps(msgspec.to_builtins(data, enc_hook=_path_text)).encode()
    text = msgspec.json.format(octets).decode()
    # These characters occur in JSON only within strings.
    click.echo(HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text))


def _path_text(value: Any) -> str:
    # JSON is UTF-8, and a path may not be: such a byte becomes \xNN.
    return visible(str(value)) if isinstance(value, Path) else str(value)


def console(*, err: bool = False) -> Any:
    """Return a rich console that interprets no markup; on a pipe it has 120 columns."""
    from rich.console import Console

    plain: dict[str, Any] = {"stderr": err, "highlight": False, "markup": False, "emoji": False}
    opened = Console(**plain)
    return opened if opened.is_terminal else Console(**plain, width=120)


@contextlib.contextmanager
def advancing(total: int, label: str) -> Generator[Callable[[], Any]]:
    """Show a progress bar; yield the function that advances it."""
    with _bars() as bars:
        task = bars.add_task(visible_line(label), total=total)
        yield lambda: bars.advance(task)


_FILES_PER_UPDATE = 50


@contextlib.contextmanager
def counting_files() -> Generator[Callable[[str, int, int], None]]:
    """Show a progress bar for each set of files; yield the callback for each file read.

    The callback takes the name of the set, the number of files read, and their total.
    """
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def file_read(name: str, done: int, files: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(f"reading {visible_line(name)}", total=files)
            if done % _FILES_PER_UPDATE == 0 or done == files:
                bars.update(tasks[name], completed=done)

        yield file_read


def _bars() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(err=True),
        transient=True,
    )


def flush_streams() -> None:
    """Flush stdout and stderr; skip a stream that is closed or cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def reserve_standard_streams() -> None:
    """Open the null device for each of the file descriptors 0 to 2 that is closed.

    Otherwise the next opened file gets that descriptor, and a library's messages end up in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            assert opened == number, f"descriptor {opened}, not {number}"


def discard_stdout() -> None:
    """Discard what stdout still holds, so that the interpreter does not fail on it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
