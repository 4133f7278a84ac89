"""Column- and row-parallel linear layers, and the collective at the boundary of a block."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from onerank.capture.parallelize.autograd_collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from onerank.capture.parallelize.tensor.sequence_parallel import SequenceInput, SequencePlaceholder
from onerank.ir.errors import SliceError

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def replace_forward(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Let a module of one input run `forward(module, input)`.

    Bound, so that a deep copy of the module runs on its own weights.
    """
    module.forward = MethodType(forward, module)


def matrix_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear layer as [out, in]; transformers' Conv1D keeps [in, out]."""
    weight = module.get_parameter("weight")
    return weight.t() if isinstance(module, Conv1D) else weight


def column_linear(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    copy: bool,
    gathers: Callable[[], bool] = lambda: False,
    linear: Linear = nn.functional.linear,
) -> None:
    """Shard a linear layer's output features: [..., in] -> [..., out / size].

    Args:
        module: the linear layer, whose parameters are sliced already.
        group: the tensor-parallel group.
        copy: whether this layer is itself the region's boundary; else an enclosing block is.
        gathers: returns whether the output is gathered, [..., in] -> [..., out], in this call.
        linear: multiplies the input by the weight.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = copy_to_group(input, group) if copy else input
        y = linear(x, matrix_of(self), self.bias)
        return gather_from_group(y, group) if gathers() else y

    replace_forward(module, forward)


def row_linear(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    split: bool,
    reduce: Callable[[Tensor, dist.ProcessGroup], Tensor] = reduce_from_group,
) -> None:
    """Shard a linear layer's input features: [..., in / size] -> [..., out].

    With `split` the input is whole and split here. The bias is added once, after the sum.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = split_to_group(input, group) if split else input
        y = reduce(nn.functional.linear(x, matrix_of(self)), group)
        return y if self.bias is None else y + self.bias

    replace_forward(module, forward)


HIDDEN_STATES = "hidden_states"

_OTHERS = ("key_value_states", "encoder_hidden_states")  # to which a decoder attends


class BlockBoundary:
    """Stands before a block while `placed`.

    Args:
        group: the tensor-parallel group.
        sequence: whether the input is a shard of the sequence and gathered here; else it is
            replicated, and its gradient all-reduced.
        narrows: whether the block reads its width off its input's shape, and so must be shown a
            slice of it.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool, narrows: bool = False) -> None:
        self._group = group
        self._sequence = sequence
        self._narrows = narrows
        self._whole: Tensor | None = None
        self._gathered: list[SequenceInput] = []

    def __deepcopy__(self, _: Any) -> "BlockBoundary":
        return self  # as functions are, when a model with its hooks is copied

    def place_before(self, block: nn.Module) -> None:
        """Enter as the block begins, leave as it ends."""
        block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        self.leave_after(block)

    def leave_after(self, module: nn.Module) -> None:
        """Leave as `module` ends."""
        module.register_forward_hook(self._leave, always_call=True)

    def enter(self, x: Tensor) -> Tensor:
        """Take the hidden states on and return what the block is to see of them."""
        x = self._gather(x) if self._sequence else copy_to_group(x, self._group)
        if not self._narrows:
            return x
        self._whole = x
        return x.narrow(-1, 0, x.shape[-1] // self._group.size())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a column-parallel layer of the block: [..., in] -> [..., out / size]."""
        if self._whole is not None and x.shape[-1] != weight.shape[1]:
            x = self._whole
        source = next((one for one in self._gathered if one.holds(x)), None)
        if source is not None:
            return source.linear(x, weight, bias)
        return nn.functional.linear(x, weight, bias)

    def _enter_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = with_hidden_states(module, args, kwargs, self.enter)
        others = {key: kwargs[key] for key in _OTHERS if isinstance(kwargs.get(key), Tensor)}
        return args, kwargs | {key: self._enter_other(x) for key, x in others.items()}

    def _enter_other(self, x: Tensor) -> Tensor:
        return (
            self._gather(x.shard)
            if isinstance(x, SequencePlaceholder)
            else copy_to_group(x, self._group)
        )

    def _gather(self, shard: Tensor) -> Tensor:
        self._gathered.append(SequenceInput(shard, self._group))
        return self._gathered[-1].whole

    def _leave(self, *_: Any) -> None:
        if self._whole is not None:  # torch.compile traces checkpoints that change nothing outside
            self._whole = None
        if self._gathered:
            self._gathered = []


def with_hidden_states(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Tensor], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with its hidden states changed."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get(HIDDEN_STATES), Tensor):
        return args, {**kwargs, HIDDEN_STATES: change(kwargs[HIDDEN_STATES])}
    raise SliceError(
        f"{type(module).__name__} takes no hidden states as first argument or by name; "
        "its tensor-parallel boundary cannot be placed: use --tp-style hf",
        code="tp-no-hidden-states",
    )
