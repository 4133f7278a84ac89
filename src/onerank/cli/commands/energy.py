"""`onerank energy`: the energy of a step by class of work."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import TRACE, as_json, read_trace, reports_errors
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import lines, print_json, table
from onerank.display import joules, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.annotate.energy import EnergyReport


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The GPU that energy and cost are for."""

    target: str | None = option(
        "Re-cost for this GPU first.  [default: the GPU of the trace's durations]",
        default=None,
        metavar="GPU|FILE",
    )
    override: tuple[str, ...] = option(
        "Replace a figure of the GPU, such as tdp_w=500; may be repeated.",
        default=(),
        multiple=True,
        metavar="FIGURE=VALUE",
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

    override = figures_of(options.override)
    report = onerank.energy(read_trace(trace), options.target, override=override)
    if as_json:
        print_json(report)
    else:
        render_energy(report, title=str(trace))


def render_energy(report: "EnergyReport", title: str) -> None:
    """Print the energy of a step, and by class of work."""
    c = report.coefficients
    pairs = [
        ("GPU", report.gpu),
        ("step", f"{time(report.step_ns)}: {report.step_source}"),
        (
            "energy",
            f"{joules(report.step_uj)} a step ({joules(report.step_low_uj)} to "
            f"{joules(report.step_high_uj)}); {report.mean_power_mw / 1e3:.0f} W on average",
        ),
        ("busy", f"{joules(report.busy_uj)} in {time(report.busy_ns)}"),
        ("idle", f"{joules(report.idle_uj)} in {time(report.idle_ns)}"),
    ]
    if report.measured_power_mw is not None:
        watts = f"{report.measured_power_mw / 1e3:.0f} W"
        pairs.append(("sensor", f"{watts} over the steps without a profiler"))
    formula = (
        f"{c.base:g} + {c.active:g} u_active + {c.tensor:g} u_tensor + {c.memory:g} u_memory + "
        f"{c.vector:g} u_vector of the power limit, which caps the mean"
    )
    pairs += [("power", f"{formula}; {report.source}")]
    lines(pairs + [("note", str(note)) for note in report.notes], title)
    table(
        "Energy by class",
        ("class", "nodes", "time", "energy", "power"),
        [
            (
                *(row.op_class, row.nodes, time(row.duration_ns), joules(row.energy_uj)),
                f"{row.power_mw / 1e3:.0f} W",
            )
            for row in report.classes
        ],
    )
