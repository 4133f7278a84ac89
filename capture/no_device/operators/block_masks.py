"""The pairs of queries and keys that a kernel of flex attention computes under a block mask.

The kernel computes every block of the scores in which the mask is true somewhere, and skips the
others. A block mask's tensors hold their number, which is unknown if no device computed it. Then
`mask_mod` is evaluated again, on indices on the CPU.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onerank.ir.notes import Note

_modes: Any = _python_dispatch

# Operator -> positions of its block mask and of the tensors that `mask_mod` reads.
_POSITIONS = {"flex_attention": (4, 8), "flex_attention_backward": (9, 13)}

FLEX_ATTENTION = frozenset(_POSITIONS)
"""The operators of flex attention, without namespace."""

# Most elements of a mask that are evaluated, 1 to 2 s on one core. A larger mask is evaluated on a
# grid (`_sampled`).
_EVALUATED = 1 << 26

# Elements that are evaluated at once.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _BlockMask:
    """The part of a `BlockMask` that counts its blocks, from `BlockMask.as_tuple`.

    Attributes:
        partial: number of blocks of each row of blocks in which the mask is true somewhere, without
            those that `full` counts, int32[batch, heads, rows].
        full: number of blocks in which it is true everywhere; None if `partial` counts them.
        block: queries and keys of a block.
        function: `mask_mod`.
        buffers: tensors that the function reads, given after the indices.
    """

    partial: Tensor
    full: Tensor | None
    block: tuple[int, int]
    function: Callable[..., Tensor]
    buffers: tuple[Any, ...]

    @classmethod
    def of(cls, parts: Sequence[Any], buffers: Sequence[Any]) -> "_BlockMask":
        _, _, partial, _, full, *_, rows, columns, function = parts
        return cls(partial, full, (int(rows), int(columns)), function, tuple(buffers))


class BlockMasks:
    """Counts the pairs of each call of flex attention.

    Args:
        numbers_of: returns the numbers of a tensor; None if they are not known.
    """

    def __init__(self, numbers_of: Callable[[Tensor], Tensor | None]) -> None:
        self._numbers_of = numbers_of
        self._evaluated: dict[Any, Tensor] = {}
        self._whole = 0

    def pairs_of(self, operator: str, operands: Sequence[Any]) -> int | None:
        """Return the pairs of all sequences and heads; None if the mask depends on unknown numbers.

        Args:
            operator: one of `FLEX_ATTENTION`.
            operands: its arguments; queries [b, h, sq, d] and keys [b, hk, sk, d] are the first.
        """
        batch, heads, rows, _ = operands[0].shape
        columns = int(operands[1].shape[-2])
        parts, buffers = (operands[at] for at in _POSITIONS[operator])
        mask = _BlockMask.of(parts, buffers)
        height, width = mask.block
        blocks = self._blocks(mask, rows, columns)
        if blocks is None:
            self._whole += 1
            return None
        with _modes._disable_current_modes():
            blocks = blocks.long()
            starts = torch.arange(blocks.shape[-1]) * height
            # Sequences need not be multiples of a block.
            pairs = (rows - starts).clamp(0, height) * (blocks * width).clamp(max=columns)
            # A mask may be the same for all sequences or heads.
            repeated = batch * heads // (blocks.shape[0] * blocks.shape[1])
            return int(pairs.sum()) * repeated

    def notes(self) -> list[Note]:
        """Return a note on the calls that count all blocks, if any."""
        if not self._whole:
            return []
        return [
            Note(
                f"{self._whole} calls of flex attention count the FLOPs of all blocks: their masks "
                "depend on numbers that no device computed",
                code="flex-attention-whole",
            )
        ]

    def _blocks(self, mask: _BlockMask, rows: int, columns: int) -> Tensor | None:
        """Return the blocks that are computed in each row of blocks, [batch, heads, rows]."""
        partial = self._numbers_of(mask.partial)
        full = None if mask.full is None else self._numbers_of(mask.full)
        if partial is not None and (mask.full is None or full is not None):
            with _modes._disable_current_modes():
                return partial if full is None else partial + full
        shape = *mask.partial.shape[:2], rows, columns
        # Dynamo makes a new module of a function each time that it traces it.
        buffers = [self._key(buffer) for buffer in mask.buffers]
        key = getattr(mask.function, "code", mask.function), shape, mask.block, *buffers
        if key not in self._evaluated:
            try:
                with _modes._disable_current_modes(), _Numbers(self._numbers_of):
                    self._evaluated[key] = _visited(mask.function, shape, mask.block, mask.buffers)
            except _UnknownError:
                return None
        return self._evaluated[key]

    def _key(self, buffer: Any) -> object:
        """Return what distinguishes masks that read a buffer."""
        numbers = self._numbers_of(buffer) if isinstance(buffer, Tensor) else None
        if numbers is None:
            return buffer
        with _modes._disable_current_modes():
            return numbers.dtype, tuple(numbers.shape), numbers.reshape(-1).numpy().tobytes()


class _UnknownError(Exception):
    """A mask reads a tensor whose numbers are not known."""


class _Numbers(TorchDispatchMode):
    """Runs operators on the numbers of fake tensors.

    A mask reads tensors that are arguments, or variables of the function around it.
    """

    def __init__(self, numbers_of: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._numbers_of = numbers_of

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._numbers, (args, dict(kwargs or {})))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)

    def _numbers(self, tensor: Tensor) -> Tensor:
        numbers = self._numbers_of(tensor)
        if numbers is None:
            raise _UnknownError
        return numbers


def _visited(
    function: Callable[..., Tensor],
    shape: tuple[int, ...],
    block: tuple[int, int],
    buffers: Sequence[Any],
) -> Tensor:
    """Return the blocks of each row of blocks in which a mask is true somewhere.

    Args:
        function: `mask_mod`.
        shape: (batch, heads, queries, keys) of the mask.
        block: queries and keys of a block.
        buffers: given to the function after the indices.

    Returns:
        int64[batch, heads, rows of blocks].
    """
    batch, heads, rows, columns = shape
    step = 1
    while batch * heads * rows * columns > _EVALUATED * step * step:
        step *= 2
    # Both import all of Dynamo, which only a script with flex attention needs. torch evaluates
    # masks with their help as well (`create_mask`).
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    tracing: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    mapped = flex._vmap_for_bhqkv(function, prefix=(), suffix=(None,) * len(buffers))
    keys, block_of_key = _sampled(columns, block[1], step)
    queries, block_of_query = _sampled(rows, block[0], step)
    of_batch, of_heads = torch.arange(batch), torch.arange(heads)
    visited = torch.zeros(
        (batch, heads, int(block_of_query[-1]) + 1, int(block_of_key[-1]) + 1), dtype=torch.int64
    )
    at_once = max(1, _AT_ONCE // (batch * heads * len(keys)))
    for start in range(0, len(queries), at_once):
        chosen = slice(start, start + at_once)
        with tracing.TransformGetItemToIndex():
            mask = mapped(of_batch, of_heads, queries[chosen], keys, *buffers)
        mask = mask.expand(batch, heads, -1, -1)
        by_key = torch.zeros((*mask.shape[:3], visited.shape[-1]), dtype=torch.int64)
        by_key.index_add_(3, block_of_key, mask.long())
        visited.index_add_(2, block_of_query[chosen], by_key)
    return (visited > 0).sum(-1)


def _sampled(length: int, block: int, step: int) -> tuple[Tensor, Tensor]:
    """Return indices of a sequence, and the block of each.

    Every `step`-th of a block, and its first and last: a mask whose edges are straight, such as a
    causal one, a window, or documents longer than the step, is true at one of them if it is true in
    the block.
    """
    indices = torch.arange(length)
    within = indices % block
    kept = (within % step == 0) | (within == block - 1) | (indices == length - 1)
    indices = indices[kept]
    return indices, indices // block
