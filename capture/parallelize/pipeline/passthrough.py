"""What passes through parts of a model whose work another pipeline stage does.

Some models scale the embedding, add positions or drop out before the first layer, and cap the
logits after the head. One stage does that; on the others it must neither change the values nor
launch a kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional


class Passing(Tensor):
    """A tensor on which what a model does to embeddings and logits has no effect.

    Any other function of it gives a plain tensor.
    """

    stands_for: Tensor | None = None

    @staticmethod
    def of(plain: Tensor, stands_for: Tensor | None = None) -> Tensor:
        """Return such a tensor; the memory and the autograd history are those of `plain`.

        With `stands_for` it is that tensor's place holder.
        """
        passing = plain.as_subclass(Passing)
        passing.stands_for = stands_for
        return passing

    @staticmethod
    def plain(value: Any) -> Any:
        """Return the plain tensor, or the one it stands for; any other value as it is."""
        if not isinstance(value, Passing):
            return value
        return value.as_subclass(Tensor) if value.stands_for is None else value.stands_for

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
            if args[0].dim() == 0 and (known := _of_loss(func, *args)) is not None:
                return known
            result = func(*args, **(kwargs or {}))
        if func in _VIEWS and result.shape == args[0].shape:
            return args[0]  # a place holder of a shard must not lose it
        if func is Tensor.detach:
            return Passing.of(result, cast("Passing", args[0]).stands_for)
        return result


def _of_loss(func: Callable[..., Any], loss: Tensor, *given: Any) -> Any:
    """Answer a model that takes a loss for logits, and computes one of them by itself."""
    if func is Tensor.size and given:
        return 1
    if func.__name__ == functional.cross_entropy.__name__:  # which a slice's head replaces
        return Passing.plain(loss)
    return loss if func in _VIEWS[:2] and len(given) > 1 else None  # [tokens, vocabulary]


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_VIEWS: tuple[Any, ...] = (Tensor.view, Tensor.reshape, Tensor.__getitem__)
_WITHOUT_EFFECT: tuple[Any, ...] = (
    *(Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.add),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, torch.div),
    *(Tensor.tanh, torch.tanh, functional.dropout),
    *(Tensor.to, Tensor.type_as, Tensor.float),
)
