"""`onerank export astra-sim|simai|goal`: workloads for network simulators."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onerank.cli.commands.coarsen import GRAINS, at_grain
from onerank.cli.common import (
    GBPS,
    LATENCY_NS,
    OUTPUT,
    as_json,
    keep_inputs,
    print_json,
    reports_errors,
)
from onerank.cli.options import SectionedCommand

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.converters.expand.pipeline import RankGraph
    from onerank.converters.nccl import Interconnect
    from onerank.ir import Graph

TRACES = click.argument(
    "traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
DP = click.option("--dp", type=click.IntRange(2), help="Replicas, in place of those captured.")
SCHEDULE = click.option("--schedule", help="Of a pipeline: gpipe, 1f1b, interleaved:V or zbv.")
RANKS = click.option(
    "--ranks", type=click.IntRange(2), help="For a trace that does not tell its world."
)
HOST_TIME = click.option(
    "--include-host-delays", is_flag=True, help="Let the GPU wait for its host as it did."
)
MICRO_BATCHES = click.option("--micro-batches", type=click.IntRange(1), help="Of a pipelined step.")


def _as_capability(_: click.Context, __: click.Parameter, given: str | None) -> int | None:
    """Return a compute capability as NCCL counts it, 86 for 8.6."""
    if given is None:
        return None
    from onerank.annotate.gpus.spec_schema import COMPUTE_CAPABILITY

    if not re.fullmatch(COMPUTE_CAPABILITY, given):
        raise click.BadParameter(f"{given}: expected major.minor, as 8.6 of an A10")
    return int(given.replace(".", ""))


def trace_files(paths: tuple[Path, ...]) -> list[Path]:
    """Return the traces, those of a directory in its place."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.et")) if path.is_dir() else [path]
        if not found:
            raise click.UsageError(f"{path} holds no .et file")
        files += found
    return files


@click.command(
    "astra-sim",
    cls=SectionedCommand,
    sections={
        "The job": ("ranks", "dp", "schedule", "micro_batches", "include_host_delays"),
        "Its network": ("bandwidth_gb_s", "busbw_gb_s", "latency_ns"),
        "Output": ("output", "name", "granularity"),
    },
)
@TRACES
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write; an earlier export there is replaced.",
)  # fmt: skip
@click.option("--name", default="workload", show_default=True, help="Prefix of the traces.")
@RANKS
@DP
@HOST_TIME
@SCHEDULE
@MICRO_BATCHES
@click.option("--bandwidth-gb-s", type=GBPS,
              help="GB/s of each rank in each direction.  "
              "[default: the trace's GPU's; else 450]")  # fmt: skip
@click.option("--busbw-gb-s", type=GBPS,
              help="In its place, the bus bandwidth that large collectives reach as measured; "
              "their reductions then take no further time.")  # fmt: skip
@click.option("--latency-ns", type=LATENCY_NS, default=500.0, show_default=True,
              help="From one rank to another.")  # fmt: skip
@click.option("--granularity", type=click.Choice(GRAINS), default="kernel", show_default=True,
              help="Write one node per layer or sub-module between communications.")  # fmt: skip
