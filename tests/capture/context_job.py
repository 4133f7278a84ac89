"""A small model of each family, a batch for it, and a comparison of its slices with the whole."""

from typing import Any

import torch
import transformers

from onerank.capture import Options
from onerank.capture.verify.slice_check import compare_slices

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 24,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 24}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
          "v_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
          "num_hidden_layers": 2}  # fmt: skip
"""Keys of 16 features, values of 8."""
BATCH, SEQUENCE = 2, 24
LEADING_PADDING = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
LEADING_PADDING[0, :5] = 0
TRAILING_PADDING = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
TRAILING_PADDING[1, 17:] = 0
PACKED = {
    "position_ids": torch.stack(
        [torch.arange(SEQUENCE) % 14, torch.cat([torch.arange(n) for n in (7, 8, 9)])]
    ),
    "use_cache": False,  # with a cache transformers ignores packing
}


def packed(*rows: tuple[int, ...]) -> dict[str, Any]:
    """Return a call's arguments for rows packed with sequences of these lengths."""
    positions = [torch.cat([torch.arange(n) for n in row]) for row in rows]
    return {"position_ids": torch.stack(positions), "use_cache": False}


EAGER = {"attn_implementation": "eager"}
SINKS = {**EXPERTS, "head_dim": 8, "sliding_window": 7}
CAPPED = {**EAGER, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8}
CHUNKS = {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 10,
          "moe_layers": [], "layer_types": ["chunked_attention", "full_attention"]}  # fmt: skip


def model(kind: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **QUIET, **changes))


def tokens(seed: int = 1, length: int = SEQUENCE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE["vocab_size"], (BATCH, length), generator=generator)


def compared(
    whole: Any,
    labels: torch.Tensor | None = None,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    input_ids = tokens()
    batch = {
        "input_ids": input_ids,
        "labels": input_ids if labels is None else labels,
        **(more or {}),
    }
    rows, reasons, _ = compare_slices(whole, (), batch, Options(**options), lambda _: None)
    assert not reasons
    return rows
