"""A CPU capture becomes the GPU graph it stands for, costed from the target's description."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.lookup.library import Library
from onerank.annotate.lookup.look_up import Basis
from onerank.annotate.lookup.nodes import best_of, evidence_of
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.datasheet import MODEL
from onerank.annotate.models.error_kinds import Doubt
from onerank.annotate.models.intervals import Interval, Others, intervals
from onerank.annotate.models.kernels import U8, Kernels
from onerank.annotate.models.model import Alone
from onerank.annotate.models.rules import BY_DATABASE, BY_TILES, Rule
from onerank.annotate.recosting.books import details_of, job_for, memory_notes
from onerank.annotate.recosting.other_figures import others_note, with_others
from onerank.annotate.what_ifs.contract import contract, one_per_pair
from onerank.annotate.what_ifs.data_types import in_half, retyped, units_notes, with_operands
from onerank.annotate.work.characters import Characters, characters, compute_mask
from onerank.annotate.work.classes import OpClass
from onerank.ir import UNKNOWN, Annotation, Edges, Evidence, Graph, Kind, Nodes, Reason
from onerank.ir.among import among
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def to_gpu(
    graph: Graph,
    target: Gpu,
    alone: Alone,
    errors: Coefficients | None = None,
    dtype: str | None = None,
    *,
    library: Library | None = None,
) -> Graph:
    """Return the graph of the kernels that a CPU capture's operators would launch on `target`.

    Every operator becomes one KERNEL of stream 0, chained by STREAM_ORDER in program order in
    place of the PROGRAM_ORDER among operators, and lasts as `alone` says (evidence DATASHEET).
    The order that ties operators and communication together stays. Start times are laid out end
    to end, communication included. Operators that launch nothing on a GPU (views, allocation,
    waits for batches, calls that ask for communication) are taken out and counted.

    This is the weakest evidence: one kernel an operator, the operators PyTorch picked for a CPU,
    and its data types; float32 products run at the float32 rate, as TF32 is off by default. With
    `dtype` products run in that type, see `data_types.retyped`. Operators of which `library` tells,
    in that type, last as measured there (evidence LOOKED_UP and INTERPOLATED), see `lookup`.

    Raises:
        AnnotateError: no operator has shapes, or no product can run in `dtype` on the target.
    """
    found = characters(graph)
    _check_shapes(found)
    said: tuple[str, ...] = ()
    asked, typed = graph, np.ones(len(found.index), dtype=bool)
    found, dtype, halved = in_half(found, dtype, (None, target))
    if dtype is not None:
        found, changed, told = retyped(graph, found, dtype, target)
        said = (told,)
        asked, told_apart = with_operands(graph, found.index[changed], dtype)
        typed = ~changed | told_apart
    said = (*halved, *said, *units_notes(found, target))
    gone = found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    dropped = np.zeros(len(graph), dtype=bool)
    dropped[found.index[gone]] = True
    dropped |= graph.mask(Kind.HOST_OP) & ~compute_mask(graph)
    kernels = Kernels.of(graph, found)
    moved, rules = alone(kernels, target)
    rules = np.where(gone, np.uint8(Rule.DROPPED), rules)
    doubt, others = Doubt.none(len(moved)), Others.none(rules)
    if library is not None and errors is not None:
        described, where = target.as_described, ~gone & typed
        predicted = before = moved, rules
        if target != described:
            before = alone(kernels, described)[0], rules
        basis = Basis(library, None, described, alone, errors)
        best = best_of(asked, found, kernels, before, basis, where=where)
        moved, rules, others = with_others((best.moved_ns, best.rules), before[0], predicted)
        doubt = best.doubt
        said += best.notes
    said += others_note(target, rules)

    nodes = _as_kernels(graph.nodes, found.index)
    nodes.duration_ns[found.index] = np.rint(moved).astype(np.int64)
    nodes.evidence[found.index] = evidence_of(rules, nodes.evidence[found.index])
    interval: Interval | None = None
    if errors is not None:
        predicted = np.where(gone, 0, moved), rules
        ends, interval = intervals(
            kernels, predicted, None, target, errors, doubt=doubt, others=others
        )
        for name, values in zip(("low_ns", "high_ns"), ends, strict=True):
            getattr(nodes, name)[found.index] = np.rint(values)
    for name in ("flops", "bytes_read", "bytes_written"):
        getattr(nodes, name)[found.index] = getattr(found, name)
    stay = found.only(~gone)
    made, place = _on_one_stream(graph, nodes, stay.index, dropped)
    details = details_of(made, replace(stay, index=place[stay.index]), rules, interval)
    details["dropped"] = _count_names(graph, np.flatnonzero(dropped))
    annotation = Annotation(target.name, MODEL, graph.job.device.name or "cpu", details)
    note = _note(target, rules)
    notes = (note, *memory_notes(graph, target), *said)
    return replace(made, job=job_for(graph.job, target, annotation, *notes))


def _check_shapes(found: Characters) -> None:
    """Refuse operators of none of which the work is known: launch floors alone tell nothing.

    Raises:
        AnnotateError: it is so.
    """
    works = ~found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)
    untold = (found.flops == UNKNOWN) & (found.bytes_read == UNKNOWN)
    if works.any() and untold[works].all():
        raise AnnotateError(
            f"none of the {int(works.sum())} operators has shapes, so what they would take on "
            "another device is not known; record them with record_shapes=True and an execution "
            "trace, or capture the script with `capture run`"
        )


def _on_one_stream(graph: Graph, nodes: Nodes, kernels: I64, dropped: Mask) -> tuple[Graph, I64]:
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


def _note(target: Gpu, rules: U8) -> str:
    """Return a sentence on how the operators of a CPU capture were costed."""
    tiles = int(among(rules, (*BY_TILES, Rule.PARTS)).sum())
    rows = int(among(rules, BY_DATABASE).sum())
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


def _as_kernels(nodes: Nodes, index: I64) -> Nodes:
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
        name: getattr(nodes, name).copy() for name in (*changed, "start_ns", "low_ns", "high_ns")
    }
    for name, value in changed.items():
        columns[name][index] = value
    return replace(nodes, **columns)


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


def _count_names(graph: Graph, index: I64) -> dict[str, int]:
    """Return how often each operator occurs at `index`, the most frequent first."""
    ops, counts = np.unique(graph.nodes.op[index], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {graph.strings[int(ops[i])]: int(counts[i]) for i in order}
