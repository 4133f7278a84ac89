"""`onerank export`: workloads of simulators, and files for other tools."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.common import (
    GB_PER_S,
    INPUT_OR_DIRECTORY,
    LATENCY_NS,
    OUTPUT,
    TRACE,
    InvalidValue,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.dataclass_to_click import (
    SIZE,
    SectionedCommand,
    SectionedGroup,
    headings,
    with_options,
)
from onerank.cli.terminal import lines, print_json, rank_list, say
from onerank.display import size, time
from onerank.export import Granularity
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.converters.targets.astra_sim.exporter import AstraSimExport
    from onerank.converters.targets.goal import GoalExport
    from onerank.converters.targets.simai.exporter import SimaiExport
    from onerank.ir import Graph
    from onerank.ir.notes import Note


DIRECTORY = click.Path(file_okay=False, path_type=Path)

JOB = "The job"
NETWORK = "Its network"
WRITTEN = "Output"


class _Capability(click.ParamType[int]):
    """A compute capability, major.minor. Its value is NCCL's number, such as 86 for 8.6."""

    name = "capability"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from onerank.annotate.gpus.spec_schema import COMPUTE_CAPABILITY

        if not re.fullmatch(COMPUTE_CAPABILITY, str(value)):
            raise InvalidValue(
                f"{value}: expected major.minor, such as 8.6 of an A10",
                param,
                ctx,
                code="compute-capability-malformed",
            )
        return int(str(value).replace(".", ""))


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How the traces of a few ranks expand to the job."""

    dp: int | None = option(
        "Number of replicas, in place of the captured number.",
        heading=JOB,
        default=None,
        type=click.IntRange(2),
    )
    schedule: str | None = option(
        "Pipeline schedule: gpipe, 1f1b, interleaved:V or zbv.", heading=JOB, default=None
    )
    micro_batches: int | None = option(
        "Micro-batches of a step, for --schedule.", heading=JOB, default=None, type=SIZE
    )


@dataclass(frozen=True, kw_only=True)
class RankOptions(PipelineOptions):
    """How traces expand to all ranks, and whether these wait for their hosts."""

    ranks: int | None = option(
        "Number of ranks, for a trace that does not record its world.",
        heading=JOB,
        default=None,
        type=click.IntRange(2),
    )
    include_host_delays: bool = option(
        "Delay GPU operations as their host did in the capture.", heading=JOB, default=False
    )


@dataclass(frozen=True, kw_only=True)
class AstraSimOptions(RankOptions):
    """The job, its network, and what is written."""

    decode: Path | None = option(
        "With traces of a prefill: a trace of the decode on other GPUs, or a directory of its "
        "ranks' traces. The decode starts when it has received the KV cache.",
        heading=JOB,
        default=None,
        type=INPUT_OR_DIRECTORY,
    )
    kv_bytes: int | None = option(
        "With --decode: bytes of the KV cache that all ranks of the prefill send together.",
        heading=JOB,
        default=None,
        type=SIZE,
        metavar="BYTES",
    )
    bandwidth_gb_s: float | None = option(
        "GB/s of each rank in each direction.  [default: of the trace's GPU, else 450]",
        heading=NETWORK,
        default=None,
        type=GB_PER_S,
    )
    busbw_gb_s: float | None = option(
        "In place of --bandwidth-gb-s: the measured bus bandwidth of large collectives. It "
        "includes the time of their reductions.",
        heading=NETWORK,
        default=None,
        type=GB_PER_S,
    )
    latency_ns: float = option(
        "Latency from rank to rank.",
        heading=NETWORK,
        default=500.0,
        type=LATENCY_NS,
        show_default=True,
    )
    output: Path = option(
        "Directory to write; replaces the files of an earlier export.",
        "-o",
        "--output",
        heading=WRITTEN,
        type=DIRECTORY,
    )
    overwrite: bool = option(
        "Write into a directory that has other files, and keep those.",
        heading=WRITTEN,
        default=False,
    )
    name: str = option(
        "Prefix of the trace files.", heading=WRITTEN, default="workload", show_default=True
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

    output: Path = option("Workload text to write.", "-o", "--output", type=OUTPUT)
    granularity: Literal["layer", "submodule"] = option(
        "Scope of a row.", default="submodule", show_default=True
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
        "Compute capability of the GPUs, by which NCCL chooses algorithms.  [default: of the "
        "trace's GPU, else 9.0]",
        heading=NETWORK,
        default=None,
        type=_Capability(),
        metavar="M.N",
    )
    output: Path = option("GOAL text to write.", "-o", "--output", heading=WRITTEN, type=OUTPUT)
    granularity: Granularity = option(
        "Write one calc per layer or sub-module between communications.",
        heading=WRITTEN,
        default="kernel",
        show_default=True,
    )


def _workload_command(name: str, options: type) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator for a command that writes a workload from TRACES."""

    def decorate(function: Callable[..., None]) -> click.Command:
        traces = click.argument("traces", nargs=-1, required=True, type=INPUT_OR_DIRECTORY)
        command = click.command(name, cls=SectionedCommand, sections=headings(options))
        return command(traces(with_options(options)(as_json(reports_errors(function)))))

    return decorate


