"""`onerank export astra-sim|simai|goal`: workloads for network simulators."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.click_options import SIZE, SectionedCommand, headings, option, with_options
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
from onerank.cli.terminal import print_json
from onerank.export import Granularity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def _graphs(files: "Sequence[Path]") -> "Iterator[Graph]":
    """Read the traces one at a time; a note that several have is printed once."""
    seen: set[str] = set()
    return (read_trace(file, seen=seen) for file in files)


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
    from onerank import export
    from onerank.cli.render.export_table import render_export

    files = export.trace_files(traces)
    for file in files:
        export.refuse_input_in(options.output, file)
    done = export.astra_sim(_graphs(files), **vars(options))
    if as_json:
        print_json(done)
    else:
        render_export(done)


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
    from onerank import export
    from onerank.cli.render.export_table import render_simai

    files = export.trace_files(traces)
    keep_inputs(options.output, *files)
    done = export.simai(_graphs(files), **vars(options))
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
    from onerank import export
    from onerank.cli.render.export_table import render_goal

    files = export.trace_files(traces)
    keep_inputs(options.output, *files)
    done = export.goal(_graphs(files), **vars(options))
    if as_json:
        print_json(done)
    else:
        render_goal(done)
