"""Llama 4's experts in a served step: those that the router chose, with the model's results."""

import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from onerank.capture.parallelize.experts.expert_parallel import dense_layers, expert_layers
from onerank.capture.serving.routed_experts import route_tokens


def _layer(top_k: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=top_k
    )
    layer = Llama4TextMoe(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return torch.nn.ModuleDict({"feed_forward": layer})


@torch.no_grad()
def test_routed_experts_have_the_results_of_experts_that_compute_every_token():
    for top_k in (1, 2):
        model = _layer(top_k)
        tokens = torch.randn(2, 5, 16)
        expected, logits = model["feed_forward"](tokens)

        route_tokens(model)

        result, routed_logits = model["feed_forward"](tokens)
        assert not dense_layers(model)
        assert len(expert_layers(model)) == 1
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(routed_logits, logits)
