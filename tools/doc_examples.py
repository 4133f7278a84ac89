"""Run the examples of the documentation and compare what they print with what the pages show.

`python tools/doc_examples.py [PAGE ...]` runs the pages and exits with code 1 if one differs;
`--update` writes the actual output into the pages instead. The rules for authors:

- A fence marked `console` has commands after `$ ` and the output below each. `...` in the output
  matches any text or lines. Without output, only the exit code is compared.
- A fence marked `python` runs; the blocks of a page share a namespace, in a process of the page.
- Any other fence (`sh`, `text`, `toml`) does not run. Use `sh` for commands that need a GPU or a
  simulator.
- `<!-- setup: COMMAND -->` runs before the page's first block. `<!-- exit: 2 -->` before a fence
  names the exit code of its last command. `<!-- file: NAME -->` before a fence writes it to a file.

Each page runs in a temporary directory, with links to `traces` and `examples` of this repository.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^( *)```([\w-]*)(.*)$")
_COMMENT = re.compile(r"<!-- (setup|exit|file): (.*?) -->")

_TIMEOUT_S = 300.0

TERMINAL = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
"""Environment variables of commands: tables depend on the width, and colours on the terminal."""


@dataclass(frozen=True)
class Command:
    """A command of a console block.

    Attributes:
        text: the command, continuation lines included.
        output: the lines that the page shows below it.
        first: number of the output's first line in the page, from 0.
    """

    text: str
    output: tuple[str, ...]
    first: int


@dataclass(frozen=True)
class Block:
    """A fence of a page: its language, its lines, and the settings of the comment before it."""

    language: str
    lines: tuple[str, ...]
    first: int
    indent: str = ""
    exit_code: int = 0
    file: str = ""

    def commands(self) -> list[Command]:
        """Return the commands of a console block in order."""
        commands: list[Command] = []
        text: list[str] = []
        output: list[str] = []
        start = self.first
        # The additional "$ " ends the last command.
        for number, line in enumerate((*self.lines, "$ "), start=self.first):
            if text and text[-1].endswith("\\") and not output:
                text.append(line.removeprefix("> ").strip())
            elif line.startswith("$ "):
                if text:
                    commands.append(Command("\n".join(text), tuple(output), start))
                text, output, start = [line[2:]], [], number + 1
            else:
                if not output:
                    start = number
                output.append(line)
        return commands


@dataclass
class Page:
    """A Markdown page with its runnable blocks.

    Attributes:
        path: the file.
        setup: commands to run first.
        blocks: all fences, in order.
    """

    path: Path
    setup: list[str] = field(default_factory=list[str])
    blocks: list[Block] = field(default_factory=list[Block])

    @property
    def runnable(self) -> bool:
        """Whether the page has a block that runs."""
        return any(block.language in {"console", "python"} for block in self.blocks)


class ExampleError(Exception):
    """An example failed, or its output differs from the page."""


def pages() -> list[Path]:
    """Return the pages whose examples run: README.md and everything under docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_page(path: Path) -> Page:
    """Return the fences and setup commands of a page."""
    page = Page(path)
    pending: dict[str, str] = {}
    opened: tuple[str, str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(path.read_text().splitlines()):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, body = (fence[1], fence[2], number + 1), []
            for kind, text in _COMMENT.findall(line):
                if kind == "setup":
                    page.setup.append(text)
                else:
                    pending[kind] = text
        # A fence with a language cannot close one: inside a fence it is text.
        elif fence and not fence[2]:
            indent, language, first = opened
            page.blocks.append(
                Block(
                    language,
                    tuple(line.removeprefix(indent) for line in body),
                    first,
                    indent,
                    int(pending.pop("exit", "0")),
                    pending.pop("file", ""),
                )
            )
            opened = None
        else:
            body.append(line)
    return page


def run_in_shell(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell."""
    environment = {**os.environ, **TERMINAL}
    # The `onerank` of this interpreter's environment, whatever the caller's PATH is.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment,
        # An example that reads stdin would wait for ever.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def _new_process(target: Callable[..., None], *args: Any) -> Any:
    # A fresh interpreter: this process may have run anything.
    return multiprocessing.get_context("spawn").Process(target=target, args=args)


@dataclass(frozen=True)
class Runner:
    """Functions that run the examples of a page; the defaults do what a reader would do.

    Attributes:
        command: runs a command in a directory.
        process: returns the process, not yet started, that calls a function with arguments. The
            Python blocks of a page run in it.
    """

    command: Callable[[str, Path], subprocess.CompletedProcess[str]] = run_in_shell
    process: Callable[..., Any] = _new_process


def run_page(
    path: Path, directory: Path, *, update: bool = False, runner: Runner | None = None
) -> int:
    """Run the examples of a page in `directory`; return how many blocks ran.

    Args:
        path: the page.
        directory: an empty directory.
        update: write the actual output into the page instead of comparing.
        runner: how they run.

    Raises:
        ExampleError: an exit code or an output differs; names the page and the line.
    """
    page = read_page(path)
    runner = runner or Runner()
    for name in ("traces", "examples"):
        (directory / name).symlink_to(ROOT / name)
    for command in page.setup:
        _run(runner, command, directory, 0, f"{path}: setup")
    changes: list[tuple[int, int, list[str]]] = []
    ran = 0
    with _python_blocks(runner, directory) as execute:
        for block in page.blocks:
            if block.file:
                (directory / block.file).write_text("\n".join(block.lines) + "\n")
            elif block.language == "python":
                execute("\n".join(block.lines), f"{path}:{block.first}")
                ran += 1
            elif block.language == "console":
                commands = block.commands()
                for command in commands:
                    expected_code = block.exit_code if command is commands[-1] else 0
                    where = f"{path}:{command.first}"
                    actual = _run(runner, command.text, directory, expected_code, where)
                    if command.output and not _matches(command.output, actual):
                        if not update:
                            raise ExampleError(_difference(where, command, actual))
                        lines = [f"{block.indent}{line}".rstrip() for line in actual]
                        changes.append((command.first, len(command.output), lines))
                ran += 1
    if changes:
        text = path.read_text().splitlines()
        # From the last change to the first, so that the numbers of the lines above stay valid.
        for first, count, lines in reversed(changes):
            text[first : first + count] = lines
        path.write_text("\n".join(text) + "\n")
    return ran


def _run(runner: Runner, command: str, directory: Path, exit_code: int, where: str) -> list[str]:
    """Run a command and return the lines of its stdout.

    stderr is not compared: progress and notes go there.
    """
    done = runner.command(command, directory)
    if done.returncode != exit_code:
        codes = f"exit code {done.returncode}, expected {exit_code}"
        raise ExampleError(f"{where}: {codes}\n$ {command}\n{done.stdout}{done.stderr}")
    return [line.rstrip() for line in done.stdout.rstrip("\n").splitlines()]


@contextlib.contextmanager
def _python_blocks(runner: Runner, directory: Path) -> Generator[Callable[[str, str], None]]:
    """Yield a function that runs a Python block, by its source and its place in the page.

    The blocks run in one separate process, which the first of them starts: what a page registers
    or patches is gone when the next page runs.
    """
    process: Any = None
    ours, theirs = multiprocessing.Pipe()

    def execute(source: str, where: str) -> None:
        nonlocal process
        if process is None:
            process = runner.process(_execute_blocks, theirs, directory)
            process.start()
            # Only when the process alone holds this end does its death end a `recv` here.
            theirs.close()
        try:
            ours.send((source, where))
            error = ours.recv() if ours.poll(_TIMEOUT_S) else "no answer in time"
        except (EOFError, ConnectionError):
            error = "the process died"
        if error:
            raise ExampleError(f"{where}: {error}")

    try:
        yield execute
    finally:
        ours.close()
        if process is not None:
            process.join(_TIMEOUT_S)
            process.kill()


def _execute_blocks(blocks: "Connection[Any, Any]", directory: Path) -> None:
    """Run the blocks that arrive; answer each with its error, or an empty string."""
    os.chdir(directory)
    names: dict[str, object] = {"__name__": "__main__"}
    # The other end closes after the last block.
    with contextlib.suppress(EOFError):
        while True:
            source, where = blocks.recv()
            error = ""
            try:
                # Pages show no output of Python blocks, so only that they run is checked.
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(source, where, "exec"), names)
            except Exception as raised:  # noqa: BLE001  raised again by the other end
                error = f"{type(raised).__name__}: {raised}"
            blocks.send(error)


def _matches(expected: tuple[str, ...], actual: list[str]) -> bool:
    """Return whether the output matches the page.

    A line `...` matches any number of lines, `...` in a line any text. Runs of spaces are equal,
    because the width of a column depends on measured times. Empty lines are ignored.
    """
    pattern = ""
    for line in expected:
        words = " ".join(line.split())
        if words == "...":
            # Lazy: as few lines as the rest allows.
            pattern += r"(?:[^\n]*\n)*?"
        elif words:
            pattern += "[^\n]*".join(map(re.escape, words.split("..."))) + r"\n"
    lines = (" ".join(line.split()) for line in actual)
    printed = "".join(f"{line}\n" for line in lines if line)
    return re.fullmatch(pattern, printed) is not None


def _difference(where: str, command: Command, actual: list[str]) -> str:
    shown = "\n".join(command.output)
    return f"{where}: `{command.text}` printed\n{chr(10).join(actual)}\nand the page shows\n{shown}"


def _selected(names: list[str]) -> Iterator[Path]:
    for path in [Path(name).resolve() for name in names] or pages():
        if read_page(path).runnable:
            yield path


def main() -> None:
    """Run the pages named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("page", nargs="*")
    parser.add_argument("--update", action="store_true", help="write the actual output")
    options = parser.parse_args()
    failed = 0
    for path in _selected(options.page):
        with tempfile.TemporaryDirectory() as directory:
            try:
                ran = run_page(path, Path(directory), update=options.update)
            except ExampleError as error:
                failed += 1
                sys.stdout.write(f"FAILED {error}\n")
            else:
                sys.stdout.write(f"{path.relative_to(ROOT)}: {ran} blocks ran\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
