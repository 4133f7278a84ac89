"""Detect the end of a step: the first optimizer's step."""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._guards import TracingContext
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from onerank.capture.patches import patched
from onerank.capture.script.custom_optimizers import OwnOptimizers
from onerank.capture.script.wrapped_optimizers import OuterSteps


@contextlib.contextmanager
def after_step(boundary: Callable[..., None]) -> Generator[None]:
    """Call `boundary` after every step of the script's first optimizer.

    A GradScaler that found a gradient to be infinite leaves the optimizer's step out; that ends an
    iteration as well, with `skipped` true.

    With several optimizers (a generator's and a critic's, one per parameter group), the first one
    to step marks the iterations, so that a window holds all of them. Of one that steps another
    (torch's ZeroRedundancyOptimizer) the outer one counts, with what it does afterwards.
    The post-hook torch offers runs inside the step's own profiler range; a window that began
    there would start with a range it never saw open. So would one that began within backward:
    of optimizers that step in hooks of gradients, an iteration ends with that backward. Where an
    object steps the optimizer among other work of its own (`wrapped_optimizers`), it
    ends with that object's step, which may leave the optimizer's out as a GradScaler does. Where no
    optimizer of torch.optim steps, the first of the script's own does
    (`custom_optimizers`).
    """
    first: list[Any] = []
    with (
        _put_off(boundary) as end,
        _steps_told(first, end),
        OwnOptimizers(first, functools.partial(end, skipped=False)) as own,
        after_backward(own.after_backward),
    ):
        yield


def after_backward(then: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `then` is called after every outermost backward pass."""
    caller = str(sys._getframe(1).f_globals["__name__"])  # pyright: ignore[reportPrivateUsage]
    backward = torch.autograd._engine_run_backward  # pyright: ignore

    @functools.wraps(backward)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        if not in_backward() and not is_traced():
            then()
        return result

    return patched("torch.autograd", {"_engine_run_backward": run_backward}, by=caller)


@contextlib.contextmanager
def _put_off(boundary: Callable[..., None]) -> Generator[Callable[..., None]]:
    """Give what calls `boundary`: at once, or when the backward or the outer step has ended."""
    put_off: list[bool] = []
    owner: list[object] = []  # of the outer step that steps the first optimizer

    def end(*, skipped: bool) -> None:
        if in_backward() or outer.running:
            put_off.append(skipped)
        elif not outer.repeated():
            boundary(skipped=skipped)

    def end_late(outermost: object = None, *, left_out: bool = False) -> None:
        if outer.running:
            return
        if put_off:
            owner[:] = [outermost]
            skipped = all(put_off)
            put_off.clear()
            boundary(skipped=skipped)
        elif left_out and owner and owner[0] is outermost:
            boundary(skipped=True)

    with OuterSteps(end_late) as outer, after_backward(end_late):
        yield end


@contextlib.contextmanager
def _steps_told(first: list[Any], end: Callable[..., None]) -> Generator[None]:
    """Call `end` after every step of the first optimizer of torch.optim, and put it into `first`.

    Where one of the script's own is there already, that marks the iterations.
    """
    original = Optimizer.profile_hook_step
    wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}
    stepping: list[Any] = []
    taken: list[None] = []
    scaled = GradScaler.step

    @functools.wraps(scaled)
    def step_scaled(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        taken.clear()
        result = scaled(scaler, optimizer, *args, **kwargs)
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the script's own
        if not taken and (not first or first[0] in (optimizer, inner)):
            end(skipped=True)
        return result

    def watch(profiled: Any) -> Callable[..., Any]:
        @functools.wraps(profiled)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            stepping.append(args[0])
            try:
                result = profiled(*args, **kwargs)
            finally:
                stepping.pop()
            if not first and not stepping:
                first.append(args[0])
            if first and args[0] is first[0]:
                taken.append(None)
                end(skipped=False)
            return result

        profiled.hooked = True  # as torch marks a step it has wrapped
        wrapped[stepped] = profiled
        return stepped

    for kind in _optimizers():
        if getattr(kind.__dict__.get("step"), "hooked", False):
            kind.step = watch(kind.step)
    hook = staticmethod(lambda func: watch(original(func)))  # pyright: ignore
    try:
        with (
            patched("torch.optim.Optimizer", {"profile_hook_step": hook}),
            patched("torch.amp.GradScaler", {"step": step_scaled}),
        ):
            yield
    finally:
        for kind in _optimizers():
            step = kind.__dict__.get("step")
            if step in wrapped:
                kind.step = wrapped[step]


def in_backward() -> bool:
    """Whether autograd runs, and calls this."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def is_traced() -> bool:
    """Whether torch.compile follows this with tensors that hold nothing, backward too."""
    return TracingContext.try_get() is not None


def _optimizers() -> list[Any]:
    """Return every subclass of Optimizer there is."""
    found: list[Any] = []
    pending: list[Any] = [Optimizer]
    while pending:
        kind = pending.pop()
        found.append(kind)
        pending += kind.__subclasses__()
    return found
