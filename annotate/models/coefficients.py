"""The fitted coefficients of the learned model: a small TOML file with its provenance.

`python -m tools.fit DATA` writes the file. All coefficients are positive.
"""

import functools
import tomllib
from pathlib import Path
from statistics import geometric_mean
from typing import TypeVar

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.kernel_gaps import ATTENTION_GAP
from onerank.ir.arrays import F64

__all__ = [
    "LENGTHS_NS",
    "AttentionCoefficients",
    "Coefficients",
    "Decode",
    "Error",
    "Experts",
    "FinelyScaled",
    "GemmCoefficients",
    "LatentDecode",
]

_SHIPPED = Path(__file__).with_name("coefficients.toml")


class GemmCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of the time of a GEMM, in addition to shapes and the GPU's description.

    Attributes:
        synchronous: rate of tiles over the geometric mean of sustained and peak rate, on
            architectures in `spec_schema.SYNCHRONOUS`.
        asynchronous: the same on architectures in `spec_schema.ASYNCHRONOUS`.
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
        call_gap: launch floors between the end of a kernel and that of the call in a benchmark that
            replays a CUDA graph. It is measured, not fitted.
        choice: spread, in ln of time, of the tilings that a library picks.
        ramp_cycles: cycles until memory streams at full bandwidth.
    """

    synchronous: float
    asynchronous: float
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
    call_gap: float
    choice: float
    ramp_cycles: float


class FinelyScaled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How kernels for operands with scales of rows or blocks differ from the tiles of cuBLAS.

    They are those of CUTLASS, DeepGEMM and FlashInfer. With one scale for a tensor cuBLAS
    multiplies 8 bits as it does 16.

    Attributes:
        floor_ns: shortest time, in addition to the tiles, in place of `GemmCoefficients.floor`. It
            is a time and not a share of the GPU's launch floor: the shortest 8-bit layers take 3.2
            to 5.1 us on every GPU, and the shortest bf16 GEMM 1.7 us on an L40S and 2.5 on an H100.
        rate: factor on the sustained rate; the result is at most the peak.
        epilogue: share of a tile's epilogue that no other tile hides.
        step_cycles: as in `GemmCoefficients`: a step has as many bytes, twice the elements, and
            the multiplication of its partial sums with the scales.
    """

    floor_ns: float
    rate: float
    epilogue: float
    step_cycles: float

    def applied(self, gemm: GemmCoefficients) -> GemmCoefficients:
        """Return cuBLAS's coefficients with those of these kernels in their place."""
        return msgspec.structs.replace(gemm, step_cycles=self.step_cycles)


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an inference engine's experts of an MoE layer differ from the tiles of cuBLAS.

    Attributes:
        other_ns: kernels around each of the two grouped GEMMs that move few bytes: sorting the
            tokens by expert and what belongs to it. A time and not a number of launch floors, by
            which left-out families are predicted worse.
        rate: factor on the sustained rate; the result is at most the peak.
        epilogue: time of a tile that no other tile hides, in epilogues of cuBLAS's tiles. It is
            over 1: rows of results are scattered to the tokens, and tiles of a few rows are mostly
            epilogue.
    """

    other_ns: float
    rate: float
    epilogue: float


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


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of attention with a few queries per sequence, by an architecture's kernels.

    Attributes:
        floor: launch floors in addition to the keys and values.
        unit_cycles: cycles of an SM for each sequence and key head, however few its keys.
        bytes_per_cycle: keys and values that an SM reads per cycle.
        split_floors: launch floors for the sum over parts, if the keys of a head are divided.
        overlap: exponent of how the SMs' work and the memory overlap: 1 is no overlap.
        copy_floors: launch floors of copies of queries and results, on the architectures in
            `attention_time._COPYING`. Elsewhere it has no effect and no measured value.
    """

    floor: float
    unit_cycles: float
    bytes_per_cycle: float
    split_floors: float
    overlap: float
    copy_floors: float


class LatentDecode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients of latent attention (MLA) with a few queries per sequence.

    Attributes:
        floor: launch floors in addition to the keys.
        unit_cycles: cycles of an SM for each sequence, however few its keys.
        bytes_per_cycle: keys that an SM reads per cycle, if its multiply-adds are faster.
        split_floors: launch floors for the sum over parts, if the keys are divided.
    """

    floor: float
    unit_cycles: float
    bytes_per_cycle: float
    split_floors: float


LENGTHS_NS = tuple(4000 * 2.5**step for step in range(7))
"""Predicted lengths, 4 us to 1 ms, at which the errors of a kind have a factor of their own.

