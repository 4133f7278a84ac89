"""Collectives of Gloo, as torch.profiler records them on a CPU.

torch opens a record `gloo:all_reduce` inside the operator that issues the call (`c10d::allreduce_`)
and closes it when the call completes, often on one of Gloo's threads; the record id names the
operator. Waits are not recorded. DDP's reducer waits for all its calls at the end of backward. For
any other call, the first operator that the caller starts afterwards is assumed to wait.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from onerank.converters.sources.kineto.collectives import (
    NCCL_NAMES,
    POINT_TO_POINT,
    Communication,
    find_root,
    inputs_of,
    with_root,
)
from onerank.converters.sources.kineto.link.host_timeline import NONE, RUN, HostTimeline, groups
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace
from onerank.ir import UNKNOWN, Collective, Kind, ProcessGroup
from onerank.ir.arrays import I64, Mask
from onerank.ir.nodes import ROOT_COLUMNS
from onerank.ir.notes import Note

_OPERATOR = "c10d::"
_NAMES = {**NCCL_NAMES, "sparse_all_reduce": Collective.ALL_REDUCE}


@dataclass(frozen=True, slots=True)
class GlooCall:
    """A call that Gloo ran.

    Attributes:
        op: index of its record.
        caller: index of the operator that issued it, NONE if not known.
        communication: the issued call.
    """

    op: int
    caller: int
    communication: Communication


@dataclass(slots=True)
class GlooCalls:
    """The calls that Gloo ran.

    Attributes:
        calls: in the order of their starts.
        unknown: number of records with an unknown collective, by name.
        of_groups: number of groups in the trace; with several, the group of a call is unknown.
    """

    calls: list[GlooCall] = field(default_factory=list[GlooCall])
    unknown: Counter[str] = field(default_factory=Counter[str])
    of_groups: int = 0

    def callers(self) -> I64:
        """Return the operators that issued a call."""
        callers = {call.caller for call in self.calls if call.caller != NONE}
        return np.array(sorted(callers), dtype=np.int64)

    def within(self, timeline: HostTimeline) -> Mask:
        """Return which events are part of a call that ran on a Gloo thread, bool[n]."""
        rows = timeline.rows
        inside = np.zeros(len(timeline), dtype=bool)
        for call in self.calls:
            thread = int(rows.thread[call.op])
            if call.caller == NONE or thread != rows.thread[call.caller]:
                # Events on a Gloo thread during a call belong to Gloo, not to the script.
                span = timeline.threads[thread]
                starts = rows.start_ns[span.start : span.stop]
                bounds = [rows.start_ns[call.op], rows.end_ns[call.op]]
                first, last = np.searchsorted(starts, bounds).tolist()
                inside[span.start + first : span.start + last] = True
        return inside

    def notes(self) -> list[Note]:
        """Return notes on unknown collectives, issuers and groups."""
        notes = [
            Note(
                f"{count} {name!r} records are dropped: unknown collective",
                code="gloo-unknown-collective",
            )
            for name, count in self.unknown.items()
        ]
        if without_caller := sum(call.caller == NONE for call in self.calls):
            notes.append(
                Note(
                    f"{without_caller} calls by Gloo have no issuing operator in the trace; a "
                    "replay keeps the time between them",
                    code="gloo-without-issuer",
                )
            )
        if self.calls and self.of_groups > 1:
            notes.append(
                Note(
                    f"the process group of {len(self.calls)} calls by Gloo is unknown: the trace "
                    f"has {self.of_groups} groups, and torch's profiler names the group only for "
                    "NCCL",
                    code="gloo-unknown-group",
                )
            )
        return notes


def find_gloo_calls(
    timeline: HostTimeline, et: ExecutionTrace, groups: tuple[ProcessGroup, ...]
) -> GlooCalls:
    """Return the calls that Gloo ran.

    Args:
        timeline: the host events.
        et: the execution trace; without it, bytes and peers are unknown.
        groups: groups of the trace; if there are several, the group of a call is unknown.
    """
    gloo_calls = GlooCalls(of_groups=len(groups))
    records = np.flatnonzero(timeline.is_run)
    if not len(records):
        return gloo_calls
    rows = timeline.rows
    issuers = np.flatnonzero(
        rows.is_operator & timeline.named(lambda name: name.startswith(_OPERATOR))
    )
    issuers = issuers[np.argsort(rows.rf_id[issuers], kind="stable")]
    # torch's profiler names the group only for NCCL.
    group = groups[0] if len(groups) == 1 else ProcessGroup("", ())
    for op in records[np.argsort(rows.start_ns[records], kind="stable")].tolist():
        name = timeline.name(op).removeprefix(RUN)
        if name not in _NAMES and name not in POINT_TO_POINT:
            gloo_calls.unknown[timeline.name(op)] += 1
            continue
        # Record ids ascend in the order in which events begin, and the record begins inside its
        # issuer.
        before = int(np.searchsorted(rows.rf_id[issuers], rows.rf_id[op])) - 1
        caller = int(issuers[before]) if before >= 0 and rows.rf_id[op] else NONE
        gloo_calls.calls.append(
            GlooCall(op, caller, _communication(timeline, et, op, caller, group))
        )
    return gloo_calls


def _communication(
    timeline: HostTimeline, et: ExecutionTrace, op: int, caller: int, group: ProcessGroup
) -> Communication:
    name = timeline.name(op).removeprefix(RUN)
    kind = POINT_TO_POINT.get(name, Kind.COLLECTIVE)
    peer, tag = _peer(inputs_of(timeline, caller, et)) if name in POINT_TO_POINT else (UNKNOWN,) * 2
    # c10d's operators name a peer by its place in the group; graphs have global ranks.
    if 0 <= peer < len(group.ranks):
        peer = group.ranks[peer]
    if name == "scatter":
        count_bytes = _scattered_bytes(inputs_of(timeline, caller, et), len(group.ranks))
    else:
        count_bytes = _bytes(inputs_of(timeline, op, et))
    call = Communication(
        kind=kind,
        collective=_NAMES.get(name, Collective.NONE),
        name=timeline.name(op),
        bytes=count_bytes,
        group=group.name,
        group_ranks=group.ranks,
        src=peer if kind is Kind.RECV else UNKNOWN,
        dst=peer if kind is Kind.SEND else UNKNOWN,
        tag=tag,
    )
    if call.collective not in ROOT_COLUMNS:
        return call
    return with_root(call, find_root(timeline, caller, et))


def _scattered_bytes(inputs: list[object] | None, ranks: int) -> int:
    """Return the bytes of a scatter: the caller's output tensors times the number of ranks.

    NCCL counts so on all ranks. Gloo records the inputs, which only the root has.
    """
    outputs = inputs[0] if inputs else None
    if not isinstance(outputs, list) or not ranks:
        return UNKNOWN
    return ranks * _bytes(cast("list[object]", outputs))


def _bytes(values: list[object] | None) -> int:
    """Return the bytes of the tensors among inputs, UNKNOWN if the inputs are not recorded."""
    if values is None:
        return UNKNOWN
    total = 0
    for value in values:
        match value:
            # [tensor, storage, offset, elements, bytes per element, device].
            case [int(), int(), int(), int() as elements, int() as element_bytes, str()]:
                total += elements * element_bytes
            case _:
                pass
    return total


def _peer(values: list[object] | None) -> tuple[int, int]:
    """Return the peer's rank in the group and the tag, the last inputs of a send or receive."""
    match values:
        case [*_, int() as peer, int() as tag]:
            return peer, tag
        case _:
            return UNKNOWN, UNKNOWN