def _graphs(files: Sequence[Path]) -> "Iterator[Graph]":
    """Read the traces one at a time; print a note of several traces once."""
    # One set for all files, since traces of one job repeat each other's notes.
    seen: set[Note] = set()
    return (read_trace(file, seen=seen) for file in files)


@_workload_command("astra-sim", AstraSimOptions)
def astra_sim(traces: tuple[Path, ...], options: AstraSimOptions, as_json: bool) -> None:
    """Write an ASTRA-sim workload: every rank's trace, groups, configuration, run.sh.

    TRACES: a trace that represents all ranks. Or a trace of each class of equivalent ranks, as
    `capture run --ranks distinct` writes them, or their directory. With --schedule, the traces of
    the pipeline's stages.
    """
    from onerank import export

    files = export.trace_files(traces)
    for file in files:
        # The library gets graphs here, whose paths it cannot check.
        export.refuse_input_in(options.output, file)
    done = export.astra_sim(_graphs(files), **vars(options))
    print_json(done) if as_json else render_export(done)


@_workload_command("simai", SimaiOptions)
def simai(traces: tuple[Path, ...], options: SimaiOptions, as_json: bool) -> None:
    """Write a SimAI workload, and report what the format cannot express.

    TRACES: a trace that represents all ranks. With --schedule, a trace of each class of equivalent
    stages, or their directory.
    """
    from onerank import export

    files = export.trace_files(traces)
    keep_inputs(options.output, *files)
    done = export.simai(_graphs(files), **vars(options))
    print_json(done) if as_json else render_simai(done)


@_workload_command("goal", GoalOptions)
def goal(traces: tuple[Path, ...], options: GoalOptions, as_json: bool) -> None:
    """Write a GOAL schedule: every rank's operations, collectives as messages.

    TRACES: a trace that represents all ranks. Or a trace of each class of equivalent ranks, or
    their directory. With --schedule, the traces of the pipeline's stages.
    """
    from onerank import export

    files = export.trace_files(traces)
    keep_inputs(options.output, *files)
    done = export.goal(_graphs(files), **vars(options))
    print_json(done) if as_json else render_goal(done)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The file that a command writes."""

    output: Path = option("File to write.", "-o", "--output", type=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class ParquetOptions:
    """Where the tables go."""

    output: Path = option("Directory of the tables.", "-o", "--output", type=DIRECTORY)


@click.command()
@click.argument("trace", type=TRACE)
@with_options(FileOptions)
@reports_errors
def perfetto(trace: Path, options: FileOptions) -> None:
    """Write a timeline for ui.perfetto.dev: threads, streams, launches, waits, memory.

    The file is JSON, with gzip if its name ends in .gz.
    """
    from onerank import export

    keep_inputs(options.output, trace)
    slices = export.perfetto(read_trace(trace), options.output, title=trace.name)
    say(f"{options.output}: {slices} slices")


@click.command()
@click.argument("trace", type=TRACE)
@with_options(ParquetOptions)
@reports_errors
def parquet(trace: Path, options: ParquetOptions) -> None:
    """Write nodes and edges as tables for polars, pandas, DuckDB."""
    from onerank.converters.targets.parquet_graphviz import write_parquet

    graph = read_trace(trace)
    nodes, edges = write_parquet(graph, options.output)
    say(f"{nodes}: {len(graph)} rows\n{edges}: {len(graph.edges)} rows")


@click.command()
@click.argument("trace", type=TRACE)
@with_options(FileOptions)
@reports_errors
def dot(trace: Path, options: FileOptions) -> None:
    """Write a drawing of the graph for Graphviz."""
    from onerank.converters.targets.parquet_graphviz import to_dot
    from onerank.ir.output_files import replace_file

    keep_inputs(options.output, trace)
    replace_file(options.output, to_dot(read_trace(trace)).encode())
    drawing = options.output.with_suffix(".svg").name
    say(f"{options.output}: draw it with dot -Tsvg {options.output} -o {drawing}")


@click.command("chakra-json")
@click.argument("trace", type=TRACE)
@with_options(FileOptions)
@reports_errors
def chakra_json(trace: Path, options: FileOptions) -> None:
    """Write the messages as JSON, as Chakra's jsonizer does; `onerank convert` reads it back."""
    from onerank.ir.chakra import to_json
    from onerank.ir.output_files import replace_file

    keep_inputs(options.output, trace)
    replace_file(options.output, to_json(trace).encode())
    say(f"{options.output}: the messages of {trace}")


