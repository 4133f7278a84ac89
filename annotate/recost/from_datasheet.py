"""Cost a graph that no GPU measured: a CPU capture, or a generated workload with work counts."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database import Library, library_for
from onerank.annotate.kernel_db.look_up import Basis
from onerank.annotate.kernel_db.node_durations import best_of, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import Uncertainty
from onerank.annotate.models.features import KernelFeatures, Timing
from onerank.annotate.models.intervals import Interval, OverrideEffect, intervals
from onerank.annotate.models.kernel_gaps import gap_after_kernels_ns
from onerank.annotate.models.prediction_terms import (
    BY_DATABASE,
    BY_TILES,
    PredictedDurations,
    Rule,
    TermRecord,
    quantity,
    total,
)
from onerank.annotate.models.roofline import MODEL
from onerank.annotate.op_costs.node_costs import OpCosts, compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.change_dtype import (
    change_dtype,
    keeps_times_in_float16,
    missing_units_notes,
    run_in_float16,
    with_operands,
)
from onerank.annotate.passes.operators_to_kernels import further_launches_ns
from onerank.annotate.passes.pass_options import PassOptions
from onerank.annotate.passes.swap_kernels import check_resolves
from onerank.annotate.passes.unmeasured_attention import (
    names_no_kernel,
    swap_unmeasured_attention,
)
from onerank.annotate.recost.predict_nodes import (
    PredictionRequest,
    apply_overrides,
    details_of,
    job_for,
    override_notes,
    record_overrides,
    target_notes,
)
from onerank.ir import UNKNOWN, Annotation, Edges, Evidence, Graph, Kind, Nodes, Reason
from onerank.ir.arrays import F64, I64, U8, Mask, membership_mask
from onerank.ir.chakra.third_party_traces import MOST, counts_elements
from onerank.ir.dtypes import ITEM_BYTES
from onerank.ir.edges import edges_without, one_per_pair
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note


def as_kernels(nodes: Nodes, index: I64) -> Nodes:
    """Return a copy with the nodes at `index` turned into kernels; of stream 0 by default."""
    changed = {
        "kind": Kind.KERNEL,
        "stream": np.maximum(nodes.stream[index], 0),
        "thread": UNKNOWN,
        "evidence": Evidence.DATASHEET,
        "duration_ns": 0,
        "blocked_ns": 0,
        "flops": UNKNOWN,
        "bytes_read": UNKNOWN,
        "bytes_written": UNKNOWN,
    }
    columns = {
        name: getattr(nodes, name).copy() for name in (*changed, "start_ns", "p10_ns", "p90_ns")
    }
    for name, value in changed.items():
        columns[name][index] = value
    return replace(nodes, **columns)


def on_one_stream(graph: Graph, nodes: Nodes, kernels: I64, dropped: Mask) -> tuple[Graph, I64]:
    """Return the graph of the kept nodes, and the new index of every old node, int64[n].

    Args:
        graph: the CPU capture.
        nodes: its nodes, kernels with their durations; this function sets their start times.
        kernels: indices of the nodes that are kernels now.
        dropped: nodes to remove, bool[n].
    """
    # Program order is what a single stream would run, so start times follow it end to end.
    order = _program_order(graph)
    order = order[~dropped[order]]
    kernel = np.zeros(len(graph), dtype=bool)
    kernel[kernels] = True
    device_order = order[kernel[order] | graph.communication[order]]
    nodes.start_ns[device_order] = _end_to_end(
        nodes.start_ns[device_order], nodes.duration_ns[device_order]
    )
    on_stream = graph.nodes.stream != UNKNOWN
    if (graph.nodes.stream[kernels] > 0).any():
        # A capture without a device that used several streams has their order and waits.
        edges = graph.edges
        issued = edges.reason == Reason.PROGRAM_ORDER
        issued &= on_stream[edges.source] & on_stream[edges.target]
        ordered = Edges.from_pairs(
            len(graph), edges.source[~issued], edges.target[~issued], edges.reason[~issued]
        )
        source, waiter, reason = edges_without(ordered, dropped)
    else:
        # Edges through dropped nodes are contracted first, so that the chain has no gaps.
        source, waiter, reason = _with_stream(
            *edges_without(graph.edges, dropped), order[kernel[order]], kernel
        )
    kept, new_index = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    edges = Edges.from_pairs(len(kept), new_index[source], new_index[waiter], reason)
    return replace(graph, nodes=nodes.take(kept), edges=edges), new_index


def _program_order(graph: Graph) -> I64:
    """Return the nodes by start time; in topological order if start times contradict the edges."""
    order = np.argsort(graph.nodes.start_ns, kind="stable").astype(np.int64)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    # Start times of other tools' traces may be missing or equal.
    if (rank[graph.edges.source] < rank[graph.edges.target]).all():
        return order
    return graph.topological_order()


def _end_to_end(start: I64, duration: I64) -> I64:
    """Return start times of nodes in order, each when the one before ends."""
    return start.min(initial=np.iinfo(np.int64).max) + np.cumsum(duration) - duration


def _with_stream(
    source: I64, waiter: I64, reason: U8, chain: I64, kernel: Mask
) -> tuple[I64, I64, U8]:
    """Return the edges with the kernels' program order replaced by a chain of their stream."""
    # Only among kernels: the order between operators and communication stays.
    replaced = (reason == Reason.PROGRAM_ORDER) & kernel[source] & kernel[waiter]
    links = np.full(max(0, len(chain) - 1), Reason.STREAM_ORDER, dtype=np.uint8)
    return one_per_pair(
        np.concatenate([source[~replaced], chain[:-1]]),
        np.concatenate([waiter[~replaced], chain[1:]]),
        np.concatenate([reason[~replaced], links]),
    )


