"""Restore what a step changed, so that the same step can be repeated.

A forward with a KV cache changes its state: a dynamic cache replaces its tensors by longer ones, a
static cache writes into its tensors and advances counters. State is searched in

- the arguments, all of whose containers are restored: lists, dictionaries, objects;
- the attributes of the model's modules, and of the object whose method is the step;
- the variables that the step's functions use: globals of the script and of its modules, variables
  of enclosing functions, attributes of classes.

Small integer tensors, such as the length of a static cache, are written in place, because compiled
code depends on the address of a tensor. Other tensors that the step writes in place keep what it
wrote: a static cache gets the same keys and values each time.

What the first step creates outside of the arguments is either a constant, such as a table of
sines, or state, such as a KV cache. A second step shows which: it changes state.

The search has limits, and does not enter generators and libraries. A step whose state it misses is
refused if each repetition keeps more memory: see `Growth`.

Without repetitions, the script would free a tensor that the step replaces, and the peak memory must
not include it. So the tensor is kept in host memory, and copied back before each repetition.
"""

import contextlib
import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from onerank.capture.patches import live
from onerank.capture.profiling.module_scopes import Arguments

# Bytes up to which an integer tensor counts as lengths or positions, not as quantised data.
_MOST_COUNTER_BYTES = 1 << 16

# Entries up to which a container is searched. A cache has one per layer; a vocabulary has more.
_MOST_ENTRIES = 4096

# Containers up to which variables are searched: a data set in a global variable may hold more.
_MOST_CONTAINERS = 100_000

# Least dimensions of a KV cache or a recurrent state. Lengths and positions have fewer.
_CACHE_DIMS = 3

_SEARCHED_OUT = (type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)

# Attributes that every nn.Module has: hooks, parameters, submodules, but no state of a forward.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))

# Packages whose objects hold no KV cache, but caches of compiled code.
_TOOLS = frozenset({"torch", "triton", "numpy", "onerank", "_pytest", "pluggy"})

_MISSING = object()


@dataclass
class _State:
    """A container, or variables, with the contents before the step.

    Attributes:
        container: list, dictionary, object, module, class or cell.
        held: its contents before the step.
        is_argument: whether it is an argument of the step, or reachable from one.
        only_data: whether only tensors, numbers and containers of tensors are restored.
        created: entries that the first step created -> their values, and the state in them.
    """

    container: Any
    held: dict[Any, Any]
    is_argument: bool = False
    only_data: bool = False
    created: dict[Any, tuple[Any, "_Search"]] = field(
        default_factory=dict[Any, tuple[Any, "_Search"]]
    )

    def changes(self) -> dict[Any, Any]:
        """Return the entries to restore, with their values; `_MISSING` for those to remove."""
        now = _contents(self.container)
        changes: dict[Any, Any] = {}
        for key in (*self.held, *(key for key in now if key not in self.held)):
            before, after = self.held.get(key, _MISSING), now.get(key, _MISSING)
            if key in self.created or _same(before, after):
                continue
            if not self.only_data or (_is_data(before) and _is_data(after)):
                changes[key] = before
        return changes

    def find_created(self) -> None:
        """Find the entries that the first step created."""
        if self.is_argument:
            return
        for key, before in self.changes().items():
            if before is None or before is _MISSING:
                value = _contents(self.container)[key]
                search = _Search()
                search.add(value)
                self.created[key] = value, search

    def find_constants(self) -> None:
        """Of the created entries, keep those that the second step did not change."""
        now = _contents(self.container)
        known = self.held.keys() | self.created.keys()
        if isinstance(self.container, list | dict | deque) and now.keys() - known:
            self.created.clear()  # each step adds entries
        for key, (value, search) in [*self.created.items()]:
            if not _same(now.get(key, _MISSING), value) or search.is_changed():
                del self.created[key]


