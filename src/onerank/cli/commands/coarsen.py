"""`onerank coarsen`: a trace with one node per layer or sub-module."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from onerank.cli.common import TRACE, TRACE_OUTPUT, as_json, keep_inputs, reports_errors
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import print_json
from onerank.option_fields import option


@dataclass(frozen=True, kw_only=True)
class CoarsenOptions:
    """The scope of a node of the coarse trace, and the trace to write."""

    granularity: Literal["layer", "submodule"] = option("Scope of a node.")
    output: Path = option("Chakra trace to write.", "-o", "--output", type=TRACE_OUTPUT)


@click.command()
@click.argument("trace", type=TRACE)
@with_options(CoarsenOptions)
@as_json
@reports_errors
def coarsen(trace: Path, options: CoarsenOptions, as_json: bool) -> None:
    """Write TRACE with one node per layer or sub-module, phase and micro-batch.

    Communication is kept and divides the nodes that it interrupts. The sum of GPU time does not
    change.
    """
    import onerank as package
    from onerank.analysis.summary import summarise
    from onerank.cli.summary_tables import render_summary
    from onerank.export import at_granularity

    keep_inputs(options.output, trace)
    # Not `read_trace`, because the summary prints the notes.
    coarse = at_granularity(package.read(trace), options.granularity)
    coarse.write(options.output)
    summary = summarise(coarse)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(options.output))
