"""Mark every module's forward in the profile with its qualified name.

All modules share the same hook functions. Dynamo guards on the identity of a module's hooks: with
separate hooks each layer would get separate compiled code, and none from the ninth layer on
(`recompile_limit`).

A module compiled in place (`module.compile()`) has its hooks compiled with it and does not see
hooks registered later, so it is marked from outside the compiled code. `torch.compile(module)`
returns another module, whose hooks run as usual.
"""

import contextlib
import functools
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.fx import GraphModule
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from onerank.capture.patches import patched
from onerank.capture.profiling.module_roles import describe
from onerank.ir import Module


@contextlib.contextmanager
def hooked(
    modules: Sequence[nn.Module],
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    first: bool = False,
) -> Generator[None]:
    """Hook the modules while the context lasts.

    Args:
        modules: modules to hook, each once.
        before: a forward pre-hook that also takes keyword arguments.
        after: a forward hook that also takes keyword arguments; called even if the forward raises.
        first: whether these hooks run before those that the modules have already, or after them.
    """
    # All modules store the hooks under one new number. register_forward_hook would give each hook a
    # separate one, and dynamo guards on it: no layer from the ninth on would run compiled.
    number = RemovableHandle(OrderedDict()).id
    try:
        for module in modules:
            for hooks, value in _hook_entries(module, before, after):
                hooks[number] = value
                if first:
                    hooks.move_to_end(number, last=False)
        yield
    finally:
        for module in modules:
            for hooks, _ in _hook_entries(module, before, after):
                hooks.pop(number, None)


def _hook_entries(
    module: Any, before: Any, after: Any
) -> tuple[tuple[OrderedDict[int, Any], Any], ...]:
    """Return the dictionaries in which nn.Module stores a hook and its flags, with the values."""
    return (
        (module._forward_pre_hooks, before),
        (module._forward_pre_hooks_with_kwargs, True),
        (module._forward_hooks, after),
        (module._forward_hooks_with_kwargs, True),
        (module._forward_hooks_always_called, True),
    )


Arguments = tuple[Any, dict[str, Any]]
"""Positional and keyword arguments of a call."""

Before = Callable[[nn.Module, Any, dict[str, Any]], Arguments | None]
"""Called with a module and its arguments; may return other arguments."""

After = Callable[[nn.Module, Any, dict[str, Any], Any], None]
"""Called with a module, its arguments, and its output or None if it raised."""