@as_json
@reports_errors
def astra_sim(
    traces: tuple[Path, ...],
    output: Path,
    name: str,
    ranks: int | None,
    dp: int | None,
    include_host_delays: bool,
    schedule: str | None,
    micro_batches: int | None,
    bandwidth_gb_s: float | None,
    busbw_gb_s: float | None,
    latency_ns: float,
    granularity: str,
    as_json: bool,
) -> None:
    """Write an ASTRA-sim workload: every rank's trace, groups, configuration, run.sh.

    TRACES: one trace that represents all ranks; or one of each class of equal ranks, or a directory
    of them, as `capture run --ranks distinct` writes them; with --schedule those of a pipeline's
    stages.
    """
    import onerank
    from onerank.cli.render.export_table import render_export
    from onerank.converters.targets.astra_sim import export as export_workload
    from onerank.converters.targets.astra_sim import export_ranks

    graphs = [at_grain(onerank.read(file), granularity) for file in trace_files(traces)]
    graphs, notes = replicated(graphs, dp)
    if bandwidth_gb_s is not None and busbw_gb_s is not None:
        raise click.UsageError("give --bandwidth-gb-s or --busbw-gb-s, not both")
    network = {**_links_of(graphs[0]), "latency_ns": latency_ns}
    if busbw_gb_s is not None:
        network |= {"bandwidth_gb_per_s": busbw_gb_s, "memory_gb_per_s": None}
    elif bandwidth_gb_s is not None:
        network["bandwidth_gb_per_s"] = bandwidth_gb_s
    made, notes = ranks_of(
        graphs,
        notes,
        schedule,
        micro_batches,
        ranks,
        host_delays=include_host_delays,
        one_at_a_time=True,
    )
    if made is None:
        done = export_workload(
            graphs[0],
            output,
            name=name,
            ranks=ranks,
            host_time=include_host_delays,
            notes=notes,
            **network,
        )
    else:
        done = export_ranks(made, output, name=name, notes=notes, **network)
    if as_json:
        print_json(done)
    else:
        render_export(done)


@click.command()
@TRACES
@click.option("-o", "--output", type=OUTPUT, required=True, help="Workload text to write.")
@DP
@SCHEDULE
@MICRO_BATCHES
@click.option("--granularity", type=click.Choice(["layer", "submodule"]), default="submodule",
              show_default=True, help="What a row is.")  # fmt: skip
@as_json
@reports_errors
def simai(
    traces: tuple[Path, ...],
    output: Path,
    dp: int | None,
    schedule: str | None,
    micro_batches: int | None,
    granularity: str,
    as_json: bool,
) -> None:
    """Write a SimAI workload, and report what the format cannot hold.

    TRACES: one trace that represents all ranks; with --schedule those of a pipeline's stages, one
    per class of equal stages, or a directory of them.
    """
    import onerank
    from onerank.cli.render.export_table import render_simai
    from onerank.converters.expand.pipeline import Schedule
    from onerank.converters.targets.simai import export

    files = trace_files(traces)
    keep_inputs(output, *files)
    graphs, notes = replicated([onerank.read(file) for file in files], dp)
    done = export(
        graphs,
        output,
        schedule=Schedule.parse(schedule) if schedule else None,
        micro_batches=micro_batches,
        grain="layer" if granularity == "layer" else "submodule",
        notes=notes,
    )
    if as_json:
        print_json(done)
    else:
        render_simai(done)


@click.command()
@TRACES
@click.option("-o", "--output", type=OUTPUT, required=True, help="GOAL text to write.")
@RANKS
@DP
@HOST_TIME
@SCHEDULE
@MICRO_BATCHES
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True,
              help="Consecutive ranks that share a node.")  # fmt: skip
@click.option("--compute-capability", metavar="M.N", callback=_as_capability,
              help="Of the GPUs, as 8.6: NCCL chooses by it.  "
              "[default: the trace's GPU's; else 9.0]")  # fmt: skip
@click.option("--granularity", type=click.Choice(GRAINS), default="kernel", show_default=True,
              help="Write one calc per layer or sub-module between communications.")  # fmt: skip
@as_json
@reports_errors
def goal(
    traces: tuple[Path, ...],
    output: Path,
    ranks: int | None,
    dp: int | None,
    include_host_delays: bool,
    schedule: str | None,
    micro_batches: int | None,
    gpus_per_node: int,
    compute_capability: int | None,
    granularity: str,
    as_json: bool,
) -> None:
    """Write a GOAL schedule: every rank's operations, collectives as messages.

    TRACES: one trace that represents all ranks; or one of each class of equal ranks, or a directory
    of them; with --schedule those of a pipeline's stages.
    """
    import onerank
    from onerank.cli.render.export_table import render_goal
    from onerank.converters.targets.goal import export, export_ranks

    files = trace_files(traces)
    keep_inputs(output, *files)
    graphs, notes = replicated([at_grain(onerank.read(file), granularity) for file in files], dp)
    interconnect, assumed = _interconnect(graphs[0], compute_capability)
    network: dict[str, Any] = {"gpus_per_node": gpus_per_node, "interconnect": interconnect}
    made, notes = ranks_of(
        graphs,
        notes,
        schedule,
        micro_batches,
        ranks,
        host_delays=include_host_delays,
        one_at_a_time=False,
    )
    notes = [*notes, *assumed]
    if made is None:
        done = export(
            graphs[0], output, ranks=ranks, host_time=include_host_delays, notes=notes, **network
        )
    else:
        done = export_ranks(made, output, notes=notes, **network)
    if as_json:
        print_json(done)
    else:
        render_goal(done)


