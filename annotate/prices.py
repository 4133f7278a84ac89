"""What a GPU costs to rent, and to own: a price list of the user's.

    date = 2026-11-01
    currency = "USD"
    [rent.H200]
    per_gpu_hour = 3.5
    source = "our contract with a cloud"
    [own.H200]
    per_gpu = 40000              # with its share of server, network and storage
    years = 4                    # until it is written off
    residual_fraction = 0.1      # what it is worth then
    busy_fraction = 0.8          # share of the time in which it works
    upkeep_fraction_per_year = 0.05
    per_kwh = 0.08
    power_usage_effectiveness = 1.25
    host_w = 350                 # server, network and storage per GPU
    source = "offer of a vendor"

Names are those of `onerank gpus`, or of the user's descriptions.
"""

import datetime
import math
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec

from onerank.ir.errors import FormatError


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
    "residual_fraction": _Bounds(0, 0.99, "the part of the price it is worth then"),
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
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Prices)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FormatError(f"{path}: not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise FormatError(f"{path}: {error}") from None
    for sort, table in (("rent", found.rent), ("own", found.own)):
        for gpu, entry in table.items():
            for name, value in msgspec.structs.asdict(entry).items():
                _check(f"{path}: {sort}.{gpu}.{name}", name, value)
    if not found.rent and not found.own:
        raise FormatError(f"{path}: lists no price; give [rent.GPU] or [own.GPU] tables")
    return found


def _check(where: str, name: str, value: object) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise FormatError(f"{where} is empty; say where the price is from")
        return
    bounds = _BOUNDS[name]
    if not isinstance(value, float) or math.isnan(value) or not bounds.low <= value <= bounds.high:
        raise FormatError(
            f"{where} is {value}, outside {bounds.low:g} to {bounds.high:g}: it is {bounds.meaning}"
        )
