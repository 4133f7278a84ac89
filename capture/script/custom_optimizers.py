"""Optimizers that are not torch.optim classes.

Some scripts (modded-nanogpt) reduce, update and gather parameters in a class of their own, which
torch's optimizer hooks do not see. Such an object is recognised by a method `step` and by tensors
with gradients in its attributes or in containers there.
"""

import functools
import gc
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from onerank.capture.patches import replaced
from onerank.capture.script.wrapped_optimizers import left_out

_DEPTH = 4  # of containers in containers: param_groups hold lists in dicts in a list
_CONTAINERS = (dict, list, tuple, set)


class OwnOptimizers:
    """Sees steps of such objects, where no optimizer of torch's is there to tell.

    They are looked for behind the second, fourth, eighth ... backward, for as long as nothing has
    stepped: a script whose optimizer is torch's has mostly stepped before.
    """

    def __init__(self, first: list[Any], ended: Callable[[], None]) -> None:
        """Prepare to see steps.

        Args:
            first: the optimizer whose steps mark iterations, once it is known: torch's, or one
                that is found here.
            ended: called behind each step of it, if it is one that is found here.
        """
        self._first = first
        self._ended = ended
        self._backwards = 0
        self._running = 0
        self._found = False
        self._undo = ExitStack()

    def __enter__(self) -> "OwnOptimizers":
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Put the methods back."""
        self._undo.close()

    def after_backward(self) -> None:
        """Look for such objects; called behind each backward."""
        self._backwards += 1
        if self._first or self._backwards & (self._backwards - 1) or self._backwards == 1:
            return
        self._undo.close()
        for owner in {_owner(type(value)) for value in gc.get_objects() if _trains(value)}:
            self._undo.enter_context(replaced(owner, "step", self._watched(owner.__dict__["step"])))

    def _watched(self, method: FunctionType) -> Callable[..., Any]:
        @functools.wraps(method)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or (self._first and not self._found):
                return method(this, *args, **kwargs)
            before = self._backwards
            self._running += 1
            try:
                # named as torch names its own: what runs is of the optimizer's phase
                if self._found:
                    with record_function(f"Optimizer.step#{type(this).__name__}.step"):
                        result = method(this, *args, **kwargs)
                else:
                    result = method(this, *args, **kwargs)
            finally:
                self._running -= 1
            # one that ran a backward is a trainer, one that left its work out has stepped nothing
            if not self._first and self._backwards == before and not left_out(this, result):
                self._first.append(this)
                self._found = True
            if self._found and self._first[0] is this:
                self._ended()
            return result

        marked: Any = step
        marked.hooked = True  # as torch marks its own: no object that steps another one
        return marked


def custom_optimizer_exists() -> bool:
    """Return whether an object with a method `step` holds trainable tensors."""
    return any(_trains(value) for value in gc.get_objects())


def _trains(one: object) -> bool:
    """Whether an object has a method `step`, and holds what gradients are accumulated in."""
    kind = type(one)
    if _owner(kind) is None or issubclass(kind, (Optimizer, nn.Module)):
        return False
    return _holds(getattr(one, "__dict__", None), _DEPTH)


@functools.cache
def _owner(kind: type) -> Any:
    """Return the class whose method `step` objects of a class have, None for no such method."""
    owner = next((one for one in kind.__mro__ if "step" in one.__dict__), None)
    if owner is None or not isinstance(owner.__dict__["step"], FunctionType):
        return None
    return owner


def _holds(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    if not depth or type(value) not in _CONTAINERS:
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return any(_holds(part, depth - 1) for part in parts)
