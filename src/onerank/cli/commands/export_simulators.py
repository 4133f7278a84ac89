"""`onerank export astra-sim|simai|goal`: workloads for network simulators."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.commands.coarsen import Granularity, at_granularity
from onerank.cli.common import (
    GB_PER_S,
    INPUT_OR_DIRECTORY,
    LATENCY_NS,
    OUTPUT,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.options import SIZE, SectionedCommand, headings, option, with_options
from onerank.cli.terminal import print_json

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.converters.expand.pipeline import RankGraph
    from onerank.converters.nccl import Interconnect
    from onerank.ir import Graph

TRACES = click.argument("traces", nargs=-1, required=True, type=INPUT_OR_DIRECTORY)

JOB = "The job"
NETWORK = "Its network"
WRITTEN = "Output"


class _Capability(click.ParamType[int]):
    """A compute capability, major.minor; as NCCL counts it, 86 for 8.6."""

    name = "capability"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from onerank.annotate.gpus.spec_schema import COMPUTE_CAPABILITY

        if not re.fullmatch(COMPUTE_CAPABILITY, str(value)):
            self.fail(f"{value}: expected major.minor, as 8.6 of an A10", param, ctx)
        return int(str(value).replace(".", ""))


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a job grows from the traces of a few ranks."""

    dp: int | None = option(
        "Replicas, in place of those captured.",
        heading=JOB,
        default=None,
        type=click.IntRange(2),
    )
    schedule: str | None = option(
        "Of a pipeline: gpipe, 1f1b, interleaved:V or zbv.", heading=JOB, default=None
    )
    micro_batches: int | None = option("Of a pipelined step.", heading=JOB, default=None, type=SIZE)


@dataclass(frozen=True, kw_only=True)
class RankOptions(PipelineOptions):
    """How a job grows to all ranks, and whether they wait for their hosts."""

    ranks: int | None = option(
        "For a trace that does not record its world.",
        heading=JOB,
        default=None,
        type=click.IntRange(2),
    )
    include_host_delays: bool = option(
        "Let the GPU wait for its host as it did.", heading=JOB, default=False
    )


@dataclass(frozen=True, kw_only=True)
class AstraSimOptions(RankOptions):
    """The job, its network, and what is written."""

    bandwidth_gb_s: float | None = option(
        "GB/s of each rank in each direction.  [default: the trace's GPU's; else 450]",
        heading=NETWORK,
        default=None,
        type=GB_PER_S,
    )
    busbw_gb_s: float | None = option(
        "In its place, the bus bandwidth that large collectives reach as measured; their "
        "reductions then take no further time.",
        heading=NETWORK,
        default=None,
        type=GB_PER_S,
    )
    latency_ns: float = option(
        "From one rank to another.",
        heading=NETWORK,
        default=500.0,
        type=LATENCY_NS,
        show_default=True,
    )
    output: Path = option(
        "Directory to write; the files of an earlier export there are replaced.",
        *("-o", "--output"),
        heading=WRITTEN,
        type=click.Path(file_okay=False, path_type=Path),
    )
    overwrite: bool = option(
        "Write into a directory that holds other files too; they stay.",
        heading=WRITTEN,
        default=False,
    )
    name: str = option(
        "Prefix of the traces.", heading=WRITTEN, default="workload", show_default=True
    )
    granularity: Granularity = option(
        "Write one node per layer or sub-module between communications.",
        heading=WRITTEN,
        default="kernel",
        show_default=True,
    )


@dataclass(frozen=True, kw_only=True)
class SimaiOptions(PipelineOptions):
    """The job, and what is written."""

    output: Path = option("Workload text to write.", *("-o", "--output"), type=OUTPUT)
    granularity: Literal["layer", "submodule"] = option(
        "What a row is.", default="submodule", show_default=True
    )


@dataclass(frozen=True, kw_only=True)
class GoalOptions(RankOptions):
    """The job, the hardware that NCCL's algorithms depend on, and what is written."""

    gpus_per_node: int = option(
        "Consecutive ranks that share a node.",
        heading=NETWORK,
        default=8,
        type=SIZE,
        show_default=True,
    )
    compute_capability: int | None = option(
        "Of the GPUs, as 8.6: NCCL chooses by it.  [default: the trace's GPU's; else 9.0]",
        heading=NETWORK,
        default=None,
        type=_Capability(),
        metavar="M.N",
    )
    output: Path = option("GOAL text to write.", *("-o", "--output"), heading=WRITTEN, type=OUTPUT)
    granularity: Granularity = option(
        "Write one calc per layer or sub-module between communications.",
        heading=WRITTEN,
        default="kernel",
        show_default=True,
    )


