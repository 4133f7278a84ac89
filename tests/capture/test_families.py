"""Slices of recent families of transformers' models, held against the whole model."""

from typing import Any

import pytest
import torch
import transformers

from onerank.capture import Options
from onerank.capture.slices import compare_slices
from onerank.ir import World
from onerank.ir.errors import SliceError

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
          "topk_group": 1}  # fmt: skip
LATENT = {**ROUTED, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "q_lora_rank": 16,
          "kv_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8}  # fmt: skip
LINEAR = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": LATENT,
    "DiffLlama": {},
    "Ernie4_5": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "Glm4Moe": {**ROUTED, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Granite": {},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4Text": {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 64,
                   "moe_layers": [1], "attention_chunk_size": 8},
    "Olmo": {},
    "Olmo3": {"sliding_window": 5},
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {},
    "Phimoe": {"num_local_experts": 4},
    "Qwen3Next": LINEAR,
    "SmolLM3": {},
}  # fmt: skip
TENSOR, STAGES = {"tp": 2}, {"pp": 2}
SHARED = {"dp": 2, "ep": 2}
AGREE = [
    ("DeepseekV3", {"tp": 2, "dp": 2, "ep": 2}),
    ("DeepseekV3", STAGES),
    ("Ernie4_5", TENSOR),
    ("Gemma2", TENSOR),
    ("Gemma2", STAGES),
    ("Glm4Moe", TENSOR),
    ("Glm4Moe", SHARED),
    ("GptOss", {"tp": 2, "dp": 2, "ep": 2}),  # a sink per head, experts with biases
    ("GptOss", STAGES),
    ("Granite", TENSOR),
    ("GraniteMoe", TENSOR),  # whose plan leaves attention out
    ("Llama4Text", STAGES),  # asks the embedding where its weights are
    ("Llama4Text", TENSOR),  # whose experts compute every token
    ("Llama4Text", {"cp": 2}),
    ("Olmo", TENSOR),
    ("Olmo", STAGES),  # whose final norm has no weights
    ("Olmo3", TENSOR),
    ("Olmo3", {"cp": 2}),
    ("Phi", STAGES),  # drops out what it embeds by a module behind its layers
    ("Phi3", TENSOR),
    ("Phimoe", {"tp": 2, "dp": 2, "ep": 2}),
    ("Qwen3Next", TENSOR),  # gathers all round its linear attention
    ("Qwen3Next", SHARED),
    ("Qwen3Next", STAGES),  # a cache of another sort for each layer
    ("SmolLM3", TENSOR),
]


def model(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **FAMILIES[kind]})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def compared(kind: str, sizes: dict[str, int]) -> Any:
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    options = Options(world=World.of(**sizes), moe_routing="model")
    rows, why_not, _ = compare_slices(
        model(kind), (), {"input_ids": ids, "labels": ids}, options, lambda _: None
    )
    assert not why_not
    return rows


@pytest.mark.parametrize(("kind", "sizes"), AGREE)
def test_slices_agree_with_the_whole(kind, sizes):
    rows = compared(kind, sizes)
    assert not [row for row in rows if row.breaches]
    assert {row.what for row in rows} >= {"loss", "gradients", "weights"}


@pytest.mark.parametrize(
    ("kind", "sizes", "why"),
    [
        ("DiffLlama", TENSOR, r"self_attn has parameters between the sliced layers"),
        ("Llama4Text", SHARED, r"has 2 experts, but not in the fused form"),
        ("Qwen3Next", {"cp": 2}, r"has layers of linear_attention"),
    ],
)
def test_what_is_not_known_is_refused(kind, sizes, why):
    with pytest.raises(SliceError, match=why):
        compared(kind, sizes)
