"""The module and the phase that each host event belongs to."""

import re

import numpy as np

from onerank.converters.kineto.columns import pick
from onerank.converters.kineto.host import I64, MODULE_SCOPE, NONE, HostTimeline
from onerank.ir import Phase

_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATES = "::AccumulateGrad"
_FUNCTION = re.compile(r"(\w*Backward\d*|torch::autograd::\w+)$")  # alone before torch 1.10
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_FINISHES = ("FSDP::root_post_backward", "torch.distributed.ddp.reducer::copy_bucket_to_grad")
"""What autograd calls once all functions have run: the last gradients are summed or copied out."""


def attribute(timeline: HostTimeline, et_threads: I64) -> None:
    """Set module and phase of every host event.

    Forward: the enclosing module scope. Backward: the module of the last forward operator with
    the same (thread, sequence number), which autograd passes on; the accumulation of a parameter's
    gradient, which has none, follows what produced it at once (autograd gives it precedence) and
    has its module; what autograd calls at its end has none. Threads are walked in the order of
    their start, so that forward threads come before the autograd thread they start.
    A module scope within backward recomputes a checkpoint: backward too, and a forward whose own
    backward may follow.

    Args:
        timeline: the host events, joined with the execution trace.
        et_threads: thread of each row of the execution trace, int64.
    """
    parents: list[int] = timeline.parent.tolist()
    sorts, scopes = _sorts(timeline)
    names: list[int] = timeline.rows.name.tolist()
    named = _named_forwards(timeline)
    forward_threads: list[int] = named[0].tolist()
    sequences: list[int] = named[1].tolist()
    observed: list[int] = pick(et_threads, timeline.et, NONE).tolist()
    known: dict[tuple[int, int], int] = {}
    module, phase = [0] * len(timeline), [0] * len(timeline)
    recomputing, finishing = [False] * len(timeline), [False] * len(timeline)
    forward, backward = int(Phase.FORWARD), int(Phase.BACKWARD)
    for span in timeline.by_start():
        producer = 0
        for index in span:
            parent = parents[index]
            own_module, own_phase, recomputed = 0, 0, False
            if parent >= 0:
                own_module, own_phase = module[parent], phase[parent]
                recomputed, finishing[index] = recomputing[parent], finishing[parent]
            recomputing[index] = recomputed
            sort = sorts[index]
            if sort == _ALONE:
                sort = _PLAIN if own_phase == backward else _GRAD_FUNCTION
            if sort == _PLAIN:
                if sequences[index] >= 0 and (own_phase <= forward or recomputed):
                    if not recomputed:
                        own_phase = forward
                    if observed[index] >= 0:
                        known[observed[index], sequences[index]] = own_module
            elif sort == _SCOPE:
                own_module = scopes[names[index]]
                recomputing[index] = own_phase == backward
                if own_phase != backward:
                    own_phase = forward
            elif sort in (_STEP, _FINISH):
                own_phase = int(Phase.OPTIMIZER) if sort == _STEP else backward
                finishing[index] |= sort == _FINISH
            else:
                own_phase = backward
                found = known.get((forward_threads[index], sequences[index]), 0)
                own_module = producer = found or (producer if sort == _GRADIENT else 0)
            module[index], phase[index] = own_module, own_phase
    timeline.module = np.array(module, dtype=np.int32)
    timeline.phase = np.array(phase, dtype=np.int64)
    timeline.in_functions = (timeline.phase == backward) & ~np.array(finishing, dtype=bool)


_PLAIN, _SCOPE, _STEP, _FINISH, _GRAD_FUNCTION, _GRADIENT, _ALONE = range(7)


def _named_forwards(timeline: HostTimeline) -> tuple[I64, I64]:
    """Return the thread and the sequence number that each event names, int64[n] both.

    The profiler gives autograd's evaluation of a function the numbers of its first callee, which
    a hook on a gradient may be (FSDP's): then they are those of the function, which is called too.
    """
    rows = timeline.rows
    thread, sequence = rows.forward_thread.copy(), rows.sequence.copy()
    without = timeline.named(lambda name: name.startswith(_BACKWARD)) & (thread <= 0)
    function = np.flatnonzero(
        (thread > 0) & (sequence >= 0) & pick(without, timeline.parent, default=False)
    )
    thread[timeline.parent[function]] = thread[function]
    sequence[timeline.parent[function]] = sequence[function]
    return thread, sequence


def _sorts(timeline: HostTimeline) -> tuple[list[int], dict[int, int]]:
    """Return what each event's name means for attribution, and the module of each scope's name."""
    strings = timeline.strings
    distinct, places = np.unique(timeline.rows.name, return_inverse=True)
    sorts: list[int] = []
    scopes: dict[int, int] = {}
    for code in distinct.tolist():
        name = strings[code]
        if name.startswith(MODULE_SCOPE):
            scopes[code] = strings.intern(name.removeprefix(MODULE_SCOPE))
            sorts.append(_SCOPE)
        elif name.startswith(_OPTIMIZER):
            sorts.append(_STEP)
        elif name.startswith(_FINISHES):
            sorts.append(_FINISH)
        elif name.startswith(_BACKWARD):
            sorts.append(_GRADIENT if name.endswith(_ACCUMULATES) else _GRAD_FUNCTION)
        elif _FUNCTION.match(name):
            sorts.append(_ALONE)
        else:
            sorts.append(_PLAIN)
    return np.array(sorts, dtype=np.int64)[places].tolist() if sorts else [], scopes
