"""`onerank memory`, `onerank energy` and `onerank cost`: what a step needs in addition to time."""

from dataclasses import dataclass
from pathlib import Path

import click

from onerank.cli.click_options import SIZE, option, with_options
from onerank.cli.common import GIGABYTES, TRACE, as_json, read_trace, reports_errors
from onerank.cli.terminal import print_json


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


@click.command()
@click.argument("trace", type=TRACE)
@with_options(TargetOptions)
@as_json
@reports_errors
def energy(trace: Path, options: TargetOptions, as_json: bool) -> None:
    """Show the energy of TRACE by class of work, idle gaps included, between bounds."""
    import onerank
    from onerank.cli.commands.annotate import figures_of
    from onerank.cli.render.memory_energy_cost_table import render_energy

    override = figures_of(options.override)
    report = onerank.energy(read_trace(trace), options.target, override=override)
    if as_json:
        print_json(report)
    else:
        render_energy(report, title=str(trace))


@click.command()
@click.argument("trace", type=TRACE)
@with_options(CostOptions)
@as_json
@reports_errors
def cost(trace: Path, options: CostOptions, as_json: bool) -> None:
    """Show what a step of TRACE and a million trained tokens cost, rented and owned."""
    import onerank
    from onerank.cli.commands.annotate import figures_of
    from onerank.cli.render.memory_energy_cost_table import render_cost

    report = onerank.cost(
        read_trace(trace),
        options.prices,
        options.target,
        override=figures_of(options.override),
        gpus=options.gpus,
        tokens=options.tokens,
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
    import onerank
    from onerank.cli.render.memory_energy_cost_table import render_memory

    other_gb = options.non_allocator_gb
    report = onerank.memory(read_trace(trace), options.target, non_allocator_gb=other_gb)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=options.rows)
