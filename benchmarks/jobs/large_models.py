"""A plain single-GPU training loop for models of 70 to 671 billion parameters, random weights.

    onerank capture run benchmarks/jobs/large_models.py --device none --tp 8 -- llama-70b

Only a capture without a device runs it: no GPU holds these models.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

LLAMA = {
    # hidden size, MLP size, query heads, key heads (Llama 3, arXiv:2407.21783, table 3)
    "llama-70b": (8192, 28672, 64, 8, 80),
    "llama-405b": (16384, 53248, 128, 8, 126),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=[*LLAMA, "deepseek-v3"])
    parser.add_argument("--layers", type=int, help="default: those of the model")
    parser.add_argument("--seq", type=int, default=8192)
    args = parser.parse_args()
    if args.model in LLAMA:
        hidden, intermediate, heads, key_heads, layers = LLAMA[args.model]
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            num_hidden_layers=args.layers or layers,
            vocab_size=128256,
            max_position_embeddings=args.seq,
        )
    else:
        # The defaults are those of DeepSeek-V3 671B: 61 layers, 256 experts.
        config = DeepseekV3Config(max_position_embeddings=args.seq)
        config.num_hidden_layers = args.layers or config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(20):
        tokens = torch.randint(0, config.vocab_size, (1, args.seq), device="cuda")
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
