"""`onerank export perfetto|parquet|dot|chakra-json`: a trace for other tools to show or read."""

from pathlib import Path

import click

from onerank.cli.common import OUTPUT, TRACE, keep_inputs, reports_errors

DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=TRACE)
@click.option("-o", "--output", type=OUTPUT, required=True, help="JSON; gzip if it ends in .gz.")
@reports_errors
def perfetto(trace: Path, output: Path) -> None:
    """Write a timeline for ui.perfetto.dev: threads, streams, launches, waits, memory."""
    import onerank
    from onerank.converters.targets.perfetto import timeline, write_timeline

    keep_inputs(output, trace)
    events = timeline(onerank.read(trace), title=trace.name)
    write_timeline(events, output)
    click.echo(f"{output}: {sum(event['ph'] == 'X' for event in events)} slices")


@click.command()
@click.argument("trace", type=TRACE)
@click.option("-o", "--output", type=DIRECTORY, required=True, help="Directory of the tables.")
@reports_errors
def parquet(trace: Path, output: Path) -> None:
    """Write nodes and edges as tables for polars, pandas, DuckDB."""
    import onerank
    from onerank.converters.targets.parquet_dot import write_parquet

    graph = onerank.read(trace)
    nodes, edges = write_parquet(graph, output)
    click.echo(f"{nodes}: {len(graph)} rows\n{edges}: {len(graph.edges)} rows")


@click.command()
@click.argument("trace", type=TRACE)
@click.option("-o", "--output", type=OUTPUT, required=True, help="Graphviz file.")
@reports_errors
def dot(trace: Path, output: Path) -> None:
    """Write a drawing of the graph for Graphviz."""
    import onerank
    from onerank.converters.targets.parquet_dot import to_dot
    from onerank.ir.atomic_write import replace_file

    keep_inputs(output, trace)
    replace_file(output, to_dot(onerank.read(trace)).encode())
    click.echo(f"{output}: draw it with dot -Tsvg {output} -o {output.with_suffix('.svg').name}")


@click.command("chakra-json")
@click.argument("trace", type=TRACE)
@click.option("-o", "--output", type=OUTPUT, required=True, help="JSON file.")
@reports_errors
def chakra_json(trace: Path, output: Path) -> None:
    """Write the messages as JSON, as Chakra's jsonizer does; `onerank convert` reads it back."""
    from onerank.ir.atomic_write import replace_file
    from onerank.ir.chakra import to_json

    keep_inputs(output, trace)
    replace_file(output, to_json(trace).encode())
    click.echo(f"{output}: the messages of {trace}")