The errors of a kind are largest where neither the launch nor the SMs or the memory alone determine
the time: four of five predictions of attention by its shape are within 35% from 25 to 100 us on
Ampere, Ada and Hopper, and within 8 to 11% over 1 ms.
"""


class Error(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ln(measured / predicted) of GPUs whose die family was left out of the fit.

    Attributes:
        low: four of five are above this and below `high`.
        high: upper bound; `low` is -`high`, because the next GPU may be off in either direction.
        shared: standard deviation of the part that all kernels on a GPU share.
        independent: standard deviation of the rest, independent between calls.
        count: number of predictions.
        lengths: factors on the bounds and on `independent` at predictions of
            `LENGTHS_NS`, interpolated in the logarithms; empty: 1.
        dies: architecture -> factor on all four figures, for GPUs of its measured die: of the
            errors there, not of those on the other dies.
    """

    # Symmetric, since few GPUs do not show whether the next one is slower or faster than predicted.
    low: float
    high: float
    shared: float
    independent: float
    count: int
    lengths: tuple[float, ...] = ()
    dies: dict[str, float] = {}

    def of_length(self, predicted_ns: F64) -> F64:
        """Return the factors on the bounds at predicted times, float64[n]."""
        if not self.lengths:
            return np.ones(len(predicted_ns))
        # A look-up without a row has no time; its width is not used.
        times = np.log(np.fmax(predicted_ns, 1.0))
        return np.exp(np.interp(times, np.log(LENGTHS_NS), np.log(self.lengths)))


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All fitted coefficients.

    Attributes:
        provenance: date, versions, data and its licence, GPUs.
        gemm: GEMMs.
        finely_scaled: architecture -> its GEMMs with scales of rows or blocks.
        finely_scaled_elsewhere: those of an architecture that was not measured, one fit to all:
            left-out families are 16% off with it, and 18% with the mean of the others'.
        experts: library, "cutlass", "sglang" or "vllm" -> its experts of an MoE layer, one fit to
            all architectures.
        attention: fused attention.
        attention_floor: architecture -> factor on `AttentionCoefficients.floor` of its usual
            kernels, if FlashAttention was not measured there.
        decode: architecture -> attention of a few queries by its usual kernels.
        latent_decode: latent attention of a few queries, on all architectures that have kernels of
            it: those of one predict the other.
        same_die: share of a GEMM's deviation from its tiles on the source that carries over to a
            GPU of the same die.
        product_carried: the same for a GPU of another die.
        narrow_carried: the same for GEMMs in 8 or 4 bits. Libraries have the same kernels for them
            on several dies, so more carries over than in 16 bits.
        attention_carried: the same for forward attention.
        experts_carried: the same for the experts of an MoE layer in inference engines.
        other_attention: factor on the time of attention by its shape where no kernel was measured
            on the architecture.
        architectures: of the fitted GPUs.
        dies: architecture -> FLOPs per SM and cycle of the GPUs whose errors are in `Error.dies`.
        hull: property of a GPU -> its smallest and largest value among the fitted GPUs.
        errors: kind of prediction -> its errors.
        datasheet_errors: the same for a target whose description has only datasheet figures (see
            `Gpu.by_datasheet`); kinds without an entry use `errors`.
        shared_in_steps: GPU -> class of kernels -> standard deviation, in ln, of the part of the
            errors from shapes that the kernels of a class share in a served step.
    """

    provenance: dict[str, str]
    gemm: GemmCoefficients
    finely_scaled: dict[str, FinelyScaled]
    finely_scaled_elsewhere: FinelyScaled
    experts: dict[str, Experts]
    attention: AttentionCoefficients
    same_die: float
    product_carried: float
    narrow_carried: float
    attention_carried: float
    experts_carried: float
    attention_floor: dict[str, float]
    decode: dict[str, Decode]
    latent_decode: LatentDecode
    other_attention: float
    architectures: tuple[str, ...]
    hull: dict[str, tuple[float, float]]
    errors: dict[str, Error]
    dies: dict[str, float] = {}
    datasheet_errors: dict[str, Error] = {}
    shared_in_steps: dict[str, dict[str, float]] = {}

    def finely_scaled_on(self, gpu: Gpu) -> FinelyScaled:
        """Return finely scaled GEMMs on a GPU."""
        return self.finely_scaled.get(gpu.architecture, self.finely_scaled_elsewhere)

    def decode_on(self, gpu: Gpu, *, per_call: bool = True) -> Decode:
        """Return attention of a few queries on a GPU; for others than measured, the mean in ln.

        `per_call` as for `attention_on`.
        """
        decode = self.decode.get(gpu.architecture)
        if decode is None:
            every = (msgspec.structs.astuple(each) for each in self.decode.values())
            decode = Decode(*(geometric_mean(column) for column in zip(*every, strict=True)))
        return decode if per_call else _without_gap(decode)

    def latent_decode_on(self, *, per_call: bool) -> LatentDecode:
        """Return latent attention of a few queries; `per_call` as for `attention_on`."""
        return self.latent_decode if per_call else _without_gap(self.latent_decode)

    def attention_on(self, gpu: Gpu, *, per_call: bool = True) -> AttentionCoefficients:
        """Return the coefficients of fused attention by the usual kernels of a GPU.

        Args:
            gpu: the GPU.
            per_call: of times per call, which the coefficients are fitted to; else of kernels.
        """
        floor = self.attention.floor * self.attention_floor.get(gpu.architecture, 1.0)
        attention = msgspec.structs.replace(self.attention, floor=floor)
        return attention if per_call else _without_gap(attention)

    def for_gpus(self, source: Gpu | None, target: Gpu) -> "Coefficients":
        """Return the coefficients with the errors that apply to these descriptions."""
        if not (target.by_datasheet or (source is not None and source.by_datasheet)):
            return self
        return msgspec.structs.replace(self, errors={**self.errors, **self.datasheet_errors})


_OfAttention = TypeVar("_OfAttention", AttentionCoefficients, Decode, LatentDecode)


def _without_gap(c: _OfAttention) -> _OfAttention:
    """Return coefficients of the durations of kernels from those of times per call."""
    return msgspec.structs.replace(c, floor=max(0.0, c.floor - ATTENTION_GAP))


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