_OF_SERVING = ("vidur", "llmservingsim", "sglang-sim", "aiconfigurator")


@click.group(
    cls=SectionedGroup,
    sections={
        "Simulators": ("astra-sim", "simai", "goal"),
        "Simulators of serving": _OF_SERVING,
        "Other tools": ("perfetto", "parquet", "dot", "chakra-json"),
    },
    modules=dict.fromkeys(_OF_SERVING, "export_serving"),
)
def export() -> None:
    """Write a trace in the format of a simulator or of another tool."""


for _command in (astra_sim, simai, goal, perfetto, parquet, dot, chakra_json):
    export.add_command(_command)


# Process groups that a line lists; --json has all.
_GROUPS = 16


def render_export(done: "AstraSimExport") -> None:
    """Print what an export wrote."""
    group_texts = [f"{number}: {rank_list(ranks)}" for number, ranks in done.groups.items()]
    more = [f"and {len(group_texts) - _GROUPS} more"] if len(group_texts) > _GROUPS else []
    groups = "; ".join([*group_texts[:_GROUPS], *more])
    pairs = [
        ("ranks", str(done.ranks)),
        ("nodes per rank", str(done.nodes)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("groups", groups),
    ]
    pairs += [
        (f"stage {', '.join(map(str, stages))}", f"{size(peak)} of memory at the peak")
        for stages, peak in done.peak_memory_bytes
    ]
    pairs += [("dropped", f"{count}: {kind}") for kind, count in done.dropped.items()]
    pairs += [("note", str(note)) for note in done.notes]
    # An export checks what it wrote and raises an error on findings.
    pairs.append(("checked", "no findings"))
    pairs.append(
        (
            "run it",
            f"ASTRA_SIM_BIN=.../AstraSim_Analytical_Congestion_Unaware {done.directory}/run.sh",
        )
    )
    lines(pairs, f"{done.directory}: ASTRA-sim workload of {len(done.files)} files")


def render_simai(done: "SimaiExport") -> None:
    """Print the contents of a SimAI workload, and what the format cannot express."""
    batches = f"{done.micro_batches} micro-batch{'' if done.micro_batches == 1 else 'es'}"
    pairs = [
        ("ranks", f"{done.all_gpus}; all replay the step of rank {done.rank}"),
        ("rows", f"{done.rows} for {batches}"),
        ("forward", time(done.forward_ns)),
        ("input grad.", time(done.input_gradient_ns)),
        ("weight grad.", time(done.weight_gradient_ns)),
        ("optimizer", time(done.optimizer_ns)),
    ]
    pairs += [("lost", loss) for loss in done.losses]
    pairs += [("note", str(note)) for note in done.notes]
    lines(pairs, f"{done.path}: SimAI workload")


def render_goal(done: "GoalExport") -> None:
    """Print the contents of a GOAL schedule."""
    name = done.path.stem
    pairs = [
        ("ranks", str(done.ranks)),
        ("operations", str(done.operations)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("cpus", str(done.cpus)),
    ]
    pairs += [
        ("communication", f"{count}: {algorithm}") for algorithm, count in done.algorithms.items()
    ]
    pairs += [("dropped", f"{count}: {algorithm}") for algorithm, count in done.dropped.items()]
    pairs += [("note", str(note)) for note in done.notes]
    pairs.append(("compile it", f"txt2bin -i {done.path} -o {name}.bin"))
    # 500 ns of latency and 0.0022 ns per byte (450 GB/s) are the defaults of `export astra-sim`, no
    # message is so large (-S) that LogGOPSim starts its rendezvous protocol.
    pairs.append(("run it", f"LogGOPSim -f {name}.bin -L 500 -o 0 -g 0 -G 0.0022 -S {2**31 - 1}"))
    lines(pairs, f"{done.path}: GOAL schedule")