class CompiledCall:
    """Calls a compiled module between hooks that are not compiled."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module = module
        self._call = call
        self._hooks: OrderedDict[int, tuple[Before, After]] = OrderedDict()

    def register(self, before: Before, after: After) -> RemovableHandle:
        """Add hooks inside those that were added earlier."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = before, after
        return handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = [*self._hooks.values()]
        for before, _ in hooks:
            args, kwargs = before(self._module, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = self._call(*args, **kwargs)
            return output
        finally:
            for _, after in reversed(hooks):
                after(self._module, args, kwargs, output)


def compiled_call(module: Any) -> CompiledCall | None:
    """Return the hooked call of a module compiled in place; None for any other module."""
    call = module._compiled_call_impl
    return call if isinstance(call, CompiledCall) else None


@contextlib.contextmanager
def hooks_around_compiled(before: Before, after: After) -> Generator[None]:
    """Run hooks around the calls of modules that are compiled in place while the context lasts."""
    compile_in_place: Callable[..., None] = nn.Module.compile

    def compile_watched(module: Any, *args: Any, **kwargs: Any) -> None:
        compile_in_place(module, *args, **kwargs)
        module._compiled_call_impl = CompiledCall(module, module._compiled_call_impl)
        module._compiled_call_impl.register(before, after)

    with patched("torch.nn.Module", {"compile": compile_watched}):
        yield


def _in_step_range(optimizer: Optimizer, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled step of an optimizer in the range by which torch marks a step.

    Dynamo leaves the range of `Optimizer.step` out of the code that it compiles.
    """

    @functools.wraps(compiled)
    def step(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            return compiled(*args, **kwargs)

    return step


SCOPE_PREFIX = "onerank::module::"
"""Prefix of the profiler range of a module's forward; the module's path follows."""

MODEL_PREFIX = "onerank::model::"
"""Prefix of the range around calls of the second and later models of one name; their number
follows."""


def profiler_on() -> bool:
    """Return whether a profiler is recording."""
    enabled: Any = torch.autograd.profiler
    return enabled._is_profiler_enabled


class Listener(Protocol):
    """Receives the begin and end of every forward."""

    def enter(self, path: str, model: int) -> None:
        """Receive the begin of a forward.

        Args:
            path: path of the module.
            model: for a model, the number of earlier models of the same name; otherwise 0.
        """
        ...

    def leave(self) -> None:
        """Receive the end of the innermost forward."""
        ...


class Modules:
    """The modules of a script, known from the first call of their model on.

    A model is a module with parameters that is called first while no other module's forward runs.
    Modules without parameters are no models: scripts often create losses and activations for each
    call. They also create containers for each call (`layers[:4]`), so a model is identified by its
    first parameter.

    Attributes:
        listener: receives every forward; None for no listener.
        on_model_call: functions to call with a model and its arguments before each of its outermost
            forwards.
        calls: number of calls of models so far.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.on_model_call: list[Callable[[nn.Module, Arguments], None]] = []
        self.calls = 0
        self._inside: list[nn.Module] = []  # modules whose forward has not ended, outermost first
        self._paths: dict[nn.Module, str] = {}
        self._table: dict[str, Module] = {}
        self._models: Counter[str] = Counter()  # by name
        # First parameter of a model -> name -> number. Identity is the key, because comparing
        # parameters compares their values.
        self._known: MutableMapping[nn.Parameter, dict[str, int]] = WeakIdKeyDictionary()
        self._numbers: dict[nn.Module, int] = {}  # of models
        self._compiled_calls: dict[nn.Module, CompiledCall] = {}  # of models that are being called
        self._compiles = False  # whether the script has called torch.compile
        # Modules that eager code called, kept if the script compiles; for `only_compiled`.
        self._called: set[nn.Module] = set()
        self._handles: tuple[RemovableHandle, ...] = ()  # of the hooks of every module

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Hook every module's forward while the context lasts."""
        self._handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with (
                warnings.catch_warnings(),
                hooks_around_compiled(self._enter, self._leave_compiled),
                patched("torch", {"compile": self._compile_function()}),
            ):
                # The script has no part in these hooks, so a warning of them would mislead.
                warnings.filterwarnings("ignore", r".*torch\.compile\(module\).*global hooks")
                yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    @contextlib.contextmanager
    def only_models_hooked(self) -> Generator[None]:
        """Hook only the known models while the context lasts, so that other modules run unslowed.

        A model that is called first within the context stays unknown. Scripts that compile keep
        all hooks: dynamo guards on whether there are global hooks, and would compile again.
        """
        # Hooks of every module took 0.8 ms of a decode of 10.4 ms that waits for its host (a Llama
        # of 16 layers, one H100, torch 2.11): nn.Module calls its forward in a slower way.
        if self._compiles:
            # Warm-up steps may have called modules that are compiled by now.
            self._called.clear()
            yield
            return
        every: tuple[Any, Any] = _global_forward_pre_hooks, _global_forward_hooks
        pairs = [*zip(every, self._handles, strict=True)]
        removed = [(hooks, handle, hooks.pop(handle.id)) for hooks, handle in pairs]
        try:
            # First, as hooks of every module are: a slice's own hooks change arguments.
            with hooked([*self._numbers], self._enter, self._leave, first=True):
                yield
        finally:
            for hooks, handle, hook in removed:
                if handle in self._handles:  # otherwise the capture has ended
                    hooks[handle.id] = hook
                    # As registered: hooks that shard a model communicate inside of its scope.
                    for number in sorted(hooks):
                        hooks.move_to_end(number)

    @contextlib.contextmanager
    def listened_by(self, listener: Listener) -> Generator[None]:
        """Report every forward to `listener` while the context lasts."""
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None

    @contextlib.contextmanager
    def scope(self, module: Any) -> Generator[None]:
        """Report a forward to the listener, for a call that runs no hooks of the module.

        Args:
            module: the object that is called; anything but a known module is not reported.
        """
        path = self._paths.get(module) if isinstance(module, nn.Module) else None
        listener = self.listener
        if path is None or listener is None:
            yield
            return
        listener.enter(path, self._numbers.get(module, 0))
        try:
            yield
        finally:
            listener.leave()

    def call_of(self, model: nn.Module) -> Callable[..., Any]:
        """Return what the script called where it called `model`: the module, or its compiled call.

        For functions in `on_model_call`.
        """
        return self._compiled_calls.get(model, model)

    def only_compiled(self, module: nn.Module) -> bool:
        """Return whether only compiled code called a module since the last timed steps began.

        False before any timed step. False for all modules if a graph broke: compiled code then ends
        within modules, and hooks that it cannot trace run although `_enter` was compiled.
        """
        if not self._called or module in self._called:
            return False
        return not torch._dynamo.utils.counters["graph_break"]

    def _compile_function(self) -> Callable[..., Any]:
        """Return torch.compile; a compiled `model.__call__` gets hooks outside of compiled code."""
        original: Callable[..., Any] = torch.compile

        @functools.wraps(original)
        def compile_watched(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._compiles = True
            compiled = original(model, *args, **kwargs)
            owner = getattr(model, "__self__", None)
            if isinstance(owner, Optimizer) and model.__name__ == "step":
                return _in_step_range(owner, compiled)
            if not isinstance(owner, nn.Module) or model != owner.__call__:
                return compiled
            call = CompiledCall(owner, compiled)

            def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                self._compiled_calls[module] = call
                try:
                    self._enter(module, args, kwargs)
                finally:
                    self._compiled_calls.pop(module, None)  # a repeated call has removed it

            call.register(enter, self._leave_compiled)
            return call

        return compile_watched

    def table(self) -> tuple[Module, ...]:
        """Return the description of each module, by path.

        If two models of the script have a module of the same path, the first model's counts.
        """
        return tuple(self._table[path] for path in dict.fromkeys(self._paths.values()))

    def __iter__(self) -> Iterator[tuple[nn.Module, Module]]:
        """Yield each module with its description."""
        for module, path in self._paths.items():
            yield module, self._table[path]

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        # First: dynamo guards on any state that it sees read here, and compiles again when that
        # state changes.
        if torch.compiler.is_compiling():
            return
        if module not in self._paths:
            if self._inside and isinstance(module, GraphModule):
                return  # part of compiled code, not of the model
            self._add(module)
        if module in self._numbers and module not in self._inside:
            self.calls += 1
            if self.on_model_call:
                # Read here: in a function called from here, the caller's frame is another one.
                named = kwargs if kwargs is not None else _keywords(sys._getframe(1))
                for observe in self.on_model_call:
                    observe(module, (args, named))
        self._inside.append(module)
        if self._compiles:
            self._called.add(module)
        if self.listener is not None:
            self.listener.enter(self._paths[module], self._numbers.get(module, 0))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and module in self._inside:
            self._end(len(self._inside) - 1 - self._inside[::-1].index(module))

    def _leave_compiled(self, module: nn.Module, *_: Any) -> None:
        # Where a graph breaks, the hook before a forward may be compiled and the one after it not.
        if module in self._inside:
            self._end(self._inside.index(module))

    def _end(self, place: int) -> None:
        """End the forwards from index `place` on, the innermost first."""
        while len(self._inside) > place:
            self._inside.pop()
            if self.listener is not None:
                self.listener.leave()

    def _add(self, root: nn.Module) -> None:
        """Add `root` and all modules in it: the outermost module of a model is called first."""
        for module, description in describe(root):
            self._paths[module] = description.path
            self._table.setdefault(description.path, description)
        if (first := next(root.parameters(), None)) is not None:
            name = self._paths[root]
            numbers = self._known.setdefault(first, {})
            if name not in numbers:
                numbers[name] = self._models[name]
                self._models[name] += 1
            self._numbers[root] = numbers[name]


def _keywords(caller: FrameType) -> dict[str, Any]:
    """Return the keyword arguments of the module call that runs a global hook."""
    # torch passes keyword arguments to the hooks of a module, but not to global hooks. A hook of
    # the module is no alternative: copy.deepcopy would copy it and torch.save would pickle it with
    # the module. So they are read from the frame of `Module._call_impl`.
    is_module_call = caller.f_code.co_filename == _CALL_IMPL.co_filename
    return caller.f_locals.get("kwargs", {}) if is_module_call else {}


_CALL_IMPL: CodeType = nn.Module.__call__.__code__


class ProfilerScopes:
    """Opens a scope in the profiler's stream around each forward."""

    def __init__(self) -> None:
        self._open: list[contextlib.ExitStack] = []

    def enter(self, path: str, model: int) -> None:
        """Open the scope of a module."""
        scopes = contextlib.ExitStack()
        if model:
            scopes.enter_context(record_function(f"{MODEL_PREFIX}{model}"))
        scopes.enter_context(record_function(SCOPE_PREFIX + path))
        self._open.append(scopes)

    def leave(self) -> None:
        """Close the scope opened last."""
        if self._open:
            self._open.pop().close()
