"""Optimizers over sharded parameters: GradScaler, closures, states, element-wise updates.

An optimizer that updates element by element can step on a slice of a parameter. Others need the
whole matrix (rows, columns, norm or singular values), or all parameters at once. Libraries reuse
class names, so optimizers are recognised by name.

Some optimizers create states at construction (Adagrad), for parameters that are sharded later. A
uniform state can be created again for a slice or a shard; any other, such as one from a checkpoint,
is an error.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.capture.patches import live, patched
from onerank.ir.errors import SliceError


@contextlib.contextmanager
def after_checks(
    then: Callable[[Sequence[Tensor], Optimizer], None],
    before: Callable[[Optimizer], None] = lambda _: None,
) -> Generator[None]:
    """Call `then` after each check of an optimizer's gradients, with a flag for each device.

    A flag is 1 where a gradient is not finite; what is written into it decides whether the step is
    taken. Gradients are checked as they are unscaled (`unscale_`), or alone, where the kernels of a
    fused optimizer unscale them (`_check_inf_per_device`).

    Args:
        then: what to do with the flags.
        before: what to do with the optimizer before its gradients are looked at.
    """
    scaler: Any = torch.amp.GradScaler

    def checking(check: Any) -> Any:
        def run(own: Any, optimizer: Optimizer) -> Any:
            before(optimizer)
            result = check(own, optimizer)
            if own.is_enabled():
                then(list(own._found_inf_per_device(optimizer).values()), optimizer)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name in ("unscale_", "_check_inf_per_device"):
            by = checking(getattr(scaler, name))
            stack.enter_context(patched("torch.amp.GradScaler", {name: by}))
        yield


@contextlib.contextmanager
def scaled_steps(
    before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> Generator[None]:
    """Call these around each step of a GradScaler, which skips the optimizer's own now and then."""
    original: Any = torch.amp.GradScaler.step

    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before(optimizer)
        result = original(self, optimizer, *args, **kwargs)
        after(optimizer)
        return result

    with patched("torch.amp.GradScaler", {"step": step}):
        yield


def with_closure_hook(
    then: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return a step's arguments with `then` behind each closure; and whether there is one.

    Args:
        then: what to do once a closure has computed the gradients.
        args: of a step, the optimizer first.
        kwargs: of a step.
    """
    found = [one for one in (*args[1:], *kwargs.values()) if callable(one)]

    def followed(argument: Any) -> Any:
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure() -> Any:
            loss = argument()
            then()
            return loss

        return closure

    given = (*args[:1], *map(followed, args[1:]))
    return given, {key: followed(value) for key, value in kwargs.items()}, bool(found)


_WHOLE = frozenset("adafactor came lamb lars lbfgs muon shampoo soap sparseadam".split())


def elementwise(optimizer: Optimizer) -> bool:
    """Whether neither its class nor one that it is made from is known to need whole parameters."""
    return not any(kind.__name__.lower() in _WHOLE for kind in type(optimizer).__mro__)


def note_of_slices() -> str | None:
    """Return the note on optimizers that step on slices of --tp; None if all is well."""
    kinds = {
        type(one).__name__
        for one in live(Optimizer)
        if not elementwise(one) and _steps_on_matrices(one)
    }
    if not kinds:
        return None
    return (
        f"{', '.join(sorted(kinds))} does not update element by element: each rank of --tp does it "
        "for its slices alone, and communicates nothing"
    )


def _steps_on_matrices(optimizer: Optimizer) -> bool:
    groups = vars(optimizer).get("param_groups", [])  # a wrapper shows another's
    return any(isinstance(p, torch.Tensor) and p.ndim > 1 for g in groups for p in g["params"])


@dataclass(frozen=True)
class _Fill:
    """A tensor of the parameter's shape that holds one value."""

    value: float
    dtype: torch.dtype


def pop_uniform_state(optimizer: Optimizer, *parameters: Tensor) -> dict[str, Any]:
    """Take the state of whole parameters, alike, from their optimizer, as `expand_state` wants it.

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


def expand_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
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
            state = pop_uniform_state(optimizer, parameter)
            if parameter.numel():
                optimizer.state[parameter] = expand_state(state, parameter)

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
        "checkpoint?), which cannot be cut: start from empty states",
        code="optimizer-early-states",
    )
