"""`onerank gpus`: the GPU descriptions, and whether one of the user's is right."""

from pathlib import Path

import click

from onerank.cli.common import as_json, print_json, reports_errors


@click.command()
@click.option("--check", type=click.Path(path_type=Path), metavar="FILE",
              help="Print a description instead, or what is wrong with it (exit 2).")  # fmt: skip
@click.option("--schema", is_flag=True, help="Print the JSON Schema of a description instead.")
@as_json
@reports_errors
def gpus(check: Path | None, schema: bool, as_json: bool) -> None:
    """List the GPU descriptions that ship with onerank."""
    if schema and check is not None:
        raise click.UsageError("give --check or --schema, not both")
    from onerank.annotate import gpu_names, load_gpu
    from onerank.annotate.gpus.spec_schema import gpu_schema
    from onerank.cli.render.annotation_table import render_gpus
    from onerank.cli.render.tables import lines

    if schema:
        print_json(gpu_schema())
        return
    found = [load_gpu(name) for name in gpu_names()] if check is None else [load_gpu(check)]
    if as_json:
        print_json(found)
    else:
        render_gpus(found)
        if check is not None:
            lines([("checked", "nothing wrong")], str(check))
