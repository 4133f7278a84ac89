"""Context-parallel ring attention: ranks pass keys and values round a ring.

In each step a rank attends to the keys it received last and sends them on. Outputs of the steps
are merged by their log-sum-exp. In the first step a rank attends causally to its own keys. Of an
earlier rank's keys, both chunks of queries attend to the first chunk; to a later rank's keys, only
the second chunk of queries attends. The backward runs round the ring in the other direction;
gradients of keys and values travel with them until they reach the rank that owns them.

This is Megatron-LM's default, `--cp-comm-type p2p`, as in TransformerEngine
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py): size - 1 sends of
keys and values forward, size sends backward.

Keys and values travel in one message, each with its own width (latent attention). With packed
sequences, the halves are those of each sequence (see `packed_sequences`). Unlike in
TransformerEngine, all steps run on one stream and are merged in fp32 one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.context.packed_sequences import (
    Lengths,
    Packing,
    attend_packed,
    attend_packed_backward,
)
from onerank.capture.parallelize.context.partial_attention import (
    AttentionOutput,
    attend,
    attend_backward,
)


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
        kv = torch.cat([key.reshape(-1), value.reshape(-1)])
        output = sums = query.new_empty(0)
        dropout_state: list[Tensor] = []
        for step in range(size):
            # The exchange starts before the kernels of the step, so that it overlaps them; after
            # the last step each part has visited every rank.
            wait_incoming = _exchange(kv, group, direction=1) if step < size - 1 else None
            rows, columns = _causal_halves(query, packing, owner=(rank - step) % size, rank=rank)
            keys, values = (x[:, :, columns.indices] for x in _split_message(kv, ctx.shapes))
            operands = query[:, :, rows.indices], keys, values
            if rows.lengths is None or columns.lengths is None:
                part = attend(*operands, mode=mode, causal=step == 0)
            else:
                lengths = rows.lengths, columns.lengths
                part = attend_packed(*operands, mode=mode, causal=step == 0, lengths=lengths)
            dropout_state += part.dropout_state
            if step == 0:
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
            operands = (
                grad_output[:, :, rows.indices],
                query[:, :, rows.indices],
                keys,
                values,
                forward_part,
            )
            if rows.lengths is None or columns.lengths is None:
                part_grads = attend_backward(*operands, mode=ctx.mode, causal=owner == rank)
            else:
                lengths = rows.lengths, columns.lengths
                part_grads = attend_packed_backward(
                    *operands, mode=ctx.mode, causal=owner == rank, lengths=lengths
                )
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
    if isinstance(rows, Tensor):  # indexing by a tensor copies, so write the results back
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
