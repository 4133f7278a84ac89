"""`onerank coarsen`: one node per layer or sub-module."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from onerank.cli.click_options import option, with_options
from onerank.cli.common import TRACE, TRACE_OUTPUT, as_json, keep_inputs, reports_errors
from onerank.cli.terminal import print_json
from onerank.export import Granularity

if TYPE_CHECKING:
    from onerank.ir import Graph


@dataclass(frozen=True, kw_only=True)
class CoarsenOptions:
    """What a node of the coarse trace is, and where the trace goes."""

    granularity: Literal["layer", "submodule"] = option("What a node is.")
    output: Path = option("Chakra trace to write.", "-o", "--output", type=TRACE_OUTPUT)


@click.command()
@click.argument("trace", type=TRACE)
@with_options(CoarsenOptions)
@as_json
@reports_errors
def coarsen(trace: Path, options: CoarsenOptions, as_json: bool) -> None:
    """Write TRACE with one node per layer or sub-module, phase and micro-batch.

    Communication stays as it is and divides what it interrupts; GPU time is kept to the nanosecond.
    """
    import onerank as package
    from onerank.analysis.summary import summarise
    from onerank.cli.render.trace_tables import render_summary
    from onerank.export import at_granularity

    keep_inputs(options.output, trace)
    coarse = at_granularity(package.read(trace), options.granularity)
    coarse.write(options.output)
    summary = summarise(coarse)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(options.output))


def show_parts(graph: "Graph", granularity: Granularity, title: str, *, as_json: bool) -> None:
    """Print what each layer, sub-module or kernel takes of the step."""
    from onerank.analysis.breakdown import parts
    from onerank.cli.render.trace_tables import render_parts

    shares = parts(graph, granularity)
    if as_json:
        print_json(shares)
    else:
        render_parts(shares, granularity, title=title)
