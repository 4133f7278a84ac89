"""Write the accuracy tables of the documentation from `benchmarks/results/accuracy.csv`.

`python tools/accuracy_tables.py` fills the tables. With `--check` it writes nothing, and exits with
code 1 if a table is out of date, or a figure is not in the file that its row names.

A row of the CSV is a figure: the claim of its table, the case, the hardware, the conditions, the
predicted and the measured value, the error, and the file of `benchmarks/results/` that has the
figure. Cells may be empty, and a table omits columns without a cell. `_HEADINGS` renames columns.
A page has a table between `<!-- claim: NAME -->` and `<!-- end -->`. `<!-- claim: headline -->` is
the table of the rows that are marked as headline.
"""

import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "accuracy.csv"

COLUMNS = ("case", "hardware", "conditions", "predicted", "measured", "error")
_FIGURES = ("predicted", "measured", "error")

_TABLE = re.compile(r"(<!-- claim: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What a headline row predicts; in the table of a claim the page's heading says it.
_TITLES = {
    "step-of-slice": "step of the job, from one slice",
    "step-in-astra-sim": "step in ASTRA-sim, from slices on one GPU",
    "slice-memory": "peak memory of a slice",
    "another-gpu-compute": "compute of a step on another GPU",
    "held-out": "single kernels, GPU family not in the fit",
}

# Headings of columns by claim, where a more specific one than the column's name fits.
_HEADINGS: dict[str, dict[str, str]] = {
    "step-of-slice": {"conditions": "estimate"},
    "step-in-astra-sim": {"conditions": "slice"},
    "step-in-astra-sim-no-host": {"conditions": "slice"},
    "step-in-loggopsim": {"conditions": "slice"},
    "replay-in-astra-sim": {"case": "trace", "conditions": "compared", "measured": "replayed"},
    "checker": {"case": "ASTRA-sim", "conditions": "onerank check", "measured": "workloads"},
    "slice-step": {"conditions": "compared"},
    "slice-compute": {"conditions": "compared"},
    "another-gpu-compute": {"conditions": "measured time"},
    "held-out": {"conditions": "kernels"},
    "decode": {"conditions": "time of"},
    "intervals": {"conditions": "kernels", "predicted": "interval", "measured": "inside"},
    "unlike-gpus": {"conditions": "mean predicted / measured"},
    "another-vendor": {"conditions": "80% interval"},
    "published-speeds": {"conditions": "80% interval"},
    "torchtitan": {"predicted": "predicted tokens/s", "measured": "published tokens/s"},
}

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def read_rows() -> list[dict[str, str]]:
    """Return the rows of the CSV, in order."""
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def missing_figures(rows: list[dict[str, str]]) -> list[str]:
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


def filled(page: str, rows: list[dict[str, str]], to_results: str) -> str:
    """Return the text of a page with its tables filled.

    Args:
        page: text of the page.
        rows: of the CSV.
        to_results: path from the page to `benchmarks/results`, for links; "" for no links.

    Raises:
        KeyError: the page names a claim without rows.
    """

    def table(match: re.Match[str]) -> str:
        if match[2] == "headline":
            selected = [
                {**row, "prediction": _TITLES[row["claim"]]} for row in rows if row["headline"]
            ]
            columns = ["prediction", *COLUMNS]
        else:
            selected = [row for row in rows if row["claim"] == match[2]]
            columns = [column for column in COLUMNS if any(row[column] for row in selected)]
        if not selected:
            raise KeyError(match[2])
        headings = _HEADINGS.get(match[2], {})
        lines = [
            f"| {' | '.join(headings.get(column, column) for column in columns)} | file |",
            "|" + "".join("---:|" if c in _FIGURES else "---|" for c in columns) + "---|",
        ]
        for row in selected:
            name = row["file"].rsplit(".", 1)[0]
            link = f"[{name}]({to_results}/{row['file']})" if to_results else f"`{name}`"
            lines.append(f"| {' | '.join(row[column] for column in columns)} | {link} |")
        return match[1] + "\n" + "\n".join(lines) + "\n\n" + match[3]

    return _TABLE.sub(table, page)


def main() -> None:
    """Fill the tables of all pages, or check them."""
    rows = read_rows()
    problems = missing_figures(rows)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        # The site has only the pages, so a link to a result file would be broken there.
        links = "benchmarks/results" if path.parent == ROOT else ""
        new = filled(text, rows, links)
        if new != text and "--check" in sys.argv[1:]:
            problems.append(f"{path.relative_to(ROOT)}: run python tools/accuracy_tables.py")
        elif new != text:
            path.write_text(new)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
