"""The cost of a step and of a trained token, rented and owned, with the source of each figure.

Prices come from a user's price list:

    date = 2026-11-01
    currency = "USD"

    [rent.H200]
    per_gpu_hour = 3.5
    source = "our contract with a cloud"

    [own.H200]
    per_gpu = 40000              # with its share of server, network and storage
    years = 4                    # until it is written off
    residual_fraction = 0.1      # its value after that
    busy_fraction = 0.8          # share of the time in which it works
    upkeep_fraction_per_year = 0.05
    per_kwh = 0.08
    power_usage_effectiveness = 1.25
    host_w = 350                 # server, network and storage per GPU
    source = "offer of a vendor"

GPU names are those of `onerank gpus` or of the user's descriptions.
"""

import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from onerank.annotate.energy import EnergyReport
from onerank.annotate.gpus.gpu import Gpu
from onerank.display import Displayed
from onerank.ir.errors import AnnotateError, FormatError
from onerank.ir.input_files import load_toml
from onerank.ir.notes import Note


class Rent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price of a GPU by the hour."""

    per_gpu_hour: float
    source: str


class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price of a GPU that one owns, and of running it."""

    per_gpu: float
    years: float
    per_kwh: float
    source: str
    residual_fraction: float = 0.0
    busy_fraction: float = 1.0
    upkeep_fraction_per_year: float = 0.0
    power_usage_effectiveness: float = 1.0
    host_w: float = 0.0


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dated price list: GPU -> prices."""

    date: datetime.date
    currency: str
    rent: dict[str, Rent] = msgspec.field(default_factory=dict[str, Rent])
    own: dict[str, Own] = msgspec.field(default_factory=dict[str, Own])


class _Bounds(NamedTuple):
    low: float
    high: float
    meaning: str


_BOUNDS = {
    "per_gpu_hour": _Bounds(0, 1e4, "the price of one GPU for an hour"),
    "per_gpu": _Bounds(1, 1e7, "the price of one GPU with its share of the server"),
    "years": _Bounds(0.1, 30, "the years until it is written off"),
    "residual_fraction": _Bounds(0, 0.99, "its value after that as a share of the price"),
    "busy_fraction": _Bounds(0.01, 1, "the share of the time in which it works"),
    "upkeep_fraction_per_year": _Bounds(0, 1, "yearly upkeep as a part of the price"),
    "per_kwh": _Bounds(0, 100, "the price of a kWh"),
    "power_usage_effectiveness": _Bounds(1, 5, "power of the site over power of the machines"),
    "host_w": _Bounds(0, 1e4, "watts of server, network and storage per GPU"),
}


def load_prices(path: Path) -> Prices:
    """Read a price list.

    Raises:
        FormatError: it cannot be read, lacks a field, or a figure is out of range.
    """
    try:
        prices = msgspec.convert(load_toml(path), Prices)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{path}: {error}\n"
            "  expected date, currency, and tables [rent.GPU] and [own.GPU], as in "
            "examples/prices.toml",
            code="prices-malformed",
        ) from None
    for way, table in (("rent", prices.rent), ("own", prices.own)):
        for gpu, entry in table.items():
            for name, value in msgspec.structs.asdict(entry).items():
                _check(f"{path}: {way}.{gpu}.{name}", name, value)
    if not prices.rent and not prices.own:
        raise FormatError(
            f"{path}: lists no price; give [rent.GPU] or [own.GPU] tables", code="prices-empty"
        )
    return prices


def _check(where: str, name: str, value: object) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise FormatError(
                f"{where} is empty; say where the price is from", code="prices-no-source"
            )
        return
    bounds = _BOUNDS[name]
    if not isinstance(value, float) or math.isnan(value) or not bounds.low <= value <= bounds.high:
        raise FormatError(
            f"{where} is {value}, outside {bounds.low:g} to {bounds.high:g}: it is "
            f"{bounds.meaning}",
            code="prices-out-of-range",
        )


HOURS_PER_YEAR = 8766  # 365.25 days


class CostLine(msgspec.Struct, frozen=True):
    """A figure of a cost calculation: its name, its value with unit, and its source."""

    name: str
    value: float
    unit: str
    source: str


class Bill(msgspec.Struct, frozen=True):
    """The cost of a step on rented or on owned GPUs.

    Attributes:
        way: "rent" or "own".
        per_gpu_hour: price of a GPU-hour.
        per_step: price of a step on all GPUs.
        per_million_tokens: price of a million trained tokens; None if their number is not known.
        lines: the calculation.
    """

    way: str
    per_gpu_hour: float
    per_step: float
    per_million_tokens: float | None
    lines: tuple[CostLine, ...]


class CostReport(Displayed, msgspec.Struct, frozen=True):
    """Money for one step.

    Attributes:
        gpu: name of the description.
        gpus: GPUs of the job.
        currency: currency of all prices.
        prices_date: date of the price list.
        step_ns: duration of the step.
        step_source: source of the duration.
        tokens: tokens that all GPUs train in a step; None if not known.
        tokens_source: source of the tokens.
        bills: one per way to pay that the price list has.
        notes: statements on the quality of the result.
    """

    gpu: str
    gpus: int
    currency: str
    prices_date: str
    step_ns: int
    step_source: str
    tokens: int | None
    tokens_source: str
    bills: tuple[Bill, ...]
    notes: tuple[Note, ...]


class PricedJob(msgspec.Struct, frozen=True):
    """The job to price: GPUs, the step's duration and its tokens, with their sources."""

    gpus: int
    step_ns: int
    step_source: str
    tokens: int | None
    tokens_source: str


