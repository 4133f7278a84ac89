"""A kernel's time from a GPU description only: launch floor plus memory or compute time.

`predict_from_datasheet` costs unmeasured kernels. `predict_by_roofline` is the usual baseline for
measured ones.
"""

from dataclasses import dataclass, replace

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import ComponentGemms, KernelFeatures
from onerank.annotate.models.prediction_terms import (
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    factor,
    longest,
    norm,
    power,
    product,
    quantity,
    quotient,
    total,
)
from onerank.ir.arrays import F64, I64, U8

MODEL = "datasheet"
"""Model name in the annotation of a graph that was not measured."""


def predict_from_datasheet(
    kernels: KernelFeatures, target: Gpu, *, record: TermRecord | None = None
) -> PredictedDurations:
    """Return durations by shape: launch floor plus the longest of memory and compute time.

    The floor depends on the operator's class (see `features`). Memory time is the bytes, as often
    as the operator's kernels stream them (`Work.passes`), at the achievable bandwidth, or at that
    of the last-level cache for operands of PyTorch's kernels that fit into half of it; compute
    time uses sustained rates. A dtype without units on the target runs at the rate of a wider one
    (see `KernelRates`). Without a rate or a formula for the operator, only memory counts.
    Instructions of generated kernels overlap with memory. Elements handled one by one take SM
    cycles, and loads that wait for each other a latency each. A recurrent layer is costed GEMM by
    GEMM (see `cost_record.ComponentGemm`).
    """
    terms = datasheet_terms(kernels, target)
    predicted_ns, rate = terms.predicted_ns, terms.rate
    # A recurrent layer's steps depend on each other, so their launch floors do not overlap: one
    # roofline over the whole layer would miss them.
    in_steps = np.isin(kernels.call, kernels.parts.calls_in_steps)
    composed = np.flatnonzero(in_steps & np.isfinite(rate))
    parts = parts_of(kernels, target, composed, rate[composed])
    share = kernels.share_of_operator[composed]
    predicted_ns[composed] = parts.operator_ns * share
    if record is not None:
        # A prediction can have a time on the source, too.
        place = f"on {target.name}"
        record.update(slice(0, len(predicted_ns)), lambda i, _: replace(terms.term(i), note=place))
        record.update(
            composed,
            lambda i, _: product(
                parts.term(i, "by roofline"),
                factor(share[i], "share of operator"),
                name="datasheet",
                note=place,
            ),
        )
    return PredictedDurations(predicted_ns, terms.rule)


def predict_by_roofline(
    kernels: KernelFeatures, source: Gpu, target: Gpu, *, record: TermRecord | None = None
) -> PredictedDurations:
    """Return durations on `target`: a launch floor plus the target's roofline.

    The roofline is the longer of bytes / achievable bandwidth and FLOPs / sustained rate, whatever
    the source; operands in the last-level cache have its bandwidth, as in `predict_from_datasheet`.
    Measured durations only divide the work of an operator among its kernels; each
    kernel has a separate floor.
    """
    count = len(kernels.passes)
    # The roofline of the literature streams each byte once and has no cost per element or row.
    once, none = np.ones(count), np.zeros(count)
    plain = replace(kernels, passes=once, cached_passes=once, cycles=none, chain=none, tail=none)
    predicted_ns, rules = predict_from_datasheet(plain, target, record=record)
    if record is not None:
        durations_ns = kernels.duration_ns
        record.update_where(
            kernels.over_link, lambda i, _: quantity("measured", float(durations_ns[i]))
        )
    predicted_ns = np.where(kernels.over_link, kernels.duration_ns, predicted_ns)
    rules = np.where(kernels.over_link, np.uint8(Rule.KEPT), rules)
    return PredictedDurations(predicted_ns, rules)


