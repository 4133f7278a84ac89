"""Predict times with other attention kernels, products in other dtypes, or other shapes.

`unmeasured_attention` has the attention kernels of captures without a GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import (
    UNRESOLVED,
    Resolution,
    divided_prefill_terms,
    divided_prefills,
    family_of,
    named_decode_terms,
    resolve,
)
from onerank.annotate.models.attention_time import has_few_queries, is_latent
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel, PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.learned import attention_share
from onerank.annotate.models.prediction_terms import (
    OF_ATTENTION,
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    factor,
    product,
    quantity,
    quotient,
    total,
)
from onerank.annotate.models.scale_measured import clamp_to_lower_bound
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.passes.change_dtype import change_dtype
from onerank.annotate.passes.pass_options import PassOptions
from onerank.ir import Graph
from onerank.ir.arrays import F64, U8, Mask, membership_mask
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note


class ComputePrediction(NamedTuple):
    """The prediction of the compute nodes.

    Attributes:
        costs: work of each node.
        kernels: the same nodes as features of cost models, with measured durations.
        predicted_ns: predicted durations, float64[n].
        rules: the `Rule` of each, uint8[n].
        changed: whether the kernel or dtype differs from the captured one, bool[n].
        notes: a note for each kind of change.
    """

    costs: OpCosts
    kernels: KernelFeatures
    predicted_ns: F64
    rules: U8
    changed: Mask
    notes: tuple[Note, ...]

    @property
    def durations(self) -> PredictedDurations:
        """The predicted durations and their rules."""
        return PredictedDurations(self.predicted_ns, self.rules)


def swap_kernels(
    graph: Graph,
    predicted: ComputePrediction,
    gpus: tuple[Gpu, Gpu],
    passes: PassOptions,
    *,
    model: CostModel,
    record: TermRecord | None = None,
) -> ComputePrediction:
    """Return the predictions with the target's attention kernel and GEMMs in another dtype.

    Args:
        graph: as captured.
        predicted: for kernels and dtypes as captured.
        gpus: source and target.
        passes: the requested changes.
        model: the cost model.
        record: terms of the predictions, updated in place; None to record none.

    Raises:
        AnnotateError: a requested change is impossible on the target, or nothing can change.
    """
    costs, features, predicted_ns, rules, changed, notes = predicted
    if model.resolves_kernels:
        swap = _AttentionSwap(*gpus, passes.attention, record)
        predicted_ns = _carry_by_named_kernel(graph, predicted, swap)
        predicted_ns, changed, notes = _swap_attention(graph, costs, predicted_ns, swap)
        # A measured time of another kernel is no longer as measured.
        is_measured = membership_mask(rules, [Rule.SAME_GPU, Rule.MEASURED_WITH_OVERRIDES])
        rules = np.where(changed & is_measured, np.uint8(Rule.ATTENTION_TILES), rules)
    elif passes.attention not in ("usual", "eager"):
        check_resolves(model, passes.attention)
    if passes.dtype is not None:
        costs, changes_dtype, note = change_dtype(graph, costs, passes.dtype, gpus[1])
        captured, features = features, KernelFeatures.of(graph, costs)
        ratio = shape_ratio(model.from_description, captured, features, gpus[1])
        predicted_ns = np.where(changes_dtype, predicted_ns * ratio, predicted_ns)
        if record is not None:
            record_factor(record, changes_dtype, ratio, "other data type")
        rules = np.where(changes_dtype, np.uint8(Rule.RETYPED), rules)
        changed, notes = changed | changes_dtype, (*notes, note)
    return ComputePrediction(costs, features, predicted_ns, rules.astype(np.uint8), changed, notes)


def record_factor(record: TermRecord, where: Mask, factors: F64, name: str) -> None:
    """Multiply the recorded terms of the kernels in `where`, bool[n], by `factors`, float64[n]."""
    record.update_where(
        where,
        lambda i, root: root and product(root, factor(float(factors[i]), name), name="changed"),
    )


def scale_to_shapes(  # noqa: PLR0917
    resized: tuple[OpCosts, KernelFeatures],
    captured: ComputePrediction,
    reshaped: Mask,
    target: Gpu,
    from_description: PredictFromDescription,
    record: TermRecord | None = None,
) -> ComputePrediction:
    """Return the predictions for other shapes, see `scale_to_size`.

    Args:
        resized: work of the nodes with the other shapes, and their features for cost models.
        captured: for the shapes as captured.
        reshaped: compute nodes with other shapes, bool[n].
        target: GPU whose description the model uses for both.
        from_description: the model of unmeasured kernels.
        record: terms of the predictions, updated in place; None to record none.
    """
    costs, resized_features = resized
    scaled = scale_to_size(
        captured.predicted_ns, captured.kernels, resized_features, target, from_description
    )
    if record is not None:
        before_ns = captured.predicted_ns
        ratio = np.divide(scaled, before_ns, out=np.ones_like(scaled), where=before_ns > 0)
        record_factor(record, reshaped, ratio, "other size")
    rules = captured.rules
    rules = np.where(reshaped & (rules == Rule.SAME_GPU), np.uint8(Rule.RESIZED), rules)
    return captured._replace(
        costs=costs,
        kernels=resized_features,
        predicted_ns=np.where(reshaped, scaled, captured.predicted_ns),
        rules=rules.astype(np.uint8),
    )


MIN_KERNEL_NS = 1000.0
"""Duration of a kernel with almost no work, without its launch."""


def scale_to_size(
    measured_ns: F64,
    before: KernelFeatures,
    after: KernelFeatures,
    target: Gpu,
    from_description: PredictFromDescription,
) -> F64:
    """Return the durations of kernels at another size, from one size on the same GPU.

    GEMMs and attention scale by the ratio of the predictions of `from_description`. All other
    kernels scale by their bytes (see `_scale_by_bytes`). No kernel is faster than its lower bound.
    """
    # By description on both sides: the measured time carries over, and only the model's ratio is
    # used.
    times = [from_description(kernels, target)[0] for kernels in (before, after)]
    by_model = measured_ns * np.divide(times[1], times[0])
    by_bytes = _scale_by_bytes(measured_ns, before, after, target)
    scaled = np.where(before.matmul_class, by_model, by_bytes)
    return clamp_to_lower_bound(
        scaled, replace(before, duration_ns=measured_ns), target, after, target
    )


def _scale_by_bytes(
    measured_ns: F64, before: KernelFeatures, after: KernelFeatures, target: Gpu
) -> F64:
    """Return the durations of memory-bound kernels with other bytes.

    The part above `MIN_KERNEL_NS` grows in proportion to the bytes. For a short kernel that part is
    latency and noise, so it grows by the time of the additional bytes at the achievable bandwidth
    instead. The result is the geometric mean of both, weighted by the share of that part.
    """
    # Norms and activations of A100 and H100 at 2 to 8 times the tokens and back: 9 to 12% error.
    # Plain proportion has the same error, the ratio of floor and bytes 16 to 26%.
    # Proportion fails for short kernels: over 100 times the bytes, H200 rows below 1.5 us are off
    # by a factor of 28 on average, with this mean by a factor of 1.3.
    floor = np.minimum(measured_ns, MIN_KERNEL_NS)
    above = measured_ns - floor
    ratio = np.divide(
        after.bytes, before.bytes, where=before.bytes > 0, out=np.ones(len(measured_ns))
    )
    in_proportion = floor + above * np.nan_to_num(ratio, nan=1.0)
    added_ns = np.nan_to_num((after.bytes - before.bytes) / target.bandwidth_bytes_per_s * 1e9)
    plus_bandwidth = np.maximum(floor, measured_ns + added_ns)
    weight = np.divide(above, measured_ns, where=measured_ns > 0, out=np.zeros(len(measured_ns)))
    return in_proportion**weight * plus_bandwidth ** (1 - weight)


def other_kernel_term(
    root: Term | None, above_ns: float, by_kernel: float, resolution: Resolution
) -> Term | None:
    """Return the time of attention by another kernel as a term."""
    if root is None or by_kernel == 1:
        return root
    floor = quantity("floor", root.value - above_ns, note="launch floor, which does not change")
    # The part above the floor is a part of the earlier prediction, so it stays in the tree.
    above = product(root, factor(above_ns / root.value, note="above the floor"))
    note = f"{resolution.ran or 'modelled'} -> {resolution.runs} ({resolution.reason})"
    return total(floor, product(above, factor(by_kernel, "kernel", note)), name="attention")


@dataclass(frozen=True, slots=True)
class _AttentionSwap:
    """From which kernels of attention to which.

    Attributes:
        source: GPU that was measured.
        target: GPU to predict.
        requested: the attention kernel that is requested of the target.
        record: terms of the predictions, updated in place; None to record none.
    """

    source: Gpu
    target: Gpu
    requested: str
    record: TermRecord | None

    def resolve(self, family: str) -> Resolution:
        """Return the kernel that runs on the target instead of one of `family`."""
        return resolve(family, self.source, self.target, self.requested)


def _carry_by_named_kernel(graph: Graph, predicted: ComputePrediction, swap: _AttentionSwap) -> F64:
    """Return times in which measured attention of few queries scales by its own kernel's model.

    The cost model scales it by the tiles of an average kernel. Where the same kernel runs on both
    GPUs and has figures on both, the ratio of that kernel's predictions is more exact: 40 sequences
    of 3,000 tokens take FlashAttention 2 242 us on an H200 and 244 on an H100, although their
    bandwidths differ by 1.4.

    Args:
        graph: as captured.
        predicted: for kernels as captured.
        swap: the GPUs and the request.
    """
    source, target = swap.source, swap.target
    costs, kernels, before_ns, rules, *_ = predicted
    shapes = kernels.attention[kernels.call]
    by_tiles = membership_mask(rules, OF_ATTENTION) & (kernels.duration_ns > 0)
    rows = np.flatnonzero(by_tiles & ~kernels.is_attention_backward & ~is_latent(shapes))
    names = [graph.strings[int(code)] for code in graph.nodes.name[costs.index[rows]]]
    families = np.array([family_of(name) for name in names])
    carried_ns = before_ns.copy()
    for family in sorted({*families.tolist()} - {""}):
        if swap.resolve(family).runs != family:
            continue
        of_family = rows[families == family]
        decodes = of_family[has_few_queries(shapes[of_family])]
        prefills = of_family[
            divided_prefills(family, source, shapes[of_family])
            & divided_prefills(family, target, shapes[of_family])
        ]
        for calls, terms_on in (
            (decodes, partial(named_decode_terms, family)),
            (np.setdiff1d(prefills, decodes), divided_prefill_terms),
        ):
            if not len(calls):
                continue
            here, there = (terms_on(gpu, shapes[calls]) for gpu in (source, target))
            if here is None or there is None:
                continue
            measured_ns = kernels.duration_ns[calls]
            carried_ns[calls] = measured_ns * there.predicted_ns / here.predicted_ns
            if swap.record is not None:
                swap.record.update(
                    calls,
                    lambda i, _, now=measured_ns, h=here, t=there: _by_kernel_term(
                        float(now[i]), h.term(i, source.name), t.term(i, target.name)
                    ),
                )
    return carried_ns


def _by_kernel_term(measured_ns: float, here: Term, there: Term) -> Term:
    """Return a measured time, scaled by the ratio of its kernel's predictions, as a term."""
    return product(quantity("measured", measured_ns), quotient(there, here), name="by kernel")


