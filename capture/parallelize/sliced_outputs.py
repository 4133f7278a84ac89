"""Outputs of a sliced model: logits are gathered only if the script reads them."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onerank.ir.errors import SliceError


@functools.cache
def logits_when_read(kind: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a subclass of a model's output class that transforms its logits at the first read.

    A training step reads only the loss, so its logits must not cost a collective.

    Args:
        kind: the output class, possibly a subclass that this function returned.
        change: transforms the logits. Pass the same object in all calls of a model, because the
            function caches one class per object.
    """
    # `kind` may transform its logits already: each class in the chain keeps its own result.
    inner, place = getattr(kind, "logits", None), f"logits_{len(kind.__mro__)}"

    class Changing(kind):
        @property
        def logits(self) -> Tensor:
            fields = self.__dict__
            if place not in fields:
                stored = inner.__get__(self) if isinstance(inner, property) else fields["logits"]
                fields[place] = change(stored)
            return fields[place]

        @logits.setter
        def logits(self, value: Tensor) -> None:
            # Set by the script, or copied from another output.
            self.__dict__[place] = value

        def __getitem__(self, key: Any) -> Any:
            name = list(self.keys())[key] if isinstance(key, int) else key
            # Not ModelOutput's __getitem__, which looks names up through items(), defined below.
            plain: Any = OrderedDict[str, Any]
            return self.logits if name == "logits" else plain.__getitem__(self, name)

        def values(self) -> list[Any]:
            return [self[key] for key in self.keys()]

        def items(self) -> list[tuple[str, Any]]:
            return [(key, self[key]) for key in self.keys()]

        def get(self, key: Any, default: Any = None) -> Any:
            return self[key] if key in self else default  # noqa: SIM401

    Changing.__name__ = Changing.__qualname__ = kind.__name__
    return Changing


class LogitsWhenUsed:
    """Logits that are transformed at their first use.

    For compiled code, where torch.compile cannot trace an assignment to `__class__`.

    Args:
        given: the logits as the head computed them.
        change: transforms the logits.
    """

    def __init__(self, given: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        self._given, self._change = given, change
        self._changed: Tensor | None = None

    def changed(self) -> Tensor:
        """Return the transformed logits."""
        if self._changed is None:
            self._changed = self._change(self._given)
        return self._changed

    def __getattr__(self, name: str) -> Any:
        # `copy` reads attributes before __init__ ran.
        if name in ("_given", "_change", "_changed"):
            raise AttributeError(name)
        return getattr(self.changed(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function on the transformed logits."""
        plain = [_plain(value) for value in args]
        return func(*plain, **{key: _plain(value) for key, value in (kwargs or {}).items()})


def change_when_read(output: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Transform the logits of a model's output when the script first reads them."""
    if torch.compiler.is_compiling():
        output.logits = LogitsWhenUsed(output.logits, change)
    else:
        output.__class__ = logits_when_read(type(output), change)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value.changed() if isinstance(value, LogitsWhenUsed) else value


def _operate(name: str) -> Callable[..., Any]:
    def operator(self: LogitsWhenUsed, *args: Any) -> Any:
        return getattr(self.changed(), name)(*map(_plain, args))

    return operator


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul neg".split()
# Python looks operators up in the class, not through __getattr__.
for _name in (*_ARITHMETIC, *"getitem len iter eq ne lt le gt ge".split()):
    setattr(LogitsWhenUsed, f"__{_name}__", _operate(f"__{_name}__"))


@functools.cache
def without_logits(kind: Any, why: str) -> Any:
    """Return a subclass of a model's output class whose logits raise an error with `why` on use.

    Reading them is allowed: the HF Trainer's evaluation unpacks all outputs and then uses only the
    loss.
    """
    nothing = unusable(why)

    def replace(_: Tensor) -> Any:
        return nothing

    return logits_when_read(kind, replace)


def unusable(why: str) -> Any:
    """Return a placeholder for an absent tensor; any use raises an error with `why`."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise SliceError(why, code="output-not-available")

    names = [f"__{name}__" for name in (*_ARITHMETIC, "getattr", "getitem", "len", "iter")]
    members = {**dict.fromkeys(names, refuse), "__torch_function__": classmethod(refuse)}
    return type("Logits", (), members)()


def change_hidden_states(stack: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Transform the hidden states that an encoder or decoder returns."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        output.last_hidden_state = change(output.last_hidden_state)
        return output

    setattr(stack, _CHANGED, stack.register_forward_hook(hook))


def leave_hidden_states(stack: nn.Module) -> None:
    """Remove the transformation, for a stack whose output goes to the next pipeline stage."""
    if (handle := vars(stack).pop(_CHANGED, None)) is not None:
        handle.remove()


_CHANGED = "_onerank_changed_hidden_states"
