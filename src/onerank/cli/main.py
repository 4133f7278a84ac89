"""The `onerank` command: its subcommands, `show` and `diff`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank import __version__
from onerank.cli.click_options import SectionedGroup, option, with_options
from onerank.cli.commands.annotate import annotate, gpus
from onerank.cli.commands.bench import bench
from onerank.cli.commands.capture import capture
from onerank.cli.commands.coarsen import coarsen, show_parts
from onerank.cli.commands.convert import convert
from onerank.cli.commands.export import check, export
from onerank.cli.commands.memory_energy_cost import cost, energy, memory
from onerank.cli.commands.predict import predict
from onerank.cli.commands.replay import replay
from onerank.cli.commands.report import report
from onerank.cli.commands.storage import storage
from onerank.cli.common import TRACE, as_json, reports_errors
from onerank.cli.terminal import print_json, say
from onerank.export import Granularity

if TYPE_CHECKING:
    from onerank.ir import Graph

SECTIONS = {
    "Make a trace": ("capture", "convert", "coarsen", "storage"),
    "Predict it for another GPU": ("annotate", "predict", "gpus", "bench"),
    "Read it": ("show", "report", "replay", "diff", "memory", "energy", "cost"),
    "Hand it on": ("export", "check"),
}


@click.group(cls=SectionedGroup, sections=SECTIONS)
@click.version_option(__version__, prog_name="onerank")
def onerank() -> None:
    """Capture one rank of a training job, re-cost it, hand it to a network simulator."""


onerank.add_command(capture)
onerank.add_command(annotate)
onerank.add_command(bench)
onerank.add_command(check)
onerank.add_command(coarsen)
onerank.add_command(convert)
onerank.add_command(cost)
onerank.add_command(energy)
onerank.add_command(export)
onerank.add_command(gpus)
onerank.add_command(memory)
onerank.add_command(predict)
onerank.add_command(replay)
onerank.add_command(report)
onerank.add_command(storage)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What `show` prints in place of the summary."""

    text: bool = option("Print every node, one per line.", default=False)
    granularity: Granularity | None = option("Print a table of these instead.", default=None)


@onerank.command()
@click.argument("trace", type=TRACE)
@with_options(ShowOptions)
@as_json
@reports_errors
def show(trace: Path, options: ShowOptions, as_json: bool) -> None:
    """Summarise a trace: time, FLOPs, bytes, memory, communication."""
    from onerank.analysis.summary import summarise
    from onerank.cli.render.trace_tables import render_summary

    if options.text and options.granularity:
        raise click.UsageError("give --text or --granularity, not both")

    graph = _read_even_broken(trace)
    if options.text:
        from onerank.ir.text import to_text

        say(to_text(graph), newline=False)
        return
    if options.granularity:
        show_parts(graph, options.granularity, title=str(trace), as_json=as_json)
        return
    summary = summarise(graph)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(trace))


def _read_even_broken(trace: Path) -> "Graph":
    """Read a trace; of one with dependencies on absent nodes show what remains, with a note."""
    import onerank as package
    from onerank.ir.chakra import read_repaired
    from onerank.ir.errors import GraphError

    try:
        return package.read(trace)
    except GraphError as error:
        if error.code != "graph-dangling-edge":
            raise
    graph, repairs = read_repaired(trace)
    say(f"{trace} is broken: {repairs.note}; `onerank convert --repair` writes it so", err=True)
    return graph


@onerank.command()
@click.argument("before", type=TRACE)
@click.argument("after", type=TRACE)
@as_json
@reports_errors
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two traces by class, module and kernel name."""
    import onerank as package
    from onerank.cli.render.trace_tables import render_difference

    difference = package.diff(before, after)
    if as_json:
        print_json(difference)
    else:
        render_difference(difference, str(before), str(after))