class _OperatorWork(NamedTuple):
    """The work of the operators on the GPU.

    Attributes:
        graph: with operands in another dtype, if one is requested.
        costs: work of each of n operators, in that dtype.
        has_dtype: whether its operands have a known dtype, so that it may be looked up, bool[n].
        removed: whether it launches no kernel, bool[n].
        notes: statements on the quality of the result.
    """

    graph: Graph
    costs: OpCosts
    has_dtype: Mask
    removed: Mask
    notes: tuple[Note, ...]


class _OperatorDurations(NamedTuple):
    """The durations of n operators on the GPU.

    Attributes:
        kernels: features for the cost models.
        durations: of the operators.
        uncertainty: uncertainty of look-ups.
        overrides: effect of overridden figures on look-ups.
        notes: statements on the quality of the result.
    """

    kernels: KernelFeatures
    durations: PredictedDurations
    uncertainty: Uncertainty
    overrides: OverrideEffect
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeasuredRequest(PredictionRequest):
    """The inputs for a CPU capture.

    Attributes:
        timing: what the durations are of; other than `STEP` for calls without a step.
    """

    timing: Timing = Timing.STEP


def recost_cpu_capture(graph: Graph, request: UnmeasuredRequest) -> Graph:
    """Return the graph of the kernels that a CPU capture's operators would launch on a GPU.

    Every operator becomes one KERNEL of stream 0, which `OperatorsToKernels` divides later.
    STREAM_ORDER edges in program order replace the PROGRAM_ORDER edges among operators. A kernel's
    duration is the model's prediction for unmeasured kernels (evidence DATASHEET), with the time of
    its further launches. The order between operators and communication stays.
    Start times are laid out end to end, communication included. Operators that launch nothing on a
    GPU (views, allocation, waits for batches, calls that issue communication) are removed and
    counted.

    This is the weakest evidence: the operators PyTorch picked for a CPU, and its dtypes. float32
    GEMMs run at the float32 rate, as TF32 is off by default. If another dtype is requested, GEMMs
    run in it (see `change_dtype`). Operators with rows in the kernel databases, in that dtype, take
    the measured time (evidence LOOKED_UP and INTERPOLATED).

    Raises:
        AnnotateError: no operator has shapes, a requested pass is impossible on the target, or a
            database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    target = request.target
    library = library_for(request.model, request.databases, (None, target), graph)
    graph = _resize(graph, request.passes)
    work = _operator_work(graph, target, request.passes.dtype)
    predicted = _predict(graph, work, request, library)
    predicted = _swap_attention(graph, work, predicted, request)
    predicted = predicted._replace(durations=_add_overheads(work, predicted.durations, request))
    return _write_prediction(graph, work, predicted, request)


def _add_overheads(
    work: _OperatorWork, predicted: PredictedDurations, request: UnmeasuredRequest
) -> PredictedDurations:
    """Return the durations with the operators' further launches, and of calls with their gaps."""
    target, (predicted_ns, rules) = request.target, predicted
    launches_ns = further_launches_ns(
        work.graph, work.costs, predicted_ns, target, request.passes.attention
    )
    # A looked-up time is of the whole call and includes all its launches.
    is_whole = membership_mask(rules, (*BY_DATABASE, Rule.DROPPED))
    launches_ns = np.where(is_whole, 0.0, launches_ns)
    predicted_ns = predicted_ns + launches_ns
    note = f"further launches on {target.name}"
    _record_added(request.record, "launches", launches_ns, note)
    if request.timing is Timing.CALL:
        gaps_ns = gap_after_kernels_ns(rules, target)
        predicted_ns = predicted_ns + gaps_ns
        _record_added(request.record, "gap", gaps_ns)
    return PredictedDurations(predicted_ns, rules)


