"""The module and the phase (forward, backward, optimizer) of each host event.

- A forward event has the module of its enclosing module scope.
- A backward function has the module of its forward operator: the last operator with the same
  thread and sequence number.
- A gradient accumulation has no sequence number. It has the module of the function before it.
- A callback at the end of backward has no module.
- A module scope within backward recomputes a checkpoint. Its phase is backward, and its operators
  may have a backward function themselves.

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

from onerank.converters.sources.kineto.link.host_timeline import (
    MODULE_SCOPE,
    NONE,
    HostTimeline,
)
from onerank.converters.sources.kineto.link.micro_batch_numbers import (
    forward_backward_pairs,
    micro_batches,
)
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace, pick
from onerank.ir import Job, Phase
from onerank.ir.arrays import I64, Mask, unique_values

_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "flex_attention")


def with_attention(job: Job, timeline: HostTimeline) -> Job:
    """Change a module's role from mlp to attention if it calls an attention operator itself."""
    attends = timeline.named(
        lambda name: name.rsplit("::", 1)[-1].lstrip("_").startswith(_ATTENTION)
    )
    # Only forward: a backward operator has the module of its forward and would add nothing.
    chosen = attends & timeline.rows.is_operator & (timeline.phase == Phase.FORWARD)
    callers = set(timeline.strings.decode(unique_values(timeline.module[chosen])))
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
    """Remove the forward phase from events outside any forward pass; number the micro-batches.

    Args:
        timeline: the host events, with modules and the phases of their enclosing scopes.
        et_threads: thread of each row of the execution trace, int64.
    """
    is_scope = timeline.named(lambda name: name.startswith(MODULE_SCOPE))
    timeline.phase = _exclude_nonforward(timeline, is_scope, et_threads)
    timeline.micro_batch = micro_batches(timeline, is_scope, et_threads)


def _exclude_nonforward(timeline: HostTimeline, is_scope: Mask, et_threads: I64) -> I64:
    """Return the phases without forward events that belong to no forward pass, int64[n].

    Outside modules, an event keeps the forward phase if it runs after a module's forward and before
    the backward, or if a backward operator names it as its forward. Without modules in the trace,
    all phases stay as they are.
    """
    phase = timeline.phase
    opens = is_scope & (phase == Phase.FORWARD)
    if not opens.any():
        return phase
    closes = (phase == Phase.BACKWARD) | (phase == Phase.OPTIMIZER)
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    boundaries = np.flatnonzero((opens | closes)[order])
    last = np.searchsorted(boundaries, np.arange(len(order)), side="right") - 1
    after_module = np.zeros(len(order), dtype=bool)
    after_module[order] = (last >= 0) & opens[order[boundaries[last]]]
    candidates = np.flatnonzero((phase == Phase.FORWARD) & ~after_module)
    roots = timeline.outermost(np.ones(len(timeline), dtype=bool))
    forward_roots = unique_values(roots[forward_backward_pairs(timeline, et_threads).forward])
    inside = is_scope | (timeline.nearest(is_scope) >= 0) if len(candidates) else is_scope
    candidates = candidates[~inside[candidates] & ~np.isin(roots[candidates], forward_roots)]
    phase = phase.copy()
    phase[candidates] = Phase.NONE
    return phase


_BACKWARD = "autograd::engine::evaluate_function"

ACCUMULATES = "::AccumulateGrad"

# Before torch 1.10, backward functions are not inside an evaluate_function event.
_FUNCTION = re.compile(r"(\w*Backward\d*|torch::autograd::\w+)$")

_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")

# Callbacks that autograd runs after all functions, to sum or copy out the last gradients.
_FINISHES = ("FSDP::root_post_backward", "torch.distributed.ddp.reducer::copy_bucket_to_grad")


