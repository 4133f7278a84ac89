"""The fitted coefficients of the learned model: a small TOML file with its provenance.

`python -m tools.fit DATA` writes the file. All coefficients are positive.
"""

import functools
import tomllib
from pathlib import Path

import msgspec

__all__ = ["AttentionCoefficients", "Coefficients", "Error", "GemmCoefficients", "Pipeline"]

_SHIPPED = Path(__file__).with_name("coefficients.toml")

SYNCHRONOUS = ("volta", "turing", "ampere", "ada", "blackwell-rtx")
ASYNCHRONOUS = ("hopper", "blackwell", "rubin")
"""Architectures whose matrix units are fed by warps, and those with an engine that copies tiles."""


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the SMs of a generation, and the libraries for it, work through the tiles of a product.

    Attributes:
        tail: what an SM's idle part of the last wave costs: 0 is nothing, 1 the whole wave.
        issue: rate of tiles over the geometric mean of sustained and peak rate.
    """

    tail: float
    issue: float


class GemmCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the time of a product depends on beside shapes and the GPU's description.

    Attributes:
        synchronous: of architectures in `SYNCHRONOUS`.
        asynchronous: of architectures in `ASYNCHRONOUS`.
        tile: edge of the square tile, in elements, whose operands cost as much as its products.
        prologue_cycles: clock cycles before the first product of a tile.
        step_cycles: latency of 64 elements along the inner size of a tile that is alone.
        epilogue_cycles: cycles that the last tile of 128 x 128 results takes to be stored.
        overlap: how well compute and loading hide each other: 1 is not at all.
        write_overlap: the same of both and writing results.
        l2_bytes_per_cycle: what an SM gets from the last-level cache in a cycle.
        split_ns: what dividing the inner size among SMs costs.
        burst: part of the way, in ln, from sustained to peak rate that short kernels run at.
        floor: launch floors that a product takes beside its tiles.
        choice: spread, in ln of time, of the tiles that a library picks.
        ramp_cycles: cycles until memory streams at full bandwidth.
    """

    synchronous: Pipeline
    asynchronous: Pipeline
    tile: float
    prologue_cycles: float
    step_cycles: float
    epilogue_cycles: float
    overlap: float
    write_overlap: float
    l2_bytes_per_cycle: float
    split_ns: float
    burst: float
    floor: float
    choice: float
    ramp_cycles: float


class AttentionCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same of fused attention.

    Attributes:
        floor: launch floors beside the tiles.
        efficiency: part of the geometric mean of sustained and peak rate that its products reach.
        prologue_cycles: cycles before the first product of a tile of 128 queries.
        overlap: how well compute and memory hide each other: 1 is not at all.
    """

    floor: float
    efficiency: float
    prologue_cycles: float
    overlap: float


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ln(measured / predicted) of GPUs whose die family was left out of the fit.

    Attributes:
        low: four of five are above this and below `high`.
        high: the same the other way; -`low`, for the next GPU may be off either way.
        shared: standard deviation of what all kernels on a GPU have in common.
        own: standard deviation of the rest.
        count: predictions these are of.
    """

    low: float
    high: float
    shared: float
    own: float
    count: int


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything fitted.

    Attributes:
        provenance: date, versions, data and its licence, GPUs.
        gemm: the time of products.
        attention: the time of fused attention.
        same_die: part of the source's deviation from its tiles that a GPU of the same die shares.
        product_carried: the same for a GPU of another die.
        eight_bit_carried: the same of products in 8 bits, whose libraries the fit has not seen.
        attention_carried: the same of forward attention.
        hull: property of a GPU -> the least and the most of the GPUs fitted to.
        errors: sort of prediction -> its errors.
    """

    provenance: dict[str, str]
    gemm: GemmCoefficients
    attention: AttentionCoefficients
    same_die: float
    product_carried: float
    eight_bit_carried: float
    attention_carried: float
    hull: dict[str, tuple[float, float]]
    errors: dict[str, Error]


def load(path: Path = _SHIPPED) -> Coefficients:
    """Read a file of coefficients.

    Raises:
        ValidationError: of msgspec; the file is not what `fit` writes.
    """
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Coefficients)


@functools.cache
def shipped() -> Coefficients:
    """Return the coefficients that come with onerank."""
    return load()
