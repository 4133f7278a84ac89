"""What a re-costing changed: time by class of kernel and by evidence, and unknown kernels."""

from dataclasses import dataclass

import numpy as np

from onerank.annotate.models.prediction_terms import by_evidence
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify
from onerank.ir import UNKNOWN, Graph
from onerank.ir.arrays import I64, U8, U64, deduplicate


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Compute nodes of one class.

    Attributes:
        op_class: their class.
        count: how many there are.
        before_ns: their time before re-costing.
        after_ns: their time after re-costing.
        flops: sum of the known FLOPs.
        bytes_read: sum of the known bytes read.
        bytes_written: sum of the known bytes written.
        evidence_ns: time after re-costing by evidence.
    """

    op_class: OpClass
    count: int
    before_ns: int
    after_ns: int
    flops: int
    bytes_read: int
    bytes_written: int
    evidence_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class UnknownKernel:
    """Kernels of one operator and name whose class is unknown or whose work has no formula."""

    op: str
    name: str
    count: int
    before_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class Recosting:
    """A re-costing in figures.

    Attributes:
        target: GPU description that the durations are predicted for.
        model: cost model.
        source: device of the original durations.
        classes: one row per class that occurs, by decreasing time after re-costing.
        before_ns: time of all compute nodes before re-costing, including nodes it removed.
        after_ns: time of all compute nodes after re-costing.
        evidence: number of nodes by evidence of their duration ("measured", "looked_up", "scaled").
        evidence_ns: time after re-costing by evidence.
        rules: number of nodes by the rule that predicted their duration.
        unknown: kernels of unknown class or without formula, by decreasing time before re-costing.
        dropped: removed operators and how often each occurred; only for CPU captures.
        interval: p10 and p90 of the time of all compute nodes in ns; () for models without errors.
    """

    target: str
    model: str
    source: str
    classes: tuple[ClassRow, ...]
    before_ns: int
    after_ns: int
    evidence: dict[str, int]
    evidence_ns: dict[str, int]
    rules: dict[str, int]
    unknown: tuple[UnknownKernel, ...]
    dropped: dict[str, int]
    interval: tuple[int, ...]


def summarise(before: Graph, after: Graph) -> Recosting:
    """Return the changes of the last re-costing, between `before` and `after`.

    Nodes are matched by id, since passes add and remove nodes.
    """
    assert after.job.annotations, "the graph was never re-costed"
    last = after.job.annotations[-1]
    index = np.flatnonzero(compute_mask(after))
    before_ns = _durations_before(before, after.nodes.id[index])
    after_ns = after.nodes.duration_ns[index]
    codes = classify(after, index)
    rows = [
        _class_row(after, op_class, index[codes == code], before_ns[codes == code])
        for code, op_class in enumerate(CLASSES)
        if (codes == code).any()
    ]
    return Recosting(
        target=last.target,
        model=last.model,
        source=last.source,
        classes=tuple(sorted(rows, key=lambda row: -row.after_ns)),
        before_ns=int(before.nodes.duration_ns[compute_mask(before)].sum()),
        after_ns=int(after_ns.sum()),
        evidence=by_evidence(after, index),
        evidence_ns=by_evidence(after, index, after_ns),
        rules=dict(last.details.get("rules", {})),
        unknown=_unknown(after, index, codes, before_ns, after_ns),
        dropped=dict(last.details.get("dropped", {})),
        interval=tuple(last.details.get("interval", ())),
    )


def _durations_before(before: Graph, ids: U64) -> I64:
    """Return the earlier durations of the nodes with these ids; 0 for nodes that did not exist."""
    order = np.argsort(before.nodes.id)
    # An id above all others would be past the end; the comparison below rejects its neighbour.
    position = np.minimum(np.searchsorted(before.nodes.id[order], ids), len(order) - 1)
    existed = before.nodes.id[order[position]] == ids
    return np.where(existed, before.nodes.duration_ns[order[position]], 0)


def _class_row(after: Graph, op_class: OpClass, index: I64, before_ns: I64) -> ClassRow:
    sums = {
        # UNKNOWN is -1 and must not reduce the sum.
        name: int(np.maximum(getattr(after.nodes, name)[index], 0).sum())
        for name in ("flops", "bytes_read", "bytes_written")
    }
    return ClassRow(
        op_class=op_class,
        count=len(index),
        before_ns=int(before_ns.sum()),
        after_ns=int(after.nodes.duration_ns[index].sum()),
        evidence_ns=by_evidence(after, index, after.nodes.duration_ns[index]),
        **sums,
    )


def _unknown(
    after: Graph, index: I64, codes: U8, before_ns: I64, after_ns: I64
) -> tuple[UnknownKernel, ...]:
    """Return the kernels of unknown class or without formula.

    Args:
        after: the re-costed graph.
        index: its compute nodes, int64[n].
        codes: index in `CLASSES` of each, uint8[n].
        before_ns: durations before re-costing, int64[n].
        after_ns: durations after re-costing, int64[n].
    """
    without_model = (codes == CLASSES.index(OpClass.UNKNOWN)) | (
        after.nodes.flops[index] == UNKNOWN
    )
    op, name = after.nodes.op[index][without_model], after.nodes.name[index][without_model]
    first, group = deduplicate([op, name])
    count = np.bincount(group, minlength=len(first))
    sums = [
        np.bincount(group, weights=times[without_model], minlength=len(first)).tolist()
        for times in (before_ns, after_ns)
    ]
    kernels = [
        UnknownKernel(
            after.strings[int(op[row])],
            after.strings[int(name[row])],
            occurrences,
            int(before),
            int(now),
        )
        for row, occurrences, before, now in zip(first, count.tolist(), *sums, strict=True)
    ]
    return tuple(sorted(kernels, key=lambda entry: -entry.before_ns))
