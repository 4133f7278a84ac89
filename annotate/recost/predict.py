"""Predict compute nodes with a cost model; look up kernels that a pass created."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database_set import library_for
from onerank.annotate.kernel_db.interpolate import Basis
from onerank.annotate.kernel_db.node_durations import best_of, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.features import F64, U8, KernelFeatures, Mask
from onerank.annotate.models.intervals import Others
from onerank.annotate.models.provenance import BY_DATABASE, Rule
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.passes.attention.fuse import FusedAttentionParts, LookUp
from onerank.annotate.passes.pass_config import PassOptions
from onerank.annotate.passes.swap_kernels import Altered, alter, reshape
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import membership_mask

_ALIKE = 1e-9

_RATIO = "what the model says with the change over without it"


def ratio(after: F64, before: F64) -> F64:
    """Return after / before; 1 where both are the same but for rounding, or before is nothing."""
    made = np.divide(after, before, out=np.ones(len(after)), where=before > 0)
    return np.where(np.abs(made - 1) < _ALIKE, 1.0, made)


def with_others(
    told: tuple[F64, U8], before_ns: F64, after: tuple[F64, U8], others: Others | None = None
) -> tuple[F64, U8, Others]:
    """Return times and rules for a target with overridden figures, after look-ups.

    A looked-up time is multiplied by the model's ratio with and without overrides; all others are
    the model's.

    Args:
        told: times and rules for the target as described, n of each.
        before_ns: the model's predictions without overrides, float64[n].
        after: times and rules of the model with overrides.
        others: effect of overrides on measured times; None if not measured.
    """
    others = others or Others.none(after[1])
    looked_up = membership_mask(told[1], BY_DATABASE)
    factor = ratio(after[0], before_ns)
    rules = np.where(factor == 1, told[1], np.uint8(Rule.LOOKED_UP_WITH_OTHERS))
    return (
        np.where(looked_up, told[0] * factor, after[0]),
        np.where(looked_up, rules, after[1]).astype(np.uint8),
        others._replace(
            factor=np.where(looked_up, factor, others.factor), known=others.known | looked_up
        ),
    )


def others_note(target: Gpu, rules: U8) -> tuple[str, ...]:
    """Return a sentence on what figures that are set changed, if some are."""
    described = target.as_described
    if target == described:
        return ()
    sorts = (
        (Rule.MEASURED_WITH_OTHERS, f"take what was measured on it, times {_RATIO}"),
        (Rule.LOOKED_UP_WITH_OTHERS, f"take what was looked up for it, times {_RATIO}"),
        (Rule.SAME_GPU, "do not depend on the change and stay as measured"),
    )  # fmt: skip
    counts = [(int((rules == rule).sum()), what) for rule, what in sorts]
    told = [f"{count} of {len(rules)} nodes {what}" for count, what in counts if count]
    peaks = {figure for figure in target.changed if figure.endswith(("_tflops", "_tops"))}
    if "sm_count" in target.changed and not peaks:
        told.append(
            "the peak rates stay, so that of more SMs each has less of them, and products and "
            "attention of few tiles take longer; of a larger chip set its peak rates too"
        )
    return (f"What if {described.name} had {target.changes}: {'; '.join(told)}.",) if told else ()


@dataclass(frozen=True, slots=True)
class Step:
    """A measured graph, as captured and at the requested size.

    Attributes:
        captured: as measured.
        found: work of its compute nodes.
        resized: at the requested size.
        there: their work at that size.
        reshaped: nodes with other shapes there, bool[n].
    """

    captured: Graph
    found: OpCosts
    resized: Graph
    there: OpCosts
    reshaped: Mask

    @classmethod
    def as_captured(cls, graph: Graph, found: OpCosts) -> Self:
        """Return a graph whose size nobody changes; `found` is what its compute nodes do."""
        return cls(graph, found, graph, found, np.zeros(len(found.index), dtype=bool))


def modelled(
    step: Step, gpus: tuple[Gpu, Gpu], model: CostModel, passes: PassOptions
) -> tuple[Altered, Others]:
    """Return the model's predictions for a target after all passes, and the effect of overrides.

    On the GPU that measured the graph every time is as measured; with overridden figures,
    multiplied by the model's ratio with and without overrides.

    Args:
        step: the measured step.
        gpus: source and target.
        model: the cost model.
        passes: the requested changes; its sizes are those of `step`.
    """
    origin, target = gpus
    kernels = KernelFeatures.of(step.captured, step.found)
    moved, rules = model.predict(kernels, origin, target)
    others = Others.none(rules)
    if origin == target.as_described:
        there, _ = (moved, rules) if origin == target else model.predict(kernels, origin, origin)
        factor = ratio(moved, there)
        others = Others(factor, rules, np.ones(len(rules), dtype=bool))
        moved, rules = kernels.duration_ns * factor, _as_measured(factor)
    made = Altered(step.found, kernels, moved, rules, np.zeros(len(rules), dtype=bool), ())
    if passes.sizes is not None:
        after = KernelFeatures.of(step.resized, step.there)
        made = reshape((step.there, after), made, step.reshaped, target, model.alone)
    made = alter(step.resized, made, gpus, passes, model=model)
    return made, others._replace(known=others.known & ~made.changed)


def _as_measured(factor: F64) -> U8:
    same = np.where(factor == 1, Rule.SAME_GPU, Rule.MEASURED_WITH_OTHERS)
    return same.astype(np.uint8)


def rows_of(
    graph: Graph, target: Gpu, model: CostModel, databases: Sequence[str | Path]
) -> LookUp | None:
    """Return how to look up in the rows of the target; None where the model looks nothing up.

    Nor is anything looked up for a target with figures that are set.

    Raises:
        AnnotateError: a database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a file cannot be read.
    """
    if not model.has_intervals or target != target.as_described:
        return None
    library = library_for(model, databases, (None, target), graph)
    if library is None:
        return None
    basis = Basis(library, None, target, model.alone, shipped())

    def look_up(
        made: Graph, found: OpCosts, kernels: KernelFeatures, predicted: tuple[F64, U8], where: Mask
    ) -> FusedAttentionParts:
        best = best_of(made, found, kernels, predicted, basis, where=where)
        datasheet = np.full(len(best.rules), Evidence.DATASHEET, dtype=np.uint8)
        evidence = evidence_of(best.rules, datasheet)
        return FusedAttentionParts(best.moved_ns, best.rules, evidence, best.doubt, best.notes)

    return look_up
