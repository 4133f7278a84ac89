"""What a model that is sliced returns."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onerank.ir.errors import SliceError


@functools.cache
def logits_when_read(kind: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a subclass of a model's output class that changes its logits as they are read, once.

    A training step reads the loss alone: its logits must cost nothing.

    Args:
        kind: the output class, which may be such a subclass.
        change: what becomes of the logits. The same object for all calls of a model, since a class
            is made for each.
    """
    inner, place = getattr(kind, "logits", None), f"logits_{len(kind.__mro__)}"

    class Changing(kind):
        @property
        def logits(self) -> Tensor:
            own = self.__dict__
            if place not in own:
                given = inner.__get__(self) if isinstance(inner, property) else own["logits"]
                own[place] = change(given)
            return own[place]

        @logits.setter
        def logits(self, value: Tensor) -> None:
            self.__dict__[place] = value  # the script's own, or a copy of what was read

        def __getitem__(self, key: Any) -> Any:
            name = list(self.keys())[key] if isinstance(key, int) else key
            plain: Any = OrderedDict[str, Any]  # the class between looks names up by items()
            return self.logits if name == "logits" else plain.__getitem__(self, name)

        def values(self) -> list[Any]:
            return [self[key] for key in self.keys()]

        def items(self) -> list[tuple[str, Any]]:
            return [(key, self[key]) for key in self.keys()]

        def get(self, key: Any, default: Any = None) -> Any:
            return self[key] if key in self else default  # noqa: SIM401

    Changing.__name__ = Changing.__qualname__ = kind.__name__
    return Changing


@functools.cache
def without_logits(kind: Any, why: str) -> Any:
    """Return a subclass of a model's output class whose logits refuse to be used, and say `why`.

    They may be read, to be passed on: the HF Trainer's evaluation takes all outputs apart, and then
    uses the loss alone.
    """
    nothing = unusable(why)

    def instead(_: Tensor) -> Any:
        return nothing

    return logits_when_read(kind, instead)


def unusable(why: str) -> Any:
    """Return what stands for a tensor that is not there, and says `why` as it is used."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise SliceError(why)

    operators = "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul neg".split()
    names = [f"__{name}__" for name in (*operators, "getattr", "getitem", "len", "iter")]
    members = {**dict.fromkeys(names, refuse), "__torch_function__": classmethod(refuse)}
    return type("Logits", (), members)()


def change_hidden_states(stack: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let an encoder or a decoder give other hidden states than it computes."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        output.last_hidden_state = change(output.last_hidden_state)
        return output

    setattr(stack, _CHANGED, stack.register_forward_hook(hook))


def leave_hidden_states(stack: nn.Module) -> None:
    """Let it give them as they are, where another pipeline stage goes on with them."""
    if (handle := vars(stack).pop(_CHANGED, None)) is not None:
        handle.remove()


_CHANGED = "_onerank_changed_hidden_states"
