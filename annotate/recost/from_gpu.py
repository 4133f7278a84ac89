"""Re-cost a graph measured on a GPU: predict compute nodes, query the databases, write columns."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database import library_for
from onerank.annotate.kernel_db.look_up import Basis
from onerank.annotate.kernel_db.node_durations import Best, Size, best_of, best_resized, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import Uncertainty
from onerank.annotate.models.intervals import Interval, OverrideEffect, intervals
from onerank.annotate.models.prediction_terms import (
    AS_MEASURED,
    BY_DATABASE,
    Rule,
    TermRecord,
    quantity,
)
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.passes.change_dtype import (
    keeps_times_in_float16,
    missing_units_notes,
    run_in_float16,
)
from onerank.annotate.passes.pass_options import PassOptions
from onerank.annotate.passes.swap_kernels import ComputePrediction
from onerank.annotate.recost.predict_nodes import (
    MeasuredRequest,
    SizedGraphs,
    apply_overrides,
    details_of,
    job_for,
    override_notes,
    predict_compute,
    record_overrides,
    target_notes,
)
from onerank.ir import UNKNOWN, Annotation, Evidence, Graph
from onerank.ir.arrays import I64, U8, Mask, membership_mask
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note


def recost_measured(graph: Graph, request: MeasuredRequest) -> Graph:
    """Return the graph with compute nodes as the model and the kernel databases predict them.

    Kernels, memsets and copies inside the device get new durations (evidence SCALED; CALIBRATED for
    a target on which a large GEMM and the memory were measured; LOOKED_UP and INTERPOLATED from the
    kernel databases). These stay as measured: copies over the host link, which no description
    includes; host operators; and all communication, which a network simulator times. Nodes of
    another tool's graph without a duration keep none. Start times also stay as measured: they only
    keep the order, and edges determine the times. If the target is the source, all durations stay
    (evidence MEASURED), except for requested changes. With overridden figures of the target
    (`with_figures`), measured or looked-up times on it are multiplied by the model's ratio with and
    without overrides (EXTRAPOLATED).

    If the model has intervals, every predicted node and the step get one (see `intervals`).

    Args:
        graph: measured.
        request: GPUs, cost model and changes.

    Raises:
        AnnotateError: the graph has no GPU compute, a requested change is impossible, or a database
            is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    costs = op_costs_of(graph)
    if len(graph) and not len(costs.index):
        raise AnnotateError(
            f"none of the graph's {len(graph)} nodes is GPU compute; expected kernels to re-cost\n"
            "  capture the script on a GPU, or on a CPU with `capture run`",
            code="recost-no-compute",
        )
    captured, notes = costs, ()
    in_float16 = keeps_times_in_float16(costs, request.passes.dtype, request.source)
    if in_float16:
        captured, note = run_in_float16(costs, request.gpus)
        request = replace(request, passes=replace(request.passes, dtype=None))
        notes = (note,)
    step = SizedGraphs.as_captured(graph, captured)
    sizes = request.passes.sizes
    if sizes is not None:
        resized, shaped, resize_notes = sizes.apply(graph)
        resized_costs = op_costs_of(resized)
        if in_float16:
            resized_costs, _ = run_in_float16(resized_costs, request.gpus)
        # A node without a measured time has nothing that a ratio of sizes could scale.
        reshaped = shaped[costs.index] & (graph.nodes.duration_ns[costs.index] > 0)
        step = SizedGraphs(graph, captured, resized, resized_costs, reshaped)
        notes += resize_notes
    prediction, overrides = predict_compute(step, request)
    notes += missing_units_notes(prediction.costs, request.target)
    prediction = prediction._replace(notes=(*notes, *prediction.notes))
    prediction, uncertainty, overrides = _with_database_durations(
        step, (prediction, overrides), request
    )
    prediction = _drop_missing_durations(step.resized, prediction, request.record)
    prediction = prediction._replace(
        notes=(*prediction.notes, *override_notes(request.target, prediction.rules))
    )
    return _write_prediction(step, prediction, (uncertainty, overrides), request)


