"""`onerank report`: a trace as a page of charts and tables."""

import contextlib
import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import OUTPUT, TRACE, keep_inputs, reports_errors

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


@click.command()
@click.argument("trace", type=TRACE)
@click.option(
    "-o", "--output", type=OUTPUT, required=True, help="HTML file; needs nothing beside it."
)
@reports_errors
def report(trace: Path, output: Path) -> None:
    """Write TRACE as a page: where the step's time goes, its streams, kernels and memory.

    The tables of `show` and `replay` follow the pictures.
    """
    import onerank
    from onerank.analysis.step_time import replay
    from onerank.analysis.summary import summarise
    from onerank.cli.render.trace_tables import render_replay, render_summary
    from onerank.ir.atomic_write import replace_file

    keep_inputs(output, trace)
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
        f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(told)}</p>\n{svg}"
        for title, told, svg in pictures
    ]
    parts.append(f"<h2>Tables</h2>\n<pre>{html.escape(tables.getvalue())}</pre>")
    page = _PAGE.format(title=html.escape(trace.name), body="\n".join(parts))
    replace_file(output, page.encode())
    click.echo(f"{output}: {len(pictures)} pictures and the tables of show and replay")


def _pictures(
    graph: "Graph", summary: "Summary", done: "Replay | None"
) -> list[tuple[str, str, str]]:
    """Return title, what it shows and SVG of each picture that the trace has the data for."""
    from onerank.analysis.report_data import kernels_of, lanes_of, memory_of, parts_of
    from onerank.annotate import find_gpu
    from onerank.cli.render.charts import draw_lanes, draw_memory, draw_parts, draw_roofline
    from onerank.ir.replay.scheduler import schedule

    found: list[tuple[str, str, str]] = []
    if done is not None:
        told = "Compute by class, communication that nothing hides, and what is idle."
        found.append(("The step", told, draw_parts(parts_of(summary.by_class, done))))
        told = "What runs when, by class in the colours above; communication is red."
        found.append(("Streams", told, draw_lanes(lanes_of(graph, schedule(graph)))))
    device = graph.job.device
    gpu = find_gpu(device.name)
    kernels, dtype = kernels_of(graph)
    if kernels and gpu is not None:
        told = (
            f"Each distinct kernel; the line is {gpu.name}'s datasheet. Above its slope a kernel "
            "finds its operands in the cache."
        )
        found.append(("Kernels", told, draw_roofline(kernels, gpu, dtype)))
    course = memory_of(graph)
    if course is not None:
        told = "In use, by class; `onerank memory` tells the peak."
        found.append(("Memory", told, draw_memory(course, device.memory_bytes)))
    return found
