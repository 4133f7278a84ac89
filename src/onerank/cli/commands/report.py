"""`onerank report`: a trace or a bundle, or two side by side, as an interactive page."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    INPUT_OR_DIRECTORY,
    OUTPUT,
    InvalidValue,
    UsageError,
    keep_inputs,
    reports_errors,
)
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import say
from onerank.display import size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.step_time import Replay
    from onerank.analysis.summary import Summary
    from onerank.cli.report_page import Reported, Section
    from onerank.ir import Graph


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The page to write."""

    output: Path = option("HTML file to write.", "-o", "--output", type=OUTPUT)


@click.command()
@click.argument(
    "inputs", metavar="TRACE|BUNDLE [OTHER]", nargs=-1, required=True, type=INPUT_OR_DIRECTORY
)
@with_options(ReportOptions)
@reports_errors
def report(inputs: tuple[Path, ...], options: ReportOptions) -> None:
    """Write a trace or a bundle as an interactive page, or two of them side by side.

    The page of a trace shows the parts of the step, a timeline, compute time by module, the
    roofline of the kernels, memory over time and the blocks at the peak, and the tables of `show`
    and `replay`. That of a bundle, the directory of `capture serve` or `convert --engine-steps`,
    shows TTFT and TPOT by batch and context, tokens per second and per joule, the largest batch
    that fits, and the roofline of decodes. The page is one file, and works without a network.
    """
    from onerank.cli.charts.plotly_figure import plotly_js
    from onerank.cli.report_page import page_of
    from onerank.ir.output_files import replace_file

    if len(inputs) > 2:
        raise UsageError(
            f"{len(inputs)} inputs given; a report shows one or two", code="report-trace-count"
        )
    bundles = [path.is_dir() for path in inputs]
    if any(bundles) and not all(bundles):
        raise UsageError(
            f"{inputs[bundles.index(True)]} is a bundle and {inputs[bundles.index(False)]} a "
            "trace; a report shows two of a kind",
            code="report-mixed-kinds",
        )
    keep_inputs(options.output, *inputs)
    output = options.output
    # A browser shows a file of another name as text, or not at all. A device has any name.
    if output.suffix not in {".html", ".htm"} and (output.is_file() or not output.exists()):
        raise InvalidValue(
            f"'{output}': the name of a page ends in .html, such as "
            f"'{output.with_suffix('.html')}'.",
            param_hint="'-o' / '--output'",
            code="output-not-html",
        )
    # First, so that a missing Plotly is reported at once.
    plotly_js()
    if any(bundles):
        from onerank.cli.bundle_report import reported_bundles

        reported = reported_bundles(inputs)
    else:
        reported = [_reported_trace(path) for path in inputs]
    page, charts = page_of(reported)
    replace_file(options.output, page)
    tables = "the tables of the steps" if any(bundles) else "the tables of show and replay"
    say(f"{options.output}: {charts} charts and {tables}")


def _reported_trace(trace: Path) -> "Reported":
    import onerank
    from onerank.cli.report_page import Reported

    graph = onerank.read(trace)
    summary, replayed = _analysed(graph)
    return Reported(
        trace.name,
        _cards(summary, replayed),
        _sections(graph, summary, replayed),
        _tables(summary, replayed),
    )


def _analysed(graph: "Graph") -> "tuple[Summary, Replay | None]":
    from onerank.analysis.step_time import replay
    from onerank.analysis.summary import summarise

    return summarise(graph), replay(graph) if graph.nodes.duration_ns.any() else None


def _cards(summary: "Summary", replayed: "Replay | None") -> dict[str, str]:
    """Return the key figures of a trace."""
    world = " ".join(f"{axis} {length}" for axis, length in summary.world.items()) or "1"
    # The replay repeats the profiled step, whose host is slower than that of the measured steps.
    replayed_step = (
        "step under the profiler, replayed" if summary.measured_step_ns else "step, replayed"
    )
    return {
        "device": summary.device or "unknown",
        "world": f"{world}; rank {summary.rank}",
        "step, measured": time(summary.measured_step_ns) if summary.measured_step_ns else "",
        replayed_step: time(replayed.step_time_ns) if replayed else "",
        "compute": time(summary.compute_time_ns) if replayed else "no times; annotate the trace",
        "exposed communication": time(replayed.exposed_communication_ns) if replayed else "",
        "peak memory": size(summary.peak_memory_bytes) if summary.peak_memory_bytes else "",
        "note": "\n".join(map(str, summary.notes)),
    }


def _tables(summary: "Summary", replayed: "Replay | None") -> str:
    from onerank.cli.commands.replay import render_replay
    from onerank.cli.summary_tables import render_summary

    # rich writes to stdout; a page takes the tables as the text of a pipe, 120 columns wide.
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        render_summary(summary, title="")
        if replayed is not None:
            render_replay(replayed, title="Replay")
    return text.getvalue()


def _sections(graph: "Graph", summary: "Summary", replayed: "Replay | None") -> "list[Section]":
    """Return the sections that the trace has the data for."""
    from onerank.analysis import report_data
    from onerank.annotate import find_gpu
    from onerank.cli.charts import trace_charts as charts
    from onerank.cli.report_page import Section
    from onerank.ir.replay import schedule

    sections: list[Section] = []
    if replayed is not None:
        parts = report_data.step_parts(summary.by_class, replayed)
        kind = "steady-state" if replayed.steady_state is not None else "replayed"
        caption = f"The {kind} step: compute by class, exposed communication and idle time."
        key = charts.class_colours(parts)
        sections.append(Section("The step", caption, charts.step_chart(parts), key))
        lanes = report_data.stream_spans(graph, schedule(graph))
        figure, dropped = charts.timeline_chart(graph, lanes)
        caption = "Colours as above. Drag to zoom, double-click to reset, hover for names."
        if replayed.steady_state is not None and summary.measured_step_ns:
            caption = f"The step under the profiler, which slows the host. {caption}"
        if dropped:
            caption += f" The shortest operations are not drawn: {dropped}."
        sections.append(Section("Timeline", caption, figure, wide=True))
        modules = report_data.module_tree(graph)
        caption = "Compute time by module. Click a module to zoom into it."
        sections.append(Section("Modules", caption, charts.module_chart(modules)))
    device = graph.job.device
    gpu = find_gpu(device.name)
    points, dtype = report_data.roofline(graph)
    if points and gpu is not None:
        caption = (
            "Each distinct kernel, in the colour of its class; the area is its time, the line the "
            "datasheet's roof. A kernel above the slope finds its operands in the cache."
        )
        sections.append(Section("Roofline", caption, charts.roofline_chart(points, gpu, dtype)))
    memory = report_data.memory_chart(graph)
    if memory is not None:
        caption = "Memory in use, by class."
        figure = charts.memory_chart(memory, device.memory_bytes)
        key = charts.memory_colours(memory)
        sections.append(Section("Memory", caption, figure, key))
        if memory.at_peak:
            caption = "Blocks that the step allocated and that are in use at the peak, by module."
            sections.append(Section("Memory at the peak", caption, charts.peak_chart(memory)))
    return sections
