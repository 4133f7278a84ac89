"""The learned model: products and attention by their tiles, all else by the residual model."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.annotate import residual
from onerank.annotate.coefficients import ASYNCHRONOUS, SYNCHRONOUS, Coefficients, shipped
from onerank.annotate.datasheet import predict as from_datasheet
from onerank.annotate.distinct import combine
from onerank.annotate.gpu import Gpu
from onerank.annotate.kernels import F64, U8, Kernels, Rule
from onerank.annotate.retarget import retarget
from onerank.annotate.tiles import Rates, attention_ns, gemm_ns
from onerank.ir import Graph

Mask = npt.NDArray[np.bool_]

_FITTED_TYPES = ("bfloat16", "float16", "tfloat32", "int8", "float8_e4m3fn", "float8_e5m2",
                 "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip
_ORDINARY = 1.0  # ln(measured / predicted) of a product that is nothing special
_UNKNOWN_ARCHITECTURE = 0.7
_PROVEN = 1.0  # as far outside as the families that were left out


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """A product's time on the target comes from its shape, see `tiles`; its coefficients are
    fitted to measured GPUs, see `coefficients`. What the source measured counts too:

    1. To a GPU of the same die, the part `same_die` of ln(measured / predicted on the source) is
       carried over: the libraries pick the same kernels.
    2. To another die it is not, for they pick others. The time is the geometric mean of this and
       of the residual model's, which has the weight `residual_share`. Of a deviation beyond 1.0
       the excess is carried over: such a kernel does more than the product, or has a bad layout.
    3. Of attention the whole deviation is carried over, and the residual model's weight is
       `attention_residual_share`.
    4. A GPU unlike those fitted to gets more of the residual model, see `outside`.

    Everything else, and products in data types without matrix units, goes by the residual model.

    Attributes:
        source: GPU description the graph was measured on; None: by the name of its device.
    """  # noqa: D205

    source: str | None = None

    name = "learned"

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph re-costed for `target`.

        Raises:
            AnnotateError: the graph was re-costed before, or its device is not known.
            TargetError: `source` names no GPU description.
        """
        return retarget(
            graph, target, model=self.name, source=self.source, predict=predict, alone=predict_alone
        )


