"""Differences between two traces."""

import msgspec

from onerank.analysis.breakdown import (
    NOTHING,
    Share,
    shares_by_class,
    shares_by_kernel,
    shares_by_module,
)
from onerank.analysis.summary import summarise
from onerank.annotate import characterise
from onerank.display import Displayed
from onerank.ir import Graph


class NameDiff(msgspec.Struct, frozen=True):
    """Count and time of a name in both traces; 0 in a trace without it."""

    name: str
    count_before: int
    count_after: int
    time_before_ns: int
    time_after_ns: int


class TraceDiff(Displayed, msgspec.Struct, frozen=True):
    """Differences of trace `after` from `before`; each list has every name, changed ones first.

    Attributes:
        same_kernels: whether kernel names and counts agree.
        same_collectives: whether communication agrees in type, bytes, ranks and count.
        total: all compute.
        by_class: by class of work.
        by_module: by module, numbered siblings summed.
        by_kernel: by kernel (operator on a CPU) name.
    """

    same_kernels: bool
    same_collectives: bool
    total: NameDiff
    by_class: list[NameDiff]
    by_module: list[NameDiff]
    by_kernel: list[NameDiff]


def compare_traces(before: Graph, after: Graph) -> TraceDiff:
    """Compare two graphs by names; node ids of two captures do not correspond.

    Raises:
        AnnotateError: the operands of a node cannot be read.
    """
    first, second = summarise(before), summarise(after)
    before, after = characterise(before), characterise(after)
    # By name, because ids of two captures do not correspond.
    kernels = _changes(shares_by_kernel(before), shares_by_kernel(after))
    return TraceDiff(
        same_kernels=all(change.count_before == change.count_after for change in kernels),
        same_collectives=first.collectives == second.collectives,
        total=NameDiff(
            "",
            first.compute_ops,
            second.compute_ops,
            first.compute_time_ns,
            second.compute_time_ns,
        ),
        by_class=_changes(shares_by_class(before), shares_by_class(after)),
        by_module=_changes(shares_by_module(before), shares_by_module(after)),
        by_kernel=kernels,
    )


def _changes(before: list[Share], after: list[Share]) -> list[NameDiff]:
    """Pair the shares by name; the largest change of time comes first."""
    first = {share.name: share for share in before}
    second = {share.name: share for share in after}
    changes = [
        NameDiff(
            name,
            first.get(name, NOTHING).count,
            second.get(name, NOTHING).count,
            first.get(name, NOTHING).time_ns,
            second.get(name, NOTHING).time_ns,
        )
        for name in sorted({*first, *second})
    ]
    # Names order changes of equal time, so equal traces print equal tables.
    return sorted(changes, key=lambda c: (-abs(c.time_after_ns - c.time_before_ns), c.name))
