"""Optimizers over sharded parameters: GradScaler, closures, states, element-wise updates.

An optimizer that updates element by element can step on a slice of a parameter. Others need the
whole matrix (rows, columns, norm or singular values), or all parameters at once. Optimizers are
recognised by class name, because libraries ship copies of them under the same names.

Some optimizers create states at construction (Adagrad), before their parameters are sharded. A
uniform state is created again for a slice or a shard; any other state, such as one from a
checkpoint, is an error.
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

from onerank.capture.fake_tensors import is_fake
from onerank.capture.patches import live, patched
from onerank.ir.errors import SliceError
from onerank.ir.notes import Note


@contextlib.contextmanager
def after_checks(
    then: Callable[[Sequence[Tensor], Optimizer], None],
    before: Callable[[Optimizer], None] = lambda _: None,
) -> Generator[None]:
    """Call `then` after each GradScaler check of an optimizer's gradients, with a flag per device.

    A flag is 1 if a gradient is not finite, and the step is then skipped; `then` may change it.
    Gradients are checked in `unscale_`, or in `_check_inf_per_device` for a fused optimizer, which
    unscales in its kernel.

    Args:
        then: called with the flags and the optimizer.
        before: called with the optimizer before the check.
    """
    scaler: Any = torch.amp.GradScaler

    def checking(check: Any) -> Any:
        def run(grad_scaler: Any, optimizer: Optimizer) -> Any:
            before(optimizer)
            result = check(grad_scaler, optimizer)
            if grad_scaler.is_enabled():
                # A disabled scaler records no flags.
                then(list(grad_scaler._found_inf_per_device(optimizer).values()), optimizer)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name in ("unscale_", "_check_inf_per_device"):
            replacement = checking(getattr(scaler, name))
            stack.enter_context(patched("torch.amp.GradScaler", {name: replacement}))
        yield


@contextlib.contextmanager
def scaled_steps(
    before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> Generator[None]:
    """Call `before` and `after` around GradScaler.step, which may skip the optimizer's step."""
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
    """Return a step's arguments with closures that call `then`, and whether there is a closure.

    Args:
        then: called after a closure has computed the gradients.
        args: positional arguments of a step; the optimizer is first.
        kwargs: keyword arguments of a step.
    """
    has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))

    def hooked(argument: Any) -> Any:
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure() -> Any:
            loss = argument()
            then()
            return loss

        return closure

    new_args = (*args[:1], *map(hooked, args[1:]))
    return new_args, {key: hooked(value) for key, value in kwargs.items()}, has_closure


_NEEDS_WHOLE_PARAMETERS = frozenset(
    "adafactor came lamb lars lbfgs muon shampoo soap sparseadam".split()
)


def elementwise(optimizer: Optimizer) -> bool:
    """Return whether no class in the optimizer's MRO is known to need whole parameters."""
    return not any(
        kind.__name__.lower() in _NEEDS_WHOLE_PARAMETERS for kind in type(optimizer).__mro__
    )


def note_of_slices() -> Note | None:
    """Return a note on optimizers that cannot step exactly on --tp slices; None without any."""
    kinds = {
        type(optimizer).__name__
        for optimizer in live(Optimizer)
        if not elementwise(optimizer) and _steps_on_matrices(optimizer)
    }
    if not kinds:
        return None
    return Note(
        f"{', '.join(sorted(kinds))} does not update element by element; each rank of --tp updates "
        "only its slices, without communication",
        code="tp-optimizer-inexact",
    )


def _steps_on_matrices(optimizer: Optimizer) -> bool:
    # accelerate's wrapper has `param_groups` as a property; `live` also lists the optimizer in it.
    groups = vars(optimizer).get("param_groups", [])
    return any(isinstance(p, torch.Tensor) and p.ndim > 1 for g in groups for p in g["params"])


@dataclass(frozen=True)
class _Fill:
    """A tensor of the parameter's shape that holds one value."""

    value: float
    dtype: torch.dtype


def pop_uniform_state(optimizer: Optimizer, *parameters: Tensor) -> dict[str, Any]:
    """Remove the state of whole parameters from their optimizer; return it for `expand_state`.

    Raises:
        SliceError: a state tensor is not uniform, or the parameters' states differ.
    """
    states = [
        {name: _uniform(optimizer, value) for name, value in optimizer.state.pop(p, {}).items()}
        for p in parameters
    ]
    if any(state != states[0] for state in states):
        raise _not_uniform(optimizer)
    return states[0]


def expand_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return a state for `parameter`, a slice or shard of the parameter that had the state."""
    return {
        name: torch.full_like(parameter, value.value, dtype=value.dtype, requires_grad=False)
        if isinstance(value, _Fill)
        else value
        for name, value in state.items()
    }


@contextlib.contextmanager
def cutting_states(models: Mapping[nn.Module, Any]) -> Generator[None]:
    """Resize optimizer states to the slices before an optimizer's first step.

    Parameters without elements on this rank (of other pipeline stages) lose their states.
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


def _uniform(optimizer: Optimizer, value: Any) -> Any:
    # Step counters, which do not depend on the parameter's shape.
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if is_fake(value):
        # Its numbers are unknown, and without a device they decide nothing.
        return _Fill(0.0, value.dtype)
    first = value.flatten()[:1]
    if not bool((value == first).all()):
        raise _not_uniform(optimizer)
    return _Fill(first.item(), value.dtype)


def _not_uniform(optimizer: Optimizer) -> SliceError:
    return SliceError(
        f"{type(optimizer).__name__} holds non-uniform states of whole parameters before the first "
        "step, perhaps from a checkpoint: start from empty states",
        code="optimizer-early-states",
    )
