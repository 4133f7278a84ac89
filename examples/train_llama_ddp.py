"""DDP training of a Llama-shaped model with random weights, in torchrun style.

torchrun --nproc-per-node 4 examples/train_llama_ddp.py --shape 8b --layers 4 --seq 4096
capture run examples/train_llama_ddp.py --dp 4 -o trace.et -- --shape 8b --layers 4 --seq 4096
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    config = LlamaConfig(
        num_hidden_layers=args.layers, max_position_embeddings=args.seq, **SHAPES[args.shape]
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step in range(args.steps):
        tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq), device=device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
