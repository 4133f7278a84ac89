"""NCCL kernels that carry no arguments: of calls that were coalesced, launched behind them all.

Between `ncclGroupStart` and `ncclGroupEnd` each call leaves its `record_param_comms`, and none
launches anything; the kernel comes with the group's end. On the same thread the calls before it
that launched nothing are its own.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, fields
from itertools import accumulate

import msgspec
import numpy as np

from onerank.converters.kineto.columns import I64, NO_CALL, Mask
from onerank.converters.kineto.communication import DTYPE_BYTES, POINT_TO_POINT
from onerank.converters.kineto.device import KERNEL_CATEGORY, GpuOps
from onerank.converters.kineto.host import HostTimeline, named
from onerank.converters.kineto.rows import Args

_KERNEL = re.compile(r"(nccl|msccl)\w*Kernel", re.IGNORECASE)
_OF_OTHERS = re.compile(r"nvshmem|\bdeep_ep::|\bep::(intra|inter)node", re.IGNORECASE)
"""Kernels of libraries that exchange data without torch's knowledge: NVSHMEM, DeepEP."""
_NO_LAUNCH = frozenset({"wait", "init", "barrier"})


@dataclass(frozen=True, slots=True)
class Found:
    """What GPU operations communicate.

    Attributes:
        gpu: the GPU operations; one that carries out calls of several sorts is there once per
            sort, the one behind the other, its duration split by their bytes to the nanosecond.
        call: place of each one's call in `timeline.calls`, NO_CALL for none, int64[n].
        split: kernels that were split.
        unknown: kernels that communicate without a call: how many and how long, by reason.
    """

    gpu: GpuOps
    call: I64
    split: int
    unknown: dict[str, tuple[int, int]]


def find_calls(timeline: HostTimeline, gpu: GpuOps) -> Found:
    """Find the call that each GPU operation carries out.

    Calls of one sort that ran as one kernel are added up as one call more. Sends and receives
    (`batch_isend_irecv`) stay one each, sends first: a simulator that waits for one receive at a
    time cannot come to a stop over them, however the ranks began.
    """
    rows, own = gpu.rows, timeline.rows
    kernel = rows.category == KERNEL_CATEGORY
    call = rows.call.copy()
    linked = np.flatnonzero(kernel & (gpu.operator >= 0) & (call == NO_CALL))
    call[linked] = own.call[gpu.operator[linked]]
    nccl = named(rows.name, timeline.strings, lambda name: bool(_KERNEL.match(name)))
    open_kernels = np.flatnonzero(nccl & kernel & (call == NO_CALL) & (gpu.in_mark < 0))
    others = named(rows.name, timeline.strings, lambda name: bool(_OF_OTHERS.search(name)))
    others &= kernel & (call == NO_CALL)
    unknown = _told(rows.duration_ns[others], "the library (NVSHMEM, DeepEP) tells torch nothing")
    if not len(open_kernels):
        return Found(gpu, call, 0, unknown)
    waiting = _waiting(timeline, gpu, call != NO_CALL)
    several: dict[int, list[Args]] = {}
    lost: list[int] = []
    for kernel_row in open_kernels.tolist():  # in the order of their launch
        calls = waiting.get(int(gpu.thread[kernel_row]), [])
        until = bisect_right(calls, int(gpu.launch_ns[kernel_row]), key=lambda c: c[0])
        given = _by_sort([timeline.calls[place] for _, place in calls[:until]])
        del calls[:until]
        if not given:
            lost.append(kernel_row)
            continue
        call[kernel_row] = len(timeline.calls)
        timeline.calls.extend(given)
        if len(given) > 1:
            several[kernel_row] = given
    reason = "NCCL's have no arguments, on the kernel or on a call before it"
    unknown = _told(rows.duration_ns[lost], reason) | unknown
    if not several:
        return Found(gpu, call, 0, unknown)
    return _split(gpu, call, several, unknown)


def _told(duration_ns: I64, reason: str) -> dict[str, tuple[int, int]]:
    return {reason: (len(duration_ns), int(duration_ns.sum()))} if len(duration_ns) else {}


def _split(
    gpu: GpuOps, call: I64, several: dict[int, list[Args]], unknown: dict[str, tuple[int, int]]
) -> Found:
    """Put as many rows in the place of a kernel as it has calls."""
    counts = np.ones(len(gpu), dtype=np.int64)
    counts[list(several)] = [len(calls) for calls in several.values()]
    index: I64 = np.repeat(np.arange(len(gpu)), counts)
    places, rows = call[index], gpu.rows.take(index)
    for kernel_row, begin in zip(several, (np.cumsum(counts) - counts)[list(several)], strict=True):
        calls = several[kernel_row]
        here = slice(int(begin), int(begin) + len(calls))
        until = _shares(calls, int(gpu.rows.duration_ns[kernel_row]))
        places[here] = call[kernel_row] + np.arange(len(calls))
        rows.start_ns[here] += until[:-1]
        rows.duration_ns[here] = np.diff(until)
    parts = {
        spec.name: getattr(gpu, spec.name)[index] for spec in fields(gpu) if spec.name != "rows"
    }
    return Found(GpuOps(rows=rows, **parts), places, len(several), unknown)


def _shares(calls: list[Args], duration_ns: int) -> I64:
    """Return when each call's share of a kernel's time is over, the first at 0, int64[n + 1]."""
    weights = [one.in_elements * DTYPE_BYTES.get(one.dtype, 1) for one in calls]
    total = sum(weights)
    if total <= 0:
        weights, total = [1] * len(calls), len(calls)
    return np.array([duration_ns * part // total for part in accumulate(weights, initial=0)])


def _waiting(timeline: HostTimeline, gpu: GpuOps, done: Mask) -> dict[int, list[tuple[int, int]]]:
    """Return the start and place of each thread's calls that launched nothing, in order."""
    rows = timeline.rows
    launched = np.zeros(len(timeline), dtype=bool)
    launched[gpu.operator[done & (gpu.operator >= 0)]] = True
    found: dict[int, list[tuple[int, int]]] = {}
    for index in np.flatnonzero((rows.call != NO_CALL) & ~launched).tolist():
        place = int(rows.call[index])
        one = timeline.calls[place]
        # among one rank NCCL has nothing to launch
        if one.collective.lower() not in _NO_LAUNCH and one.group_size != 1:
            entry = int(rows.start_ns[index]), place
            found.setdefault(int(rows.thread[index]), []).append(entry)
    return found


def _by_sort(calls: list[Args]) -> list[Args]:
    """Return calls that ran as one kernel, those of one sort as one call, sends first."""
    merged: dict[object, Args] = {}
    for place, one in enumerate(calls):
        name = one.collective.lower()
        single = place if name in POINT_TO_POINT else NO_CALL
        sort = (one.collective, one.dtype, one.group_name, single)
        before = merged.get(sort)
        elements = one.in_elements + (before.in_elements if before else 0)
        merged[sort] = msgspec.structs.replace(before or one, in_elements=elements)
    return sorted(merged.values(), key=lambda one: one.collective.lower() != "send")
