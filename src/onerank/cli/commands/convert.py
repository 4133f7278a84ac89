"""`onerank convert` lowers recorded traces or an ONNX model to a graph."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    INPUT_OR_DIRECTORY,
    OUTPUT_OR_DIRECTORY,
    TRACE,
    TRACE_OUTPUT,
    InvalidValue,
    UsageError,
    as_json,
    keep_inputs,
    repeat_notes,
    reports_errors,
)
from onerank.cli.conversion_tables import render_conversion, render_model, render_recording
from onerank.cli.dataclass_to_click import SIZE, SectionedCommand, headings, with_options
from onerank.cli.terminal import print_json, say
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.converters.sources.kineto import Conversion
    from onerank.ir import Graph
    from onerank.ir.chakra import Repairs


TRACES = "Recorded traces"
MODEL = "A model"
CHAKRA = "A Chakra trace"
OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What is converted, to which file."""

    kineto: Path | None = option(
        "Kineto trace (JSON, gzip or not).", heading=TRACES, default=None, type=TRACE
    )
    et: Path | None = option(
        "Execution trace of the same window.  [default: GPU operations only]",
        heading=TRACES,
        default=None,
        type=TRACE,
    )
    profile: tuple[Path, ...] = option(
        "Kineto trace of a step with the same work, recorded without an execution trace, for its "
        "times; of several, the medians.",
        heading=TRACES,
        default=(),
        type=TRACE,
        multiple=True,
    )
    step: str = option(
        "One of the steps that profiler.step() or an engine marked.",
        heading=TRACES,
        default="all",
        show_default=True,
        metavar="N|median|all",
    )
    operators: bool = option(
        "Without --et: keep the operators, too. A replay then includes the host's launch times.",
        heading=TRACES,
        default=False,
    )
    engine_steps: bool = option(
        "Recordings of vLLM or SGLang: write the engine's steps as a bundle to the directory -o.",
        heading=TRACES,
        default=False,
    )
    graphs: Path | None = option(
        "Trace of an engine that captures its CUDA graphs, or a directory of them: it has the "
        "operators of replayed kernels.",
        heading=TRACES,
        default=None,
        type=INPUT_OR_DIRECTORY,
    )
    config: Path | None = option(
        "With --engine-steps: config.json of the served model, which a recording does not contain.",
        heading=TRACES,
        default=None,
        type=INPUT_OR_DIRECTORY,
    )
    tp: int | None = option(
        "With --engine-steps: tensor-parallel size of the engine.  [default: 1 for a single rank, "
        "else not known]",
        heading=TRACES,
        default=None,
        type=SIZE,
    )
    batch: int | None = option(
        "Size of the inputs' first axis.", heading=MODEL, default=None, type=SIZE
    )
    seq: int | None = option("Sequence length.", heading=MODEL, default=None, type=SIZE)
    size: tuple[str, ...] = option(
        "A symbolic size.", heading=MODEL, default=(), multiple=True, metavar="NAME=N"
    )
    train: bool = option("Add backward and an AdamW step.", heading=MODEL, default=False)
    repair: bool = option(
        "Drop dependencies on absent nodes, of nodes on themselves, and those that close a cycle, "
        "of a .et or of Chakra's .json.",
        heading=CHAKRA,
        default=False,
    )
    output: Path = option(
        "Chakra trace to write; of several ranks, the directory of their traces.",
        "-o",
        "--output",
        heading=OUTPUT,
        type=OUTPUT_OR_DIRECTORY,
    )

    @property
    def recordings(self) -> tuple[Path, ...]:
        """The recorded traces that are given."""
        return tuple(path for path in (self.kineto, self.et, *self.profile) if path)

    @property
    def model_options(self) -> list[str]:
        """Spellings of the options given that only a model takes."""
        values = {"--batch": self.batch, "--seq": self.seq, "--size": self.size}
        return [name for name, value in {**values, "--train": self.train}.items() if value]

    @property
    def graph_options(self) -> list[str]:
        """Spellings of the options given that only the conversion to a graph takes."""
        values = {
            "--et": self.et,
            "--profile": self.profile,
            "--step": self.step != "all",
            "--operators": self.operators,
            "--repair": self.repair,
        }
        return [*(name for name, value in values.items() if value), *self.model_options]


