"""The residual model: each part of a kernel's time scales with its own resource."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures, matmul_ratio
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    factor,
    longest,
    power,
    product,
    quantity,
    quotient,
    total,
)
from onerank.ir.arrays import F64, I64, U8, Mask


def predict_by_residual(
    kernels: KernelFeatures, source: Gpu, target: Gpu, *, record: TermRecord | None = None
) -> PredictedDurations:
    """Return the kernels' durations on `target` by floor, roofline and residual.

    The measured time is split, and each part scales with the resource that it uses.

    1. The launch floor of the kernel's class becomes the target's. A shorter kernel scales as a
       whole. Between NVIDIA GPUs of one architecture, every kernel's launch takes the same time
       longer or shorter (`KernelFeatures.launch_change_ns`), at most by half of its floor.
    2. The roofline's time, the longer of bytes / achievable bandwidth and FLOPs / sustained rate,
       becomes the target's; bytes that fit into the last-level cache run at its bandwidth, and
       elements handled one by one take SM cycles. u is the share of the time above the floor that
       it explains.
    3. The rest is inefficiency. Compute-bound: tiles, waves and pipelines run below the
       power-capped ceiling, so the rest scales with the uncapped peak. Memory-bound: the rest is
       latency and issue slots, which scale with SMs x clock (`Gpu.issue_rate_hz`) and partly
       overlap memory time: the p-norm of both with p = `OVERLAP_EXPONENT`. For a GEMM, or between
       vendors, whose instructions differ, it scales with roofline^u * (SMs x clock)^(1 - u).
    4. A memory-bound kernel faster than its roofline finds its data in cache. The share of memory
       time is then the inverse of u, and the exponents of 3 apply to all of it.

    Copies and fills by copy engines scale with bandwidth above the floor. GEMMs in a dtype without
    units use the rate of a wider one (counted; see `KernelRates`). No kernel is faster than the
    target's lower bound (see `lower_bound_ns`).

    `OVERLAP_EXPONENT` is the only fitted coefficient. The form of 3 (compute-bound) and 4 was
    chosen among some thirty on bf16 GEMMs of A100, L40S, H100, H200 and B200 (aiconfigurator,
    sglang 0.5.10); over the 20 ordered pairs its mean error is 18.7%, the ratio rule's 50.3%
    (`benchmarks/predictions/gemm_transfer.py`). For kernels with unknown FLOPs: GEMMs and attention
    scale above the floor with the sustained 16-bit rate; others with known bytes use the roofline's
    memory term; without either, they scale above the floor with bandwidth, since operators without
    formula are mostly fused pointwise work, sorting and scans, which stream memory. All are
    counted. Copies over a link keep their duration (`KernelFeatures.over_link`).
    """
    count = len(kernels.call)
    predicted_ns, rules = np.empty(count), np.empty(count, dtype=np.uint8)
    for rows, block in kernels.blocks():
        terms = scaling_terms(block, source, target, recorded=record is not None)
        block_ns = np.where(block.over_link, block.duration_ns, terms.predicted_ns)
        recorded = None
        if record is not None:
            recorded = record, rows
            record.update(
                rows,
                lambda i, _, t=terms, b=block: t.term(i, b.duration_ns[i], (source, target)),
            )
        predicted_ns[rows] = clamp_to_lower_bound(
            block_ns, block, source, block, target, record=recorded
        )
        rules[rows] = terms.rule
    return PredictedDurations(predicted_ns, rules)


@dataclass(frozen=True, slots=True)
class _Rooflines:
    """Memory and compute time of n kernels on the source and on the target.

    Attributes:
        memory_s: bytes at the bandwidth, or elements handled one by one, on the source, float64[n].
        compute_s: FLOPs at the sustained rate of the source, float64[n].
        new_memory_s: as `memory_s`, on the target.
        new_compute_s: as `compute_s`, on the target.
        by_peak: uncapped peak of the source over that of the target, float64[n].
        rated: whether both GPUs have a rate for the dtype, bool[n].
        wider: whether one of the rates is that of a wider dtype, bool[n].
        without_work: whether neither bytes nor FLOPs with a rate are known, bool[n].
    """

    memory_s: F64
    compute_s: F64
    new_memory_s: F64
    new_compute_s: F64
    by_peak: F64
    rated: Mask
    wider: Mask
    without_work: Mask

    @classmethod
    def of(cls, kernels: KernelFeatures, source: Gpu, target: Gpu) -> Self:
        """Return the rooflines of kernels on two GPUs."""
        rates, new_rates = kernels.rates(source), kernels.rates(target)
        rated = np.isfinite(rates.sustained / new_rates.sustained)
        # Without a rate on both GPUs there is no ratio of FLOPs, so only the bytes scale.
        flops = np.where(rated, np.nan_to_num(kernels.flops), 0.0)
        streamed_bytes = np.nan_to_num(kernels.bytes * kernels.rereads)
        memory_s, new_memory_s = (
            np.maximum(streamed_bytes * kernels.s_per_byte(gpu), _elements_s(kernels, gpu))
            for gpu in (source, target)
        )
        compute_s, new_compute_s = (
            np.divide(flops, sustained, out=np.zeros_like(flops), where=rated)
            for sustained in (rates.sustained, new_rates.sustained)
        )
        return cls(
            memory_s,
            compute_s,
            new_memory_s,
            new_compute_s,
            by_peak=np.where(rated, rates.peak / new_rates.peak, 1.0),
            rated=rated,
            wider=rates.wider | new_rates.wider,
            without_work=np.isnan(kernels.bytes) & (np.isnan(kernels.flops) | ~rated),
        )

    @property
    def bound(self) -> Mask:
        """Whether compute takes longer than memory on the source, bool[n]."""
        return self.compute_s > self.memory_s

    @property
    def roof_ns(self) -> F64:
        """Roofline time on the source, float64[n]."""
        return np.maximum(self.compute_s, self.memory_s) * 1e9

    @property
    def by_roof(self) -> F64:
        """Roofline of the target over that of the source, float64[n]."""
        new_roof_ns, roof_ns = np.maximum(self.new_compute_s, self.new_memory_s) * 1e9, self.roof_ns
        return np.divide(new_roof_ns, roof_ns, out=np.ones_like(roof_ns), where=roof_ns > 0)


class Terms(NamedTuple):
    """Terms of the prediction of n kernels.

    Attributes:
        floor_ns: launch floor on the source, float64[n].
        new_floor_ns: launch floor on the target, float64[n].
        above_ns: time above it, float64[n].
        roof_ns: roofline time on the source, float64[n].
        by_roof: roofline of the target over that of the source, float64[n].
        roofs: memory and compute time on both GPUs; None unless terms are recorded.
        by_issue: SMs x clock of the source over those of the target.
        by_peak: uncapped peak of the source over that of the target, float64[n].
        part: share of the time above the floor that the roofline explains; for cached data, the
            share of memory, float64[n].
        bound: whether compute takes longer than memory on the source, bool[n].
        cached: whether the data are cached, bool[n].
        overlaps: whether instruction time overlaps memory time, bool[n].
        streams: whether the bandwidths' ratio is the factor, whatever the work, bool[n].
        factor: on the time above the floor, float64[n].
        rule: a `Rule` for each, uint8[n].
    """

    floor_ns: F64
    new_floor_ns: F64
    above_ns: F64
    roof_ns: F64
    by_roof: F64
    roofs: _Rooflines | None
    by_issue: float
    by_peak: F64
    part: F64
    bound: Mask
    cached: Mask
    overlaps: Mask
    streams: Mask
    factor: F64
    rule: U8

    @property
    def predicted_ns(self) -> F64:
        """The target's launch floor plus the scaled time above the floor, float64[n]."""
        return self.new_floor_ns + self.above_ns * self.factor

    def term(self, i: int, measured_ns: float, gpus: tuple[Gpu, Gpu]) -> Term:
        """Return the prediction of kernel `i` as a term; `gpus` are source and target."""
        rule = Rule(int(self.rule[i]))
        if rule is Rule.KEPT:
            return quantity("measured", measured_ns)
        floor = product(
            quantity("floor", self.floor_ns[i], note=f"launch floor on {gpus[0].name}"),
            factor(self._floor_ratio(i), "floor ratio", f"{gpus[1].name} over {gpus[0].name}"),
        )
        if rule is Rule.FLOOR:
            return total(floor, name="residual", value=self.predicted_ns[i])
        above = product(
            quantity("above floor", self.above_ns[i], note="measured, less the launch floor"),
            self._factor_term(i, rule, gpus),
        )
        return total(floor, above, name="residual", value=self.predicted_ns[i])

    def _floor_ratio(self, i: int) -> float:
        return float(self.new_floor_ns[i] / self.floor_ns[i]) if self.floor_ns[i] else 1.0

    def _factor_term(self, i: int, rule: Rule, gpus: tuple[Gpu, Gpu]) -> Term:
        """Return the factor on the time above the floor, by the cases of `predict_by_residual`."""
        value, over = float(self.factor[i]), f"of {gpus[0].name} over {gpus[1].name}"
        if rule is Rule.MATMUL_WITHOUT_FLOPS:
            return factor(value, "factor", f"sustained 16-bit rate {over}")
        if self.streams[i]:
            return factor(value, "factor", f"bandwidth {over}")
        by_roof = self._roofline_term(i, gpus)
        by_cache = "data in cache: time above the floor over the roofline"
        note = by_cache if self.cached[i] else "share of the time above the floor"
        part = factor(self.part[i], "explained", note)
        rest = factor(1 - self.part[i])
        if self.bound[i]:
            peak = factor(self.by_peak[i], "rest", f"peak {over}")
            parts = product(part, by_roof, unit=""), product(rest, peak, unit="")
            return total(*parts, name="factor", value=value, unit="")
        by_issue = factor(
            self.by_issue,
            "issue",
            f"SMs x clock {over}; a core counts as the SMs that its memory could feed, if these "
            "are more",
        )
        if self.overlaps[i] and not self.cached[i]:
            p = factor(OVERLAP_EXPONENT)
            most = power(part, p)
            powers = total(
                product(most, power(by_roof, p), unit=""),
                product(factor(1 - most.value), power(by_issue, p), unit=""),
                unit="",
            )
            root = power(powers, factor(1 / OVERLAP_EXPONENT))
            return product(root, name="factor", value=value, unit="")
        mixed = (power(by_roof, part), power(by_issue, rest))
        if self.cached[i]:
            return product(*mixed, name="factor", value=value, unit="")
        inefficiency = product(*mixed, name="rest", unit="")
        parts = product(part, by_roof, unit=""), product(rest, inefficiency, unit="")
        return total(*parts, name="factor", value=value, unit="")

    def _roofline_term(self, i: int, gpus: tuple[Gpu, Gpu]) -> Term:
        """Return the roofline of the target over that of the source."""
        if not self.roof_ns[i] or self.roofs is None:
            return factor(self.by_roof[i], "roofline", "neither bytes nor FLOPs count")
        roofs: list[Term] = []
        on_source = self.roofs.memory_s, self.roofs.compute_s
        on_target = self.roofs.new_memory_s, self.roofs.new_compute_s
        for gpu, (memory, compute) in zip(gpus, (on_source, on_target), strict=True):
            note = f"on {gpu.name}"
            what = f"bytes at the bandwidth, or elements handled one by one, {note}"
            times = [quantity("memory", memory[i] * 1e9, note=what)]
            if compute[i]:
                what = f"FLOPs at the sustained rate {note}"
                times.append(quantity("compute", compute[i] * 1e9, note=what))
            roofs.append(longest(*times))
        return quotient(roofs[1], roofs[0], "roofline", self.by_roof[i])