# Of a kernel's deviation from its time by shape, ln(measured / predicted), half of the first 0.1
# does not carry over to another die; what exceeds 0.1 does. Both figures were chosen on all public
# pairs of dies, so no pair tests them. Errors over 10 us of torch's fp32 kernels between V100, T4
# and A100 (NeuSight), and of vLLM's fp16 kernels between A100 and H100 (vidur):
#   6.2 and 11.8%  these figures
#   6.8 and 12.0%  the whole deviation carries over
#   6.4 and 12.2%  half of the first 0.2 does not
#   6.3 and 24.4%  half of any deviation does not
#  12.2 and 10.1%  the residual model
_USUAL_DEVIATION, _SHARED = 0.1, 0.5

# Up to the first deviation a kernel counts as bound by bandwidth. From the second on it does not,
# and the residual model scales the time beyond its roofline with SMs x clock. Between the two the
# weights change linearly. Mean errors over pairs of GPUs: NeuSight's kernels, vidur's, and those of
# three engines that quantise to 8 bits on H100, H200, L40S and B200 (aiconfigurator), all over
# 10 us, and the last under 10 us. The figures were chosen on these pairs, and errors are flat
# around them:
#    6.0, 10.8, 40.3 and 53.1%  always by shape
#   11.2,  9.7, 35.1 and 30.8%  always by the residual model
#    7.0,  9.9, 19.1 and 33.9%  0.1 to 0.3
#    6.9, 10.1, 20.2 and 34.7%  these figures
#    6.6, 10.2, 21.5 and 36.7%  0.3 to 0.7
_BOUND_BY_BANDWIDTH = 0.2, 0.5


