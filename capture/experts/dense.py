"""Experts that each compute every token, as transformers' Llama-4 has them, shared out among ranks.

Such experts are not told where tokens go: they get each token times its score for each expert, 0
where the router left it out. So nothing can be sent to one expert alone. Each rank of the
expert-parallel group gathers the tokens of all and their scores, lets its own experts compute them,
and the sums over the experts are reduce-scattered: the collectives of Megatron-LM's allgather
dispatcher (megatron/core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher), whose
experts compute only what is routed to them. Per layer and forward 2 all-gathers and a
reduce-scatter; the backward mirrors them. As there, every rank has as many tokens.
"""

from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.experts.rows import gather_rows, scatter_rows
from onerank.ir.errors import SliceError

_DENSE = "Llama4TextExperts"
_PARTS = ("experts", "router", "shared_expert")


def is_dense(module: nn.Module) -> bool:
    """Whether a module holds experts that each compute every token, as Llama-4's do."""
    return type(module).__name__ == _DENSE


def dense_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> module of the experts of each layer that compute every token."""
    return {name: module for name, module in model.named_modules() if is_dense(module)}


def gather_tokens(model: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Let a layer's experts, shared out already, compute the tokens of all ranks of the group.

    Args:
        model: whose layer it is.
        name: qualified name of the experts, in a block with their router and a shared expert.
        group: the expert-parallel group.

    Raises:
        SliceError: the block has other parts than Llama-4's.
    """
    block = model.get_submodule(name.rpartition(".")[0])
    parts = {part for part, _ in block.named_children()}
    if parts != set(_PARTS):
        raise SliceError(
            f"--ep {group.size()}: the block of {name} has {', '.join(sorted(parts))}; tokens are "
            f"known to be gathered in one of {', '.join(_PARTS)}, as Llama-4's: leave --ep out"
        )

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden)
        lengths = [hidden.shape[0]] * group.size()
        tokens = gather_rows(hidden, lengths, group)
        own = self.experts.num_experts
        weights = gather_rows(scores, lengths, group).narrow(1, group.rank() * own, own)
        routed = tokens.repeat(own, 1) * weights.t().reshape(-1, 1)
        summed = self.experts(routed).view(own, *tokens.shape).sum(0)
        output = self.shared_expert(hidden)
        return output.add_(scatter_rows(summed, lengths, group)), logits

    block.forward = MethodType(forward, block)
