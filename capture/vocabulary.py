"""Vocabulary-parallel embedding and cross-entropy, with the kernels Megatron-LM's have.

Both follow megatron/core/tensor_parallel (layers.py, cross_entropy.py). A rank that is alone
needs one difference: the rows of token ids of other ranks are not zeroed, since no other rank
adds them, and zeros would change the GEMMs' speed and let gradients explode. The kernel that
zeroes them runs all the same, with an empty mask.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallel import Forward, reduce_from_group

IGNORED_LABEL = -100


def embedding_forward(embedding: nn.Embedding, group: dist.ProcessGroup, *, alone: bool) -> Forward:
    """Forward of an embedding with rows sharded: ids [...] -> [..., hidden]."""
    empty: dict[tuple[torch.Size, torch.device], Tensor] = {}

    def empty_mask(like: Tensor) -> Tensor:
        key = (like.shape, like.device)
        if key not in empty:  # made once, during warm-up: no kernel of its own in the step
            empty[key] = torch.zeros_like(like)
        return empty[key]

    def forward(input: Tensor) -> Tensor:  # noqa: A002
        ids = input
        rows = embedding.weight.shape[0]
        start = group.rank() * rows
        outside = (ids < start) | (ids >= start + rows)
        local = ids - start
        local[outside] = 0
        embedded = nn.functional.embedding(local, embedding.weight)
        mask = empty_mask(outside) if alone else outside
        embedded = embedded.masked_fill(mask.unsqueeze(-1), 0.0)
        return reduce_from_group(embedded, group)

    return forward


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token from logits sharded over the vocabulary.

    Logits [tokens, vocabulary / size] in fp32 (overwritten), labels [tokens]; losses [tokens].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        width = logits.shape[-1]
        start = group.rank() * width
        highest = logits.max(dim=-1)[0]
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits = logits.sub_(highest.unsqueeze(-1))
        outside = (labels < start) | (labels >= start + width)
        local = labels - start
        local[outside] = 0
        rows = torch.arange(logits.shape[0], device=logits.device)
        predicted = logits[rows, local].masked_fill_(outside, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = torch.exp(logits, out=logits)
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=group)
        losses = torch.log(total) - predicted
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, local)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, outside, local = ctx.saved_tensors
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        softmax[rows, local] -= 1.0 - outside.float()
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None


def causal_loss(group: dist.ProcessGroup) -> Any:
    """Return a `loss_function` for a causal language model whose logits are sharded.

    It takes what transformers' `ForCausalLMLoss` takes and shifts labels the same way.
    """

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        *,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
            shift_labels = labels[..., 1:].contiguous()
        flat = shift_labels.reshape(-1).to(logits.device)
        # a copy: the function overwrites its logits
        scores = logits.reshape(flat.shape[0], -1).to(torch.float32, copy=True)
        losses: Tensor = VocabularyParallelCrossEntropy.apply(scores, flat, group)  # pyright: ignore[reportAssignmentType]
        counted = flat != ignore_index
        total = (losses * counted).sum()
        return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)

    return loss_function
