"""Megatron-LM's sequence parallelism: each rank holds a shard of the sequence between blocks.

Follows megatron/core/tensor_parallel (mappings.py, layers.py). Each all-reduce becomes an
all-gather where a block begins and a reduce-scatter where it ends. The backward mirrors them, and
gathers the block's input again for its weight gradients instead of keeping it. Per layer and step:
4 all-gathers, 4 reduce-scatters, and 2 more all-gathers. Embedding, head and loss add theirs once.

Gradients of norms and biases are partial on each rank; `replicated_grads` sums them.

Two differences: hidden states are [batch, sequence, hidden], so with a batch above 1 a copy
reorders gathered shards; and communication does not overlap GEMMs.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.parallelize.autograd_collectives import (
    all_gather,
    reduce_scatter,
    shard_length,
)
from onerank.ir.errors import SliceError


class SequencePlaceholder(Tensor):
    """Placeholder without memory for the whole [batch, sequence, features] of a shard.

    It supports reading its shape, from which models derive masks. Any computation on it raises
    `SliceError`.
    """

    shard: Tensor
    group: dist.ProcessGroup
    what: ClassVar[str] = "the model computes {} of the encoder's output"

    @classmethod
    def of(cls, shard: Tensor, group: dist.ProcessGroup) -> Self:
        """Return the placeholder of a shard [batch, sequence / size, features]."""
        batch, part, features = shard.shape
        # One element with strides of 0, so that it takes no memory of the model's.
        whole = shard.new_empty(()).expand(batch, part * group.size(), features)
        placeholder = whole.as_subclass(cls)
        placeholder.shard, placeholder.group = shard, group
        return placeholder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function that reads only metadata; refuse every other one."""
        if func not in _METADATA_FUNCTIONS:
            raise SliceError(
                f"--sp: {cls.what.format(getattr(func, '__name__', func))}, of which this rank has "
                "only a shard of the sequence\n  leave --sp out",
                code="sp-unsupported-module",
            )
        with _DISABLED():
            return func(*args, **(kwargs or {}))


_DISABLED: Any = torch._C.DisableTorchFunctionSubclass

_of_class: Any = Tensor  # its attributes as those of a class: properties

_METADATA_FUNCTIONS: tuple[Any, ...] = (
    *(_of_class.shape.__get__, _of_class.device.__get__, _of_class.dtype.__get__),
    *(Tensor.size, Tensor.dim, _of_class.requires_grad.__get__),
)


class GatherSequence(torch.autograd.Function):
    """All-gather of [batch, sequence / size, hidden] forward; reduce-scatter backward.

    Accepts a list of tokens in any order too: [tokens / size, hidden].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grads[0], ctx.group), None


class ScatterSumToSequence(torch.autograd.Function):
    """Reduce-scatter of [batch, sequence, hidden] forward; all-gather backward.

    With `substitute`, its return value replaces the result.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, substitute: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.group = group
        shard = _reduce_scatter_sequence(x, group)
        return shard if substitute is None else substitute(shard).view_as(shard)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_sequence(grads[0], ctx.group), None, None


class SplitToSequence(torch.autograd.Function):
    """This rank's part of [batch, sequence, hidden] forward; all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        length = _shard_length(x, group)
        return x.narrow(1, group.rank() * length, length).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather_sequence(grads[0], ctx.group), None


class _BackwardInput:
    """The whole input of one block, gathered once in the backward for all of its layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.users = 0
        self.whole: Tensor | None = None

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole input, gathered on the first call and freed after the last layer's."""
        whole = _all_gather_sequence(shard, self.group) if self.whole is None else self.whole
        self.users -= 1
        self.whole = whole if self.users > 0 else None
        return whole


