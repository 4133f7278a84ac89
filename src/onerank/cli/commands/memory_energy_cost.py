"""`onerank memory`, `onerank energy` and `onerank cost`: what a step needs in addition to time."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import GIGABYTES, TRACE, as_json, read_trace, reports_errors
from onerank.cli.options import SIZE, option, with_options
from onerank.cli.terminal import print_json

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.annotate.energy import PowerTimeline
    from onerank.ir import Graph


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The GPU that energy and cost are for."""

    target: str | None = option(
        "Re-cost for this GPU first. Default: the GPU that the durations hold for.",
        default=None,
        metavar="GPU|FILE",
    )
    override: tuple[str, ...] = option(
        "Change a figure of the GPU, tdp_w=500 for one; may be repeated.",
        default=(),
        multiple=True,
        metavar="FIGURE=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class CostOptions(TargetOptions):
    """The GPU, its price, and how many of them train how much."""

    prices: Path = option(
        "Price list, a TOML file; examples/prices.toml shows its form.", type=TRACE
    )
    gpus: int | None = option(
        "GPUs to pay for. Default: the ranks of the trace's world.", default=None, type=SIZE
    )
    tokens: int | None = option(
        "That a step trains. Default: what the embedding looks up.", default=None, type=SIZE
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The GPU whose memory is filled, and how much the tables show."""

    target: str | None = option(
        "A name of `onerank gpus`, or a description. Default: the device of the trace.",
        default=None,
        metavar="GPU|FILE",
    )
    non_allocator_gb: float | None = option(
        "GB that the CUDA context and NCCL take outside the allocator. Default: by public reports.",
        default=None,
        type=GIGABYTES,
    )
    rows: int = option(
        "Rows of each table; --json has all.", default=12, type=SIZE, show_default=True
    )


_POWER = ("tdp_w", "idle_w", "power_")
"""Prefixes of GPU figures that no duration depends on."""


@click.command()
@click.argument("trace", type=TRACE)
@with_options(TargetOptions)
@as_json
@reports_errors
def energy(trace: Path, options: TargetOptions, as_json: bool) -> None:
    """Show the energy of TRACE by class of work, idle gaps included, between bounds."""
    from onerank.annotate.energy import report_energy
    from onerank.cli.render.memory_energy_cost_table import render_energy

    graph, gpu, power_timeline = on_gpu(trace, options)
    report = report_energy(graph, gpu, power_timeline)
    if as_json:
        print_json(report)
    else:
        render_energy(report, title=str(trace))


def on_gpu(trace: Path, options: TargetOptions) -> tuple["Graph", "Gpu", "PowerTimeline"]:
    """Return a trace, re-costed if a target is given, its GPU, and the timeline of its step."""
    from onerank.annotate import find_gpu, load_gpu, recost, with_figures
    from onerank.cli.commands.annotate import figures_of
    from onerank.ir.errors import TargetError

    graph = read_trace(trace)
    figures = figures_of(options.override)
    if options.target is not None:
        described = load_gpu(options.target)
        gpu = with_figures(described, figures)
        timed = {name: value for name, value in figures.items() if not name.startswith(_POWER)}
        graph = recost(graph, with_figures(described, timed))
        return graph, gpu, power_timeline_of(graph)
    annotations = graph.job.annotations
    device = annotations[-1].target if annotations else graph.job.device.name
    gpu = find_gpu(device)
    if gpu is None:
        raise TargetError(
            f'the durations of {trace} hold for "{device}", which has no description; give '
            "`--target` (a name, or the path of a description)",
            code="device-no-description",
        )
    return graph, with_figures(gpu, figures), power_timeline_of(graph)


def power_timeline_of(graph: "Graph") -> "PowerTimeline":
    """Return how long the step takes: as measured without a profiler, else by replay."""
    from onerank.analysis.step_time import replay
    from onerank.annotate.energy import PowerTimeline

    replayed = replay(graph)
    busy = replayed.compute_ns + replayed.exposed_communication_ns
    step = graph.job.measurement.median_step_ns
    if step is not None:
        return PowerTimeline(max(step, busy), busy, "median step without a profiler")
    if replayed.steady_state is not None:
        source = "steady-state replay, host overhead as without a profiler"
        return PowerTimeline(max(replayed.steady_state.step_ns, busy), busy, source)
    source = "replay of the graph, host and gaps as in its edges"
    return PowerTimeline(replayed.step_time_ns, busy, source)


@click.command()
@click.argument("trace", type=TRACE)
@with_options(CostOptions)
@as_json
@reports_errors
def cost(trace: Path, options: CostOptions, as_json: bool) -> None:
    """Show what a step of TRACE and a million trained tokens cost, rented and owned."""
    from onerank.annotate.cost import Job, load_prices, report_cost
    from onerank.annotate.energy import report_energy
    from onerank.annotate.token_count import tokens_of
    from onerank.cli.render.memory_energy_cost_table import render_cost

    prices = load_prices(options.prices)
    graph, gpu, power_timeline = on_gpu(trace, options)
    tokens, source = tokens_of(graph) if options.tokens is None else (options.tokens, "given")
    gpus = options.gpus or max(graph.job.world.size, 1)
    job = Job(gpus, power_timeline.step_ns, power_timeline.source, tokens, source)
    report = report_cost(
        gpu, job, prices, options.prices, lambda: report_energy(graph, gpu, power_timeline)
    )
    if as_json:
        print_json(report)
    else:
        render_cost(report, title=str(trace))


@click.command()
@click.argument("trace", type=TRACE)
@with_options(MemoryOptions)
@as_json
@reports_errors
def memory(trace: Path, options: MemoryOptions, as_json: bool) -> None:
    """Show the peak memory of TRACE by class, what the allocator reserves, and whether it fits."""
    from onerank.annotate import load_gpu
    from onerank.annotate.memory.memory_report import report_memory
    from onerank.cli.render.memory_energy_cost_table import render_memory

    gpu = None if options.target is None else load_gpu(options.target)
    gigabytes = options.non_allocator_gb
    non_allocator_bytes = None if gigabytes is None else round(gigabytes * 1e9)
    report = report_memory(read_trace(trace), gpu, non_allocator_bytes=non_allocator_bytes)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=options.rows)
