"""The training loop of `onerank plan` for a transformers configuration: random weights and tokens.

python -m onerank.plan.train_model llama-70b/config.json --seq 8192
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AutoConfig, AutoModelForCausalLM

ATEN = torch.ops.aten
SAVED = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose outputs a selective recomputation keeps: products with weights, fused attention.
All others run again: unfused attention, norms, activations, collectives."""

RECOMPUTE = {
    "none": "keep all activations",
    "attention": "recompute unfused attention, as Megatron-LM's selective recomputation",
    "selective": "keep products with weights and fused attention, as torchtitan's 'op' option",
    "full": "keep the inputs of layers",
}


def main() -> None:
    """Train a causal language model for a number of steps with AdamW."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="config.json of a transformers model, or its directory")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none",
        help="; ".join(f"{name}: {meaning}" for name, meaning in RECOMPUTE.items()),
    )  # fmt: skip
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
    previous = "none"
    for step in args.vary or [same] * args.steps:
        micro_batches, micro_batch, recompute = step.split(":")
        if recompute != previous:
            set_recomputation(model, recompute)
        previous = recompute
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


def set_recomputation(model: Any, recompute: str) -> None:
    """Let a model recompute activations from now on, as `RECOMPUTE` says."""
    if recompute not in RECOMPUTE:
        sys.exit(f"recompute is '{recompute}'; expected one of: {', '.join(RECOMPUTE)}")
    modeling = sys.modules[type(model).__module__]
    attention = getattr(modeling, "eager_attention_forward", None)
    if recompute == "attention":
        used = model.config._attn_implementation
        if used != "eager" or attention is None:
            sys.exit(f"--recompute attention: the model uses {used}, whose backward recomputes "
                     'scores in any case; "attn_implementation": "eager" in its configuration '
                     "selects unfused attention")  # fmt: skip
        modeling.eager_attention_forward = partial(checkpoint, attention, use_reentrant=False)
    elif isinstance(attention, partial):
        (modeling.eager_attention_forward,) = attention.args
    if recompute in ("selective", "full"):
        how: dict[str, Any] = {"use_reentrant": False}
        if recompute == "selective":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        model.gradient_checkpointing_enable(how)
    elif model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()


def _policy(_context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


if __name__ == "__main__":
    main()
