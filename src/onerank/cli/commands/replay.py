"""`onerank replay`: schedule a graph with its own durations, and show the parts of the step."""

from dataclasses import dataclass
from pathlib import Path

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
from onerank.cli.terminal import print_json


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
