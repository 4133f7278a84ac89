"""Attention of context-parallel ranks over the whole sequence: all-gathered keys, or a ring.

`all_gather`: each chunk of queries attends to the keys up to the end of the chunk. The backward
gathers keys and values again instead of keeping them, and reduce-scatters their gradients: per
layer and step 4 all-gathers and 2 reduce-scatters. Llama 3 (https://arxiv.org/abs/2407.21783,
section 3.3.2) and TransformerEngine for Megatron-LM's `--cp-comm-type all_gather` do the same
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py). Keys and values
keep their own widths. Multi-head latent attention gathers the keys and values of all heads, as in
Megatron-LM (megatron/core/transformer/multi_latent_attention.py). A sliding window gathers as many
keys and attends to fewer. With a mask, a chunk still sees only keys up to its end. A model's own
("eager") attention needs all keys at once and autograd keeps them: per layer and step 2 all-gathers
and 2 reduce-scatters.

`p2p`: ranks pass keys and values round a ring. In each step a rank attends to the keys it received
last and sends them on. Outputs of the steps are merged by their log-sum-exp. In the first step a
rank attends causally to its own keys. Of an earlier rank's keys, both chunks of queries attend to
the first chunk; to a later rank's keys, only the second chunk of queries attends. The backward runs
round the ring in the other direction; gradients of keys and values travel with them until they
reach the rank that owns them. This is Megatron-LM's default, `--cp-comm-type p2p`, as in
TransformerEngine (same file): size - 1 sends of keys and values forward, size sends backward. Keys
and values travel in one message, each with its own width (latent attention). With packed sequences,
the halves are those of each sequence (see `packed_sequences`).

Unlike in TransformerEngine, the chunks or steps run on one stream, and a ring merges its steps in
fp32 one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter
from onerank.capture.parallelize.context.packed_sequences import (
    Lengths,
    Packing,
    attend_packed,
    attend_packed_backward,
)
from onerank.capture.parallelize.context.partial_attention import (
    AttentionCall,
    AttentionMode,
    AttentionOutput,
    attend,
    attend_backward,
    check_widths,
)
from onerank.ir.errors import SliceError, division


def chunks_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the chunks that this rank holds, of 2 x size."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


class GatheringAttention(torch.autograd.Function):
    """Attention of [batch, heads, part, width] to the keys of all ranks -> [batch, part, ...]."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, group, mode, mask = args
        ctx.group, ctx.mode = group, mode
        keys, values = (_gather_sequence(x, group) for x in (key, value))
        whole = AttentionCall(query, keys, values, mode, causal=True, mask=mask)
        parts = [attend(call) for call, _ in _calls_of_chunks(whole, group)]
        saved = [[part.output, part.logsumexp, *part.dropout_state] for part in parts]
        ctx.save_for_backward(query, key, value, mask, *saved[0], *saved[1])
        return torch.cat([part.output.transpose(1, 2) for part in parts], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *saved = ctx.saved_tensors
        group, states_per_part = ctx.group, len(saved) // 2
        keys, values = (_gather_sequence(x, group) for x in (key, value))
        # Zeros, because both chunks of queries add to keys that they share, and later keys get
        # none.
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_query: list[Tensor] = []
        grad_outputs = grads[0].transpose(1, 2).chunk(2, dim=2)
        whole = AttentionCall(query, keys, values, ctx.mode, causal=True, mask=mask)
        for index, (call, key_range) in enumerate(_calls_of_chunks(whole, group)):
            output, sums, *dropout_state = saved[
                index * states_per_part : (index + 1) * states_per_part
            ]
            forward = AttentionOutput(output, sums, tuple(dropout_state))
            gradient_parts = attend_backward(call, forward, grad_outputs[index])
            grad_query.append(gradient_parts[0])
            grad_keys[:, :, key_range] += gradient_parts[1]
            grad_values[:, :, key_range] += gradient_parts[2]
        grad_key, grad_value = (
            _reduce_scatter_sequence(x, group) for x in (grad_keys, grad_values)
        )
        return torch.cat(grad_query, dim=2), grad_key, grad_value, None, None, None


class GatheredKeys(torch.autograd.Function):
    """All-gather of [batch, heads, part, width] -> [batch, heads, sequence, width]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grads[0], ctx.group), None


def gather_keys(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather keys or values of the whole sequence; the backward reduce-scatters gradients."""
    result: Tensor = GatheredKeys.apply(x, group)
    return result


class GatheredLogits(torch.autograd.Function):
    """All-gather of [batch, part, vocabulary] -> [batch, sequence, vocabulary].

    Every rank computes the same loss from them and keeps the gradient of its part. The gradient is
    scaled by the group size, because data parallelism averages over these ranks.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_sequence(logits.unsqueeze(1), group).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        chunks = grads[0].chunk(2 * size, dim=1)
        local = torch.cat([chunks[chunk] for chunk in chunks_of(ctx.group)], dim=1)
        return local.mul_(size), None


def _calls_of_chunks(
    whole: AttentionCall, group: dist.ProcessGroup
) -> list[tuple[AttentionCall, slice]]:
    """Return the call of each chunk of the rank's queries, and the range of keys that it sees.

    Args:
        whole: the queries of this rank, and all keys and values.
        group: the context-parallel group.
    """
    queries, window = whole.query.chunk(2, dim=2), whole.mode.window
    masks = (None, None) if whole.mask is None else whole.mask.chunk(2, dim=2)
    length = queries[0].shape[2]
    calls: list[tuple[AttentionCall, slice]] = []
    for query, chunk, rows in zip(queries, chunks_of(group), masks, strict=True):
        start, end = chunk * length, (chunk + 1) * length
        # With a mask, from key 0 on: kernels need aligned mask rows.
        first = max(0, start + 1 - window) if window and rows is None else 0
        seen = slice(first, end)
        keys, values = whole.key[:, :, seen], whole.value[:, :, seen]
        mask = None if rows is None else rows[..., :end]
        calls.append((replace(whole, query=query, key=keys, value=values, mask=mask), seen))
    return calls


def _gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' [batch, heads, part, width] and put the chunks in order."""
    size, (batch, heads, part, width) = group.size(), x.shape
    gathered = x.new_empty((size, batch, heads, part, width))
    all_gather(gathered.view(-1, heads, part, width), x.contiguous(), group=group)
    # First chunks ascend with the rank and second chunks descend.
    halves = [shard.chunk(2, dim=2) for shard in gathered]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves[::-1]], dim=2)


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [batch, heads, sequence, width] over the ranks and return this rank's chunks."""
    size = group.size()
    chunks = x.chunk(2 * size, dim=2)
    # The collective scatters consecutive pieces, so each rank's two chunks are put together.
    order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    shards = torch.stack([chunks[chunk] for chunk in order])
    local = x.new_empty((2, *shards.shape[1:]))
    reduce_scatter(local, shards, group=group)
    return torch.cat([local[0], local[1]], dim=2)


