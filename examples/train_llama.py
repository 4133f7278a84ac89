"""A plain single-GPU training loop for a Llama-shaped model with random weights.

Nothing here knows of onerank or of any parallelism; nothing is downloaded.

    python examples/train_llama.py                                    # small, runs anywhere
    python examples/train_llama.py --shape 8b --layers 4 --seq 4096   # on a GPU
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(
        num_hidden_layers=args.layers,
        max_position_embeddings=args.seq,
        attn_implementation=args.attention,
        **SHAPES[args.shape],
    )
    with torch.device(device):  # a GPU draws the weights much faster than a CPU
        model = LlamaForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step in range(args.steps):
        for micro_batch in range(args.accumulate):
            tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq), device=device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            if micro_batch == 0:
                optimizer.zero_grad()
            loss.backward()  # summed, not averaged: AdamW does not mind the scale
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
