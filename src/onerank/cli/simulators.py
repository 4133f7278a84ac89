"""`onerank export simai|goal`: a job for simulators that read one file."""

from pathlib import Path

import click

from onerank.cli.frame import OUTPUT, as_json, keep_inputs, print_json, reports_errors

TRACES = click.argument(
    "traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
SCHEDULE = click.option("--schedule", help="Of a pipeline: gpipe, 1f1b, interleaved:V or zbv.")
MICRO_BATCHES = click.option("--micro-batches", type=click.IntRange(1), help="Of a step.")


def trace_files(paths: tuple[Path, ...]) -> list[Path]:
    """Return the traces, those of a directory in its place."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.et")) if path.is_dir() else [path]
        if not found:
            raise click.UsageError(f"{path} holds no .et file")
        files += found
    return files


@click.command()
@TRACES
@click.option("-o", "--output", type=OUTPUT, required=True, help="Workload text to write.")
@SCHEDULE
@MICRO_BATCHES
@click.option("--grain", type=click.Choice(["layer", "submodule"]), default="submodule",
              show_default=True, help="What a row is.")  # fmt: skip
@as_json
@reports_errors
def simai(
    traces: tuple[Path, ...],
    output: Path,
    schedule: str | None,
    micro_batches: int | None,
    grain: str,
    as_json: bool,
) -> None:
    """Write a SimAI workload; what the format cannot say is told.

    TRACES: one trace that stands for all ranks; with --schedule those of a pipeline's stages, one
    per class of equal stages, or a directory of them.
    """
    import onerank
    from onerank.cli.render import render_simai
    from onerank.converters.pipeline import Schedule
    from onerank.converters.simai import export

    files = trace_files(traces)
    keep_inputs(output, *files)
    done = export(
        [onerank.read(file) for file in files],
        output,
        schedule=Schedule.parse(schedule) if schedule else None,
        micro_batches=micro_batches,
        grain="layer" if grain == "layer" else "submodule",
    )
    if as_json:
        print_json(done)
    else:
        render_simai(done)
