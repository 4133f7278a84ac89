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
    """The shares of a sequence among the ranks of a group.

    Of 2 x size equal chunks rank r holds the chunks r and 2 x size - 1 - r, so that causal
    attention is as much work on each.

    Attributes:
        group: the context-parallel group.
        comm: how keys and values travel.
    """

    group: dist.ProcessGroup
    comm: ContextComm = "all_gather"

    def __deepcopy__(self, _: Any) -> "Context":
        return self  # as functions are, when a model with its hooks is copied

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of [batch, sequence, ...], one after the other.

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
        how: AttentionMode,
        mask: Tensor | Packing | None = None,
    ) -> Tensor:
        """Attend to the whole sequence, given this rank's part of it.

        Args:
            query: [batch, heads, part, width].
            key: [batch, key heads, part, width].
            value: [batch, key heads, part, width of its own].
            how: scale, window and dropout.
            mask: what is added to the scores, [batch or 1, 1, part, sequence], in place of
                causality and window; or packed sequences, each cut by itself; None for one.

        Returns:
            [batch, part, heads, width of the values].

        Raises:
            SliceError: a window or a mask, and keys that go round a ring.
        """
        check_widths(query, value)
        gathering: Any = GatheringAttention
        ring: Any = RingAttention
        if self.comm == "all_gather":
            return gathering.apply(query, key, value, self.group, how, mask)
        if how.window is not None:
            raise SliceError(
                f"--cp-comm p2p: a layer attends to a window of {how.window} tokens of "
                f"{query.shape[2] * self.group.size()}, and keys that go round a ring are known "
                "for full attention, as in TransformerEngine: use --cp-comm all_gather",
                code="cp-ring-window",
            )
        if isinstance(mask, Packing):
            batch = query.shape[0]
            flat = (_one_row(x) for x in (query, key, value))
            return ring.apply(*flat, self.group, how, mask).unflatten(1, (batch, -1))[0]
        if mask is not None:
            raise SliceError(
                "--cp-comm p2p: sequences are padded, and what is before them is to be masked; "
                "keys that go round a ring are known without masks: pad behind, with labels of "
                "-100 there, or use --cp-comm all_gather",
                code="cp-ring-padding",
            )
        return ring.apply(query, key, value, self.group, how, None)

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the whole sequence, in order, for a model's own attention.

        Raises:
            SliceError: they are to go round a ring.
        """
        if self.comm == "p2p":
            raise SliceError(
                "--cp-comm p2p: the model runs its attention as 'eager', on all keys at once, "
                "which does not go with a ring: use --cp-comm all_gather",
                code="cp-ring-eager",
            )
        return gather_keys(key, self.group), gather_keys(value, self.group)


def _one_row(x: Tensor) -> Tensor:
    """Return [batch, heads, part, width] as [1, heads, batch x part, width]."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
