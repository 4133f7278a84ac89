"""`onerank`: everything."""

import sys
from pathlib import Path
from typing import Any

import click

from onerank import __version__
from onerank.cli.annotate import annotate
from onerank.cli.bars import counting_files
from onerank.cli.bench import bench
from onerank.cli.capture import capture
from onerank.cli.coarsen import GRAINS, at_grain, coarsen, show_parts
from onerank.cli.convert import convert
from onerank.cli.cost import cost
from onerank.cli.energy import energy
from onerank.cli.frame import GBPS, LATENCY_NS, TRACE, as_json, print_json, reports_errors
from onerank.cli.gpus import gpus
from onerank.cli.memory import memory
from onerank.cli.replay import replay
from onerank.cli.report import report
from onerank.cli.sections import SectionedCommand, SectionedGroup
from onerank.cli.simulators import TRACES, goal, ranks_of, replicated, simai, trace_files
from onerank.cli.storage import storage
from onerank.cli.tables import chakra_json, dot, parquet, perfetto

SECTIONS = {
    "Make a trace": ("capture", "convert", "coarsen", "storage"),
    "Predict it for another GPU": ("annotate", "gpus", "bench"),
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
onerank.add_command(coarsen)
onerank.add_command(convert)
onerank.add_command(cost)
onerank.add_command(energy)
onerank.add_command(gpus)
onerank.add_command(memory)
onerank.add_command(replay)
onerank.add_command(report)
onerank.add_command(storage)


@onerank.group(
    cls=SectionedGroup,
    sections={
        "Simulators": ("astra-sim", "simai", "goal"),
        "Other tools": ("perfetto", "parquet", "dot", "chakra-json"),
    },
)
def export() -> None:
    """Hand a trace to a simulator, or to a tool that shows or reads it."""


for _command in (simai, goal, perfetto, parquet, dot, chakra_json):
    export.add_command(_command)


@export.command(
    "astra-sim",
    cls=SectionedCommand,
    sections={
        "The job": ("ranks", "dp", "schedule", "micro_batches", "host_time"),
        "Its network": ("bandwidth_gbps", "busbw_gbps", "latency_ns"),
        "Output": ("output", "name", "grain"),
    },
)
@TRACES
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write; an earlier export there is replaced.",
)  # fmt: skip
@click.option("--name", default="workload", show_default=True, help="Prefix of the traces.")
@click.option("--ranks", type=click.IntRange(2), help="For a trace that does not tell its world.")
@click.option("--dp", type=click.IntRange(2), help="Replicas, in place of those captured.")
@click.option("--host-time", is_flag=True, help="Let the GPU wait for its host as it did.")
@click.option("--schedule", help="Of a pipeline: gpipe, 1f1b, interleaved:V or zbv.")
@click.option("--micro-batches", type=click.IntRange(1), help="Of a pipelined step.")
@click.option("--bandwidth-gbps", type=GBPS,
              help="GB/s of each rank in each direction.  [default: 450]")  # fmt: skip
@click.option("--busbw-gbps", type=GBPS,
              help="In its place, the bus bandwidth that large collectives reach as measured; "
              "their reductions then take no further time.")  # fmt: skip
@click.option("--latency-ns", type=LATENCY_NS, default=500.0, show_default=True,
              help="From one rank to another.")  # fmt: skip
@click.option("--grain", type=click.Choice(GRAINS), default="kernel", show_default=True,
              help="Write one node per layer or sub-module between communications.")  # fmt: skip
@as_json
@reports_errors
def astra_sim(
    traces: tuple[Path, ...],
    output: Path,
    name: str,
    ranks: int | None,
    dp: int | None,
    host_time: bool,
    schedule: str | None,
    micro_batches: int | None,
    bandwidth_gbps: float | None,
    busbw_gbps: float | None,
    latency_ns: float,
    grain: str,
    as_json: bool,
) -> None:
    """Write an ASTRA-sim workload: every rank's trace, groups, configuration, run.sh.

    TRACES: one trace that stands for all ranks; or one of each class of equal ranks, or a
    directory of them, as `capture run --ranks distinct` writes them; of a pipeline's stages with
    --schedule.
    """
    import onerank as package
    from onerank.cli.render_export import render_export
    from onerank.converters.astra_sim import export as export_workload
    from onerank.converters.astra_sim import export_ranks

    graphs = [at_grain(package.read(file), grain) for file in trace_files(traces)]
    graphs, notes = replicated(graphs, dp)
    if bandwidth_gbps is not None and busbw_gbps is not None:
        raise click.UsageError("give --bandwidth-gbps or --busbw-gbps, not both")
    network: dict[str, Any] = {"latency_ns": latency_ns}
    if busbw_gbps is not None:
        network |= {"bandwidth_gbps": busbw_gbps, "memory_gbps": None}
    elif bandwidth_gbps is not None:
        network["bandwidth_gbps"] = bandwidth_gbps
    made, notes = ranks_of(
        graphs, notes, schedule, micro_batches, ranks, host_time=host_time, one_at_a_time=True
    )
    if made is None:
        done = export_workload(
            graphs[0], output, name=name, ranks=ranks, host_time=host_time, notes=notes, **network
        )
    else:
        done = export_ranks(made, output, name=name, notes=notes, **network)
    if as_json:
        print_json(done)
    else:
        render_export(done)


@onerank.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@as_json
@reports_errors
def check(path: Path, as_json: bool) -> None:
    """Check a directory as an ASTRA-sim workload, or the structure of one `.et` file.

    Exit code 1: findings.
    """
    from onerank.cli.render_export import render_findings
    from onerank.ir.check import check as check_path

    with counting_files() as progress:
        findings = check_path(path, progress=progress)
    if as_json:
        print_json(findings)
    else:
        render_findings(findings, str(path), alone=not path.is_dir())
    sys.exit(1 if findings else 0)


@onerank.command()
@click.argument("trace", type=TRACE)
@click.option("--text", is_flag=True, help="Print every node, one per line.")
@click.option("--grain", type=click.Choice(GRAINS), help="Print a table of these instead.")
@as_json
@reports_errors
def show(trace: Path, text: bool, grain: str | None, as_json: bool) -> None:
    """Summarise a trace: time, FLOPs, bytes, memory, communication."""
    import onerank as package
    from onerank.cli.render_summary import render_summary
    from onerank.summary import summarise

    if text and grain:
        raise click.UsageError("give --text or --grain, not both")

    graph = package.read(trace)
    if text:
        from onerank.ir.text import to_text

        click.echo(to_text(graph), nl=False)
        return
    if grain:
        show_parts(graph, grain, title=str(trace), as_json=as_json)
        return
    summary = summarise(graph)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(trace))


@onerank.command()
@click.argument("before", type=TRACE)
@click.argument("after", type=TRACE)
@as_json
@reports_errors
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two traces by class, module and kernel name."""
    import onerank as package
    from onerank.cli.render_difference import render_difference
    from onerank.difference import compare

    difference = compare(package.read(before), package.read(after))
    if as_json:
        print_json(difference)
    else:
        render_difference(difference, str(before), str(after))
