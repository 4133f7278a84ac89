"""What passes through parts of a model whose work another pipeline stage does.

Some models scale the embedding, add positions or drop out before the first layer, and cap the
logits after the head. One stage does that; on the others it must neither change the values nor
launch a kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Passing(Tensor):
    """A tensor on which what a model does to embeddings and logits has no effect.

    Any other function of it gives a plain tensor.
    """

    @staticmethod
    def of(plain: Tensor) -> Tensor:
        """Return such a tensor; the memory and the autograd history are those of `plain`."""
        return plain.as_subclass(Passing)

    @staticmethod
    def plain(value: Any) -> Any:
        """Return the plain tensor; any other value as it is."""
        return value.as_subclass(Tensor) if isinstance(value, Passing) else value

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the tensor itself for a function of embeddings or logits."""
        if func in _WITHOUT_EFFECT:
            found = [value for value in args if isinstance(value, Passing)]
            return max(found, key=Tensor.numel)  # not the empty one that stands for positions
        with _DISABLED():
            result = func(*args, **(kwargs or {}))
        return Passing.of(result) if func is Tensor.detach else result


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_WITHOUT_EFFECT: tuple[Any, ...] = (
    *(Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, torch.div),
    *(Tensor.tanh, torch.tanh, functional.dropout),
    *(Tensor.to, Tensor.type_as, Tensor.float),
)