OVERLAP_EXPONENT = 1.5
"""Exponent of the overlap of a kernel's memory and instruction time.

1 means no overlap, infinity complete overlap. Among values from 1 to 3 it has the smallest error
over ten captured steps of H200 and H100, each predicted from the other
(`benchmarks/predictions/paired_steps.py`), over all kernels and for softmaxes. Norms and
activations of A100 and H100 in another benchmark set do not distinguish values around it.
"""


def _overlapped(explained: F64, by_roof: F64, by_issue: float) -> F64:
    """Return the factor on the time of kernels whose memory and instruction times overlap."""
    memory: F64 = explained**OVERLAP_EXPONENT
    powers: F64 = memory * by_roof**OVERLAP_EXPONENT + (1 - memory) * by_issue**OVERLAP_EXPONENT
    return powers ** (1 / OVERLAP_EXPONENT)


def issue_overlaps_memory(kernels: KernelFeatures, source: Gpu, target: Gpu) -> Mask:
    """Return which kernels have instruction time that overlaps memory time on both GPUs, bool[n].

    These are all but GEMMs and attention, between two NVIDIA GPUs.
    """
    return ~kernels.matmul_class & (source.is_nvidia and target.is_nvidia)


def scaling_terms(
    kernels: KernelFeatures, source: Gpu, target: Gpu, *, recorded: bool = False
) -> Terms:
    """Return the terms of each kernel's prediction; `recorded`: they become a `TermRecord`'s."""
    # A kernel shorter than its class's floor has nothing
    # above it, so it scales with the floor as a whole.
    floor_ns = np.minimum(kernels.duration_ns, kernels.floor_ns(source))
    above_ns = kernels.duration_ns - floor_ns
    roofs = _Rooflines.of(kernels, source, target)
    bound, roof_ns, by_roof = roofs.bound, roofs.roof_ns, roofs.by_roof
    by_issue = source.issue_rate_hz / target.issue_rate_hz

    share = np.divide(roof_ns, above_ns, out=np.ones_like(roof_ns), where=above_ns > 0)
    explained = np.minimum(share, 1.0)
    # Faster than its memory time, a kernel found its data in a cache: memory takes 1 / share.
    cached = (share > 1) & ~bound
    inverse = np.divide(1.0, share, out=np.ones_like(share), where=cached)
    part = np.where(cached, inverse, explained)
    # by_roof^part * by_issue^(1 - part), by logarithms
    mixed = np.exp(part * np.log(by_roof) + (1 - part) * np.log(by_issue))
    # GEMMs, and kernels from or to another vendor's instructions: the more
    # of the time the roofline explains, the more the rest scales like it.
    separate = explained * by_roof + (1 - explained) * mixed
    overlapped = _overlapped(explained, by_roof, by_issue)
    overlaps = issue_overlaps_memory(kernels, source, target)
    memory_bound = np.where(overlaps, overlapped, separate)
    # The rest of a compute-bound kernel is in tiles, waves and pipelines
    # below the power cap, so it scales with the uncapped peak.
    compute_bound = explained * by_roof + (1 - explained) * roofs.by_peak
    factors = np.where(bound, compute_bound, np.where(cached, mixed, memory_bound))
    factors, rules = _special_cases(kernels, roofs, factors, source, target)
    rules = np.where(above_ns <= 0, Rule.FLOOR, rules)
    rules = np.where(kernels.over_link, Rule.KEPT, rules).astype(np.uint8)
    return Terms(
        floor_ns=floor_ns,
        new_floor_ns=_floor_on(kernels, floor_ns, source, target),
        above_ns=above_ns,
        roof_ns=roof_ns,
        by_roof=by_roof,
        # Columns that stay alive evict those in use from a core's cache: 2 to 4% of a re-costing.
        roofs=roofs if recorded else None,
        by_issue=by_issue,
        by_peak=roofs.by_peak,
        part=part,
        bound=bound,
        cached=cached,
        overlaps=overlaps,
        streams=kernels.transfer | roofs.without_work,
        factor=factors,
        rule=rules,
    )


