"""Detect steps that do different work, or compute non-finite numbers.

A rank without peers trains on other gradients than the real job and may diverge where the job would
not; the duration of kernels depends on their data.

A step lasts from one step() of the script's first optimizer to the next. If the script does not
repeat that (critics and generators, rollouts and updates, an optimizer that updates some parameters
in every second step), the number of module calls or communication calls per step varies.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onerank.capture.profiling.module_scopes import Modules

_torch: Any = torch  # foreach functions have no public names

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def note_of_overflow(modules: Modules) -> str:
    """Return the note on parameters that are not finite; "" if all are finite."""
    parameter_by_id = {
        id(parameter): parameter
        for module, _ in modules
        for parameter in module.parameters(recurse=False)
    }
    shards: list[Any] = [getattr(one, "_local_tensor", one) for one in parameter_by_id.values()]
    local_shards = [shard for shard in shards if _is_held(shard)]
    largest = _torch._foreach_norm(local_shards, ord=float("inf")) if local_shards else []
    infinite = sum(not bool(one.isfinite()) for one in largest)
    if not infinite:
        return ""
    return (
        f"{infinite} of {len(local_shards)} parameters are not finite after the last step, so "
        "kernel times may differ from the job's. Without real peers a rank trains on other "
        "gradients and can diverge: capture with a smaller learning rate"
    )


def _is_held(shard: Any) -> bool:
    """Whether a parameter's numbers are here, in a type that has infinity."""
    is_float_tensor = type(shard) in (Tensor, nn.Parameter) and shard.dtype in _DTYPES
    return (
        is_float_tensor
        and not shard.is_meta
        and shard.numel() > 0
        and shard.untyped_storage().nbytes() > 0
    )


class Work(NamedTuple):
    """What is counted of a step: calls of models, and of communication (0 where unknown)."""

    models: int
    messages: int


class WorkOfSteps:
    """Counts model and communication calls of the script's steps.

    Args:
        modules: counts calls of models.
        messages: returns the number of communication calls so far.
    """

    def __init__(self, modules: Modules, messages: Callable[[], int]) -> None:
        self._modules = modules
        self._messages = messages
        self._at_ends: list[Work] = []

    def end_step(self) -> None:
        """Store the counts at the end of a step."""
        self._at_ends.append(Work(self._modules.calls, self._messages()))

    @property
    def by_step(self) -> list[Work]:
        """Work of each step except the first, which includes setup."""
        return [
            Work(end.models - begin.models, end.messages - begin.messages)
            for begin, end in itertools.pairwise(self._at_ends)
        ]


def period_of(calls: Sequence[int]) -> int | None:
    """Return the period, in steps, of the counts in `calls`; None if they do not repeat."""
    for period in range(1, len(calls) // 2 + 1):
        if all(count == later for count, later in zip(calls, calls[period:], strict=False)):
            return period
    return None


def note_of(work: Sequence[Work], profiled: Work, optimizer_steps: int, warm_up: int) -> str:
    """Return a note if the steps do different work; "" if all do the same.

    Args:
        work: work of each step.
        profiled: work of the step in the graph.
        optimizer_steps: optimizer steps per captured step.
        warm_up: steps to ignore in the communication counts: DDP rebuilds its buckets in them.
    """
    models = [step.models for step in work]
    messages = [step.messages for step in work[warm_up:]]
    if len(set(models)) > 1:
        counts, profiled_count, verb = models, profiled.models, "call models"
    elif len(set(messages)) > 1:
        counts, profiled_count, verb = messages, profiled.messages, "communicate"
    else:
        return ""
    period = period_of(counts)
    span_text = "one step" if optimizer_steps == 1 else f"{optimizer_steps} steps"
    advice = (
        f"they repeat every {period}: --optimizer-steps {optimizer_steps * period} captures "
        "those as one"
        if period
        else "--optimizer-steps N captures N of the optimizer's as one"
    )
    return (
        f"steps do different work: they {verb} {min(counts)} to {max(counts)} times, the one in "
        f"this graph {profiled_count}. A step is {span_text} of the script's first optimizer; "
        f"{advice}"
    )
