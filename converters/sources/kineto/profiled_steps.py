"""Combine profiled steps: record ids, uncontended kernel times, median durations.

The execution trace observer slows every operator tenfold, so times come from windows without it.
Those windows have no record ids. A training step repeats its operators in the same order, so the
host events of both windows are paired thread by thread, and record ids are copied from the
structure window. If one step has extra events (it logs its loss), pairing resumes after them. Which
Gloo thread runs a call varies, so Gloo calls are paired by name and order, on any thread.

With several profiled steps, each node gets its median duration. A capture with paced collectives
records one more window in which collectives only leave markers; its kernels are paired in the same
way, within an operator in launch order, and give uncontended times.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.kernel_launches import GpuOps, link
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.read.schema import I32, KinetoTrace, Mask
from onerank.ir import UNKNOWN, Graph, Kind

I64 = npt.NDArray[np.int64]

"""Share of the trace's operators that must find a node of their name."""

LEAST_ALIKE = 0.95

"""Share of both windows' host events that must pair up."""

_LONGEST_COMPARED = 5000  # events that differ in the middle; comparing them is quadratic

_OBSERVER_EVENT = "## process_group:init ##"  # the observer's own, at its start

Pairs = list[tuple[I64, I64]]

"""Runs of events that pair up: indices in one window, indices in the other."""


def copy_record_ids(profile: HostTimeline, structure: HostTimeline) -> tuple[I64 | None, str]:
    """Return the record ids of `profile` from `structure`, and a note on differences, or "".

    None if the windows differ too much. Both timelines share a string table.
    """
    # in the order of Gloo's queue
    runs = _runs(profile, profile.rows.start_ns)
    other_runs = _runs(structure, structure.rows.rf_id)
    sequences = list(
        zip(_by_thread(profile, runs), _by_thread(structure, other_runs), strict=False)
    )
    for name in runs.keys() & other_runs.keys():
        sequences += zip(runs[name], other_runs[name], strict=False)
    rf_id = profile.rows.rf_id.copy()
    paired = 0
    for mine, other in sequences:
        for own, twin in pairs(profile, mine, structure, other):
            rf_id[own] = structure.rows.rf_id[twin]
            paired += len(own)
    count, other_count = _counted(profile), _counted(structure)
    if paired < LEAST_ALIKE * max(count, other_count):
        return None, (
            f"of {count} host events of the profiled and {other_count} of the structure window "
            f"only {paired} pair up: its times are left out, and without another profiled "
            "step (`capture run --repeat` profiles several) those of the structure window are "
            "taken, recorded under the execution trace observer"
        )
    difference = ""
    if paired < max(count, other_count):
        difference = (
            f"the profiled window has {count - paired} host events that the structure window "
            f"lacks, and lacks {other_count - paired} of its: the former have no shapes"
        )
    return rf_id, difference


def leave_out_unknown_calls(profile: HostTimeline) -> str:
    """Ignore recorded calls that the structure window lacks; return a note, or "".

    A step that logs may reduce its loss. Only the structure window knows what a call is.
    """
    unknown = profile.rows.rf_id == 0
    count = int((profile.is_mark & unknown).sum())
    profile.is_mark &= ~unknown
    profile.is_wait &= ~unknown
    if not count:
        return ""
    some = "1 communication call" if count == 1 else f"{count} communication calls"
    return (
        f"the profiled step has {some} that the structure step lacks (does the script log in some "
        "steps?): what they are is not known, and they are left out"
    )


def pairs(first: HostTimeline, ours: I64, second: HostTimeline, theirs: I64) -> Pairs:
    """Pair events of equal name in order: from the front, from the back, and in between."""
    return pairs_of_names(first.rows.name[ours], ours, second.rows.name[theirs], theirs)


def pairs_of_names(names: I32, ours: I64, other_names: I32, theirs: I64) -> Pairs:
    """Pair the members of two sequences whose names are equal, as `pairs`."""
    shorter = min(len(names), len(other_names))
    front = _equal(names[:shorter], other_names[:shorter])
    rest = shorter - front
    back = _equal(names[::-1][:rest], other_names[::-1][:rest])
    found: Pairs = [(ours[:front], theirs[:front])]
    middle = names[front : len(names) - back].tolist()
    other_middle = other_names[front : len(other_names) - back].tolist()
    if middle and other_middle and max(len(middle), len(other_middle)) <= _LONGEST_COMPARED:
        matcher = SequenceMatcher(None, middle, other_middle, autojunk=False)
        for block in matcher.get_matching_blocks():
            begin, other_begin = front + block.a, front + block.b
            found.append(
                (ours[begin : begin + block.size], theirs[other_begin : other_begin + block.size])
            )
    if back:
        found.append((ours[-back:], theirs[-back:]))
    return found