@dataclass(frozen=True)
class JsonConverted:
    """A trace written from Chakra's JSON.

    Attributes:
        output: the trace that was written.
        nodes: number of nodes.
    """

    output: Path
    nodes: int


@dataclass(frozen=True)
class EtConverted:
    """A trace written from a `.et` file, or from Chakra's JSON with --repair.

    Attributes:
        output: the trace that was written.
        nodes: number of nodes.
        groups: process group -> its ranks.
        dropped: dependencies that --repair dropped; None without it.
    """

    output: Path
    nodes: int
    groups: Mapping[str, Sequence[int]]
    dropped: "Repairs | None"


@click.command(cls=SectionedCommand, sections=headings(ConvertOptions))
@click.argument("source", required=False, type=INPUT_OR_DIRECTORY)
@with_options(ConvertOptions)
@as_json
@reports_errors
def convert(source: Path | None, options: ConvertOptions, as_json: bool) -> None:
    """Turn recorded traces or a model into a Chakra trace.

    \b
    input                                         output
    --kineto FILE, --et FILE of one window        a trace
    --kineto FILE                                 a trace of its GPU operations
    --kineto FILE --step N                        a trace of one step
    DIRECTORY of `capture run --raw-dir`          a trace
    DIRECTORY of such directories, or with a      a directory with a trace
      Kineto and an execution trace per rank      of each rank
    FILE.et of another tool, FILE.json of Chakra  a trace; a comm_groups.json next
                                                  to a .et gives the groups
    FILE.onnx                                     a trace with shapes, FLOPs and
                                                  bytes, without times
    FILE|DIRECTORY --engine-steps, recorded       a bundle with tables of the
      from vLLM or SGLang                         steps, as of `capture serve`
    """  # noqa: D301 - click keeps the lines of a paragraph after a backspace
    _check_sources(source, options)
    if options.engine_steps:
        _convert_engine_steps(source or options.kineto, options, as_json=as_json)
        return
    _check_graph_options(source, options)
    if source is None:
        _convert_traces(options, as_json=as_json)
    elif source.suffix == ".onnx":
        _convert_model(source, options, as_json=as_json)
    elif source.is_dir():
        _convert_directory(source, options, as_json=as_json)
    # A file of the profiler is no SOURCE; its first bytes decide which option it is for.
    elif hint := _recording_hint(source):
        raise UsageError(hint, code="convert-recording-option")
    elif source.suffix == ".json":
        _convert_json(source, options, as_json=as_json)
    elif source.suffix == ".et":
        _convert_et(source, source, options, as_json=as_json)
    else:
        raise UsageError(
            f"{source}: expected a .onnx model, Chakra's .json or .et, or a directory of traces",
            code="convert-unknown-source",
        )


def _check_sources(source: Path | None, options: ConvertOptions) -> None:
    """Refuse combinations of inputs."""
    if source is not None and options.recordings:
        raise UsageError(
            "give a SOURCE, or --kineto and --et, not both", code="convert-two-sources"
        )
    deployment = {"--config": options.config, "--tp": options.tp}
    given = [name for name, value in deployment.items() if value is not None]
    if given and not options.engine_steps:
        raise UsageError(f"{given[0]} is for --engine-steps", code="convert-deployment-source")
    takes_graphs = options.engine_steps or (options.kineto is not None and options.et is None)
    if options.graphs is not None and not takes_graphs:
        raise UsageError(
            "--graphs is for --kineto without --et, and for --engine-steps",
            code="convert-graphs-source",
        )


def _check_graph_options(source: Path | None, options: ConvertOptions) -> None:
    """Refuse options that are not for this kind of SOURCE."""
    if options.step != "all" and source is not None and not source.is_dir():
        raise UsageError(
            f"--step is for traces with steps, and {source} has none marked",
            code="convert-no-steps",
        )
    if options.model_options and (source is None or source.suffix != ".onnx"):
        raise UsageError(
            f"{options.model_options[0]} is for a model: SOURCE must be a .onnx file",
            code="convert-model-option",
        )
    if options.repair and (source is None or source.suffix not in (".et", ".json")):
        raise UsageError(
            "--repair is for a Chakra trace: SOURCE must be a .et or .json file",
            code="convert-repair-source",
        )


