"""Re-cost a graph measured on a GPU: scale, look up, update the job."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database_set import library_for
from onerank.annotate.kernel_db.interpolate import Basis
from onerank.annotate.kernel_db.node_durations import Best, Size, best_of, best_resized, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.error_model import Uncertainty
from onerank.annotate.models.features import Mask
from onerank.annotate.models.intervals import Interval, Others, intervals
from onerank.annotate.models.provenance import AS_MEASURED, BY_DATABASE, Rule
from onerank.annotate.op_costs.node_costs import characters
from onerank.annotate.passes.change_dtype import in_half, units_notes
from onerank.annotate.passes.pass_config import PassOptions
from onerank.annotate.passes.swap_kernels import Altered
from onerank.annotate.recost.bookkeeping import details_of, job_for, memory_notes
from onerank.annotate.recost.predict import Step, modelled, others_note, with_others
from onerank.ir import UNKNOWN, Annotation, Evidence, Graph
from onerank.ir.arrays import membership_mask
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]


def to_gpu(
    graph: Graph,
    gpus: tuple[Gpu, Gpu],
    model: CostModel,
    passes: PassOptions,
    *,
    databases: Sequence[str | Path] = (),
) -> Graph:
    """Return the graph with compute nodes as `model` and the kernel databases predict them.

    Kernels, memsets and copies inside the device get new durations (evidence SCALED; CALIBRATED for
    a target on which a large GEMM and the memory were measured; LOOKED_UP and INTERPOLATED from the
    kernel databases). As measured stay: copies over the host link, which no description includes;
    host operators; and all communication, which a network simulator times. Nodes of another tool's
    graph without a duration keep none. Start times stay as measured too: afterwards they only keep
    the order, and edges determine the times. If the target is the source itself, every duration
    stays, evidence MEASURED, except for changes by `passes`. With overridden figures of the target
    (`with_figures`), measured or looked-up times on it are multiplied by the model's ratio with and
    without overrides (EXTRAPOLATED).

    If the model has intervals, every predicted node and the step get one (see `intervals`).

    Args:
        graph: measured.
        gpus: source and target.
        model: the cost model.
        passes: the requested changes.
        databases: kernel databases in addition to the shipped ones.

    Raises:
        AnnotateError: the graph has no GPU compute, a requested change is impossible, or a database
            is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    found = characters(graph)
    if len(graph) and not len(found.index):
        raise AnnotateError(
            f"none of the graph's {len(graph)} nodes is GPU compute, so there is nothing to "
            "re-cost; capture the script where there is a GPU, or on a CPU with `capture run`",
            code="recost-no-compute",
        )
    captured, dtype, said = in_half(found, passes.dtype, gpus)
    step = Step.as_captured(graph, captured)
    if passes.sizes is not None:
        resized, shaped, notes = passes.sizes.apply(graph)
        there, *_ = in_half(characters(resized), passes.dtype, gpus)
        reshaped = shaped[found.index] & (graph.nodes.duration_ns[found.index] > 0)
        step = Step(graph, captured, resized, there, reshaped)
        said += notes
    passes = replace(passes, dtype=dtype)
    altered, others = modelled(step, gpus, model, passes)
    said += units_notes(altered.found, gpus[1])
    altered = altered._replace(notes=(*said, *altered.notes))
    altered, doubt, others = _best(step, (altered, others), gpus, model, passes, databases)
    altered = _without_time(step.resized, altered)
    altered = altered._replace(notes=(*altered.notes, *others_note(gpus[1], altered.rules)))
    return _rewritten(step, altered, (doubt, others), gpus, model)


def _best(  # noqa: PLR0917
    step: Step,
    made: tuple[Altered, Others],
    gpus: tuple[Gpu, Gpu],
    model: CostModel,
    passes: PassOptions,
    databases: Sequence[str | Path],
) -> tuple[Altered, Uncertainty, Others]:
    """Return a model's predictions, or better ones from the databases, and their uncertainty.

    Args:
        step: the measured step.
        made: the model's predictions, and the effect of overridden figures of the target.
        gpus: source and target.
        model: the model.
        passes: the requested changes; `in_half` handles 16-bit dtypes.
        databases: in addition to the shipped ones.
    """
    altered, others = made
    origin, target = gpus
    doubt, described = Uncertainty.none(len(step.found.index)), target.as_described
    measured_on = None if origin == described and passes.sizes is not None else origin
    library = library_for(model, databases, (measured_on, target), step.captured)
    if library is None or not model.has_intervals:
        return altered, doubt, others
    before = altered
    if target != described:
        as_typed = replace(passes, dtype=None)  # in another type nothing is looked up
        before, _ = modelled(step, (origin, described), model, as_typed)
    basis = Basis(library, origin, described, model.alone, shipped())
    best = _looked_up(step, before, basis, _may_be_looked_up(altered, passes))
    told = best.moved_ns, best.rules
    moved, rules, others = with_others(told, before.moved_ns, altered.predicted, others)
    notes = (*altered.notes, *best.notes)
    return altered._replace(moved_ns=moved, rules=rules, notes=notes), best.doubt, others