class _Search:
    """Searches containers and counters.

    Attributes:
        states: containers and variables.
        counters: small integer tensors.
        tuple_tensors: tensors in tuples, whose contents do not change.
        parameter: a parameter of the models among them; None without any.
    """

    def __init__(self) -> None:
        self.states: list[_State] = []
        self.counters: list[Tensor] = []
        self.tuple_tensors: list[Tensor] = []
        self.parameter: Tensor | None = None
        self._seen: set[int] = set()

    def is_changed(self) -> bool:
        """Return whether a container has other contents than when it was searched."""
        return any(state.changes() for state in self.states)

    def add(self, value: Any, *, is_argument: bool = False, only_data: bool = False) -> None:
        """Add the containers that can be reached from a value; arguments as in `_State`."""
        pending = [value]
        while pending and len(self.states) < _MOST_CONTAINERS:
            value = pending.pop()
            if isinstance(value, Tensor):
                self._add_counter(value)
                continue
            if id(value) in self._seen or isinstance(value, _SEARCHED_OUT):
                continue
            if isinstance(value, nn.Module):
                self.add_model(value)
                continue
            self._seen.add(id(value))
            if isinstance(value, tuple):
                pending += value
                self.tuple_tensors += [part for part in value if isinstance(part, Tensor)]
            elif _is_container(value) and (is_argument or _package(type(value)) not in _TOOLS):
                held = _contents(value)
                if len(held) <= _MOST_ENTRIES:
                    self.states.append(_State(value, held, is_argument, only_data))
                    pending += held.values()

    def add_model(self, model: nn.Module) -> None:
        """Add the attributes of a model's modules, and the caches among them."""
        if self.parameter is None:
            self.parameter = next(model.parameters(), None)
        for module in model.modules():
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            attributes = vars(module)
            for owner in (module, attributes["_buffers"]):
                held = _contents(owner)
                self.states.append(_State(owner, held))
                for value in held.values():
                    self.add(value, only_data=not _holds_tensors(value))

    def add_variables(self, functions: Iterable[Callable[..., Any]]) -> None:
        """Add the variables that functions use: of their modules, and of enclosing functions."""
        # Functions of other modules of the script are reached through its globals, if at all.
        for function in functions:
            unwrapped = _unwrapped(function)
            if unwrapped is None or _is_installed(unwrapped.__globals__):
                continue
            for cell in unwrapped.__closure__ or ():
                self._add_variables(cell)
            self._add_variables(unwrapped.__globals__)
        self._add_variables(vars(sys.modules["__main__"]))

    def add_classes(self, kinds: Iterable[type]) -> None:
        """Add the attributes of classes that the script defines."""
        for kind in {base for derived in kinds for base in derived.__mro__}:
            module = sys.modules.get(kind.__module__)
            if module is not None and not _is_installed(vars(module)):
                self._add_variables(kind)

    def _add_variables(self, owner: Any) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        state = _State(owner, _contents(owner), only_data=True)
        self.states.append(state)
        for value in state.held.values():
            self.add(value, only_data=True)

    def _add_counter(self, tensor: Tensor) -> None:
        small = tensor.nbytes <= _MOST_COUNTER_BYTES
        if small and not tensor.is_floating_point() and id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self.counters.append(tensor)


class RepeatableCall:
    """The state that a call may change, as it was before the call.

    Args:
        called: the module, or the method, that is called.
        arguments: arguments of the call.

    Attributes:
        parameter: a parameter of the models that the call can reach; None without any.
    """

    def __init__(self, called: Callable[..., Any], arguments: Arguments) -> None:
        search = _Search()
        args, kwargs = arguments
        for value in (*args, *kwargs.values()):
            search.add(value, is_argument=not isinstance(value, nn.Module))
        owner = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
        modules = [*owner.modules()] if isinstance(owner, nn.Module) else []
        search.add(owner)
        search.add_variables([called, *_functions_of(modules)])
        search.add_classes({*map(type, modules), type(owner)})
        self.parameter = search.parameter
        self._states = search.states
        self._tuple_tensors = search.tuple_tensors
        self._counters = search.counters
        self._counts = [counter.clone() for counter in self._counters]
        self._caches: list[tuple[_State, Any]] = []  # outside of arguments, with their keys
        self._versions = [(t, v) for t in self._tensors() if (v := _version(t)) is not None]
        self._written: list[Tensor] = []

    def run_first(self, call: Callable[[], object]) -> None:
        """Run the step and find out what it changes.

        If the step creates objects outside of the arguments, it runs twice: see the module.
        """
        call()
        for state in self._states:
            state.find_created()
        self._find_changed()
        if any(state.created for state in self._states):
            self.restore()
            call()
            for state in self._states:
                state.find_constants()

    def _find_changed(self) -> None:
        """Keep only what the call changed; copy the tensors that it replaced to host memory."""
        self._written = [tensor for tensor, count in self._versions if _version(tensor) != count]
        self._versions.clear()
        memo: dict[int, _InHostMemory] = {}
        kept: list[_State] = []
        for state in self._states:
            changes = state.changes()
            for key, value in changes.items():
                if isinstance(value, Tensor) and value.numel():
                    state.held[key] = memo.setdefault(id(value), _InHostMemory(value))
                    if not state.is_argument and value.dim() >= _CACHE_DIMS:
                        self._caches.append((state, key))
            # Each repetition compares the states. A large script has many variables that no step
            # changes, so those are dropped.
            if state.is_argument or not state.only_data or changes or state.created:
                kept.append(state)
        self._states = kept
        pairs = [*zip(self._counters, self._counts, strict=True)]
        changed = [
            (counter, count)
            for counter, count in pairs
            if isinstance(counter, FakeTensor) or not torch.equal(counter, count)
        ]
        self._counters = [counter for counter, _ in changed]
        self._counts = [count for _, count in changed]

    def restore(self) -> None:
        """Restore everything that the call changed."""
        copies: dict[int, Tensor] = {}

        def value_of(kept: Any) -> Any:
            if not isinstance(kept, _InHostMemory):
                return kept
            return copies.setdefault(id(kept), kept.on_device())

        for state in self._states:
            if changes := state.changes():
                _change(state, {key: value_of(kept) for key, kept in changes.items()})
        for counter, count in zip(self._counters, self._counts, strict=True):
            counter.copy_(count)

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the KV cache.

        They are the tensors that containers among the arguments hold, and tensors elsewhere that
        the call replaces or writes.
        """
        tensors = [*self._tuple_tensors, *self._written]
        for state in self._states:
            if state.is_argument:
                contents = _contents(state.container).values()
                tensors += [part for part in contents if isinstance(part, Tensor)]
        values = [_contents(state.container).get(key) for state, key in self._caches]
        tensors += [value for value in values if isinstance(value, Tensor)]
        return tuple(tensor for tensor in tensors if tensor.dim() >= _CACHE_DIMS)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the tensors outside of arguments that may be a cache."""
        for state in self._states:
            for value in state.held.values() if not state.is_argument else ():
                if isinstance(value, Tensor) and value.dim() >= _CACHE_DIMS:
                    yield value