def attribute(timeline: HostTimeline, et_threads: I64) -> None:
    """Set module and phase of every host event, by the rules of the module's docstring.

    Args:
        timeline: the host events, joined with the execution trace.
        et_threads: thread of each row of the execution trace, int64.
    """
    parents: list[int] = timeline.parent.tolist()
    event_kinds, scopes = _classify_names(timeline)
    names: list[int] = timeline.rows.name.tolist()
    forward_numbers = _forward_numbers(timeline)
    forward_threads: list[int] = forward_numbers[0].tolist()
    sequences: list[int] = forward_numbers[1].tolist()
    et_thread: list[int] = pick(et_threads, timeline.et, NONE).tolist()
    module_of_forward: dict[tuple[int, int], int] = {}
    module, phase = [0] * len(timeline), [0] * len(timeline)
    recomputing, finishing = [False] * len(timeline), [False] * len(timeline)
    forward, backward = int(Phase.FORWARD), int(Phase.BACKWARD)
    # By start time: forward threads come before the autograd thread that looks up their modules.
    for span in timeline.by_start():
        producer = 0
        for index in span:
            parent = parents[index]
            event_module, event_phase, recomputed = 0, 0, False
            if parent >= 0:
                event_module, event_phase = module[parent], phase[parent]
                recomputed, finishing[index] = recomputing[parent], finishing[parent]
            recomputing[index] = recomputed
            event_kind = event_kinds[index]
            if event_kind == _UNWRAPPED:
                event_kind = _PLAIN if event_phase == backward else _GRAD_FUNCTION
            if event_kind == _PLAIN:
                if sequences[index] >= 0 and (event_phase <= forward or recomputed):
                    if not recomputed:
                        event_phase = forward
                    if et_thread[index] >= 0:
                        module_of_forward[et_thread[index], sequences[index]] = event_module
            elif event_kind == _SCOPE:
                event_module = scopes[names[index]]
                recomputing[index] = event_phase == backward
                # A scope in backward recomputes a checkpoint; its operators stay backward.
                if event_phase != backward:
                    event_phase = forward
            elif event_kind in (_STEP, _FINISH):
                event_phase = int(Phase.OPTIMIZER) if event_kind == _STEP else backward
                finishing[index] |= event_kind == _FINISH
            else:
                event_phase = backward
                forward_module = module_of_forward.get(
                    (forward_threads[index], sequences[index]), 0
                )
                # Autograd runs an accumulation right after the function that produced its gradient.
                # With this rule 2,077 of 2,077 backward operators of the kept H200 capture have a
                # module, without it 1,921.
                inherited = producer if event_kind == _GRADIENT else 0
                event_module = producer = forward_module or inherited
            module[index], phase[index] = event_module, event_phase
    timeline.module = np.array(module, dtype=np.int32)
    timeline.phase = np.array(phase, dtype=np.int64)
    timeline.in_functions = (timeline.phase == backward) & ~np.array(finishing, dtype=bool)


_PLAIN, _SCOPE, _STEP, _FINISH, _GRAD_FUNCTION, _GRADIENT, _UNWRAPPED = range(7)


def _forward_numbers(timeline: HostTimeline) -> tuple[I64, I64]:
    """Return the forward thread and the sequence number of each event, both int64[n].

    The profiler gives autograd's evaluation of a function the numbers of the first event in it.
    That may be a gradient hook (FSDP has one), which has no numbers. Then the numbers of the
    function inside are used.
    """
    rows = timeline.rows
    thread, sequence = rows.forward_thread.copy(), rows.sequence.copy()
    unnumbered = timeline.named(lambda name: name.startswith(_BACKWARD)) & (thread <= 0)
    function = np.flatnonzero(
        (thread > 0) & (sequence >= 0) & pick(unnumbered, timeline.parent, default=False)
    )
    thread[timeline.parent[function]] = thread[function]
    sequence[timeline.parent[function]] = sequence[function]
    return thread, sequence


def _classify_names(timeline: HostTimeline) -> tuple[list[int], dict[int, int]]:
    """Return the kind of each event by its name, and the module of each module scope's name."""
    strings = timeline.strings
    distinct, places = np.unique(timeline.rows.name, return_inverse=True)
    kinds: list[int] = []
    scopes: dict[int, int] = {}
    for code in distinct.tolist():
        name = strings[code]
        if name.startswith(MODULE_SCOPE):
            scopes[code] = strings.intern(name.removeprefix(MODULE_SCOPE))
            kinds.append(_SCOPE)
        elif name.startswith(_OPTIMIZER):
            kinds.append(_STEP)
        elif name.startswith(_FINISHES):
            kinds.append(_FINISH)
        elif name.startswith(_BACKWARD):
            # `AccumulateGrad` runs as a separate function, without a forward operator.
            kinds.append(_GRADIENT if name.endswith(ACCUMULATES) else _GRAD_FUNCTION)
        elif _FUNCTION.match(name):
            kinds.append(_UNWRAPPED)
        else:
            kinds.append(_PLAIN)
    return np.array(kinds, dtype=np.int64)[places].tolist() if kinds else [], scopes


_REDUCTIONS = ("c10d::allreduce", "c10d::reduce", "c10d::_reduce_scatter")

