"""Turn a CPU capture into the GPU graph it represents, costed from the target's description."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database_set import Library, library_for
from onerank.annotate.kernel_db.interpolate import Basis
from onerank.annotate.kernel_db.node_durations import best_of, evidence_of
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.datasheet import MODEL
from onerank.annotate.models.error_model import Uncertainty
from onerank.annotate.models.features import F64, KernelFeatures
from onerank.annotate.models.intervals import Interval, Others, intervals
from onerank.annotate.models.provenance import BY_DATABASE, BY_TILES, Rule
from onerank.annotate.op_costs.node_costs import OpCosts, characters, compute_mask
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.change_dtype import in_half, retyped, units_notes, with_operands
from onerank.annotate.passes.pass_config import PassOptions
from onerank.annotate.passes.remove_nodes import contract, one_per_pair
from onerank.annotate.passes.swap_kernels import attention_alone
from onerank.annotate.recost.bookkeeping import details_of, job_for, memory_notes
from onerank.annotate.recost.predict import others_note, with_others
from onerank.ir import UNKNOWN, Annotation, Edges, Evidence, Graph, Kind, Nodes, Reason
from onerank.ir.arrays import membership_mask
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]

U8 = npt.NDArray[np.uint8]

Mask = npt.NDArray[np.bool_]


def as_kernels(nodes: Nodes, index: I64) -> Nodes:
    """Return a copy with the nodes at `index` turned into kernels of stream 0."""
    changed = {
        "kind": Kind.KERNEL,
        "stream": 0,
        "thread": UNKNOWN,
        "evidence": Evidence.DATASHEET,
        "duration_ns": 0,
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
    """Return the graph of the nodes that stay, and where each of all is among them, int64[n].

    Args:
        graph: the CPU capture.
        nodes: its nodes, the kernels with their durations; their start times are set.
        kernels: which nodes are kernels now.
        dropped: which nodes go, bool[n].
    """
    order = _program_order(graph)
    order = order[~dropped[order]]
    kernel = np.zeros(len(graph), dtype=bool)
    kernel[kernels] = True
    laid = order[kernel[order] | graph.communication[order]]
    nodes.start_ns[laid] = _end_to_end(nodes.start_ns[laid], nodes.duration_ns[laid])
    source, waiter, reason = _with_stream(
        *contract(graph.edges, dropped), order[kernel[order]], kernel
    )
    kept, place = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    edges = Edges.from_pairs(len(kept), place[source], place[waiter], reason)
    return replace(graph, nodes=nodes.take(kept), edges=edges), place


def _program_order(graph: Graph) -> I64:
    """Return the nodes by start time, or by dependency where times contradict the edges."""
    order = np.argsort(graph.nodes.start_ns, kind="stable").astype(np.int64)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
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
    replaced = (reason == Reason.PROGRAM_ORDER) & kernel[source] & kernel[waiter]
    links = np.full(max(0, len(chain) - 1), Reason.STREAM_ORDER, dtype=np.uint8)
    return one_per_pair(
        np.concatenate([source[~replaced], chain[:-1]]),
        np.concatenate([waiter[~replaced], chain[1:]]),
        np.concatenate([reason[~replaced], links]),
    )


class _Asked(NamedTuple):
    """The work of the operators on the GPU.

    Attributes:
        graph: with operands in another dtype, if one is requested.
        found: work of each of n operators, in that dtype.
        typed: whether its operands have a known dtype, so that it may be looked up, bool[n].
        gone: whether it launches nothing, bool[n].
        notes: statements on the quality of the result.
    """

    graph: Graph
    found: OpCosts
    typed: Mask
    gone: Mask
    notes: tuple[str, ...]


class _Predicted(NamedTuple):
    """The durations of n operators on the GPU.

    Attributes:
        kernels: features for the cost models.
        moved_ns: durations, float64[n].
        rules: a `Rule` for each, uint8[n].
        doubt: uncertainty of look-ups.
        others: effect of overridden figures on look-ups.
        notes: statements on the quality of the result.
    """

    kernels: KernelFeatures
    moved_ns: F64
    rules: U8
    doubt: Uncertainty
    others: Others
    notes: tuple[str, ...]


def to_gpu(
    graph: Graph,
    target: Gpu,
    model: CostModel,
    passes: PassOptions,
    *,
    databases: Sequence[str | Path] = (),
) -> Graph:
    """Return the graph of the kernels that a CPU capture's operators would launch on `target`.

    Every operator becomes one KERNEL of stream 0. STREAM_ORDER edges in program order replace the
    PROGRAM_ORDER edges among operators. Its duration is the model's prediction for unmeasured
    kernels (evidence DATASHEET). The order that ties operators and communication together stays.
    Start times are laid out end to end, communication included. Operators that launch nothing on a
    GPU (views, allocation, waits for batches, calls that issue communication) are removed and
    counted.

    This is the weakest evidence: one kernel per operator, the operators PyTorch picked for a CPU,
    and its dtypes. float32 GEMMs run at the float32 rate, as TF32 is off by default. If another
    dtype is requested, GEMMs run in it (see `retyped`). Operators with rows in the kernel
    databases, in that dtype, take the measured time (evidence LOOKED_UP and INTERPOLATED).

    Raises:
        AnnotateError: no operator has shapes, a requested pass is impossible on the target, or a
            database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    library = library_for(model, databases, (None, target), graph)
    graph = _resized(graph, passes)
    asked = _asked(graph, target, passes.dtype)
    predicted = _predicted(graph, asked, target, model, library)
    times = predicted.moved_ns, predicted.rules
    moved, told = attention_alone(predicted.kernels, times, target, model, passes.attention)
    predicted = predicted._replace(moved_ns=moved, notes=(*predicted.notes, *told))
    return _rewritten(graph, asked, predicted, target, model)


