"""The load-balancing loss of a mixture of experts whose ranks each route a part of a sequence.

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
from transformers.models.mixtral import modeling_mixtral

from onerank.capture.parallelize.autograd_collectives import reduce_from_group
from onerank.capture.parallelize.model_structure import by_name
from onerank.ir.errors import SliceError

_FUNCTION = "load_balancing_loss_func"
_SHARED = "_onerank_shared"


@dataclass(frozen=True)
class Balance:
    """Who routes the rest of the tokens.

    Attributes:
        groups: the ranks that share each sequence, and those that share each part of it.
        alone: whether the others are not there to add their counts.
        counted: which of this rank's tokens count, [batch, tokens]; None for all.
        summed: the group to sum the parts over; None where what uses them does so.
    """

    groups: tuple[dist.ProcessGroup, ...]
    alone: bool
    counted: Tensor | None = None
    summed: dist.ProcessGroup | None = None


BALANCE: contextvars.ContextVar[Balance | None] = contextvars.ContextVar(
    "onerank_balance", default=None
)
"""Of the call under way: a thread, and so a slice under `verify`, has its own."""


def adds_balancing_loss(model: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a model adds the balancing loss of its routers, called with `given`."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    asked = given.get("output_router_logits")
    asked = getattr(config, "output_router_logits", False) if asked is None else asked
    return bool(asked) and hasattr(_module(model), _FUNCTION)


def share_balancing_loss(model: nn.Module) -> None:
    """Let the balancing loss of a model be a part, whenever `BALANCE` says of what.

    Raises:
        SliceError: it is not known to be the loss above.
    """
    module = _module(model)
    whole: Any = getattr(module, _FUNCTION)
    if hasattr(whole, _SHARED):
        return
    known = getattr(modeling_mixtral, _FUNCTION)
    if inspect.getsource(whole) != inspect.getsource(getattr(known, _SHARED, known)):
        raise SliceError(
            f"{type(model).__name__} adds a balancing loss of its routers that is not the one "
            "transformers' models have from Mixtral, and which part of it a part of the sequence "
            "has is not known: configure output_router_logits=False",
            code="moe-loss-unknown",
        )

    def part_or_whole(
        gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        balance = BALANCE.get()
        if balance is None or not isinstance(gate_logits, tuple):
            return whole(gate_logits, num_experts, top_k, attention_mask)
        return _part(gate_logits, num_experts, top_k, balance)

    setattr(part_or_whole, _SHARED, whole)
    setattr(module, _FUNCTION, part_or_whole)


def balance_over_sequence(model: nn.Module, group: dist.ProcessGroup, *, alone: bool) -> None:
    """Make the routers' balancing loss whole where each rank routes a shard of the sequence.

    Args:
        model: a model under sequence parallelism.
        group: the tensor-parallel group.
        alone: whether the group's other ranks are absent and cannot add their counts.
    """

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = by_name(module, args, kwargs)
        if not adds_balancing_loss(module, given):
            return
        share_balancing_loss(module)
        outer = BALANCE.get() or Balance((), alone, _counted(given.get("attention_mask")))
        counted = outer.counted
        if counted is not None:
            counted = counted.chunk(group.size(), dim=1)[group.rank()]
        BALANCE.set(replace(outer, groups=(*outer.groups, group), counted=counted, summed=group))

    def leave(*_: Any) -> None:
        BALANCE.set(None)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave, always_call=True)


def _counted(mask: Any) -> Tensor | None:
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return mask
    raise SliceError(
        "--sp: the balancing loss of the routers counts tokens by an attention_mask [batch, "
        f"sequence]; found {list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}",
        code="moe-loss-mask",
    )


def _module(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__]


def _part(gate_logits: tuple[Tensor, ...], experts: int, top_k: int, balance: Balance) -> Tensor:
    counts = torch.zeros(experts + 1, dtype=torch.float32, device=gate_logits[0].device)
    probabilities = counts[:-1]
    for logits in gate_logits:
        weights = torch.nn.functional.softmax(logits, dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1)[1]
        counted = balance.counted
        rows = weights.new_ones(len(weights)) if counted is None else counted.reshape(-1)
        rows = rows.float()
        counts = counts.scatter_add(0, chosen.reshape(-1), rows.repeat_interleave(top_k))
        counts[-1] += rows.sum()
        probabilities = probabilities + (weights.float() * rows.unsqueeze(-1)).sum(0)
    for group in balance.groups:
        if balance.alone:
            counts *= group.size()  # absent ranks are taken to route as this one does
        dist.all_reduce(counts, group=group)
    tokens = counts[-1]
    loss = (counts[:-1] / tokens * probabilities / tokens).sum() * experts
    if balance.summed is None:
        return loss
    return reduce_from_group(loss * (balance.summed.size() if balance.alone else 1), balance.summed)
