"""Write the accuracy tables of the documentation from `benchmarks/results/accuracy.csv`.

`python tools/accuracy_tables.py` fills the tables. With `--check` it writes nothing, and exits with
code 1 if a table is out of date, or a figure is not in the file that its row names.

A row of the CSV is a figure: its claim, the case, the hardware, the conditions, the predicted and
the measured value, the error, and the file of `benchmarks/results/` that has the figure. Cells may
be empty.

A page has a table between `<!-- claim: NAME -->` and `<!-- end -->`. NAME is one of

- a claim: a line for each of its rows,
- a table of `WIDE_TABLES` in `accuracy_layouts`: a line for each case, and a column for each kind
  of figure,
- `headline`: the rows that are marked as headline,
- a summary of `SUMMARIES` in `accuracy_layouts`: a line for each of several sets of rows, with the
  number of cases, the median, the mean and the largest error.

Columns with the same value in all lines, and the names of the files, stand below the table. The
times of a column have one unit.
"""

import csv
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from statistics import mean, median, mode

from accuracy_layouts import HEADINGS, SUMMARIES, TITLES, WIDE_TABLES, Row, SummaryLine, WideTable

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "accuracy.csv"
README = ROOT / "README.md"

COLUMNS = ("case", "hardware", "conditions", "predicted", "measured", "error")
_FIGURES = ("predicted", "measured", "error")


