"""Context-parallel attention whose keys and values travel round a ring of the ranks.

In each step a rank attends to the part it holds and sends that part on; results are merged by their
log-sum-exp. Within its own part, chunks attend causally. To a part of an earlier rank both chunks
attend to its first chunk; to a part of a later rank the second chunk attends to both. The backward
goes round the other way; gradients of keys and values travel with them to the rank that owns them.
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
    attend_each,
    attend_each_backward,
)
from onerank.capture.parallelize.context.partial_attention import (
    AttentionOutput,
    attend,
    attend_backward,
)


@dataclass(frozen=True)
class _Side:
    """The queries or keys that take part in a step.

    Attributes:
        at: their indices.
        lengths: lengths of their packed sequences; None for one sequence.
    """

    at: slice | Tensor
    lengths: Lengths | None = None


class RingAttention(torch.autograd.Function):
    """Attention of [batch, heads, part, width] to the keys of all ranks -> [batch, part, ...]."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, group, how, packing = args
        ctx.group, ctx.how, ctx.shapes = group, how, (key.shape, value.shape)
        ctx.packing = packing
        size, rank = group.size(), group.rank()
        resident = torch.cat([key.reshape(-1), value.reshape(-1)])
        output = sums = query.new_empty(0)
        random: list[Tensor] = []
        for step in range(size):
            arrive = _exchange(resident, group, towards=1) if step < size - 1 else None
            rows, columns = _halves(query, packing, owner=(rank - step) % size, rank=rank)
            keys, values = (x[:, :, columns.at] for x in _pair(resident, ctx.shapes))
            given = query[:, :, rows.at], keys, values
            if rows.lengths is None or columns.lengths is None:
                part = attend(*given, how=how, causal=step == 0)
            else:
                lengths = rows.lengths, columns.lengths
                part = attend_each(*given, how=how, causal=step == 0, lengths=lengths)
            random += part.random
            if step == 0:
                output, sums = part.output.float(), part.log_sums.clone()
            else:
                _merge(output, sums, rows.at, part)
            resident = resident if arrive is None else arrive()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, resident, output, sums, *random)
        return output.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, resident, output, sums, *random = ctx.saved_tensors
        group, gradient = ctx.group, grads[0].transpose(1, 2)
        size, rank = group.size(), group.rank()
        each = len(random) // size
        for_query = torch.zeros_like(query)
        for_resident = torch.zeros_like(resident)
        for step in range(size):
            leaving = [resident] * (step < size - 1) + [for_resident] * (step > 0)
            arrive = _exchange(torch.stack(leaving), group, towards=-1)
            owner = (rank + 1 + step) % size
            rows, columns = _halves(query, ctx.packing, owner=owner, rank=rank)
            drawn = random[(size - 1 - step) * each : (size - step) * each]
            of = AttentionOutput(output[:, :, rows.at], sums[:, :, rows.at], tuple(drawn))
            keys, values = (x[:, :, columns.at] for x in _pair(resident, ctx.shapes))
            given = gradient[:, :, rows.at], query[:, :, rows.at], keys, values, of
            if rows.lengths is None or columns.lengths is None:
                found = attend_backward(*given, how=ctx.how, causal=owner == rank)
            else:
                lengths = rows.lengths, columns.lengths
                found = attend_each_backward(
                    *given, how=ctx.how, causal=owner == rank, lengths=lengths
                )
            for_query[:, :, rows.at] += found[0]
            arrived = arrive()
            if step > 0:
                for_resident = arrived[-1]
            for x, gradients in zip(_pair(for_resident, ctx.shapes), found[1:], strict=True):
                x[:, :, columns.at] += gradients
            resident = arrived[0]
        for_key, for_value = _pair(for_resident, ctx.shapes)
        return for_query, for_key, for_value, None, None, None


def _pair(resident: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    """Split a ring message into keys and values."""
    key, value = resident.split([shapes[0].numel(), shapes[1].numel()])
    return key.view(shapes[0]), value.view(shapes[1])


def _halves(
    query: Tensor, packing: Packing | None, *, owner: int, rank: int
) -> tuple[_Side, _Side]:
    """Return which rows of the queries attend to which columns of an owner's keys."""
    length = query.shape[2]
    whole, half = slice(0, length), length // 2
    if packing is None:
        everything, first = _Side(whole), _Side(slice(0, half))
        second = _Side(slice(half, length))
    else:
        everything = _Side(whole, packing.whole)
        first, second = (_Side(at, packing.half) for at in (packing.first, packing.second))
    if owner == rank:
        return everything, everything
    return (everything, first) if owner < rank else (second, everything)


def _merge(output: Tensor, sums: Tensor, rows: slice | Tensor, part: AttentionOutput) -> None:
    """Merge the output for a part of the keys into the output of the rows, in place."""
    merged, log_sums = output[:, :, rows], sums[:, :, rows]
    share = torch.sigmoid(part.log_sums - log_sums).unsqueeze(-1)
    log_sums.sub_(nn.functional.logsigmoid(log_sums - part.log_sums))
    merged.add_(share * (part.output - merged))
    if isinstance(rows, Tensor):  # indexing by a tensor copies, so write the results back
        output[:, :, rows], sums[:, :, rows] = merged, log_sums


def _exchange(leaving: Tensor, group: dist.ProcessGroup, *, towards: int) -> Callable[[], Tensor]:
    """Start a send to one neighbour and a receive from the other; return a function that waits.

    Args:
        leaving: the tensor to send; the received tensor has its shape.
        group: the ring.
        towards: 1 for ascending ranks, -1 for descending.
    """
    arriving = torch.empty_like(leaving)
    size, rank = group.size(), group.rank()
    to, source = (rank + towards) % size, (rank - towards) % size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, leaving, group=group, group_peer=to),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=source),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait
