"""A small encoder with its decoder of each family, and a batch for it."""

from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUIET = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def encoder_decoder(kind: str, layers: int = 2) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (2, 16))
    labels = torch.cat([ids[:, 5:12], torch.full((2, 1), -100)], dim=1)
    each = {"layers": layers, "attention_heads": 4, "ffn_dim": 64}
    shape = {f"{part}_{key}": each[key] for part in ("encoder", "decoder") for key in each}
    shape = {**SHAPE, **shape, **QUIET, "d_model": 32, "decoder_start_token_id": 1}
    if kind == "Whisper":
        config: Any = transformers.WhisperConfig(**shape, num_mel_bins=8, max_source_positions=12)
        one = transformers.WhisperForConditionalGeneration(config)
        return one, {"input_features": torch.randn(2, 8, 24), "labels": labels}
    mask = torch.ones_like(ids).index_fill(1, torch.arange(12, 16), 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if kind in ("Bart", "Marian"):
        config = getattr(transformers, f"{kind}Config")(**shape, decoder_vocab_size=64)
        name = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
        one = getattr(transformers, name)(config)
        one.final_logits_bias.normal_()
        return one, batch
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, **(gated if kind == "MT5" else {}),
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), batch
