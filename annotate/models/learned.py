"""The learned model: GEMMs and attention from tiles, other kernels from the residual model.

`predict_learned` predicts kernels that were measured on another GPU: from their shapes, and from
how far the measured time is from the model's on that GPU. `predict_from_description` predicts
kernels that no GPU measured, from their shapes alone.

Both take the time of a GPU by tiles (`tile_times`), for GEMMs, attention, and operators that
libraries run as several GEMMs: convolutions, recurrent layers and experts. The coefficients are
fitted (`coefficients.toml`). For a GPU far from those of the fit (`gpu_distance`), a part of the
prediction is that of the residual model (`scale_measured`) or of the roofline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import scale_measured
from onerank.annotate.models.attention_kernels import has_figure
from onerank.annotate.models.attention_time import (
    LATENT_ARCHITECTURES,
    has_few_queries,
    is_latent,
)
from onerank.annotate.models.calibration import calibrated_source
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.features import KernelFeatures, Timing
from onerank.annotate.models.gpu_distance import composite_tile_weight, same_die, tile_model_weight
from onerank.annotate.models.misaligned_gemms import misaligned_lower_bound_ns
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    exponential,
    factor,
    logarithm,
    power,
    product,
    quantity,
    quotient,
    total,
)
from onerank.annotate.models.roofline import predict_from_datasheet, scale_by_shape
from onerank.annotate.models.scale_measured import clamp_to_lower_bound
from onerank.annotate.models.tile_times import part_times, tile_times
from onerank.ir.arrays import F64, I64, U8, Mask

# Beyond this |ln(measured / predicted)| a kernel does more than the GEMM, or has a bad layout: that
# part of the deviation carries over to any GPU.
_ORDINARY = 1.0


def predict_learned(
    kernels: KernelFeatures,
    source: Gpu,
    target: Gpu,
    coefficients: Coefficients | None = None,
    *,
    record: TermRecord | None = None,
) -> PredictedDurations:
    """Return the kernels' durations on `target`.

    A GEMM's time on the target follows from its shape (see `gemm_tiles`) with fitted coefficients
    (see `coefficients`). The measurement on the source also counts, as ln(measured / predicted on
    the source):

    1. To a GPU of the same die (H100 and H200), the share `same_die` carries over for GEMMs,
       because libraries pick the same kernels, and all of it for attention.
    2. To another die, the share `product_carried` carries over, because libraries pick other
       kernels, and all of the excess beyond 1.0: such a kernel does more than the GEMM, or has a
       bad layout. The share is `narrow_carried` for GEMMs in 8 or 4 bits, whose kernels several
       dies have in common, and `attention_carried` for forward attention. It is 1 for backward
       attention, which has no fitted coefficient: its deviation is the model's error on any GPU.
    3. For a GPU far from the fitted ones, part of the prediction is the residual model's (see
       `tile_model_weight`).
    4. For convolutions and recurrent layers, which are several GEMMs, all of it carries over. From
       a V100 to a T4 and back DeepBench's convolutions are 1.18 times off forward, 1.21 and 1.52
       for the gradients of input and filter; with the residual model 1.29, 1.32 and 1.47
       (benchmarks/predictions/deepbench.py). For the experts of an MoE layer to another die the
       share is `experts_carried`: it contains what unequal shares of the tokens add.

    Attention becomes the kernel that the target runs (see `attention_kernels`). To another NVIDIA
    die, memory-bound kernels scale with their time by shape (see `roofline.scale_by_shape`).
    Everything else, and GEMMs in dtypes without units, uses the residual model. No kernel is faster
    than the target's lower bound (see `scale_measured.lower_bound_ns`).
    """
    c = coefficients or shipped()
    by_residual = scale_measured.predict_by_residual(kernels, source, target, record=record)
    predicted_ns, rules = by_residual
    if source.is_nvidia and target.is_nvidia and not same_die(source, target):
        predicted_ns = scale_by_shape(kernels, source, target, by_residual, record)
    tiles = tile_terms(kernels, source, target, predicted_ns, c, record=record)
    predicted_ns[tiles.rows] = kernels.duration_ns[tiles.rows] * tiles.factor
    rules[tiles.rows] = tiles.rule
    if len(kernels.parts.call):
        parts = part_terms(kernels, source, target, predicted_ns, c, record=record)
        predicted_ns[parts.rows] = parts.predicted_ns
        rules[parts.rows] = Rule.PARTS
    # The residual model already clamped its predictions, but tiles and parts replaced some of them.
    for rows, block in kernels.blocks():
        recorded = None if record is None else (record, rows)
        predicted_ns[rows] = clamp_to_lower_bound(
            predicted_ns[rows], block, source, block, target, record=recorded
        )
    return PredictedDurations(predicted_ns, rules)


@dataclass(frozen=True, slots=True)
class TileTerms:
    """Terms of the prediction of n measured GEMMs and attention calls from their tiles.

    Attributes:
        rows: their rows among the kernels, int64[n].
        duration_ns: measured duration, float64[n].
        operator_ns: measured time of all kernels of the operator, float64[n].
        source_ns: time of the operator on the source by its tiles, float64[n].
        target_ns: the same on the target, float64[n].
        deviation: ln(operator_ns / source_ns), float64[n].
        carried: share of the deviation that carries over to the target, float64[n].
        residual_ns: the residual model's prediction, float64[n].
        trust: weight of the tiles against the residual model.
        rule: a `Rule` for each, uint8[n].
    """

    rows: I64
    duration_ns: F64
    operator_ns: F64
    source_ns: F64
    target_ns: F64
    deviation: F64
    carried: F64
    residual_ns: F64
    trust: float
    rule: U8

    @property
    def factor(self) -> F64:
        """Predicted over measured duration, float64[n]."""
        by_tiles = np.log(self.target_ns / self.operator_ns) + self.carried
        by_residual = np.log(self.residual_ns / self.duration_ns)
        return np.exp(self.trust * by_tiles + (1 - self.trust) * by_residual)

    def term(self, i: int, source: Term, target: Term, by_residual: Term) -> Term:
        """Return the prediction of kernel `i` as a term.

        Args:
            i: the kernel.
            source: time of the operator on the source by its tiles.
            target: the same on the target.
            by_residual: the residual model's prediction.
        """
        measured = quantity("measured", self.duration_ns[i])
        operator_ns = quantity(
            "operator time", self.operator_ns[i], note="measured, of all its kernels"
        )
        deviation = logarithm(quotient(operator_ns, source), "deviation", self.deviation[i])
        share = self.carried[i] / self.deviation[i] if self.deviation[i] else 0.0
        carried = product(
            factor(share, "carried share", "of the deviation from the source's tiles"),
            deviation,
            name="carried",
            value=self.carried[i],
            unit="",
        )
        by_tiles = product(quotient(target, operator_ns), exponential(carried), unit="")
        return product(
            measured,
            power(by_tiles, factor(self.trust, "weight", "of the tiles")),
            power(quotient(by_residual, measured), factor(1 - self.trust)),
            name="product",
            value=self.duration_ns[i] * self.factor[i],
        )


def tile_terms(
    kernels: KernelFeatures,
    source: Gpu,
    target: Gpu,
    residual_ns: F64,
    c: Coefficients,
    *,
    record: TermRecord | None = None,
) -> TileTerms:
    """Return the terms of all kernels whose tiles are known on both GPUs.

    Args:
        kernels: n measured kernels.
        source: GPU that measured them.
        target: GPU to predict.
        residual_ns: prediction of the residual model, float64[n].
        c: fitted coefficients.
        record: takes the prediction of these kernels as a term.
    """
    calibration = calibrated_source(source, target, c.gemm)
    scratch = [None if record is None else TermRecord(record.rows) for _ in range(2)]
    target_ns, attention = tile_times(kernels, target, c, record=scratch[0])
    source_ns, _ = tile_times(kernels, source, c, calibration, record=scratch[1])
    # The deviation is a logarithm, so both models and the measurement must have a positive time.
    usable = (
        np.isfinite(target_ns)
        & np.isfinite(source_ns)
        & (kernels.duration_ns > 0)
        & (residual_ns > 0)
    )
    rows = np.flatnonzero(usable)
    deviation = np.log(kernels.operator_ns[rows] / source_ns[rows])
    misaligned = _is_misaligned(kernels, target, target_ns)[rows]
    trust = tile_model_weight(target, c)
    rule = _rules(attention[rows], misaligned, trust)
    few = has_few_queries(kernels.attention)[kernels.call[rows]]
    rule[few & (rule == Rule.ATTENTION_TILES)] = Rule.DECODE
    terms = TileTerms(
        rows=rows,
        duration_ns=kernels.duration_ns[rows],
        operator_ns=kernels.operator_ns[rows],
        source_ns=source_ns[rows],
        target_ns=target_ns[rows],
        deviation=deviation,
        carried=carried(deviation, deviation_kinds(kernels, rows), source, target, c),
        residual_ns=residual_ns[rows],
        trust=trust,
        rule=rule,
    )
    _record_terms(terms, record, scratch)
    return terms


@dataclass(frozen=True, slots=True)
class PartTerms:
    """Terms of the prediction of n measured operators that are several GEMMs.

    Attributes:
        rows: their rows among the kernels, int64[n].
        duration_ns: measured duration, float64[n].
        source_ns: time of all their GEMMs on the source by tiles, float64[n].
        target_ns: the same on the target, float64[n].
        lost: factor for the part of the deviation that does not carry over, float64[n].
        residual_ns: the residual model's prediction, float64[n].
        trust: weight of the tiles against the residual model.
    """

    rows: I64
    duration_ns: F64
    source_ns: F64
    target_ns: F64
    lost: F64
    residual_ns: F64
    trust: float

    def term(self, i: int, source: Term, target: Term, by_residual: Term) -> Term:
        """Return the prediction of operator `i` as a term; arguments as for `TileTerms.term`."""
        factors = [quantity("measured", self.duration_ns[i]), quotient(target, source)]
        if self.lost[i] != 1:
            note = "part of it does not carry over"
            factors.append(factor(float(self.lost[i]), "deviation", note))
        proportional = product(*factors, name="in proportion", value=self.proportional_ns[i])
        return product(
            power(proportional, factor(self.trust, "weight", "of the tiles")),
            power(by_residual, factor(1 - self.trust)),
            name="product",
            value=self.predicted_ns[i],
        )

    @property
    def proportional_ns(self) -> F64:
        """Measured duration times the ratio of the tiles' times, float64[n]."""
        return self.duration_ns * self.target_ns / self.source_ns * self.lost

    @property
    def predicted_ns(self) -> F64:
        """Prediction before the lower bound, float64[n]."""
        return self.proportional_ns**self.trust * self.residual_ns ** (1 - self.trust)


