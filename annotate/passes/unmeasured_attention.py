"""Predict the attention of a capture without a GPU by the kernel that runs on the target.

The cost model predicts the kernel that the target usually runs. An operator may name another one,
or the user may request it: then factors by shape (`attention_kernels`), the division of the keys
(`flash2_decode`, `flash_mla`) or the schedule of the tiles (`flash2_prefill`) give the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import (
    BY_SCHEDULE,
    Resolution,
    divided_prefill_terms,
    divided_prefills,
    family_of_operator,
    named_decode_terms,
    resolve_unmeasured,
    scheduled_forwards,
    shape_factors,
    slowdown_of,
)
from onerank.annotate.models.attention_time import has_few_queries, is_latent
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.flash2_prefill import ScheduleTerms, flash2_schedule_terms
from onerank.annotate.models.prediction_terms import Rule, TermRecord
from onerank.annotate.passes.swap_kernels import check_resolves, other_kernel_term
from onerank.ir.arrays import F64, I64, U8, Mask, membership_mask
from onerank.ir.notes import Note


def swap_unmeasured_attention(  # noqa: PLR0917
    kernels: KernelFeatures,
    predicted: tuple[F64, U8],
    target: Gpu,
    model: CostModel,
    requested: str,
    operators: Sequence[str],
    record: TermRecord | None = None,
) -> tuple[F64, U8, tuple[Note, ...]]:
    """Return times with the kernels that unmeasured attention runs, rules and notes.

    Without a request, operators that name a kernel, such as `_flash_attention_forward` of a capture
    without a device, run that one. One without a figure on the target is slower than the usual
    kernel by the mean of such kernels, with their errors and a note.

    Args:
        kernels: of a CPU capture.
        predicted: durations in ns and rules, of the kernel that the target usually runs.
        target: GPU they are predicted for.
        model: the cost model.
        requested: one of `attention_kernels.CHOICES`.
        operators: operator of each node.
        record: terms of the predictions, updated in place; None to record none.

    Raises:
        AnnotateError: the kernel does not run on the target, or the model does not distinguish
            attention kernels.
    """
    unswapped_ns, rules = predicted
    shapes = kernels.attention[kernels.call]
    usual = requested in ("usual", "eager")
    if not usual:
        check_resolves(model, requested)
    elif not model.resolves_kernels:
        return unswapped_ns, rules, ()
    unswapped_ns, rules, decode_notes = _swap_decoding(
        (unswapped_ns, rules), shapes, target, operators, record
    )
    if usual:
        unswapped_ns, rules = _divide_prefills(
            (unswapped_ns, rules), shapes, target, operators, record
        )
    # The tile model predicts the kernel written for the architecture, which is the usual one there.
    fused = membership_mask(rules, (Rule.ATTENTION_TILES, Rule.OTHER_ATTENTION, Rule.OUTSIDE))
    # The factors of families were not measured in decoding: every kernel reads the same keys and
    # values there, and `_swap_decoding` has those that differ.
    fused &= kernels.is_fused_attention & ~has_few_queries(shapes)
    requested_kernel = resolve_unmeasured(target, requested)
    if not fused.any():
        none_swapped = () if usual else (_attention_note(0, target, requested_kernel),)
        return unswapped_ns, rules, (*decode_notes, *none_swapped)
    families = (
        [family_of_operator(op) for op in operators]
        if usual
        else [requested_kernel.runs] * len(fused)
    )
    swaps: list[tuple[I64, _FamilySwap]] = []
    kernel_of_family: dict[str, Resolution] = {}
    factors, notes, rules = np.ones(len(fused)), [*decode_notes], rules.copy()
    backward = kernels.is_attention_backward
    above_ns = np.maximum(unswapped_ns - target.launch_floor_ns, 0)
    for family, rows in _rows_by_family(families, fused):
        swap = _swap_to_family(
            *(family, shapes[rows], backward[rows], rules[rows], above_ns[rows]),
            *(target, requested_kernel),
            training=bool(backward.any()),
        )
        swaps.append((rows, swap))
        kernel_of_family[family] = swap.kernel
        factors[rows] = swap.factors
        if swap.without_figure:
            rules[rows[rules[rows] == Rule.ATTENTION_TILES]] = Rule.OTHER_ATTENTION
            notes.append(_without_figure(len(rows), target, swap.kernel))
        elif not usual or (swap.factors != 1).any() or _is_replaced(family, swap.kernel):
            notes.append(_attention_note(len(rows), target, swap.kernel))
    if record is not None:
        record.update_where(
            fused,
            lambda i, root: other_kernel_term(
                root, float(above_ns[i]), float(factors[i]), kernel_of_family[families[i]]
            ),
        )
    swapped_ns = np.where(fused, unswapped_ns + above_ns * (factors - 1), unswapped_ns)
    for rows, swap in swaps:
        if (terms := swap.by_schedule) is None:
            continue
        # The schedule gives the time itself, not a factor of the usual kernel's.
        scheduled = rows[swap.scheduled]
        swapped_ns[scheduled] = terms.predicted_ns
        if record is not None:
            record.update(scheduled, lambda i, _, terms=terms: terms.term(i, target.name))
    return swapped_ns, rules, tuple(notes)


def _is_replaced(family: str, kernel: Resolution) -> bool:
    """Return whether another known kernel runs in the place of the one that an operator names."""
    return bool(family and kernel.runs) and kernel.runs != family


def _rows_by_family(families: list[str], chosen: Mask) -> Iterator[tuple[str, I64]]:
    """Yield each family of the chosen calls, in the order of their names, and its rows."""
    names, place = np.unique(np.array(families), return_inverse=True)
    for number, name in enumerate(names.tolist()):
        if len(rows := np.flatnonzero(chosen & (place == number))):
            yield name, rows


@dataclass(frozen=True, slots=True)
class _FamilySwap:
    """The kernel that some calls of attention run.

    Attributes:
        kernel: the kernel, with its mean factors.
        factors: time of each call over that of the usual kernel, float64[k].
        scheduled: which calls are predicted by the schedule of their tiles, bool[k].
        by_schedule: their time; None without such calls.
        without_figure: whether the kernel has no figure on the target.
    """

    kernel: Resolution
    factors: F64
    scheduled: Mask
    by_schedule: ScheduleTerms | None = None
    without_figure: bool = False


def _swap_to_family(  # noqa: PLR0917
    family: str,
    shapes: F64,
    backward: Mask,
    rules: U8,
    above_ns: F64,
    target: Gpu,
    requested_kernel: Resolution,
    *,
    training: bool,
) -> _FamilySwap:
    """Return the kernel of a family that k calls run.

    Args:
        family: the family; "" for calls whose operator names none.
        shapes: `AttentionShape` of each call, float64[k, 10].
        backward: whether each call is a backward pass, bool[k].
        rules: the rule that predicted each call, uint8[k].
        above_ns: time of each above the launch floor, by the usual kernel, float64[k].
        target: GPU they are predicted for.
        requested_kernel: the kernel of calls without a figure of their family.
        training: whether the step has backward passes, also of other families.
    """
    if (by_shape := shape_factors(family, target)) is not None:
        factors = by_shape.of(target, shapes, training=training)
        scheduled = scheduled_forwards(family, target, shapes)
        terms = None
        if scheduled.any():
            terms = flash2_schedule_terms(target, shapes[scheduled], training=training)
            # For the means of the note; at least 1 ns, as a call may take the launch floor alone.
            scheduled_ns = terms.predicted_ns - target.launch_floor_ns
            factors[scheduled] = scheduled_ns / np.maximum(above_ns[scheduled], 1.0)
        means = _mean(factors[~backward]), _mean(factors[backward])
        kernel = Resolution("", family, *means, by_shape.source)
        return _FamilySwap(kernel, factors, scheduled, terms)
    kernel, without_figure = requested_kernel, False
    if slowdown := slowdown_of(family, target):
        kernel = Resolution("", family, slowdown.forward, slowdown.backward, slowdown.source)
    # Operators name kernels of NVIDIA's GPUs; other vendors' GPUs run none of them. Nor does a GPU
    # other than Hopper, which has a figure, run FlashAttention-3. They run their usual kernel.
    elif family and family != "flash3" and target.is_nvidia and len(shapes):
        # On an architecture without a measured kernel, the model's time has this factor.
        near = bool((rules == Rule.ATTENTION_TILES).any())
        slower = shipped().other_attention if near else 1.0
        kernel = Resolution("", family, slower, slower, "no figure is known")
        without_figure = True
    factors = np.where(backward, kernel.backward, kernel.forward)
    none = np.zeros(len(shapes), dtype=bool)
    return _FamilySwap(kernel, factors, none, without_figure=without_figure)


def _swap_decoding(
    predicted: tuple[F64, U8],
    shapes: F64,
    target: Gpu,
    operators: Sequence[str],
    record: TermRecord | None,
) -> tuple[F64, U8, list[Note]]:
    """Return times with the decoding of the kernels that operators name, rules and notes.

    Args:
        predicted: durations in ns and rules.
        shapes: attention of each node, as for `attention_terms`, float64[n, 10].
        target: GPU they are predicted for.
        operators: operator of each node.
        record: terms of the predictions, updated in place; None to record none.
    """
    predicted_ns, rules = predicted
    decoded = np.flatnonzero(rules == Rule.DECODE)
    families = np.array([family_of_operator(operators[row]) for row in decoded.tolist()])
    latent = is_latent(shapes[decoded])
    # Only FlashMLA has terms of latent attention, and it has no others.
    named: Mask = latent == (families == "flash_mla")
    decoded, families = decoded[named], families[named]
    swapped_ns, swapped_rules, notes = predicted_ns.copy(), rules.copy(), list[Note]()
    for family in dict.fromkeys(families.tolist()):
        rows = decoded[families == family]
        terms = named_decode_terms(family, target, shapes[rows])
        if terms is None:
            continue
        swapped_ns[rows] = terms.predicted_ns
        if family in BY_SCHEDULE:
            swapped_rules[rows] = Rule.SCHEDULED
        if record is not None:
            record.update(rows, lambda i, _, terms=terms: terms.term(i, target.name))
        by_kernel = _mean(swapped_ns[rows] / predicted_ns[rows])
        source = "measured on an H100 SXM, one query per sequence"
        notes.append(
            _attention_note(len(rows), target, Resolution("", family, by_kernel, 1.0, source))
        )
    return swapped_ns, swapped_rules, notes


def _divide_prefills(
    predicted: tuple[F64, U8],
    shapes: F64,
    target: Gpu,
    operators: Sequence[str],
    record: TermRecord | None,
) -> tuple[F64, U8]:
    """Return times and rules with prefills of few tokens by a kernel that divides their keys.

    Arguments as for `_swap_decoding`.
    """
    predicted_ns, rules = predicted
    fused = np.flatnonzero(membership_mask(rules, (Rule.ATTENTION_TILES, Rule.OTHER_ATTENTION)))
    families = np.array([family_of_operator(operators[row]) for row in fused.tolist()])
    changed_ns, changed_rules = predicted_ns.copy(), rules.copy()
    for family in dict.fromkeys(families.tolist()):
        rows = fused[families == family]
        rows = rows[divided_prefills(family, target, shapes[rows])]
        if not len(rows):
            continue
        terms = divided_prefill_terms(target, shapes[rows])
        changed_ns[rows], changed_rules[rows] = terms.predicted_ns, Rule.DECODE
        if record is not None:
            record.update(rows, lambda i, _, terms=terms: terms.term(i, target.name))
    return changed_ns, changed_rules


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