_VIEWS = frozenset(  # operators whose results are views of parts of their input
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
    candidates = timeline.named(lambda name: name.startswith(_REDUCTIONS))
    candidates &= (timeline.phase == Phase.NONE) & (timeline.et >= 0)
    if not candidates.any():
        return
    order = np.argsort(timeline.rows.start_ns, kind="stable")
    last_phased = _last_before(order, timeline.phase != Phase.NONE)
    candidates &= (last_phased >= 0) & (timeline.phase[last_phased] == Phase.BACKWARD)
    if not candidates.any():
        return
    outermost = timeline.outermost(timeline.rows.is_operator)
    reductions = _gradient_reductions(timeline, et, order, outermost, candidates)
    inside = np.flatnonzero(
        np.isin(outermost, np.array(reductions, dtype=np.int64)) & (outermost >= 0)
    )
    timeline.phase[inside] = Phase.BACKWARD
    timeline.micro_batch[inside] = timeline.micro_batch[last_phased[outermost[inside]]]


def _last_before(order: I64, selected: Mask) -> I64:
    """Return the latest selected event up to each event, itself included, or NONE, int64[n]."""
    positions = np.where(selected[order], np.arange(len(order)), -1)
    last = np.maximum.accumulate(positions)
    preceding = np.empty(len(order), dtype=np.int64)
    preceding[order] = np.where(last >= 0, order[last], -1)
    return preceding


def _gradient_reductions(
    timeline: HostTimeline, et: ExecutionTrace, order: I64, outermost: I64, candidates: Mask
) -> list[int]:
    """Return the outermost candidate operators that read gradients.

    Gradients are the tensors that the last backward wrote, and tensors that operators without a
    phase derive from them without losing elements: a copy, a flat buffer or a view, but no norm.
    """
    # Storages are identified by address, and the allocator reuses addresses. So every operator that
    # writes a tensor decides again whether its storage contains a gradient. An operator follows the
    # operators inside it, since it returns last. Inner operators count too: the outer operator of a
    # DTensor names no local tensor, and the norm of local gradients may get the address of a freed
    # gradient. All DTensors share one storage, because they have no memory; the number of elements
    # also excludes a norm there.
    gradients: set[int] = set()
    reductions: list[int] = []
    is_outermost = outermost == np.arange(len(outermost))
    candidates = np.isin(np.arange(len(outermost)), outermost[candidates])
    backward = timeline.phase == Phase.BACKWARD
    inspected = (timeline.et >= 0) & (is_outermost | backward | (timeline.phase == Phase.NONE))
    last = int(np.flatnonzero(candidates[order])[-1])
    phases: list[int] = timeline.phase.tolist()
    rows = order[: last + 1][inspected[order[: last + 1]]]
    # If two operators end together, the operator that starts later is inside the other.
    by_end = np.lexsort((-timeline.rows.start_ns[rows], timeline.rows.end_ns[rows]))
    for index in rows[by_end].tolist():
        row = int(timeline.et[index])
        outputs = [*_tensors(_operands(timeline.strings[int(et.operands[3, row])]))]
        if phases[index] == Phase.BACKWARD:
            gradients |= {tensor.storage for tensor in outputs}
            continue
        inputs = _operands(timeline.strings[int(et.operands[0, row])])
        tensors = [tensor for tensor in _tensors(inputs) if not tensor.is_number]
        sizes = {
            tensor.storage: tensor.elements for tensor in tensors if tensor.storage in gradients
        }
        # lift_fresh wraps data that no operator computed.
        if sizes and timeline.name(index) == "aten::lift_fresh":
            sizes.clear()
        if candidates[index] and sizes:
            reductions.append(index)
            gradients |= {tensor.storage for tensor in outputs}
            continue
        name = timeline.name(index)
        shares_storage = name.endswith("_") or name in _VIEWS
        # In-place operators on lists record no outputs.
        if not outputs and name.endswith("_"):
            outputs = [*_tensors(inputs[:1])]
        fewest_elements = min(sizes.values()) if sizes and phases[index] == Phase.NONE else None
        for tensor in outputs:
            still_gradient = shares_storage and tensor.storage in sizes
            if fewest_elements is not None and (
                still_gradient or tensor.elements >= fewest_elements
            ):
                gradients.add(tensor.storage)
            else:
                gradients.discard(tensor.storage)
    return reductions


class _Tensor(NamedTuple):
    storage: int
    elements: int
    is_number: bool
    """Whether the tensor wraps a Python number.

    No operator writes such a tensor, and its address may be that of a former gradient.
    """


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
        if [type(number) for number in numbers] == [int] * 5 and type(device) is str:
            _, storage, _, elements, item_bytes = cast("list[int]", numbers)
            wraps_number = (elements, item_bytes, device) == (1, 8, "cpu")
            yield _Tensor(storage, elements, wraps_number)
        else:  # of several, or an operator's six operands
            pending += value
