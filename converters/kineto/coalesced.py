"""NCCL kernels that carry no arguments: of calls that were coalesced, launched behind them all.

Between `ncclGroupStart` and `ncclGroupEnd` each call leaves its `record_param_comms`, and none
launches anything; the kernel comes with the group's end. On the same thread the calls before it
that launched nothing are its own.
"""

import re
from bisect import bisect_right
from collections import Counter

import msgspec
import numpy as np

from onerank.converters.kineto.columns import I64, NO_CALL, Mask
from onerank.converters.kineto.device import KERNEL_CATEGORY, GpuOps
from onerank.converters.kineto.host import HostTimeline, named
from onerank.converters.kineto.rows import Args

_KERNEL = re.compile(r"(nccl|msccl)\w*Kernel", re.IGNORECASE)
_NO_LAUNCH = frozenset({"wait", "init", "barrier"})


def find_calls(timeline: HostTimeline, gpu: GpuOps) -> tuple[I64, Counter[str]]:
    """Return the call that each GPU operation carries out, and NCCL kernels whose calls are open.

    Returns:
        Places in `timeline.calls`, NO_CALL for what does not communicate, int64[n]; and the count
        of NCCL kernels without a call, by reason. Calls of one sort that ran as one kernel are
        added up as one call more.
    """
    rows, own = gpu.rows, timeline.rows
    kernel = rows.category == KERNEL_CATEGORY
    call = rows.call.copy()
    linked = np.flatnonzero(kernel & (gpu.operator >= 0) & (call == NO_CALL))
    call[linked] = own.call[gpu.operator[linked]]
    nccl = named(rows.name, timeline.strings, lambda name: bool(_KERNEL.match(name)))
    open_kernels = np.flatnonzero(nccl & kernel & (call == NO_CALL) & (gpu.in_mark < 0))
    reasons = Counter[str]()
    if not len(open_kernels):
        return call, reasons
    waiting = _waiting(timeline, gpu, call != NO_CALL)
    for kernel_row in open_kernels.tolist():  # in the order of their launch
        operator = int(gpu.operator[kernel_row])
        thread = int(own.thread[operator]) if operator >= 0 else -1
        calls = waiting.get(thread, [])
        until = bisect_right(calls, int(gpu.launch_ns[kernel_row]), key=lambda c: c[0])
        given = [timeline.calls[place] for _, place in calls[:until]]
        del calls[:until]
        merged = _merged(given)
        if merged is None:
            reasons[_why(given)] += 1
            continue
        call[kernel_row] = len(timeline.calls)
        timeline.calls.append(merged)
    return call, reasons


def _waiting(timeline: HostTimeline, gpu: GpuOps, done: Mask) -> dict[int, list[tuple[int, int]]]:
    """Return the start and place of each thread's calls that launched nothing, in order."""
    rows = timeline.rows
    launched = np.zeros(len(timeline), dtype=bool)
    launched[gpu.operator[done & (gpu.operator >= 0)]] = True
    found: dict[int, list[tuple[int, int]]] = {}
    for index in np.flatnonzero((rows.call != NO_CALL) & ~launched).tolist():
        place = int(rows.call[index])
        if timeline.calls[place].collective.lower() not in _NO_LAUNCH:
            entry = int(rows.start_ns[index]), place
            found.setdefault(int(rows.thread[index]), []).append(entry)
    return found


def _merged(calls: list[Args]) -> Args | None:
    """Return calls that ran as one kernel as one call, None where they are of several sorts."""
    sorts = {(one.collective, one.dtype, one.group_name, one.source, one.destination)
             for one in calls}  # fmt: skip
    if len(sorts) != 1:
        return None
    return msgspec.structs.replace(calls[0], in_elements=sum(one.in_elements for one in calls))


def _why(calls: list[Args]) -> str:
    if not calls:
        return "no arguments, on the kernel or on a call before it"
    names = Counter(one.collective for one in calls)
    return "one kernel for " + ", ".join(f"{n} {name}" for name, n in sorted(names.items()))