def trace_files(paths: tuple[Path, ...]) -> list[Path]:
    """Return the traces, those of a directory in its place."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.et")) if path.is_dir() else [path]
        if not found:
            raise click.UsageError(f"{path} holds no .et file")
        files += found
    return files


def _keep_inputs_in(directory: Path, files: Sequence[Path]) -> None:
    """Refuse an input trace in the output directory, where the export might replace it.

    Raises:
        ExportError: a trace is in the directory.
    """
    from onerank.ir.errors import ExportError

    for file in files:
        if file.resolve().parent == directory.resolve():
            raise ExportError(
                f"the trace {file} is in {directory}, the directory to export to; name another",
                code="export-input-in-output",
            )


@click.command("astra-sim", cls=SectionedCommand, sections=headings(AstraSimOptions))
@TRACES
@with_options(AstraSimOptions)
@as_json
@reports_errors
def astra_sim(traces: tuple[Path, ...], options: AstraSimOptions, as_json: bool) -> None:
    """Write an ASTRA-sim workload: every rank's trace, groups, configuration, run.sh.

    TRACES: one trace that represents all ranks; or one of each class of equal ranks, or a directory
    of them, as `capture run --ranks distinct` writes them; with --schedule those of a pipeline's
    stages.
    """
    from onerank.cli.render.export_table import render_export
    from onerank.converters.targets.astra_sim import export as export_workload
    from onerank.converters.targets.astra_sim import export_ranks

    files = trace_files(traces)
    _keep_inputs_in(options.output, files)
    job = _job_of(files, options, options.granularity)
    if options.bandwidth_gb_s is not None and options.busbw_gb_s is not None:
        raise click.UsageError("give --bandwidth-gb-s or --busbw-gb-s, not both")
    network = {**_links_of(job.graphs[0]), "latency_ns": options.latency_ns}
    if options.busbw_gb_s is not None:
        network |= {"bandwidth_gb_per_s": options.busbw_gb_s, "memory_gb_per_s": None}
    elif options.bandwidth_gb_s is not None:
        network["bandwidth_gb_per_s"] = options.bandwidth_gb_s
    ranks, notes = ranks_of(job, options, one_at_a_time=True)
    if ranks is None:
        export = export_workload(
            job.graphs[0],
            options.output,
            name=options.name,
            ranks=options.ranks,
            host_time=options.include_host_delays,
            notes=notes,
            overwrite=options.overwrite,
            **network,
        )
    else:
        export = export_ranks(
            ranks,
            options.output,
            name=options.name,
            notes=notes,
            overwrite=options.overwrite,
            **network,
        )
    if as_json:
        print_json(export)
    else:
        render_export(export)


@click.command(cls=SectionedCommand, sections=headings(SimaiOptions))
@TRACES
@with_options(SimaiOptions)
@as_json
@reports_errors
def simai(traces: tuple[Path, ...], options: SimaiOptions, as_json: bool) -> None:
    """Write a SimAI workload, and report what the format cannot hold.

    TRACES: one trace that represents all ranks; with --schedule those of a pipeline's stages, one
    per class of equal stages, or a directory of them.
    """
    from onerank.cli.render.export_table import render_simai
    from onerank.converters.expand.pipeline import Schedule
    from onerank.converters.targets.simai import export

    files = trace_files(traces)
    keep_inputs(options.output, *files)
    job = _job_of(files, options, "kernel")
    done = export(
        job.graphs,
        options.output,
        schedule=Schedule.parse(options.schedule) if options.schedule else None,
        micro_batches=options.micro_batches,
        grain=options.granularity,
        notes=job.notes,
    )
    if as_json:
        print_json(done)
    else:
        render_simai(done)


@click.command(cls=SectionedCommand, sections=headings(GoalOptions))
@TRACES
@with_options(GoalOptions)
@as_json
@reports_errors
def goal(traces: tuple[Path, ...], options: GoalOptions, as_json: bool) -> None:
    """Write a GOAL schedule: every rank's operations, collectives as messages.

    TRACES: one trace that represents all ranks; or one of each class of equal ranks, or a directory
    of them; with --schedule those of a pipeline's stages.
    """
    from onerank.cli.render.export_table import render_goal
    from onerank.converters.targets.goal import export as export_schedule
    from onerank.converters.targets.goal import export_ranks

    files = trace_files(traces)
    keep_inputs(options.output, *files)
    job = _job_of(files, options, options.granularity)
    interconnect, assumptions = _interconnect(job.graphs[0], options.compute_capability)
    network: dict[str, Any] = {
        "gpus_per_node": options.gpus_per_node,
        "interconnect": interconnect,
    }
    ranks, notes = ranks_of(job, options, one_at_a_time=False)
    notes = [*notes, *assumptions]
    if ranks is None:
        export = export_schedule(
            job.graphs[0],
            options.output,
            ranks=options.ranks,
            host_time=options.include_host_delays,
            notes=notes,
            **network,
        )
    else:
        export = export_ranks(ranks, options.output, notes=notes, **network)
    if as_json:
        print_json(export)
    else:
        render_goal(export)


@dataclass(frozen=True)
class CapturedJob:
    """The graphs to export, with the requested replicas, and notes on them."""

    graphs: "list[Graph]"
    notes: list[str]


def _job_of(
    files: Sequence[Path], options: PipelineOptions, granularity: Granularity
) -> CapturedJob:
    """Read the traces at a granularity, and give their job `--dp` replicas."""
    from onerank.converters.expand.data_parallel import replica_notes, with_replicas

    seen: set[str] = set()
    graphs = [at_granularity(read_trace(file, seen=seen), granularity) for file in files]
    if options.dp is None:
        return CapturedJob(graphs, [])
    notes = replica_notes(graphs, options.dp)
    return CapturedJob([with_replicas(graph, options.dp) for graph in graphs], notes)


def ranks_of(
    job: CapturedJob, options: RankOptions, *, one_at_a_time: bool
) -> "tuple[list[RankGraph] | None, list[str]]":
    """Return the graphs of all ranks and notes; None if one graph represents all.

    Host delays are inserted into these graphs. The export of a single graph inserts its own.

    Args:
        job: the graphs to expand.
        options: what the command line gave.
        one_at_a_time: whether the simulator runs one node of a rank at a time.

    Raises:
        UsageError: options do not go together.
        ExportError: the graphs are not of one job.
    """
    from onerank.converters.expand.host_delays import insert_host_delays_by_rank
    from onerank.converters.expand.pipeline import Schedule, expand
    from onerank.converters.expand.ranks import expand_ranks

    graphs, notes = job.graphs, job.notes
    if options.include_host_delays and (options.schedule is not None or len(graphs) > 1):
        graphs, delay_notes = insert_host_delays_by_rank(graphs, one_at_a_time=one_at_a_time)
        notes = [*notes, *delay_notes]
    if options.schedule is not None:
        if options.micro_batches is None or options.ranks is not None:
            raise click.UsageError("--schedule needs --micro-batches, and no --ranks")
        schedule = Schedule.parse(options.schedule)
        return expand(graphs, schedule, options.micro_batches), notes
    if options.micro_batches is not None:
        raise click.UsageError("--micro-batches needs --schedule")
    if len(graphs) == 1:
        return None, notes
    if options.ranks is not None:
        raise click.UsageError("--ranks is for a single trace; several record their world")
    return expand_ranks(graphs), notes


def _links_of(graph: "Graph") -> dict[str, Any]:
    """Return the link and memory rates of the graph's GPU."""
    gpu = _described(graph)
    if gpu is None:
        return {}
    rates = {"memory_gb_per_s": gpu.peak_bandwidth_bytes_per_s / 1e9}
    if link := gpu.figures.get("link_bandwidth_gb_per_s"):
        rates["bandwidth_gb_per_s"] = link.value
    return rates


def _interconnect(graph: "Graph", requested: int | None) -> "tuple[Interconnect, list[str]]":
    """Return the interconnect that NCCL sees, and a note if the capability is an assumption.

    Args:
        graph: its device names the GPU.
        requested: compute capability that the user gave; it must not contradict the GPU's.
    """
    from onerank.converters.nccl import H100, interconnect_of

    gpu = _described(graph)
    known = None if gpu is None else gpu.capability
    capability = known if requested is None else requested
    name = graph.job.device.name
    if capability is not None:
        return interconnect_of(capability, name if known in (None, capability) else ""), []
    interconnect = interconnect_of(H100.capability, name)
    device = name or "the trace's GPU"
    return interconnect, [
        f"the compute capability of {device} is not known: NCCL's algorithms are chosen as for an "
        f"H100{'' if interconnect.nvlink else ' on PCIe'}; give --compute-capability"
    ]


def _described(graph: "Graph") -> "Gpu | None":
    """Return the description of the graph's GPU, of its board where figures of it were changed."""
    from onerank.annotate import find_gpu

    name = graph.job.device.name
    return find_gpu(name) or find_gpu(name.split(" (", 1)[0])
