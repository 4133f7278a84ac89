"""Vocabulary-parallel embedding and cross-entropy, as in Megatron-LM.

The collectives and kernels are those of megatron/core/tensor_parallel (layers.py,
cross_entropy.py). A rank without peers receives no partial sums for the rows of other shards, and
the speed of a GEMM depends on its data: on an H200, hidden states with three quarters of their rows
equal made the GEMMs 2.4% faster. So these rows get substitute values, without a kernel launch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.fake_tensors import is_fake
from onerank.capture.parallelize.autograd_collectives import reduce_from_group
from onerank.capture.parallelize.tensor.linear import replace_forward

IGNORED_LABEL = -100

# Whether the running backward retains its graph, so that a second one may follow. torch offers no
# public name for it.
_retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class _ReduceWithAbsentPeers(torch.autograd.Function):
    """All-reduce that returns substitute values instead of the sum.

    The backward is the identity, like that of `ReduceFromGroup`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, substitute: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        # torch.compile does not trace views of weights through an autograd function, but it fuses
        # a copy.
        return substitute.clone() if torch.compiler.is_compiling() else substitute.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class RandomFill:
    """Substitute for the hidden states that an all-reduce with present peers would return.

    Args:
        embedding: the embedding whose sum is substituted.
        seed: seed of the random values.
    """

    def __init__(self, embedding: nn.Embedding, seed: int) -> None:
        self._embedding = embedding
        self._seed = seed
        self._random_values: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def applies_to(self, summed: Tensor) -> bool:
        """Return whether a sum needs a substitute: one on shapes alone has no values."""
        return not summed.is_meta and not is_fake(summed)

    def __call__(self, like: Tensor) -> Tensor:
        """Return values with the shape and dtype of `like`, which stays unchanged."""
        weights, size = self._embedding.weight.data, like.numel()
        # Rows of the embedding cost no memory and no kernel, so they come first.
        if weights.numel() >= size and weights.dtype == like.dtype and weights.is_contiguous():
            return weights.view(-1)[:size].view(like.shape)
        key = (like.dtype, like.device)
        if key not in self._random_values or self._random_values[key].numel() < size:
            # Only the first call and a batch larger than all before launch kernels, so measured
            # steps after the warm-up have none.
            generator = torch.Generator(like.device).manual_seed(self._seed)
            values = torch.empty(size, dtype=like.dtype, device=like.device)
            self._random_values[key] = values.normal_(generator=generator).mul_(like.std())
        return self._random_values[key][:size].view(like.shape)


def parallel_embedding(
    embedding: nn.Embedding, group: dist.ProcessGroup, *, peers_absent: bool, reduce: bool = True
) -> None:
    """Make an embedding with sliced rows vocabulary-parallel: ids [...] -> [..., hidden].

    Args:
        embedding: the embedding; its weight already has this rank's rows only.
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not run, so that the all-reduce returns
            substitute values.
        reduce: whether the result is summed over the group, else it is this rank's part.
    """
    # The class's forward, since some embeddings scale the rows they look up.
    look_up = type(embedding).forward
    rows = embedding.weight.shape[0]
    start = group.rank() * rows
    if embedding.padding_idx is not None:
        is_local = start <= embedding.padding_idx < start + rows
        embedding.padding_idx = embedding.padding_idx - start if is_local else None
    fill = RandomFill(embedding, group.rank())

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002
        ids = input
        outside_shard = (ids < start) | (ids >= start + rows)
        local = ids - start
        # Any valid row will do: the mask below zeroes its result.
        local[outside_shard] = 0
        embedded = look_up(self, local)
        fills = peers_absent and reduce and fill.applies_to(embedded)
        substitute = fill(embedded.detach()) if fills else None
        embedded = embedded.masked_fill(outside_shard.unsqueeze(-1), 0.0)
        if not reduce:
            return embedded
        if substitute is None:
            return reduce_from_group(embedded, group)
        result: Any = _ReduceWithAbsentPeers.apply(embedded, substitute, group)
        # The substitute is a view of weights. The real result would occupy memory too, so
        # the partial sum stays allocated exactly as long as the result.
        result.partial_sum = embedded.detach()
        return result

    replace_forward(embedding, forward)


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy per token from logits sharded over the vocabulary.

    Takes logits [tokens, vocabulary / size] in fp32, which it overwrites, and labels [tokens].
    Returns losses [tokens]. As in Megatron-LM, three all-reduces of [tokens]: the maxima, the
    labels' logits and the sums of exponentials. The backward needs no collective.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, peers_absent: bool
    ) -> Tensor:
        width = logits.shape[-1]
        start = group.rank() * width
        max_logits = logits.max(dim=-1)[0]
        dist.all_reduce(max_logits, op=dist.ReduceOp.MAX, group=group)
        logits = logits.sub_(max_logits.unsqueeze(-1))
        outside_shard = (labels < start) | (labels >= start + width)
        local = labels - start
        local[outside_shard] = 0
        rows = torch.arange(logits.shape[0], device=logits.device)
        label_logits = logits[rows, local].masked_fill_(outside_shard, 0.0)
        dist.all_reduce(label_logits, group=group)
        # In place, as in Megatron-LM: no second tensor [tokens, vocabulary / size] is allocated.
        exponentials = torch.exp(logits, out=logits)
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=group)
        losses = torch.log(total) - label_logits
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside_shard, local)
        # Without peers the sum of exponentials lacks their parts, so the softmax is about `size`
        # times too large. Scaling the one-hot part by `size` too makes the gradient `size` times
        # the true one; unscaled, the logits would drift until the softmax is all zeros.
        ctx.scale = float(group.size() if peers_absent else 1)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, outside_shard, local = ctx.saved_tensors
        if not torch.compiler.is_compiling() and _retains_graph():
            # Another backward of the same forward reads it.
            softmax = softmax.clone()
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        scaled_one_hot = torch.rsub(outside_shard.float(), ctx.scale, alpha=ctx.scale)
        softmax[rows, local] -= scaled_one_hot
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None, None


def causal_loss(
    group: dist.ProcessGroup,
    peers_absent: bool,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of a causal language model from sharded logits.

    Takes the arguments of transformers' `ForCausalLMLoss` and shifts labels the same way.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    flat = shift_labels.reshape(-1).to(logits.device)
    # A copy also of logits that are in fp32 already, because the function overwrites its input.
    scores = logits.reshape(flat.shape[0], -1).to(torch.float32, copy=True)
    losses: Tensor = VocabularyParallelCrossEntropy.apply(scores, flat, group, peers_absent)
    has_label = flat != ignore_index
    total = (losses * has_label).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / (has_label.sum() if num_items_in_batch is None else num_items_in_batch)