def _recording_hint(source: Path) -> str:
    """Return the options for a file of the profiler; "" for another file."""
    from onerank.converters.sources.kineto.read.json_stream import beginning, kind_of

    kind = kind_of(beginning(source)) if source.name.endswith((".json", ".json.gz")) else None
    if kind == "kineto":
        return (
            f"{source} is a Kineto trace: --kineto {source}, with --et where there is one; for a "
            f"recording of vLLM or SGLang, {source} --engine-steps"
        )
    if kind == "et":
        return (
            f"{source} is an execution trace, which has no times: --et {source}, and the Kineto "
            "trace of the same window with --kineto"
        )
    return ""


def _convert_traces(options: ConvertOptions, *, as_json: bool) -> None:
    """Convert a Kineto trace, with its execution trace and profiles."""
    from onerank.converters.sources.kineto import Sources, convert

    if options.kineto is None or (options.profile and options.et is None):
        raise UsageError(
            "give --kineto, with --et where there is one, or a SOURCE", code="convert-no-kineto"
        )
    if options.profile and options.step != "all":
        raise UsageError(
            "--profile gives times of whole windows; leave out --step",
            code="convert-profile-and-step",
        )
    if options.et is not None and options.operators:
        raise UsageError(
            "--operators is for a trace without --et, which keeps them",
            code="convert-operators-and-et",
        )
    _check_output(options.output, *options.recordings)
    sources = Sources(
        options.kineto,
        options.et,
        options.profile,
        operators=options.operators,
        captures=_captures(options),
    )
    graph, report = convert(sources, step=options.step)
    _write(graph, report, options.output, as_json=as_json)


def _convert_engine_steps(source: Path | None, options: ConvertOptions, *, as_json: bool) -> None:
    """Write tables of the steps in recordings of vLLM or SGLang."""
    if source is None or options.graph_options:
        given = f"; leave out {', '.join(options.graph_options)}" if options.graph_options else ""
        raise UsageError(
            f"--engine-steps takes a Kineto trace, or a directory of them, as SOURCE{given}",
            code="convert-engine-options",
        )
    from onerank.serving.bundle import check_replaceable
    from onerank.serving.recordings.read_recording import read_recording, recording_files
    from onerank.serving.recordings.recorded_bundle import Deployment, bundle_of
    from onerank.serving.recordings.recording import RECORDING

    check_replaceable(options.output)
    files = recording_files(source) if source.is_dir() else [source]
    captures = _captures(options)
    recording = read_recording(files, captures)
    bundle, traces = bundle_of(recording, files, captures, Deployment(options.config, options.tp))
    bundle.write(options.output, traces, lambda whole: recording.write(whole / RECORDING))
    if as_json:
        print_json(recording.record)
        return
    render_recording(recording, options.output, bundle)


def _captures(options: ConvertOptions) -> tuple[Path, ...]:
    """Return the traces of captures that --graphs names."""
    from onerank.serving.recordings.read_recording import recording_files

    if options.graphs is None or not options.graphs.is_dir():
        return () if options.graphs is None else (options.graphs,)
    return tuple(recording_files(options.graphs))


def _convert_directory(source: Path, options: ConvertOptions, *, as_json: bool) -> None:
    """Convert the files of a capture, or every rank's traces."""
    from onerank.converters.sources.kineto import convert_directory, is_capture

    if not is_capture(source):
        _convert_ranks(source, options, as_json=as_json)
        return
    if options.step != "all":
        raise UsageError(
            "--step is for traces with steps; a capture has one step", code="convert-no-steps"
        )
    # The command names the directory, but the files in it are the inputs.
    _check_output(options.output, *source.iterdir())
    graph, report = convert_directory(source)
    _write(graph, report, options.output, as_json=as_json)


