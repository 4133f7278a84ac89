"""GPU operations and the host operator that launched each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.columns import (
    GPU_CATEGORIES,
    OWN_CALL,
    GpuRows,
    KinetoTrace,
    last_of,
    pick,
)
from onerank.converters.kineto.host import NONE, HostTimeline, named
from onerank.ir import UNKNOWN, Kind

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

STAND_IN = "onerank_standin_"
"""How the kernels' names begin that `onerank.capture.standin` puts in a collective's place."""
PACED_STAND_IN = "onerank_standin_paced"

KINDS = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.MEMCPY, "gpu_memset": Kind.MEMSET}
KIND_OF_CATEGORY = np.array([KINDS[category] for category in GPU_CATEGORIES], dtype=np.uint8)
KERNEL_CATEGORY = GPU_CATEGORIES.index("kernel")

CLOCK_NS = 5_000
"""How far the clocks of GPU and host may be apart."""

_RULES = ("external id", "enclosing operator", "no operator", "no launch")
_NO_OPERATOR = _RULES.index("no operator")
_GRAPH = len(_RULES)


@dataclass(frozen=True, slots=True)
class GpuOps:
    """Kernels, memcpys and memsets, n of them, ordered by launch, then by start.

    Attributes:
        rows: the events.
        launch_ns: host time of the launch (the start, where no launch is recorded), int64[n].
        operator: index of the innermost host operator behind the launch, or of the call itself
            where it stands outside of any, or NONE, int64[n].
        rule: how that was found, a place in `RULES`, int64[n].
        in_mark: index of the communication mark it was launched in, or NONE, int64[n].
        stands_in: which are the kernels that show when and where a recorded call would run.
        paced: of these, which took the time of a network.
        alone_ns: duration with no communication beside it, UNKNOWN where none was measured.
    """

    rows: GpuRows
    launch_ns: I64
    operator: I64
    rule: I64
    in_mark: I64
    stands_in: Mask
    paced: Mask
    alone_ns: I64

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def linked(self) -> Mask:
        """Which have an operator, not the call that launched them alone, bool[n]."""
        return (self.operator >= 0) & (self.rule % _GRAPH < _NO_OPERATOR)

    def rules(self, chosen: Mask) -> dict[str, int]:
        """Return how many of the chosen ones were linked by each rule."""
        distinct, first, counts = np.unique(
            self.rule[chosen], return_index=True, return_counts=True
        )
        order = np.argsort(first)
        pairs = zip(distinct[order].tolist(), counts[order].tolist(), strict=True)
        return {_rule(rule): count for rule, count in pairs}


def _rule(rule: int) -> str:
    return f"graph launch: {_RULES[rule - _GRAPH]}" if rule >= _GRAPH else _RULES[rule]


def link(trace: KinetoTrace, timeline: HostTimeline) -> GpuOps:
    """Link every GPU operation to its operator.

    Rules, in order: `external id` (the launch or the operation carries the operator's, which ran
    then: torch up to 2.0 gives ids twice),
    `enclosing operator` (innermost one on the launching thread at the time of the launch),
    each prefixed with `graph launch: ` where one launch started several operations;
    `no operator` where a launch stands outside any, `no launch` where none is recorded.
    """
    rows, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, rows.correlation)
    launched = launch >= 0
    launch_ns = rows.start_ns.copy()
    launch_ns[launched] = launches.start_ns[launch[launched]]
    order = np.lexsort((rows.start_ns, launch_ns))
    rows, launch, launched, launch_ns = (
        rows.take(order), launch[order], launched[order], launch_ns[order]
    )  # fmt: skip

    external = rows.external_id.copy()
    by_launch = launched & (external == 0)
    external[by_launch] = launches.external_id[launch[by_launch]]
    operator = last_of(timeline.rows.external_id, external, timeline.rows.is_operator)
    operator[_outside(timeline, operator, launch_ns, launched)] = NONE
    rule = np.zeros(len(rows), dtype=np.int64)
    asked = np.flatnonzero((operator < 0) & launched)
    around = _around(trace, timeline, launch[asked])
    operator[asked] = timeline.operator(around)
    rule[asked] = 1
    rule[operator < 0] = np.where(launched, 2, 3)[operator < 0]
    calls = (operator[asked] < 0) & (pick(timeline.rows.event_index, around, 0) == OWN_CALL)
    operator[asked[calls]] = around[calls]
    _, places, counts = np.unique(rows.correlation, return_inverse=True, return_counts=True)
    rule[launched & (counts[places] > 1)] += _GRAPH

    in_mark = pick(timeline.in_mark, operator, NONE)
    stands_in = named(rows.name, trace.strings, lambda name: name.startswith(STAND_IN))
    asked = np.flatnonzero(stands_in & launched)  # no operator launches it
    in_mark[asked] = pick(timeline.in_mark, _around(trace, timeline, launch[asked]), NONE)
    return GpuOps(
        rows=rows,
        launch_ns=launch_ns,
        operator=operator,
        rule=rule,
        in_mark=in_mark,
        stands_in=stands_in & (in_mark >= 0),
        paced=named(rows.name, trace.strings, lambda name: name.startswith(PACED_STAND_IN)),
        alone_ns=np.full(len(rows), UNKNOWN),
    )


def _outside(timeline: HostTimeline, operator: I64, launch_ns: I64, launched: Mask) -> Mask:
    """Return which operations' operators did not run at the launch, or began behind the start."""
    known = operator >= 0
    begun = pick(timeline.rows.start_ns, operator, 0) - CLOCK_NS
    ended = pick(timeline.rows.end_ns, operator, 0) + CLOCK_NS
    return known & ((launch_ns < begun) | (launched & (launch_ns > ended)))


def _around(trace: KinetoTrace, timeline: HostTimeline, launch: I64) -> I64:
    """Return the innermost host event around each launch, or NONE."""
    launches = trace.launches
    return timeline.innermost(launches.thread[launch], launches.start_ns[launch])