def _with_database_durations(
    step: SizedGraphs,
    model_result: tuple[ComputePrediction, OverrideEffect],
    request: MeasuredRequest,
) -> tuple[ComputePrediction, Uncertainty, OverrideEffect]:
    """Return a model's predictions, or better ones from the databases, and their uncertainty.

    Args:
        step: the measured step.
        model_result: the model's predictions, and the effect of overridden figures.
        request: GPUs, model, databases and changes; `run_in_float16` handles 16-bit dtypes. Its
            record has the model's terms, and takes those of the databases.
    """
    prediction, overrides = model_result
    source, target, passes = request.source, request.target, request.passes
    model, record = request.model, request.record
    uncertainty, target_as_described = Uncertainty.none(len(step.costs.index)), target.as_described
    # On the source itself the databases serve only for other sizes. `library_for` returns nothing
    # for equal GPUs, so such a step is passed as one without a source.
    measured_on = None if source == target_as_described and passes.sizes is not None else source
    library = library_for(model, request.databases, (measured_on, target), step.captured)
    if library is None or not model.has_intervals:
        return prediction, uncertainty, overrides
    without_overrides = prediction
    terms_with_overrides = {} if record is None else dict(record.roots)
    described_record = None
    if target != target_as_described:
        # The databases are queried for captured dtypes only, so the baseline needs no dtype change.
        without_dtype = replace(passes, dtype=None)
        described_record = None if record is None else TermRecord(record.rows)
        without_overrides, _ = predict_compute(
            step,
            replace(
                request,
                target=target_as_described,
                passes=without_dtype,
                record=described_record,
            ),
        )
    basis = Basis(library, source, target_as_described, model.from_description, shipped())
    best = _replace_weaker_predictions(
        step, without_overrides, basis, _can_look_up(prediction, passes), record
    )
    looked_up = best.durations
    if record is not None and described_record is not None:
        roots = described_record.roots
        record_overrides(record, terms_with_overrides, roots, looked_up.rules, target)
    (predicted_ns, rules), overrides = apply_overrides(
        looked_up, without_overrides.predicted_ns, prediction.durations, overrides
    )
    notes = (*prediction.notes, *best.notes)
    return (
        prediction._replace(predicted_ns=predicted_ns, rules=rules, notes=notes),
        best.uncertainty,
        overrides,
    )


def _replace_weaker_predictions(
    step: SizedGraphs,
    prediction: ComputePrediction,
    basis: Basis,
    where: Mask,
    record: TermRecord | None,
) -> Best:
    """Return the predictions, with look-ups in the kernel databases in place of weaker ones.

    Args:
        step: the measured step.
        prediction: the model's prediction for it.
        basis: database rows, GPUs and model.
        where: nodes that may be looked up, bool[n].
        record: the model's terms; takes those of the databases.
    """
    best = Best(prediction.durations, Uncertainty.none(len(where)), ())
    if basis.source != basis.target:
        same_size = where & ~step.reshaped
        best = best_of(
            step.resized,
            prediction.costs,
            prediction.kernels,
            prediction.durations,
            basis,
            where=same_size,
            record=record,
        )
    if step.reshaped.any():
        sizes = Size(step.captured, step.costs), Size(step.resized, prediction.costs)
        new_size = where & step.reshaped
        resized = best_resized(
            sizes, prediction.kernels, best.durations, basis, where=new_size, record=record
        )
        uncertainty, notes = (
            best.uncertainty.merge(resized.uncertainty),
            (*best.notes, *resized.notes),
        )
        best = resized._replace(uncertainty=uncertainty, notes=notes)
    return best


def _can_look_up(prediction: ComputePrediction, passes: PassOptions) -> Mask:
    """Return the nodes that keep their captured dtype and attention kernel, bool[n]."""
    kernels = prediction.kernels
    # The rows of a database hold the kernel that ran, not one of another dtype or attention kernel.
    swapped_attention = kernels.is_fused_attention & (passes.attention != "usual")
    return ~membership_mask(prediction.rules, [*AS_MEASURED, Rule.RETYPED]) & ~swapped_attention


def _drop_missing_durations(
    graph: Graph, prediction: ComputePrediction, record: TermRecord | None
) -> ComputePrediction:
    """Return the predictions without those for nodes that another tool's graph leaves untimed."""
    kernels, predicted_ns, rules = prediction.kernels, prediction.predicted_ns, prediction.rules
    without_duration = graph.nodes.evidence[prediction.costs.index] == Evidence.NONE
    # A measured 0 on the same GPU is a time and stays.
    without_duration &= (kernels.duration_ns == 0) & (rules != Rule.SAME_GPU)
    if record is not None:
        untimed = quantity("measured", 0, note="the trace has no duration")
        record.update_where(without_duration, lambda _i, _root: untimed)
    return prediction._replace(
        predicted_ns=np.where(without_duration, 0.0, predicted_ns),
        rules=np.where(without_duration, np.uint8(Rule.NO_DURATION), rules),
    )


