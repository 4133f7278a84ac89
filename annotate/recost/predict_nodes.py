"""Predict compute nodes with a cost model, and write the predictions into the job and its notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from onerank.annotate.gpus.datasheet_estimates import estimate_notes
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database import library_for
from onerank.annotate.kernel_db.look_up import Basis
from onerank.annotate.kernel_db.node_durations import best_of, evidence_of
from onerank.annotate.memory.non_allocator import non_allocator_bytes
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import Interval, OverrideEffect
from onerank.annotate.models.prediction_terms import (
    BY_DATABASE,
    PredictedDurations,
    Rule,
    Term,
    TermRecord,
    by_evidence,
    product,
    quantity,
    quotient,
)
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.fuse import LookedUpDurations, LookUp
from onerank.annotate.passes.pass_options import PassOptions
from onerank.annotate.passes.swap_kernels import ComputePrediction, scale_to_shapes, swap_kernels
from onerank.ir import UNKNOWN, Annotation, Device, Evidence, Graph, Job
from onerank.ir.arrays import F64, U8, Mask, membership_mask
from onerank.ir.notes import Note

# Two predictions that agree to this part are equal: the override does not affect the node.
_ROUNDING = 1e-9

_RATIO_NOTE = "the ratio of the model's predictions with and without the override"


def ratio(after: F64, before: F64) -> F64:
    """Return after / before; 1 where they differ by rounding only, or before is 0."""
    quotient = np.divide(after, before, out=np.ones(len(after)), where=before > 0)
    return np.where(np.abs(quotient - 1) < _ROUNDING, 1.0, quotient)


def apply_overrides(
    looked_up: PredictedDurations,
    before_ns: F64,
    overridden: PredictedDurations,
    overrides: OverrideEffect | None = None,
) -> tuple[PredictedDurations, OverrideEffect]:
    """Return durations on a target with overridden figures, after look-ups, and their effect.

    A looked-up time is multiplied by the model's ratio with and without overrides; all others are
    the model's.

    Args:
        looked_up: durations on the target as described, of n nodes.
        before_ns: the model's predictions without overrides, float64[n].
        overridden: durations of the model with overrides.
        overrides: effect of overrides on measured times; None if not measured.
    """
    overrides = overrides or OverrideEffect.none(overridden.rules)
    is_looked_up = membership_mask(looked_up.rules, BY_DATABASE)
    factor = ratio(overridden.duration_ns, before_ns)
    rules = np.where(factor == 1, looked_up.rules, np.uint8(Rule.LOOKED_UP_WITH_OVERRIDES))
    return (
        PredictedDurations(
            np.where(is_looked_up, looked_up.duration_ns * factor, overridden.duration_ns),
            np.where(is_looked_up, rules, overridden.rules).astype(np.uint8),
        ),
        overrides._replace(
            factor=np.where(is_looked_up, factor, overrides.factor),
            known=overrides.known | is_looked_up,
        ),
    )


def override_notes(target: Gpu, rules: U8) -> tuple[Note, ...]:
    """Return notes on the effect of overridden figures; none without overrides."""
    described = target.as_described
    if target == described:
        return ()
    effects = (
        (Rule.MEASURED_WITH_OVERRIDES, f"take the measured time times {_RATIO_NOTE}"),
        (Rule.LOOKED_UP_WITH_OVERRIDES, f"take the looked-up time times {_RATIO_NOTE}"),
        (Rule.SAME_GPU, "do not depend on the change and stay as measured"),
    )  # fmt: skip
    counts = [(int((rules == rule).sum()), effect) for rule, effect in effects]
    sentences = [f"{count} of {len(rules)} nodes {effect}" for count, effect in counts if count]
    notes: list[Note] = []
    if sentences:
        text = f"What if {described.name} had {target.changes}: {'; '.join(sentences)}."
        notes.append(Note(text, code="what-if-figures"))
    peaks = {figure for figure in target.changed if figure.endswith(("_tflops", "_tops"))}
    # A description's peak rates are of the whole chip and do not follow from its SMs.
    if "sm_count" in target.changed and not peaks:
        text = (
            "The peak rates stay, so each of more SMs gets a smaller part, and GEMMs and "
            "attention with few tiles take longer; for a larger chip, override its peak rates too."
        )
        notes.append(Note(text, code="what-if-peaks-stay"))
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class SizedGraphs:
    """A measured graph, as captured and at the requested size.

    Attributes:
        captured: as measured.
        costs: work of its compute nodes.
        resized: the graph at the requested size.
        resized_costs: work of the same nodes at that size.
        reshaped: nodes whose shapes differ at that size, bool[n].
    """

    captured: Graph
    costs: OpCosts
    resized: Graph
    resized_costs: OpCosts
    reshaped: Mask

    @classmethod
    def as_captured(cls, graph: Graph, costs: OpCosts) -> Self:
        """Return a step whose size stays; `costs` is the work of its compute nodes."""
        return cls(graph, costs, graph, costs, np.zeros(len(costs.index), dtype=bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """The inputs of a prediction of a graph's compute nodes, besides the graph.

    Attributes:
        target: GPU to predict durations for, perhaps with overridden figures.
        model: cost model.
        passes: the requested changes.
        databases: kernel databases in addition to the shipped ones.
        record: takes the terms of compute nodes, as positions among them; None: no terms are kept.
    """

    target: Gpu
    model: CostModel
    passes: PassOptions
    databases: Sequence[str | Path] = ()
    record: TermRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest(PredictionRequest):
    """The inputs for a graph that a GPU measured.

    Attributes:
        source: that GPU.
    """

    source: Gpu

    @property
    def gpus(self) -> tuple[Gpu, Gpu]:
        """Source and target."""
        return self.source, self.target


def predict_compute(
    step: SizedGraphs, request: MeasuredRequest
) -> tuple[ComputePrediction, OverrideEffect]:
    """Return the model's predictions for a target after all passes, and the effect of overrides.

    On the GPU that measured the graph, times stay as measured; with overridden figures, they are
    multiplied by the model's ratio with and without overrides.

    Args:
        step: the measured step.
        request: GPUs, model and changes, whose sizes are those of `step`. The databases are unused.
    """
    source, target, passes = request.source, request.target, request.passes
    model, record = request.model, request.record
    kernels = KernelFeatures.of(step.captured, step.costs)
    predicted_ns, rules = model.predict(kernels, source, target, record=record)
    overrides = OverrideEffect.none(rules)
    if source == target.as_described:
        # The model only gives the ratio: measured times are better than predictions for this GPU.
        unchanged, before = predicted_ns, None
        if source != target:
            before = None if record is None else TermRecord(record.rows)
            unchanged, _ = model.predict(kernels, source, source, record=before)
        factor = ratio(predicted_ns, unchanged)
        overrides = OverrideEffect(factor, rules, np.ones(len(rules), dtype=bool))
        predicted_ns, rules = kernels.duration_ns * factor, _as_measured(factor)
        if record is not None:
            durations = kernels.duration_ns
            for row in record.rows.tolist():
                measured, after = quantity("measured", float(durations[row])), record.roots[row]
                record.roots[row] = measured
                if before is not None and factor[row] != 1:
                    record.roots[row] = overridden_term(measured, after, before.roots[row], target)
    prediction = ComputePrediction(
        step.costs, kernels, predicted_ns, rules, np.zeros(len(rules), dtype=bool), ()
    )
    if passes.sizes is not None:
        after = KernelFeatures.of(step.resized, step.resized_costs)
        prediction = scale_to_shapes(
            (step.resized_costs, after),
            prediction,
            step.reshaped,
            target,
            model.from_description,
            record,
        )
    prediction = swap_kernels(
        step.resized, prediction, request.gpus, passes, model=model, record=record
    )
    # A changed kernel has no measured time that the ratio could correct.
    return prediction, overrides._replace(known=overrides.known & ~prediction.changed)


def overridden_term(known: Term, after: Term, before: Term, target: Gpu) -> Term:
    """Return a time known for the target as described, with overrides, as a term.

    Args:
        known: the measured or looked-up time.
        after: the model's prediction with overrides.
        before: the same without.
        target: the GPU with overrides.
    """
    note = f"the model with {target.changes} over the model without"
    return product(known, quotient(after, before), name="overrides", note=note)


def record_overrides(
    record: TermRecord, after: dict[int, Term], before: dict[int, Term], rules: U8, target: Gpu
) -> None:
    """Record what overridden figures make of looked-up times, or the model's time with them.

    Args:
        record: terms for the target as described.
        after: the model's terms with overrides.
        before: the model's terms without.
        rules: a `Rule` for each node, uint8[n].
        target: the GPU with overrides.
    """
    looked_up = membership_mask(rules, BY_DATABASE)
    for row in record.rows.tolist():
        if not looked_up[row]:
            record.roots[row] = after[row]
        elif abs(after[row].value / before[row].value - 1) >= _ROUNDING:
            known = record.roots[row]
            record.roots[row] = overridden_term(known, after[row], before[row], target)


def _as_measured(factor: F64) -> U8:
    rules = np.where(factor == 1, Rule.SAME_GPU, Rule.MEASURED_WITH_OVERRIDES)
    return rules.astype(np.uint8)


def database_look_up(
    graph: Graph, target: Gpu, model: CostModel, databases: Sequence[str | Path]
) -> LookUp | None:
    """Return the function that queries the target's rows; None if the model uses no databases.

    Also None for a target with overridden figures: its rows were measured without the overrides.

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
    basis = Basis(library, None, target, model.from_description, shipped())

    def look_up(
        changed: Graph,
        costs: OpCosts,
        kernels: KernelFeatures,
        predicted: PredictedDurations,
        where: Mask,
    ) -> LookedUpDurations:
        best = best_of(changed, costs, kernels, predicted, basis, where=where)
        rules = best.durations.rules
        evidence = evidence_of(rules, np.full(len(rules), Evidence.DATASHEET, dtype=np.uint8))
        return LookedUpDurations(best.durations, evidence, best.uncertainty, best.notes)

    return look_up