def _equal(names: I32, other_names: I32) -> int:
    """Return how many are equal from the front on."""
    unlike = np.flatnonzero(names != other_names)
    return int(unlike[0]) if len(unlike) else len(names)


_Runs = dict[int, list[I64]]


def _runs(timeline: HostTimeline, order: I64) -> _Runs:
    """Return what threads of Gloo's own did: by name, the calls, each with the events within it.

    Args:
        timeline: the host events.
        order: what the calls of a name are sorted by, int64[n].
    """
    rows, found = timeline.rows, defaultdict[int, list[I64]](list)
    for span in timeline.threads.values():
        own = np.arange(span.start, span.stop)
        first = np.flatnonzero(timeline.is_run[own])
        if not len(first) or first[0]:
            continue
        last = own[first[np.searchsorted(first, np.arange(len(own)), side="right") - 1]]
        if (rows.start_ns[own] > rows.end_ns[last]).any():
            continue  # of somebody who does more
        for members in np.split(own, first[1:]):
            found[int(rows.name[members[0]])].append(members)
    for calls in found.values():
        calls.sort(key=lambda members: int(order[members[0]]))
    return found


def _by_thread(timeline: HostTimeline, runs: _Runs) -> list[I64]:
    """Other host events per thread in call order, the threads in the order of their first event."""
    own = _is_counted(timeline)
    for calls in runs.values():
        own[np.concatenate(calls)] = False
    found = [np.arange(span.start, span.stop)[own[span.start : span.stop]]
             for span in timeline.threads.values()]  # fmt: skip
    return sorted(
        (members for members in found if len(members)),
        key=lambda members: int(timeline.rows.start_ns[members[0]]),
    )


def _is_counted(timeline: HostTimeline) -> Mask:
    return ~timeline.named(_OBSERVER_EVENT.__eq__)


def _counted(timeline: HostTimeline) -> int:
    return int(_is_counted(timeline).sum())


_Lane = tuple[str, int]

"""Sort of node (compute, communication, host) and its stream or thread."""

_Lanes = dict[_Lane, tuple[tuple[str, ...], I64]]

"""Names and indices of a lane's nodes, in order."""


def merge_steps(steps: Sequence[tuple[Graph, Conversion]]) -> tuple[Graph, Conversion]:
    """Return one graph for equal steps, and the report of its conversion.

    Steps count if their compute (GPU operations by stream; on a CPU operators by thread) has the
    most frequent sequence of names; others are dropped. Among them, of those with the most frequent
    host work, the step with the median summed compute (of two, the lower) gives the graph. Each
    node gets the median duration, the number of samples and their spread (longest minus shortest).
    A host thread that differs in a step gives no samples of that step.

    Args:
        steps: graph and report of each step, at least one.
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
    """Return the GPU operations with uncontended durations, and how many found no partner.

    Args:
        timeline: host events of the profiled window.
        gpu: its GPU operations.
        alone: the window without concurrent communication; it shares the profiled window's strings.
    """
    other_timeline = host_timeline(alone)
    others = link(alone, other_timeline)
    launched, other_launched = _by_operator(gpu), _by_operator(others)
    found = np.full(len(gpu), UNKNOWN)
    for mine, other in zip(
        _medians_by_thread(timeline), _medians_by_thread(other_timeline), strict=False
    ):
        for own, twins in pairs(timeline, mine, other_timeline, other):
            for op, twin in zip(own.tolist(), twins.tolist(), strict=True):
                kernels, its_twins = launched.get(op, ()), other_launched.get(twin, ())
                for kernel, its_twin in zip(kernels, its_twins, strict=False):
                    if gpu.rows.name[kernel] == others.rows.name[its_twin]:
                        found[kernel] = others.rows.duration_ns[its_twin]
    own = gpu.in_mark < 0
    return replace(gpu, uncontended_ns=found), int((own & (found == UNKNOWN)).sum())


def _by_operator(gpu: GpuOps) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    rows = np.flatnonzero((gpu.in_mark < 0) & (gpu.operator >= 0))
    for row, operator in zip(rows.tolist(), gpu.operator[rows].tolist(), strict=True):
        made.setdefault(operator, []).append(row)
    return made


def _medians_by_thread(timeline: HostTimeline) -> list[I64]:
    """Host events outside of marks per thread, the threads in the order of their first event."""
    own = timeline.in_mark < 0
    return [
        np.arange(span.start, span.stop)[own[span.start : span.stop]]
        for span in timeline.by_start()
    ]