def _resized(graph: Graph, passes: PassOptions) -> Graph:
    """Return the graph at the requested sizes."""
    if passes.sizes is None:
        return graph
    made, _, notes = passes.sizes.apply(graph)
    told = made.job.measurement
    told = msgspec.structs.replace(told, notes=(*told.notes, *notes))
    return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _asked(graph: Graph, target: Gpu, dtype: str | None) -> _Asked:
    """Return what the operators do on `target` with products in `dtype`; None: as captured."""
    found = characters(graph)
    _check_shapes(found)
    typed = np.ones(len(found.index), dtype=bool)
    found, dtype, notes = in_half(found, dtype, (None, target))
    if dtype is not None:
        found, changed, told = retyped(graph, found, dtype, target)
        notes = (*notes, told)
        graph, told_apart = with_operands(graph, found.index[changed], dtype)
        typed = ~changed | told_apart
    gone = found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    return _Asked(graph, found, typed, gone, (*notes, *units_notes(found, target)))


def _predicted(
    graph: Graph, asked: _Asked, target: Gpu, model: CostModel, library: Library | None
) -> _Predicted:
    """Return the operators' durations: from the kernel databases, else from the model."""
    kernels = KernelFeatures.of(graph, asked.found)
    moved, rules = model.alone(kernels, target)
    rules = np.where(asked.gone, np.uint8(Rule.DROPPED), rules)
    doubt, others, notes = Uncertainty.none(len(moved)), Others.none(rules), tuple[str, ...]()
    if library is not None and model.has_intervals:
        described = target.as_described
        predicted = before = moved, rules
        if target != described:
            before = model.alone(kernels, described)[0], rules
        basis = Basis(library, None, described, model.alone, shipped())
        where = ~asked.gone & asked.typed
        best = best_of(asked.graph, asked.found, kernels, before, basis, where=where)
        moved, rules, others = with_others((best.moved_ns, best.rules), before[0], predicted)
        doubt, notes = best.doubt, best.notes
    return _Predicted(kernels, moved, rules, doubt, others, (*notes, *others_note(target, rules)))


def _rewritten(
    graph: Graph, asked: _Asked, predicted: _Predicted, target: Gpu, model: CostModel
) -> Graph:
    """Return the graph of the kernels, with the predictions in its columns and its books."""
    found, gone, rules = asked.found, asked.gone, predicted.rules
    nodes = as_kernels(graph.nodes, found.index)
    nodes.duration_ns[found.index] = np.rint(predicted.moved_ns).astype(np.int64)
    nodes.evidence[found.index] = evidence_of(rules, nodes.evidence[found.index])
    interval: Interval | None = None
    if model.has_intervals:
        ends, interval = intervals(
            predicted.kernels,
            (np.where(gone, 0, predicted.moved_ns), rules),
            None,
            target,
            shipped(),
            doubt=predicted.doubt,
            others=predicted.others,
        )
        for name, values in zip(("p10_ns", "p90_ns"), ends, strict=True):
            getattr(nodes, name)[found.index] = np.rint(values)
    for name in ("flops", "bytes_read", "bytes_written"):
        getattr(nodes, name)[found.index] = getattr(found, name)
    dropped = graph.mask(Kind.HOST_OP) & ~compute_mask(graph)
    dropped[found.index[gone]] = True
    stay = found.only(~gone)
    made, place = on_one_stream(graph, nodes, stay.index, dropped)
    details = details_of(made, replace(stay, index=place[stay.index]), rules, interval)
    details["dropped"] = _count_names(graph, np.flatnonzero(dropped))
    annotation = Annotation(target.name, MODEL, graph.job.device.name or "cpu", details)
    said = (*asked.notes, *predicted.notes)
    notes = (_note(target, rules), *memory_notes(graph, target), *said)
    return replace(made, job=job_for(graph.job, target, annotation, *notes))


def _check_shapes(found: OpCosts) -> None:
    """Refuse a graph whose operators have no known work: launch floors alone say nothing.

    Raises:
        AnnotateError: no operator has known work.
    """
    works = ~found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    untold = (found.flops == UNKNOWN) & (found.bytes_read == UNKNOWN)
    if works.any() and untold[works].all():
        raise AnnotateError(
            f"none of the {int(works.sum())} operators has shapes, so what they would take on "
            "another device is not known; record them with record_shapes=True, or "
            "capture the script with `capture run`",
            code="recost-no-shapes",
        )


def _note(target: Gpu, rules: U8) -> str:
    """Return a sentence on how the operators of a CPU capture were costed."""
    tiles = int(membership_mask(rules, (*BY_TILES, Rule.PARTS)).sum())
    rows = int(membership_mask(rules, BY_DATABASE).sum())
    rest = len(rules) - tiles - rows - int((rules == Rule.DROPPED).sum())
    ways = (
        (tiles, "products, convolutions and attention by their tiles"),
        (rows, "by calls measured there"),
        (rest, "by launch floor and roofline"),
    )
    told = ", ".join(f"{count} {how}" for count, how in ways if count)
    return (
        "No GPU time was measured: kernel durations are worked out for "
        f"{target.name} from each operator's shapes, the weakest evidence: {told}."
    )


def _count_names(graph: Graph, index: I64) -> dict[str, int]:
    """Return how often each operator occurs at `index`, the most frequent first."""
    ops, counts = np.unique(graph.nodes.op[index], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {graph.strings[int(ops[i])]: int(counts[i]) for i in order}
