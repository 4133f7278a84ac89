"""`onerank plan`: the best layout of a job on a cluster, without a device."""

import contextlib
import csv
import html
import io
import math
import os
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from onerank.cli.common import (
    INPUT,
    OUTPUT_DIRECTORY,
    UsageError,
    as_json,
    interrupted,
    reports_errors,
)
from onerank.cli.dataclass_to_click import SIZE, with_options
from onerank.cli.terminal import advancing_parts, counted, lines, print_json, table
from onerank.display import size
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.ir.notes import Note
    from onerank.plan.config import PlanConfig
    from onerank.plan.layouts import Layout, Outcome, PredictedRange
    from onerank.plan.make_plan import Plan
    from onerank.plan.tasks import Executor

THIS_MACHINE = "this machine"

# Notes below the title; plan.json has those of each row.
_NOTES = 5

# Layouts that do not fit, of which plan.csv has all.
_NEAREST = 3

_AXES = ("tp", "cp", "ep", "pp", "dp")

_TABLES = ("plan.csv", "plan.json", "pareto.html")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Where the plan and the results it is made from are written, and what runs the work."""

    output: Path = option("Directory to write.", "-o", "--output", type=OUTPUT_DIRECTORY)
    store: Path | None = option(
        "Directory of results, which later runs reuse.  [default: OUTPUT/store]",
        default=None,
        type=OUTPUT_DIRECTORY,
    )
    workers: int | None = option(
        "Processes of this machine.  [default: one per core]", default=None, type=SIZE
    )
    ray: str | None = option(
        "Run on a Ray cluster: that of ADDRESS or RAY_ADDRESS, else a new one on this machine.",
        default=None,
        metavar="[ADDRESS]",
        is_flag=False,
        flag_value=THIS_MACHINE,
    )
    rows: int = option("Rows of the table.", default=10, type=SIZE, show_default=True)


@click.command()
@click.argument("config", type=INPUT)
@with_options(PlanOptions)
@as_json
@reports_errors
def plan(config: Path, options: PlanOptions, as_json: bool) -> None:
    """Find the fastest layouts of a job on a cluster, without a device.

    CONFIG (TOML) names a model or a script, a cluster, a batch, and what may vary: tensor, pipeline
    and data parallelism, schedule, sharding, micro-batch, recomputation. The stages that differ are
    captured without a device; each layout is laid out from them. Results are stored as they come:
    after a kill, the same command goes on from there.
    """
    from onerank.cli.charts.plotly_figure import plotly_js
    from onerank.plan.config import read_config
    from onerank.plan.make_plan import make_plan
    from onerank.plan.tasks import Store

    read = read_config(config)
    # First, so that a missing Plotly is reported at once.
    library = plotly_js()
    # Absolute, because the work runs in the configuration's directory.
    output = options.output.absolute()
    # A table of an earlier run must not pass for one of a failed run.
    for name in _TABLES:
        (output / name).unlink(missing_ok=True)
    store = Store((options.store or output / "store").absolute())
    executor = _executor(read, options, store.directory)
    in_place = contextlib.chdir(read.directory)
    with _created(output), in_place, advancing_parts() as progress:
        try:
            planned = make_plan(read, store, executor, progress)
        except KeyboardInterrupt as interrupt:
            raise interrupted(store.directory) from interrupt
    commands = _write(planned, output, options.rows, library)
    if as_json:
        print_json(planned.record())
    else:
        render_plan(planned, options.rows, str(config))
        lines(
            [
                ("all layouts", f"{options.output / 'plan.csv'}, {options.output / 'plan.json'}"),
                ("Pareto fronts", str(options.output / "pareto.html")),
                ("commands of a row", f"{options.output / 'commands'}, 1.sh to {commands}.sh"),
            ],
            "Files",
        )


@contextlib.contextmanager
def _created(directory: Path) -> Generator[None]:
    """Create the directory if it is missing; remove a new one that an error leaves empty."""
    exists = directory.exists()
    # First, so that a directory that cannot be created is reported at once.
    directory.mkdir(exist_ok=True)
    try:
        yield
    except BaseException:
        if not exists:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def _executor(config: "PlanConfig", options: PlanOptions, store: Path) -> "Executor":
    from onerank.plan.make_plan import PRELOAD
    from onerank.plan.tasks import LocalPool, RayCluster

    if options.ray is None:
        workers = options.workers or os.cpu_count() or 1
        return LocalPool(workers, config.directory, PRELOAD)
    if options.workers is not None:
        raise UsageError(
            "--workers counts processes of this machine; Ray decides on its workers",
            code="plan-workers-ray",
        )
    address = None if options.ray == THIS_MACHINE else options.ray
    return RayCluster(config.directory, address, (store, options.output))


def render_plan(planned: "Plan", rows: int, title: str) -> None:
    """Print the best layouts, those that do not fit, and those that are none."""
    best = planned.fitting[:rows]
    cluster = planned.config.job.cluster
    varied = _varied(planned.outcomes)
    layout = planned.outcomes[0].layout
    common = _layout_parts(
        layout,
        [
            name
            for name in type(layout).__slots__
            if name not in varied and not (name in _AXES and getattr(layout, name) == 1)
        ],
    )
    pairs = [
        ("cluster", f"{cluster.gpus} x {cluster.gpu}, {counted(cluster.nodes, 'node')}"),
        (
            "model",
            "captured whole" if planned.layers is None else f"{counted(planned.layers, 'layer')}",
        ),
    ]
    if common:
        pairs.append(("all layouts", ", ".join(common)))
    pairs += [("note", str(note)) for note in planned.notes]
    pairs += [("note", note) for note in _notes(best)]
    lines(pairs, title)
    cells: list[tuple[Any, ...]] = []
    for number, outcome in enumerate(best, start=1):
        layout, _, rest = _layout_text(outcome.layout, varied).partition("; ")
        figures = _figures(outcome)
        cells.append((number, layout, *(value for value, _ in figures)))
        cells.append(("", rest, *(interval for _, interval in figures)))
    columns = ["", "layout", "step", "tokens/s/GPU", "MFU", "memory", "energy"]
    columns += ["price/M tokens"] if cluster.price_per_gpu_hour is not None else []
    shown = f"{len(best)} of {len(planned.fitting)}"
    table(f"Layouts by step time, with 80% intervals ({shown})", columns, cells, texts=(0, 1))
    if planned.misfits:
        lines(
            [(size(miss.over_bytes), str(miss.layout)) for miss in planned.misfits[:_NEAREST]],
            f"Too large for memory: {counted(len(planned.misfits), 'layout')}. The nearest, by",
        )
    if planned.dropped:
        codes = Counter(dropped.code for dropped in planned.dropped)
        reasons: list[tuple[str, str]] = []
        for code, count in codes.items():
            first = next(dropped for dropped in planned.dropped if dropped.code == code)
            others = f" and {counted(count - 1, 'other')}" if count > 1 else ""
            reasons.append((f"{first.choice}{others}", first.reason))
        lines(reasons, f"Not possible: {counted(len(planned.dropped), 'combination')}")


def _figures(outcome: "Outcome") -> list[tuple[str, str]]:
    """Return each figure of a row, and its interval."""
    million = 1e6 / outcome.layout.tokens_per_step
    figures = [
        _in_unit(outcome.step_ns * 1e-9, "s"),
        _plain(outcome.tokens_per_s_per_gpu),
        _plain(outcome.mfu * 100, " %") if outcome.mfu else _UNKNOWN,
        _in_unit(outcome.peak_bytes, "B"),
        _in_unit(outcome.energy_j, "J") if outcome.energy_j else _UNKNOWN,
    ]
    return figures + ([_plain(outcome.money * million)] if outcome.money else [])


_UNKNOWN = ("-", "")


_PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def _in_unit(figure: "PredictedRange", unit: str) -> tuple[str, str]:
    """Return a figure and its interval with the largest prefix that keeps it above 1."""
    prefix = next((name for name, scale in _PREFIXES.items() if figure.value >= scale), "")
    return _plain(figure * (1 / _PREFIXES[prefix]), f" {prefix}{unit}")


def _plain(figure: "PredictedRange", unit: str = "") -> tuple[str, str]:
    """Return a figure and its interval, to three digits of the figure."""
    digits = 2 - math.floor(math.log10(figure.value)) if figure.value > 0 else 0
    digits = max(0, digits)
    return (
        f"{figure.value:,.{digits}f}{unit}",
        f"{figure.low:,.{digits}f} to {figure.high:,.{digits}f}",
    )


def _notes(outcomes: "Sequence[Outcome]") -> list[str]:
    """Return the notes of rows, each with the numbers of the rows that have it."""
    rows: dict[Note, list[str]] = {}
    for number, outcome in enumerate(outcomes, start=1):
        for note in outcome.notes:
            rows.setdefault(note, []).append(str(number))
    return [f"{_rows_text(numbers, len(outcomes))}: {note}" for note, numbers in rows.items()][
        :_NOTES
    ]


def _rows_text(numbers: "Sequence[str]", count: int) -> str:
    """Return the numbers of some of `count` rows as text."""
    # A note on the GPU concerns every row.
    if len(numbers) == count > 1:
        return "all rows"
    return f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(numbers)}"


# Layouts ------------------------------------------------------------------------------------------


def _varied(outcomes: "Sequence[Outcome]") -> set[str]:
    """Return the fields in which layouts differ."""
    names = type(outcomes[0].layout).__slots__
    return {
        name for name in names if len({getattr(outcome.layout, name) for outcome in outcomes}) > 1
    }


def _layout_text(layout: "Layout", varied: set[str]) -> str:
    """Return what distinguishes a layout: its axes, then "; ", then the rest."""
    axes = [name for name in _AXES if name in varied]
    rest = [name for name in type(layout).__slots__ if name in varied and name not in axes]
    return "; ".join(
        (" ".join(_layout_parts(layout, axes)), ", ".join(_layout_parts(layout, rest)))
    )


def _layout_parts(layout: "Layout", names: Sequence[str]) -> list[str]:
    """Return the fields of a layout in the words of a configuration."""
    from onerank.plan.layouts import BY_SCRIPT

    parts: list[str] = []
    for name in names:
        value = getattr(layout, name)
        if name == "schedule":
            # Without a pipeline it is no choice; nor is a sharding without replicas.
            parts += [value] if layout.pp > 1 else []
        elif name == "sharding":
            parts += [value] if layout.dp > 1 and value != BY_SCRIPT else []
        elif name == "sp":
            parts += ["sp"] if value else []
        elif name == "variant":
            parts += [value] if value else []
        elif name == "micro_batch":
            parts += [] if "micro_batches" in names else [f"micro-batch {value}"]
        elif name == "micro_batches":
            parts.append(f"{value} micro-batches of {layout.micro_batch}")
        else:
            parts.append(f"{name.replace('_', '-')} {value}")
    return parts


# Files --------------------------------------------------------------------------------------------


def _write(planned: "Plan", output: Path, rows: int, library: str) -> int:
    """Write the tables, the page and the commands; no file appears before all are complete.

    Returns:
        The number of rows whose commands are written.
    """
    from onerank.ir.output_files import replacing

    best = planned.fitting[:rows]
    scripts = {f"{number}.sh": _script(planned, row) for number, row in enumerate(best, start=1)}
    commands = output / "commands"
    commands.mkdir(exist_ok=True)
    for path in commands.glob("*.sh"):
        # An earlier run may have written more rows.
        path.unlink()
    page = _page(planned, library)
    content = {
        **{commands / name: text for name, text in scripts.items()},
        output / "plan.csv": _csv(planned),
        output / "plan.json": msgspec.json.format(msgspec.json.encode(planned.record())).decode(),
        output / "pareto.html": page,
    }
    with contextlib.ExitStack() as stack:
        for path, text in content.items():
            file = stack.enter_context(replacing(path))
            file.write(text.encode())
            # A full disk must be an error here, before the first file is renamed.
            file.flush()
    return len(scripts)


def _script(planned: "Plan", outcome: "Outcome") -> str:
    commands = "\n".join(outcome.commands)
    head = f"# {outcome.layout}\n# Run it in the directory of {planned.config.path.name}."
    return f"{head}\nset -e\n{commands}\n"


def _csv(planned: "Plan") -> str:
    """Return a line for each layout, with the ends of each interval in columns."""
    text = io.StringIO(newline="")
    records: list[dict[str, Any]] = []
    for outcome in planned.outcomes:
        record: dict[str, Any] = msgspec.to_builtins(outcome)
        row: dict[str, Any] = {}
        for name, value in record.items():
            if name == "layout":
                row |= value
            elif isinstance(value, dict):
                ends = cast("dict[str, float]", value)
                suffixes = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
                row |= {suffixes[end]: figure for end, figure in ends.items()}
            elif name == "notes":
                row[name] = "; ".join(map(str, outcome.notes))
            elif name != "commands":
                row[name] = value
        records.append(row)
    # All rows have the same GPU and price, so a figure is unknown in all or in none.
    writer = csv.DictWriter(text, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _page(planned: "Plan", library: str) -> str:
    """Return the page of Pareto fronts: throughput against memory, energy and price."""
    from importlib.resources import files
    from string import Template

    from onerank.cli.charts.plan_chart import LayoutPoints, pareto_chart
    from onerank.plan.make_plan import pareto_front

    varied = _varied(planned.outcomes)
    names = [_layout_text(outcome.layout, varied) for outcome in planned.outcomes]
    fitting = planned.fitting
    steps = [outcome.step_ns * 1e-9 for outcome in planned.outcomes]
    charts = {
        _MEMORY: [o.peak_bytes * 1e-9 for o in planned.outcomes],
        "energy per million tokens (kJ)": [
            o.energy_j * (1e3 / o.layout.tokens_per_step) for o in fitting if o.energy_j
        ],
    }
    # With one number of GPUs, price is proportional to time.
    if len({outcome.gpus for outcome in fitting}) > 1:
        charts["price per million tokens"] = [
            o.money * (1e6 / o.layout.tokens_per_step) for o in fitting if o.money
        ]
    figures: dict[str, Any] = {}
    parts = [f"<h1>{html.escape(planned.config.path.name)}</h1>", _KEY]
    for place, (title, values) in enumerate(charts.items()):
        if not values:
            continue
        memory_bytes = planned.config.job.cluster.memory_bytes
        limit = (memory_bytes / 1e9, f"memory of a GPU, {size(memory_bytes)}")
        front = pareto_front([(steps[i].value, values[i].value) for i in range(len(fitting))])
        # Energy and price are of the layouts that fit, which come first.
        shown = len(values)
        points = LayoutPoints(steps[:shown], values, names[:shown], len(fitting), front)
        figures[f"figure-{place}"] = pareto_chart(
            title, points, limit if title == _MEMORY else None
        )
        parts.append(f'<h2>Step time and {title}</h2><div id="figure-{place}"></div>')
    template = files("onerank.cli").joinpath("report_page.html").read_text("utf-8")
    # "</" in a name would end the script element.
    data = msgspec.json.encode(figures).decode().replace("</", "<\\/")
    return Template(template).substitute(
        title=html.escape(planned.config.path.name),
        library=library,
        body="\n".join(parts),
        figures=data,
    )


_MEMORY = "memory of the fullest GPU (GB)"

_KEY = (
    "<p>Each point is a layout. The blue line joins those that no other beats in both figures; "
    "bars are their 80% intervals. Crosses do not fit into memory. Hover for the layout.</p>"
)
