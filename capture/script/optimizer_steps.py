"""Detect the end of a training step: a step of the script's first optimizer.

Three kinds of objects end a step:

- An optimizer of torch.optim.
- An object that wraps one. In the wrapper's step, Megatron-LM and DeepSpeed reduce, clip and cast
  gradients, step the torch optimizer once per parameter group, and gather the parameters. The
  training step ends with the wrapper's step.
- An optimizer class of the script (modded-nanogpt reduces, updates and gathers parameters in one),
  which torch's optimizer hooks do not see. It is recognised by a method `step` and by tensors with
  gradients in its attributes or in containers there.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.amp.grad_scaler import GradScaler
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from onerank.capture.patches import live, live_where, patched, replaced


class OptimizerSteps:
    """The script's optimizers of torch.optim, and which of them stepped in the current step."""

    def __init__(self) -> None:
        self._created: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def created(self, optimizer: Optimizer) -> None:
        """Count an optimizer that the script creates."""
        self._created.add(optimizer)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step."""
        self._stepped.add(optimizer)

    def begin(self) -> None:
        """Begin a step of the capture."""
        self._stepped.clear()

    def idle(self) -> list[Optimizer]:
        """Return the optimizers that did not step, and none of whose parameters another updated."""
        updated = {id(each) for optimizer in self._stepped for each in _parameters(optimizer)}
        return [
            optimizer
            for optimizer in self._created
            if updated and updated.isdisjoint(map(id, _parameters(optimizer)))
        ]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


@contextlib.contextmanager
def after_step(boundary: Callable[..., None]) -> Generator[OptimizerSteps]:
    """Call `boundary` after every step of the script's first optimizer.

    `boundary` gets `skipped`: whether infinite gradients made a loss scaler skip the update. A
    skipped step ends an iteration too.

    With several optimizers (a generator's and a critic's, one per parameter group) the first
    optimizer that steps marks the iterations, so that a window contains a step of each. If an
    optimizer steps another one (ZeroRedundancyOptimizer), the outer optimizer's step counts.
    """
    # torch's post-hook is no alternative: it runs inside the profiler range of the step, so the
    # next window would begin inside a range whose begin it has not recorded.
    first: list[Any] = []
    steps = OptimizerSteps()
    with (
        _postponed(boundary) as end,
        _FirstOptimizer(first, end, steps).watched(),
        CustomOptimizers(first, functools.partial(end, skipped=False)) as custom,
        after_backward(custom.after_backward),
    ):
        yield steps


def after_backward(then: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `then` is called after every outermost backward pass."""
    # The registry of patches lists the caller of this function, not this module.
    caller = str(sys._getframe(1).f_globals["__name__"])
    backward = torch.autograd._engine_run_backward

    @functools.wraps(backward)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        if not in_backward() and not is_traced():
            then()
        return result

    return patched("torch.autograd", {"_engine_run_backward": run_backward}, by=caller)


@contextlib.contextmanager
def _postponed(boundary: Callable[..., None]) -> Generator[Callable[..., None]]:
    """Yield a function that calls `boundary` at once, or at the end of the enclosing range.

    Enclosing ranges are a backward pass, whose gradient hooks may step the optimizer, and the step
    of an object that wraps the optimizer.
    """
    # A window that began inside such a range would contain a range whose begin it has not recorded.
    postponed: list[bool] = []  # `skipped` of each step since the range began
    wrapper: list[object] = []  # the object whose step contains the first optimizer's step

    def end(*, skipped: bool) -> None:
        if in_backward() or wrappers.running:
            postponed.append(skipped)
        elif not wrappers.repeated():
            boundary(skipped=skipped)

    def end_of_range(outermost: object = None, *, skipped_inner: bool = False) -> None:
        if wrappers.running:
            return
        if postponed:
            wrapper[:] = [outermost]
            skipped = all(postponed)
            postponed.clear()
            boundary(skipped=skipped)
        elif skipped_inner and wrapper and wrapper[0] is outermost:
            boundary(skipped=True)

    with WrapperSteps(end_of_range) as wrappers, after_backward(end_of_range):
        yield end


