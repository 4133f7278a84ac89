"""`onerank memory`: what a step holds in device memory, and whether it fits a GPU."""

from pathlib import Path

import click

from onerank.cli.common import GIGABYTES, TRACE, as_json, print_json, reports_errors


@click.command()
@click.argument("trace", type=TRACE)
@click.option(
    "--target",
    metavar="GPU|FILE",
    help="A name of `onerank gpus`, or a description. Default: the device of the trace.",
)
@click.option(
    "--non-allocator-gb",
    type=GIGABYTES,
    help="GB that the CUDA context and NCCL take beside the allocator. Default: by public reports.",
)
@click.option("--rows", type=click.IntRange(1), default=12, show_default=True,
              help="Rows of each table; --json has all.")  # fmt: skip
@as_json
@reports_errors
def memory(
    trace: Path, target: str | None, non_allocator_gb: float | None, rows: int, as_json: bool
) -> None:
    """Tell the peak memory of TRACE by class, what the allocator reserves, and whether it fits."""
    import onerank
    from onerank.annotate import load_gpu
    from onerank.annotate.memory.memory_report import report_memory
    from onerank.cli.render.memory_table import render_memory

    gpu = load_gpu(target) if target is not None else None
    other = None if non_allocator_gb is None else round(non_allocator_gb * 1e9)
    report = report_memory(onerank.read(trace), gpu, beside_bytes=other)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=rows)