def part_terms(
    kernels: KernelFeatures,
    source: Gpu,
    target: Gpu,
    residual_ns: F64,
    c: Coefficients,
    *,
    record: TermRecord | None = None,
) -> PartTerms:
    """Return the terms of all operators that are several GEMMs; arguments as for `tile_terms`."""
    scratch = [None if record is None else TermRecord(record.rows) for _ in range(2)]
    target_ns = part_times(kernels, target, c, scratch[0])
    source_ns = part_times(kernels, source, c, scratch[1])
    rows = np.flatnonzero(
        np.isfinite(target_ns) & np.isfinite(source_ns) & (kernels.duration_ns > 0)
    )
    # Experts' kernels differ between dies. A convolution's deviation is the model's, see
    # `predict_learned`.
    other_die = source.board != target.board and not same_die(source, target)
    experts = np.isin(kernels.call[rows], kernels.parts.expert_calls) & other_die
    share = np.where(experts, c.experts_carried, 1.0)
    terms = PartTerms(
        rows=rows,
        duration_ns=kernels.duration_ns[rows],
        source_ns=source_ns[rows],
        target_ns=target_ns[rows],
        lost=(kernels.operator_ns[rows] / source_ns[rows]) ** (share - 1),
        residual_ns=residual_ns[rows],
        trust=composite_tile_weight(target, c),
    )
    _record_terms(terms, record, scratch)
    return terms


