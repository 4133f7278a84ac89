"""`onerank export perfetto|parquet|dot|chakra-json`: a trace for other tools to show or read."""

from dataclasses import dataclass
from pathlib import Path

import click

from onerank.cli.click_options import option, with_options
from onerank.cli.common import OUTPUT, TRACE, keep_inputs, read_trace, reports_errors
from onerank.cli.terminal import say

DIRECTORY = click.Path(file_okay=False, path_type=Path)


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
    from onerank.converters.targets.parquet_dot import write_parquet

    graph = read_trace(trace)
    nodes, edges = write_parquet(graph, options.output)
    say(f"{nodes}: {len(graph)} rows\n{edges}: {len(graph.edges)} rows")


@click.command()
@click.argument("trace", type=TRACE)
@with_options(FileOptions)
@reports_errors
def dot(trace: Path, options: FileOptions) -> None:
    """Write a drawing of the graph for Graphviz."""
    from onerank.converters.targets.parquet_dot import to_dot
    from onerank.ir.atomic_write import replace_file

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
    from onerank.ir.atomic_write import replace_file
    from onerank.ir.chakra import to_json

    keep_inputs(options.output, trace)
    replace_file(options.output, to_json(trace).encode())
    say(f"{options.output}: the messages of {trace}")
