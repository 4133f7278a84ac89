"""GradScaler with gradients shared among ranks."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onerank.capture.patches import patched


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
