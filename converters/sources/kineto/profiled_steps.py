"""Combine profiled steps: record ids, uncontended kernel times, median durations.

A capture profiles several windows. The structure window has record ids and shapes, but its
execution trace observer makes every operator 20 to 40 times slower. The profiled windows have
realistic times and no record ids. A training step repeats its operators in the same order, so the
host events of both windows are paired thread by thread, and record ids are copied from the
structure window. If one step has extra events (it logs its loss), pairing resumes after them.

With several profiled steps, each node gets its median duration. A capture with paced collectives
records one more window, in which collectives only leave markers. Its kernels are paired in the same
way, within an operator in launch order, and give uncontended times.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import HostTimeline, host_timeline
from onerank.converters.sources.kineto.link.link_kernels import GpuOps, link
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.read.trace_columns import KinetoTrace
from onerank.ir import UNKNOWN, Graph, Kind
from onerank.ir.arrays import I32, I64, Mask
from onerank.ir.notes import Note

MIN_PAIRED_SHARE = 0.95
"""Share of both windows' host events that must pair up."""

# SequenceMatcher takes quadratic time, so longer unequal parts stay unpaired.
_MAX_COMPARED = 5000

# The execution trace observer records this event when it starts; profiled windows lack it.
_OBSERVER_EVENT = "## process_group:init ##"

Pairs = list[tuple[I64, I64]]
"""Runs of paired events: indices in the first window, indices in the second."""


def copy_record_ids(
    profile: HostTimeline, structure: HostTimeline
) -> tuple[I64 | None, Note | None]:
    """Copy the record ids of the structure window to the paired events of a profiled window.

    Args:
        profile: host events of the profiled window.
        structure: host events of the structure window; both share a string table.

    Returns:
        The record ids of `profile`, None if too few events pair up; and a note on the differences,
        None without any.
    """
    # Which Gloo thread runs a call varies from step to step, so Gloo's calls are paired by name on
    # any thread. The structure window sorts them by record id, the order of Gloo's queue.
    calls = _gloo_calls(profile, profile.rows.start_ns)
    structure_calls = _gloo_calls(structure, structure.rows.rf_id)
    sequences = list(
        zip(_by_thread(profile, calls), _by_thread(structure, structure_calls), strict=False)
    )
    for name in calls.keys() & structure_calls.keys():
        sequences += zip(calls[name], structure_calls[name], strict=False)
    # The id of an unpaired event stays 0: without the observer, all ids of the window are 0.
    rf_id = profile.rows.rf_id.copy()
    paired = 0
    for events, structure_events in sequences:
        for index, structure_index in pair_events(profile, events, structure, structure_events):
            rf_id[index] = structure.rows.rf_id[structure_index]
            paired += len(index)
    count, structure_count = _count_events(profile), _count_events(structure)
    if paired < MIN_PAIRED_SHARE * max(count, structure_count):
        return None, Note(
            f"only {paired} host events pair up, of {count} in the profiled and "
            f"{structure_count} in the structure window: the profiled times are dropped. "
            "Without another profiled step (`capture run --repeat`) times come from the "
            "structure window, recorded under the execution trace observer",
            code="profiled-times-dropped",
        )
    difference = None
    if paired < max(count, structure_count):
        difference = Note(
            f"{count - paired} host events occur only in the profiled window and have no shapes; "
            f"{structure_count - paired} occur only in the structure window",
            code="host-events-unpaired",
        )
    return rf_id, difference


def drop_unknown_calls(profile: HostTimeline) -> Note | None:
    """Clear the marks of recorded calls that the structure window lacks; return a note, or None.

    A step that logs may reduce its loss. Only the structure window records a call's arguments.
    """
    unknown = profile.rows.rf_id == 0
    count = int((profile.is_mark & unknown).sum())
    profile.is_mark &= ~unknown
    profile.is_wait &= ~unknown
    if not count:
        return None
    calls = "1 communication call" if count == 1 else f"{count} communication calls"
    return Note(
        f"dropped {calls} that the profiled step has and the structure step lacks: the arguments "
        "are unknown (does the script log in some steps?)",
        code="calls-without-arguments",
    )


def pair_events(first: HostTimeline, events: I64, second: HostTimeline, others: I64) -> Pairs:
    """Pair events of equal name in order: common prefix, common suffix, and the part between.

    Args:
        first: host events of one window.
        events: indices in `first` to pair, in order, int64[n].
        second: host events of the other window.
        others: indices in `second` to pair, in order, int64[m].
    """
    names, other_names = first.rows.name[events], second.rows.name[others]
    shorter = min(len(names), len(other_names))
    prefix = _equal_prefix(names[:shorter], other_names[:shorter])
    unpaired = shorter - prefix
    suffix = _equal_prefix(names[::-1][:unpaired], other_names[::-1][:unpaired])
    pairs: Pairs = [(events[:prefix], others[:prefix])]
    middle = names[prefix : len(names) - suffix].tolist()
    other_middle = other_names[prefix : len(other_names) - suffix].tolist()
    if middle and other_middle and max(len(middle), len(other_middle)) <= _MAX_COMPARED:
        # Only here, since most steps are equal and need no import.
        from difflib import SequenceMatcher

        matcher = SequenceMatcher(None, middle, other_middle, autojunk=False)
        for block in matcher.get_matching_blocks():
            begin, other_begin = prefix + block.a, prefix + block.b
            pairs.append(
                (events[begin : begin + block.size], others[other_begin : other_begin + block.size])
            )
    if suffix:
        pairs.append((events[-suffix:], others[-suffix:]))
    return pairs


