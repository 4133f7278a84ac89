"""Llama 4's experts, each of which computes the tokens that the router sends it.

In transformers every expert of Llama 4 computes every token, weighted by a score that is zero for
all but the chosen one: 16 times the products of an engine. Engines multiply the tokens by their
score and send them to the experts that they chose (`Llama4MoE` in
vllm/model_executor/models/llama4.py).
"""

from collections.abc import Callable
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onerank.capture.parallelize.experts.expert_parallel import dense_layers

# The implementation of experts that transformers chooses for models with its experts interface.
_GROUPED = SimpleNamespace(_experts_implementation="grouped_mm")


@cache
def _routed_experts() -> Callable[..., nn.Module]:
    """Return the class of a layer's experts with transformers' experts interface.

    Its instances take hidden states [tokens, hidden], expert indices and weights of the results,
    both [tokens, top_k], and return the sums [tokens, hidden].
    """
    from transformers.integrations.moe import use_experts_implementation

    class RoutedExperts(nn.Module):
        """Weights of a `Llama4TextExperts`: [experts, hidden, 2 * features] and its transpose."""

        def __init__(self, _: Any, experts: Any) -> None:
            super().__init__()
            self.num_experts = experts.num_experts
            self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
            self.act_fn = experts.act_fn

        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            raise AssertionError("transformers replaces it by its implementation")

    return use_experts_implementation(RoutedExperts, is_transposed=True)


def route_tokens(model: nn.Module) -> None:
    """Send the tokens of each layer of Llama 4 to the experts that its router chooses."""
    for name, experts in dense_layers(model).items():
        block: Any = model.get_submodule(name.rpartition(".")[0])
        block.experts = _routed_experts()(_GROUPED, experts)
        block.forward = MethodType(_routed, block)


def _routed(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a block of Llama 4, with the result of its `forward` in transformers."""
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = functional.linear(hidden, block.router.weight, block.router.bias)
    chosen, index = torch.topk(logits, block.top_k, dim=-1)
    # The score weighs the token, not the expert's result.
    rows = hidden.unsqueeze(1) * torch.sigmoid(chosen.float()).to(hidden.dtype).unsqueeze(-1)
    routed = block.experts(
        rows.flatten(0, 1), index.reshape(-1, 1), torch.ones_like(chosen).reshape(-1, 1)
    )
    output = block.shared_expert(hidden)
    return output.add_(routed.view(*chosen.shape, -1).sum(dim=1)), logits
