"""The fitted coefficients of the learned model: a small TOML file with its provenance.

`python -m tools.fit DATA` writes the file. All coefficients are positive.
"""

import functools
import tomllib
from pathlib import Path
from statistics import geometric_mean

import msgspec

from onerank.annotate.gpus.gpu import Gpu

__all__ = [
    "AttentionCoefficients",
    "Coefficients",
    "EightBit",
    "Error",
    "GemmCoefficients",
    "Pipeline",
]

_SHIPPED = Path(__file__).with_name("coefficients.toml")


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the SMs of a generation, and the libraries for it, process the tiles of a GEMM.

    Attributes:
        tail: cost of the idle part of the last wave: 0 is none, 1 the whole wave.
        issue: rate of tiles over the geometric mean of sustained and peak rate.
    """

    tail: float
    issue: float


class GemmCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the time of a GEMM, in addition to shapes and the GPU's description.

    Attributes:
        synchronous: of architectures in `spec_schema.SYNCHRONOUS`.
        asynchronous: of architectures in `spec_schema.ASYNCHRONOUS`.
        tile: edge of the square tile, in elements, whose operands cost as much as its products.
        prologue_cycles: clock cycles before the first product of a tile.
        step_cycles: latency of 64 elements along the inner size of a single tile.
        epilogue_cycles: cycles to store the last tile of 128 x 128 results.
        overlap: exponent of how compute and loading overlap: 1 is no overlap.
        write_overlap: exponent of how both overlap writing results.
        l2_bytes_per_cycle: bytes per cycle from the last-level cache to an SM.
        split_ns: cost of dividing the inner size among SMs.
        burst: position of short kernels between sustained and peak rate, in ln.
        floor: launch floors in addition to the tiles.
        choice: spread, in ln of time, of the tilings that a library picks.
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


class EightBit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How 8-bit kernels differ from the tiles of 16-bit ones, at the rates of their dtype.

    Attributes:
        floor: launch floors in addition to the tiles, in place of `GemmCoefficients.floor`.
        rate: factor on the sustained rate; the result is at most the peak.
        body: factor on the time above the floor.
    """

    floor: float
    rate: float
    body: float


class AttentionCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of fused attention.

    Attributes:
        floor: launch floors in addition to the tiles.
        efficiency: share of the geometric mean of sustained and peak rate that its products reach.
        prologue_cycles: cycles before the first product of a tile of 128 queries.
        overlap: exponent of how compute and memory overlap: 1 is no overlap.
    """

    floor: float
    efficiency: float
    prologue_cycles: float
    overlap: float


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ln(measured / predicted) of GPUs whose die family was left out of the fit.

    Attributes:
        low: four of five are above this and below `high`.
        high: upper bound; `low` is -`high`, because the next GPU may be off in either direction.
        shared: standard deviation of the part that all kernels on a GPU share.
        independent: standard deviation of the rest, independent between calls.
        count: number of predictions.
    """

    # Symmetric, since few GPUs do not show whether the next one is slower or faster than predicted.
    low: float
    high: float
    shared: float
    independent: float
    count: int


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All fitted coefficients.

    Attributes:
        provenance: date, versions, data and its licence, GPUs.
        gemm: GEMMs.
        eight_bit: architecture -> its 8-bit GEMMs.
        attention: fused attention.
        attention_floor: architecture -> factor on `AttentionCoefficients.floor` of its usual
            kernels, if FlashAttention was not measured there.
        same_die: share of a GEMM's deviation from its tiles on the source that carries over to a
            GPU of the same die.
        product_carried: the same for a GPU of another die.
        eight_bit_carried: the same for 8-bit GEMMs. The tiles are fitted to 16 bits, and 8-bit
            kernels deviate from them equally on all GPUs (correlation 0.8 to 0.9), so most of it
            carries over.
        attention_carried: the same for forward attention.
        other_attention: factor on the time of attention by its shape where no kernel was measured
            on the architecture.
        architectures: of the fitted GPUs.
        hull: property of a GPU -> its smallest and largest value among the fitted GPUs.
        errors: kind of prediction -> its errors.
        datasheet_errors: the same for a target whose description has only datasheet figures (see
            `Gpu.by_datasheet`); kinds without an entry use `errors`.
    """

    provenance: dict[str, str]
    gemm: GemmCoefficients
    eight_bit: dict[str, EightBit]
    attention: AttentionCoefficients
    same_die: float
    product_carried: float
    eight_bit_carried: float
    attention_carried: float
    attention_floor: dict[str, float]
    other_attention: float
    architectures: tuple[str, ...]
    hull: dict[str, tuple[float, float]]
    errors: dict[str, Error]
    datasheet_errors: dict[str, Error] = {}

    def eight_bit_on(self, gpu: Gpu) -> EightBit:
        """Return how 8-bit kernels differ on a GPU; for others than measured, the mean in ln."""
        if measured := self.eight_bit.get(gpu.architecture):
            return measured
        columns = zip(
            *(msgspec.structs.astuple(each) for each in self.eight_bit.values()), strict=True
        )
        return EightBit(*(geometric_mean(column) for column in columns))

    def attention_on(self, gpu: Gpu) -> AttentionCoefficients:
        """Return the coefficients of fused attention by the usual kernels of a GPU."""
        floor = self.attention.floor * self.attention_floor.get(gpu.architecture, 1.0)
        return msgspec.structs.replace(self.attention, floor=floor)

    def for_gpus(self, source: Gpu | None, target: Gpu) -> "Coefficients":
        """Return the coefficients with the errors that apply to these descriptions."""
        if not (target.by_datasheet or (source is not None and source.by_datasheet)):
            return self
        return msgspec.structs.replace(self, errors={**self.errors, **self.datasheet_errors})


def load(path: Path = _SHIPPED) -> Coefficients:
    """Read a file of coefficients.

    Raises:
        ValidationError: of msgspec; the file does not have the form that `tools.fit` writes.
    """
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Coefficients)


@functools.cache
def shipped() -> Coefficients:
    """Return the coefficients that come with onerank."""
    return load()
