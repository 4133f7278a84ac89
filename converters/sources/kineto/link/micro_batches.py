"""Number the micro-batches: pair forwards with backwards, and exclude evaluation forwards.

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
from onerank.converters.sources.kineto.read.schema import pick
from onerank.ir import Phase
from onerank.ir.arrays import I64, Mask


def evaluations(timeline: HostTimeline, is_scope: Mask, named: I64) -> Mask:
    """Return which forward events are of evaluations, bool[n].

    These are calls from outside of all modules that no backward names, of modules that another
    call trains, and what the script computes behind them (their loss), up to the next call.

    Args:
        timeline: the host events, with their phases.
        is_scope: which are calls of modules, bool[n].
        named: forward operators that backward ones name, int64[m].
    """
    forward = timeline.phase == Phase.FORWARD
    opens = is_scope & forward
    trains = _reached(timeline, named)
    of_trained = opens & np.isin(modules := _modules(timeline), modules[opens & trains])
    calls = timeline.outermost(opens)
    evaluated = np.unique(calls[of_trained & ~pick(trains, calls, default=True)])
    if not len(evaluated):
        return np.zeros(len(timeline), dtype=bool)
    units = np.where(calls >= 0, calls, timeline.outermost(forward & timeline.rows.is_operator))
    newest = np.where(calls >= 0, calls, _newest_call(timeline, calls))
    return forward & np.isin(newest, evaluated) & ~pick(trains, units, default=True)


def _reached(timeline: HostTimeline, named: I64) -> Mask:
    """Return which events call, are, or are called by operators that backward names, bool[n].

    An operator that calls modules is named for all of them (torch.utils.checkpoint's function).
    """
    operators = np.zeros(len(timeline), dtype=bool)
    operators[named] = True
    reached = operators | (timeline.nearest(operators) >= 0)
    above = named
    while len(above):
        above = np.unique(timeline.parent[above])
        above = above[above >= 0]
        above = above[~reached[above]]
        reached[above] = True
    return reached


def _modules(timeline: HostTimeline) -> I64:
    """Return the key of each call's module: its name, and the model if names repeat."""
    marks = timeline.outermost(timeline.named(lambda name: name.startswith(MODEL_SCOPE)))
    models = pick(timeline.rows.name, marks, NONE).astype(np.int64)
    return timeline.rows.name + (models + 1) * len(timeline.strings)


def _newest_call(timeline: HostTimeline, calls: I64) -> I64:
    """Return the call that began last before each event, NONE for none, int64[n]."""
    begun = np.unique(calls[calls >= 0])
    start = timeline.rows.start_ns
    begun = begun[np.argsort(start[begun], kind="stable")]
    last = np.searchsorted(start[begun], start, side="right") - 1
    return pick(begun, last, NONE)


class Named(NamedTuple):
    """Operators that belong together as forward and backward.

    Attributes:
        forward: operators that backward ones name, int64[n].
        backward: operators that name any, int64[m].
        place: for each of these, the place of its forward operator among the first, int64[m].
    """

    forward: I64
    backward: I64
    place: I64


def micro_batches(timeline: HostTimeline, is_scope: Mask, et_threads: I64) -> I64:
    """Return the micro-batch of every forward and backward event, NONE for others, int64[n].

    Evaluations have none. Where forwards and backwards of micro-batches overlap, what belongs to
    none for certain (what is sent and received between calls, calls without a backward) has none.

    Args:
        timeline: the host events, with their phases.
        is_scope: which are calls of modules, bool[n].
        et_threads: thread of each row of the execution trace, int64.
    """
    named = named_by_backward(timeline, et_threads)
    evaluated = evaluations(timeline, is_scope, named.forward)
    opens = is_scope & (timeline.phase == Phase.FORWARD) & ~evaluated
    found = _overlapping(timeline, opens, named)
    if found is None:
        found = _one_by_one(timeline, opens if is_scope.any() else timeline.phase == Phase.FORWARD)
    return np.where(evaluated, NONE, found)


def named_by_backward(timeline: HostTimeline, et_threads: I64) -> Named:
    """Return the forward operators that backward ones name: the last with a sequence number."""
    rows = timeline.rows
    observed = pick(et_threads, timeline.et, NONE)
    chosen = np.flatnonzero((timeline.phase == Phase.FORWARD) & (rows.sequence >= 0))[::-1]
    width = int(rows.sequence.max(initial=0)) + 1
    keys, last = np.unique(observed[chosen] * width + rows.sequence[chosen], return_index=True)
    backward = np.flatnonzero((timeline.phase == Phase.BACKWARD) & (rows.forward_thread > 0))
    named = rows.forward_thread[backward] * width + rows.sequence[backward]
    known = np.isin(named, keys)
    used, place = np.unique(np.searchsorted(keys, named[known]), return_inverse=True)
    return Named(chosen[last[used]], backward[known], place)


def _one_by_one(timeline: HostTimeline, opens: Mask) -> I64:
    """Number micro-batches of which each ends before the next begins.

    A new one begins where a module's forward follows a backward; operators outside of modules (a
    running sum of the loss) begin one only in a trace without modules.
    """
    backward, forward = timeline.phase == Phase.BACKWARD, timeline.phase == Phase.FORWARD
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    told = order[(backward | opens)[order]]
    begins = np.zeros(len(timeline), dtype=np.int64)
    begins[told[1:]] = opens[told[1:]] & backward[told[:-1]]
    numbers = np.empty(len(timeline), dtype=np.int64)
    numbers[order] = np.cumsum(begins[order])
    return np.where(backward | forward, numbers, NONE)


def _overlapping(timeline: HostTimeline, opens: Mask, named: Named) -> I64 | None:
    """Number micro-batches by the calls of their models; None where none overlap."""
    run_of, begins = _runs(timeline, opens)
    if len(begins) < 2:
        return None
    calls = timeline.outermost(opens)
    loose = timeline.outermost((timeline.phase == Phase.FORWARD) & timeline.rows.is_operator)
    loose[calls >= 0] = NONE
    runs_of = _links(named, run_of, np.where(calls >= 0, calls, loose))
    called = {unit: runs for unit, runs in runs_of.items() if opens[unit]}
    parts = _joined(len(begins), called.values())
    number_of = _numbers(
        [
            _Call(model, int(timeline.rows.start_ns[unit]), parts[called[unit][0]])
            for unit, model in _models(timeline, sorted(called)).items()
        ],
        begins,
        parts,
    )
    if number_of is None:
        return None
    of_run = np.array([number_of.get(part, NONE) for part in parts], dtype=np.int64)
    of_unit = np.full(len(timeline), NONE)
    for unit, runs in runs_of.items():
        told = {int(of_run[run]) for run in runs}
        of_unit[unit] = told.pop() if len(told) == 1 else NONE
    numbers = pick(of_run, np.where(timeline.phase == Phase.BACKWARD, run_of, NONE), NONE)
    forward = timeline.phase == Phase.FORWARD
    return np.where(forward, pick(of_unit, np.where(calls >= 0, calls, loose), NONE), numbers)


def _runs(timeline: HostTimeline, opens: Mask) -> tuple[I64, list[int]]:
    """Return the run of autograd that each event is in, NONE for none, and when each began.

    A thread that calls models waits while autograd runs, so whatever it does itself ends a run.
    """
    backward = timeline.phase == Phase.BACKWARD
    inside = backward | (timeline.nearest(backward) >= 0)
    threads = np.unique(timeline.rows.thread[opens])
    between = ~inside & np.isin(timeline.rows.thread, threads) & ~timeline.is_run
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    told = order[(inside | between)[order]]
    after = np.concatenate([[False], inside[told[:-1]]])
    begins = inside[told] & (~after | _climbs(timeline, inside)[told])
    run_of = np.full(len(timeline), NONE)
    run_of[told] = np.where(inside[told], np.cumsum(begins) - 1, NONE)
    return run_of, timeline.rows.start_ns[told[begins]].tolist()


def _climbs(timeline: HostTimeline, inside: Mask) -> Mask:
    """Return the autograd functions that belong to a later forward operator than their predecessor.

    A backward runs from the latest operator to the first, so such a function begins a new backward.
    Only numbers of one thread compare.
    """
    rows = timeline.rows
    climbs = np.zeros(len(rows), dtype=bool)
    told = inside & (rows.forward_thread > 0) & (rows.sequence >= 0)
    if len(np.unique(rows.forward_thread[told])) != 1:
        return climbs
    outer = inside & ~pick(inside, timeline.parent, default=False)
    sequence = np.where(told & outer, rows.sequence, NONE)
    inner = np.flatnonzero(told & pick(outer, timeline.parent, default=False))
    np.maximum.at(sequence, timeline.parent[inner], rows.sequence[inner])
    functions = np.flatnonzero(sequence >= 0)
    functions = functions[np.argsort(rows.start_ns[functions], kind="stable")]
    last, first = functions[:-1], functions[1:]
    climbs[first] = (sequence[first] > sequence[last]) & (rows.thread[first] == rows.thread[last])
    return climbs


def _links(named: Named, run_of: I64, unit: I64) -> dict[int, list[int]]:
    """Return the runs of autograd that name an operator of each unit of forward work."""
    units = unit[named.forward[named.place]]
    pairs = np.unique(np.stack([units, run_of[named.backward]], axis=1)[units >= 0], axis=0)
    found: defaultdict[int, list[int]] = defaultdict(list)
    for one, run in pairs.tolist():
        found[one].append(run)
    return found


def _models(timeline: HostTimeline, calls: list[int]) -> dict[int, tuple[int, int]]:
    """Return the key of each call's model: its name, and its mark if names repeat."""
    marks = timeline.outermost(timeline.named(lambda name: name.startswith(MODEL_SCOPE)))
    name, mark = timeline.rows.name, pick(timeline.rows.name, marks, NONE)
    return {call: (int(name[call]), int(mark[call])) for call in calls}


@dataclass(frozen=True, slots=True, order=True)
class _Call:
    """A call of a model, and the part of the step that it is of."""

    model: tuple[int, int]
    start_ns: int
    part: int


def _joined(count: int, groups: Iterable[list[int]]) -> list[int]:
    """Return the part that each run is of: runs that name one call make one part."""
    part = list(range(count))

    def root(run: int) -> int:
        while part[run] != run:
            run = part[run]
        return run

    for first, *others in groups:
        for other in others:
            low, high = sorted((root(first), root(other)))
            part[high] = low
    return [root(run) for run in range(count)]


def _numbers(calls: list[_Call], begins: list[int], parts: list[int]) -> dict[int, int] | None:
    """Return the number of each part among those that call its model.

    A part whose models number it differently has none, nor have parts that call a model unequally
    often: some may be of several micro-batches, whose backwards nothing parts. None where no model
    is called for one part before the backward of the part before begins.
    """
    backward_ns: dict[int, int] = {}
    for part, begin in zip(parts, begins, strict=True):
        backward_ns.setdefault(part, begin)  # runs are in the order of their time
    of_model: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    often: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for call in sorted(calls):
        of_model[call.model].setdefault(call.part, call.start_ns)
        often[call.model][call.part] += 1
    overlap = False
    told: defaultdict[int, set[int]] = defaultdict(set)
    for model, own in of_model.items():
        alike = len(set(often[model].values())) == 1
        ends = [backward_ns[part] for part in own]
        overlap |= any(start < end for start, end in zip([*own.values()][1:], ends, strict=False))
        for number, part in enumerate(own):
            told[part].add(number if alike else NONE)
    if not overlap:
        return None
    return {part: min(numbers) for part, numbers in told.items() if len(numbers) == 1}
