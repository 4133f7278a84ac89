"""The Markdown of the documentation: what the strict build of the site does not report."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[list[str]]:
    """Return the runs of lines between empty lines, without code."""
    runs: list[list[str]] = [[]]
    in_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        if in_code or not line.strip():
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_and_tables_stand_apart(page: Path):
    """Without an empty line, a heading below a table is one of its rows."""
    for block in blocks(page.read_text()):
        rows = [line.startswith("|") for line in block]
        headings = [line.startswith("#") for line in block]
        assert all(rows) or not any(rows), block
        assert len(block) == 1 or not any(headings), block


def test_a_heading_in_a_table_is_found():
    (table, text) = blocks("| a |\n|---|\n| b |\n## Next\n\ntext\n")
    assert table[-1] == "## Next"
    assert text == ["text"]
