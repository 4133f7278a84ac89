"""Time steps and modules without a profiler: CUDA events on a GPU, the host clock on a CPU.

`StepTimer` times steps. `ModuleTimer` times layers and sub-modules, forward and backward, with a
mark before and after each forward. Backward lasts from the completed gradient of the module's first
output to the completed gradient of its input. The input passes through a view, so that other uses
of it do not count. If no input needs a gradient, backward ends when the last parameter's gradient
is accumulated.

The hooks are tensor hooks, which launch nothing: a view is host work and allocates nothing on the
device. A forward within backward recomputes a checkpoint and counts as backward.
"""

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from onerank.capture.patches import untraced
from onerank.capture.profiling.module_scopes import Modules, compiled_call, hooked
from onerank.ir import ScopeTime


class Stopwatch:
    """Marks points in time; marking never waits for the GPU.

    Args:
        on_gpu: whether to mark with CUDA events on the current stream or with the host's clock.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def mark(self) -> Any:
        """Return a mark of the current point in time."""
        if not self.on_gpu:
            return time.perf_counter_ns()
        # On a GPU the host's clock would show when work is launched, not when it runs.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Block until a mark is reached."""
        if self.on_gpu:
            mark.synchronize()

    def between(self, before: Any, after: Any) -> int:
        """Return the nanoseconds between two marks; the GPU must have reached both."""
        return round(before.elapsed_time(after) * 1e6) if self.on_gpu else after - before


