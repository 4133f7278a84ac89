"""`onerank report`: one trace, or two side by side, as an interactive page."""

import contextlib
import html
import io
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import click

from onerank.cli.common import OUTPUT, TRACE, UsageError, keep_inputs, reports_errors
from onerank.cli.dataclass_to_click import option, with_options
from onerank.cli.terminal import say, visible_line
from onerank.display import size, time

if TYPE_CHECKING:
    from onerank.analysis.step_time import Replay
    from onerank.analysis.summary import Summary
    from onerank.ir import Graph


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The page to write."""

    output: Path = option("HTML file to write.", "-o", "--output", type=OUTPUT)


@dataclass(frozen=True)
class _Section:
    """A section of one trace's report.

    Attributes:
        title: heading; the sections of two traces with one title stand side by side.
        caption: what the figure shows.
        figure: a Plotly figure.
        key: name -> colour, for a key above the figure.
        wide: whether the figures of two traces stand one above the other.
    """

    title: str
    caption: str
    figure: dict[str, Any]
    key: dict[str, str] = field(default_factory=dict[str, str])
    wide: bool = False


@click.command()
@click.argument("traces", metavar="TRACE [OTHER]", nargs=-1, required=True, type=TRACE)
@with_options(ReportOptions)
@reports_errors
def report(traces: tuple[Path, ...], options: ReportOptions) -> None:
    """Write TRACE as an interactive page, or TRACE and OTHER side by side.

    The page shows the parts of the step, a timeline, compute time by module, the roofline of the
    kernels, memory over time and the blocks at the peak, and the tables of `show` and `replay`. It
    is one file, and works without a network.
    """
    import onerank
    from onerank.cli.report_charts import plotly_js
    from onerank.ir.output_files import replace_file

    if len(traces) > 2:
        raise UsageError(
            f"{len(traces)} traces given; a report shows one or two", code="report-trace-count"
        )
    keep_inputs(options.output, *traces)
    # First, so that a missing Plotly is reported at once.
    library = plotly_js()
    figures: dict[str, Any] = {}
    sections: dict[str, list[str]] = {}
    wide: set[str] = set()
    captions: dict[str, list[str]] = {}
    keys: dict[str, dict[str, str]] = {}
    cards: list[str] = []
    tables: list[str] = []
    for number, trace in enumerate(traces):
        graph = onerank.read(trace)
        summary, replayed = _analysed(graph)
        cards.append(_cards(visible_line(trace.name), summary, replayed))
        tables.append(_tables(visible_line(trace.name), summary, replayed))
        for place, section in enumerate(_sections(graph, summary, replayed)):
            identifier = f"figure-{number}-{place}"
            figures[identifier] = section.figure
            sections.setdefault(section.title, []).append(f'<div id="{identifier}"></div>')
            captions.setdefault(section.title, []).append(section.caption)
            keys.setdefault(section.title, {}).update(section.key)
            if section.wide:
                wide.add(section.title)
    parts = [f'<div class="row">{"".join(cards)}</div>']
    for title, charts in sections.items():
        caption = html.escape(" ".join(dict.fromkeys(captions[title])))
        layout = "stack" if title in wide else "row"
        key = "".join(
            f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>'
            for name, colour in keys[title].items()
        )
        heading = f"<h2>{html.escape(title)}</h2><p>{caption}</p><ul>{key}</ul>"
        parts.append(f'{heading}<div class="{layout}">{"".join(charts)}</div>')
    parts.append("<h2>Tables</h2>" + "".join(tables))
    # "</" in a name of the trace would end the script element.
    data = json.dumps(figures, separators=(",", ":")).replace("</", "<\\/")
    title = html.escape(" and ".join(visible_line(trace.name) for trace in traces))
    template = files("onerank.cli").joinpath("report_page.html").read_text("utf-8")
    # Not `str.format`: the page's CSS and JavaScript are full of braces.
    page = Template(template).substitute(
        title=title, library=library, body="\n".join(parts), figures=data
    )
    replace_file(options.output, page.encode())
    say(f"{options.output}: {len(figures)} charts and the tables of show and replay")


def _analysed(graph: "Graph") -> "tuple[Summary, Replay | None]":
    from onerank.analysis.step_time import replay
    from onerank.analysis.summary import summarise

    return summarise(graph), replay(graph) if graph.nodes.duration_ns.any() else None


def _cards(name: str, summary: "Summary", replayed: "Replay | None") -> str:
    """Return the key figures of a trace."""
    world = " ".join(f"{axis} {length}" for axis, length in summary.world.items()) or "1"
    figures = {
        "device": summary.device or "unknown",
        "world": f"{world}; rank {summary.rank}",
        "step, measured": time(summary.measured_step_ns) if summary.measured_step_ns else "",
        "step, replayed": time(replayed.step_time_ns) if replayed else "",
        "compute": time(summary.compute_time_ns),
        "exposed communication": time(replayed.exposed_communication_ns) if replayed else "",
        "peak memory": size(summary.peak_memory_bytes) if summary.peak_memory_bytes else "",
        "note": "; ".join(map(str, summary.notes)),
    }
    items = "".join(
        f"<div><dt>{label}</dt><dd>{html.escape(visible_line(value))}</dd></div>"
        for label, value in figures.items()
        if value
    )
    return f"<section><h1>{html.escape(name)}</h1><dl>{items}</dl></section>"


def _tables(name: str, summary: "Summary", replayed: "Replay | None") -> str:
    from onerank.cli.commands.show_diff_replay import render_replay
    from onerank.cli.summary_tables import render_summary

    # rich writes to stdout; a page takes the tables as the text of a pipe, 120 columns wide.
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        render_summary(summary, title="")
        if replayed is not None:
            render_replay(replayed, title="Replay")
    return (
        f"<details><summary>{html.escape(name)}</summary>"
        f"<pre>{html.escape(text.getvalue())}</pre></details>"
    )


def _sections(graph: "Graph", summary: "Summary", replayed: "Replay | None") -> list[_Section]:
    """Return the sections that the trace has the data for."""
    from onerank.analysis import report_data
    from onerank.annotate import find_gpu
    from onerank.cli import report_charts as charts
    from onerank.ir.replay import schedule

    sections: list[_Section] = []
    if replayed is not None:
        parts = report_data.step_parts(summary.by_class, replayed)
        kind = "steady-state" if replayed.steady_state is not None else "replayed"
        caption = f"The {kind} step: compute by class, exposed communication and idle time."
        key = charts.class_colours(parts)
        sections.append(_Section("The step", caption, charts.step_chart(parts), key))
        lanes = report_data.timeline(graph, schedule(graph))
        figure, dropped = charts.timeline_chart(graph, lanes)
        caption = "Colours as above. Drag to zoom, double-click to reset, hover for names."
        if dropped:
            caption += f" The shortest operations are not drawn: {dropped}."
        sections.append(_Section("Timeline", caption, figure, wide=True))
        modules = report_data.module_tree(graph)
        caption = "Compute time by module. Click a module to zoom into it."
        sections.append(_Section("Modules", caption, charts.module_chart(modules)))
    device = graph.job.device
    gpu = find_gpu(device.name)
    points, dtype = report_data.roofline(graph)
    if points and gpu is not None:
        caption = (
            "Each distinct kernel, in the colour of its class; the area is its time, the line the "
            "datasheet's roof. A kernel above the slope finds its operands in the cache."
        )
        sections.append(_Section("Roofline", caption, charts.roofline_chart(points, gpu, dtype)))
    memory = report_data.memory_chart(graph)
    if memory is not None:
        caption = "Memory in use, by class."
        figure = charts.memory_chart(memory, device.memory_bytes)
        key = charts.memory_colours(memory)
        sections.append(_Section("Memory", caption, figure, key))
        if memory.at_peak:
            caption = "Blocks that the step allocated and that are in use at the peak, by module."
            sections.append(_Section("Memory at the peak", caption, charts.peak_chart(memory)))
    return sections
