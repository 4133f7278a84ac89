"""`onerank replay`: schedule a graph with its own durations, and show the parts of the step."""

from pathlib import Path

import click

from onerank.cli.common import GBPS, OUTPUT, TRACE, as_json, keep_inputs, print_json, reports_errors


@click.command()
@click.argument("trace", type=TRACE)
@click.option(
    "--busbw-gb-s",
    "bandwidth_gb_per_s",
    type=GBPS,
    metavar="GB/S",
    help="Time communication by this bus bandwidth. Default: the times in the trace.",
)
@click.option("--perfetto", type=OUTPUT, help="Timeline: as measured, and as replayed below it.")
@as_json
@reports_errors
def replay(
    trace: Path, bandwidth_gb_per_s: float | None, perfetto: Path | None, as_json: bool
) -> None:
    """Schedule TRACE with its own durations and edges.

    Prints step time, compute, exposed communication, idle and host-bound time, and the critical
    path. A replay that differs from the measured step shows that edges are wrong.
    """
    import onerank as package
    from onerank.analysis.step_time import replay as run
    from onerank.analysis.step_time import with_communication
    from onerank.cli.render.trace_tables import render_replay
    from onerank.ir.replay.scheduler import schedule

    if perfetto is not None:
        keep_inputs(perfetto, trace)
    graph = package.read(trace)
    done = run(graph, bandwidth_gb_per_s=bandwidth_gb_per_s)
    if perfetto is not None:
        from onerank.converters.targets.perfetto import timeline, write_timeline

        timed = (
            graph if bandwidth_gb_per_s is None else with_communication(graph, bandwidth_gb_per_s)
        )
        replayed = timeline(timed, schedule(timed).start_ns, process=1, title="replayed")
        write_timeline([*timeline(graph), *replayed], perfetto)
    if as_json:
        print_json(done)
    else:
        render_replay(done, title=str(trace))