def _record_added(record: TermRecord | None, name: str, added_ns: F64, note: str = "") -> None:
    """Add a time, float64[n], to the recorded terms of the operators that it lengthens."""
    if record is not None:
        record.update_where(
            added_ns > 0,
            lambda i, root: root and total(root, quantity(name, added_ns[i], note=note)),
        )


def _resize(graph: Graph, passes: PassOptions) -> Graph:
    """Return the graph at the requested sizes."""
    if passes.sizes is None:
        return graph
    resized, _, notes = passes.sizes.apply(graph)
    measurement = resized.job.measurement
    measurement = msgspec.structs.replace(measurement, notes=(*measurement.notes, *notes))
    return replace(resized, job=msgspec.structs.replace(resized.job, measurement=measurement))


def _operator_work(graph: Graph, target: Gpu, dtype: str | None) -> _OperatorWork:
    """Return the work of the operators on `target` with GEMMs in `dtype`; None: as captured."""
    costs = op_costs_of(graph)
    _check_shapes(costs)
    has_dtype = np.ones(len(costs.index), dtype=bool)
    notes: tuple[Note, ...] = ()
    if keeps_times_in_float16(costs, dtype, None):
        costs, note = run_in_float16(costs, (None, target))
        notes = (note,)
    elif dtype is not None:
        costs, changed, note = change_dtype(graph, costs, dtype, target)
        notes = (note,)
        graph, has_new_dtype = with_operands(graph, costs.index[changed], dtype)
        has_dtype = ~changed | has_new_dtype
    removed = costs.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    return _OperatorWork(
        graph, costs, has_dtype, removed, (*notes, *missing_units_notes(costs, target))
    )


def _predict(
    graph: Graph, work: _OperatorWork, request: UnmeasuredRequest, library: Library | None
) -> _OperatorDurations:
    """Return the operators' durations: from the kernel databases, else from the model."""
    target, model = request.target, request.model
    kernels = replace(KernelFeatures.of(graph, work.costs), timing=request.timing)
    predicted_ns, rules = model.from_description(kernels, target, record=request.record)
    rules = np.where(work.removed, np.uint8(Rule.DROPPED), rules)
    uncertainty, overrides = Uncertainty.none(len(rules)), OverrideEffect.none(rules)
    durations = PredictedDurations(predicted_ns, rules)
    predicted = _OperatorDurations(kernels, durations, uncertainty, overrides, ())
    # The choice between model and database compares intervals, so the model must have them.
    if library is not None and model.has_intervals:
        predicted = _look_up(work, predicted, request, library)
    notes = (*predicted.notes, *override_notes(target, predicted.durations.rules))
    return predicted._replace(notes=notes)


def _look_up(
    work: _OperatorWork, modelled: _OperatorDurations, request: UnmeasuredRequest, library: Library
) -> _OperatorDurations:
    """Return the model's durations, or those of database rows where these are more certain.

    Rows were measured on the target as described: they are looked up for that, and the model's
    ratio with and without overrides is applied afterwards.
    """
    target, model, record = request.target, request.model, request.record
    target_as_described, kernels = target.as_described, modelled.kernels
    without_overrides = modelled.durations
    terms_with_overrides = {} if record is None else dict(record.roots)
    described_record = None
    if target != target_as_described:
        described_record = None if record is None else TermRecord(record.rows)
        described = model.from_description(kernels, target_as_described, record=described_record)
        without_overrides = modelled.durations._replace(duration_ns=described.duration_ns)
    basis = Basis(library, None, target_as_described, model.from_description, shipped())
    where = ~work.removed & work.has_dtype
    best = best_of(
        work.graph, work.costs, kernels, without_overrides, basis, where=where, record=record
    )
    if record is not None and described_record is not None:
        roots, rules = described_record.roots, best.durations.rules
        record_overrides(record, terms_with_overrides, roots, rules, target)
    durations, overrides = apply_overrides(
        best.durations, without_overrides.duration_ns, modelled.durations
    )
    return _OperatorDurations(kernels, durations, best.uncertainty, overrides, best.notes)


