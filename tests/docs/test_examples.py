"""The examples of the documentation run, and print what the pages show."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from doc_examples import ExampleError, pages, read_page, run_page  # noqa: E402

PAGES = [path for path in pages() if read_page(path).runnable]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path):
    assert run_page(page, tmp_path) > 0


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