def scale_by_shape(
    kernels: KernelFeatures,
    source: Gpu,
    target: Gpu,
    predicted: PredictedDurations,
    record: TermRecord | None = None,
) -> F64:
    """Return predictions with the ratio of rooflines for memory-bound kernels, float64[n].

    A prediction is the time by shape on the target times the source's deviation from its time by
    shape, without half of the part of the deviation up to `_USUAL_DEVIATION`. A kernel that takes
    much longer than by its shape keeps the residual model's (see `_BOUND_BY_BANDWIDTH`).

    Args:
        kernels: n measured kernels.
        source: NVIDIA GPU that measured them.
        target: NVIDIA GPU of another die.
        predicted: durations of the residual model.
        record: terms of the predictions, updated in place; None to record none.
    """
    predicted_ns, rules = predicted
    rows = np.flatnonzero(
        np.isin(rules, (Rule.MEMORY, Rule.FLOOR))
        & ~(kernels.matmul_class | kernels.transfer | kernels.over_link)
        & np.isfinite(kernels.bytes)
        & (kernels.duration_ns > 0)
    )
    if not len(rows):
        return predicted_ns
    chosen = kernels.select(rows)
    scratch = [None if record is None else record.within(rows) for _ in range(2)]
    source_ns, _ = predict_from_datasheet(chosen, source, record=scratch[0])
    target_ns, _ = predict_from_datasheet(chosen, target, record=scratch[1])
    deviation = np.log(chosen.duration_ns / source_ns)
    usual = np.clip(deviation, -_USUAL_DEVIATION, _USUAL_DEVIATION)
    least, most = _BOUND_BY_BANDWIDTH
    by_residual = np.clip((deviation - least) / (most - least), 0, 1)
    shape_ns = target_ns * np.exp(deviation - (1 - _SHARED) * usual)
    scaled_ns = predicted_ns.copy()
    scaled_ns[rows] = shape_ns ** (1 - by_residual) * predicted_ns[rows] ** by_residual
    if record is not None and scratch[0] is not None and scratch[1] is not None:
        for row, i in record.among(rows):
            measured = quantity("measured", chosen.duration_ns[i])
            ratio = quotient(scratch[1].roots[i], scratch[0].roots[i])
            lost = float(np.exp((_SHARED - 1) * usual[i]))
            weighed = factor(lost, "deviation", "half of the usual deviation does not carry over")
            shape = product(measured, ratio, weighed, name="by shape")
            if by_residual[i]:
                weight = factor(by_residual[i], "weight", "of the residual model")
                shape = product(
                    power(shape, factor(1 - by_residual[i])), power(record.roots[row], weight)
                )
            record.roots[row] = shape
    return scaled_ns


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Times of the component GEMMs of d operators.

    Attributes:
        parts: the GEMMs, p of them.
        owner: the operator that each belongs to, ascending, int64[p].
        single_ns: time of one repetition of each, float64[p].
        gpu: where they run.
        count: d.
    """

    parts: ComponentGemms
    owner: I64
    single_ns: F64
    gpu: Gpu
    count: int

    @property
    def operator_ns(self) -> F64:
        """Time of each operator: its GEMMs one after another with their launches, float64[d]."""
        launches_ns = self.parts.launches * self.gpu.launch_floor_ns
        part_ns = self.parts.times * (self.single_ns + launches_ns + self.moved_ns)
        sums_ns = np.zeros(self.count)
        sums_ns += np.bincount(self.owner, weights=part_ns, minlength=self.count)
        return sums_ns

    @property
    def moved_ns(self) -> F64:
        """Time of the bytes that other kernels of the operators move, by repetition, float64[p]."""
        return self.parts.also_moved / self.gpu.bandwidth_bytes_per_s * 1e9

    def term(self, i: int, name: str, note: str = "") -> Term:
        """Return the time of operator `i` as the sum of its GEMMs."""
        moved_ns = self.moved_ns
        terms: list[Term] = []
        for row in np.flatnonzero(self.owner == i).tolist():
            sizes = ", ".join(f"{size:.0f}" for size in self.parts.shapes[row, :4])
            single = quantity("", self.single_ns[row])
            if launches := float(self.parts.launches[row]):
                floor = quantity("", float(self.gpu.launch_floor_ns))
                single = total(single, product(factor(launches), floor))
            if moved_ns[row]:
                single = total(single, quantity("", moved_ns[row]))
            part = product(factor(self.parts.times[row]), single, name="product")
            terms.append(replace(part, note=f"batch, m, n, k = {sizes}"))
        return total(*terms, name=name, note=note)


@dataclass(frozen=True, slots=True)
class DatasheetTerms:
    """Terms of the predicted time of n kernels: the floor in ns, other times in seconds.

    Attributes:
        floor_ns: launch floor of the operator's class, float64[n].
        rate: sustained FLOP/s for the kernel's class and dtype, nan if unknown, float64[n].
        compute_s: FLOPs at that rate; 0 if unknown, float64[n].
        bytes_s: streamed bytes at the achievable bandwidth; 0 if unknown, float64[n].
        instructions_s: instructions of the threads; 0 if unknown, float64[n].
        memory_s: the p-norm of `bytes_s` and `instructions_s`, float64[n].
        issue_s: SM cycles of elements handled one by one, float64[n].
        chain_s: latency of loads that wait for each other, float64[n].
        tail_s: latency of loads that follow all other work, float64[n].
        rule: a `Rule` for each, uint8[n].
    """

    floor_ns: F64
    rate: F64
    compute_s: F64
    bytes_s: F64
    instructions_s: F64
    memory_s: F64
    issue_s: F64
    chain_s: F64
    tail_s: F64
    rule: U8

    @property
    def predicted_ns(self) -> F64:
        """Launch floor and tail plus the longest of the four other times, float64[n]."""
        slowest = np.maximum.reduce([self.compute_s, self.memory_s, self.issue_s, self.chain_s])
        return self.floor_ns + (slowest + self.tail_s) * 1e9

    def term(self, i: int) -> Term:
        """Return the prediction of kernel `i` as a term."""
        streamed_ns, note = self.bytes_s[i] * 1e9, "streamed bytes at the bandwidth"
        memory = quantity("memory", streamed_ns, note=note)
        if self.instructions_s[i]:
            streamed = quantity("bytes", streamed_ns, note=note)
            note = "instructions of its threads, issued at the boost clock"
            issued = quantity("instructions", self.instructions_s[i] * 1e9, note=note)
            both_ns = self.memory_s[i] * 1e9
            memory = norm(_SMOOTH, streamed, issued, name="memory", value=both_ns)
        note = "FLOPs at the sustained rate"
        times = [memory, quantity("compute", self.compute_s[i] * 1e9, note=note)]
        if self.issue_s[i]:
            note = "SM cycles of elements handled one by one"
            times.append(quantity("issue", self.issue_s[i] * 1e9, note=note))
        if self.chain_s[i]:
            note = "loads that wait for each other: few rows, or an index and its row"
            times.append(quantity("chain", self.chain_s[i] * 1e9, note=note))
        parts = [quantity("floor", self.floor_ns[i], note="launch floor"), longest(*times)]
        if self.tail_s[i]:
            note = "loads of the partial results of blocks, after all of them"
            parts.append(quantity("tail", self.tail_s[i] * 1e9, note=note))
        return total(*parts, name="datasheet", value=self.predicted_ns[i])


# A load of a chain (`load_chains`): an H100 takes 0.387 us for each number of a column that
# `cumsum` adds, 0.41 for each step of a long softmax and of an RMS norm, and 0.48 of a layer norm.
# Assumed for other NVIDIA GPUs, of which none was measured. Kernels of other vendors' GPUs get no
# such time.
_LATENCY_S = 0.41e-6


# Memory and instructions of a generated kernel overlap, but not perfectly: 66 kernels of Llama's
# layers deviate in training steps on an H100 by 9.1% in the mean with the cube root of the sum of
# cubes, by 10.3% with squares, by 10.5% with the longer time alone, and by 12.6% without
# instructions (2026-11-27-generated-instructions-h100).
_SMOOTH = 3


def datasheet_terms(kernels: KernelFeatures, target: Gpu) -> DatasheetTerms:
    """Return the terms of each kernel's prediction."""
    rates = kernels.rates(target)
    rate = rates.sustained
    compute = np.nan_to_num(kernels.flops / rate)
    streamed = np.nan_to_num(kernels.bytes * kernels.passes_on(target)) * kernels.s_per_byte(target)
    instructions = kernels.instructions_s(target)
    both = (streamed**_SMOOTH + instructions**_SMOOTH) ** (1 / _SMOOTH)
    memory = np.where(instructions > 0, both, streamed)
    issue = kernels.issue_s(target)
    rule = np.where(compute > memory, Rule.COMPUTE, Rule.MEMORY)
    rule = np.where((compute > memory) & rates.wider, Rule.WIDER_RATE, rule)
    rule = np.where(kernels.matmul & np.isnan(rate), Rule.NO_RATE, rule)
    rule = np.where(np.isnan(kernels.bytes) & np.isnan(kernels.flops), Rule.FLOOR_ONLY, rule)
    rule = np.where((instructions > streamed) & (memory >= compute), Rule.ISSUE, rule)
    rule = np.where(issue > np.maximum(compute, memory), Rule.ISSUE, rule)
    latency_s = _LATENCY_S if target.is_nvidia else 0.0
    chain = kernels.chain_loads(target) * latency_s
    rule = np.where(chain > np.maximum.reduce([compute, memory, issue]), Rule.CHAIN, rule)
    floor = kernels.floor_ns(target) + kernels.miss_s(target) * 1e9
    return DatasheetTerms(
        floor_ns=floor,
        rate=rate,
        compute_s=compute,
        bytes_s=streamed,
        instructions_s=instructions,
        memory_s=memory,
        issue_s=issue,
        chain_s=chain,
        tail_s=kernels.tail * kernels.share_of_operator * latency_s,
        rule=rule.astype(np.uint8),
    )


def parts_of(kernels: KernelFeatures, target: Gpu, rows: I64, rate: F64) -> PartTimes:
    """Return the component GEMMs of the nodes at `rows`, by the roofline at each one's `rate`."""
    parts, owner = kernels.parts.of_calls(kernels.call[rows])
    roof_s = np.maximum(parts.flops / rate[owner], parts.bytes / target.bandwidth_bytes_per_s)
    single_ns = target.launch_floor_ns + 1e9 * roof_s
    return PartTimes(parts, owner, single_ns, target, len(rows))