def ranks_of(
    graphs: "list[Graph]",
    notes: list[str],
    schedule: str | None,
    micro_batches: int | None,
    ranks: int | None,
    *,
    host_delays: bool,
    one_at_a_time: bool,
) -> "tuple[list[RankGraph] | None, list[str]]":
    """Return the graphs of all ranks and notes; None if one graph represents all.

    Waits for the host are put into these graphs, and are left to the export of a single one.

    Raises:
        UsageError: options do not go together.
        ExportError: the graphs are not of one job.
    """
    from onerank.converters.expand.host_delays import insert_host_delays_by_rank
    from onerank.converters.expand.pipeline import Schedule, expand
    from onerank.converters.expand.ranks import expand_ranks as spread

    if host_delays and (schedule is not None or len(graphs) > 1):
        graphs, waiting = insert_host_delays_by_rank(graphs, one_at_a_time=one_at_a_time)
        notes = [*notes, *waiting]
    if schedule is not None:
        if micro_batches is None or ranks is not None:
            raise click.UsageError("--schedule needs --micro-batches, and no --ranks")
        return expand(graphs, Schedule.parse(schedule), micro_batches), notes
    if micro_batches is not None:
        raise click.UsageError("--micro-batches needs --schedule")
    if len(graphs) == 1:
        return None, notes
    if ranks is not None:
        raise click.UsageError("--ranks is for a single trace; several tell their world")
    return spread(graphs), notes


def replicated(graphs: "list[Graph]", dp: int | None) -> "tuple[list[Graph], list[str]]":
    """Return the graphs in a job with `dp` replicas, and notes."""
    if dp is None:
        return graphs, []
    from onerank.converters.expand.data_parallel import replica_notes, with_replicas

    notes = replica_notes(graphs, dp)
    return [with_replicas(graph, dp) for graph in graphs], notes


def _links_of(graph: "Graph") -> dict[str, Any]:
    """Return the link and memory rates of the graph's GPU."""
    gpu = _described(graph)
    if gpu is None:
        return {}
    rates = {"memory_gb_per_s": gpu.peak_bandwidth_bytes_per_s / 1e9}
    if link := gpu.figures.get("link_bandwidth_gbps"):
        rates["bandwidth_gb_per_s"] = link.value
    return rates


def _interconnect(graph: "Graph", asked: int | None) -> "tuple[Interconnect, list[str]]":
    """Return the GPU's compute capability as NCCL sees it, and a note if it is a guess.

    `asked` is the capability that the user gave; it must not contradict the GPU's known one.
    """
    from onerank.converters.nccl import H100, interconnect_of

    gpu = _described(graph)
    known = None if gpu is None else gpu.capability
    capability = known if asked is None else asked
    name = graph.job.device.name
    if capability is not None:
        return interconnect_of(capability, name if known in (None, capability) else ""), []
    made, named = interconnect_of(H100.capability, name), name or "the trace's GPU"
    return made, [
        f"NCCL's algorithms are an H100's{'' if made.nvlink else ' on PCIe'}: of "
        f"{named} no compute capability is known; "
        "--compute-capability tells it."
    ]


def _described(graph: "Graph") -> "Gpu | None":
    """Return the description of the graph's GPU, of its board where figures of it were changed."""
    from onerank.annotate import find_gpu

    name = graph.job.device.name
    return find_gpu(name) or find_gpu(name.split(" (", 1)[0])