class _FirstOptimizer:
    """Watches the steps of the script's first torch.optim optimizer.

    Args:
        first: receives the first optimizer that steps. If it contains an optimizer of a class of
            the script already, that optimizer marks the iterations.
        end: called after every step of the first optimizer, with `skipped`: whether a GradScaler
            skipped it.
        steps: counts the optimizers and their steps.
    """

    def __init__(self, first: list[Any], end: Callable[..., None], steps: OptimizerSteps) -> None:
        self._first = first
        self._end = end
        self._steps = steps
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
        # An optimizer may step another one.
        self._stepping: list[Any] = []
        # Whether the first optimizer has stepped since the last call of `GradScaler.step` began.
        self._taken = False

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Watch while the context lasts."""
        original = Optimizer.profile_hook_step
        # Classes whose `step` torch has wrapped already do not pass `profile_hook_step` again.
        for kind in _optimizer_classes():
            if getattr(kind.__dict__.get("step"), "hooked", False):
                kind.step = self._watched_step(kind.step)
        hook = staticmethod(lambda func: self._watched_step(original(func)))
        try:
            with (
                patched(
                    "torch.optim.Optimizer",
                    {"profile_hook_step": hook, "_patch_step_function": self._watched_creation()},
                ),
                patched("torch.amp.GradScaler", {"step": self._watched_scaler_step()}),
            ):
                yield
        finally:
            for kind in _optimizer_classes():
                step = kind.__dict__.get("step")
                if step in self._replaced:
                    kind.step = self._replaced[step]

    def _watched_creation(self) -> Callable[[Optimizer], None]:
        # torch calls it at the end of each optimizer's creation, also of one that is unpickled.
        created: Any = Optimizer._patch_step_function

        @functools.wraps(created)
        def patch_step(optimizer: Optimizer) -> None:
            created(optimizer)
            self._steps.created(optimizer)

        return patch_step

    def _watched_step(self, profiled: Any) -> Callable[..., Any]:
        @functools.wraps(profiled)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._stepping.append(args[0])
            try:
                result = profiled(*args, **kwargs)
            finally:
                self._stepping.pop()
            self._steps.stepped(args[0])
            if not self._first and not self._stepping:
                self._first.append(args[0])
            if self._first and args[0] is self._first[0]:
                self._taken = True
                self._end(skipped=False)
            return result

        # `profiled` becomes the class's `step` again in `watched`. Without torch's mark, torch
        # would wrap it a second time when the next optimizer is created.
        profiled.hooked = True
        self._replaced[stepped] = profiled
        return stepped

    def _watched_scaler_step(self) -> Callable[..., Any]:
        scaled = GradScaler.step

        @functools.wraps(scaled)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._taken = False
            result = scaled(scaler, optimizer, *args, **kwargs)
            # accelerate wraps the script's optimizer.
            inner = getattr(optimizer, "optimizer", optimizer)
            # A scaler that skips a step does not call the optimizer's.
            if not self._taken and (not self._first or self._first[0] in (optimizer, inner)):
                self._end(skipped=True)
            return result

        return step


def in_backward() -> bool:
    """Return whether the caller runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_traced() -> bool:
    """Return whether torch.compile traces the caller with tensors that have no data."""
    return TracingContext.try_get() is not None


def _optimizer_classes() -> list[Any]:
    """Return Optimizer and all its subclasses."""
    classes: list[Any] = []
    pending: list[Any] = [Optimizer]
    while pending:
        kind = pending.pop()
        classes.append(kind)
        pending += kind.__subclasses__()
    return classes


class WrapperSteps:
    """Watches steps of objects that have parameter groups, as optimizers do, and step an optimizer.

    Args:
        ended: called after each outermost such step with the object, and with `skipped_inner`:
            whether the step skipped the optimizer inside, as `skips_update` decides.

    Attributes:
        running: number of such steps that run.
    """

    def __init__(self, ended: Callable[..., None]) -> None:
        self.running = 0
        self._ended = ended
        self._undo = ExitStack()
        self._first_frame: FrameType | None = None  # of an outer step that is not yet watched
        self._watched: set[Callable[..., Any]] = set()

    def __enter__(self) -> "WrapperSteps":
        """Watch while the context lasts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the methods."""
        self._first_frame = None
        self._undo.close()

    def repeated(self) -> bool:
        """Return whether an optimizer steps again within an outer step that is not yet watched.

        Called at the end of an optimizer's step. An outer step is discovered by the first optimizer
        step inside it. Its end cannot be observed any more, so that first optimizer step counts in
        its place and the others are repetitions.
        """
        known, self._first_frame = self._first_frame, None
        outermost = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is known:
                self._first_frame = known
                return True
            if _is_wrapper_step(frame):
                outermost = frame
            frame = frame.f_back
        if outermost is not None:
            self._first_frame = outermost
            self._watch(type(self_of(outermost)))
        return False

    def _watch(self, kind: type) -> None:
        """Watch the steps of a class from the next step on."""
        owner = next((base for base in kind.__mro__ if "step" in base.__dict__), None)
        method = owner.__dict__["step"] if owner is not None else None
        if not isinstance(method, FunctionType) or method in self._watched:
            return

        @functools.wraps(method)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.running += 1
            # A frame would keep the tensors of its variables alive.
            self._first_frame = None
            try:
                # The name that torch gives to optimizer steps: it marks the optimizer phase.
                with record_function(f"Optimizer.step#{type(this).__name__}.step"):
                    result = method(this, *args, **kwargs)
            finally:
                self.running -= 1
            if not self.running:
                self._ended(this, skipped_inner=skips_update(this, result))
            return result

        self._watched.add(step)
        self._undo.enter_context(replaced(owner, "step", step))


