"""Generation with a Llama-shaped model with random weights, on a single GPU or a CPU.

Nothing here knows of onerank or of any parallelism; nothing is downloaded.

    python examples/generate_llama.py
    python examples/generate_llama.py --cache static --batch 32 --prompt 2048   # on a GPU
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Generate tokens for random prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    args = parser.parse_args()

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=args.prompt + args.new,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    prompts = torch.randint(3, config.vocab_size, (args.batch, args.prompt), device=device)
    tokens = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=args.new,
        do_sample=False,
        cache_implementation=args.cache if args.cache == "static" else None,
        pad_token_id=0,
    )
    print(f"{tokens.shape[0]} sequences of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    main()
