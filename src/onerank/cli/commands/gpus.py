"""`gpus` lists GPU descriptions, and checks one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import UsageError, as_json, reports_errors
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import lines, print_json, table
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.annotate import Gpu


@dataclass(frozen=True, kw_only=True)
class GpusOptions:
    """What `gpus` prints."""

    check: Path | None = option(
        "Check a description, and print it or its first error (exit code 2).",
        default=None,
        type=click.Path(path_type=Path),
        metavar="FILE",
    )
    schema: bool = option("Print the JSON Schema of a description instead.", default=False)


@click.command()
@with_options(GpusOptions)
@as_json
@reports_errors
def gpus(options: GpusOptions, as_json: bool) -> None:
    """List the GPU descriptions that ship with onerank."""
    if options.schema and options.check is not None:
        raise UsageError("give --check or --schema, not both", code="gpus-two-forms")
    from onerank.annotate import gpu_names, load_gpu
    from onerank.annotate.gpus.datasheet_estimates import estimate_notes
    from onerank.annotate.gpus.spec_schema import gpu_schema

    if options.schema:
        print_json(gpu_schema())
        return
    names = gpu_names() if options.check is None else [options.check]
    descriptions = [load_gpu(name) for name in names]
    if as_json:
        print_json(descriptions)
    else:
        render_gpus(descriptions)
        if options.check is not None:
            notes = [
                ("estimated", str(note)) for gpu in descriptions for note in estimate_notes(gpu)
            ]
            lines([("checked", "nothing wrong"), *notes], str(options.check))


def render_gpus(gpus: Sequence["Gpu"]) -> None:
    """Print GPU descriptions."""
    rows = [
        (
            gpu.name,
            gpu.architecture,
            gpu.sm_count,
            f"{gpu.memory_bytes / 1e9:.0f}",
            f"{gpu.peak_bandwidth_bytes_per_s / 1e9:.0f}",
            *(_tera(gpu.peak_tensor_flops_per_s(dtype)) for dtype in ("bfloat16", "float16")),
            ", ".join(gpu.aliases),
        )
        for gpu in gpus
    ]
    columns = ("name", "family", "SMs", "GB", "GB/s", "bf16", "fp16", "also known as")
    table("GPU descriptions; bf16 and fp16 in dense TFLOP/s", columns, rows, texts=(0, 1, 7))


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:.0f}"