def first_operator_after(call: GlooCall, operators: "OperatorsByStart") -> int:
    """Return the first operator that waits for a call; NONE if no operator waits."""
    if call.caller == NONE:
        return NONE
    timeline = operators.timeline
    end_ns = int(timeline.rows.end_ns[call.op])
    # DDP's reducer issues calls inside autograd functions and waits for all of them afterwards.
    if timeline.in_functions[call.caller]:
        return operators.first_outside_functions(end_ns)
    return operators.first_on_thread(int(timeline.rows.thread[call.caller]), end_ns)


class OperatorsByStart:
    """The operators that are nodes, in the order of their starts: all, per thread, and others."""

    def __init__(self, timeline: HostTimeline, kept: I64) -> None:
        self.timeline = timeline
        rows = timeline.rows
        kept = kept[np.argsort(rows.start_ns[kept], kind="stable")]
        self._of_thread = {
            int(rows.thread[kept[members[0]]]): kept[members]
            for members in groups(rows.thread[kept])
        }
        self._start_of_thread = {
            thread: rows.start_ns[members] for thread, members in self._of_thread.items()
        }
        self._outside = kept[~timeline.in_functions[kept]]
        self._start_outside = rows.start_ns[self._outside]

    def first_on_thread(self, thread: int, time_ns: int) -> int:
        """Return the first operator of a thread that starts at a time or later, or NONE."""
        if thread not in self._of_thread:
            return NONE
        place = int(np.searchsorted(self._start_of_thread[thread], time_ns))
        members = self._of_thread[thread]
        return int(members[place]) if place < len(members) else NONE

    def first_outside_functions(self, time_ns: int) -> int:
        """Return the first operator outside autograd functions from a time on, or NONE."""
        place = int(np.searchsorted(self._start_outside, time_ns))
        return int(self._outside[place]) if place < len(self._outside) else NONE
