"""A Llama-shaped model with random weights, trained by DeepSpeed with ZeRO.

torchrun --nproc-per-node 2 benchmarks/jobs/deepspeed_zero.py --zero 3
capture run benchmarks/jobs/deepspeed_zero.py --torchrun --dp 2 -o trace.et -- --zero 3

Needs `pip install deepspeed`; runs on a CPU with DS_ACCELERATOR=cpu.
"""

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    sizes = {"zero": 1, "layers": 8, "hidden": 2048, "ffn": 5632, "heads": 16, "vocab": 32000}
    sizes |= {"seq": 2048, "batch": 4, "micro-batches": 1, "steps": 1000}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    deepspeed.init_distributed()
    settings = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.micro_batches,
        "zero_optimization": {"stage": args.zero},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
    }
    config = LlamaConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=args.zero == 3):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    tokens = torch.randint(args.vocab, (args.batch, args.seq), device=engine.device)
    for step in range(args.steps):
        for _ in range(args.micro_batches):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if step == 0:
            print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