def details_of(
    graph: Graph, costs: OpCosts, rules: U8, interval: Interval | None = None
) -> dict[str, Any]:
    """Return the counts that an annotation keeps of the compute nodes in `costs`."""
    interval_entry: dict[str, Any] = {}
    if interval is not None:
        total_ns = int(graph.nodes.duration_ns[costs.index].sum())
        # Inputs of other steps take other times, which no error of a model includes.
        interval = interval.widened(total_ns, graph.job.measurement.input_spread)
        interval_entry = {"interval": [interval.p10_ns, interval.p90_ns]}
    return {
        **interval_entry,
        "nodes": len(costs.index),
        "evidence": by_evidence(graph, costs.index),
        "rules": {rule.label: int((rules == rule).sum()) for rule in Rule if (rules == rule).any()},
        "unknown_class": int(costs.is_class(OpClass.UNKNOWN).sum()),
        "no_formula": int((costs.flops == UNKNOWN).sum()),
    }


def target_notes(graph: Graph, target: Gpu, rules: U8) -> tuple[Note, ...]:
    """Return notes on estimated figures of the target, and on rates and memory that it lacks."""
    return (*estimate_notes(target), *_rate_notes(target, rules), *_memory_notes(graph, target))


def _rate_notes(target: Gpu, rules: U8) -> tuple[Note, ...]:
    without = int((rules == Rule.NO_RATE).sum())
    if not without:
        return ()
    return (
        Note(
            f"{without} GEMMs or attention calls are in a data type for which the description of "
            f"{target.name} has no rate: predicted by memory bandwidth alone, so they may take "
            "longer. State the rate, such as fp32_vector_tflops, in the description.",
            code="target-rate-missing",
        ),
    )


def _memory_notes(graph: Graph, target: Gpu) -> tuple[Note, ...]:
    peak, non_allocator = graph.job.measurement.peak_memory_bytes, non_allocator_bytes(graph)
    if peak + non_allocator <= target.memory_bytes:
        return ()
    return (
        Note(
            f"The step would not fit: its peak is {peak} bytes, non-allocator memory takes about "
            f"{non_allocator}, and {target.name} has {target.memory_bytes}.",
            code="target-memory-exceeded",
        ),
    )


def job_for(
    job: Job, target: Gpu, annotation: Annotation, *notes: Note, as_measured: bool = False
) -> Job:
    """Return the job on its new device.

    Unless everything is as measured, figures timed on the old device are dropped: steps, modules
    and GPU busy time.
    """
    measurement = job.measurement
    # Timed steps and modules of the old device would contradict the new durations.
    if as_measured:
        measurement = msgspec.structs.replace(measurement, notes=(*measurement.notes, *notes))
    else:
        measurement = measurement.untimed(*notes)
    return msgspec.structs.replace(
        job,
        device=Device("cuda", target.name, target.memory_bytes, target.sm_count),
        measurement=measurement,
        annotations=(*job.annotations, annotation),
    )