def predict(
    kernels: Kernels, source: Gpu, target: Gpu, coefficients: Coefficients | None = None
) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels."""
    c = coefficients or shipped()
    moved, rules = residual.predict(kernels, source, target)
    made, attention = by_tiles(kernels, target, c)
    here, _ = by_tiles(kernels, source, c)
    usable = np.isfinite(made) & np.isfinite(here) & (kernels.duration_ns > 0) & (moved > 0)
    made, here, attention = made[usable], here[usable], attention[usable]
    whole = kernels.operator_ns[usable]
    deviation = np.log(whole / here)
    die = same_die(source, target)
    carried = deviation - np.clip(deviation, -_ORDINARY, _ORDINARY)
    carried = np.where(die, c.same_die * deviation, carried)
    carried = np.where(attention, deviation, carried)
    by_shape = np.log(made / whole) + carried
    by_bound = np.log(moved[usable] / kernels.duration_ns[usable])
    trust = trust_in(target, c)
    share = np.where(attention, c.attention_residual_share, c.residual_share)
    weight = trust * np.where(die, 1.0, 1 - share)
    factor = np.exp(weight * by_shape + (1 - weight) * by_bound)
    moved[usable] = kernels.duration_ns[usable] * factor
    rules[usable] = _rules(attention, trust)
    return moved, rules


def predict_alone(
    kernels: Kernels, target: Gpu, coefficients: Coefficients | None = None
) -> tuple[F64, U8]:
    """Return (durations in ns, rules) of kernels that nobody measured, from shapes alone."""
    c = coefficients or shipped()
    moved, rules = from_datasheet(kernels, target)
    made, attention = by_tiles(kernels, target, c)
    usable = np.isfinite(made)
    trust = trust_in(target, c)
    moved[usable] = made[usable] ** trust * moved[usable] ** (1 - trust)
    rules[usable] = _rules(attention[usable], trust)
    return moved, rules


def _rules(attention: Mask, trust: float) -> U8:
    if trust < 0.75:
        return np.full(len(attention), Rule.OUTSIDE, dtype=np.uint8)
    return np.where(attention, Rule.ATTENTION_TILES, Rule.GEMM_TILES).astype(np.uint8)


def by_tiles(kernels: Kernels, gpu: Gpu, c: Coefficients) -> tuple[F64, Mask]:
    """Return (time of each node's whole operator in ns, whether it is attention).

    nan where the model has nothing to say: no shape, or no matrix units for the data type. Each
    distinct call is worked out once.
    """
    made = np.full(len(kernels.call), np.nan)
    has_gemm = (kernels.gemm > 0).all(axis=1)
    has_attention = (kernels.attention[:, :7] > 0).all(axis=1)
    attention = has_attention[kernels.call]
    rates = kernels.rates(gpu)
    typed = np.array([name in _FITTED_TYPES for name in kernels.dtypes], dtype=bool)[kernels.dtype]
    able = kernels.matmul & typed & ~rates.wider & np.isfinite(rates.sustained)
    where = np.flatnonzero(able & (attention | has_gemm[kernels.call]))
    if not len(where):
        return made, attention
    first, inverse = combine([kernels.call[where], kernels.dtype[where]])
    chosen = where[first]
    call, sustained, peak = kernels.call[chosen], rates.sustained[chosen], rates.peak[chosen]
    times = np.empty(len(chosen))
    soft = has_attention[call]
    times[soft] = attention_ns(gpu, peak[soft], kernels.attention[call[soft]], c.attention)
    rest = Rates(sustained[~soft], peak[~soft])
    times[~soft] = gemm_ns(gpu, rest, kernels.gemm[call[~soft]], c.gemm)
    made[where] = times[inverse]
    return made, attention


def same_die(one: Gpu, other: Gpu) -> bool:
    """Return whether two GPUs are cuts of one die: architecture, and FLOPs per SM and cycle."""
    rates = [properties(gpu)["flops_per_sm_and_cycle"] for gpu in (one, other)]
    alike = 0.9 < rates[0] / rates[1] < 1 / 0.9 if all(rates) else False
    return one.architecture == other.architecture and alike


def outside(gpu: Gpu, c: Coefficients) -> float:
    """Return how far a GPU is outside the range of those fitted to, in ln, summed; 0: inside."""
    distance = 0.0
    for name, value in properties(gpu).items():
        least, most = c.hull[name]
        distance += max(0.0, np.log(least / value), np.log(value / most)) if value else 1.0
    known = gpu.architecture in (*SYNCHRONOUS, *ASYNCHRONOUS)
    return float(distance) + (0.0 if known else _UNKNOWN_ARCHITECTURE)


def trust_in(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of this model for a GPU: 1 unless it is unlike those fitted to.

    A die family that the fit leaves out is up to 1.3 outside the others, and predicted well.
    """
    return float(np.exp(-max(0.0, outside(gpu, c) - _PROVEN)))


def properties(gpu: Gpu) -> dict[str, float]:
    """Return what places a GPU among others."""
    types = ("bfloat16", "float16", "float32")
    peak = next((rate for t in types if (rate := gpu.peak_tensor_flops_per_s(t))), 0.0)
    return {
        "sm_count": float(gpu.sm_count),
        "clock_hz": gpu.clock_hz,
        "flops_per_sm_and_cycle": peak / gpu.sm_count / gpu.clock_hz,
        "flops_per_byte": peak / gpu.peak_bandwidth_bytes_per_s,
        "l2_bytes": float(gpu.l2_bytes or 0),
    }
