"""Reductions of gradients behind a backward: of that backward, as those within one are.

Where a bucket of gradients is full within backward, autograd calls its reduction. Megatron-LM's
finalize_model_grads, DeepSpeed's epilogue and loops over parameters reduce behind it: the work is
the same, and so is its phase. What else is reduced there (a loss for the log, a norm) has none.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import I64, HostTimeline, Mask
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace
from onerank.ir import Phase

_REDUCTIONS = ("c10d::allreduce", "c10d::reduce", "c10d::_reduce_scatter")

_PARTS = frozenset(  # operators whose results are parts of what they read, where it lies
    f"aten::{name}"
    for name in (
        "as_strided chunk diagonal narrow select slice split split_with_sizes tensor_split unbind "
        "unsafe_chunk unsafe_split"
    ).split()
)


def attribute_grad_reductions(timeline: HostTimeline, et: ExecutionTrace) -> None:
    """Give reductions of gradients the phase and the micro-batch of the backward before them.

    Args:
        timeline: the host events, with phases and micro-batches; what is of none may become
            backward.
        et: the execution trace, whose operands tell what is a gradient.
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
    """Return which outermost operators of the asked ones read gradients.

    Gradients are what the last backward wrote, and what operators of no phase make of them without
    losing elements: a copy, a flat buffer, a part where it lies, not a norm. Storages are numbered
    by where they lie, so whatever operator makes a tensor decides anew. All DTensors are in one
    storage, as they have no memory: there a norm is told by its elements too.
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
