"""Shard a model's experts over an expert-parallel group, and exchange tokens between its ranks.

As in Megatron-LM (megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher)
and DeepSpeed-MoE, the rest of the model is replicated and each rank holds experts / size whole
experts. Per layer and forward, ranks all-gather the token counts per expert, then dispatch the
tokens with one all-to-all and combine the results with another; the backward needs two more.
Routing weights stay with the sender. If each tensor-parallel rank holds a shard of the sequence and
a slice of every expert, the received tokens are all-gathered over these ranks and the results
reduce-scattered.

Llama-4's experts in transformers compute every token, weighted by its score for each expert, so
tokens cannot be sent to one expert. Each rank all-gathers the group's tokens and scores, runs the
experts it holds, and reduce-scatters the sums. Megatron-LM's MoEAllGatherTokenDispatcher (same
file) has the same collectives, but its experts compute only tokens routed to them. A forward takes
2 all-gathers and a reduce-scatter per layer; the backward mirrors them. Every rank has the same
number of tokens, as in Megatron-LM.

With absent peers, the all-gathered counts repeat this rank's counts: every peer is assumed to route
as this rank does. Static routing knows the counts of each peer.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.fake_tensors import on_gpu
from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter
from onerank.capture.parallelize.experts.routing import BALANCED, GroupRank, Routing, StaticRouting
from onerank.capture.parallelize.module_names import parent_of
from onerank.capture.parallelize.parameter_kinds import EXPERT, KIND_ATTRIBUTE
from onerank.ir.errors import SliceError, division


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows [sum(sends), ...] -> [sum(receives), ...]; reversed in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchange(x, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.sends, ctx.receives, ctx.group), None, None, None


def exchange_rows(
    x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sends[r]` rows to each rank r and return the `receives[r]` rows from each, in order."""
    result: Tensor = ExchangeRows.apply(x, receives, sends, group)
    return result


