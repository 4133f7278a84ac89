"""Money for a step and for a trained token, rented and owned, each figure with its source."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from onerank.annotate.energy.report import EnergyReport
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.prices import Own, Prices
from onerank.ir.errors import AnnotateError

HOURS_PER_YEAR = 8766


class CostLine(msgspec.Struct, frozen=True):
    """A figure of a reckoning: its name, its value with unit, and how it is known."""

    name: str
    value: float
    unit: str
    source: str


class Bill(msgspec.Struct, frozen=True):
    """What a step costs one way.

    Attributes:
        way: "rent" or "own".
        per_gpu_hour: price of a GPU-hour.
        per_step: of all GPUs.
        per_million_tokens: of trained tokens; None where their number is not known.
        lines: the reckoning.
    """

    way: str
    per_gpu_hour: float
    per_step: float
    per_million_tokens: float | None
    lines: tuple[CostLine, ...]


class CostReport(msgspec.Struct, frozen=True):
    """Money for one step.

    Attributes:
        gpu: name of the description.
        gpus: GPUs of the job.
        currency: of all prices.
        prices_date: date of the price list.
        step_ns: duration of the step.
        step_told_by: where that is from.
        tokens: trained in a step by all GPUs; None when not known.
        tokens_told_by: where that is from.
        bills: one for each way the price list knows.
        notes: what a reader should know.
    """

    gpu: str
    gpus: int
    currency: str
    prices_date: str
    step_ns: int
    step_told_by: str
    tokens: int | None
    tokens_told_by: str
    bills: tuple[Bill, ...]
    notes: tuple[str, ...]


class Job(msgspec.Struct, frozen=True):
    """What the bill is for: GPUs, the step's duration and its tokens, each with its source."""

    gpus: int
    step_ns: int
    step_told_by: str
    tokens: int | None
    tokens_told_by: str


def report_cost(
    gpu: Gpu, job: Job, prices: Prices, path: Path, energy: Callable[[], EnergyReport]
) -> CostReport:
    """Return what a step costs, for each way to pay that the price list has for the GPU.

    Args:
        gpu: what the job runs on.
        job: GPUs, step and tokens.
        prices: the price list.
        path: its name, for errors and sources.
        energy: reckons the energy of a step; asked only where power is paid for.

    Raises:
        AnnotateError: the list has no price for the GPU, or its power is not known.
    """
    name = gpu.name.partition(" (")[0]
    said = f"{path.name}, {prices.date.isoformat()}"
    bills: list[Bill] = []
    if rent := prices.rent.get(name):
        line = CostLine("GPU-hour", rent.per_gpu_hour, prices.currency, f"{said}: {rent.source}")
        bills.append(_bill("rent", rent.per_gpu_hour, job, (line,)))
    if own := prices.own.get(name):
        lines = _own_lines(own, prices.currency, said, energy())
        hourly = sum(line.value for line in lines if line.unit == f"{prices.currency}/h")
        bills.append(_bill("own", hourly, job, tuple(lines)))
    if not bills:
        known = ", ".join(dict.fromkeys([*prices.rent, *prices.own]))
        raise AnnotateError(f"{path}: no price for {name}; it has prices for {known}")
    notes = [
        "the step is as long as this rank's: what a slower rank or the network adds is not in it"
    ]
    if job.tokens is None:
        notes.append("how many tokens a step trains is not known: give `--tokens`")
    return CostReport(
        gpu=gpu.name,
        gpus=job.gpus,
        currency=prices.currency,
        prices_date=prices.date.isoformat(),
        step_ns=job.step_ns,
        step_told_by=job.step_told_by,
        tokens=job.tokens,
        tokens_told_by=job.tokens_told_by,
        bills=tuple(bills),
        notes=tuple(notes),
    )


def _bill(way: str, hourly: float, job: Job, lines: tuple[CostLine, ...]) -> Bill:
    step = hourly * job.gpus * job.step_ns / 3.6e12
    tokens = job.tokens
    return Bill(way, hourly, step, None if not tokens else step / tokens * 1e6, lines)


def _own_lines(own: Own, currency: str, said: str, energy: EnergyReport) -> list[CostLine]:
    """Return the figures of owning a GPU; those in currency an hour add up."""
    source = f"{said}: {own.source}"
    hours = own.years * HOURS_PER_YEAR * own.busy_fraction
    written_off = own.per_gpu * (1 - own.residual_fraction)
    upkeep = own.per_gpu * own.upkeep_fraction_per_year
    watts = energy.mean_power_mw / 1e3
    site = (watts + own.host_w) * own.power_usage_effectiveness
    each = f"{currency}/h"
    return [
        CostLine("price", own.per_gpu, currency, source),
        CostLine(
            "capital",
            written_off / hours,
            each,
            f"{own.per_gpu:g} x (1 - {own.residual_fraction:g}) / ({own.years:g} years x "
            f"{HOURS_PER_YEAR} h x {own.busy_fraction:g} busy)",
        ),
        CostLine(
            "upkeep",
            upkeep / (HOURS_PER_YEAR * own.busy_fraction),
            each,
            f"{own.per_gpu:g} x {own.upkeep_fraction_per_year:g} a year / ({HOURS_PER_YEAR} h x "
            f"{own.busy_fraction:g} busy)",
        ),
        CostLine("GPU power", watts, "W", f"mean of the step, power model: {energy.told_by}"),
        CostLine(
            "power",
            site / 1e3 * own.per_kwh,
            each,
            f"({watts:.0f} + {own.host_w:g} host) W x {own.power_usage_effectiveness:g} x "
            f"{own.per_kwh:g} {currency}/kWh",
        ),
    ]