def _record_terms(
    terms: TileTerms | PartTerms, record: TermRecord | None, by_tiles: Sequence[TermRecord | None]
) -> None:
    """Replace the residual model's terms by those of measured kernels with known tiles.

    Args:
        terms: the predictions of these kernels.
        record: terms of the residual model, updated in place; None to record none.
        by_tiles: terms of the times by tiles on the target, and on the source.
    """
    on_target, on_source = by_tiles
    if record is None or on_target is None or on_source is None:
        return
    for row, i in record.among(terms.rows):
        record.roots[row] = terms.term(
            i, on_source.roots[row], on_target.roots[row], record.roots[row]
        )


class DeviationKind(IntEnum):
    """Kinds of calls whose deviation from their tiles carries over to a different extent."""

    GEMM = 0
    NARROW = 1
    FORWARD = 2
    BACKWARD = 3


def deviation_kinds(kernels: KernelFeatures, rows: I64) -> npt.NDArray[np.int_]:
    """Return a `DeviationKind` for each of `rows`."""
    backward, narrow = kernels.is_attention_backward[rows], kernels.has_narrow_operands[rows]
    attention = np.where(backward, DeviationKind.BACKWARD, DeviationKind.FORWARD)
    gemm = np.where(narrow, DeviationKind.NARROW, DeviationKind.GEMM)
    return np.where(kernels.is_fused_attention[rows], attention, gemm)