_TABLE = re.compile(r"(<!-- claim: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_THOUSANDS = re.compile(r"(?<![\w.,])\d{4,}(?!\w)")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# The word of a comparison in a cell, such as `(baseline 16.3%)`. If all cells of a column have the
# same, the heading shows it instead.
_COMPARED = re.compile(r"\((baseline|roofline|ratio) ")


def read_rows() -> list[Row]:
    """Return the rows of the CSV, in order."""
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def missing_figures(rows: list[Row]) -> list[str]:
    """Return a line for each figure that is not in the file that its row names."""
    texts: dict[str, str] = {}
    missing: list[str] = []
    for number, row in enumerate(rows, start=2):  # line 1 is the header
        path = RESULTS / row["file"]
        if not path.is_file():
            missing.append(f"line {number}: no file {row['file']}")
            continue
        # Commas of thousands are removed from both sides: 34,998 in a row is 34998 in the file.
        text = texts.setdefault(row["file"], path.read_text().replace(",", ""))
        for column in _FIGURES:
            for figure in _NUMBER.findall(row[column]):
                plain = re.escape(figure.replace(",", ""))
                # A whole number, so that 1.2 is not found in 11.2 or 1.25.
                if not re.search(rf"(?<![\d.]){plain}(?!\d|\.\d)", text):
                    missing.append(f"line {number}: {figure} is not in {row['file']}")
    return missing


def rows_of_table(name: str, rows: list[Row]) -> list[Row]:
    """Return the rows that the table of a page shows."""
    if name == "headline":
        return [{**row, "prediction": TITLES[row["claim"]]} for row in rows if row["headline"]]
    wide = WIDE_TABLES.get(name)
    if wide is None:
        return [row for row in rows if row["claim"] == name]
    return [
        row
        for row in rows
        if row["claim"] in wide.claims
        and row["hardware"].startswith(wide.hardware)
        and re.match(wide.cases, row["case"])
    ]


def _summary(lines: Sequence[SummaryLine], rows: list[Row], folder: str) -> str:
    """Return a summary.

    Args:
        lines: of the summary.
        rows: of the CSV.
        folder: where links find `docs/accuracy`.
    """
    with_intervals = any(line.inside for line in lines)
    headings = ["prediction", "cases", "median error", "mean", "largest", "where"]
    marks = ["---", *["---:"] * 4, "---"]
    if with_intervals:
        headings.insert(5, "in the 80% interval")
        marks.insert(5, "---:")
    text = [f"| {' | '.join(headings)} |", f"|{'|'.join(marks)}|"]
    for line in lines:
        chosen = line.rows(rows)
        errors = {index: _percent(row) for index, row in enumerate(chosen)}
        largest = chosen[max(errors, key=errors.__getitem__)]
        error = largest["error"].partition("%")[0] + "%"
        place = ", ".join(filter(None, (largest["case"], largest["hardware"])))
        if not any(errors.values()):
            error, place = "0.0%", ""
        page = line.page if line.page.startswith("#") else folder + line.page
        middle, average = median(errors.values()), mean(errors.values())
        cells = [f"[{line.prediction}]({page})", str(len(chosen))]
        cells += [f"{middle:.1f}%", f"{average:.1f}%", error, place]
        if with_intervals:
            cells.insert(5, _inside(line, chosen, rows))
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _inside(line: SummaryLine, chosen: list[Row], rows: list[Row]) -> str:
    """Return how many steps of the chosen cases are inside their intervals; "" if not recorded."""
    keys = ("case", "hardware", "conditions", "file")
    wanted = {tuple(row[key] for key in keys) for row in chosen}
    counts = [
        [int(number) for number in row["measured"].split(" of ")]
        for row in rows
        if row["claim"] == line.inside and tuple(row[key] for key in keys) in wanted
    ]
    return " of ".join(str(sum(column)) for column in zip(*counts, strict=True))


def _percent(row: Row) -> float:
    """Return the size of a row's error, without a figure that it is compared with."""
    return abs(float(row["error"].partition("%")[0]))


def _wide_lines(wide: WideTable, rows: list[Row]) -> list[dict[str, str]]:
    """Return the lines of a wide table, by column.

    Raises:
        ValueError: a figure is in no cell, or two are in one.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(
            tuple(row[key] for key in wide.keys), {k: row[k] for k in wide.keys}
        )
        shown = {*wide.keys, *wide.omits}
        for number, column in enumerate(wide.columns):
            if not row[column.cell] or any(row[k] != v for k, v in column.where.items()):
                continue
            if str(number) in line:
                raise ValueError(f"two figures for {column.heading} of {row}")
            # No such column has GPUs that differ in memory alone; the suffix would widen it.
            hardware = f" {row['hardware'].removesuffix('-80GB')}" if column.with_hardware else ""
            line[str(number)] = row[column.cell] + hardware
            shown.add(column.cell)
        if lost := [figure for figure in _FIGURES if row[figure] and figure not in shown]:
            raise ValueError(f"no cell for {lost[0]} of {row}")
    return list(lines.values())


_TIME = re.compile(r"([\d,.]+) (s|ms|us)")
_NS = {"s": 10**9, "ms": 10**6, "us": 10**3}


def _in_one_unit(lines: list[dict[str, str]], column: str) -> None:
    """Convert the times of a column to the unit that most of its lines have."""
    times = [(line, match) for line in lines if (match := _TIME.fullmatch(line.get(column, "")))]
    if not times:
        return
    unit = mode(match[2] for _, match in times)
    for line, match in times:
        if match[2] != unit:
            factor = Decimal(_NS[match[2]]) / _NS[unit]
            line[column] = f"{(Decimal(match[1].replace(',', '')) * factor).normalize():,f} {unit}"


def _markdown(
    lines: list[dict[str, str]],
    headings: dict[str, str],
    right: set[str],
    files: list[str],
) -> str:
    """Return a table, and below it what all its lines share.

    Args:
        lines: cells by column.
        headings: of the columns, in order.
        right: columns that are aligned to the right.
        files: the file of each line, or the one file of all.
    """
    numbers = {file: str(number) for number, file in enumerate(dict.fromkeys(files), start=1)}
    for column in right:
        _in_one_unit(lines, column)
        for line in lines:
            line[column] = _THOUSANDS.sub(lambda m: f"{int(m[0]):,}", line.get(column, ""))
    below: list[str] = []
    for column, heading in list(headings.items()):
        values = {line.get(column, "") for line in lines} - {""}
        if not values:
            del headings[column]
        elif (
            column not in right
            and len(lines) > 1
            and all(line.get(column) == lines[0].get(column) for line in lines)
        ):
            below.append(f"{heading.capitalize()}: {values.pop()}.")
            del headings[column]
        # The word that all cells have in parentheses moves into the heading.
        elif len(words := {(_COMPARED.search(value) or [None, ""])[1] for value in values}) == 1:
            word = words.pop()
            headings[column] = f"{heading} ({word})" if word else heading
            for line in lines:
                line[column] = _COMPARED.sub("(", line.get(column, ""))
    if len(numbers) > 1:
        headings["file"] = "file"
        for line, file in zip(lines, files, strict=True):
            line["file"] = numbers[file]
    text = [
        f"| {' | '.join(headings.values())} |",
        "|" + "".join("---:|" if column in right else "---|" for column in headings),
        *(f"| {' | '.join(line.get(column, '') for column in headings)} |" for line in lines),
    ]
    # Names, not links: the site has no result files.
    names = [f"`{file.rsplit('.', 1)[0]}`" for file in numbers]
    if len(names) == 1:
        below.append(f"File: {names[0]}.")
    else:
        below.append(f"Files: {', '.join(f'{n} {name}' for n, name in enumerate(names, start=1))}.")
    return "\n".join(text) + (f"\n\n{' '.join(below)}" if below else "")


def filled(page: str, rows: list[Row], folder: str = "") -> str:
    """Return the text of a page with its tables filled.

    Args:
        page: text of the page.
        rows: of the CSV.
        folder: where links of the page find `docs/accuracy`.

    Raises:
        KeyError: the page names a table without rows.
        ValueError: a figure has no cell in a wide table, or shares one.
    """

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if summary := SUMMARIES.get(name):
            return f"{match[1]}\n{_summary(summary, rows, folder)}\n\n{match[3]}"
        selected = rows_of_table(name, rows)
        if not selected:
            raise KeyError(name)
        if wide := WIDE_TABLES.get(name):
            lines = _wide_lines(wide, selected)
            columns = [key for key in wide.keys if key != "file"]
            figures = {str(number): column.heading for number, column in enumerate(wide.columns)}
            right: set[str] = {"measured", *figures}
            files = [line["file"] for line in lines if "file" in line]
            files = files or list(dict.fromkeys(row["file"] for row in selected))
        else:
            lines = [dict(row) for row in selected]
            columns = ["prediction", *COLUMNS] if name == "headline" else COLUMNS
            figures: dict[str, str] = {}
            right = {str(column) for column in _FIGURES}
            files = [row["file"] for row in selected]
        headings = {c: HEADINGS.get(name, {}).get(c, c) for c in columns} | figures
        return f"{match[1]}\n{_markdown(lines, headings, right, files)}\n\n{match[3]}"

    return _TABLE.sub(table, page)


def main() -> None:
    """Fill the tables of all pages, or check them."""
    rows = read_rows()
    problems = missing_figures(rows)
    for path in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        new = filled(text, rows, "docs/accuracy/" if path == README else "")
        if new != text and "--check" in sys.argv[1:]:
            problems.append(f"{path.relative_to(ROOT)}: run python tools/accuracy_tables.py")
        elif new != text:
            path.write_text(new)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
