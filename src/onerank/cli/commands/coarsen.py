"""`onerank coarsen`: one node per layer or sub-module; also the shared `--granularity`."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from onerank.cli.common import TRACE, TRACE_OUTPUT, as_json, keep_inputs, print_json, reports_errors

if TYPE_CHECKING:
    from onerank.ir import Graph

GRAINS = ("layer", "submodule", "kernel")


@click.command()
@click.argument("trace", type=TRACE)
@click.option("--granularity", type=click.Choice(GRAINS[:2]), required=True)
@click.option("-o", "--output", type=TRACE_OUTPUT, required=True, help="Chakra trace to write.")
@as_json
@reports_errors
def coarsen(trace: Path, granularity: str, output: Path, as_json: bool) -> None:
    """Write TRACE with one node per layer or sub-module, phase and micro-batch.

    Communication stays as it is and divides what it interrupts; GPU time is kept to the nanosecond.
    """
    import onerank as package
    from onerank.analysis.summary import summarise
    from onerank.cli.render.trace_tables import render_summary

    keep_inputs(output, trace)
    made = at_grain(package.read(trace), granularity)
    made.write(output)
    summary = summarise(made)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(output))


def at_grain(graph: "Graph", grain: str) -> "Graph":
    """Return `graph` itself at the grain of kernels, else coarsened; its FLOPs are kept."""
    from onerank.annotate import characterise

    if grain == "kernel":
        return graph
    return characterise(graph).coarsen(cast('Literal["layer", "submodule"]', grain))


def show_parts(graph: "Graph", grain: str, title: str, *, as_json: bool) -> None:
    """Print what each layer, sub-module or kernel takes of the step."""
    from onerank.analysis.breakdown import Grain, parts
    from onerank.cli.render.trace_tables import render_parts

    chosen = cast("Grain", grain)
    found = parts(graph, chosen)
    if as_json:
        print_json(found)
    else:
        render_parts(found, chosen, title=title)
