"""Restore what a call of a model changed, so that the same call can be repeated.

A forward with a KV cache changes its arguments: a dynamic cache replaces its tensors by longer
ones, a static cache writes into its tensors and advances counters. Two kinds of changes are
restored:

- The contents of containers: lists, dictionaries and objects among the arguments, and the
  attributes of the model.
- The values of small integer tensors, such as the length of a static cache. They are written in
  place, because compiled code depends on the address of a tensor.

Other tensors that the call writes in place keep what it wrote: a static cache gets the same keys
and values each time.

Without repetitions, the script would free a tensor that the call replaces, and the peak memory
must not include it. So the tensor is kept in host memory, and copied back before each repetition.
"""

import contextlib
from collections.abc import Generator
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from onerank.capture.profiling.module_scopes import Arguments

# Bytes up to which an integer tensor counts as lengths or positions, not as quantised data.
_MOST_COUNTER_BYTES = 1 << 16

# Entries up to which a container is searched. A cache has one per layer; a vocabulary has more.
_MOST_ENTRIES = 4096

_CACHE_DIMS = 3

_SEARCHED_OUT = (nn.Module, type, FunctionType, ModuleType, torch.dtype, torch.device)

# Attributes that every nn.Module has: hooks, parameters, submodules, but no state of a forward.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


class RepeatableCall:
    """The state that a call of a model may change, as it was before the call.

    Args:
        model: the module that is called.
        arguments: arguments of the call.
    """

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self._tuple_tensors: list[Tensor] = []  # the contents of a tuple do not change
        self._containers: list[tuple[Any, dict[Any, Any]]] = []  # with their contents
        # Attributes that a module adds on its first call stay.
        self._module_attributes: list[tuple[Any, dict[Any, Any]]] = []
        self._counters: list[Tensor] = []
        self._seen: set[int] = set()
        args, kwargs = arguments
        for value in (*args, *kwargs.values()):
            self._search(value)
        for module in model.modules():
            self._search_module(module)
        self._counts = [counter.clone() for counter in self._counters]

    def after_first_call(self) -> None:
        """Find out what the call changed; move the tensors that it replaced to host memory."""
        memo: dict[int, _InHostMemory] = {}
        for container, held in (*self._containers, *self._module_attributes):
            now = _contents(container)
            for key, value in held.items():
                if isinstance(value, Tensor) and now.get(key) is not value and value.numel():
                    held[key] = memo.setdefault(id(value), _InHostMemory(value))
        pairs = [*zip(self._counters, self._counts, strict=True)]
        changed = [
            (counter, count)
            for counter, count in pairs
            if isinstance(counter, FakeTensor) or not torch.equal(counter, count)
        ]
        self._counters = [counter for counter, _ in changed]
        self._counts = [count for _, count in changed]

    def restore(self) -> None:
        """Restore all that the call changed."""
        copies: dict[int, Tensor] = {}

        def value_of(kept: Any) -> Any:
            if not isinstance(kept, _InHostMemory):
                return kept
            return copies.setdefault(id(kept), kept.on_device())

        for container, held in self._containers:
            now = _contents(container)
            if now.keys() == held.keys() and all(now[key] is held[key] for key in held):
                continue
            _set_contents(container, {key: value_of(kept) for key, kept in held.items()})
        for container, held in self._module_attributes:
            for key, kept in held.items():
                # None: the module created something on its first call, which it keeps.
                if kept is not None and container.get(key) is not kept:
                    container[key] = value_of(kept)
        for counter, count in zip(self._counters, self._counts, strict=True):
            counter.copy_(count)

    def cache_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that containers among the arguments hold: the KV cache."""
        tensors = [*self._tuple_tensors]
        for container, _ in self._containers:
            tensors += [part for part in _contents(container).values() if isinstance(part, Tensor)]
        # Lengths and positions have fewer dimensions than keys, values and recurrent states.
        return tuple(tensor for tensor in tensors if tensor.dim() >= _CACHE_DIMS)

    def _search(self, value: Any) -> None:
        """Store the contents of the containers that can be reached from a value."""
        pending = [value]
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor):
                self._add_counter(value)
                continue
            if id(value) in self._seen or isinstance(value, _SEARCHED_OUT):
                continue
            self._seen.add(id(value))
            if isinstance(value, tuple):
                pending += value
                self._tuple_tensors += [part for part in value if isinstance(part, Tensor)]
                continue
            if not _is_container(value):
                continue
            held = _contents(value)
            if len(held) <= _MOST_ENTRIES:
                self._containers.append((value, held))
                pending += held.values()

    def _search_module(self, module: nn.Module) -> None:
        """Store what a module's own attributes hold, and the caches among them."""
        attributes = vars(module)
        buffers: dict[str, Any] = attributes["_buffers"]
        held = {name: attributes[name] for name in attributes.keys() - _MODULE_INTERNALS}
        self._module_attributes += [(attributes, held), (buffers, dict(buffers))]
        for value in (*held.values(), *buffers.values()):
            if isinstance(value, Tensor):
                self._add_counter(value)
            elif _holds_tensors(value):
                self._search(value)

    def _add_counter(self, tensor: Tensor) -> None:
        small = tensor.nbytes <= _MOST_COUNTER_BYTES
        if small and not tensor.is_floating_point() and id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._counters.append(tensor)


def _is_container(value: Any) -> bool:
    """Return whether a value is a list, a dictionary or an object with attributes."""
    has_attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return isinstance(value, list | dict) or has_attributes


def _contents(container: Any) -> dict[Any, Any]:
    """Return what a list, a dictionary or an object holds, by index, key or attribute."""
    if isinstance(container, list):
        return dict(enumerate(container))  # pyright: ignore[reportUnknownVariableType]
    if isinstance(container, dict):
        return dict(container)  # pyright: ignore[reportUnknownVariableType]
    # The default of pickle: `__dict__`, or a pair of it and the attributes in `__slots__`.
    state: Any = object.__getstate__(container)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def _set_contents(container: Any, contents: dict[Any, Any]) -> None:
    if isinstance(container, list):
        container[:] = contents.values()
        return
    is_dict = isinstance(container, dict)
    target: dict[Any, Any] = container if is_dict else getattr(container, "__dict__", {})
    slots: set[Any] = set() if is_dict else _contents(container).keys() - target.keys()
    target.clear()
    for name in slots:
        object.__delattr__(container, name)
    for name, value in contents.items():
        if not is_dict and isinstance(getattr(type(container), name, None), MemberDescriptorType):
            object.__setattr__(container, name, value)
        else:
            target[name] = value


def _holds_tensors(value: Any) -> bool:
    """Return whether a container holds tensors, directly or in containers in it."""
    if isinstance(value, _SEARCHED_OUT) or not (isinstance(value, tuple) or _is_container(value)):
        return False
    parts = value if isinstance(value, tuple) else _contents(value).values()
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
def kept_random_state(model: nn.Module) -> Generator[None]:
    """Restore the state of the random number generators at the end of the context."""
    first = next(model.parameters(), None)
    if isinstance(first, FakeTensor):  # no device draws numbers
        yield
        return
    devices = [first.device] if first is not None and first.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
