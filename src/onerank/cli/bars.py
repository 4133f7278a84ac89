"""Bars of progress, on stderr where that is a terminal."""

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from onerank.cli.frame import console

if TYPE_CHECKING:
    from rich.progress import TaskID

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
    """Show a bar for each set of files; yield what is told of each file read.

    It takes the name of the set, how many of its files are read, and how many it has.
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
