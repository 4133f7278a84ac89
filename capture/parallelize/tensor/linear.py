"""Column- and row-parallel linear layers, and the collective at the boundary of a block."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import (
    copy_to_group,
    reduce_from_group,
    split_to_group,
)
from onerank.capture.parallelize.hugging_face import Conv1D
from onerank.capture.parallelize.tensor.sequence_parallel import SequenceInput, SequencePlaceholder
from onerank.ir.errors import SliceError

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def replace_forward(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Replace the forward of a module with one input by `forward(module, input)`."""
    # A bound method: in a deep copy of the module it is bound to the copy and reads its weights.
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
    linear: Linear = nn.functional.linear,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Make a linear layer column-parallel: [..., in] -> [..., out / size].

    Args:
        module: the linear layer, whose parameters are sliced already.
        group: the tensor-parallel group.
        copy: whether this layer is itself the boundary, so that it all-reduces the gradient of
            its input; else an enclosing block does.
        linear: multiplies the input by the weight.
        finish: maps this rank's output features to the layer's output; None returns them.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = copy_to_group(input, group) if copy else input
        y = linear(x, matrix_of(self), self.bias)
        return y if finish is None else finish(y)

    replace_forward(module, forward)


def row_linear(
    module: nn.Module,
    group: dist.ProcessGroup,
    *,
    split: bool,
    reduce: Callable[[Tensor, dist.ProcessGroup], Tensor] = reduce_from_group,
) -> None:
    """Make a linear layer row-parallel: [..., in / size] -> [..., out].

    The bias is added once, after the sum over the group.

    Args:
        module: the linear layer, whose weight is sliced already.
        group: the tensor-parallel group.
        split: whether the layer receives its whole input, [..., in], and takes this rank's part.
        reduce: sums the partial results over the group.
    """

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        x = split_to_group(input, group) if split else input
        # Without the bias, which every rank holds: the sum would count it once per rank.
        y = reduce(nn.functional.linear(x, matrix_of(self)), group)
        return y if self.bias is None else y + self.bias

    replace_forward(module, forward)


HIDDEN_STATES = "hidden_states"

_ENCODER_STATES = ("key_value_states", "encoder_hidden_states")  # inputs of cross-attention


class BlockBoundary:
    """Start of a tensor-parallel block: the collective on its input.

    Args:
        group: the tensor-parallel group.
        sequence: whether the block's input is a shard of the sequence, which the boundary
            gathers; else the input is replicated, and the boundary all-reduces its gradient.
        narrows: whether the block derives its width from its input's shape. The boundary then
            passes it a slice of the features, and its column-parallel layers use the whole input.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool, narrows: bool = False) -> None:
        self._group = group
        self._sequence = sequence
        self._narrows = narrows
        self._whole: Tensor | None = None
        self._gathered: list[SequenceInput] = []

    def __deepcopy__(self, _: Any) -> "BlockBoundary":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    def place_before(self, block: nn.Module) -> None:
        """Register hooks that apply the boundary before the block and release it after."""
        block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        self.leave_after(block)

    def leave_after(self, module: nn.Module) -> None:
        """Register a hook that releases the gathered input when `module` returns."""
        module.register_forward_hook(self._leave, always_call=True)

    def enter(self, x: Tensor) -> Tensor:
        """Apply the collective to the hidden states and return the block's input."""
        x = self._gather(x) if self._sequence else copy_to_group(x, self._group)
        if not self._narrows:
            return x
        self._whole = x
        # Only its width is read: the column-parallel layers replace it by `_whole` in `linear`.
        return x.narrow(-1, 0, x.shape[-1] // self._group.size())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a column-parallel layer of the block: [..., in] -> [..., out / size]."""
        # A layer whose input has the weight's width got something else, such as an attention's
        # output.
        if self._whole is not None and x.shape[-1] != weight.shape[1]:
            x = self._whole
        gathered = next((inputs for inputs in self._gathered if inputs.matches(x)), None)
        if gathered is not None:
            return gathered.linear(x, weight, bias)
        return nn.functional.linear(x, weight, bias)

    def _enter_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = with_hidden_states(module, args, kwargs, self.enter)
        encoded = {
            key: kwargs[key] for key in _ENCODER_STATES if isinstance(kwargs.get(key), Tensor)
        }
        return args, kwargs | {key: self._enter_encoded(x) for key, x in encoded.items()}

    def _enter_encoded(self, x: Tensor) -> Tensor:
        return (
            self._gather(x.shard)
            if isinstance(x, SequencePlaceholder)
            else copy_to_group(x, self._group)
        )

    def _gather(self, shard: Tensor) -> Tensor:
        self._gathered.append(SequenceInput(shard, self._group))
        return self._gathered[-1].whole

    def _leave(self, *_: Any) -> None:
        # torch.compile traces a checkpointed block only if it mutates no outside state, so
        # attributes are written only where they change.
        if self._whole is not None:
            self._whole = None
        if self._gathered:
            self._gathered = []


def with_hidden_states(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    change: Callable[[Tensor], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with `change` applied to the hidden states.

    Raises:
        SliceError: no hidden states among the arguments.
    """
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get(HIDDEN_STATES), Tensor):
        return args, {**kwargs, HIDDEN_STATES: change(kwargs[HIDDEN_STATES])}
    raise SliceError(
        f"{type(module).__name__} has no tensor as first argument or as {HIDDEN_STATES}, so its "
        "tensor-parallel boundary has no input\n  keep it whole by a plan file (--sharding-plan), "
        "or use capture run's --tp-style hf",
        code="tp-no-hidden-states",
    )
