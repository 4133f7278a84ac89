"""`onerank convert`: recorded traces or an ONNX model, lowered to a graph."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    OUTPUT_OR_DIRECTORY,
    TRACE,
    TRACE_OUTPUT,
    as_json,
    keep_inputs,
    print_json,
    reports_errors,
)

if TYPE_CHECKING:
    from onerank.converters.sources.kineto import Conversion
    from onerank.ir import Graph

SIZE = click.IntRange(1)


@click.command()
@click.argument("source", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--kineto", type=TRACE, help="Kineto trace (JSON, gzip or not).")
@click.option(
    "--et",
    type=TRACE,
    help="Execution trace of the same window.  [default: GPU operations only]",
)
@click.option(
    "--profile",
    "profiles",
    type=TRACE,
    multiple=True,
    help="Kineto trace of a like step without ET, for its times; of several, the medians.",
)
@click.option(
    "--step",
    default="all",
    show_default=True,
    metavar="N|median|all",
    help="Traces: one of the steps that profiler.step() marked.",
)
@click.option("--operators", is_flag=True, help="No --et: keep operators too, without shapes.")
@click.option("--batch", type=SIZE, help="Model: size of the inputs' first axis.")
@click.option("--seq", type=SIZE, help="Model: sequence length.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Model: an open size.")
@click.option("--train", is_flag=True, help="Model: add backward and an AdamW step.")
@click.option(
    "-o",
    "--output",
    type=OUTPUT_OR_DIRECTORY,
    required=True,
    help="Chakra trace to write; of several ranks, the directory of their traces.",
)
@as_json
@reports_errors
def convert(
    source: Path | None,
    kineto: Path | None,
    et: Path | None,
    profiles: tuple[Path, ...],
    step: str,
    operators: bool,
    batch: int | None,
    seq: int | None,
    sizes: tuple[str, ...],
    train: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Turn recorded traces or a model into a Chakra trace.

    Traces: --kineto and --et of one window, or a directory of `capture run --raw-dir` as SOURCE.
    Several ranks: a directory of such directories, or of a Kineto trace and an execution trace per
    rank, as SOURCE; -o is then a directory too. Chakra's JSON: a .json file as SOURCE. Another
    tool's .et as SOURCE: written with the groups of a comm_groups.json next to it.
    A model: an .onnx file as SOURCE; its operators get shapes, FLOPs and bytes, and no times.
    """
    traces = [path for path in (kineto, et, *profiles) if path]
    model = {"--batch": batch, "--seq": seq, "--size": sizes, "--train": train}
    of_model = [name for name, given in model.items() if given]
    is_model = source is not None and source.suffix == ".onnx"
    if source is not None and traces:
        raise click.UsageError("give a SOURCE, or --kineto and --et, not both")
    if step != "all" and source is not None and not source.is_dir():
        raise click.UsageError(f"--step is for traces with steps, and {source} has none marked")
    if of_model and not is_model:
        raise click.UsageError(f"{of_model[0]} is for a model: SOURCE must be a .onnx file")
    if is_model:
        assert source is not None
        _is_trace(output, source)
        _convert_model(source, output, batch, seq, sizes, train=train, as_json=as_json)
        return
    if source is None:
        if kineto is None or (profiles and et is None):
            raise click.UsageError("give --kineto, with --et where there is one, or a SOURCE")
        if profiles and step != "all":
            raise click.UsageError("--profile gives times of whole windows; leave out --step")
        if et is not None and operators:
            raise click.UsageError("--operators is for a trace without --et, which keeps them")
        _convert_traces(kineto, et, profiles, step, output, operators=operators, as_json=as_json)
    else:
        _convert_source(source, output, step, operators=operators, as_json=as_json)


def _convert_source(
    source: Path, output: Path, step: str, *, operators: bool, as_json: bool
) -> None:
    if recorded := _recorded(source):
        raise click.UsageError(recorded)
    if source.is_dir():
        _convert_directory(source, output, step, operators=operators, as_json=as_json)
    elif source.suffix == ".json":
        _convert_json(source, output, as_json=as_json)
    elif source.suffix == ".et":
        _convert_et(source, output, as_json=as_json)
    else:
        raise click.UsageError(
            f"{source}: expected a .onnx model, Chakra's .json or .et, or a directory of traces"
        )