def _equal_prefix(names: I32, other_names: I32) -> int:
    """Return the length of the common prefix of two sequences of equal length."""
    different = np.flatnonzero(names != other_names)
    return int(different[0]) if len(different) else len(names)


# Name of a Gloo call -> indices of the host events of each of its calls, in order.
_GlooCalls = dict[int, list[I64]]


def _gloo_calls(timeline: HostTimeline, order: I64) -> _GlooCalls:
    """Return the calls on threads that run Gloo calls only, each with the events within it.

    Args:
        timeline: the host events.
        order: sort key of calls of one name, by their first event, int64[n].
    """
    rows, calls_by_name = timeline.rows, defaultdict[int, list[I64]](list)
    for span in timeline.threads.values():
        events = np.arange(span.start, span.stop)
        first = np.flatnonzero(timeline.is_run[events])
        if not len(first) or first[0]:
            continue
        call = events[first[np.searchsorted(first, np.arange(len(events)), side="right") - 1]]
        # An event after the end of the call before it: the thread does other work as well.
        if (rows.start_ns[events] > rows.end_ns[call]).any():
            continue
        for members in np.split(events, first[1:]):
            calls_by_name[int(rows.name[members[0]])].append(members)
    for calls in calls_by_name.values():
        calls.sort(key=lambda members: int(order[members[0]]))
    return calls_by_name


def _by_thread(timeline: HostTimeline, calls_by_name: _GlooCalls) -> list[I64]:
    """Return the other host events per thread in call order, threads by their first event."""
    included = _is_counted(timeline)
    for calls in calls_by_name.values():
        included[np.concatenate(calls)] = False
    threads = [np.arange(span.start, span.stop)[included[span.start : span.stop]]
               for span in timeline.threads.values()]  # fmt: skip
    return sorted(
        (events for events in threads if len(events)),
        key=lambda events: int(timeline.rows.start_ns[events[0]]),
    )


def _is_counted(timeline: HostTimeline) -> Mask:
    return ~timeline.named(_OBSERVER_EVENT.__eq__)


def _count_events(timeline: HostTimeline) -> int:
    return int(_is_counted(timeline).sum())


# Kind of node (compute, communication, host) and its stream or thread.
_SequenceKey = tuple[str, int]

# Names and indices of the nodes of each stream or thread, in order.
_Sequences = dict[_SequenceKey, tuple[tuple[str, ...], I64]]


