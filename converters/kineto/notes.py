"""What whoever reads a converted graph should know, in sentences."""

from collections import Counter

from onerank.converters.kineto.calls import Recorded
from onerank.converters.kineto.chosen import own_calls
from onerank.converters.kineto.coalesced import Found
from onerank.converters.kineto.columns import I64, ExecutionTrace, KinetoTrace
from onerank.converters.kineto.communication import Communication
from onerank.converters.kineto.host import HostTimeline
from onerank.converters.kineto.waits import Waits
from onerank.ir import UNKNOWN, Graph, Kind, Reason


def of_communication(
    found: Found, measured: list[Communication], unplaced: list[Recorded]
) -> list[str]:
    """Tell of kernels that communicate by unknown calls, and of calls told in part.

    Args:
        found: the calls that GPU operations carry out.
        measured: these calls.
        unplaced: recorded calls that are taken as blocking.
    """
    notes = [
        f"{count} kernels that communicate ({ns / 1e6:.3f} ms) are kept as kernels, not as "
        f"communication: {reason}"
        for reason, (count, ns) in found.unknown.items()
    ]
    if found.split:
        notes.append(
            f"{found.split} NCCL kernels that carried out several calls at once are one node per "
            "call, sends before receives, one after another, their time split by bytes"
        )
    peers = Counter(call.kind for call in measured if max(call.src, call.dst) == UNKNOWN)
    if alone := peers[Kind.SEND] + peers[Kind.RECV]:
        notes.append(
            f"{alone} sends and receives do not tell of their peer: older versions of torch did "
            "not record it"
        )
    blocking = sum(call.communication.asynchronous for call in unplaced)
    if blocking:
        notes.append(
            f"{blocking} asynchronous calls are taken as blocking: the trace does not tell what "
            "they overlap"
        )
    return notes


def of_unread(trace: KinetoTrace, et: ExecutionTrace) -> list[str]:
    """Tell what of the files themselves was not read, or was not there."""
    notes: list[str] = []
    if et.without_caller:
        notes.append(
            f"{et.path.name}: the callers of {et.without_caller} nodes are not in the file; these "
            "count as called by nobody"
        )
    if trace.lost_run:
        notes.append(
            "distributedInfo is left out: it tells no rank within a world (rank, world_size)"
        )
    if trace.unread:
        told = ", ".join(f"{count} of category {cat!r}" for cat, count in trace.unread.items())
        notes.append(f"events of unknown categories are left out: {told}")
    return notes


def of_waits(waits: Waits) -> list[str]:
    """Tell what of the waits for the GPU is inferred."""
    notes: list[str] = []
    if waits.inferred:
        notes.append(
            f"which record {waits.inferred} waits for an event refer to is inferred from the order "
            "of the event ids; the driver does not tell"
        )
    if waits.by_time:
        notes.append(
            f"{waits.by_time} waits are told by the order of calls, and by what ended and started "
            "when: the trace has no synchronisation events (enable_cuda_sync_events)"
        )
    return notes


def of_no_execution_trace(
    timeline: HostTimeline, marked: list[Recorded], *, with_operators: bool
) -> list[str]:
    """Tell what is not in the graph since no execution trace was given."""
    notes: list[str] = []
    if unread := int(timeline.is_mark.sum()) - len(marked):
        notes.append(
            f"{unread} recorded communication calls are left out: what they are stands in the "
            "execution trace"
        )
    if not with_operators:
        notes.append(
            "without an execution trace the graph holds GPU operations alone: what the host held "
            "back is not in it, so that its replay is faster than the step; --operators keeps the "
            "operators"
        )
    return notes


def of_own_calls(timeline: HostTimeline, kept: I64) -> list[str]:
    """Tell how many launches outside of operators are nodes."""
    calls = int(own_calls(timeline)[kept].sum())
    if not calls:
        return []
    return [f"{calls} runtime calls that launch outside of any operator are nodes of the host"]


def of_contradictions(
    graph: Graph, left_out: Counter[Reason], example: tuple[int, int] | None
) -> list[str]:
    """Tell of edges that were left out, since they closed a circle; `example` is one of them."""
    if example is None:
        return []
    counts = ", ".join(
        f"{count} {reason.name.lower().replace('_', ' ')}" for reason, count in left_out.items()
    )
    source, target = (graph.node(index) for index in example)
    return [
        f"{left_out.total()} edges are left out, since the trace contradicts itself there "
        f"({counts}): {target.name!r} started before {source.name!r}, for one, which it would have "
        "to wait for"
    ]