def _special_cases(
    kernels: KernelFeatures, roofs: _Rooflines, factors: F64, source: Gpu, target: Gpu
) -> tuple[F64, NDArray[np.int_]]:
    """Return the factors and rules, with those of copies and of kernels without work or a rate.

    Args:
        kernels: n kernels.
        roofs: their rooflines.
        factors: factor of each by its roofline, float64[n].
        source: GPU that measured them.
        target: GPU they are predicted for.
    """
    by_bandwidth = source.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    rules = np.where(roofs.bound, Rule.COMPUTE, Rule.MEMORY)
    rules = np.where(roofs.bound & roofs.wider, Rule.WIDER_RATE, rules)
    # The order matters: each of these rules overrides those above it.
    # Copy engines issue no instructions, so neither SMs nor clock count.
    factors = np.where(kernels.transfer, by_bandwidth, factors)
    factors = np.where(roofs.without_work, by_bandwidth, factors)
    rules = np.where(roofs.without_work, Rule.BANDWIDTH_ONLY, rules)
    rules = np.where(kernels.matmul & ~roofs.rated, Rule.NO_RATE, rules)
    by_matmul = matmul_ratio(source, target, sustained=True)
    if by_matmul is not None:
        unknown = kernels.matmul_class & np.isnan(kernels.flops)
        factors = np.where(unknown, by_matmul, factors)
        rules = np.where(unknown, Rule.MATMUL_WITHOUT_FLOPS, rules)
    return factors, rules


