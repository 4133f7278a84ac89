"""How long kernels take with no communication beside them.

A capture that paces its collectives records one more window, in which they only leave markers. Its
kernels pair up with those of the profiled window: operator by operator, as `adopt` pairs windows,
and within an operator in launch order, where the names agree.
"""

from dataclasses import replace

import numpy as np

from onerank.converters.kineto.adopt import pairs
from onerank.converters.kineto.columns import I64, KinetoTrace
from onerank.converters.kineto.device import GpuOps, link
from onerank.converters.kineto.host import HostTimeline, host_timeline
from onerank.ir import UNKNOWN


def with_time_alone(timeline: HostTimeline, gpu: GpuOps, alone: KinetoTrace) -> tuple[GpuOps, int]:
    """Return the GPU operations with their durations alone, and how many found no partner.

    Args:
        timeline: host events of the profiled window.
        gpu: its GPU operations.
        alone: the window without communication beside; its strings are the profiled window's.
    """
    other_timeline = host_timeline(alone)
    others = link(alone, other_timeline)
    launched, other_launched = _by_operator(gpu), _by_operator(others)
    found = np.full(len(gpu), UNKNOWN)
    for mine, other in zip(_by_thread(timeline), _by_thread(other_timeline), strict=False):
        for own, twins in pairs(timeline, mine, other_timeline, other):
            for op, twin in zip(own.tolist(), twins.tolist(), strict=True):
                kernels, its_twins = launched.get(op, ()), other_launched.get(twin, ())
                for kernel, its_twin in zip(kernels, its_twins, strict=False):
                    if gpu.rows.name[kernel] == others.rows.name[its_twin]:
                        found[kernel] = others.rows.duration_ns[its_twin]
    own = gpu.in_mark < 0
    return replace(gpu, alone_ns=found), int((own & (found == UNKNOWN)).sum())


def _by_operator(gpu: GpuOps) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    rows = np.flatnonzero((gpu.in_mark < 0) & (gpu.operator >= 0))
    for row, operator in zip(rows.tolist(), gpu.operator[rows].tolist(), strict=True):
        made.setdefault(operator, []).append(row)
    return made


def _by_thread(timeline: HostTimeline) -> list[I64]:
    """Host events outside of marks per thread, the threads in the order of their first event."""
    own = timeline.in_mark < 0
    return [
        np.arange(span.start, span.stop)[own[span.start : span.stop]]
        for span in timeline.by_start()
    ]
