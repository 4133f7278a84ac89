"""`onerank show`, `diff` and `replay`: what a trace holds, and where the time of its step goes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.click_options import option, with_options
from onerank.cli.common import (
    GB_PER_S,
    OUTPUT,
    TRACE,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.terminal import print_json, say
from onerank.export import Granularity

if TYPE_CHECKING:
    from onerank.ir import Graph


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What `show` prints in place of the summary."""

    text: bool = option("Print every node, one per line.", default=False)
    granularity: Granularity | None = option("Print a table of these instead.", default=None)


@click.command()
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
        _show_parts(graph, options.granularity, title=str(trace), as_json=as_json)
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


@click.command()
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


def _show_parts(graph: "Graph", granularity: Granularity, title: str, *, as_json: bool) -> None:
    """Print what each layer, sub-module or kernel takes of the step."""
    from onerank.analysis.breakdown import parts
    from onerank.cli.render.trace_tables import render_parts

    shares = parts(graph, granularity)
    if as_json:
        print_json(shares)
    else:
        render_parts(shares, granularity, title=title)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How communication is timed, and where the timeline goes."""

    busbw_gb_s: float | None = option(
        "Time communication by this bus bandwidth. Default: the times in the trace.",
        default=None,
        type=GB_PER_S,
        metavar="GB/S",
    )
    perfetto: Path | None = option(
        "Timeline: as measured, and as replayed below it.", default=None, type=OUTPUT
    )


@click.command()
@click.argument("trace", type=TRACE)
@with_options(ReplayOptions)
@as_json
@reports_errors
def replay(trace: Path, options: ReplayOptions, as_json: bool) -> None:
    """Schedule TRACE with its own durations and edges.

    Prints step time, compute, exposed communication, idle and host-bound time, and the critical
    path. A replay that differs from the measured step shows that edges are wrong.
    """
    import onerank as package
    from onerank.analysis.step_time import with_communication
    from onerank.cli.render.trace_tables import render_replay
    from onerank.ir.replay.scheduler import schedule

    if options.perfetto is not None:
        keep_inputs(options.perfetto, trace)
    graph = read_trace(trace)
    bandwidth = options.busbw_gb_s
    done = package.replay(graph, busbw_gb_s=bandwidth)
    if options.perfetto is not None:
        from onerank.converters.targets.perfetto import timeline, write_timeline

        timed = graph if bandwidth is None else with_communication(graph, bandwidth)
        replayed = timeline(timed, schedule(timed).start_ns, process=1, title="replayed")
        write_timeline([*timeline(graph), *replayed], options.perfetto)
    if as_json:
        print_json(done)
    else:
        render_replay(done, title=str(trace))
