"""`onerank convert`: recorded traces or an ONNX model, lowered to a graph."""

from pathlib import Path

import click

from onerank.cli.frame import OUTPUT, TRACE, as_json, keep_inputs, print_json, reports_errors

SIZE = click.IntRange(1)


@click.command()
@click.argument("source", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--kineto", type=TRACE, help="Kineto trace (JSON, gzip or not).")
@click.option("--et", type=TRACE, help="Execution trace of the same window.")
@click.option(
    "--profile",
    "profiles",
    type=TRACE,
    multiple=True,
    help="Kineto trace of a like step without ET, for its times; of several, the medians.",
)
@click.option("--batch", type=SIZE, help="Model: size of the inputs' first axis.")
@click.option("--seq", type=SIZE, help="Model: sequence length.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="Model: an open size.")
@click.option("--train", is_flag=True, help="Model: add backward and an AdamW step.")
@click.option("-o", "--output", type=OUTPUT, required=True, help="Chakra trace to write.")
@as_json
@reports_errors
def convert(
    source: Path | None,
    kineto: Path | None,
    et: Path | None,
    profiles: tuple[Path, ...],
    batch: int | None,
    seq: int | None,
    sizes: tuple[str, ...],
    train: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Lower traces or a model to a graph.

    Traces: --kineto and --et of one window, or a directory of `capture run --keep-raw` as SOURCE.
    Chakra's JSON: a .json file as SOURCE.
    A model: a .onnx file as SOURCE; its operators get shapes, FLOPs and bytes, and no times.
    """
    traces = [path for path in (kineto, et, *profiles) if path]
    model = {"--batch": batch, "--seq": seq, "--size": sizes, "--train": train}
    of_model = [name for name, given in model.items() if given]
    is_model = source is not None and source.suffix == ".onnx"
    if source is not None and traces:
        raise click.UsageError("give a SOURCE, or --kineto and --et, not both")
    if of_model and not is_model:
        raise click.UsageError(f"{of_model[0]} is for a model: SOURCE must be a .onnx file")
    if is_model:
        assert source is not None
        keep_inputs(output, source)
        _convert_model(source, output, batch, seq, sizes, train=train, as_json=as_json)
        return
    from onerank.cli.render import render_conversion
    from onerank.converters.kineto import Sources, convert_directory
    from onerank.converters.kineto import convert as convert_files

    if source is not None:
        if source.suffix == ".json":
            from onerank.ir.chakra import from_json

            keep_inputs(output, source)
            click.echo(f"{output}: {from_json(source, output)} nodes")
            return
        if not source.is_dir():
            raise click.UsageError(
                f"{source}: expected a .onnx model, Chakra's .json, or a directory of traces"
            )
        keep_inputs(output, *source.iterdir())
        graph, report = convert_directory(source)
    elif kineto is not None and et is not None:
        keep_inputs(output, *traces)
        graph, report = convert_files(Sources(kineto, et, profiles))
    else:
        raise click.UsageError("give --kineto and --et, or a SOURCE")
    graph.write(output)
    if as_json:
        print_json(report)
    else:
        render_conversion(report)
        click.echo(f"{output}: {len(graph)} nodes")


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
    from onerank.annotate import characterise
    from onerank.cli.render import render_model, render_summary
    from onerank.converters.onnx import convert_onnx
    from onerank.summary import summarise

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