def _exchange(x: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty((sum(receives), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), receives, sends, group=group)
    return received


class GatherRows(torch.autograd.Function):
    """All-gather of rows [lengths[rank], ...] -> [sum(lengths), ...]; backward, reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _gather(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grads[0], ctx.lengths, ctx.group), None, None


class ScatterRows(torch.autograd.Function):
    """Reduce-scatter of rows [sum(lengths), ...] -> [lengths[rank], ...]; backward, all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        return _scatter(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.lengths, ctx.group), None, None


def gather_rows(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the `lengths[r]` rows of each rank r, in order."""
    result: Tensor = GatherRows.apply(x, lengths, group)
    return result


def scatter_rows(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sum rows over the ranks and return this rank's `lengths[rank]` of them."""
    result: Tensor = ScatterRows.apply(x, lengths, group)
    return result


def _gather(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((sum(lengths), *x.shape[1:]))
    # NCCL has one kernel for equal shards; for unequal ones torch issues a broadcast per rank.
    if len(set(lengths)) == 1:
        all_gather(gathered, x.contiguous(), group=group)
    else:
        dist.all_gather(list(gathered.split(lengths)), x.contiguous(), group=group)
    return gathered


def _scatter(x: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    shard = x.new_empty((lengths[group.rank()], *x.shape[1:]))
    if len(set(lengths)) == 1:
        reduce_scatter(shard, x.contiguous(), group=group)
    else:
        dist.reduce_scatter(shard, list(x.contiguous().split(lengths)), group=group)
    return shard


_LLAMA4_EXPERTS = "Llama4TextExperts"

_LLAMA4_PARTS = ("experts", "router", "shared_expert")


def is_dense(module: nn.Module) -> bool:
    """Return whether a module holds experts that each compute every token, as Llama-4's do."""
    return type(module).__name__ == _LLAMA4_EXPERTS


def dense_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> module of the layers' experts that compute every token."""
    return {name: module for name, module in model.named_modules() if is_dense(module)}


def gather_tokens(model: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Make a layer's sharded experts compute the tokens of all ranks of the group.

    Replaces the forward of the block that contains the experts, their router and a shared expert.

    Args:
        model: the model with the layer.
        name: qualified name of the experts.
        group: the expert-parallel group.

    Raises:
        SliceError: the block's parts differ from Llama-4's.
    """
    block = model.get_submodule(parent_of(name))
    children = {child for child, _ in block.named_children()}
    if children != set(_LLAMA4_PARTS):
        raise SliceError(
            f"--ep {group.size()}: the block of {name} has {', '.join(sorted(children))}; "
            f"gathering tokens needs Llama-4's {', '.join(_LLAMA4_PARTS)}: leave --ep out",
            code="ep-block-inputs",
        )

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden)
        lengths = [hidden.shape[0]] * group.size()
        tokens = gather_rows(hidden, lengths, group)
        local_experts = self.experts.num_experts
        weights = gather_rows(scores, lengths, group).narrow(
            1, group.rank() * local_experts, local_experts
        )
        # Expert by expert, as Llama-4's experts view their input.
        routed = tokens.repeat(local_experts, 1) * weights.t().reshape(-1, 1)
        partial_sum = self.experts(routed).view(local_experts, *tokens.shape).sum(0)
        # The shared expert is replicated and sees this rank's tokens only, so its output is added
        # after the sum over the group.
        output = self.shared_expert(hidden)
        return output.add_(scatter_rows(partial_sum, lengths, group)), logits

    block.forward = MethodType(forward, block)


_PEER_COUNTS = "_onerank_peer_counts"
"""Attribute of experts with static routing and absent peers; see `StaticRouting.counts`."""

_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_fused(module: nn.Module) -> bool:
    """Return whether a module holds the fused experts of a layer.

    Such a module follows transformers' experts interface (transformers/integrations/moe.py): its
    parameters have the experts as their first dimension, and it takes hidden states
    [tokens, hidden], expert indices and routing weights, both [tokens, top_k].
    """
    experts = getattr(module, "num_experts", None)
    weights = list(module.parameters(recurse=False))
    return (
        isinstance(experts, int)
        and hasattr(module, "is_transposed")
        and sum(weight.dim() == 3 for weight in weights) > 1
        and all(weight.shape[0] == experts for weight in weights)
    )


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> module of the fused experts of each layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if is_fused(module)}


def shard_experts(
    model: nn.Module, group: dist.ProcessGroup, gathered_over: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Keep this rank's experts of every layer and exchange tokens with the other ranks.

    The experts run as the model is configured (eager, grouped_mm, batched_mm). Their parameters
    carry `KIND_ATTRIBUTE` = EXPERT, the axis of ranks with the same experts.

    Args:
        model: a model whose experts are whole, on any device.
        group: the expert-parallel group.
        gathered_over: the tensor-parallel group if each of its ranks routes a shard of the
            sequence and holds a slice of every expert.

    Returns:
        Counts of modules by style.

    Raises:
        SliceError: the model has no experts, an unsupported layout of experts, or a number of
            experts that the group does not divide.
    """
    layers, dense = expert_layers(model), dense_layers(model)
    if not layers and not dense:
        raise SliceError(_no_experts_message(model, group.size()), code="ep-no-experts")
    for name, module in (layers | dense).items():
        _keep_experts(module, name, group)
        module.register_forward_pre_hook(_mark_expert_axis)
    for module in layers.values():
        module.forward = MethodType(_dispatching_forward(group, gathered_over), module)
    for name in dense:
        gather_tokens(model, name, group)
    return {"expert_parallel": len(layers) + len(dense)}


def are_sharded(experts: nn.Module) -> bool:
    """Return whether a module's experts are sharded over expert-parallel ranks."""
    return any(
        hasattr(parameter, KIND_ATTRIBUTE) for parameter in experts.parameters(recurse=False)
    )


def apply_static_routing(
    model: nn.Module, routing: Routing, sender: GroupRank | None = None
) -> None:
    """Replace the expert indices that the model's routers choose with static ones.

    Call it while the experts are whole.

    Args:
        model: the model.
        routing: the distribution of tokens over its experts.
        sender: this rank of an expert-parallel group whose other ranks are absent.

    Raises:
        SliceError: the routing does not fit the model.
    """
    layers = list(expert_layers(model).values())
    if not layers and routing.name != BALANCED:
        raise SliceError(
            f"--moe-routing {routing.name}: {type(model).__name__} has no experts to route "
            "tokens to: leave it out",
            code="routing-no-experts",
        )
    for module in layers:
        routing.check(len(layers), module.num_experts)
    static = StaticRouting(routing)
    for layer_index, module in enumerate(layers):
        of_layer = layer_index, module.num_experts
        module.register_forward_pre_hook(_rerouting(static, *of_layer, sender or GroupRank()))
        if sender is not None:
            setattr(module, _PEER_COUNTS, partial(static.counts, *of_layer, sender.ranks))


def expert_loads(
    model: nn.Module, routing: Routing, size: int
) -> dict[str, tuple[tuple[Fraction, ...], ...]]:
    """Return qualified name of a layer's experts -> per rank of a group, the shares of its experts.

    A share is a fraction of the layer's routed tokens, before rounding to whole tokens. A rank's
    shares are sorted, so that ranks with the same work compare equal. Call this function while the
    experts are whole; `size` divides their number.
    """
    loads: dict[str, tuple[tuple[Fraction, ...], ...]] = {}
    for layer_index, (name, module) in enumerate(expert_layers(model).items()):
        shares, local = routing.shares(layer_index, module.num_experts), module.num_experts // size
        ranges = (slice(rank * local, (rank + 1) * local) for rank in range(size))
        loads[name] = tuple(tuple(sorted(shares[experts])) for experts in ranges)
    return loads


def routes_itself(model: nn.Module) -> bool:
    """Return whether a model has routed experts to which static routing does not apply.

    Their modules are not those of transformers' experts interface. Experts that compute every
    token are not routed.
    """
    fused, dense = expert_layers(model), dense_layers(model)
    return _configured_experts(model) > 1 and not fused and not dense


def _configured_experts(model: nn.Module) -> int:
    """Return the number of experts in the model's configuration; 0 without experts."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return max((getattr(text, key, 0) or 0 for key in _EXPERT_COUNT_KEYS), default=0)


def _no_experts_message(model: nn.Module, size: int) -> str:
    experts = _configured_experts(model)
    kind = type(model).__name__
    if experts > 1:
        return (
            f"--ep {size}: {kind} has {experts} experts, but not in the fused form of "
            "transformers' experts interface (weights [experts, ...], called with hidden states, "
            "indices and routing weights): leave --ep out"
        )
    return f"--ep {size} shards experts over ranks, but {kind} has none: leave --ep out"


def _keep_experts(module: Any, name: str, group: dist.ProcessGroup) -> None:
    size, experts = group.size(), module.num_experts
    if experts % size:
        raise SliceError(
            f"--ep {size} must divide {name}'s {experts} experts ({division(experts, size)})",
            code="ep-indivisible-experts",
        )
    # The forward of transformers reads its number of experts here.
    module.num_experts = experts // size
    for parameter in module.parameters(recurse=False):
        with torch.no_grad():
            # A copy: a view would keep the memory of all experts.
            parameter.data = parameter.data.chunk(size)[group.rank()].clone()
            # It would have the shape of all experts.
            parameter.grad = None
    _mark_expert_axis(module)


def _mark_expert_axis(module: nn.Module, *_: Any) -> None:
    """Mark experts' parameters with the axis that averages their gradients."""
    # Before each forward: moving a model off the meta device creates new parameters.
    for parameter in module.parameters(recurse=False):
        setattr(parameter, KIND_ATTRIBUTE, EXPERT)


def _rerouting(
    static: StaticRouting, layer_index: int, experts: int, sender: GroupRank
) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        return hidden, static.indices(layer_index, experts, index, sender), weights

    return hook


def _dispatching_forward(
    group: dist.ProcessGroup, gathered_over: dist.ProcessGroup | None
) -> Callable[..., Tensor]:
    """Return an experts forward that exchanges tokens with all ranks of the group.

    It takes hidden states [tokens, hidden] and expert indices and routing weights, both
    [tokens, top_k], like the forward that it replaces; the result is [tokens, hidden].

    Args:
        group: the ranks that share the experts.
        gathered_over: ranks among which each gathers the tokens that it received; None without.
    """
    count_exchange = _CountExchange(group, gathered_over)

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        local, top_k = self.num_experts, index.shape[-1]
        expert_ids = index.reshape(-1)
        # This groups tokens by expert, and so by rank.
        order = torch.argsort(expert_ids)
        counts = count_exchange.run(index, local, getattr(self, _PEER_COUNTS, None))
        # Entry i of the flat indices belongs to token i // top_k.
        rows = exchange_rows(hidden[order // top_k], counts.receives, counts.sends, group)
        if gathered_over is not None:
            rows = gather_rows(rows, counts.lengths, gathered_over)
        local_experts = torch.arange(local, device=expert_ids.device)
        local_experts = local_experts.repeat(len(counts.lengths) * group.size())
        # With output_size, repeat_interleave does not wait for the GPU to read the sum of counts.
        local_experts = local_experts.repeat_interleave(
            counts.of_experts.view(-1), output_size=sum(counts.lengths)
        )
        results = _run_experts(self, rows, local_experts.unsqueeze(-1))
        if gathered_over is not None:
            results = scatter_rows(results, counts.lengths, gathered_over)
        combined = exchange_rows(results, counts.sends, counts.receives, group)
        unsorted = torch.empty_like(combined)
        unsorted[order] = combined
        # The sender applies the routing weights; otherwise they and their gradients would travel.
        weighted = unsorted.view(*weights.shape, -1) * weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(hidden.dtype)

    return forward


class _TokenCounts(NamedTuple):
    """How many tokens travel in a call.

    Attributes:
        sends: tokens that this rank sends to each rank of the group.
        receives: tokens that it receives from each.
        lengths: received tokens of each rank among which they are gathered; of this one without.
        of_experts: the same by sender and expert, int64[gathered, size, local], on the device.
    """

    sends: list[int]
    receives: list[int]
    lengths: list[int]
    of_experts: Tensor


class _CountExchange:
    """Tells the ranks of a group how many tokens each expert gets, before the tokens travel.

    Args:
        group: the ranks that share the experts.
        gathered_over: as for `_dispatching_forward`.
    """

    def __init__(self, group: dist.ProcessGroup, gathered_over: dist.ProcessGroup | None) -> None:
        self._group, self._gathered_over = group, gathered_over
        # Shape of the indices -> counts of the last eager call, on the host.
        self._eager: dict[torch.Size, list[int]] = {}

    def run(
        self, index: Tensor, local: int, of_peers: Callable[[Tensor], Tensor] | None
    ) -> _TokenCounts:
        """Return the counts of a call.

        Args:
            index: experts of each token, [tokens, top_k].
            local: experts of a rank.
            of_peers: returns the counts of all pairs of ranks, which static routing knows; None:
                those that the ranks exchange.
        """
        size, expert_ids = self._group.size(), index.reshape(-1)
        sent = torch.zeros(size * local, dtype=torch.long, device=expert_ids.device)
        sent = sent.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        per_pair = torch.empty((size, size, local), dtype=torch.long, device=expert_ids.device)
        all_gather(per_pair.view(-1), sent, group=self._group)  # [from, to, expert]
        if of_peers is not None:
            per_pair = of_peers(index).view(size, size, local)
        received = per_pair[:, self._group.rank()].contiguous()
        of_experts = received.unsqueeze(0)
        if self._gathered_over is not None:
            of_experts = received.new_empty((self._gathered_over.size(), *received.shape))
            all_gather(of_experts.view(-1), received.view(-1), group=self._gathered_over)
        lengths = of_experts.sum((1, 2))
        if index.shape in self._eager and _is_capturing(index):
            # The host cannot wait for the GPU here. The same step has run eagerly before, with the
            # same tokens. Engines' steps in a graph have constant counts, too.
            on_host = self._eager[index.shape]
        else:
            # one device-to-host copy for all counts: each .tolist() waits for the GPU
            on_host = torch.cat([sent.view(size, local).sum(1), received.sum(1), lengths]).tolist()
            self._eager[index.shape] = on_host
        return _TokenCounts(
            on_host[:size], on_host[size : 2 * size], on_host[2 * size :], of_experts
        )


def _is_capturing(tensor: Tensor) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return on_gpu(tensor) and torch.cuda.is_current_stream_capturing()


def _run_experts(experts: Any, rows: Tensor, local_experts: Tensor) -> Tensor:
    """Run the module's forward on rows of one expert each; the sender applies routing weights."""
    run = type(experts).forward
    if len(rows):
        return run(experts, rows, local_experts, torch.ones_like(local_experts, dtype=rows.dtype))
    # Without tokens, run one row of zeros and drop its result. The backward must still reach the
    # weights, for gradients of zero, and this rank's part in the all-to-alls of the other ranks.
    row = rows.sum(dim=0, keepdim=True)
    return run(experts, row, local_experts.new_zeros((1, 1)), row.new_ones((1, 1)))[:0]
