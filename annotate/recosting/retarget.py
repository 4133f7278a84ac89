"""What every cost model shares: checks, the nodes it may touch, and the books it keeps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.lookup.library import library_for
from onerank.annotate.lookup.look_up import Basis
from onerank.annotate.lookup.nodes import Best, best_of, evidence_of
from onerank.annotate.lookup.resized import Size, best_resized
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import Doubt
from onerank.annotate.models.intervals import Interval, Others, intervals
from onerank.annotate.models.kernels import Mask
from onerank.annotate.models.model import CostModel
from onerank.annotate.models.rules import AS_MEASURED, BY_DATABASE, Rule
from onerank.annotate.recosting.books import details_of, job_for, memory_notes
from onerank.annotate.recosting.counted import to_gpu as counted_to_gpu
from onerank.annotate.recosting.cpu_capture import to_gpu
from onerank.annotate.recosting.modelled import Step, modelled
from onerank.annotate.recosting.other_figures import others_note, with_others
from onerank.annotate.recosting.sources import check_capture_on_cpu, check_measured, source_gpu
from onerank.annotate.what_ifs.alter import Altered
from onerank.annotate.what_ifs.data_types import in_half, units_notes
from onerank.annotate.what_ifs.what_if import AS_USUAL, WhatIf
from onerank.annotate.work.characters import characters
from onerank.ir import UNKNOWN, Annotation, Evidence, Graph
from onerank.ir.among import among
from onerank.ir.counted_work import is_counted
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]


def retarget(
    graph: Graph,
    target: Gpu,
    model: CostModel,
    source: str | None = None,
    what_if: WhatIf = AS_USUAL,
    *,
    databases: Sequence[str | Path] = (),
) -> Graph:
    """Return the graph with compute nodes re-costed for `target`, characterised on the way.

    Where the model has intervals, every predicted node and the step get one, see `intervals`.

    Kernels, memsets and copies inside the device get new durations (evidence SCALED; CALIBRATED for
    a target on which a large product and the memory were measured; LOOKED_UP and INTERPOLATED
    where the kernel databases tell, see `lookup`). As measured stay: copies that
    cross the host's link, which no description holds; host operators; all communication, which a
    network simulator times. Nodes of another tool's graph that have no duration keep none. Start
    times stay as measured too: after a re-costing they tell the order, and the edges tell when. For
    the source itself as target every duration stays, evidence MEASURED, but for what `what_if`
    changes. With figures of the target set (`with_figures`), what was measured or looked up on it
    is taken times what the model says with them over what it says without (EXTRAPOLATED). A CPU
    capture has no GPU times to scale: its operators are costed by the model's `alone` instead, see
    `cpu_capture.to_gpu`. A generator's workload has counts alone, see `counted`.

    Raises:
        AnnotateError: the graph was re-costed before, has no GPU compute, or its device is not
            known; what `what_if` asks for cannot be; or a database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
        TargetError: `source` names no GPU description.
    """
    check_measured(graph)
    errors = shipped() if model.has_intervals else None
    if graph.job.device.runs_operators:
        check_capture_on_cpu(source, what_if)
        library = library_for(model, databases, (None, target), graph)
        graph = _resized(graph, what_if)
        return to_gpu(graph, target, model.alone, errors, what_if.dtype, library=library)
    if is_counted(graph):
        if source is not None or what_if != AS_USUAL or databases:
            raise AnnotateError(
                "the trace's nodes have counts of work, no times and no shapes, so there is "
                "nothing to scale or to change; give `--target` alone"
            )
        return counted_to_gpu(graph, target)
    origin = source_gpu(graph, source)
    found = characters(graph)
    if len(graph) and not len(found.index):
        raise AnnotateError(
            f"none of the graph's {len(graph)} nodes is GPU compute, so there is nothing to "
            "re-cost; capture the script where there is a GPU, or on a CPU with `capture run`"
        )
    captured, dtype, said = in_half(found, what_if.dtype, (origin, target))
    step = Step.as_captured(graph, captured)
    if what_if.sizes is not None:
        resized, shaped, notes = what_if.sizes.apply(graph)
        there, *_ = in_half(characters(resized), what_if.dtype, (origin, target))
        reshaped = shaped[found.index] & (graph.nodes.duration_ns[found.index] > 0)
        step = Step(graph, captured, resized, there, reshaped)
        said += notes
    what_if = replace(what_if, dtype=dtype)
    altered, others = modelled(step, (origin, target), model, what_if)
    said += units_notes(altered.found, target)
    altered = altered._replace(notes=(*said, *altered.notes))
    doubt, described = Doubt.none(len(found.index)), target.as_described
    measured_on = None if origin == described and what_if.sizes is not None else origin
    library = library_for(model, databases, (measured_on, target), graph)
    if library is not None and errors is not None:
        before = altered
        if target != described:
            as_typed = replace(what_if, dtype=None)  # in another type nothing is looked up
            before, _ = modelled(step, (origin, described), model, as_typed)
        basis = Basis(library, origin, described, model.alone, errors)
        where = _may_be_looked_up(altered, what_if)
        best = _looked_up(step, before, basis, where)
        told, doubt = (best.moved_ns, best.rules), best.doubt
        moved, rules, others = with_others(told, before.moved_ns, altered.predicted, others)
        notes = (*altered.notes, *best.notes)
        altered = altered._replace(moved_ns=moved, rules=rules, notes=notes)
    altered = _without_time(step.resized, altered)
    altered = altered._replace(notes=(*altered.notes, *others_note(target, altered.rules)))
    return _rewritten(step, altered, (doubt, others), (origin, target), model)


def _looked_up(step: Step, made: Altered, basis: Basis, where: Mask) -> Best:
    """Return a model's predictions with those of the kernel database in place of weaker ones.

    Args:
        step: what was measured.
        made: what the model says of it.
        basis: rows, GPUs, and the model.
        where: nodes that may be looked up, bool[n].
    """
    best = Best(*made.predicted, Doubt.none(len(where)), ())
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


def _may_be_looked_up(altered: Altered, what_if: WhatIf) -> Mask:
    """Return which nodes are predicted in the type and by the kernel that they were captured in."""
    kernels = altered.kernels
    asked = (kernels.attention[:, 0] > 0)[kernels.call] & (what_if.attention != "usual")
    return ~among(altered.rules, [*AS_MEASURED, Rule.RETYPED]) & ~asked


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
    errors: tuple[Doubt, Others],
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
    predicted = ~among(rules, AS_MEASURED)
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
            resized=reshaped & ~among(rules, BY_DATABASE),
            doubt=errors[0],
            others=errors[1],
        )
        for name, values in zip(("low_ns", "high_ns"), ends, strict=True):
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
    """Return what is predicted as columns.

    Args:
        graph: with the durations that were measured.
        made: what is predicted of its compute nodes.
        elsewhere: nodes whose time alone no longer holds: it is of the source, and what ran there.
    """
    nodes, index = graph.nodes, made.found.index
    names = ("duration_ns", "spread_ns", "alone_ns", "low_ns", "high_ns", "evidence")
    columns = {name: getattr(nodes, name).copy() for name in names}
    measured = made.kernels.duration_ns
    factor = np.divide(made.moved_ns, measured, where=measured > 0, out=np.ones(len(measured)))
    columns["duration_ns"][index] = np.rint(made.moved_ns).astype(np.int64)
    columns["spread_ns"][index] = np.rint(nodes.spread_ns[index] * factor)
    columns["alone_ns"][elsewhere] = UNKNOWN
    for name in ("flops", "bytes_read", "bytes_written"):
        columns[name] = getattr(nodes, name).copy()
        columns[name][index] = getattr(made.found, name)
    return columns


def _resized(graph: Graph, what_if: WhatIf) -> Graph:
    """Return a graph that nobody measured at the sizes asked for."""
    if what_if.sizes is None:
        return graph
    made, _, notes = what_if.sizes.apply(graph)
    told = made.job.measurement
    told = msgspec.structs.replace(told, notes=(*told.notes, *notes))
    return replace(made, job=msgspec.structs.replace(made.job, measurement=told))
