"""Megatron-LM's sequence parallelism: each rank holds a shard of the sequence between blocks.

Follows megatron/core/tensor_parallel (mappings.py, layers.py). Each all-reduce becomes an
all-gather where a block begins and a reduce-scatter where it ends. The backward mirrors them, and
gathers the block's input again for its weight gradients instead of keeping it. Per layer and step:
4 all-gathers, 4 reduce-scatters, and 2 more all-gathers. Embedding, head and loss add theirs once.

Two differences: hidden states are [batch, sequence, hidden], so with a batch above 1 a copy
reorders gathered shards; and communication does not overlap GEMMs.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter
from onerank.ir.errors import SliceError


class SequencePlaceholder(Tensor):
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
                "a shard of the sequence; how that goes with a shard is not known: leave --sp out",
                code="sp-unsupported-module",
            )
        with _DISABLED():
            return func(*args, **(kwargs or {}))


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]

_TELLING: tuple[Any, ...] = (
    *(Tensor.shape.__get__, Tensor.device.__get__, Tensor.dtype.__get__),  # pyright: ignore
    *(Tensor.size, Tensor.dim, Tensor.requires_grad.__get__),  # pyright: ignore
)


class GatherSequence(torch.autograd.Function):
    """All-gather of [batch, sequence / size, hidden] forward; reduce-scatter backward.

    Of [tokens / size, hidden], a list of tokens in whatever order, likewise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class ScatterSumToSequence(torch.autograd.Function):
    """Reduce-scatter of [batch, sequence, hidden] forward; all-gather backward.

    Where `made_up` is given it takes the place of the result.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, made_up: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.group = group
        shard = _scattered(x, group)
        return shard if made_up is None else made_up(shard).view_as(shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grads[0], ctx.group), None, None


class SplitToSequence(torch.autograd.Function):
    """The own part of [batch, sequence, hidden] forward; all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        length = _share(x, group)
        return x.narrow(1, group.rank() * length, length).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _Input:
    """The whole input of one block, which its layers' backward gathers once for all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.users = 0
        self.whole: Tensor | None = None

    def again(self, shard: Tensor) -> Tensor:
        """Return the input gathered again; the last of the layers to ask lets go of it."""
        whole = _gathered(shard, self.group) if self.whole is None else self.whole
        self.users -= 1
        self.whole = whole if self.users > 0 else None
        return whole


class _LinearOnSequence(torch.autograd.Function):
    """Linear layer on a gathered input of which only the shard is kept for the backward.

    Its arguments: whole input [batch, sequence, in], the own shard of it, weight [out, in], bias or
    None, and the `_Input` shared by the layers of the block.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        whole, shard, weight, bias, source = args
        ctx.save_for_backward(shard, weight)
        ctx.source, ctx.has_bias = source, bias is not None
        source.users += 1
        return torch.nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        grad = grads[0]
        whole = ctx.source.again(shard)
        for_input = grad.matmul(weight)
        grad = grad.reshape(-1, grad.shape[-1])
        for_weight = grad.t().matmul(whole.reshape(-1, whole.shape[-1]))
        for_bias = grad.sum(0) if ctx.has_bias else None
        return for_input, None, for_weight, for_bias, None


class SequenceInput:
    """The gathered input of a block's column-parallel layers, while the block runs."""

    def __init__(self, shard: Tensor, group: dist.ProcessGroup) -> None:
        if torch.is_autocast_enabled(shard.device.type):
            shard = shard.to(torch.get_autocast_dtype(shard.device.type))
        self.whole: Tensor = GatherSequence.apply(shard, group)  # pyright: ignore
        self._version = self.whole._version
        self._shard = shard
        self._source = _Input(group)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear layer; any other input than this one is kept whole, as usual."""
        if not self.matches(x):
            return torch.nn.functional.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        result: Tensor = _LinearOnSequence.apply(
            self.whole, self._shard, weight, bias, self._source
        )  # pyright: ignore
        return result.view(*x.shape[:-1], -1)

    def matches(self, x: Tensor) -> bool:
        """Whether `x` has the values of the gathered input, in their order."""
        features, size = x.shape[-1], x.numel()
        alike = (features, size) == (self.whole.shape[-1], self.whole.numel())
        seen = x is self.whole or (x._base is self.whole and x.is_contiguous() and alike)
        return seen and self.whole._version == self._version  # nothing was changed in place


class OwnInput:
    """The input of one column-parallel layer that stands alone, gathered as it runs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __deepcopy__(self, _: Any) -> "OwnInput":
        return self  # as functions are, when a model with its hooks is copied

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer to a shard: [batch, sequence / size, in] -> [batch, sequence, out]."""
        source = SequenceInput(x, self._group)
        return source.linear(source.whole, weight, bias)


def scatter_sum_to_sequence(
    x: Tensor, group: dist.ProcessGroup, made_up: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Leave a block with partial sums [batch, sequence, hidden]; return the own shard.

    With `made_up` the result is what that makes up for it: absent peers add no parts.
    """
    if made_up is None:
        result: Any = ScatterSumToSequence.apply(x, group, None)
        return result
    shards: list[Tensor] = []

    def instead(shard: Tensor) -> Tensor:
        shards.append(shard)
        return made_up(shard)

    result = ScatterSumToSequence.apply(x, group, instead)
    result.stands_for = shards[0]  # stays in memory just as long as the result
    return result


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather shards of the sequence, [batch, part, hidden] or [tokens, hidden]."""
    result: Tensor = GatherSequence.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def split_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Take the own shard of replicated hidden states [batch, sequence, hidden]."""
    result: Tensor = SplitToSequence.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return result


def _share(x: Tensor, group: dist.ProcessGroup) -> int:
    size = group.size()
    if x.dim() == 2:  # was gathered, so that it divides
        return x.shape[0] // size
    if x.dim() != 3:
        raise SliceError(
            f"--sp: hidden states of shape {tuple(x.shape)}; expected [batch, sequence, hidden]",
            code="sp-hidden-shape",
        )
    if x.shape[1] % size:
        length = x.shape[1]
        raise SliceError(
            f"--sp: --tp {size} must divide the sequence of {length} tokens "
            f"({length} = {size} x {length // size} + {length % size}): pad or cut the batch",
            code="sp-sequence-indivisible",
        )
    return x.shape[1] // size


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' [batch, part, hidden] along the sequence, or lists of tokens."""
    x = x.contiguous()
    if x.dim() == 2:
        tokens = x.new_empty((group.size() * x.shape[0], x.shape[1]))
        all_gather(tokens, x, group=group)
        return tokens
    batch, part, hidden = x.shape
    whole = x.new_empty((batch, group.size() * part, hidden))
    if batch == 1:
        all_gather(whole.view(-1, hidden), x.view(-1, hidden), group=group)
        return whole
    shards = x.new_empty((group.size(), batch, part, hidden))
    all_gather(shards.view(-1, part, hidden), x, group=group)
    whole.view(batch, group.size(), part, hidden).copy_(shards.transpose(0, 1))
    return whole


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, sequence, hidden] over the ranks and return the own part of the sequence."""
    part = _share(x, group)
    if x.dim() == 2:
        tokens = x.new_empty((part, x.shape[1]))
        reduce_scatter(tokens, x.contiguous(), group=group)
        return tokens
    batch, _, hidden = x.shape
    shards = x.reshape(batch, group.size(), part, hidden).transpose(0, 1).contiguous()
    shard = x.new_empty((batch, part, hidden))
    reduce_scatter(shard, shards.view(-1, part, hidden), group=group)
    return shard