def merge_steps(steps: Sequence[tuple[Graph, Conversion]]) -> tuple[Graph, Conversion]:
    """Return one graph for equal steps, and the report of its conversion.

    Steps are used if their compute (GPU operations by stream; on a CPU operators by thread) has the
    most frequent sequence of names; others are dropped. The graph comes from one used step: of
    those with the most frequent host work, the step with the median summed compute (of two, the
    lower). Each node gets the median duration, the number of samples and their spread (longest
    minus shortest). A sequence whose names differ in a step has no samples of that step.

    Args:
        steps: graph and report of each step, at least one.
    """
    if len(steps) == 1:
        return steps[0]
    sequences = [_node_sequences(graph) for graph, _ in steps]
    steps_by_compute: dict[object, list[int]] = defaultdict(list)
    for number, step_sequences in enumerate(sequences):
        compute = {key: names for key, (names, _) in step_sequences.items() if key[0] == "compute"}
        steps_by_compute[tuple(sorted(compute.items()))].append(number)
    # Of equally many, max returns the first.
    used = max(steps_by_compute.values(), key=len)
    totals = {number: _total_ns(steps[number][0], sequences[number]) for number in used}
    typical = _most_similar([sequences[number] for number in used])
    candidates = sorted((used[place] for place in typical), key=lambda number: totals[number])
    base = candidates[(len(candidates) - 1) // 2]
    graph, report = steps[base]
    merged, differing = _merged(graph, [(steps[n][0], sequences[n]) for n in used], sequences[base])
    notes = list(report.notes)
    if len(used) < len(steps):
        notes.append(
            Note(
                f"{len(steps) - len(used)} of {len(steps)} profiled steps are dropped: their "
                "sequence of compute differs from the most frequent one",
                code="profiled-steps-differ",
            )
        )
    if differing:
        notes.append(
            Note(
                f"{differing} sequences of host work or communication differ between steps: their "
                "durations come from the steps that agree",
                code="step-sequences-differ",
            )
        )
    return merged, replace(
        report,
        steps=len(used),
        steps_dropped=len(steps) - len(used),
        step_times_ns=tuple(totals[number] for number in used),
        timing=f"the medians of {len(used)} profiled steps; order and memory from {report.timing}",
        notes=notes,
    )


def _node_sequences(graph: Graph) -> _Sequences:
    nodes = graph.nodes
    on_gpu = bool(graph.gpu_compute.any())
    communication = graph.communication
    host = graph.mask(Kind.HOST_OP) & on_gpu
    kinds = np.select([communication, host], ["communication", "host"], "compute").tolist()
    places = np.where(host | (not on_gpu), nodes.thread, nodes.stream).tolist()
    names = graph.text("name")
    members: dict[_SequenceKey, list[int]] = defaultdict(list)
    for index in np.lexsort((np.arange(len(graph)), nodes.start_ns)).tolist():
        members[kinds[index], places[index]].append(index)
    return {
        key: (tuple(names[index] for index in indices), np.array(indices, dtype=np.int64))
        for key, indices in members.items()
    }


def _most_similar(steps: list[_Sequences]) -> list[int]:
    """Return the places of the steps that have the most sequences in common with the others."""
    sequences = [{key: names for key, (names, _) in step.items()} for step in steps]
    equal_counts = [
        sum(step.get(key) == names for other in sequences for key, names in other.items())
        for step in sequences
    ]
    most = max(equal_counts)
    return [place for place, count in enumerate(equal_counts) if count == most]


def _total_ns(graph: Graph, sequences: _Sequences) -> int:
    compute = [index for (kind, _), (_, index) in sequences.items() if kind == "compute"]
    return sum(int(graph.nodes.duration_ns[index].sum()) for index in compute)


def _merged(
    graph: Graph, steps: list[tuple[Graph, _Sequences]], sequences: _Sequences
) -> tuple[Graph, int]:
    """Return `graph` with medians over `steps`, and how many sequences of steps differ."""
    durations = graph.nodes.duration_ns.copy()
    samples = np.zeros(len(graph), dtype=np.int32)
    spread = np.zeros(len(graph), dtype=np.int64)
    differing = 0
    for key, (names, index) in sequences.items():
        measured: list[I64] = []
        for step, step_sequences in steps:
            step_names, step_index = step_sequences.get(key, ((), index[:0]))
            # Only equal sequences pair nodes: with one node more, each later node would pair with
            # another.
            if step_names == names:
                measured.append(step.nodes.duration_ns[step_index])
            else:
                differing += 1
        stacked = np.stack(measured)
        durations[index] = np.rint(np.median(stacked, axis=0)).astype(np.int64)
        samples[index] = len(measured)
        spread[index] = stacked.max(axis=0) - stacked.min(axis=0)
    busy = round(np.median([step.job.measurement.gpu_busy_ns for step, _ in steps]))
    measurement = msgspec.structs.replace(graph.job.measurement, gpu_busy_ns=busy)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    columns = {"duration_ns": durations, "samples": samples, "spread_ns": spread}
    return replace(graph.with_columns(**columns), job=job), differing


def with_uncontended_times(
    timeline: HostTimeline, gpu: GpuOps, uncontended: KinetoTrace
) -> tuple[GpuOps, int]:
    """Return the GPU operations with uncontended durations, and the number of unpaired ones.

    Args:
        timeline: host events of the profiled window.
        gpu: its GPU operations.
        uncontended: the window without concurrent communication; it shares the profiled window's
            string table.
    """
    other_timeline = host_timeline(uncontended)
    other_gpu = link(uncontended, other_timeline)
    launched, other_launched = _by_operator(gpu), _by_operator(other_gpu)
    uncontended_ns = np.full(len(gpu), UNKNOWN)
    for events, other_events in zip(
        _unmarked_by_thread(timeline), _unmarked_by_thread(other_timeline), strict=False
    ):
        for ops, other_ops in pair_events(timeline, events, other_timeline, other_events):
            for op, other_op in zip(ops.tolist(), other_ops.tolist(), strict=True):
                kernels, other_kernels = launched.get(op, ()), other_launched.get(other_op, ())
                for kernel, other_kernel in zip(kernels, other_kernels, strict=False):
                    if gpu.rows.name[kernel] == other_gpu.rows.name[other_kernel]:
                        uncontended_ns[kernel] = other_gpu.rows.duration_ns[other_kernel]
    unpaired = (gpu.in_mark < 0) & (uncontended_ns == UNKNOWN)
    return replace(gpu, uncontended_ns=uncontended_ns), int(unpaired.sum())


def _by_operator(gpu: GpuOps) -> dict[int, list[int]]:
    """Return the rows of the GPU operations that each operator launched outside of marks."""
    rows_by_operator: dict[int, list[int]] = {}
    rows = np.flatnonzero((gpu.in_mark < 0) & (gpu.operator >= 0))
    for row, operator in zip(rows.tolist(), gpu.operator[rows].tolist(), strict=True):
        rows_by_operator.setdefault(operator, []).append(row)
    return rows_by_operator


def _unmarked_by_thread(timeline: HostTimeline) -> list[I64]:
    """Return the host events outside of marks per thread, threads by their first event."""
    # A mark contains what emulates its collective, which only the contended window launches.
    unmarked = timeline.in_mark < 0
    return [
        np.arange(span.start, span.stop)[unmarked[span.start : span.stop]]
        for span in timeline.by_start()
    ]
