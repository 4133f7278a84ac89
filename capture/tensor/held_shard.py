"""What stands for the whole sequence where a rank has a shard of it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.ir.errors import SliceError


class HeldShard(Tensor):
    """Place holder of [batch, sequence, features] for a shard of the sequence; without memory.

    It tells its shape, which models take masks from. Anything else that is computed of it is an
    error.
    """

    shard: Tensor
    group: dist.ProcessGroup
    what: ClassVar[str] = "the model computes {} of the encoder's output"

    @classmethod
    def of(cls, shard: Tensor, group: dist.ProcessGroup) -> Self:
        """Return the place holder of a shard [batch, sequence / size, features]."""
        batch, part, features = shard.shape
        whole = shard.new_empty(()).expand(batch, part * group.size(), features)
        held = whole.as_subclass(cls)
        held.shard, held.group = shard, group
        return held

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what is known of the whole."""
        if func not in _TELLING:
            raise SliceError(
                f"--sp: {cls.what.format(getattr(func, '__name__', func))}, of which this rank has "
                "a shard of the sequence; how that goes with a shard is not known: leave --sp out"
            )
        with _DISABLED():
            return func(*args, **(kwargs or {}))


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
_TELLING: tuple[Any, ...] = (
    *(Tensor.shape.__get__, Tensor.device.__get__, Tensor.dtype.__get__),  # pyright: ignore
    *(Tensor.size, Tensor.dim, Tensor.requires_grad.__get__),  # pyright: ignore
)