def _looked_up(step: Step, made: Altered, basis: Basis, where: Mask) -> Best:
    """Return a model's predictions with those of the kernel database in place of weaker ones.

    Args:
        step: what was measured.
        made: what the model says of it.
        basis: rows, GPUs, and the model.
        where: nodes that may be looked up, bool[n].
    """
    best = Best(*made.predicted, Uncertainty.none(len(where)), ())
    if basis.source != basis.target:
        here = where & ~step.reshaped
        best = best_of(step.resized, made.found, made.kernels, made.predicted, basis, where=here)
    if step.reshaped.any():
        sizes = Size(step.captured, step.found), Size(step.resized, made.found)
        predicted, there = (best.moved_ns, best.rules), where & step.reshaped
        other = best_resized(sizes, made.kernels, predicted, basis, where=there)
        doubt, notes = best.doubt.beside(other.doubt), (*best.notes, *other.notes)
        best = other._replace(doubt=doubt, notes=notes)
    return best


def _may_be_looked_up(altered: Altered, passes: PassOptions) -> Mask:
    """Return which nodes are predicted in the type and by the kernel that they were captured in."""
    kernels = altered.kernels
    asked = (kernels.attention[:, 0] > 0)[kernels.call] & (passes.attention != "usual")
    return ~membership_mask(altered.rules, [*AS_MEASURED, Rule.RETYPED]) & ~asked


def _without_time(graph: Graph, altered: Altered) -> Altered:
    """Return the predictions but of nodes to which another tool's graph gives no duration."""
    kernels, moved, rules = altered.kernels, altered.moved_ns, altered.rules
    timeless = graph.nodes.evidence[altered.found.index] == Evidence.NONE
    timeless &= (kernels.duration_ns == 0) & (rules != Rule.SAME_GPU)
    return altered._replace(
        moved_ns=np.where(timeless, 0.0, moved),
        rules=np.where(timeless, np.uint8(Rule.NO_DURATION), rules),
    )


def _rewritten(
    step: Step,
    predictions: Altered,
    errors: tuple[Uncertainty, Others],
    gpus: tuple[Gpu, Gpu],
    model: CostModel,
) -> Graph:
    """Return the graph with the predictions in its columns and its books."""
    graph, reshaped = step.resized, step.reshaped
    found, kernels, moved, rules, changed, said = predictions
    origin, target = gpus
    here = origin == target.as_described
    another = changed | reshaped | ((rules != Rule.SAME_GPU) & (kernels.duration_ns > 0))
    same = here and not another.any()
    assert np.isfinite(moved).all(), "a cost model predicted a duration that is no number"
    elsewhere = found.index[another] if here else slice(None)
    columns = _columns(graph, predictions, elsewhere)
    predicted = ~membership_mask(rules, AS_MEASURED)
    if not same:
        how = np.full(len(rules), Evidence.CALIBRATED if target.calibrated else Evidence.SCALED)
        how = evidence_of(rules, how.astype(np.uint8))
        how = np.where(rules == Rule.RESIZED, np.uint8(Evidence.EXTRAPOLATED), how)
        columns["evidence"][found.index[predicted]] = how[predicted]
    interval: Interval | None = None
    if model.has_intervals and not same:
        ends, interval = intervals(
            kernels,
            (moved, rules),
            origin,
            target,
            shipped(),
            changed=changed,
            resized=reshaped & ~membership_mask(rules, BY_DATABASE),
            doubt=errors[0],
            others=errors[1],
        )
        for name, values in zip(("p10_ns", "p90_ns"), ends, strict=True):
            columns[name][found.index[predicted]] = np.rint(values[predicted])
    made = graph.with_columns(**columns)
    details = details_of(made, found, rules[:0] if same else rules, interval)
    annotation = Annotation(target.name, model.name, origin.name, details)
    note = (
        f"Durations of GPU compute are predicted for {target.name} from a measurement on "
        f"{origin.name} ({model.name} model); communication, host operators and host copies are as "
        "measured there."
    )
    notes = () if here else (note,)
    notes += () if origin == target else memory_notes(graph, target)
    job = job_for(graph.job, target, annotation, *notes, *said, as_measured=same)
    return replace(made, job=job)


def _columns(
    graph: Graph, made: Altered, elsewhere: slice | I64
) -> dict[str, npt.NDArray[np.generic]]:
    """Return the predictions as columns.

    Args:
        graph: with measured durations.
        made: predictions of its compute nodes.
        elsewhere: nodes whose uncontended time no longer holds, because it is the source's.
    """
    nodes, index = graph.nodes, made.found.index
    names = ("duration_ns", "spread_ns", "uncontended_ns", "p10_ns", "p90_ns", "evidence")
    columns = {name: getattr(nodes, name).copy() for name in names}
    measured = made.kernels.duration_ns
    factor = np.divide(made.moved_ns, measured, where=measured > 0, out=np.ones(len(measured)))
    columns["duration_ns"][index] = np.rint(made.moved_ns).astype(np.int64)
    columns["spread_ns"][index] = np.rint(nodes.spread_ns[index] * factor)
    columns["uncontended_ns"][elsewhere] = UNKNOWN
    for name in ("flops", "bytes_read", "bytes_written"):
        columns[name] = getattr(nodes, name).copy()
        columns[name][index] = getattr(made.found, name)
    return columns
