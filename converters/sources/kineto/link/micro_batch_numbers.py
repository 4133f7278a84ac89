"""The micro-batch of each forward and backward event, and which forwards are evaluations.

Most scripts run a micro-batch's forward and backward before the next forward. Pipeline schedules do
not: they call the model again before the first backward. There each model call is a micro-batch,
and its backward is the autograd run that names operators of that call.

A model call between training calls that no backward follows is an evaluation and has no
micro-batch. A model that no backward of the step reaches (a teacher, a frozen reference) is not an
evaluation: each micro-batch calls it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import MODEL_SCOPE, NONE, HostTimeline
from onerank.converters.sources.kineto.read.trace_columns import pick
from onerank.ir import Phase
from onerank.ir.arrays import I64, Mask, unique_values


def micro_batches(timeline: HostTimeline, is_scope: Mask, et_threads: I64) -> I64:
    """Return the micro-batch of every forward and backward event, NONE for others, int64[n].

    Evaluations have none. If micro-batches overlap, transfers between calls and calls without a
    backward have none either.

    Args:
        timeline: the host events, with their phases.
        is_scope: which events are module calls, bool[n].
        et_threads: thread of each row of the execution trace, int64.
    """
    pairs = forward_backward_pairs(timeline, et_threads)
    evaluated = _evaluation_events(timeline, is_scope, pairs.forward)
    opens = is_scope & (timeline.phase == Phase.FORWARD) & ~evaluated
    numbers = _number_overlapping(timeline, opens, pairs)
    if numbers is None:
        numbers = _number_sequential(
            timeline, opens if is_scope.any() else timeline.phase == Phase.FORWARD
        )
    # With a number, a pipeline schedule would repeat an evaluation with that micro-batch.
    return np.where(evaluated, NONE, numbers)


class ForwardBackwardPairs(NamedTuple):
    """Pairs of a forward operator and a backward operator that names it.

    Attributes:
        forward: the distinct forward operators, int64[n].
        backward: the backward operators, int64[m].
        place: index in `forward` of each backward operator's forward operator, int64[m].
    """

    forward: I64
    backward: I64
    place: I64


def forward_backward_pairs(timeline: HostTimeline, et_threads: I64) -> ForwardBackwardPairs:
    """Pair backward operators with the last forward operator of their thread and sequence."""
    rows = timeline.rows
    et_thread = pick(et_threads, timeline.et, NONE)
    # Reversed, because `np.unique` returns the first of equal keys and the last operator is wanted.
    candidates = np.flatnonzero((timeline.phase == Phase.FORWARD) & (rows.sequence >= 0))[::-1]
    width = int(rows.sequence.max(initial=0)) + 1
    keys, last = np.unique(
        et_thread[candidates] * width + rows.sequence[candidates], return_index=True
    )
    backward = np.flatnonzero((timeline.phase == Phase.BACKWARD) & (rows.forward_thread > 0))
    named_keys = rows.forward_thread[backward] * width + rows.sequence[backward]
    known = np.isin(named_keys, keys)
    used, place = np.unique(np.searchsorted(keys, named_keys[known]), return_inverse=True)
    return ForwardBackwardPairs(candidates[last[used]], backward[known], place)


def _evaluation_events(timeline: HostTimeline, is_scope: Mask, named: I64) -> Mask:
    """Return which forward events belong to evaluations, bool[n].

    An evaluation is a top-level call that no backward names, of a module that another call trains.
    What the script computes after it, up to the next call (its loss), belongs to it.

    Args:
        timeline: the host events, with their phases.
        is_scope: which events are module calls, bool[n].
        named: forward operators that backward operators name, int64[m].
    """
    forward = timeline.phase == Phase.FORWARD
    opens = is_scope & forward
    trains = _reached_by_backward(timeline, named)
    modules = _module_keys(timeline)
    of_trained = opens & np.isin(modules, modules[opens & trains])
    calls = timeline.outermost(opens)
    evaluated = unique_values(calls[of_trained & ~pick(trains, calls, default=True)])
    if not len(evaluated):
        return np.zeros(len(timeline), dtype=bool)
    outermost_events = np.where(
        calls >= 0, calls, timeline.outermost(forward & timeline.rows.is_operator)
    )
    latest = np.where(calls >= 0, calls, _latest_call(timeline, calls))
    return forward & np.isin(latest, evaluated) & ~pick(trains, outermost_events, default=True)


def _reached_by_backward(timeline: HostTimeline, named: I64) -> Mask:
    """Return which events call, are or are called by operators that backward names, bool[n].

    An operator that calls modules (torch.utils.checkpoint's function) is named for all of them.
    """
    operators = np.zeros(len(timeline), dtype=bool)
    operators[named] = True
    reached = operators | (timeline.nearest(operators) >= 0)
    above = named
    while len(above):
        above = unique_values(timeline.parent[above])
        above = above[above >= 0]
        above = above[~reached[above]]
        reached[above] = True
    return reached


def _module_keys(timeline: HostTimeline) -> I64:
    """Return a key of the module that each event calls, int64[n].

    It stands for the event's name and for the model around it: modules of two models share names.
    """
    marks = timeline.outermost(timeline.named(lambda name: name.startswith(MODEL_SCOPE)))
    models = pick(timeline.rows.name, marks, NONE).astype(np.int64)
    return timeline.rows.name + (models + 1) * len(timeline.strings)


def _latest_call(timeline: HostTimeline, calls: I64) -> I64:
    """Return the call with the latest start up to each event, NONE for none, int64[n]."""
    begun = unique_values(calls[calls >= 0])
    start = timeline.rows.start_ns
    begun = begun[np.argsort(start[begun], kind="stable")]
    last = np.searchsorted(start[begun], start, side="right") - 1
    return pick(begun, last, NONE)


def _number_sequential(timeline: HostTimeline, opens: Mask) -> I64:
    """Number micro-batches that do not overlap.

    A micro-batch begins at a module's forward that follows a backward. Operators outside modules (a
    running sum of the loss) begin a micro-batch only in a trace without modules.
    """
    backward, forward = timeline.phase == Phase.BACKWARD, timeline.phase == Phase.FORWARD
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    boundaries = order[(backward | opens)[order]]
    begins = np.zeros(len(timeline), dtype=np.int64)
    begins[boundaries[1:]] = opens[boundaries[1:]] & backward[boundaries[:-1]]
    numbers = np.empty(len(timeline), dtype=np.int64)
    numbers[order] = np.cumsum(begins[order])
    return np.where(backward | forward, numbers, NONE)


def _number_overlapping(
    timeline: HostTimeline, opens: Mask, pairs: ForwardBackwardPairs
) -> I64 | None:
    """Number micro-batches by the model calls; return None if none overlap."""
    run_of, begins = _runs(timeline, opens)
    if len(begins) < 2:
        return None
    calls = timeline.outermost(opens)
    outside_calls = timeline.outermost(
        (timeline.phase == Phase.FORWARD) & timeline.rows.is_operator
    )
    outside_calls[calls >= 0] = NONE
    runs_of = _runs_of_units(pairs, run_of, np.where(calls >= 0, calls, outside_calls))
    called = {unit: runs for unit, runs in runs_of.items() if opens[unit]}
    part_of_run = _connected_runs(len(begins), called.values())
    models, start_ns = _module_keys(timeline), timeline.rows.start_ns
    model_calls = [
        _ModelCall(int(models[unit]), int(start_ns[unit]), part_of_run[runs[0]])
        for unit, runs in called.items()
    ]
    number_of = _numbers(model_calls, begins, part_of_run)
    if number_of is None:
        return None
    of_run = np.array([number_of.get(part, NONE) for part in part_of_run], dtype=np.int64)
    of_unit = np.full(len(timeline), NONE)
    for unit, runs in runs_of.items():
        unit_numbers = {int(of_run[run]) for run in runs}
        of_unit[unit] = unit_numbers.pop() if len(unit_numbers) == 1 else NONE
    numbers = pick(of_run, np.where(timeline.phase == Phase.BACKWARD, run_of, NONE), NONE)
    forward = timeline.phase == Phase.FORWARD
    return np.where(
        forward, pick(of_unit, np.where(calls >= 0, calls, outside_calls), NONE), numbers
    )


def _runs(timeline: HostTimeline, opens: Mask) -> tuple[I64, list[int]]:
    """Return the autograd run of each event, int64[n], NONE for none, and each run's start time.

    A thread that calls models waits while autograd runs, so its next event ends a run.
    """
    backward = timeline.phase == Phase.BACKWARD
    inside = backward | (timeline.nearest(backward) >= 0)
    threads = unique_values(timeline.rows.thread[opens])
    between = ~inside & np.isin(timeline.rows.thread, threads) & ~timeline.is_run
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    delimiting = order[(inside | between)[order]]
    continues = np.concatenate([[False], inside[delimiting[:-1]]])
    is_first = inside[delimiting] & (
        ~continues | _starts_later_backward(timeline, inside)[delimiting]
    )
    run_of = np.full(len(timeline), NONE)
    run_of[delimiting] = np.where(inside[delimiting], np.cumsum(is_first) - 1, NONE)
    return run_of, timeline.rows.start_ns[delimiting[is_first]].tolist()


def _starts_later_backward(timeline: HostTimeline, inside: Mask) -> Mask:
    """Return which autograd functions follow one of an earlier forward operator, bool[n].

    A backward visits forward operators from the last to the first, so such a function begins a new
    backward. Sequence numbers are comparable only within one forward thread.
    """
    rows = timeline.rows
    begins = np.zeros(len(rows), dtype=bool)
    numbered = inside & (rows.forward_thread > 0) & (rows.sequence >= 0)
    if len(unique_values(rows.forward_thread[numbered])) != 1:
        return begins
    outer = inside & ~pick(inside, timeline.parent, default=False)
    sequence = np.where(numbered & outer, rows.sequence, NONE)
    inner = np.flatnonzero(numbered & pick(outer, timeline.parent, default=False))
    np.maximum.at(sequence, timeline.parent[inner], rows.sequence[inner])
    functions = np.flatnonzero(sequence >= 0)
    functions = functions[np.argsort(rows.start_ns[functions], kind="stable")]
    last, first = functions[:-1], functions[1:]
    begins[first] = (sequence[first] > sequence[last]) & (rows.thread[first] == rows.thread[last])
    return begins


def _runs_of_units(pairs: ForwardBackwardPairs, run_of: I64, unit: I64) -> dict[int, list[int]]:
    """Return, for each unit of forward work, the autograd runs that name one of its operators."""
    units = unit[pairs.forward[pairs.place]]
    unit_runs = np.unique(np.stack([units, run_of[pairs.backward]], axis=1)[units >= 0], axis=0)
    runs_of: defaultdict[int, list[int]] = defaultdict(list)
    for unit_index, run in unit_runs.tolist():
        runs_of[unit_index].append(run)
    return runs_of


@dataclass(frozen=True, slots=True, order=True)
class _ModelCall:
    """A call of a model, and the connected part of the step that it belongs to.

    Attributes:
        model: key of the model.
        start_ns: when the call begins.
        part: one of the runs that backwards of the same calls connect, as `_connected_runs` names
            them.
    """

    model: int
    start_ns: int
    part: int


def _connected_runs(count: int, groups: Iterable[list[int]]) -> list[int]:
    """Return the part of each autograd run; runs that name the same call share a part."""
    part = list(range(count))

    def root(run: int) -> int:
        while part[run] != run:
            # This halves the path, so that long chains stay cheap.
            part[run] = part[part[run]]
            run = part[run]
        return run

    for first, *others in groups:
        for other in others:
            low, high = sorted((root(first), root(other)))
            part[high] = low
    return [root(run) for run in range(count)]


def _numbers(calls: list[_ModelCall], begins: list[int], parts: list[int]) -> dict[int, int] | None:
    """Return the micro-batch of each part: its position among the parts that call the same model.

    A part has no number if its models give it different ones. It has none either if parts call one
    of its models unequally often: such a part may contain several micro-batches whose backwards are
    indistinguishable. Returns None if every backward begins before the next part's call of the same
    model, so that no micro-batches overlap.
    """
    backward_ns: dict[int, int] = {}
    for part, begin in zip(parts, begins, strict=True):
        # Runs are in the order of their time, so the first begin of a part stays.
        backward_ns.setdefault(part, begin)
    of_model: defaultdict[int, dict[int, int]] = defaultdict(dict)
    calls_of_part: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for call in sorted(calls):
        of_model[call.model].setdefault(call.part, call.start_ns)
        calls_of_part[call.model][call.part] += 1
    overlap = False
    numbers_of: defaultdict[int, set[int]] = defaultdict(set)
    for model, start_of_part in of_model.items():
        equal_counts = len(set(calls_of_part[model].values())) == 1
        ends = [backward_ns[part] for part in start_of_part]
        overlap |= any(
            start < end for start, end in zip([*start_of_part.values()][1:], ends, strict=False)
        )
        for number, part in enumerate(start_of_part):
            numbers_of[part].add(number if equal_counts else NONE)
    if not overlap:
        return None
    return {part: min(numbers) for part, numbers in numbers_of.items() if len(numbers) == 1}
