"""Calls of models that no backward follows, between those that train: evaluations.

A model that no backward of the step reaches at all (a teacher, a frozen reference) is no such case:
each micro-batch asks it anew.
"""

import numpy as np

from onerank.converters.kineto.columns import pick
from onerank.converters.kineto.host import I64, MODEL_SCOPE, NONE, HostTimeline, Mask
from onerank.ir import Phase


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
    """Return what tells the module of each call: its name, and the model where names are alike."""
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