def _swap_attention(
    graph: Graph, costs: OpCosts, predicted_ns: F64, swap: _AttentionSwap
) -> tuple[F64, Mask, tuple[Note, ...]]:
    """Return times with the target's attention kernels, which nodes changed, and notes.

    A note names a kernel that becomes another one, or that was requested.
    """
    names, name_index = np.unique(graph.nodes.name[costs.index], return_inverse=True)
    families = [family_of(graph.strings[int(code)]) for code in names]
    resolutions = {family: swap.resolve(family) for family in sorted({*families} - {""})}
    per_name = [resolutions.get(name, UNRESOLVED) for name in families]
    share = attention_share(swap.source, swap.target, shipped())
    backward = np.array(
        [w.attention.backward if w.attention else 0 for w in costs.works], dtype=bool
    )
    by_kernel = np.where(
        backward[costs.call],
        np.array([resolution.backward for resolution in per_name])[name_index],
        np.array([resolution.forward_with(share) for resolution in per_name])[name_index],
    )
    # The launch floor does not depend on the kernel: only the time above it changes.
    above = np.maximum(predicted_ns - swap.target.launch_floor_ns, 0)
    swapped = predicted_ns + above * (by_kernel - 1)
    if swap.record is not None:
        every = slice(0, len(swapped))
        swap.record.update(
            every,
            lambda i, root: other_kernel_term(
                root, above[i], by_kernel[i], per_name[int(name_index[i])]
            ),
        )
    occurrences = np.bincount(name_index, minlength=len(names))
    counts = dict.fromkeys(resolutions, 0)
    for count, family in zip(occurrences.tolist(), families, strict=True):
        if family:
            counts[family] += count
    notes = _swap_notes(resolutions, counts, swap)
    return swapped, swapped != predicted_ns, tuple(notes)


