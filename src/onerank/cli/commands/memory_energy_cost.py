"""`onerank memory`, `onerank energy` and `onerank cost`: what a step uses in addition to time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import GIGABYTES, TRACE, as_json, read_trace, reports_errors
from onerank.cli.dataclass_to_click import SIZE, with_options
from onerank.cli.terminal import amount, lines, print_json, table
from onerank.display import joules, size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.annotate.cost import CostReport
    from onerank.annotate.energy import EnergyReport
    from onerank.annotate.memory.memory_report import MemoryReport


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The GPU that energy and cost are for."""

    target: str | None = option(
        "Re-cost for this GPU first. Default: the GPU of the trace's durations.",
        default=None,
        metavar="GPU|FILE",
    )
    override: tuple[str, ...] = option(
        "Replace a figure of the GPU, such as tdp_w=500; may be repeated.",
        default=(),
        multiple=True,
        metavar="FIGURE=VALUE",
    )


@dataclass(frozen=True, kw_only=True)
class CostOptions(TargetOptions):
    """The GPU, its price, the number of GPUs, and the tokens of a step."""

    prices: Path = option("Price list (TOML); examples/prices.toml is an example.", type=TRACE)
    gpus: int | None = option(
        "GPUs to pay for. Default: the ranks of the trace's world.", default=None, type=SIZE
    )
    tokens: int | None = option(
        "Tokens that a step trains. Default: those that the embedding looks up.",
        default=None,
        type=SIZE,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The GPU whose memory the step should fit, and the length of the tables."""

    target: str | None = option(
        "A name of `onerank gpus`, or a description. Default: the device of the trace.",
        default=None,
        metavar="GPU|FILE",
    )
    non_allocator_gb: float | None = option(
        "GB of the CUDA context and NCCL, outside the allocator.  [default: the larger of "
        "measurements on H200s and public reports]",
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

    other_gb = options.non_allocator_gb
    report = onerank.memory(read_trace(trace), options.target, non_allocator_gb=other_gb)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=options.rows)


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


def render_memory(report: "MemoryReport", title: str, rows: int) -> None:
    """Print the peak by class, its largest parts, and changes that would make the step fit."""
    lines(_figures(report), title)
    peak = report.peak_bytes
    if report.classes:
        table(
            "Peak by class",
            ("class", "bytes", "share"),
            [
                (name, size(bytes_held), f"{bytes_held / peak:.1%}" if peak else "-")
                for name, bytes_held in sorted(report.classes.items(), key=lambda item: -item[1])
            ],
        )
        table(
            f"Of the step's own blocks at the peak, by module ({_shown(report.modules, rows)})",
            ("module", "class", "blocks", "bytes"),
            [
                (row.module or "(none)", row.memory_class, row.blocks, size(row.bytes))
                for row in report.modules[:rows]
            ],
            texts=(0, 1),
        )
    nodes = sorted(report.nodes, key=lambda node: -node.live_bytes)
    table(
        f"Nodes with the most live memory ({_shown(nodes, rows)})",
        ("node", "name", "module", "phase", "allocated", "freed", "live after"),
        [
            (
                *(node.id, node.name, node.module, node.phase),
                *(size(node.allocated_bytes), size(node.freed_bytes), size(node.live_bytes)),
            )
            for node in nodes[:rows]
        ],
        texts=(1, 2, 3),
    )
    if report.mitigations:
        table(
            f"What would make it fit {report.target}",
            ("change", "fits", "peak", "arithmetic"),
            [
                (
                    mitigation.change,
                    "yes" if mitigation.suffices else "no",
                    size(mitigation.peak_bytes),
                    mitigation.arithmetic,
                )
                for mitigation in report.mitigations
            ],
            texts=(0, 1, 3),
        )


def _figures(report: "MemoryReport") -> list[tuple[str, str]]:
    pairs = [("peak in use", f"{size(report.peak_bytes)}, {size(report.start_bytes)} at the start")]
    if report.measured_peak_bytes:
        error = report.peak_bytes / report.measured_peak_bytes - 1
        pairs.append(("peak of the capture", f"{size(report.measured_peak_bytes)} ({error:+.2%})"))
    if report.peak_node is not None:
        pairs.append(("reached at", f"node {report.peak_node}"))
    if report.simulated_reserved_bytes is not None:
        reserved = f"{size(report.simulated_reserved_bytes)} simulated"
        if report.reserved_bytes:
            error = report.simulated_reserved_bytes / report.reserved_bytes - 1
            reserved = f"{size(report.reserved_bytes)} in the capture, {reserved} ({error:+.2%})"
        pairs.append(("reserved", reserved))
    if report.fragmentation_bytes is not None:
        pairs.append(("fragmentation", f"{size(report.fragmentation_bytes)} reserved, not in use"))
    pairs.append(("classes at the start", report.source))
    if report.non_allocator:
        outside_bytes = sum(buffer.bytes for buffer in report.non_allocator)
        pairs.append(("outside the allocator", size(outside_bytes)))
        pairs += [
            ("", f"{size(buffer.bytes)}  {buffer.what} ({buffer.source})")
            for buffer in report.non_allocator
        ]
    if report.capacity_bytes:
        pairs.append(
            (report.target or "device", f"{size(report.capacity_bytes)}: {_verdict(report)}")
        )
    return pairs + [("note", str(note)) for note in report.notes]


def _verdict(report: "MemoryReport") -> str:
    if report.fits:
        return "fits"
    if report.fits_without_overhead:
        return "fits only without the memory outside the allocator"
    return "does not fit"


def _shown(rows: Sequence[object], limit: int) -> str:
    return f"{min(limit, len(rows))} of {len(rows)}"