class StepTimer:
    """Measures step durations from marks between steps."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._watch = Stopwatch(on_gpu=on_gpu)
        self._marks: list[Any] = []
        self._counts: list[bool] = []

    def mark(self, *, counts: bool = True) -> None:
        """Mark the boundary of two steps; `counts` is whether the step that ends is kept."""
        self._marks.append(self._watch.mark())
        self._counts.append(counts)

    def durations_ns(self) -> tuple[int, ...]:
        """Return the durations, in nanoseconds, of the steps marked with `counts`."""
        if self._watch.on_gpu:
            torch.cuda.synchronize()
        steps = zip(self._marks, self._marks[1:], self._counts[1:], strict=False)
        return tuple(
            self._watch.between(before, after) for before, after, counts in steps if counts
        )


OPTIMIZER = "optimizer"


@dataclass(slots=True)
class _Span:
    """An interval; each boundary that may be the last one overwrites `end`."""

    path: str
    phase: str
    begin: Any
    end: Any = None


@dataclass(slots=True, eq=False)
class _Call:
    """A forward being timed, and its backward once that has begun.

    Attributes:
        ends_at_input: whether backward ends with the gradient of an input.
    """

    forward: _Span
    backward: _Span | None = None
    ends_at_input: bool = False


class ModuleTimer:
    """Times every layer and every outermost module of a role.

    A module whose forward is never called (a ModuleDict) is timed by its children.
    """

    def __init__(self, modules: Modules, *, on_gpu: bool) -> None:
        self._modules = modules
        self._paths: dict[nn.Module, str] = {}
        self._watch = Stopwatch(on_gpu=on_gpu)
        self._open: list[tuple[str, _Call | None]] = []  # (path, None if the call is not timed)
        self._step: list[_Span] = []
        self._steps: list[list[_Span]] = []
        self._handles: list[RemovableHandle] = []

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Hook the modules known so far while the context lasts."""
        # A hook of a module within compiled code is never called, but makes Dynamo recompile it.
        self._paths = {
            module: path
            for module, path in _timed(self._modules)
            if not self._modules.only_compiled(module)
        }
        calls = {module: compiled_call(module) for module in self._paths}
        hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
            *(call.register(self._before, self._after) for call in calls.values() if call),
        ]
        others = [module for module, call in calls.items() if call is None]
        try:
            with hooked(others, self._before, self._after):
                yield
        finally:
            for hook in (*hooks, *self._handles):
                hook.remove()

    def end_step(self, *, counts: bool) -> None:
        """End a step: keep its spans if it counts, otherwise discard them."""
        if counts:
            self._steps.append(self._step)
        for handle in self._handles:
            handle.remove()
        self._step, self._open, self._handles = [], [], []

    def times(self) -> tuple[ScopeTime, ...]:
        """Return each module's time per step, in the order of the first call."""
        if self._watch.on_gpu:
            torch.cuda.synchronize()
        sums: dict[tuple[str, str], list[int]] = defaultdict(list)
        calls: dict[tuple[str, str], int] = {}
        for step in self._steps:
            spans: dict[tuple[str, str], list[_Span]] = defaultdict(list)
            for span in step:
                if span.end is not None:
                    spans[span.path, span.phase].append(span)
            for key, members in spans.items():
                sums[key].append(self._covered(members, step[0].begin))
                calls.setdefault(key, len(members))
        return tuple(
            ScopeTime(
                path=path,
                phase=phase,
                calls=calls[path, phase],
                duration_ns=round(statistics.median(durations)),
                spread_ns=max(durations) - min(durations),
                samples=len(durations),
            )
            for (path, phase), durations in sums.items()
        )

    def _covered(self, spans: list[_Span], zero: Any) -> int:
        """Return the length of the union of `spans`: recomputation may run inside a backward."""
        edges = sorted(
            (self._watch.between(zero, span.begin), self._watch.between(zero, span.end))
            for span in spans
        )
        total, until = 0, edges[0][0]
        for begin, end in edges:
            total += max(0, end - max(begin, until))
            until = max(until, end)
        return total

    def _begin(self, path: str, phase: str) -> _Span:
        span = _Span(path, phase, self._watch.mark())
        self._step.append(span)
        return span

    @untraced
    def _before(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        # Compiled code calls the hook later. A trace must not see the lists of this object change,
        # or dynamo compiles again.
        if torch.compiler.is_compiling():
            return None
        path = self._paths[module]
        inside = any(name == path and call is not None for name, call in self._open)
        if inside or _captured(on_gpu=self._watch.on_gpu):
            self._open.append((path, None))
            return None
        # -1 outside of backward: a forward within backward recomputes a checkpoint.
        recomputes = torch._C._current_graph_task_id() != -1
        call = _Call(self._begin(path, "backward" if recomputes else "forward"))
        self._open.append((path, call))
        if recomputes or not torch.is_grad_enabled():
            return None
        return self._with_end_at_input(call, args, kwargs)

    def _with_end_at_input(
        self, call: _Call, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Return the arguments with a view in place of the first tensor that needs a gradient.

        The gradient of the view is complete when the backward of this call is.
        """
        first_input = next((arg for arg in (*args, *kwargs.values()) if _needs_gradient(arg)), None)
        if first_input is None:
            return None
        view = first_input.view_as(first_input)
        self._handles.append(view.register_hook(partial(self._backward_ends, call)))
        call.ends_at_input = True
        # The view replaces every occurrence of the tensor: attention projects query and key in one
        # product if both are the same object.
        return (
            tuple(view if arg is first_input else arg for arg in args),
            {key: view if arg is first_input else arg for key, arg in kwargs.items()},
        )

    @untraced
    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or (call := self._ended(self._paths[module])) is None:
            return
        call.forward.end = self._watch.mark()
        result = _first_with_gradient(output)
        if call.forward.phase == "backward" or result is None or result.is_leaf:
            return
        self._handles.append(result.register_hook(partial(self._backward_begins, call)))
        if not call.ends_at_input:
            ends = partial(self._backward_ends, call)
            self._handles += [
                parameter.register_post_accumulate_grad_hook(ends)
                for parameter in module.parameters()
                if parameter.requires_grad and parameter.is_leaf
            ]

    @untraced
    def _backward_begins(self, call: _Call, _: torch.Tensor) -> None:
        if call.backward is None:
            call.backward = self._begin(call.forward.path, "backward")

    @untraced
    def _backward_ends(self, call: _Call, _: torch.Tensor) -> None:
        if call.backward is not None:
            call.backward.end = self._watch.mark()

    @untraced
    def _before_optimizer(self, *_: Any) -> None:
        self._open.append((OPTIMIZER, _Call(self._begin(OPTIMIZER, "optimizer"))))

    @untraced
    def _after_optimizer(self, *_: Any) -> None:
        if (call := self._ended(OPTIMIZER)) is not None:
            call.forward.end = self._watch.mark()

    def _ended(self, path: str) -> _Call | None:
        """Pop and return the call that ends; None if its begin was compiled or is not timed."""
        while any(name == path for name, _ in self._open):
            # Where a graph breaks, the begin of a call may be seen and its end compiled away. Such
            # calls remain on the stack above the one that ends.
            name, open_call = self._open.pop()
            if name == path:
                return open_call
        return None


def _timed(modules: Modules) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules to hook, each with the path under which its time is reported."""
    done: set[nn.Module] = set()
    for module, known in modules:
        if module in done:
            continue
        is_layer = known.path == known.layer
        is_scope = known.role not in ("layer", "other") and not known.scope
        if is_layer or is_scope:
            parts = [*_called(module)]
            done.update(parts)
            yield from ((part, known.path) for part in parts)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module; for a container without a forward, yield the modules in it."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _captured(*, on_gpu: bool) -> bool:
    """Return whether the current stream captures a CUDA graph, whose kernels run later."""
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _first_with_gradient(value: Any) -> torch.Tensor | None:
    """Return the first tensor in nested tuples, lists and mappings that needs a gradient."""
    if _needs_gradient(value):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((t for part in value if (t := _first_with_gradient(part)) is not None), None)
    return None
