"""`onerank report`: a trace as a page of charts and tables."""

import contextlib
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import OUTPUT, TRACE, keep_inputs, reports_errors
from onerank.cli.options import option, with_options
from onerank.cli.terminal import say, visible_line

if TYPE_CHECKING:
    from onerank.analysis.step_time import Replay
    from onerank.analysis.summary import Summary
    from onerank.ir import Graph

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto }}
pre {{ font: 12px/1.3 ui-monospace, monospace; overflow-x: auto }}
h2 {{ margin: 1.6em 0 .2em; font-size: 1.1em }} p {{ margin: .2em 0; color: #444 }}
svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the page goes."""

    output: Path = option("HTML file; it needs no other file.", "-o", "--output", type=OUTPUT)


@click.command()
@click.argument("trace", type=TRACE)
@with_options(ReportOptions)
@reports_errors
def report(trace: Path, options: ReportOptions) -> None:
    """Write TRACE as a page: where the step's time goes, its streams, kernels and memory.

    The tables of `show` and `replay` follow the pictures.
    """
    import onerank
    from onerank.analysis.step_time import replay
    from onerank.analysis.summary import summarise
    from onerank.cli.render.trace_tables import render_replay, render_summary
    from onerank.ir.atomic_write import replace_file

    keep_inputs(options.output, trace)
    graph = onerank.read(trace)
    summary = summarise(graph)
    done = replay(graph) if graph.nodes.duration_ns.any() else None
    tables = io.StringIO()
    with contextlib.redirect_stdout(tables):
        render_summary(summary, title="")
        if done is not None:
            render_replay(done, title="Replay")
    pictures = _pictures(graph, summary, done)
    parts = [
        f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(caption)}</p>\n{svg}"
        for title, caption, svg in pictures
    ]
    parts.append(f"<h2>Tables</h2>\n<pre>{html.escape(tables.getvalue())}</pre>")
    page = _PAGE.format(title=html.escape(visible_line(trace.name)), body="\n".join(parts))
    replace_file(options.output, page.encode())
    say(f"{options.output}: {len(pictures)} pictures and the tables of show and replay")


def _pictures(
    graph: "Graph", summary: "Summary", done: "Replay | None"
) -> list[tuple[str, str, str]]:
    """Return title, caption and SVG of each picture that the trace has the data for."""
    from onerank.analysis.report_data import kernels_of, lanes_of, memory_of, parts_of
    from onerank.annotate import find_gpu
    from onerank.cli.render.charts import draw_lanes, draw_memory, draw_parts, draw_roofline
    from onerank.ir.replay.scheduler import schedule

    pictures: list[tuple[str, str, str]] = []
    if done is not None:
        caption = "Compute by class, exposed communication and idle time."
        pictures.append(("The step", caption, draw_parts(parts_of(summary.by_class, done))))
        caption = "What runs when, by class in the colours above; communication is red."
        pictures.append(("Streams", caption, draw_lanes(lanes_of(graph, schedule(graph)))))
    device = graph.job.device
    gpu = find_gpu(device.name)
    kernels, dtype = kernels_of(graph)
    if kernels and gpu is not None:
        caption = (
            f"Each distinct kernel; the line is {gpu.name}'s datasheet. A kernel above the sloped "
            "part finds its operands in the cache."
        )
        pictures.append(("Kernels", caption, draw_roofline(kernels, gpu, dtype)))
    timeline = memory_of(graph)
    if timeline is not None:
        caption = "In use, by class; `onerank memory` shows the peak."
        pictures.append(("Memory", caption, draw_memory(timeline, device.memory_bytes)))
    return pictures
