"""FSDP2 training of a Llama-shaped model with random weights, in torchrun style.

torchrun --nproc-per-node 4 examples/train_llama_fsdp.py --shape 8b --layers 4 --seq 4096
capture run examples/train_llama_fsdp.py --dp 4 -o trace.et -- --shape 8b --layers 4 --seq 4096

`--mixed --recompute --compile` make of it what large jobs run: fp32 weights that are gathered in
bfloat16, layers that are computed again in the backward, each layer compiled.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_llama import SHAPES
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mixed", action="store_true", help="fp32 weights, bf16 computation")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = LlamaConfig(
        num_hidden_layers=args.layers, max_position_embeddings=args.seq, **SHAPES[args.shape]
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.float32 if args.mixed else torch.bfloat16)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.mixed else None, reduce_dtype=torch.float32
    )
    layers = model.model.layers
    for place in range(len(layers)):
        if args.recompute:
            layers[place] = checkpoint_wrapper(layers[place])
        if args.compile:
            layers[place].compile()
        fully_shard(layers[place], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.mixed or None)

    for step in range(args.steps):
        tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        if args.mixed:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