def _floor_on(kernels: KernelFeatures, floor_ns: F64, source: Gpu, target: Gpu) -> F64:
    """Return the target's launch floor for kernels whose floor on the source is `floor_ns`."""
    nvidia = source.is_nvidia and target.is_nvidia
    if not (nvidia and source.architecture == target.architecture):
        return floor_ns * kernels.floor_ratio(source, target)
    return np.maximum(floor_ns + kernels.launch_change_ns(source, target), floor_ns / 2)


def _elements_s(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the time of elements handled one by one, float64[n].

    0 for kernels with chains of loads, as of reductions, norms and softmaxes, which follow the
    memory: on an H100 reductions take 1.25 times as long as on an H200, which has the same SMs.
    Norms and long softmaxes: see `kernel_overheads.rereads_of`.
    """
    return np.where(kernels.chain > 0, 0.0, kernels.issue_s(gpu))


_BOUND_NOTE = "products at the datasheet's peak, bytes beyond the last-level cache at its bandwidth"


def lower_bound_ns(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the least time of each kernel on a GPU in ns, float64[n].

    The longer of the GEMM FLOPs at the datasheet's peak, and the bytes beyond the capacity of the
    last-level cache at the datasheet's bandwidth. 0 if the work or the cache is unknown.
    """
    compute = np.where(kernels.matmul, kernels.flops / kernels.rates(gpu).peak, 0.0)
    cache_bytes = np.inf if gpu.l2_bytes is None else gpu.l2_bytes
    # The producer may have left as much as the whole cache holds, so that
    # many bytes may cost no traffic. An unknown cache bounds nothing.
    uncached_bytes = np.maximum(0.0, kernels.bytes - cache_bytes)
    memory = uncached_bytes / gpu.peak_bandwidth_bytes_per_s
    return 1e9 * np.maximum(np.nan_to_num(compute), np.nan_to_num(memory))


def clamp_to_lower_bound(
    predicted_ns: F64,
    before: KernelFeatures,
    source: Gpu,
    after: KernelFeatures,
    target: Gpu,
    *,
    record: tuple[TermRecord, slice | I64] | None = None,
) -> F64:
    """Return predictions that are at least the target's lower bound.

    Args:
        predicted_ns: predicted durations, float64[n].
        before: the kernels as measured; unmeasured ones have duration 0.
        source: GPU that measured them.
        after: the kernels as predicted.
        target: GPU they are predicted for.
        record: takes the bound as a term where it decides, and the rows of these kernels.
    """
    # A kernel measured below the source's bound has overcounted work: a mask hides part of it, or a
    # convolution uses another algorithm. It may be as far below the target's bound.
    source_bound = lower_bound_ns(before, source)
    measured = (source_bound > 0) & (before.duration_ns > 0)
    ratio = np.divide(
        before.duration_ns, source_bound, out=np.ones(len(source_bound)), where=measured
    )
    target_bound, share = lower_bound_ns(after, target), np.minimum(1.0, ratio)
    bound = target_bound * share
    clamped = np.where(after.over_link, predicted_ns, np.maximum(predicted_ns, bound))
    if record is not None:

        def clamped_term(i: int, root: Term | None) -> Term | None:
            if root is None or clamped[i] <= predicted_ns[i]:
                return root
            allowed = quantity("lower bound", target_bound[i], note=_BOUND_NOTE)
            measured = factor(share[i], "measured part", f"of the lower bound on {source.name}")
            least = allowed if share[i] == 1 else product(allowed, measured, name="least")
            return longest(root, least, name="clamped", value=clamped[i])

        record[0].update(record[1], clamped_term)
    return clamped
