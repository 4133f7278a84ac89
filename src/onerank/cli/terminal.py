"""Everything that commands print: escaped text, tables, JSON, progress; the state of the streams.

Names of kernels, modules and groups come from other people's files, and a path can hold any bytes.
`visible` escapes what would change the terminal or hide text, and no text is ever rich markup.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onerank.display import HIDDEN, time, visible, visible_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MODULE_ROWS = 14
"""Modules that a table lists; --json has all."""

RANKS = 12
"""Ranks listed on one line; --json has all."""

_LEAST_VALUE = 40
"""Columns of a terminal next to the labels below which values are not wrapped."""

KERNEL_NAME = 120
"""Characters of a kernel name in a table; --json has all."""

# Nearly every kernel of PyTorch has these, and they hide the part of the name that differs.
_NAMESPACES = re.compile(r"^void |at::native::|\(anonymous namespace\)::|binary_internal::|c10::")


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
    click.echo(re.sub(HIDDEN, lambda match: json.dumps(match[0])[1:-1], text))


def _path_text(value: Any) -> str:
    # JSON is UTF-8, and a path may not be: such a byte becomes \xNN.
    return visible(str(value)) if isinstance(value, Path) else str(value)


def console(*, err: bool = False) -> Any:
    """Return a rich console that interprets no markup; on a pipe it has 120 columns."""
    from rich.console import Console

    plain: dict[str, Any] = {"stderr": err, "highlight": False, "markup": False, "emoji": False}
    opened = Console(**plain)
    # rich takes 80 columns for a pipe, which folds most tables.
    return opened if opened.is_terminal else Console(**plain, width=120)


def amount(value: float) -> str:
    """Format an amount of money: with two decimals from 100 on, else with four digits."""
    if abs(value) >= 100:
        return f"{value:.2f}"
    if value == 0 or abs(value) < 1e-6:
        return f"{value:.3e}" if value else "0"
    return f"{value:.{3 - math.floor(math.log10(abs(value)))}f}"


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    texts: Sequence[int] = (0,),
) -> None:
    """Print a table.

    Args:
        title: title of the table.
        columns: headings.
        rows: cells, as many as headings.
        texts: columns of text, left-aligned and folded. The others hold figures, which are
            right-aligned and never cut or folded.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        lines([], f"{title}: none")
        return
    printed = Table(
        title=visible_line(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for position, column in enumerate(map(visible_line, columns)):
        if position in texts:
            printed.add_column(column, justify="left", overflow="fold")
        else:
            printed.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        # A Text, because rich reads markup in a str: a kernel's name can hold brackets.
        printed.add_row(*(Text(visible_line(str(cell))) for cell in row))
    console().print(printed)


def counted(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def short_kernel(name: str) -> str:
    """Return the start of a kernel's name, without PyTorch's namespaces."""
    short = _NAMESPACES.sub("", name)
    return short if len(short) <= KERNEL_NAME else f"{short[: KERNEL_NAME - 1]}…"


def lines(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print labelled values, one per line."""
    out = console()
    if title:
        out.print(visible_line(title), style="bold", soft_wrap=True)
    width = max((len(label) for label, _ in pairs), default=0)
    for label, value in pairs:
        line = visible(f"  {label.ljust(width)}  {value}")
        # A terminal would continue a long note below the labels. A pipe gets it on one line.
        fits = len(line) <= out.width or "\n" in line
        if out.is_terminal and not fits and out.width > width + _LEAST_VALUE:
            line = textwrap.fill(
                line,
                out.width,
                subsequent_indent=" " * (width + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
        out.print(line, soft_wrap=True)


def time_or_dash(ns: int) -> str:
    """Return a time as text; a dash for 0."""
    return time(ns) if ns else "-"


def ratio(after: float, before: float) -> str:
    """Format how many times as large a figure is; "-" if it was 0."""
    if not before:
        return "-"
    value = after / before
    # Three decimals show nothing of a step that takes a CPU 2,000 times as long as a GPU.
    return f"x{value:.3f}" if value >= 0.1 else f"x{value:.2g}"


def counts_of_evidence(counts: dict[str, int], times_ns: dict[str, int] | None = None) -> str:
    """Return the number of nodes by evidence, and the share of the time that each has."""
    kinds = [f"{n} {evidence(name)}" for name, n in counts.items()]
    if times_ns is not None and len(counts) > 1:
        shares = parts(times_ns)
        kinds = [
            f"{kind} ({shares[name]} of the time)" for name, kind in zip(counts, kinds, strict=True)
        ]
    return ", ".join(kinds) or "none"


def evidence(name: str) -> str:
    """Return the words for a kind of evidence."""
    return {"none": "of unknown origin"}.get(name, name.replace("_", " "))


def parts(amounts: dict[str, int]) -> dict[str, str]:
    """Return each amount's share of their sum in percent."""
    whole = sum(amounts.values()) or 1
    return {name: _percent(amount / whole * 100) for name, amount in amounts.items()}


def _percent(share: float) -> str:
    # A rounded "0.0%" or "100.0%" would say none or all.
    if 0 < share < 0.05:
        return "<0.1%"
    return ">99.9%" if 99.95 <= share < 100 else f"{share:.1f}%"


def rank_list(ranks: tuple[int, ...]) -> str:
    """Return ranks as text: a range, at most eight of them, or their number."""
    if not ranks:
        return "?"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"


@contextlib.contextmanager
def advancing(total: int, label: str) -> Generator[Callable[[], Any]]:
    """Show a progress bar; yield the function that advances it."""
    with _bars() as bars:
        task = bars.add_task(visible_line(label), total=total)
        yield lambda: bars.advance(task)


@contextlib.contextmanager
def advancing_parts() -> Generator[Callable[..., None]]:
    """Show a progress bar for each part of the work; yield the callback that advances one.

    The callback takes the name of the part, how much of it is complete, and the whole; `detail` is
    shown after the name.
    """
    with _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, complete: int, whole: int, *, detail: str = "") -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(visible_line(name), total=whole)
            shown = visible_line(f"{name}, {detail}" if detail else name)
            bars.update(tasks[name], completed=complete, description=shown)

        yield advance


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
            # POSIX takes the lowest free number.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, f"descriptor {opened}, not {number}"


def discard_stdout() -> None:
    """Discard what stdout still holds, so that the interpreter's flush at exit does not fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
