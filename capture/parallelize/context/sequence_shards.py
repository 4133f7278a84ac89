"""Shards of a sequence on context-parallel ranks, and attention over the whole sequence."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.parallelize.context.all_gather_attention import (
    GatheringAttention,
    chunks_of,
    gather_keys,
)
from onerank.capture.parallelize.context.packed_sequences import Packing
from onerank.capture.parallelize.context.partial_attention import AttentionMode, check_widths
from onerank.capture.parallelize.context.ring_attention import RingAttention
from onerank.ir.errors import SliceError

ContextComm = Literal["all_gather", "p2p"]


@dataclass(frozen=True)
class Context:
    """The split of sequences over the ranks of a context-parallel group.

    Of 2 x size equal chunks rank r holds chunks r and 2 x size - 1 - r, which balances the work of
    causal attention.

    Attributes:
        group: the context-parallel group.
        comm: how ranks exchange keys and values.
    """

    group: dist.ProcessGroup
    comm: ContextComm = "all_gather"

    def __deepcopy__(self, _: Any) -> "Context":
        return self  # hooks of a deep-copied model keep sharing one object, as functions do

    def local_chunks(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of [batch, sequence, ...], concatenated.

        Raises:
            SliceError: the sequence is not a multiple of 2 x size.
        """
        size, length = self.group.size(), x.shape[1]
        if length % (2 * size):
            raise SliceError(
                f"--cp {size} cuts the sequence into 2 x {size} = {2 * size} chunks, and the "
                f"sequence has {length} tokens ({length} = {2 * size} x {length // (2 * size)} + "
                f"{length % (2 * size)}): pad or cut the batch",
                code="cp-sequence-indivisible",
            )
        parts = x.chunk(2 * size, dim=1)
        return torch.cat([parts[chunk] for chunk in chunks_of(self.group)], dim=1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mode: AttentionMode,
        mask: Tensor | Packing | None = None,
    ) -> Tensor:
        """Attend from this rank's part of the queries to the whole sequence.

        Args:
            query: [batch, heads, part, width].
            key: [batch, key heads, part, width].
            value: [batch, key heads, part, value width].
            mode: scale, window and dropout.
            mask: additive mask [batch or 1, 1, part, sequence] that replaces causality and
                window; or packed sequences, cut one by one; None for one causal sequence.

        Returns:
            [batch, part, heads, width of the values].

        Raises:
            SliceError: a window or a mask with `comm` p2p.
        """
        check_widths(query, value)
        gathering: Any = GatheringAttention
        ring: Any = RingAttention
        if self.comm == "all_gather":
            return gathering.apply(query, key, value, self.group, mode, mask)
        if mode.window is not None:
            raise SliceError(
                f"--cp-comm p2p: a layer attends to a window of {mode.window} tokens of "
                f"{query.shape[2] * self.group.size()}, but a ring supports full attention "
                "only, as in TransformerEngine: use --cp-comm all_gather",
                code="cp-ring-window",
            )
        if isinstance(mask, Packing):
            batch = query.shape[0]
            flat = (_concatenate_batch(x) for x in (query, key, value))
            return ring.apply(*flat, self.group, mode, mask).unflatten(1, (batch, -1))[0]
        if mask is not None:
            raise SliceError(
                "--cp-comm p2p: sequences have leading padding, which needs a mask that a ring "
                "does not support\n  pad at the end, with labels of -100, or use "
                "--cp-comm all_gather",
                code="cp-ring-padding",
            )
        return ring.apply(query, key, value, self.group, mode, None)

    def gather_keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the whole sequence, in order, for a model's own attention.

        Raises:
            SliceError: `comm` is p2p.
        """
        if self.comm == "p2p":
            raise SliceError(
                "--cp-comm p2p: the model runs its attention as 'eager', on all keys at once, "
                "which a ring never holds: use --cp-comm all_gather",
                code="cp-ring-eager",
            )
        return gather_keys(key, self.group), gather_keys(value, self.group)


def _concatenate_batch(x: Tensor) -> Tensor:
    """Return [batch, heads, part, width] as [1, heads, batch x part, width]."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
