"""Durations over several profiled steps: the median of each node, and its uncontended time.

How long kernels take with no communication beside them.

A capture that paces its collectives records one more window, in which they only leave markers. Its
kernels pair up with those of the profiled window: operator by operator, as `adopt` pairs windows,
and within an operator in launch order, where the names agree.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.diagnostics import Conversion
from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps, link
from onerank.converters.sources.kineto.link.record_ids import pairs
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace
from onerank.ir import UNKNOWN, Graph, Kind

I64 = npt.NDArray[np.int64]

_Lane = tuple[str, int]
"""Sort of node (compute, communication, host) and its stream or thread."""

_Lanes = dict[_Lane, tuple[tuple[str, ...], I64]]
"""Names and indices of a lane's nodes, in order."""


def merge_steps(steps: Sequence[tuple[Graph, Conversion]]) -> tuple[Graph, Conversion]:
    """Return one graph for steps that ran the same, and the report of its conversion.

    The steps whose compute (GPU operations by stream; on a CPU the operators by thread) has the
    sequence of names that most have count; the others are left out. Of these steps, and among them
    of those whose host did what it did in most, the one whose summed compute is the median (of
    two, the lower) gives the graph. Each of its nodes gets the median duration, the number of
    samples and their spread (longest minus shortest). A host thread that did something else in a
    step gives no samples of that step.

    Args:
        steps: graph and report of each step, one at least.
    """
    if len(steps) == 1:
        return steps[0]
    lanes = [_lanes(graph) for graph, _ in steps]
    alike: dict[object, list[int]] = defaultdict(list)
    for number, own in enumerate(lanes):
        compute = {lane: names for lane, (names, _) in own.items() if lane[0] == "compute"}
        alike[tuple(sorted(compute.items()))].append(number)
    used = max(alike.values(), key=len)  # the first of equals
    totals = {number: _total_ns(steps[number][0], lanes[number]) for number in used}
    most_alike = _most_alike([lanes[number] for number in used])
    usual = sorted((used[place] for place in most_alike), key=lambda number: totals[number])
    base = usual[(len(usual) - 1) // 2]
    graph, report = steps[base]
    merged, differing = _merged(graph, [(steps[n][0], lanes[n]) for n in used], lanes[base])
    notes = list(report.notes)
    if len(used) < len(steps):
        notes.append(
            f"{len(steps) - len(used)} of {len(steps)} profiled steps ran another sequence of "
            "compute and are left out"
        )
    if differing:
        notes.append(
            f"{differing} times the host did something else on a thread, or communication had "
            "another order: these durations are of the other steps"
        )
    return merged, replace(
        report,
        steps=len(used),
        steps_left_out=len(steps) - len(used),
        step_times_ns=tuple(totals[number] for number in used),
        timing=f"the medians of {len(used)} profiled steps; order and memory from {report.timing}",
        notes=notes,
    )


def _lanes(graph: Graph) -> _Lanes:
    nodes = graph.nodes
    on_gpu = bool(graph.gpu_compute.any())
    communication = graph.communication
    host = graph.mask(Kind.HOST_OP) & on_gpu
    sorts = np.select([communication, host], ["communication", "host"], "compute").tolist()
    places = np.where(host | (not on_gpu), nodes.thread, nodes.stream).tolist()
    names = graph.text("name")
    members: dict[_Lane, list[int]] = defaultdict(list)
    for index in np.lexsort((np.arange(len(graph)), nodes.start_ns)).tolist():
        members[sorts[index], places[index]].append(index)
    return {
        lane: (tuple(names[index] for index in own), np.array(own, dtype=np.int64))
        for lane, own in members.items()
    }


def _most_alike(steps: list[_Lanes]) -> list[int]:
    """Return the places of the steps that have the most lanes in common with the others."""
    names = [{lane: own for lane, (own, _) in step.items()} for step in steps]
    alike = [sum(mine.get(lane) == own for other in names for lane, own in other.items())
             for mine in names]  # fmt: skip
    return [place for place, count in enumerate(alike) if count == max(alike)]


def _total_ns(graph: Graph, lanes: _Lanes) -> int:
    compute = [index for (sort, _), (_, index) in lanes.items() if sort == "compute"]
    return sum(int(graph.nodes.duration_ns[index].sum()) for index in compute)


def _merged(graph: Graph, steps: list[tuple[Graph, _Lanes]], lanes: _Lanes) -> tuple[Graph, int]:
    """Return `graph` with medians over `steps`, and how many host lanes of steps differ."""
    durations = graph.nodes.duration_ns.copy()
    samples = np.zeros(len(graph), dtype=np.int32)
    spread = np.zeros(len(graph), dtype=np.int64)
    differing = 0
    for lane, (names, index) in lanes.items():
        same: list[I64] = []
        for other, theirs in steps:
            other_names, other_index = theirs.get(lane, ((), index[:0]))
            if other_names == names:
                same.append(other.nodes.duration_ns[other_index])
            else:
                differing += 1
        stacked = np.stack(same)
        durations[index] = np.rint(np.median(stacked, axis=0)).astype(np.int64)
        samples[index] = len(same)
        spread[index] = stacked.max(axis=0) - stacked.min(axis=0)
    busy = round(statistics.median(step.job.measurement.gpu_busy_ns for step, _ in steps))
    measurement = msgspec.structs.replace(graph.job.measurement, gpu_busy_ns=busy)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    columns = {"duration_ns": durations, "samples": samples, "spread_ns": spread}
    return replace(graph.with_columns(**columns), job=job), differing


def with_uncontended_times(
    timeline: HostTimeline, gpu: GpuOps, alone: KinetoTrace
) -> tuple[GpuOps, int]:
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
