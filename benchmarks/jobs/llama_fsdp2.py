"""Llama 3.1 under FSDP2, with the choices of torchtitan at commit 9dec370 (December 2024).

    onerank capture run benchmarks/jobs/llama_fsdp2.py --torchrun --dp N --device none --like GPU
        -o trace.et -- --batch 2

Matched choices: a block and the root sharded each, bf16 parameters and fp32 reductions, the last
block not resharded after its forward, selective checkpointing that recomputes every second matrix
product, rotary embedding in complex numbers, eager RMSNorm, float32 loss, gradient clipping, AdamW
with the implementation that torch chooses. Tokens are random. The code is not torchtitan's.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, HEADS, KV_HEADS, FFN, LAYERS, VOCABULARY = 4096, 32, 8, 14336, 32, 128256
SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


def repeated(x: Tensor) -> Tensor:
    """Repeat each head of keys or values for its group of query heads."""
    batch, length, heads, size = x.shape
    groups = HEADS // KV_HEADS
    wide = x[:, :, :, None, :].expand(batch, length, heads, groups, size)
    return wide.reshape(batch, length, heads * groups, size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv_width = WIDTH // HEADS * KV_HEADS
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, kv_width, bias=False)
        self.v = nn.Linear(WIDTH, kv_width, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, WIDTH // HEADS)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        q, k, v = (part.transpose(1, 2) for part in (q, repeated(k), repeated(v)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).contiguous().view(batch, length, -1))
        normed = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    angles: Tensor

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        shape = (length, WIDTH // HEADS // 2)
        self.register_buffer("angles", torch.empty(shape, dtype=torch.complex64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


def checkpoint_contexts() -> Any:
    products: Counter[bool] = Counter()

    def policy(context: Any, function: Callable[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
        if function is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return (
            CheckpointPolicy.MUST_SAVE if function in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def sharded(model: Llama) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(
            layer, context_fn=checkpoint_contexts, preserve_rng_state=False
        )
        model.layers[index] = wrapped
        # FSDP would prefetch the last block for its backward at once.
        last = index == len(model.layers) - 1
        fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=LAYERS)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = Llama(args.layers, args.seq)
    sharded(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    shape = (args.batch, args.seq)
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, shape, device="cuda")
        labels = torch.randint(VOCABULARY, shape, device="cuda")
        optimizer.zero_grad()
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits  # otherwise kept through the backward
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


if __name__ == "__main__":
    main()
