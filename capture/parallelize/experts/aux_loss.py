"""The load-balancing loss of a mixture of experts when each rank routes a part of a sequence.

Transformers' loss (`load_balancing_loss_func`, from Switch Transformer) over all tokens and layers
is: number of experts x sum over experts of (share of tokens routed to the expert x its mean
probability). The shares need all tokens: token counts are all-reduced, without gradient, as in
Megatron-LM (megatron/core/transformer/moe/moe_utils.py, over the tensor- and context-parallel
group). With these counts the probabilities of a rank's tokens give its part of the loss, and the
parts sum to the whole.
"""

import contextvars
import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import reduce_from_group
from onerank.capture.parallelize.model_structure import by_name
from onerank.ir.errors import SliceError

_FUNCTION = "load_balancing_loss_func"
_SHARED = "_onerank_shared"


@dataclass(frozen=True)
class Balance:
    """How the ranks of a call share the tokens of the balancing loss.

    Attributes:
        groups: process groups to sum token counts over: those that shard the sequence.
        peers_absent: whether the other ranks do not exist to add their counts.
        counted: mask of this rank's tokens that count, [batch, tokens]; None for all.
        summed: group to sum the partial losses over; None if the caller sums them.
    """

    groups: tuple[dist.ProcessGroup, ...]
    peers_absent: bool
    counted: Tensor | None = None
    summed: dist.ProcessGroup | None = None


BALANCE: contextvars.ContextVar[Balance | None] = contextvars.ContextVar(
    "onerank_balance", default=None
)
"""Balance of the current call. Per thread, because `verify` runs one slice per thread."""


def adds_balancing_loss(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether a call with these arguments adds the routers' balancing loss."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    enabled = arguments.get("output_router_logits")
    enabled = getattr(config, "output_router_logits", False) if enabled is None else enabled
    return bool(enabled) and hasattr(_modeling_module(model), _FUNCTION)


def share_balancing_loss(model: nn.Module) -> None:
    """Patch a model's balancing loss to return a partial loss while `BALANCE` is set.

    Raises:
        SliceError: the model's loss differs from the loss in the module docstring.
    """
    from transformers.models.mixtral import modeling_mixtral

    module = _modeling_module(model)
    whole: Any = getattr(module, _FUNCTION)
    if hasattr(whole, _SHARED):
        return
    reference = getattr(modeling_mixtral, _FUNCTION)
    # Models copy this function from Mixtral. The partial loss is exact only for that formula, so a
    # copy that was changed is refused; a patched function keeps the original as an attribute.
    if inspect.getsource(whole) != inspect.getsource(getattr(reference, _SHARED, reference)):
        raise SliceError(
            f"{type(model).__name__} adds a balancing loss that differs from Mixtral's in "
            "transformers, so it cannot be split over parts of the sequence\n"
            "  configure output_router_logits=False",
            code="moe-loss-unknown",
        )

    def loss_function(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        balance = BALANCE.get()
        if balance is None or not isinstance(gate_logits, tuple):
            return whole(gate_logits, num_experts, top_k, attention_mask)
        return _partial_loss(gate_logits, num_experts, top_k, balance)

    setattr(loss_function, _SHARED, whole)
    setattr(module, _FUNCTION, loss_function)


def balance_over_sequence(
    model: nn.Module, group: dist.ProcessGroup, *, peers_absent: bool
) -> None:
    """Compute the routers' balancing loss over the whole sequence when ranks route shards of it.

    Args:
        model: a model under sequence parallelism.
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not exist to add their counts.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = by_name(module, args, kwargs)
        if not adds_balancing_loss(module, arguments):
            return
        share_balancing_loss(module)
        balance = BALANCE.get() or Balance(
            (), peers_absent, _counted_tokens(arguments.get("attention_mask"))
        )
        counted = balance.counted
        if counted is not None:
            # The router sees this rank's shard of the sequence, and the mask covers all of it.
            counted = counted.chunk(group.size(), dim=1)[group.rank()]
        BALANCE.set(
            replace(balance, groups=(*balance.groups, group), counted=counted, summed=group)
        )

    def leave(*_: Any) -> None:
        BALANCE.set(None)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


def _counted_tokens(mask: Any) -> Tensor | None:
    """Return the mask of tokens that count, [batch, sequence]; raise SliceError for other masks."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return mask
    raise SliceError(
        "--sp: the balancing loss of the routers counts tokens by an attention_mask [batch, "
        f"sequence]; found {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}",
        code="moe-loss-mask",
    )


def _modeling_module(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__]


def _partial_loss(
    gate_logits: tuple[Tensor, ...], experts: int, top_k: int, balance: Balance
) -> Tensor:
    """Return this rank's part of the loss, or the sum over `balance.summed`: one element.

    Args:
        gate_logits: router logits of each layer, [tokens, experts].
        experts: number of experts.
        top_k: experts per token.
        balance: groups, and the tokens that count.
    """
    # One vector holds the tokens per expert and, last, all tokens: one all-reduce for both.
    counts = torch.zeros(experts + 1, dtype=torch.float32, device=gate_logits[0].device)
    probabilities = counts[:-1]
    for logits in gate_logits:
        weights = torch.nn.functional.softmax(logits, dim=-1)
        expert_indices = torch.topk(weights, top_k, dim=-1)[1]
        counted = balance.counted
        rows = weights.new_ones(len(weights)) if counted is None else counted.reshape(-1)
        rows = rows.float()
        counts = counts.scatter_add(0, expert_indices.reshape(-1), rows.repeat_interleave(top_k))
        counts[-1] += rows.sum()
        probabilities = probabilities + (weights.float() * rows.unsqueeze(-1)).sum(0)
    for group in balance.groups:
        if balance.peers_absent:
            # Absent ranks are assumed to route as this rank does.
            counts *= group.size()
        dist.all_reduce(counts, group=group)
    tokens = counts[-1]
    loss = (counts[:-1] / tokens * probabilities / tokens).sum() * experts
    if balance.summed is None:
        return loss
    return reduce_from_group(
        loss * (balance.summed.size() if balance.peers_absent else 1), balance.summed
    )