class Growth:
    """Detects state that each repetition of a step lengthens, because it could not be restored.

    Args:
        on_gpu: whether the step runs on a GPU, whose allocator counts the live bytes.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._live: list[int] = []

    def after_repetition(self) -> int:
        """Return the bytes that each repetition so far kept; 0 if they differ, or are too few."""
        # A capture without a device repeats a step twice. A scan of Python's objects takes a tenth
        # of a second, so later repetitions are not compared.
        if len(self._live) > _COMPARED_INCREASES:
            return 0
        self._live.append(torch.cuda.memory_allocated() if self._on_gpu else _live_bytes())
        increases = {after - before for before, after in pairwise(self._live)}
        decided = len(self._live) > _COMPARED_INCREASES and len(increases) == 1
        return max(0, *increases) if decided else 0


# Compilation and library workspaces take memory too, but not twice the same.
_COMPARED_INCREASES = 2


def _live_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python objects hold."""
    sizes: dict[int, int] = {}
    for tensor in live(Tensor):
        # Sparse and nested tensors, wrappers of tensors and parameters of lazy modules, which raise
        # ValueError, have no storage.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            storage: Any = tensor.untyped_storage()
            size = storage.nbytes()
            # Fake tensors that Dynamo keeps may have a symbolic size; they hold no memory.
            if isinstance(size, int):
                sizes[storage._cdata] = size
    return sum(sizes.values())


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written in place; None if torch does not count it."""
    return None if tensor.is_inference() else tensor._version


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    # Equal numbers are different objects above 256.
    return isinstance(before, int | float) and type(before) is type(after) and before == after


def _is_data(value: Any) -> bool:
    """Return whether a value of a variable may be state: tensors, a number, or not set yet."""
    is_number_or_tensor = isinstance(value, Tensor | _InHostMemory | int | float)
    return value is None or value is _MISSING or is_number_or_tensor or _holds_tensors(value)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _unwrapped(function: Any) -> FunctionType | None:
    """Return the function of the script in a method, a partial or a decorated function."""
    while not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        inner = next(
            (
                getattr(function, name)
                for name in ("func", "__func__", "__wrapped__")
                if hasattr(function, name)
            ),
            None,
        )
        if inner is None:
            return None
        function = inner
    return function


def _functions_of(modules: Iterable[nn.Module]) -> Iterator[Callable[..., Any]]:
    """Yield the functions that run in the forward of modules: forwards and hooks."""
    kinds: set[type] = set()
    for module in modules:
        attributes: Any = vars(module)
        if "forward" in attributes:
            yield attributes["forward"]
        yield from attributes["_forward_pre_hooks"].values()
        yield from attributes["_forward_hooks"].values()
        if type(module) not in kinds:
            kinds.add(type(module))
            yield type(module).forward


@functools.cache
def _installed_directories() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    return tuple(Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib"))


def _is_installed(variables: dict[str, Any]) -> bool:
    """Return whether the module with these variables is a library's, not the script's."""
    name, file = variables.get("__name__"), variables.get("__file__")
    if name == "__main__":
        return False
    if not isinstance(name, str) or file is None or name.partition(".")[0] in _TOOLS:
        return True
    return any(Path(file).resolve().is_relative_to(path) for path in _installed_directories())


def _is_container(value: Any) -> bool:
    """Return whether a value is a list, a deque, a dictionary or an object with attributes."""
    has_attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return isinstance(value, list | deque | dict) or has_attributes


def _contents(container: Any) -> dict[Any, Any]:
    """Return what a container holds, by index, key or attribute."""
    if isinstance(container, list | deque):
        return dict(enumerate(container))
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, nn.Module):
        attributes = vars(container)
        return {name: attributes[name] for name in attributes.keys() - _MODULE_INTERNALS}
    if isinstance(container, type | CellType):
        return _variables(container)
    # The default of pickle: `__dict__`, or a pair of it and the attributes in `__slots__`.
    state: Any = object.__getstate__(container)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def _variables(owner: type | CellType) -> dict[str, Any]:
    """Return the attributes of a class that are no methods, or the variable in a cell."""
    if isinstance(owner, type):
        return {
            name: value
            for name, value in vars(owner).items()
            if not name.startswith("__") and not hasattr(type(value), "__get__")
        }
    try:
        return {"cell_contents": owner.cell_contents}
    except ValueError:  # the enclosing function has not set the variable yet
        return {}


def _change(state: _State, values: dict[Any, Any]) -> None:
    """Change entries of a container; `_MISSING` removes one."""
    container = state.container
    if isinstance(container, list | deque):
        contents: dict[int, Any] = {**_contents(container), **values}
        kept = [value for _, value in sorted(contents.items(), key=lambda item: item[0])]
        kept = [value for value in kept if value is not _MISSING]
        container.clear()
        container.extend(kept)
        return
    if isinstance(container, dict):
        entries: dict[Any, Any] = container
        for key, value in values.items():
            _set_item(entries, key, value)
        if not state.only_data and [*entries] != [*state.held]:
            # An entry that the call removed and added again moved to the end.
            _reorder(entries, [*state.held])
        return
    kind: Any = type if isinstance(container, type) else object
    for name, value in values.items():
        in_slot = isinstance(getattr(type(container), name, None), MemberDescriptorType)
        if not in_slot and not isinstance(container, type | CellType):
            _set_item(vars(container), name, value)
        elif value is _MISSING:
            kind.__delattr__(container, name)
        else:
            # A frozen dataclass refuses `setattr`.
            kind.__setattr__(container, name, value)


def _reorder(entries: dict[Any, Any], first: list[Any]) -> None:
    """Move the keys in `first` that a dictionary has to its front, in this order."""
    ordered = {key: entries[key] for key in (*first, *entries) if key in entries}
    entries.clear()
    entries.update(ordered)


def _set_item(entries: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _MISSING:
        entries.pop(key, None)
    else:
        entries[key] = value


def _holds_tensors(value: Any) -> bool:
    """Return whether a container holds tensors, or lists or tuples that may hold them."""
    if isinstance(value, _SEARCHED_OUT) or not (isinstance(value, tuple) or _is_container(value)):
        return False
    if isinstance(value, nn.Module):
        return False
    parts: Any = value if isinstance(value, tuple) else _contents(value).values()
    return any(isinstance(part, Tensor | list | tuple) for part in parts)


class _InHostMemory:
    """A tensor in host memory, as bytes, so that it does not count as a live tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        # No device computed the values of a fake tensor: its shape is all there is.
        self._bytes = None
        if not isinstance(tensor, FakeTensor):
            self._bytes = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().copy()

    def on_device(self) -> Tensor:
        """Return a new tensor with the shape, the strides and the values of the kept one."""
        tensor = torch.empty_strided(
            self._shape, self._strides, dtype=self._dtype, device=self._device
        )
        if self._bytes is not None:
            values = torch.from_numpy(self._bytes).view(self._dtype).view(self._shape)
            tensor.copy_(values)
        return tensor


@contextlib.contextmanager
def kept_random_state(parameter: Tensor | None) -> Generator[None]:
    """Restore the state of the random number generators at the end of the context.

    `parameter` is one of the model, which shows its device.
    """
    if isinstance(parameter, FakeTensor):  # no device draws numbers
        yield
        return
    is_on_gpu = parameter is not None and parameter.device.type == "cuda"
    devices = [parameter.device] if parameter is not None and is_on_gpu else []
    with torch.random.fork_rng(devices):
        yield