def _convert_json(source: Path, options: ConvertOptions, *, as_json: bool) -> None:
    from onerank.ir.chakra import from_json

    _check_output(options.output, source)
    # `read_repaired` reads a file, and an output that is broken must not appear.
    if options.repair:
        with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
            broken = Path(directory) / "broken.et"
            from_json(source, broken)
            _convert_et(broken, source, options, as_json=as_json)
        return
    nodes = from_json(source, options.output)
    if as_json:
        print_json(JsonConverted(options.output, nodes))
    else:
        say(f"{options.output}: {nodes} nodes")


def _convert_et(trace: Path, source: Path, options: ConvertOptions, *, as_json: bool) -> None:
    """Write a trace that contains the groups of its job.

    Args:
        trace: file to read.
        source: the file that the user named; a file of groups may be in its directory.
        options: of the command.
        as_json: whether to print JSON.
    """
    from onerank.ir.chakra import Repairs, read, read_repaired
    from onerank.ir.chakra.third_party_traces import with_counted_work, with_groups

    output = options.output
    _check_output(output, source)
    graph, repairs = read_repaired(trace) if options.repair else (read(trace), Repairs())
    graph = with_counted_work(with_groups(graph, source))
    # Not through `read_trace`, because --repair reads graphs that `onerank.read` refuses.
    repeat_notes(graph)
    graph.write(output)
    groups = {group.name: group.ranks for group in graph.job.groups}
    if as_json:
        dropped = repairs if options.repair else None
        print_json(EtConverted(output, len(graph), groups, dropped))
        return
    say(f"{output}: {len(graph)} nodes, {len(groups)} groups")
    if options.repair:
        say(f"dropped: {repairs.dangling} dependencies on nodes that are not in the file, "
            f"{repairs.self_dependencies} of nodes on themselves, "
            f"{repairs.cyclic} that closed a cycle")  # fmt: skip


def _check_output(output: Path, *inputs: Path | None) -> None:
    """Refuse a directory, a name that does not end in .et, and the path of an input."""
    # The option's type accepts a directory, for several ranks, so a file is checked here.
    if output.is_dir():
        raise UsageError(
            f"--output {output} is a directory; name the trace to write", code="output-is-directory"
        )
    keep_inputs(output, *inputs)
    TRACE_OUTPUT.convert(output, None, click.get_current_context())


def _write(graph: "Graph", report: "Conversion", output: Path, *, as_json: bool) -> None:
    graph.write(output)
    if as_json:
        print_json(report)
        return

    render_conversion(report)
    say(f"{output}: {len(graph)} nodes")


def _convert_ranks(source: Path, options: ConvertOptions, *, as_json: bool) -> None:
    from onerank.converters.sources.kineto.rank_directory import convert_ranks, ranks_in

    output = options.output
    if output.exists() and not output.is_dir():
        raise UsageError(
            f"--output {output} is a file; {source} holds several ranks' traces",
            code="output-is-file",
        )
    ranks = ranks_in(source, operators=options.operators)
    done = convert_ranks(ranks, output, step=options.step)
    if as_json:
        print_json(done)
        return

    for rank in done:
        render_conversion(rank.report)
        say(f"{rank.path}: {rank.nodes} nodes")


def _convert_model(source: Path, options: ConvertOptions, *, as_json: bool) -> None:
    from onerank.analysis.summary import summarise
    from onerank.annotate import characterise
    from onerank.cli.summary_tables import render_summary
    from onerank.converters.sources.onnx import convert_onnx

    _check_output(options.output, source)
    graph, report = convert_onnx(
        source,
        sizes=_sizes(options.size),
        batch=options.batch,
        seq=options.seq,
        train=options.train,
    )
    # The converter knows shapes; FLOPs and bytes follow from them as for captured operators.
    graph = characterise(graph)
    graph.write(options.output)
    if as_json:
        print_json(report)
        return
    render_model(report)
    render_summary(summarise(graph), title=str(options.output))


def _sizes(texts: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes that texts of the form NAME=N set."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, size = text.partition("=")
        if not name or not size.isdecimal():
            raise InvalidValue(
                f"{text!r}: expected NAME=N", param_hint="--size", code="convert-size-malformed"
            )
        sizes[name] = int(size)
    return sizes
