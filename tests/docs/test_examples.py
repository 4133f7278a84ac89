"""The examples of the documentation run, and print what the pages show."""

import builtins
import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from own_process import new_process, run_command

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from doc_examples import (  # noqa: E402
    TERMINAL,
    ExampleError,
    Runner,
    pages,
    read_page,
    run_in_shell,
    run_page,
)

PAGES = [path for path in pages() if read_page(path).runnable]


def _run_forked(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of onerank in a fork, which saves seconds of imports; others in a shell."""
    lexer = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    program, *arguments = lexer
    operators = [word for word in arguments if not word.strip(lexer.punctuation_chars)]
    if program not in {"onerank", "capture", "annotate"} or operators or set(command) & {*"$*?~`"}:
        return run_in_shell(command, directory)
    group = () if program == "onerank" else (program,)
    with contextlib.chdir(directory):
        return run_command(*group, *arguments, environment=TERMINAL, forks=True)


FORKED = Runner(_run_forked, new_process)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path):
    # The README's examples run as a reader runs them.
    runner = Runner() if page.name == "README.md" else FORKED
    assert run_page(page, tmp_path, runner=runner) > 0


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_an_output_that_differs_is_reported(tmp_path: Path):
    page = _page(tmp_path, "```console\n$ echo one; echo two\none\nthree\n```\n")
    directory = tmp_path / "run"
    directory.mkdir()
    with pytest.raises(ExampleError):
        run_page(page, directory)


def test_an_ellipsis_stands_for_any_text_and_update_writes_the_output(tmp_path: Path):
    text = "<!-- exit: 3 -->\n```console\n$ echo a 17 b\na ... b\n$ echo c; exit 3\nd\n```\n"
    page = _page(tmp_path, text)
    directory = tmp_path / "run"
    directory.mkdir()
    assert run_page(page, directory, update=True) == 1
    assert page.read_text() == text.replace("\nd\n", "\nc\n")


def test_a_wrong_exit_code_is_reported(tmp_path: Path):
    directory = tmp_path / "run"
    directory.mkdir()
    with pytest.raises(ExampleError):
        run_page(_page(tmp_path, "```console\n$ exit 2\n```\n"), directory)


def test_python_blocks_share_a_process_that_leaves_nothing_behind(tmp_path: Path):
    blocks = ["import builtins\nbuiltins.mark = 1", "assert builtins.mark == 1", "assert False"]
    runs, fails = tmp_path / "runs", tmp_path / "fails"
    for directory, count in ((runs, 2), (fails, 3)):
        directory.mkdir()
        (directory / "run").mkdir()
        text = "".join(f"```python\n{block}\n```\n" for block in blocks[:count])
        _page(directory, text)
    assert run_page(runs / "page.md", runs / "run", runner=FORKED) == 2
    assert not hasattr(builtins, "mark")
    with pytest.raises(ExampleError, match=r"page\.md:8: AssertionError"):
        run_page(fails / "page.md", fails / "run", runner=FORKED)