def _recorded(source: Path) -> str:
    """Return what to do with one of the profiler's files, which need options; else nothing."""
    from onerank.converters.sources.kineto.read.json_stream import beginning, kind_of

    kind = kind_of(beginning(source)) if source.name.endswith((".json", ".json.gz")) else None
    if kind == "kineto":
        return f"{source} is a Kineto trace: --kineto {source}, with --et where there is one"
    if kind == "et":
        return (
            f"{source} is an execution trace, which has no times: --et {source}, and the Kineto "
            "trace of the same window with --kineto"
        )
    return ""


def _convert_traces(
    kineto: Path,
    et: Path | None,
    profiles: tuple[Path, ...],
    step: str,
    output: Path,
    *,
    operators: bool,
    as_json: bool,
) -> None:
    from onerank.converters.sources.kineto import Sources, convert

    _is_trace(output, kineto, et, *profiles)
    graph, report = convert(Sources(kineto, et, profiles, operators=operators), step=step)
    _write(graph, report, output, as_json=as_json)


def _convert_directory(
    source: Path, output: Path, step: str, *, operators: bool, as_json: bool
) -> None:
    """Convert the files of one capture, or every rank's traces."""
    from onerank.converters.sources.kineto import JOB, convert_directory

    if not (source / JOB).exists():
        _convert_ranks(source, output, step, operators=operators, as_json=as_json)
        return
    if step != "all":
        raise click.UsageError("--step is for traces with steps; a capture is of one step")
    _is_trace(output, *source.iterdir())
    graph, report = convert_directory(source)
    _write(graph, report, output, as_json=as_json)


def _convert_json(source: Path, output: Path, *, as_json: bool) -> None:
    from onerank.ir.chakra import from_json

    _is_trace(output, source)
    nodes = from_json(source, output)
    if as_json:
        print_json({"output": output, "nodes": nodes})
    else:
        click.echo(f"{output}: {nodes} nodes")


def _convert_et(source: Path, output: Path, *, as_json: bool) -> None:
    """Write a trace that needs no further file."""
    import onerank

    _is_trace(output, source)
    graph = onerank.read(source)
    graph.write(output)
    groups = {group.name: group.ranks for group in graph.job.groups}
    if as_json:
        print_json({"output": output, "nodes": len(graph), "groups": groups})
    else:
        click.echo(f"{output}: {len(graph)} nodes, {len(groups)} groups")


def _is_trace(output: Path, *inputs: Path | None) -> None:
    """Refuse what is no name for one trace, or the name of an input."""
    if output.is_dir():
        raise click.UsageError(f"--output {output} is a directory; name the trace to write")
    keep_inputs(output, *inputs)
    TRACE_OUTPUT.convert(output, None, click.get_current_context())


def _write(graph: "Graph", report: "Conversion", output: Path, *, as_json: bool) -> None:
    graph.write(output)
    if as_json:
        print_json(report)
        return
    from onerank.cli.render.conversion_table import render_conversion

    render_conversion(report)
    click.echo(f"{output}: {len(graph)} nodes")


def _convert_ranks(
    source: Path, output: Path, step: str, *, operators: bool, as_json: bool
) -> None:
    from onerank.converters.sources.kineto.rank_directory import convert_ranks, ranks_in

    if output.exists() and not output.is_dir():
        raise click.UsageError(f"--output {output} is a file; {source} holds several ranks' traces")
    done = convert_ranks(ranks_in(source, operators=operators), output, step=step)
    if as_json:
        print_json(done)
        return
    from onerank.cli.render.conversion_table import render_conversion

    for rank in done:
        render_conversion(rank.report)
        click.echo(f"{rank.path}: {rank.nodes} nodes")


def _convert_model(
    source: Path,
    output: Path,
    batch: int | None,
    seq: int | None,
    sizes: tuple[str, ...],
    *,
    train: bool,
    as_json: bool,
) -> None:
    from onerank.analysis.summary import summarise
    from onerank.annotate import characterise
    from onerank.cli.render.conversion_table import render_model
    from onerank.cli.render.trace_tables import render_summary
    from onerank.converters.sources.onnx import convert_onnx

    graph, report = convert_onnx(source, sizes=_sizes(sizes), batch=batch, seq=seq, train=train)
    graph = characterise(graph)
    graph.write(output)
    if as_json:
        print_json(report)
        return
    render_model(report)
    render_summary(summarise(graph), title=str(output))


def _sizes(given: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for one in given:
        name, _, size = one.partition("=")
        if not name or not size.isdecimal():
            raise click.BadParameter(f"{one!r}: expected NAME=N", param_hint="--size")
        sizes[name] = int(size)
    return sizes
