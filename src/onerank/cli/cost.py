"""`onerank cost`: what a step costs."""

from pathlib import Path

import click

from onerank.cli.energy import SETTINGS, TARGET, on_gpu
from onerank.cli.frame import TRACE, as_json, print_json, reports_errors


@click.command()
@click.argument("trace", type=TRACE)
@click.option("--prices", required=True, type=TRACE,
              help="Price list, a TOML file; examples/prices.toml shows its form.")  # fmt: skip
@TARGET
@SETTINGS
@click.option(
    "--gpus",
    type=click.IntRange(1),
    help="GPUs to pay for. Default: the ranks of the trace's world.",
)
@click.option("--tokens", type=click.IntRange(1),
              help="That a step trains. Default: what the embedding looks up.")  # fmt: skip
@as_json
@reports_errors
def cost(
    trace: Path,
    prices: Path,
    target: str | None,
    settings: tuple[str, ...],
    gpus: int | None,
    tokens: int | None,
    as_json: bool,
) -> None:
    """Tell what a step of TRACE and a million trained tokens cost, rented and owned."""
    from onerank.annotate.cost import Job, load_prices, report_cost
    from onerank.annotate.energy import report_energy
    from onerank.annotate.token_count import tokens_of
    from onerank.cli.render_cost import render_cost

    listed = load_prices(prices)
    graph, gpu, course = on_gpu(trace, target, settings)
    found, told_by = (tokens, "given") if tokens is not None else tokens_of(graph)
    world = max(graph.job.world.size, 1)
    job = Job(gpus or world, course.step_ns, course.told_by, found, told_by)
    report = report_cost(gpu, job, listed, prices, lambda: report_energy(graph, gpu, course))
    if as_json:
        print_json(report)
    else:
        render_cost(report, title=str(trace))
