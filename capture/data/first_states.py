"""States that an optimizer makes as it is constructed (Adagrad), for parameters that are cut later.

Such a state has one value throughout, so that it can be made again for a slice or a shard. States
of a checkpoint have many, and are refused.
"""

import contextlib
import weakref
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.ir.errors import SliceError


@dataclass(frozen=True)
class _Fill:
    """A tensor of the parameter's shape that holds one value."""

    value: float
    dtype: torch.dtype


def taken(optimizer: Optimizer, *parameters: Tensor) -> dict[str, Any]:
    """Take the state of whole parameters, alike, from their optimizer, as `made` wants it.

    Raises:
        SliceError: it has tensors of several values.
    """
    states = [
        {name: _form(optimizer, value) for name, value in optimizer.state.pop(one, {}).items()}
        for one in parameters
    ]
    if any(state != states[0] for state in states):
        raise _several(optimizer)
    return states[0]


def made(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state for a slice of the parameter that it was taken from."""
    return {
        name: torch.full_like(parameter, value.value, dtype=value.dtype, requires_grad=False)
        if isinstance(value, _Fill)
        else value
        for name, value in state.items()
    }


@contextlib.contextmanager
def cutting_states(models: Mapping[nn.Module, Any]) -> Generator[None]:
    """Give slices, before an optimizer's first step on them, states of their own sizes.

    Parameters that the rank has nothing of, as those of other stages, lose theirs.
    """
    known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in known:
            return
        known.add(optimizer)
        sliced = {id(p) for model in models for p in model.parameters()}
        for parameter in [p for p in optimizer.state if id(p) in sliced or not p.numel()]:
            if _fits(optimizer.state[parameter], parameter):
                continue
            state = taken(optimizer, parameter)
            if parameter.numel():
                optimizer.state[parameter] = made(state, parameter)

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()


def _fits(state: dict[str, Any], parameter: Tensor) -> bool:
    return all(
        not isinstance(value, Tensor) or value.ndim == 0 or value.shape == parameter.shape
        for value in state.values()
    )


def _form(optimizer: Optimizer, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    first = value.flatten()[:1]
    if not bool((value == first).all()):
        raise _several(optimizer)
    return _Fill(first.item(), value.dtype)


def _several(optimizer: Optimizer) -> SliceError:
    return SliceError(
        f"{type(optimizer).__name__} holds states of whole parameters before the first step (of a "
        "checkpoint?), which cannot be cut: start from empty states"
    )
