"""The accuracy tables show the figures of the result files."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from accuracy_tables import filled, missing_figures, read_rows, rows_of_table  # noqa: E402

ROWS = read_rows()
PAGES = sorted((ROOT / "docs/accuracy").glob("*.md"))


def test_every_figure_is_in_the_file_that_its_row_names():
    assert missing_figures(ROWS) == []


def test_a_figure_that_is_not_in_its_file_is_reported():
    row = {**ROWS[0], "predicted": "107.208 ms"}
    assert len(missing_figures([row])) == 1
    assert len(missing_figures([{**ROWS[0], "file": "no-such-file.txt"}])) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_up_to_date(page: Path):
    text = page.read_text()
    assert filled(text, ROWS) == text, "run: python tools/accuracy_tables.py"


def test_a_table_shows_every_row():
    names = {
        name for page in PAGES for name in re.findall(r"<!-- claim: ([\w-]+) -->", page.read_text())
    }
    shown = [row for name in names - {"headline"} for row in rows_of_table(name, ROWS)]
    assert [row for row in ROWS if row not in shown] == []


def test_a_wide_table_refuses_a_figure_that_it_would_not_show():
    page = "<!-- claim: decode -->\n<!-- end -->"
    row = next(row for row in ROWS if row["claim"] == "decode")
    with pytest.raises(ValueError, match="no cell for error"):
        filled(page, [{**row, "conditions": "something else"}])
    with pytest.raises(ValueError, match="two figures"):
        filled(page, [row, {**row, "error": "99.9%"}])


def _number(cell: str) -> float:
    return float(cell.split(maxsplit=1)[0].replace(",", ""))


def _rounding(cell: str) -> float:
    """Return the largest relative error by the digits that a cell omits."""
    _, _, digits = cell.split(maxsplit=1)[0].partition(".")
    return 0.5 * 10.0 ** -len(digits) / _number(cell)


def test_an_error_follows_from_what_was_predicted_and_measured():
    compared = 0
    for row in ROWS:
        if row["predicted"] and row["measured"] and row["error"].endswith("%"):
            ratio = _number(row["predicted"]) / _number(row["measured"]) - 1
            # The error is that of the unrounded times.
            tolerance = 0.05 + 100 * (_rounding(row["predicted"]) + _rounding(row["measured"]))
            assert 100 * ratio == pytest.approx(float(row["error"][:-1]), abs=tolerance), row
            compared += 1
    assert compared > 100
