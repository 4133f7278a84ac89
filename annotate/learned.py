"""The learned model: products and attention by their tiles, all else by the residual model."""

import numpy as np
import numpy.typing as npt

from onerank.annotate import residual
from onerank.annotate.coefficients import Coefficients, shipped
from onerank.annotate.datasheet import predict as from_datasheet
from onerank.annotate.distinct import combine
from onerank.annotate.gpu import Gpu
from onerank.annotate.kernels import F64, U8, Kernels, Rule
from onerank.annotate.likeness import same_die, trust_in
from onerank.annotate.tiles import Rates, attention_ns, gemm_ns

Mask = npt.NDArray[np.bool_]

_FITTED_TYPES = ("bfloat16", "float16", "tfloat32", "int8", "float8_e4m3fn", "float8_e5m2",
                 "float8_e4m3fnuz", "float8_e5m2fnuz")  # fmt: skip
_ORDINARY = 1.0  # ln(measured / predicted) of a product that is nothing special


def predict(
    kernels: Kernels, source: Gpu, target: Gpu, coefficients: Coefficients | None = None
) -> tuple[F64, U8]:
    """Return (new durations in ns, rules) of the kernels.

    A product's time on the target comes from its shape, see `tiles`.

    The coefficients are fitted to measured GPUs, see `coefficients`. What the source measured
    counts too:

    1. To a GPU of the same die, as H100 and H200 are, the part `same_die` of ln(measured /
       predicted on the source) is carried over: the libraries pick the same kernels.
    2. To another die it is not, for they pick others. The time is the geometric mean of this and
       of the residual model's, which has the weight `residual_share`. Of a deviation beyond 1.0
       the excess is carried over: such a kernel does more than the product, or has a bad layout.
    3. Of attention the whole deviation is carried over, and the residual model's weight is
       `attention_residual_share`.
    4. A GPU unlike those fitted to gets more of the residual model, see `likeness`.

    Attention becomes the kernel that the target runs, see `attention_kernels`. Everything else,
    and products in data types without matrix units, goes by the residual model.
    """
    c = coefficients or shipped()
    moved, rules = residual.predict(kernels, source, target)
    made, attention = by_tiles(kernels, target, c)
    here, _ = by_tiles(kernels, source, c)
    usable = np.isfinite(made) & np.isfinite(here) & (kernels.duration_ns > 0) & (moved > 0)
    made, here, attention = made[usable], here[usable], attention[usable]
    whole = kernels.operator_ns[usable]
    kept = carried(np.log(whole / here), attention, source, target, c)
    by_shape = np.log(made / whole) + kept
    by_bound = np.log(moved[usable] / kernels.duration_ns[usable])
    weight = weights(source, target, c, attention)
    factor = np.exp(weight * by_shape + (1 - weight) * by_bound)
    moved[usable] = kernels.duration_ns[usable] * factor
    rules[usable] = _rules(attention, trust_in(target, c))
    return moved, rules


def carried(deviation: F64, attention: Mask, source: Gpu, target: Gpu, c: Coefficients) -> F64:
    """Return the part of ln(measured / predicted on the source) that the target shares."""
    if source.board == target.board:  # what if one of its figures were another
        return deviation
    if same_die(source, target):
        return np.where(attention, deviation, c.same_die * deviation)
    excess = deviation - np.clip(deviation, -_ORDINARY, _ORDINARY)
    return np.where(attention, deviation, excess)


def weights(source: Gpu, target: Gpu, c: Coefficients, attention: Mask) -> F64:
    """Return the weight of the tiles in the geometric mean with the residual model."""
    trust = trust_in(target, c)
    if same_die(source, target):
        return np.full(len(attention), trust)
    return trust * (1 - np.where(attention, c.attention_residual_share, c.residual_share))


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
    has_gemm: Mask = np.all(kernels.gemm > 0, axis=1)
    has_attention: Mask = np.all(kernels.attention[:, :7] > 0, axis=1)
    attention: Mask = has_attention[kernels.call]
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
    soft: Mask = has_attention[call]
    times[soft] = attention_ns(gpu, peak[soft], kernels.attention[call[soft]], c.attention)
    rest = Rates(sustained[~soft], peak[~soft])
    times[~soft] = gemm_ns(gpu, rest, kernels.gemm[call[~soft]], c.gemm)
    made[where] = times[inverse]
    return made, attention