@dataclass(frozen=True)
class _Operand:
    """The part of a rank's queries or keys that one step uses.

    Attributes:
        indices: token indices in the rank's part.
        lengths: lengths of the packed sequences; None for one sequence.
    """

    indices: slice | Tensor
    lengths: Lengths | None = None


class RingAttention(torch.autograd.Function):
    """Attention of [batch, heads, part, width] to the keys of all ranks -> [batch, part, ...]."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, group, mode, packing = args
        ctx.group, ctx.mode, ctx.shapes = group, mode, (key.shape, value.shape)
        ctx.packing = packing
        size, rank = group.size(), group.rank()
        # One message: their widths may differ, so they are flat.
        kv = torch.cat([key.reshape(-1), value.reshape(-1)])
        output = sums = query.new_empty(0)
        dropout_state: list[Tensor] = []
        for step in range(size):
            # The exchange starts before the kernels of the step, so that it overlaps them; after
            # the last step each part has visited every rank.
            wait_incoming = _exchange(kv, group, direction=1) if step < size - 1 else None
            rows, columns = _causal_halves(query, packing, owner=(rank - step) % size, rank=rank)
            keys, values = (x[:, :, columns.indices] for x in _split_message(kv, ctx.shapes))
            call = AttentionCall(query[:, :, rows.indices], keys, values, mode, causal=step == 0)
            if rows.lengths is None or columns.lengths is None:
                part = attend(call)
            else:
                part = attend_packed(call, (rows.lengths, columns.lengths))
            dropout_state += part.dropout_state
            if step == 0:
                # fp32, because every step of the ring adds to it and bf16 would round each time.
                output, sums = part.output.float(), part.logsumexp.clone()
            else:
                _merge(output, sums, rows.indices, part)
            kv = kv if wait_incoming is None else wait_incoming()
        output = output.to(query.dtype)
        # `kv` is now the next rank's part: the backward starts with it and needs no first exchange.
        ctx.save_for_backward(query, kv, output, sums, *dropout_state)
        return output.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, kv, output, sums, *dropout_state = ctx.saved_tensors
        group, grad_output = ctx.group, grads[0].transpose(1, 2)
        size, rank = group.size(), group.rank()
        states_per_step = len(dropout_state) // size
        grad_query = torch.zeros_like(query)
        grad_kv = torch.zeros_like(kv)
        for step in range(size):
            # The first message has no gradients yet; the last has only gradients, which reach the
            # rank that owns the keys. Between, both travel in one message, as in TransformerEngine.
            outgoing = [kv] * (step < size - 1) + [grad_kv] * (step > 0)
            wait_incoming = _exchange(torch.stack(outgoing), group, direction=-1)
            owner = (rank + 1 + step) % size
            rows, columns = _causal_halves(query, ctx.packing, owner=owner, rank=rank)
            # the forward reached this owner's part in step size - 1 - step
            state = dropout_state[
                (size - 1 - step) * states_per_step : (size - step) * states_per_step
            ]
            forward_part = AttentionOutput(
                output[:, :, rows.indices], sums[:, :, rows.indices], tuple(state)
            )
            keys, values = (x[:, :, columns.indices] for x in _split_message(kv, ctx.shapes))
            call = AttentionCall(
                query[:, :, rows.indices], keys, values, ctx.mode, causal=owner == rank
            )
            grad_rows = grad_output[:, :, rows.indices]
            if rows.lengths is None or columns.lengths is None:
                part_grads = attend_backward(call, forward_part, grad_rows)
            else:
                lengths = rows.lengths, columns.lengths
                part_grads = attend_packed_backward(call, lengths, forward_part, grad_rows)
            grad_query[:, :, rows.indices] += part_grads[0]
            received = wait_incoming()
            if step > 0:
                grad_kv = received[-1]
            for x, gradients in zip(
                _split_message(grad_kv, ctx.shapes), part_grads[1:], strict=True
            ):
                x[:, :, columns.indices] += gradients
            kv = received[0]
        grad_key, grad_value = _split_message(grad_kv, ctx.shapes)
        return grad_query, grad_key, grad_value, None, None, None


def _split_message(kv: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    """Split a ring message into keys and values."""
    key, value = kv.split([shapes[0].numel(), shapes[1].numel()])
    return key.view(shapes[0]), value.view(shapes[1])


def _causal_halves(
    query: Tensor, packing: Packing | None, *, owner: int, rank: int
) -> tuple[_Operand, _Operand]:
    """Return which queries of `rank` attend to which keys of `owner` under a causal mask.

    Rank r holds chunks r and 2 x size - 1 - r. An earlier owner's second chunk is later than all of
    this rank's queries; a later owner's first chunk is later than this rank's first chunk. So no
    step computes a masked product, except for a rank's own part.
    """
    length = query.shape[2]
    whole, half = slice(0, length), length // 2
    if packing is None:
        everything, first = _Operand(whole), _Operand(slice(0, half))
        second = _Operand(slice(half, length))
    else:
        everything = _Operand(whole, packing.whole)
        first, second = (
            _Operand(indices, packing.half) for indices in (packing.first, packing.second)
        )
    if owner == rank:
        return everything, everything
    return (everything, first) if owner < rank else (second, everything)


def _merge(output: Tensor, logsumexp: Tensor, rows: slice | Tensor, part: AttentionOutput) -> None:
    """Merge the output for a part of the keys into the running output of the rows, in place.

    With weights relative to the log-sum-exp no exponential overflows; torch's ring attention merges
    in the same way (_SDPAMerger in torch/distributed/tensor/experimental).
    """
    merged, merged_logsumexp = output[:, :, rows], logsumexp[:, :, rows]
    weight = torch.sigmoid(part.logsumexp - merged_logsumexp).unsqueeze(-1)
    merged_logsumexp.sub_(nn.functional.logsigmoid(merged_logsumexp - part.logsumexp))
    merged.add_(weight * (part.output - merged))
    # Indexing by a tensor copies, so the results are written back.
    if isinstance(rows, Tensor):
        output[:, :, rows], logsumexp[:, :, rows] = merged, merged_logsumexp


def _exchange(
    outgoing: Tensor, group: dist.ProcessGroup, *, direction: int
) -> Callable[[], Tensor]:
    """Start a send to one neighbour and a receive from the other; return a function that waits.

    Args:
        outgoing: the tensor to send; the received tensor has its shape.
        group: the ring.
        direction: 1 for ascending ranks, -1 for descending.
    """
    incoming = torch.empty_like(outgoing)
    size, rank = group.size(), group.rank()
    to, source = (rank + direction) % size, (rank - direction) % size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return incoming

    return wait


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
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    def local_chunks(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of [batch, sequence, ...], concatenated.

        Raises:
            SliceError: the sequence is not a multiple of 2 x size.
        """
        size, length = self.group.size(), x.shape[1]
        if length % (2 * size):
            raise SliceError(
                f"--cp {size} cuts the sequence into 2 x {size} = {2 * size} chunks, and the "
                f"sequence has {length} tokens ({division(length, 2 * size)}): "
                "pad or cut the batch",
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
