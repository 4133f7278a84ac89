"""Predict the attention of a capture without a GPU by the kernel that runs on the target.

The cost model predicts the kernel that the target usually runs. An operator may name another one,
or the user may request it: then factors by shape (`attention_kernels`), the division of the keys
(`flash2_decode`, `flash_mla`) or the schedule of the tiles (`flash2_prefill`) give the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_factors import ShapeFactors, shape_factors
from onerank.annotate.models.attention_kernels import (
    BY_SCHEDULE,
    Resolution,
    divided_prefill_terms,
    divided_prefills,
    family_of_operator,
    named_decode_terms,
    resolve_unmeasured,
    runs_on,
    scheduled_forwards,
    slowdown_of,
)
from onerank.annotate.models.attention_time import AttentionTerms, has_few_queries, is_latent
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.flash2_decode import WaveTerms
from onerank.annotate.models.flash2_prefill import ScheduleTerms, flash2_schedule_terms
from onerank.annotate.models.prediction_terms import PredictedDurations, Rule, TermRecord
from onerank.annotate.op_costs.cost_record import AttentionShape
from onerank.annotate.passes.swap_kernels import other_kernel_term
from onerank.ir.arrays import F64, I64, U8, Mask, membership_mask
from onerank.ir.notes import Note

Families = NDArray[np.str_]
"""Kernel family of each node; "" for none."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The n operators of a capture, with the attention kernels that they name.

    Attributes:
        shapes: `AttentionShape` of each node, zeros for other operators, float64[n, 12].
        families: `family_of_operator` of each node.
        target: GPU they are predicted for.
        record: terms of the predictions, updated in place; None to record none.
    """

    shapes: F64
    families: Families
    target: Gpu
    record: TermRecord | None

    def record_terms(self, rows: I64, terms: AttentionTerms | WaveTerms | ScheduleTerms) -> None:
        """Replace the terms of the nodes at `rows` by those of their kernel's own model."""
        if self.record is not None:
            self.record.update(rows, lambda i, _: terms.term(i, self.target.name))


def swap_unmeasured_attention(
    kernels: KernelFeatures,
    predicted: PredictedDurations,
    target: Gpu,
    requested: str,
    operators: Sequence[str],
    *,
    record: TermRecord | None = None,
) -> tuple[PredictedDurations, tuple[Note, ...]]:
    """Return durations with the kernels that unmeasured attention runs, and notes.

    Without a request, operators that name a kernel, such as `_flash_attention_forward` of a capture
    without a device, run that one. One without a figure on the target is slower than the usual
    kernel by the mean of such kernels, with their errors and a note.

    Args:
        kernels: of a CPU capture.
        predicted: durations of the kernel that the target usually runs, by a model that
            distinguishes attention kernels.
        target: GPU they are predicted for.
        requested: one of `attention_kernels.CHOICES`.
        operators: operator of each node.
        record: terms of the predictions, updated in place; None to record none.

    Raises:
        AnnotateError: the kernel does not run on the target.
    """
    family_of = {op: family_of_operator(op) for op in dict.fromkeys(operators)}
    families = np.array([family_of[op] for op in operators], dtype=np.str_)
    nodes = _Nodes(kernels.attention[kernels.call], families, target, record)
    predicted, decode_notes = _swap_decoding(predicted, nodes)
    if names_no_kernel(requested):
        predicted = _divide_prefills(predicted, nodes)
    predicted, notes = _swap_fused(predicted, nodes, kernels, requested)
    return predicted, (*decode_notes, *notes)


def names_no_kernel(requested: str) -> bool:
    """Return whether a request leaves the kernel of fused attention to the operators."""
    return requested in ("usual", "eager")


def _swap_fused(
    predicted: PredictedDurations, nodes: _Nodes, kernels: KernelFeatures, requested: str
) -> tuple[PredictedDurations, list[Note]]:
    """Return durations with the kernels of attention of many queries, and notes.

    Arguments as for `swap_unmeasured_attention`.
    """
    unswapped_ns, rules = predicted
    target, by_operator = nodes.target, names_no_kernel(requested)
    # The tile model predicts the kernel written for the architecture, which is the usual one there.
    fused = membership_mask(rules, (Rule.ATTENTION_TILES, Rule.OTHER_ATTENTION, Rule.OUTSIDE))
    # The factors of families were not measured in decoding: every kernel reads the same keys and
    # values there, and `_swap_decoding` has those that differ.
    fused &= kernels.is_fused_attention & ~has_few_queries(nodes.shapes)
    requested_kernel = resolve_unmeasured(target, requested)
    if not fused.any():
        return predicted, [] if by_operator else [_attention_note(0, target, requested_kernel)]
    families = nodes.families if by_operator else np.full(len(fused), requested_kernel.runs)
    above_ns = np.maximum(unswapped_ns - target.launch_floor_ns, 0)
    half = kernels.has_dtype("float16", "bfloat16")
    backward = kernels.is_attention_backward
    calls = _FusedCalls(nodes.shapes, backward, rules, above_ns, target, half)
    swaps = [
        _family_swap(family, rows, calls, requested_kernel)
        for family, rows in sorted(_rows_by_family(np.flatnonzero(fused), families))
    ]
    rules, notes = rules.copy(), list[Note]()
    for swap in swaps:
        if swap.without_figure:
            rules[swap.rows[rules[swap.rows] == Rule.ATTENTION_TILES]] = Rule.OTHER_ATTENTION
            notes.append(_without_figure(len(swap.rows), target, swap.kernel))
        elif not by_operator or (swap.factors != 1).any() or swap.replaces_family:
            notes.append(_attention_note(len(swap.rows), target, swap.kernel))
    swapped_ns = _swapped_ns(swaps, unswapped_ns, above_ns, nodes)
    return PredictedDurations(swapped_ns, rules), notes