def carried(
    deviation: F64, kind: npt.NDArray[np.int_], source: Gpu, target: Gpu, c: Coefficients
) -> F64:
    """Return the share of ln(measured / predicted on the source) that carries over to the target.

    Args:
        deviation: float64[d].
        kind: a `DeviationKind` for each.
        source: GPU it was measured on.
        target: GPU to predict.
        c: fitted coefficients.
    """
    # The same GPU with overridden figures: the kernels stay, so all of the deviation does.
    if source.board == target.board:
        return deviation
    # Backward attention has no fitted coefficient, so all of its deviation is the
    # model's and carries over.
    forward = attention_share(source, target, c)
    if same_die(source, target):
        product = narrow = c.same_die * deviation
    else:
        ordinary = np.clip(deviation, -_ORDINARY, _ORDINARY)
        product = deviation - (1 - c.product_carried) * ordinary
        narrow = deviation - (1 - c.narrow_carried) * ordinary
    return np.choose(kind, [product, narrow, forward * deviation, deviation])


def attention_share(source: Gpu, target: Gpu, c: Coefficients) -> float:
    """Return the share of forward attention's deviation that carries over to the target."""
    same = source.board == target.board or same_die(source, target)
    return 1.0 if same else c.attention_carried


def predict_from_description(
    kernels: KernelFeatures,
    target: Gpu,
    coefficients: Coefficients | None = None,
    *,
    record: TermRecord | None = None,
) -> PredictedDurations:
    """Return durations of unmeasured kernels, from shapes only.

    Measured durations only divide the time of an operator among its kernels.
    """
    c = coefficients or shipped()
    predicted_ns, rules = predict_from_datasheet(kernels, target, record=record)
    scratch = None if record is None else TermRecord(record.rows)
    tiles_ns, attention = tile_times(kernels, target, c, record=scratch)
    few = has_few_queries(kernels.attention)[kernels.call]
    # AMD's kernels have figures, which `swap_unmeasured_attention` applies.
    known = has_figure(target, c)
    if not known:
        floor = c.attention_on(target, per_call=kernels.per_call).floor
        floor_ns = floor * target.launch_floor_ns
        tiles_ns = _slower_attention_ns(
            tiles_ns, attention & ~few, floor_ns, c.other_attention, scratch
        )
    by_tiles = np.isfinite(tiles_ns)
    misaligned = _is_misaligned(kernels, target, tiles_ns)[by_tiles]
    trust = tile_model_weight(target, c)
    tiles_ns = _divide_among_kernels(tiles_ns, kernels.share_of_operator, scratch)
    _mix_with_tiles(predicted_ns, tiles_ns, trust, record, scratch)
    rules[by_tiles] = _rules(attention[by_tiles], misaligned, trust)
    near = attention & (rules == Rule.ATTENTION_TILES)
    rules[near & ~few & (not known)] = Rule.OTHER_ATTENTION
    decoded = np.full(len(few), target.architecture in c.decode)
    if target.architecture not in LATENT_ARCHITECTURES:
        decoded &= ~is_latent(kernels.attention)[kernels.call]
    rules[near & few] = np.where(decoded, Rule.DECODE, Rule.OTHER_ATTENTION)[near & few]
    scratch = None if record is None else TermRecord(record.rows)
    parts_ns = part_times(kernels, target, c, scratch)
    parts_ns = _divide_among_kernels(parts_ns, kernels.share_of_operator, scratch)
    _mix_with_tiles(predicted_ns, parts_ns, composite_tile_weight(target, c), record, scratch)
    rules[np.isfinite(parts_ns)] = Rule.PARTS
    return PredictedDurations(predicted_ns, rules)


