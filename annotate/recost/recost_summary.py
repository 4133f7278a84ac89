"""What a re-costing changed, as data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.annotate.models.provenance import by_evidence
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify
from onerank.annotate.unique_rows import combine
from onerank.ir import UNKNOWN, Graph

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Compute nodes of one class; FLOPs and bytes are sums over those where they are known.

    `evidence_ns` is their time after by its evidence.
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
    """Kernels of one operator and name with no class or no formula."""

    op: str
    name: str
    count: int
    before_ns: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class Recosting:
    """A re-costing in figures.

    Attributes:
        target: GPU description the graph is for now.
        model: cost model.
        source: device of the durations before.
        classes: one row for each class that occurs, the longest time after first.
        before_ns: time of all compute nodes before; those taken out included.
        after_ns: the same after.
        evidence: nodes by evidence of their duration ("measured", "looked_up", "scaled").
        evidence_ns: the same, their time after.
        rules: nodes by the rule that gave their duration.
        unknown: kernels of unknown class or without formula, the longest time before first.
        dropped: operators taken out and how often; of CPU captures alone.
        interval: where four of five measured times of all compute nodes lie, in ns; () of models
            whose errors are not known.
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
    """Return what the last re-costing of `after`, made from `before`, changed.

    Nodes are matched by id.
    """
    assert after.job.annotations, "the graph was never re-costed"
    last = after.job.annotations[-1]
    index = np.flatnonzero(compute_mask(after))
    old = _durations_before(before, after.nodes.id[index])
    new = after.nodes.duration_ns[index]
    codes = classify(after, index)
    rows = [
        _class_row(after, op_class, index[codes == code], old[codes == code])
        for code, op_class in enumerate(CLASSES)
        if (codes == code).any()
    ]
    return Recosting(
        target=last.target,
        model=last.model,
        source=last.source,
        classes=tuple(sorted(rows, key=lambda row: -row.after_ns)),
        before_ns=int(before.nodes.duration_ns[compute_mask(before)].sum()),
        after_ns=int(new.sum()),
        evidence=by_evidence(after, index),
        evidence_ns=by_evidence(after, index, new),
        rules=dict(last.details.get("rules", {})),
        unknown=_unknown(after, index, codes, old, new),
        dropped=dict(last.details.get("dropped", {})),
        interval=tuple(last.details.get("interval", ())),
    )


def _durations_before(before: Graph, ids: npt.NDArray[np.uint64]) -> I64:
    """Return the duration that the nodes with these ids had, 0 of those that were not there."""
    order = np.argsort(before.nodes.id)
    place = np.minimum(np.searchsorted(before.nodes.id[order], ids), len(order) - 1)
    there = before.nodes.id[order[place]] == ids
    return np.where(there, before.nodes.duration_ns[order[place]], 0)


def _class_row(after: Graph, op_class: OpClass, index: I64, old: I64) -> ClassRow:
    sums = {
        name: int(np.maximum(getattr(after.nodes, name)[index], 0).sum())
        for name in ("flops", "bytes_read", "bytes_written")
    }
    return ClassRow(
        op_class=op_class,
        count=len(index),
        before_ns=int(old.sum()),
        after_ns=int(after.nodes.duration_ns[index].sum()),
        evidence_ns=by_evidence(after, index, after.nodes.duration_ns[index]),
        **sums,
    )


def _unknown(
    after: Graph, index: I64, codes: npt.NDArray[np.uint8], old: I64, new: I64
) -> tuple[UnknownKernel, ...]:
    blind = (codes == CLASSES.index(OpClass.UNKNOWN)) | (after.nodes.flops[index] == UNKNOWN)
    op, name = after.nodes.op[index][blind], after.nodes.name[index][blind]
    first, kind = combine([op, name])
    count = np.bincount(kind, minlength=len(first))
    sums = [
        np.bincount(kind, weights=times[blind], minlength=len(first)).tolist()
        for times in (old, new)
    ]
    found = [
        UnknownKernel(
            after.strings[int(op[row])], after.strings[int(name[row])], n, int(was), int(now)
        )
        for row, n, was, now in zip(first, count.tolist(), *sums, strict=True)
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.before_ns))
