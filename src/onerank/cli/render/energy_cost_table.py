"""Tables of energy and money."""

from onerank.annotate.cost import CostReport
from onerank.annotate.energy import EnergyReport
from onerank.cli.render.tables import amount, lines, table, time


def joules(micro: float) -> str:
    """Format energy."""
    for unit, scale in (("J", 1e6), ("mJ", 1e3)):
        if abs(micro) >= scale / 10:
            return f"{micro / scale:.3f} {unit}"
    return f"{micro:.3f} uJ" if micro else "0 J"


def render_energy(report: EnergyReport, title: str) -> None:
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
        pairs.append(("sensor", f"{report.measured_power_mw / 1e3:.0f} W over the pure steps"))
    formula = (
        f"{c.base:g} + {c.active:g} u_active + {c.tensor:g} u_tensor + {c.memory:g} u_memory + "
        f"{c.vector:g} u_vector of the limit, which holds the mean"
    )
    pairs += [("power", f"{formula}; {report.source}")]
    lines(pairs + [("note", note) for note in report.notes], title)
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


def render_cost(report: CostReport, title: str) -> None:
    """Print what a step costs, and the reckoning of each way to pay."""
    tokens = "not known" if report.tokens is None else f"{report.tokens}: {report.tokens_told_by}"
    lines(
        [
            ("GPU", f"{report.gpus} x {report.gpu}"),
            ("step", f"{time(report.step_ns)}: {report.step_source}"),
            ("tokens a step", tokens),
            ("prices", f"of {report.prices_date}, in {report.currency}"),
            *(("note", note) for note in report.notes),
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
            f"Reckoning: {bill.way}",
            ("figure", "value", "unit", "source"),
            [(one.name, amount(one.value), one.unit, one.source) for one in bill.lines],
            texts=(0, 2, 3),
        )