def _is_wrapper_step(frame: FrameType) -> bool:
    """Return whether a frame runs a method `step` of an object that has parameter groups."""
    if frame.f_code.co_name != "step" or not frame.f_code.co_argcount:
        return False
    instance = self_of(frame)
    method = getattr(type(instance), "step", None)
    # torch marks the steps of its optimizers as hooked; those are watched already.
    return method is not None and not getattr(method, "hooked", False) and _has_groups(instance)


def skips_update(optimizer: object, result: object) -> bool:
    """Return whether a step skipped its update because of infinite gradients.

    DeepSpeed sets `overflow` on the object; Megatron-LM returns a tuple that begins with False.
    """
    values: Any = result
    returned_false = isinstance(result, tuple) and bool(values) and values[0] is False
    return returned_false or getattr(optimizer, "overflow", None) is True


def _has_groups(instance: object) -> bool:
    try:
        return hasattr(instance, "param_groups")
    except Exception:  # noqa: BLE001  a property of the script may raise anything
        return False


def self_of(frame: FrameType) -> Any:
    """Return the first argument of the function that a frame runs: the instance of a method."""
    return frame.f_locals.get(frame.f_code.co_varnames[0])


# Nested containers to search for tensors: param_groups are lists in dicts in a list.
_CONTAINER_DEPTH = 4

_CONTAINERS = (dict, list, tuple, set)


class CustomOptimizers:
    """Watches steps of optimizers that are no torch.optim classes, if no torch.optim class steps.

    A search of all objects is slow, so it runs after the second, fourth, eighth ... backward pass
    until an optimizer has stepped. A torch.optim optimizer usually steps before the first search.

    Args:
        first: contains the optimizer whose steps mark iterations, once it is known. It is of
            torch.optim or was found by a search.
        ended: called after each step of that optimizer if a search found it.
    """

    def __init__(self, first: list[Any], ended: Callable[[], None]) -> None:
        self._first = first
        self._ended = ended
        self._backwards = 0
        self._running = 0
        self._is_custom = False
        self._undo = ExitStack()

    def __enter__(self) -> "CustomOptimizers":
        """Watch while the context lasts."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the methods."""
        self._undo.close()

    def after_backward(self) -> None:
        """Search for optimizers; called after each backward pass."""
        self._backwards += 1
        # n & (n - 1) is 0 for powers of two only.
        if self._first or self._backwards & (self._backwards - 1) or self._backwards == 1:
            return
        # Else this search would wrap the methods that the previous one wrapped.
        self._undo.close()
        for owner in {_step_owner(type(value)) for value in _training_objects()}:
            self._undo.enter_context(replaced(owner, "step", self._watched(owner.__dict__["step"])))

    def _watched(self, method: FunctionType) -> Callable[..., Any]:
        @functools.wraps(method)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running or (self._first and not self._is_custom):
                return method(this, *args, **kwargs)
            before = self._backwards
            self._running += 1
            try:
                # Whether this object is the optimizer shows after its first step, so that step has
                # no range. The name is torch's: it marks the optimizer phase.
                if self._is_custom:
                    with record_function(f"Optimizer.step#{type(this).__name__}.step"):
                        result = method(this, *args, **kwargs)
                else:
                    result = method(this, *args, **kwargs)
            finally:
                self._running -= 1
            # An object whose step runs a backward pass is a trainer, not an optimizer.
            is_trainer = self._backwards != before
            if not self._first and not is_trainer and not skips_update(this, result):
                self._first.append(this)
                self._is_custom = True
            if self._is_custom and self._first[0] is this:
                self._ended()
            return result

        watched: Any = step
        # torch's mark, so that `WrapperSteps` does not take it for a wrapper.
        watched.hooked = True
        return watched


def existing_optimizers() -> WeakSet[Optimizer]:
    """Return the optimizers of torch.optim that a process has before it runs a script."""
    return WeakSet(live(Optimizer))


def optimizer_exists(earlier: WeakSet[Optimizer]) -> bool:
    """Return whether a script has an optimizer, of torch.optim or of a class that it defines.

    Args:
        earlier: optimizers from before the script, as a notebook has that trained a model.
    """
    if any(optimizer not in earlier for optimizer in live(Optimizer)):
        return True
    return next(_training_objects(), None) is not None


def _training_objects() -> Iterator[object]:
    """Yield the objects with a method `step` that refer to tensors that get gradients."""
    for value in live_where(_may_train):
        if _contains_trainable(getattr(value, "__dict__", None), _CONTAINER_DEPTH):
            yield value


def _may_train(kind: type) -> bool:
    return _step_owner(kind) is not None and not issubclass(kind, (Optimizer, nn.Module))


@functools.cache
def _step_owner(kind: type) -> Any:
    """Return the class that defines the method `step` of a class; None without such a method."""
    owner = next((base for base in kind.__mro__ if "step" in base.__dict__), None)
    if owner is None or not isinstance(owner.__dict__["step"], FunctionType):
        return None
    return owner


def _contains_trainable(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf
    if not depth or type(value) not in _CONTAINERS:
        return False
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return any(_contains_trainable(part, depth - 1) for part in parts)