class _LinearOnSequence(torch.autograd.Function):
    """Linear layer on a gathered input that saves only the shard for the backward.

    Arguments: whole input [batch, sequence, in], this rank's shard of it, weight [out, in], bias or
    None, and the `_BackwardInput` shared by the layers of the block.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        whole, shard, weight, bias, source = args
        ctx.save_for_backward(shard, weight)
        ctx.source, ctx.has_bias = source, bias is not None
        # Counted in the forward: the backward frees the input after as many layers.
        source.users += 1
        return torch.nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        grad = grads[0]
        # Before the GEMM of the input's gradient, as Megatron-LM orders them.
        whole = ctx.source.gather(shard)
        for_input = grad.matmul(weight)
        grad = grad.reshape(-1, grad.shape[-1])
        for_weight = grad.t().matmul(whole.reshape(-1, whole.shape[-1]))
        for_bias = grad.sum(0) if ctx.has_bias else None
        return for_input, None, for_weight, for_bias, None


class SequenceInput:
    """The gathered input of a block's column-parallel layers, while the block runs."""

    def __init__(self, shard: Tensor, group: dist.ProcessGroup) -> None:
        # Cast before the gather: the collective moves the narrower dtype, and the layers of the
        # block share one cast.
        if torch.is_autocast_enabled(shard.device.type):
            shard = shard.to(torch.get_autocast_dtype(shard.device.type))
        self.whole: Tensor = GatherSequence.apply(shard, group)
        # torch counts in-place writes to a tensor here.
        self._version = self.whole._version
        self._shard = shard
        self._source = _BackwardInput(group)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear layer; an input other than this one is saved whole, as in torch."""
        if not self.matches(x):
            return torch.nn.functional.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast does not reach into an autograd.Function.
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        result: Tensor = _LinearOnSequence.apply(
            self.whole, self._shard, weight, bias, self._source
        )
        return result.view(*x.shape[:-1], -1)

    def matches(self, x: Tensor) -> bool:
        """Return whether `x` has the values of the gathered input, in their order."""
        features, size = x.shape[-1], x.numel()
        same_size = (features, size) == (self.whole.shape[-1], self.whole.numel())
        is_view = x is self.whole or (x._base is self.whole and x.is_contiguous() and same_size)
        # A change in place raises the version.
        return is_view and self.whole._version == self._version


class LayerInput:
    """Gathers the input of a column-parallel layer outside every block boundary, at each call."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __deepcopy__(self, _: Any) -> "LayerInput":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer to a shard: [batch, sequence / size, in] -> [batch, sequence, out]."""
        source = SequenceInput(x, self._group)
        return source.linear(source.whole, weight, bias)


def scatter_sum_to_sequence(
    x: Tensor, group: dist.ProcessGroup, substitute: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Sum partial results [batch, sequence, hidden] over the group; return this rank's shard.

    With `substitute`, its return value replaces the shard, to which absent peers add nothing.
    """
    if substitute is None:
        result: Any = ScatterSumToSequence.apply(x, group, None)
        return result
    shards: list[Tensor] = []

    def record_and_substitute(shard: Tensor) -> Tensor:
        shards.append(shard)
        return substitute(shard)

    result = ScatterSumToSequence.apply(x, group, record_and_substitute)
    # The substitute may be a view of weights. The real result would occupy memory too, so
    # the received shard stays allocated exactly as long as the result.
    result.partial_sum = shards[0]
    return result


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather shards of the sequence, [batch, part, hidden] or [tokens, hidden]."""
    result: Tensor = GatherSequence.apply(x, group)
    return result


def split_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of replicated hidden states [batch, sequence, hidden]."""
    result: Tensor = SplitToSequence.apply(x, group)
    return result


def _shard_length(x: Tensor, group: dist.ProcessGroup) -> int:
    size = group.size()
    if x.dim() == 2:  # gathered before, so the size divides it
        return x.shape[0] // size
    if x.dim() != 3:
        raise SliceError(
            f"--sp: hidden states of shape {tuple(x.shape)}; expected [batch, sequence, hidden]",
            code="sp-hidden-shape",
        )
    return shard_length(x.shape[1], size)


def _all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' [batch, part, hidden] along the sequence, or lists of tokens."""
    x = x.contiguous()
    if x.dim() == 2:
        tokens = x.new_empty((group.size() * x.shape[0], x.shape[1]))
        all_gather(tokens, x, group=group)
        return tokens
    batch, part, hidden = x.shape
    whole = x.new_empty((batch, group.size() * part, hidden))
    # The gathered shards are the sequence already; a larger batch has them batch by batch.
    if batch == 1:
        all_gather(whole.view(-1, hidden), x.view(-1, hidden), group=group)
        return whole
    shards = x.new_empty((group.size(), batch, part, hidden))
    all_gather(shards.view(-1, part, hidden), x, group=group)
    whole.view(batch, group.size(), part, hidden).copy_(shards.transpose(0, 1))
    return whole


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, sequence, hidden] over the ranks and return this rank's shard."""
    part = _shard_length(x, group)
    if x.dim() == 2:
        tokens = x.new_empty((part, x.shape[1]))
        reduce_scatter(tokens, x.contiguous(), group=group)
        return tokens
    batch, _, hidden = x.shape
    shards = x.reshape(batch, group.size(), part, hidden).transpose(0, 1).contiguous()
    shard = x.new_empty((batch, part, hidden))
    reduce_scatter(shard, shards.view(-1, part, hidden), group=group)
    return shard