def _swap_notes(
    resolutions: Mapping[str, Resolution], counts: Mapping[str, int], swap: _AttentionSwap
) -> Iterator[Note]:
    """Yield a note for each family of attention kernels that becomes another or was requested.

    Args:
        resolutions: family -> the kernel that runs on the target instead.
        counts: family -> its nodes.
        swap: the GPUs and the request.
    """
    by_request = swap.requested not in ("usual", "eager")
    for name, resolution in resolutions.items():
        if by_request or resolution.runs != name:
            yield Note(
                f"Attention: {counts[name]} {name} kernels on {swap.source.name} -> "
                f"{resolution.runs} on {swap.target.name}, forward x{resolution.forward:.2f}, "
                f"backward x{resolution.backward:.2f} ({resolution.reason}).",
                code="attention-kernel-swapped",
            )
    if by_request and not resolutions:
        yield Note(
            f"Attention: no kernel belongs to a known family, so none became {swap.requested}.",
            code="attention-not-swapped",
        )


def check_resolves(model: CostModel, requested: str) -> None:
    """Raise if an attention kernel is requested of a model that does not distinguish kernels.

    Raises:
        AnnotateError: the model does not distinguish attention kernels.
    """
    if not model.resolves_kernels:
        raise AnnotateError(
            f"only the learned model distinguishes attention kernels\n  for attention={requested} "
            "leave out `--model`",
            code="kernel-needs-learned-model",
        )


def shape_ratio(
    from_description: PredictFromDescription,
    before: KernelFeatures,
    after: KernelFeatures,
    target: Gpu,
) -> F64:
    """Return the ratio of a model's times by shape after and before a change of dtype."""
    # TensorRT-LLM's fp8 with one scale for a tensor is 7, 8, 10 and 13% off on H100, B200, H200
    # and L40S by the tiles, and 9, 9, 14 and 13% by the roofline
    # (results/2026-11-26-fp8-from-bf16.txt).
    return from_description(after, target)[0] / from_description(before, target)[0]