def report_cost(
    gpu: Gpu, job: PricedJob, prices: Prices, path: Path, energy: Callable[[], EnergyReport]
) -> CostReport:
    """Return the cost of a step for each way to pay that the price list has for the GPU.

    Args:
        gpu: the GPU of the job.
        job: GPUs, step and tokens.
        prices: the price list.
        path: its name, for errors and sources.
        energy: computes the energy of a step; called only if the owner pays for power.

    Raises:
        AnnotateError: the list has no price for the GPU, or its power is not known.
    """
    # Overrides and measurements append to the name in parentheses; the price is that of the board.
    name = gpu.name.partition(" (")[0]
    list_text = f"{path.name}, {prices.date.isoformat()}"
    bills: list[Bill] = []
    if rent := prices.rent.get(name):
        line = CostLine(
            "GPU-hour", rent.per_gpu_hour, prices.currency, f"{list_text}: {rent.source}"
        )
        bills.append(_bill("rent", rent.per_gpu_hour, job, (line,)))
    if own := prices.own.get(name):
        lines = _own_lines(own, prices.currency, list_text, energy())
        # The lines in other units are inputs of these.
        hourly = sum(line.value for line in lines if line.unit == f"{prices.currency}/h")
        bills.append(_bill("own", hourly, job, tuple(lines)))
    if not bills:
        known = ", ".join(dict.fromkeys([*prices.rent, *prices.own]))
        raise AnnotateError(
            f"{path}: no price for {name}; it has prices for {known}", code="prices-no-gpu"
        )
    notes = [
        Note(
            "the step of the job is assumed to be as long as this rank's; waits for a slower rank "
            "or the network are not included",
            code="cost-of-this-rank",
        )
    ]
    if job.tokens is None:
        notes.append(
            Note(
                "the number of tokens per step is not known: give `--tokens`",
                code="cost-tokens-unknown",
            )
        )
    return CostReport(
        gpu=gpu.name,
        gpus=job.gpus,
        currency=prices.currency,
        prices_date=prices.date.isoformat(),
        step_ns=job.step_ns,
        step_source=job.step_source,
        tokens=job.tokens,
        tokens_source=job.tokens_source,
        bills=tuple(bills),
        notes=tuple(notes),
    )


def _bill(way: str, hourly: float, job: PricedJob, lines: tuple[CostLine, ...]) -> Bill:
    # An hour has 3.6e12 ns.
    step = hourly * job.gpus * job.step_ns / 3.6e12
    tokens = job.tokens
    return Bill(way, hourly, step, None if not tokens else step / tokens * 1e6, lines)


def _own_lines(own: Own, currency: str, list_text: str, energy: EnergyReport) -> list[CostLine]:
    """Return the figures of an owned GPU; those in currency per hour add up to its price."""
    source = f"{list_text}: {own.source}"
    # Idle hours earn nothing, so busy hours pay for them; power is only that of the step.
    hours = own.years * HOURS_PER_YEAR * own.busy_fraction
    written_off = own.per_gpu * (1 - own.residual_fraction)
    upkeep = own.per_gpu * own.upkeep_fraction_per_year
    watts = energy.mean_power_mw / 1e3
    site = (watts + own.host_w) * own.power_usage_effectiveness
    unit = f"{currency}/h"
    return [
        CostLine("price", own.per_gpu, currency, source),
        CostLine(
            "capital",
            written_off / hours,
            unit,
            f"{own.per_gpu:g} x (1 - {own.residual_fraction:g}) / ({own.years:g} years x "
            f"{HOURS_PER_YEAR} h x {own.busy_fraction:g} busy)",
        ),
        CostLine(
            "upkeep",
            upkeep / (HOURS_PER_YEAR * own.busy_fraction),
            unit,
            f"{own.per_gpu:g} x {own.upkeep_fraction_per_year:g} a year / ({HOURS_PER_YEAR} h x "
            f"{own.busy_fraction:g} busy)",
        ),
        CostLine("GPU power", watts, "W", f"mean of the step, power model: {energy.source}"),
        CostLine(
            "power",
            site / 1e3 * own.per_kwh,
            unit,
            f"({watts:.0f} + {own.host_w:g} host) W x {own.power_usage_effectiveness:g} x "
            f"{own.per_kwh:g} {currency}/kWh",
        ),
    ]