def _swap_attention(
    graph: Graph, work: _OperatorWork, predicted: _OperatorDurations, request: UnmeasuredRequest
) -> _OperatorDurations:
    """Return the durations with the attention kernels that are requested or that operators name.

    Raises:
        AnnotateError: the kernel does not run on the target, or the model does not distinguish
            attention kernels.
    """
    requested = request.passes.attention
    if not names_no_kernel(requested):
        check_resolves(request.model, requested)
    elif not request.model.resolves_kernels:
        return predicted
    operators = [graph.strings[code] for code in graph.nodes.op[work.costs.index].tolist()]
    durations, notes = swap_unmeasured_attention(
        predicted.kernels,
        predicted.durations,
        request.target,
        requested,
        operators,
        record=request.record,
    )
    return predicted._replace(durations=durations, notes=(*predicted.notes, *notes))


def _write_prediction(
    graph: Graph, work: _OperatorWork, predicted: _OperatorDurations, request: UnmeasuredRequest
) -> Graph:
    """Return the graph of the kernels, with the predictions in its columns and its job."""
    target, record = request.target, request.record
    costs, removed = work.costs, work.removed
    predicted_ns, rules = predicted.durations
    if record is not None:
        record.rules = {row: Rule(int(rules[row])) for row in record.rows.tolist()}
    nodes = as_kernels(graph.nodes, costs.index)
    nodes.duration_ns[costs.index] = np.rint(predicted_ns).astype(np.int64)
    nodes.evidence[costs.index] = evidence_of(rules, nodes.evidence[costs.index])
    interval: Interval | None = None
    if request.model.has_intervals:
        ends, interval = intervals(
            predicted.kernels,
            PredictedDurations(np.where(removed, 0, predicted_ns), rules),
            None,
            target,
            shipped(),
            uncertainty=predicted.uncertainty,
            overrides=predicted.overrides,
            record=record,
        )
        for name, values in zip(("p10_ns", "p90_ns"), ends, strict=True):
            getattr(nodes, name)[costs.index] = np.rint(values)
    for name in ("flops", "bytes_read", "bytes_written"):
        getattr(nodes, name)[costs.index] = getattr(costs, name)
    # Host operators that are no compute (annotations, autograd nodes) exist on no GPU stream.
    dropped = graph.mask(Kind.HOST_OP) & ~compute_mask(graph)
    dropped[costs.index[removed]] = True
    kept_costs = costs.only(~removed)
    annotated, new_index = on_one_stream(graph, nodes, kept_costs.index, dropped)
    details = details_of(
        annotated, replace(kept_costs, index=new_index[kept_costs.index]), rules, interval
    )
    details["dropped"] = _count_names(graph, np.flatnonzero(dropped))
    annotation = Annotation(target.name, MODEL, graph.job.device.name or "cpu", details)
    pass_notes = (*work.notes, *predicted.notes)
    notes = (_note(target, rules), *target_notes(graph, target, rules), *pass_notes)
    return replace(annotated, job=job_for(graph.job, target, annotation, *notes))


def _check_shapes(costs: OpCosts) -> None:
    """Raise if no operator has known work: launch floors without work would be no prediction.

    Raises:
        AnnotateError: no operator has known work.
    """
    has_work = ~costs.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    unknown = (costs.flops == UNKNOWN) & (costs.bytes_read == UNKNOWN)
    if has_work.any() and unknown[has_work].all():
        raise AnnotateError(
            f"none of the {int(has_work.sum())} operators has recorded shapes, which predict its "
            "time\n"
            "  record them with record_shapes=True, or capture the script with `capture run`",
            code="recost-no-shapes",
        )


def _note(target: Gpu, rules: U8) -> Note:
    """Return a note on how the operators of a CPU capture were costed."""
    tiles = int(membership_mask(rules, (*BY_TILES, Rule.PARTS)).sum())
    rows = int(membership_mask(rules, BY_DATABASE).sum())
    rest = len(rules) - tiles - rows - int((rules == Rule.DROPPED).sum())
    methods = (
        (tiles, "GEMMs, convolutions and attention by their tiles"),
        (rows, "by calls measured on it"),
        (rest, "by launch floor and roofline"),
    )
    counts = ", ".join(f"{count} {method}" for count, method in methods if count)
    return Note(
        "No GPU time was measured: kernel durations are predicted for "
        f"{target.name} from each operator's shapes, the weakest evidence: {counts}.",
        code="recost-from-shapes",
    )