def _swapped_ns(
    swaps: Sequence["_FamilySwap"], unswapped_ns: F64, above_ns: F64, nodes: _Nodes
) -> F64:
    """Return the times by the kernels of each family, float64[n], and record their terms.

    Args:
        swaps: the kernel of each family.
        unswapped_ns: times by the usual kernel, float64[n].
        above_ns: the part of these times above the launch floor, float64[n].
        nodes: the operators.
    """
    swapped_ns = unswapped_ns.copy()
    for swap in swaps:
        rows, factors = swap.rows, swap.factors
        swapped_ns[rows] = unswapped_ns[rows] + above_ns[rows] * (factors - 1)
        if nodes.record is not None:
            nodes.record.update(
                rows,
                lambda i, root, swap=swap: other_kernel_term(
                    root, float(above_ns[swap.rows[i]]), float(swap.factors[i]), swap.kernel
                ),
            )
        if swap.by_schedule is not None:
            # The schedule gives the time itself, not a factor of the usual kernel's.
            scheduled = rows[swap.scheduled]
            swapped_ns[scheduled] = swap.by_schedule.predicted_ns
            nodes.record_terms(scheduled, swap.by_schedule)
    return swapped_ns


def _rows_by_family(rows: I64, families: Families) -> Iterator[tuple[str, I64]]:
    """Yield each family among `rows`, in the order of its first row, and its rows.

    Args:
        rows: nodes, int64[k].
        families: family of every node.
    """
    for family in dict.fromkeys(families[rows].tolist()):
        yield family, rows[families[rows] == family]


@dataclass(frozen=True, slots=True)
class _FusedCalls:
    """The calls of attention among n nodes, as the target's usual kernel computes them.

    Attributes:
        shapes: `AttentionShape` of each node, float64[n, 12].
        backward: whether it is a backward pass, bool[n].
        rules: the rule that predicted it, uint8[n].
        above_ns: its time above the launch floor, float64[n].
        target: GPU they are predicted for.
        half: whether its operands have 16 bits, bool[n].
    """

    shapes: F64
    backward: Mask
    rules: U8
    above_ns: F64
    target: Gpu
    half: Mask

    @property
    def training(self) -> bool:
        """Whether the step has backward passes."""
        return bool(self.backward.any())


@dataclass(frozen=True, slots=True)
class _FamilySwap:
    """The kernel that k calls of attention run.

    Attributes:
        family: family that their operators name, or that is requested; "" for none.
        rows: the calls, int64[k].
        kernel: the kernel, with its mean factors.
        factors: time of each call over that of the usual kernel, float64[k].
        scheduled: which calls are predicted by the schedule of their tiles, bool[k].
        by_schedule: their time; None without such calls.
        without_figure: whether the kernel has no figure on the target.
    """

    family: str
    rows: I64
    kernel: Resolution
    factors: F64
    scheduled: Mask
    by_schedule: ScheduleTerms | None = None
    without_figure: bool = False

    @property
    def replaces_family(self) -> bool:
        """Whether another known kernel runs in the place of the one that an operator names."""
        return bool(self.family and self.kernel.runs) and self.kernel.runs != self.family


def _family_swap(
    family: str, rows: I64, calls: _FusedCalls, requested_kernel: Resolution
) -> _FamilySwap:
    """Return the kernel of a family that the calls at `rows` run.

    Args:
        family: the family; "" for calls whose operator names none.
        rows: the calls of that family, int64[k].
        calls: all calls.
        requested_kernel: the kernel of calls without a figure of their family.
    """
    target, backward = calls.target, calls.backward[rows]
    if (by_shape := shape_factors(family, target)) is not None:
        return _swap_by_shape(family, rows, calls, by_shape)
    kernel, without_figure = requested_kernel, False
    if slowdown := slowdown_of(family, target):
        kernel = Resolution("", family, slowdown.forward, slowdown.backward, slowdown.source)
    # Operators name kernels of NVIDIA's GPUs. A GPU that cannot run the named kernel runs its usual
    # one.
    elif family and target.is_nvidia and runs_on(family, target) and len(rows):
        # On an architecture without a measured kernel, the model's time has this factor.
        near = bool((calls.rules[rows] == Rule.ATTENTION_TILES).any())
        slower = shipped().other_attention if near else 1.0
        kernel = Resolution("", family, slower, slower, "no figure is known")
        without_figure = True
    factors = np.where(backward, kernel.backward, kernel.forward)
    none = np.zeros(len(rows), dtype=bool)
    return _FamilySwap(family, rows, kernel, factors, none, without_figure=without_figure)


