"""The training loop of `onerank plan` for a transformers configuration: random weights and tokens.

python -m onerank.plan.train_model llama-70b/config.json --seq 8192
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Train a causal language model for a number of steps with AdamW."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="config.json of a transformers model, or its directory")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="MICRO_BATCHES:MICRO_BATCH:RECOMPUTE",
        help="of each step, instead of the same for all",
    )  # fmt: skip
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(args.config)
    model = AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    same = f"{args.micro_batches}:{args.micro_batch}:{args.recompute}"
    recomputes = False
    for step in args.vary or [same] * args.steps:
        micro_batches, micro_batch, recompute = step.split(":")
        if recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif recomputes:
            model.gradient_checkpointing_disable()
        recomputes = recompute == "full"
        for _ in range(int(micro_batches)):
            shape = int(micro_batch), args.seq
            tokens = torch.randint(0, config.vocab_size, shape, device=device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / int(micro_batches)).backward()
        # The next step begins with the optimizer's, and finds nothing whose size depends on the
        # micro-batch of this one.
        del tokens, loss
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
