"""Which events become nodes."""

from dataclasses import dataclass

import numpy as np

from onerank.converters.kineto.columns import I64, OWN_CALL, Mask
from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.gloo import Runs
from onerank.converters.kineto.host import MODULE_SCOPE, HostTimeline
from onerank.converters.kineto.leaves import leaves
from onerank.ir import Phase
from onerank.ir.kinds import DATA_LOADING


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which events become nodes.

    Attributes:
        host: indices of the host events, ascending, int64[n].
        gpu: rows of the GPU operations, by start, int64[m].
        left_out: operators that are no nodes, by reason.
    """

    host: I64
    gpu: I64
    left_out: dict[str, int]


def choose_nodes(
    timeline: HostTimeline, gpu: GpuOps, gloo: Runs, *, with_operators: bool
) -> Chosen:
    """Choose what becomes a node: all that ran on a GPU but emulates nothing, and operators.

    Where nothing ran on a GPU, the operators that compute do: the leaves.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: what Gloo carried out, whose operators are part of its calls.
        with_operators: whether operators are nodes.
    """
    ran = np.flatnonzero(gpu.in_mark < 0)
    ran = ran[np.argsort(gpu.rows.start_ns[ran], kind="stable")]
    cpu_only = not len(ran)
    kept = _operators(timeline, cpu_only=cpu_only)[: None if with_operators else 0]
    unrun = kept[_unrun(timeline, kept)] if cpu_only else kept[:0]
    inside = gloo.within(timeline)
    kept = np.union1d(np.setdiff1d(kept[~inside[kept]], unrun), gloo.callers())
    left_out = _left_out(timeline, kept, unrun, inside, with_operators=with_operators)
    return Chosen(kept, ran, left_out)


def _operators(timeline: HostTimeline, *, cpu_only: bool) -> I64:
    loading = np.flatnonzero(timeline.named(lambda name: name.startswith(DATA_LOADING)))
    if cpu_only:
        return np.union1d(np.array(leaves(timeline), dtype=np.int64), loading)
    chosen = timeline.rows.is_operator | own_calls(timeline)
    chosen &= (timeline.in_mark < 0) & ~timeline.is_wait
    return np.union1d(np.flatnonzero(chosen), loading)


def own_calls(timeline: HostTimeline) -> Mask:
    """Return which host events are runtime calls outside of any operator, bool[n]."""
    return timeline.rows.event_index == OWN_CALL


def _unrun(timeline: HostTimeline, kept: I64) -> Mask:
    """Return which kept operators only began, bool[n].

    torch.utils.checkpoint ends a recomputation by an exception once it has what backward asks for:
    the operator that was beginning leaves an event, and no record in the execution trace.
    """
    unrecorded = (timeline.et[kept] < 0) & (timeline.phase[kept] == Phase.BACKWARD)
    if not unrecorded.any():
        return unrecorded
    scope = timeline.nearest(timeline.named(lambda name: name.startswith(MODULE_SCOPE)))
    return unrecorded & (scope[kept] >= 0)


def _left_out(
    timeline: HostTimeline, kept: I64, unrun: I64, in_gloo: Mask, *, with_operators: bool
) -> dict[str, int]:
    left = timeline.rows.is_operator.copy()
    left[kept] = left[unrun] = False
    recorder = left & ((timeline.in_mark >= 0) | timeline.is_wait)
    other = "not a leaf, a view or free" if with_operators else "no execution trace is given"
    counts = {
        other: int((left & ~recorder & ~in_gloo).sum()),
        "emulates communication": int(recorder.sum()),
        "part of a call by Gloo": int((left & ~recorder & in_gloo).sum()),
        "begun only: a recomputed checkpoint had what backward asked for": len(unrun),
    }
    return {reason: count for reason, count in counts.items() if count}