_WIDTHS = [AttentionShape._fields.index(name) for name in ("d", "dv")]


def _swap_by_shape(
    family: str, rows: I64, calls: _FusedCalls, by_shape: ShapeFactors
) -> _FamilySwap:
    """Return a family's kernel that was measured by shape; other arguments as `_family_swap`."""
    target, shapes, backward = calls.target, calls.shapes[rows], calls.backward[rows]
    factors = by_shape.of(target, shapes, training=calls.training)
    if (blocks := by_shape.blocks) is not None:
        small = calls.half[rows] & (shapes[:, _WIDTHS].max(axis=1) <= blocks.widest)
        of_blocks = blocks.above_floor_ns(target, shapes[small], training=calls.training)
        factors[small] = of_blocks / np.maximum(calls.above_ns[rows][small], 1.0)
    added_ns = by_shape.dropout_ns(target, shapes, training=calls.training)
    factors += added_ns / np.maximum(calls.above_ns[rows], 1.0)
    scheduled = scheduled_forwards(family, target, shapes)
    terms = None
    if scheduled.any():
        terms = flash2_schedule_terms(target, shapes[scheduled], training=calls.training)
        # For the means of the note; at least 1 ns, as a call may take the launch floor alone.
        scheduled_ns = terms.predicted_ns - target.launch_floor_ns
        factors[scheduled] = scheduled_ns / np.maximum(calls.above_ns[rows][scheduled], 1.0)
    means = _mean(factors[~backward]), _mean(factors[backward])
    kernel = Resolution("", family, *means, by_shape.source)
    return _FamilySwap(family, rows, kernel, factors, scheduled, terms)


def _swap_decoding(
    predicted: PredictedDurations, nodes: _Nodes
) -> tuple[PredictedDurations, list[Note]]:
    """Return durations with the decoding of the kernels that operators name, and notes."""
    predicted_ns, rules = predicted
    decoded = np.flatnonzero(rules == Rule.DECODE)
    # Only FlashMLA has terms of latent attention, and it has no others.
    latent = is_latent(nodes.shapes[decoded])
    decoded = decoded[latent == (nodes.families[decoded] == "flash_mla")]
    swapped_ns, swapped_rules, notes = predicted_ns.copy(), rules.copy(), list[Note]()
    for family, rows in _rows_by_family(decoded, nodes.families):
        terms = named_decode_terms(family, nodes.target, nodes.shapes[rows])
        if terms is None:
            continue
        swapped_ns[rows] = terms.predicted_ns
        if family in BY_SCHEDULE:
            swapped_rules[rows] = Rule.SCHEDULED
        nodes.record_terms(rows, terms)
        by_kernel = _mean(swapped_ns[rows] / predicted_ns[rows])
        source = "measured on an H100 SXM, one query per sequence"
        kernel = Resolution("", family, by_kernel, 1.0, source)
        notes.append(_attention_note(len(rows), nodes.target, kernel))
    return PredictedDurations(swapped_ns, swapped_rules), notes


def _divide_prefills(predicted: PredictedDurations, nodes: _Nodes) -> PredictedDurations:
    """Return durations with prefills of few tokens by a kernel that divides their keys."""
    predicted_ns, rules = predicted
    fused = np.flatnonzero(membership_mask(rules, (Rule.ATTENTION_TILES, Rule.OTHER_ATTENTION)))
    divided_ns, divided_rules = predicted_ns.copy(), rules.copy()
    for family, of_family in _rows_by_family(fused, nodes.families):
        rows = of_family[divided_prefills(family, nodes.target, nodes.shapes[of_family])]
        if len(rows):
            terms = divided_prefill_terms(nodes.target, nodes.shapes[rows])
            divided_ns[rows], divided_rules[rows] = terms.predicted_ns, Rule.DECODE
            nodes.record_terms(rows, terms)
    return PredictedDurations(divided_ns, divided_rules)


def _mean(values: F64) -> float:
    """Return the mean of factors; 1 for none."""
    return float(values.mean()) if len(values) else 1.0


def _attention_note(count: int, target: Gpu, kernel: Resolution) -> Note:
    return Note(
        f"Attention: {count} calls by {kernel.runs} on {target.name}, forward "
        f"x{kernel.forward:.2f}, backward x{kernel.backward:.2f} ({kernel.reason}).",
        code="attention-kernel-assumed",
    )


def _without_figure(count: int, target: Gpu, kernel: Resolution) -> Note:
    # 1: no kernel of the architecture was measured, so its usual kernel has no figure either.
    time = (
        f"take {kernel.forward:g} times {target.name}'s usual kernel, the mean of such kernels"
        if kernel.forward != 1
        else f"are predicted as by any kernel on {target.name}"
    )
    return Note(
        f"Attention: {count} calls by {kernel.runs} {time}: no figure of {kernel.runs} on "
        f"{target.architecture} is known.",
        code="attention-kernel-without-figure",
    )