def _count_names(graph: Graph, index: I64) -> dict[str, int]:
    """Return how often each operator occurs at `index`, the most frequent first."""
    ops, counts = np.unique(graph.nodes.op[index], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {graph.strings[int(ops[i])]: int(counts[i]) for i in order}


_DTYPES = ("bfloat16", "float16", "float32")


def recost_counts(graph: Graph, target: Gpu) -> Graph:
    """Return the graph with durations from work counts: launch floor and roofline.

    The rate is that of sustained bf16 GEMMs, or of the first of fp16 and fp32 that the target has,
    since a count names neither dtype nor operator. Sizes in elements are elements of that dtype,
    also for communication. Nodes without a count keep a duration of 0; there are no intervals.

    Raises:
        AnnotateError: the target's description has no such rate, or a size is out of range.
    """
    rates = {dtype: rate for dtype in _DTYPES if (rate := target.tensor_flops_per_s(dtype))}
    if not rates:
        raise AnnotateError(
            f"the description of {target.name} has no tensor rate in {', '.join(_DTYPES)}, and the "
            "trace's counts need one\n  add it to the description",
            code="recost-counts-no-rate",
        )
    # The first in the order of `_DTYPES`: training runs in bf16 where a GPU has units for it.
    dtype, rate = next(iter(rates.items()))
    elements = counts_elements(graph)
    if elements:
        graph = _in_bytes(graph, ITEM_BYTES[dtype])
    nodes = graph.nodes
    counted = graph.gpu_compute & (nodes.flops != UNKNOWN)
    compute = nodes.flops[counted] / rate
    memory = (nodes.bytes_read + nodes.bytes_written)[counted] / target.bandwidth_bytes_per_s
    columns = {"duration_ns": nodes.duration_ns.copy(), "evidence": nodes.evidence.copy()}
    # Nanoseconds of the floor plus seconds of the roofline.
    predicted_ns = target.launch_floor_ns + 1e9 * np.maximum(compute, memory)
    columns["duration_ns"][counted] = np.rint(predicted_ns).astype(np.int64)
    columns["evidence"][counted] = Evidence.DATASHEET
    timed = graph.with_columns(**columns)

    costs = op_costs_of(graph)
    counted_columns = {name: getattr(nodes, name)[costs.index] for name in ("flops", "bytes_read")}
    costs = replace(costs, bytes_written=nodes.bytes_written[costs.index], **counted_columns)
    rules = np.full(len(costs.index), Rule.NO_DURATION, dtype=np.uint8)
    rules[counted[costs.index]] = np.where(compute > memory, Rule.COMPUTE, Rule.MEMORY)
    annotation = Annotation(target.name, MODEL, "no GPU", details_of(timed, costs, rules))
    unit = f"elements of {ITEM_BYTES[dtype]} bytes, also for communication"
    note = Note(
        f"No time was measured: {int(counted.sum())} durations are predicted for {target.name} "
        f"from the num_ops and tensor_size ({unit if elements else 'bytes'}) that the trace's "
        f"generator counted, at the rate of {dtype} GEMMs, the weakest evidence; there are no "
        "intervals.",
        code="recost-from-counts",
    )
    return replace(timed, job=job_for(graph.job, target, annotation, note))


def _in_bytes(graph: Graph, item_bytes: int) -> Graph:
    """Return the graph with sizes converted from elements to bytes.

    Raises:
        AnnotateError: a size in bytes would not fit int64.
    """
    columns: dict[str, I64] = {}
    for name in ("bytes_read", "bytes_written", "comm_bytes"):
        size = getattr(graph.nodes, name)
        if size.max(initial=0) > MOST:
            node = graph.node(int(size.argmax()))
            raise AnnotateError(
                f"node {node.id} ({node.name!r}) has {name} of {size.max()} elements: expected "
                f"at most {MOST}",
                code="recost-counts-too-large",
            )
        columns[name] = np.where(size == UNKNOWN, UNKNOWN, item_bytes * size)
    return graph.with_columns(**columns)