def _divide_among_kernels(operator_ns: F64, share: F64, record: TermRecord | None) -> F64:
    """Return the time of each kernel, float64[n].

    Args:
        operator_ns: time of its whole operator, float64[n].
        share: share of the operator's time that it takes, float64[n].
        record: terms of `operator_ns`, updated in place.
    """
    if record is not None:

        def divided(i: int, root: Term | None) -> Term | None:
            if root is None or share[i] == 1:
                return root
            return product(root, factor(float(share[i]), "share of operator"), name="kernel")

        record.update(slice(0, len(share)), divided)
    return operator_ns * share


def _slower_attention_ns(
    tiles_ns: F64, slow: Mask, floor_ns: float, other: float, record: TermRecord | None
) -> F64:
    """Return times by tiles with slower attention where its kernel has no figure, float64[n].

    The fit has only kernels written for their architecture, which are faster than others.

    Args:
        tiles_ns: times by tiles, float64[n].
        slow: the calls of attention by such kernels, bool[n].
        floor_ns: the part of `tiles_ns` that every kernel takes.
        other: factor on the rest.
        record: terms of `tiles_ns`, updated in place.
    """
    slower_ns = floor_ns + (tiles_ns - floor_ns) * other
    if record is not None:
        record.update_where(
            slow,
            lambda i, root: root and _slower_attention_term(root, floor_ns, other, slower_ns[i]),
        )
    return np.where(slow, slower_ns, tiles_ns)


def _slower_attention_term(root: Term, floor_ns: float, by_kernel: float, value_ns: float) -> Term:
    """Return the time of attention by a kernel without figures as a term.

    Args:
        root: time by the usual kernel.
        floor_ns: launch floor in it, which does not depend on the kernel.
        by_kernel: factor on the time above the floor.
        value_ns: the result.
    """
    floor = quantity("floor", floor_ns, note="launch floor, which does not change")
    above = product(root, factor(1 - floor_ns / root.value, note="above the floor"))
    slower = factor(by_kernel, "kernel", "none was measured on the architecture")
    return total(floor, product(above, slower), name="by tiles", value=value_ns)


def _mix_with_tiles(
    predicted_ns: F64,
    by_tiles_ns: F64,
    trust: float,
    record: TermRecord | None,
    by_tiles: TermRecord | None,
) -> None:
    """Replace datasheet times in place by their geometric mean with the times by tiles.

    Args:
        predicted_ns: times by the datasheet, float64[n].
        by_tiles_ns: times by tiles; nan keeps the datasheet's, float64[n].
        trust: weight of the tiles.
        record: terms of the datasheet times, updated in place.
        by_tiles: terms of the times by tiles.
    """
    rows = np.flatnonzero(np.isfinite(by_tiles_ns))
    predicted_ns[rows] = by_tiles_ns[rows] ** trust * predicted_ns[rows] ** (1 - trust)
    if record is not None and by_tiles is not None:
        for row, _ in record.among(rows):
            record.roots[row] = product(
                power(by_tiles.roots[row], factor(trust, "weight", "of the tiles")),
                power(record.roots[row], factor(1 - trust)),
                name="product",
                value=predicted_ns[row],
            )


def _rules(attention: Mask, misaligned: Mask, trust: float) -> U8:
    """Return the `Rule` of GEMMs and attention by tiles, uint8[n].

    Args:
        attention: whether each is attention, bool[n].
        misaligned: whether misaligned rows determine the time of a GEMM, bool[n].
        trust: weight of the tiles against the residual model or the roofline.
    """
    # Above this weight the tiles decide the prediction; below, a report calls it a mixture.
    if trust < 0.75:
        return np.full(len(attention), Rule.OUTSIDE, dtype=np.uint8)
    product = np.where(misaligned, Rule.MISALIGNED, Rule.GEMM_TILES)
    return np.where(attention, Rule.ATTENTION_TILES, product).astype(np.uint8)


def _is_misaligned(kernels: KernelFeatures, gpu: Gpu, tiles_ns: F64) -> Mask:
    """Return whether misaligned rows determine a GEMM's time, bool[n]."""
    of_step = kernels.timing is Timing.STEP
    of_calls_ns = misaligned_lower_bound_ns(gpu, kernels.gemm, of_step=of_step)
    bound_ns = of_calls_ns[kernels.call]
    return (bound_ns > 0) & (bound_ns >= tiles_ns)
