"""Objects whose step includes the step of a torch.optim optimizer.

Megatron-LM and DeepSpeed wrap torch optimizers in objects whose step reduces, clips and casts
gradients, steps the torch optimizer once per parameter group, and gathers the parameters. A
training step ends where the step of the outer object ends.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, FunctionType
from typing import Any

from torch.autograd.profiler import record_function

from onerank.capture.patches import replaced


class OuterSteps:
    """Sees steps of objects that have parameter groups, as optimizers do, and step an optimizer.

    Attributes:
        running: how many of them run.
    """

    def __init__(self, ended: Callable[..., None]) -> None:
        """Prepare to see steps.

        Behind each outermost one `ended` is called with the object, and whether that left out the
        steps within, as `left_out`.
        """
        self.running = 0
        self._ended = ended
        self._undo = ExitStack()
        self._met: FrameType | None = None
        self._seen: set[Callable[..., Any]] = set()

    def __enter__(self) -> "OuterSteps":
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Put the methods back."""
        self._met = None
        self._undo.close()

    def repeated(self) -> bool:
        """Return whether an optimizer steps again within a step that was met while it ran.

        Called where an optimizer's step ends. The end of an outer step that is met for the first
        time is not seen: the first step of the optimizer within it counts in its place.
        """
        met, self._met = self._met, None
        outermost = None
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame is met:
                self._met = met
                return True
            if _steps_an_optimizer(frame):
                outermost = frame
            frame = frame.f_back
        if outermost is not None:
            self._met = outermost
            self._watch(type(_own(outermost)))
        return False

    def _watch(self, kind: type) -> None:
        """Have the steps of a class told from the next one on."""
        owner = next((one for one in kind.__mro__ if "step" in one.__dict__), None)
        method = owner.__dict__["step"] if owner is not None else None
        if not isinstance(method, FunctionType) or method in self._seen:
            return

        @functools.wraps(method)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.running += 1
            self._met = None  # a frame keeps what its variables held
            try:
                # named as torch names its own: what runs is of the optimizer's phase
                with record_function(f"Optimizer.step#{type(this).__name__}.step"):
                    result = method(this, *args, **kwargs)
            finally:
                self.running -= 1
            if not self.running:
                self._ended(this, left_out=left_out(this, result))
            return result

        self._seen.add(step)
        self._undo.enter_context(replaced(owner, "step", step))


def _steps_an_optimizer(frame: FrameType) -> bool:
    """Whether a call is of a method `step` of an object that has parameter groups."""
    if frame.f_code.co_name != "step" or not frame.f_code.co_argcount:
        return False
    own = _own(frame)
    method = getattr(type(own), "step", None)
    # torch's optimizers, told by the mark that torch gives them, tell of their steps themselves
    return method is not None and not getattr(method, "hooked", False) and _has_groups(own)


def left_out(own: object, result: object) -> bool:
    """Whether a step met infinite gradients: DeepSpeed marks its object, Megatron-LM returns it."""
    found: Any = result
    returned = isinstance(result, tuple) and bool(found) and found[0] is False
    return returned or getattr(own, "overflow", None) is True


def _has_groups(own: object) -> bool:
    try:
        return hasattr(own, "param_groups")
    except Exception:  # noqa: BLE001  a property of the script's
        return False


def _own(frame: FrameType) -> Any:
    """Return what a method was called on."""
    return frame.f_locals.get(frame.f_code.co_varnames[0])