def _write_prediction(
    step: SizedGraphs,
    prediction: ComputePrediction,
    errors: tuple[Uncertainty, OverrideEffect],
    request: MeasuredRequest,
) -> Graph:
    """Return the graph with the predictions in its columns and its job."""
    graph, reshaped = step.resized, step.reshaped
    source, target = request.gpus
    model, record = request.model, request.record
    if record is not None:
        record.rules = {row: Rule(int(prediction.rules[row])) for row in record.rows.tolist()}
    costs, kernels, predicted_ns, rules, changed, pass_notes = prediction
    # Overridden figures do not make it another GPU.
    same_gpu = source == target.as_described
    differs = changed | reshaped | ((rules != Rule.SAME_GPU) & (kernels.duration_ns > 0))
    unchanged = same_gpu and not differs.any()
    assert np.isfinite(predicted_ns).all(), "a cost model predicted a duration that is no number"
    # An uncontended time is of the source; on the same GPU it still holds for unchanged nodes.
    stale = costs.index[differs] if same_gpu else slice(None)
    columns = _columns(graph, prediction, stale)
    predicted = ~membership_mask(rules, AS_MEASURED)
    if not unchanged:
        # Nodes that stay as measured keep the evidence of their capture.
        columns["evidence"][costs.index[predicted]] = _evidence_on(target, rules)[predicted]
    interval: Interval | None = None
    if model.has_intervals and not unchanged:
        ends, interval = intervals(
            kernels,
            prediction.durations,
            source,
            target,
            shipped(),
            changed=changed,
            resized=reshaped & ~membership_mask(rules, BY_DATABASE),
            uncertainty=errors[0],
            overrides=errors[1],
            record=record,
        )
        for name, values in zip(("p10_ns", "p90_ns"), ends, strict=True):
            columns[name][costs.index[predicted]] = np.rint(values[predicted])
    annotated = graph.with_columns(**columns)
    # Measured nodes were not predicted by any rule.
    details = details_of(annotated, costs, rules[:0] if unchanged else rules, interval)
    annotation = Annotation(target.name, model.name, source.name, details)
    note = Note(
        f"Durations of GPU compute are predicted for {target.name} from a measurement on "
        f"{source.name} ({model.name} model); communication, host operators and host copies are as "
        "measured there.",
        code="recost-from-measurement",
    )
    notes = () if same_gpu else (note,)
    notes += () if source == target else target_notes(graph, target, rules)
    job = job_for(graph.job, target, annotation, *notes, *pass_notes, as_measured=unchanged)
    return replace(annotated, job=job)


def _evidence_on(target: Gpu, rules: U8) -> U8:
    """Return the evidence of each node's prediction, uint8[n]."""
    of_model = Evidence.CALIBRATED if target.calibrated else Evidence.SCALED
    evidence = evidence_of(rules, np.full(len(rules), of_model, dtype=np.uint8))
    return np.where(rules == Rule.RESIZED, np.uint8(Evidence.EXTRAPOLATED), evidence)


def _columns(
    graph: Graph, prediction: ComputePrediction, stale: slice | I64
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the predictions as columns.

    Args:
        graph: with measured durations.
        prediction: durations of its compute nodes.
        stale: nodes whose uncontended time is the source's and no longer holds.
    """
    nodes, index = graph.nodes, prediction.costs.index
    names = ("duration_ns", "spread_ns", "uncontended_ns", "p10_ns", "p90_ns", "evidence")
    columns = {name: getattr(nodes, name).copy() for name in names}
    measured = prediction.kernels.duration_ns
    factor = np.divide(
        prediction.predicted_ns, measured, where=measured > 0, out=np.ones(len(measured))
    )
    columns["duration_ns"][index] = np.rint(prediction.predicted_ns).astype(np.int64)
    # The spread over steps is taken as a share of the duration, so it scales with it.
    columns["spread_ns"][index] = np.rint(nodes.spread_ns[index] * factor)
    columns["uncontended_ns"][stale] = UNKNOWN
    for name in ("flops", "bytes_read", "bytes_written"):
        columns[name] = getattr(nodes, name).copy()
        columns[name][index] = getattr(prediction.costs, name)
    return columns
