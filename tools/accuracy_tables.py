"""Write the accuracy tables of the documentation from `benchmarks/results/accuracy.csv`.

`python tools/accuracy_tables.py` fills the tables. With `--check` it writes nothing, and exits with
code 1 if a table is out of date, or a figure is not in the file that its row names.

A row of the CSV is a figure: its claim, the case, the hardware, the conditions, the predicted and
the measured value, the error, and the file of `benchmarks/results/` that has the figure. Cells may
be empty.

A page has a table between `<!-- claim: NAME -->` and `<!-- end -->`. NAME is one of

- a claim: a line for each of its rows,
- a table of `_WIDE_TABLES`: a line for each case, and a column for each kind of figure,
- `headline`: the rows that are marked as headline,
- a summary of `_SUMMARIES`: a line for each of several sets of rows, with the number of cases, the
  median, the mean and the largest error.

Columns with the same value in all lines, and the names of the files, stand below the table. The
times of a column have one unit.
"""

import csv
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from statistics import mean, median, mode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "accuracy.csv"
README = ROOT / "README.md"

COLUMNS = ("case", "hardware", "conditions", "predicted", "measured", "error")
_FIGURES = ("predicted", "measured", "error")

Row = dict[str, str]

_TABLE = re.compile(r"(<!-- claim: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What a headline row predicts; in the table of a claim the page's heading says it.
_TITLES = {
    "step-of-slice": "step of the job, from one slice",
    "step-in-astra-sim": "step in ASTRA-sim, from slices on one GPU",
    "slice-memory": "peak memory of a slice",
    "another-gpu-compute": "compute of a step on another GPU",
    "held-out-datasheet": "single kernels from the datasheet, GPU family not in the fit",
}

# Headings of columns by claim, where a more specific one than the column's name fits.
_HEADINGS: dict[str, dict[str, str]] = {
    "replay-in-astra-sim": {"case": "trace", "conditions": "compared", "measured": "replayed"},
    "conversion": {"measured": "kept"},
    "checker": {"case": "ASTRA-sim", "conditions": "onerank check", "measured": "workloads"},
    "another-gpu-compute": {"conditions": "measured time"},
    "published-speeds": {"conditions": "80% interval"},
    "torchtitan": {"predicted": "predicted tokens/s", "measured": "published tokens/s"},
    "intervals-within-a-gpu": {"predicted": "interval"},
    "fp8-from-bf16": {"error": "mean / median / p90"},
    "step-in-astra-sim-host-bound": {"conditions": "captured on"},
}


@dataclass(frozen=True)
class _Column:
    """A column of a wide table: one cell of the rows that `where` selects."""

    heading: str
    cell: str
    where: dict[str, str] = field(default_factory=dict[str, str])
    with_hardware: bool = False
    """Whether the hardware of the row follows the cell."""


@dataclass(frozen=True)
class _WideTable:
    """A table with a line for each case: rows with equal `keys` share a line."""

    claims: tuple[str, ...]
    keys: tuple[str, ...]
    columns: tuple[_Column, ...]
    hardware: str = ""
    """Prefix of the hardware of the rows that the table shows."""
    omits: tuple[str, ...] = ()
    """Figures that follow from others of the line, such as predicted from measured and error."""


def _of_lengths(suffix: str = "") -> _WideTable:
    """Return the table of errors and of interval coverage over and under 10 us."""
    columns: list[_Column] = []
    for length in ("over 10 us", "under 10 us"):
        errors = {"claim": f"held-out{suffix}", "conditions": length}
        inside = {"claim": f"intervals{suffix}", "conditions": length}
        lowest = {"claim": f"intervals{suffix}", "conditions": f"{length}, lowest"}
        columns += [
            _Column(f"{length}: error", "error", errors),
            _Column("inside", "measured", inside),
            _Column("lowest", "measured", lowest, with_hardware=True),
        ]
    return _WideTable((f"held-out{suffix}", f"intervals{suffix}"), ("case",), tuple(columns))


_ONE, _EACH = "one slice, the median rank", "each slice, the rank of its GPU"
_ACTIVE = "the same, NVLink active"


def _of_slices(claim: str, what: str) -> _WideTable:
    """Return the table of a time of the slices, compared in three ways."""
    return _WideTable(
        (claim,),
        ("case", "hardware", "file"),
        (
            _Column(what, "predicted", {"conditions": _ONE}),
            _Column("one slice", "error", {"conditions": _ONE}),
            _Column("each slice", "error", {"conditions": _EACH}),
            _Column("NVLink active", "error", {"conditions": _ACTIVE}),
        ),
    )


def _in_astra_sim(conditions: str, heading: str = "") -> _Column:
    where = {"claim": "step-in-astra-sim", "conditions": conditions}
    return _Column(f"ASTRA-sim, {heading or conditions}", "error", where)


_WIDE_TABLES: dict[str, _WideTable] = {
    "held-out": _of_lengths(),
    "held-out-datasheet": _of_lengths("-datasheet"),
    "intervals-within-a-gpu": _WideTable(
        ("intervals-within-a-gpu",),
        ("case", "predicted"),
        (
            *(
                _Column(gpu.partition("-")[0], "measured", {"hardware": gpu})
                for gpu in ("A100-SXM-80GB", "H100-SXM", "H200", "L40S", "B200", "all")
            ),
            _Column("in all", "conditions", {"hardware": "all"}),
        ),
    ),
    "decode": _WideTable(
        ("decode",),
        ("case", "hardware"),
        (
            _Column("kernels", "error", {"conditions": "kernels"}),
            _Column("CUDA graph", "error", {"conditions": "CUDA graph"}),
        ),
    ),
    "quantising-kernels": _WideTable(
        ("quantising-kernels",),
        ("case", "hardware"),
        (
            _Column("over 10 us", "error", {"conditions": "over 10 us"}),
            _Column("under 10 us", "error", {"conditions": "under 10 us"}),
        ),
    ),
    "unlike-gpus": _WideTable(
        ("unlike-gpus",),
        ("case",),
        tuple(
            column
            for gpu in ("V100", "T4")
            for column in (
                _Column(f"{gpu}: predicted / measured", "conditions", {"hardware": gpu}),
                _Column("error", "error", {"hardware": gpu}),
            )
        ),
    ),
    "another-vendor": _WideTable(
        ("another-vendor",),
        ("case",),
        tuple(
            column
            for pair in ("H100 to MI300X", "MI300X to H100")
            for column in (
                _Column(f"{pair}: predicted / measured", "error", {"hardware": pair}),
                _Column("80% interval", "conditions", {"hardware": pair}),
            )
        ),
    ),
    "slice-step": _of_slices("slice-step", "step of the slice"),
    "slice-compute": _of_slices("slice-compute", "compute of the slice"),
    "slice-counts": _WideTable(
        ("slice-kernels", "slice-memory"),
        ("case", "hardware", "file"),
        (
            _Column("operations: slice", "predicted", {"claim": "slice-kernels"}),
            _Column("real rank", "measured", {"claim": "slice-kernels"}),
            _Column("peak memory: slice", "predicted", {"claim": "slice-memory"}),
            _Column("real rank", "measured", {"claim": "slice-memory"}),
            _Column("error", "error", {"claim": "slice-memory"}),
        ),
    ),
    "step-of-two-gpus": _WideTable(
        ("step-in-astra-sim", "step-in-astra-sim-no-host", "step-in-loggopsim"),
        ("case", "hardware", "measured", "file"),
        (
            _in_astra_sim("NVLink active"),
            _in_astra_sim("as captured"),
            _Column("without host delays", "error", {"claim": "step-in-astra-sim-no-host"}),
            _Column("LogGOPSim, as captured", "error", {"claim": "step-in-loggopsim"}),
        ),
        hardware="2 x",
        omits=("predicted",),
    ),
    "step-of-four-gpus": _WideTable(
        ("step-of-slice", "step-in-astra-sim"),
        ("case", "hardware", "measured", "file"),
        (
            *(
                _Column(f"slice, {what}", "error", {"claim": "step-of-slice", "conditions": what})
                for what in ("slowest of 4", "median")
            ),
            _in_astra_sim("NVLink active"),
            _in_astra_sim("as captured"),
            _in_astra_sim("as captured, slowest of 4", "slowest of 4"),
        ),
        hardware="4 x",
        omits=("predicted",),
    ),
    "new-scripts": _WideTable(
        (
            *("new-scripts", "new-scripts-astra-sim", "new-scripts-mended"),
            *("new-scripts-memory", "new-scripts-memory-mended"),
        ),
        ("case", "hardware", "file"),
        (
            _Column("measured", "measured", {"claim": "new-scripts"}),
            _Column("predicted", "predicted", {"claim": "new-scripts"}),
            _Column("error", "error", {"claim": "new-scripts"}),
            _Column("ASTRA-sim", "error", {"claim": "new-scripts-astra-sim"}),
            _Column("after mends", "error", {"claim": "new-scripts-mended"}),
            _Column("peak memory", "error", {"claim": "new-scripts-memory"}),
            _Column("after mends", "error", {"claim": "new-scripts-memory-mended"}),
        ),
        omits=("predicted", "measured"),
    ),
}


@dataclass(frozen=True)
class _SummaryLine:
    """A line of the summary: the rows of one claim.

    Attributes:
        prediction: what is predicted.
        page: page of `docs/accuracy` that has the rows, or a heading of the same page.
        claim: of the rows.
        where: column -> regular expression that the row's value contains. A case may have a row
            for each of several conditions; the line takes one, so that no case counts twice.
    """

    prediction: str
    page: str
    claim: str
    where: Mapping[str, str] = field(default_factory=dict[str, str])

    def rows(self, rows: list[Row]) -> list[Row]:
        """Return the rows that the line sums up."""
        return [
            row
            for row in rows
            if row["claim"] == self.claim
            and all(re.search(pattern, row[column]) for column, pattern in self.where.items())
        ]


_FLOAT8 = {"case": "float8|rowwise"}

# Tables of the pages by name. Lines of the second one link to headings of its page.
_SUMMARIES: dict[str, tuple[_SummaryLine, ...]] = {
    "training-summary": (
        _SummaryLine(
            "torchtitan, published, bf16",
            "#torchtitan-published",
            "torchtitan",
            {"case": "^(?!.*(float8|rowwise))"},
        ),
        _SummaryLine(
            "torchtitan, published, float8", "#torchtitan-published", "torchtitan", _FLOAT8
        ),
        _SummaryLine(
            "float8 without context parallelism of 4 and 8",
            "#torchtitan-published",
            "torchtitan",
            {"case": r"^(?!.*CP [48]).*(float8|rowwise)"},
        ),
        _SummaryLine(
            "float8 on H100s, without those and asynchronous TP",
            "#torchtitan-published",
            "torchtitan",
            {"case": r"^(?!.*(CP [48]|async|405B)).*(float8|rowwise)", "hardware": "H100"},
        ),
        _SummaryLine(
            "Megatron-LM, published", "#megatron-published-and-simulated", "megatron-published"
        ),
        _SummaryLine(
            "torchtitan and examples on four H100s",
            "#jobs-measured-on-four-h100s",
            "torchtitan-no-device",
        ),
        _SummaryLine(
            "new scripts on two and four H100s, before they ran",
            "#new-scripts-predicted-before-they-ran",
            "new-scripts",
        ),
    ),
    "summary": (
        _SummaryLine(
            "step of a job on 2 or 4 GPUs in ASTRA-sim, from slices on one GPU, `--nvlink-active`",
            "job-steps.md",
            "step-in-astra-sim",
            {"conditions": "^NVLink active"},
        ),
        _SummaryLine(
            "the same from one slice, without a simulator",
            "job-steps.md",
            "step-of-slice",
            {"conditions": "^slowest of 4"},
        ),
        _SummaryLine(
            "step of a slice, against the rank that it stands for",
            "slices.md",
            "slice-step",
            {"conditions": f"^{_ONE}"},
        ),
        _SummaryLine("peak memory of a slice", "slices.md", "slice-memory"),
        _SummaryLine("captured step on another GPU", "other-gpus.md", "another-gpu-step"),
        _SummaryLine("its compute", "other-gpus.md", "another-gpu-compute"),
        _SummaryLine(
            "kernels over 10 us on a GPU family outside the fit, mean of a class",
            "kernels.md",
            "held-out",
            {"conditions": "^over 10 us"},
        ),
        _SummaryLine(
            "training captured without a device: jobs that torchtitan published, bf16",
            "training-speeds.md",
            "torchtitan",
            {"case": "^(?!.*(float8|rowwise))"},
        ),
        _SummaryLine("the same in float8", "training-speeds.md", "torchtitan", _FLOAT8),
        _SummaryLine(
            "the same of new scripts, before they ran on 2 or 4 GPUs",
            "training-speeds.md",
            "new-scripts",
        ),
        _SummaryLine(
            "step of a served model between measured points, CUDA graphs, median of its steps",
            "serving.md",
            "serving",
            {
                "case": "^(interpolated|measured with)",
                "conditions": "^replay; (40|20 steps; median)",
            },
        ),
        _SummaryLine(
            "step of a served model from shapes alone, mean of its steps",
            "serving.md",
            "serving",
            {"case": "^from shapes alone,", "conditions": "mean$"},
        ),
        _SummaryLine(
            "summed energy of a class of kernels", "energy.md", "power", {"case": "summed energy"}
        ),
    ),
}


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
        return [{**row, "prediction": _TITLES[row["claim"]]} for row in rows if row["headline"]]
    wide = _WIDE_TABLES.get(name)
    if wide is None:
        return [row for row in rows if row["claim"] == name]
    return [
        row
        for row in rows
        if row["claim"] in wide.claims and row["hardware"].startswith(wide.hardware)
    ]


def _summary(lines: Sequence[_SummaryLine], rows: list[Row], folder: str) -> str:
    """Return a summary.

    Args:
        lines: of the summary.
        rows: of the CSV.
        folder: where links find `docs/accuracy`.
    """
    text = [
        "| prediction | cases | median error | mean | largest | where |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for line in lines:
        chosen = line.rows(rows)
        errors = {index: _percent(row) for index, row in enumerate(chosen)}
        largest = chosen[max(errors, key=errors.__getitem__)]
        error = largest["error"].partition("%")[0] + "%"
        place = ", ".join(filter(None, (largest["case"], largest["hardware"])))
        if not any(errors.values()):
            error, place = "0.0%", ""
        page = line.page if line.page.startswith("#") else folder + line.page
        text.append(
            f"| [{line.prediction}]({page}) | {len(chosen)} "
            f"| {median(errors.values()):.1f}% | {mean(errors.values()):.1f}% | {error} | {place} |"
        )
    return "\n".join(text)


def _percent(row: Row) -> float:
    """Return the size of a row's error, without a figure that it is compared with."""
    return abs(float(row["error"].partition("%")[0]))


def _wide_lines(wide: _WideTable, rows: list[Row]) -> list[dict[str, str]]:
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
        if summary := _SUMMARIES.get(name):
            return f"{match[1]}\n{_summary(summary, rows, folder)}\n\n{match[3]}"
        selected = rows_of_table(name, rows)
        if not selected:
            raise KeyError(name)
        if wide := _WIDE_TABLES.get(name):
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
        headings = {c: _HEADINGS.get(name, {}).get(c, c) for c in columns} | figures
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
