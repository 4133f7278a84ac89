"""`onerank cost`: what a step and a million trained tokens cost."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.commands.energy import TargetOptions
from onerank.cli.common import TRACE, as_json, read_trace, reports_errors
from onerank.cli.dataclass_to_click import SIZE, with_options
from onerank.cli.terminal import amount, lines, print_json, table
from onerank.display import time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.annotate.cost import CostReport


@dataclass(frozen=True, kw_only=True)
class CostOptions(TargetOptions):
    """The GPU, its price, the number of GPUs, and the tokens of a step."""

    prices: Path = option("Price list (TOML); examples/prices.toml is an example.", type=TRACE)
    gpus: int | None = option(
        "GPUs to pay for.  [default: the ranks of the trace's world]", default=None, type=SIZE
    )
    tokens: int | None = option(
        "Tokens that a step trains.  [default: those that the embedding looks up]",
        default=None,
        type=SIZE,
    )


@click.command()
@click.argument("trace", type=TRACE)
@with_options(CostOptions)
@as_json
@reports_errors
def cost(trace: Path, options: CostOptions, as_json: bool) -> None:
    """Show what a step of TRACE and a million trained tokens cost, rented and owned."""
    import onerank
    from onerank.cli.commands.annotate import figures_of

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


def render_cost(report: "CostReport", title: str) -> None:
    """Print the cost of a step, and the calculation for each way to pay."""
    tokens = "not known" if report.tokens is None else f"{report.tokens}: {report.tokens_source}"
    lines(
        [
            ("GPU", f"{report.gpus} x {report.gpu}"),
            ("step", f"{time(report.step_ns)}: {report.step_source}"),
            ("tokens a step", tokens),
            ("prices", f"of {report.prices_date}, in {report.currency}"),
            *(("note", str(note)) for note in report.notes),
        ],
        title,
    )
    table(
        "Cost",
        ("way", "GPU-hour", "step", "million tokens"),
        [
            (
                *(bill.way, amount(bill.per_gpu_hour), amount(bill.per_step)),
                "-" if bill.per_million_tokens is None else amount(bill.per_million_tokens),
            )
            for bill in report.bills
        ],
    )
    for bill in report.bills:
        table(
            f"Calculation: {bill.way}",
            ("figure", "value", "unit", "source"),
            [(line.name, amount(line.value), line.unit, line.source) for line in bill.lines],
            texts=(0, 2, 3),
        )
