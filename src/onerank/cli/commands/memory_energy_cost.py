"""`onerank memory`, `onerank energy` and `onerank cost`: what a step needs in addition to time."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import GIGABYTES, TRACE, as_json, print_json, reports_errors

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.annotate.energy import PowerTimeline
    from onerank.ir import Graph

TARGET = click.option(
    "--target",
    metavar="GPU|FILE",
    help="Re-cost for this GPU first. Default: the GPU that the durations hold for.",
)

SETTINGS = click.option(
    "--override", "settings", multiple=True, metavar="FIGURE=VALUE",
    help="Change a figure of the GPU, tdp_w=500 for one; may be repeated.",
)  # fmt: skip

_POWER = ("tdp_w", "idle_w", "power_")

"""Prefixes of GPU figures that no duration depends on."""


@click.command()
@click.argument("trace", type=TRACE)
@TARGET
@SETTINGS
@as_json
@reports_errors
def energy(trace: Path, target: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Tell the energy of TRACE by class of work, idle gaps included, between bounds."""
    from onerank.annotate.energy import report_energy
    from onerank.cli.render.memory_energy_cost_table import render_energy

    graph, gpu, course = on_gpu(trace, target, settings)
    report = report_energy(graph, gpu, course)
    if as_json:
        print_json(report)
    else:
        render_energy(report, title=str(trace))


def on_gpu(
    trace: Path, target: str | None, settings: tuple[str, ...]
) -> tuple["Graph", "Gpu", "PowerTimeline"]:
    """Return a trace, re-costed if `target` is given, its GPU, and the timeline of its step."""
    import onerank
    from onerank.annotate import find_gpu, load_gpu, recost, with_figures
    from onerank.cli.commands.annotate import figures_of
    from onerank.ir.errors import TargetError

    graph = onerank.read(trace)
    figures = figures_of(settings)
    if target is not None:
        described = load_gpu(target)
        gpu = with_figures(described, figures)
        timed = {name: value for name, value in figures.items() if not name.startswith(_POWER)}
        graph = recost(graph, with_figures(described, timed))
        return graph, gpu, course_of(graph)
    annotations = graph.job.annotations
    device = annotations[-1].target if annotations else graph.job.device.name
    gpu = find_gpu(device)
    if gpu is None:
        raise TargetError(
            f'the durations of {trace} hold for "{device}", which has no description; give '
            "`--target` (a name, or the path of a description)",
            code="device-no-description",
        )
    return graph, with_figures(gpu, figures), course_of(graph)


def course_of(graph: "Graph") -> "PowerTimeline":
    """Return how long the step takes: as measured without a profiler, else by replay."""
    from onerank.analysis.step_time import replay
    from onerank.annotate.energy import PowerTimeline as Course

    replayed = replay(graph)
    busy = replayed.compute_ns + replayed.exposed_communication_ns
    step = graph.job.measurement.median_step_ns
    if step is not None:
        return Course(max(step, busy), busy, "median step without a profiler")
    if replayed.row is not None:
        row = "steady-state replay, host overhead as without a profiler"
        return Course(max(replayed.row.step_ns, busy), busy, row)
    return Course(replayed.step_time_ns, busy, "replay of the graph, host and gaps as in its edges")


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
    from onerank.cli.render.memory_energy_cost_table import render_cost

    listed = load_prices(prices)
    graph, gpu, course = on_gpu(trace, target, settings)
    found, source = (tokens, "given") if tokens is not None else tokens_of(graph)
    world = max(graph.job.world.size, 1)
    job = Job(gpus or world, course.step_ns, course.source, found, source)
    report = report_cost(gpu, job, listed, prices, lambda: report_energy(graph, gpu, course))
    if as_json:
        print_json(report)
    else:
        render_cost(report, title=str(trace))


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
    from onerank.cli.render.memory_energy_cost_table import render_memory

    gpu = load_gpu(target) if target is not None else None
    other = None if non_allocator_gb is None else round(non_allocator_gb * 1e9)
    report = report_memory(onerank.read(trace), gpu, non_allocator_bytes=other)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=rows)
