"""A plain single-GPU training loop for a Mixtral-shaped model with random weights.

Nothing here knows of onerank or of any parallelism; nothing is downloaded.

    python examples/train_mixtral.py                                    # small, runs anywhere
    python examples/train_mixtral.py --shape 8x7b --layers 2 --seq 4096   # on a GPU
"""

import argparse

import torch
from transformers import MixtralConfig, MixtralForCausalLM

SHAPES = {
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "8x7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = MixtralConfig(
        num_hidden_layers=args.layers,
        num_local_experts=args.experts,
        max_position_embeddings=args.seq,
        **SHAPES[args.shape],
    )
    with torch.device(device):  # a GPU draws the weights much faster than a CPU
        model = MixtralForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step in range(args.steps):
        tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
