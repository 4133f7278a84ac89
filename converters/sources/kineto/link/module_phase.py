"""The module and the phase (forward, backward, optimizer) of each host event.

Module scopes decide first. Autograd sequence numbers link a backward function to its forward
operator and therefore to its module. They do not prove forward work: anything that runs with
gradients enabled has one, also manual gradient reductions, parameter gathers and logging between
backward and the next forward.

Gradient reductions after a backward count as backward. Inside backward, autograd calls the
reduction of a full bucket; Megatron-LM's finalize_model_grads, DeepSpeed's epilogue and loops over
parameters reduce afterwards, and the work is the same. Other reductions there (a loss for the log,
a norm) have no phase.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import MODULE_SCOPE, NONE, HostTimeline
from onerank.converters.sources.kineto.link.micro_batches import micro_batches, named_by_backward
from onerank.converters.sources.kineto.read.schema import ExecutionTrace, pick
from onerank.ir import Job, Phase
from onerank.ir.arrays import I64, Mask

_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "flex_attention")


def with_attention(job: Job, timeline: HostTimeline) -> Job:
    """Give the role of attention to what was taken for an mlp and itself calls attention."""
    attends = timeline.named(
        lambda name: name.rsplit("::", 1)[-1].lstrip("_").startswith(_ATTENTION)
    )
    chosen = attends & timeline.rows.is_operator & (timeline.phase == Phase.FORWARD)
    callers = set(timeline.strings.decode(np.unique(timeline.module[chosen])))
    scopes = {
        module.scope or module.path
        for module in job.modules
        if module.role == "mlp" and module.path in callers
    }
    if not scopes:
        return job
    modules = tuple(
        msgspec.structs.replace(module, role="attention")
        if module.role == "mlp" and (module.scope or module.path) in scopes
        else module
        for module in job.modules
    )
    return msgspec.structs.replace(job, modules=modules)


def assign_phases(timeline: HostTimeline, et_threads: I64) -> None:
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


_REDUCTIONS = ("c10d::allreduce", "c10d::reduce", "c10d::_reduce_scatter")

_PARTS = frozenset(  # operators whose results are parts of what they read, where it lies
    f"aten::{name}"
    for name in (
        "as_strided chunk diagonal narrow select slice split split_with_sizes tensor_split unbind "
        "unsafe_chunk unsafe_split"
    ).split()
)


def attribute_grad_reductions(timeline: HostTimeline, et: ExecutionTrace) -> None:
    """Assign gradient reductions after a backward to that backward's phase and micro-batch.

    Args:
        timeline: the host events, with phases and micro-batches; events without a phase may become
            backward.
        et: the execution trace, whose operands identify gradients.
    """
    asked = timeline.named(lambda name: name.startswith(_REDUCTIONS))
    asked &= (timeline.phase == Phase.NONE) & (timeline.et >= 0)
    if not asked.any():
        return
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    newest = _newest(order, timeline.phase != Phase.NONE)
    asked &= (newest >= 0) & (timeline.phase[newest] == Phase.BACKWARD)
    if not asked.any():
        return
    outer = timeline.outermost(timeline.rows.is_operator)
    calls = _of_gradients(timeline, et, order, outer, asked)
    inside = np.flatnonzero(np.isin(outer, np.array(calls, dtype=np.int64)) & (outer >= 0))
    timeline.phase[inside] = Phase.BACKWARD
    timeline.micro_batch[inside] = timeline.micro_batch[newest[outer[inside]]]


def _newest(order: I64, chosen: Mask) -> I64:
    """Return the last chosen event that began before each, or itself, else NONE, int64[n]."""
    told = np.where(chosen[order], np.arange(len(order)), -1)
    last = np.maximum.accumulate(told)
    newest = np.empty(len(order), dtype=np.int64)
    newest[order] = np.where(last >= 0, order[last], -1)
    return newest


def _of_gradients(
    timeline: HostTimeline, et: ExecutionTrace, order: I64, outer: I64, asked: Mask
) -> list[int]:
    """Return the outermost candidate operators that read gradients.

    Gradients are tensors that the last backward wrote, and what operators without a phase make of
    them without losing elements: a copy, a flat buffer, a view, but not a norm. Storages are
    identified by address, so every operator that creates a tensor decides anew. All DTensors share
    one storage, because they have no memory; there the number of elements also excludes a norm.
    """
    gradients: set[int] = set()
    found: list[int] = []
    own = outer == np.arange(len(outer))
    asked = np.isin(np.arange(len(outer)), outer[asked])
    backward = timeline.phase == Phase.BACKWARD
    read = (timeline.et >= 0) & (own | backward)
    last = int(np.flatnonzero(asked[order])[-1])
    phases: list[int] = timeline.phase.tolist()
    for index in order[: last + 1][read[order[: last + 1]]].tolist():
        row = int(timeline.et[index])
        made = [*_tensors(_operands(timeline.strings[int(et.operands[3, row])]))]
        if phases[index] == Phase.BACKWARD:
            gradients |= {one.storage for one in made}
            continue
        inputs = _operands(timeline.strings[int(et.operands[0, row])])
        given = [one for one in _tensors(inputs) if not one.is_number]
        sizes = {one.storage: one.elements for one in given if one.storage in gradients}
        if sizes and timeline.name(index) == "aten::lift_fresh":  # of what no operator made
            sizes.clear()
        if asked[index] and sizes:
            found.append(index)
            gradients |= {one.storage for one in made}
            continue
        name = timeline.name(index)
        where_it_lies = name.endswith("_") or name in _PARTS
        if not made and name.endswith("_"):  # in place, on lists
            made = [*_tensors(inputs[:1])]
        least = min(sizes.values()) if sizes and phases[index] == Phase.NONE else None
        for one in made:
            kept = where_it_lies and one.storage in sizes
            if least is not None and (kept or one.elements >= least):
                gradients.add(one.storage)
            else:
                gradients.discard(one.storage)
    return found


class _Tensor(NamedTuple):
    storage: int
    elements: int
    is_number: bool
    """Whether it is a number's, which no operator makes: where a gradient was, as like as not."""


def _operands(text: str) -> list[Any]:
    return msgspec.json.decode(text, type=list[Any]) if text else []


def _tensors(operands: list[Any]) -> Iterator[_Tensor]:
    """Yield the tensors of operands, [tensor, storage, offset, elements, ..., device] each."""
    pending: list[Any] = [operands]
    while pending:
        value = pending.pop()
        if not isinstance(value, list):
            continue
        value = cast("list[Any]", value)
        *numbers, device = value or [None]
        if [type(one) for one in numbers] == [int] * 5 and type(device) is str:
            _, storage, _, elements, item_bytes = cast("list[int]", numbers)
            number = (elements, item_bytes, device) == (1, 8, "cpu")
            yield _Tensor(storage, elements, number)
        else:  # of several, or an operator's six operands
            pending += value
