"""Phases and micro-batches, once modules are known: what outside of them is forward work.

Whatever runs where gradients are recorded has an autograd sequence number, what a script does
between backward and its next forward too: reducing gradients by hand, gathering parameters, logs.
"""

import numpy as np

from onerank.converters.kineto.host import I64, MODULE_SCOPE, HostTimeline, Mask
from onerank.converters.kineto.micro_batches import micro_batches, named_by_backward
from onerank.ir import Phase


def settle_phases(timeline: HostTimeline, et_threads: I64) -> None:
    """Take the phase from what is no forward work after all, and number the micro-batches.

    Args:
        timeline: the host events, with modules and phases by what encloses them.
        et_threads: thread of each row of the execution trace, int64.
    """
    is_scope = timeline.named(lambda name: name.startswith(MODULE_SCOPE))
    timeline.phase = _forward_alone(timeline, is_scope, et_threads)
    timeline.micro_batch = micro_batches(timeline, is_scope, et_threads)


def _forward_alone(timeline: HostTimeline, is_scope: Mask, et_threads: I64) -> I64:
    """Return the phases, int64[n].

    Forward work outside of modules is what follows a module's forward, up to the backward, and
    what a backward operator names as its forward. A trace without modules stays as it is.
    """
    phase = timeline.phase
    opens = is_scope & (phase == Phase.FORWARD)
    if not opens.any():
        return phase
    closes = (phase == Phase.BACKWARD) | (phase == Phase.OPTIMIZER)
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    told = np.flatnonzero((opens | closes)[order])
    last = np.searchsorted(told, np.arange(len(order)), side="right") - 1
    opened = np.zeros(len(order), dtype=bool)
    opened[order] = (last >= 0) & opens[order[told[last]]]
    asked = np.flatnonzero((phase == Phase.FORWARD) & ~opened)
    roots = _roots(timeline)
    forward = np.unique(roots[named_by_backward(timeline, et_threads).forward])
    inside = is_scope | (timeline.nearest(is_scope) >= 0) if len(asked) else is_scope
    asked = asked[~inside[asked] & ~np.isin(roots[asked], forward)]
    phase = phase.copy()
    phase[asked] = Phase.NONE
    return phase


def _roots(timeline: HostTimeline) -> I64:
    """Return the outermost event around each, int64[n]."""
    parent = timeline.parent
    roots = np.arange(len(parent))
    inner = np.flatnonzero(parent >= 0)
    while len(inner):
        roots[inner] = parent[roots[inner]]
        inner = inner[parent[roots[inner]] >= 0]
    return roots
