"""Training of Llama layers whose linear layers are torchao's float8, compiled layer by layer.

    python benchmarks/jobs/llama_float8.py --recipe tensorwise --layers 4 --batch 2
    capture run benchmarks/jobs/llama_float8.py -o trace.et -- --recipe tensorwise --shards 8

The layers are those of torchtitan's Llama 3 8B, on one GPU and without embedding and head:
fp32 weights, bf16 activations, causal attention by FlashAttention, torch.compile of each layer,
fused AdamW. `--shards N` gives attention and MLP the heads and the width that a rank of N has under
tensor parallelism, without its communication. `--seconds S` trains for S seconds and prints the
step by CUDA events, and the GPU's median clock and mean power (needs onerank and nvidia-ml-py).
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128


class Layer(nn.Module):
    """A transformer layer of one rank of `shards`."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = HEADS // shards, KV_HEADS // shards
        self.wq = nn.Linear(HIDDEN, self.heads * HEAD, bias=False)
        self.wk = nn.Linear(HIDDEN, self.kv_heads * HEAD, bias=False)
        self.wv = nn.Linear(HIDDEN, self.kv_heads * HEAD, bias=False)
        self.wo = nn.Linear(self.heads * HEAD, HIDDEN, bias=False)
        self.w1 = nn.Linear(HIDDEN, WIDTH // shards, bias=False)
        self.w2 = nn.Linear(WIDTH // shards, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, WIDTH // shards, bias=False)
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.ffn_norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        h = self.attention_norm(x)
        q = rotated(self.wq(h).view(batch, seq, self.heads, HEAD), cos, sin)
        k = rotated(self.wk(h).view(batch, seq, self.kv_heads, HEAD), cos, sin)
        v = self.wv(h).view(batch, seq, self.kv_heads, HEAD)
        repeats = self.heads // self.kv_heads
        k, v = (each.repeat_interleave(repeats, dim=2) for each in (k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
        x = x + self.wo(o.transpose(1, 2).reshape(batch, seq, -1))
        h = self.ffn_norm(x)
        return x + self.w2(functional.silu(self.w1(h)) * self.w3(h))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [batch, seq, heads, head] with rotary positions; cos and sin are [seq, head / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=("bf16", "tensorwise", "rowwise"), default="bf16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--bf16-weights", action="store_true", help="needed by rowwise scales")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.ModuleList(Layer(args.shards) for _ in range(args.layers))
        angle = torch.outer(torch.arange(args.seq), 5e5 ** -(torch.arange(0, HEAD, 2) / HEAD))
    if args.bf16_weights:
        layers.bfloat16()
    if args.recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(args.recipe)
        convert_to_float8_training(layers, config=config)
    for layer in layers:
        layer.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-5, fused=True)
    x = torch.randn(args.batch, args.seq, HIDDEN, device=device, dtype=torch.bfloat16)
    cos, sin = angle.cos(), angle.sin()

    def step() -> None:
        h = x
        with torch.autocast(device, torch.bfloat16, enabled=not args.bf16_weights):
            for layer in layers:
                h = layer(h, cos, sin)
        h.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if args.seconds:
        report(f"{args.recipe}, shards {args.shards}, batch {args.batch}", step, args.seconds)
        return
    for _ in range(args.steps):
        step()


def report(name: str, step: Callable[[], None], seconds: float) -> None:
    """Run a step for some seconds and print its time, and the GPU's clock and power."""
    from onerank.capture.profiling.nvml import Board

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    with Board().power() as power:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
            events[0].record()
            for event in events[1:]:
                step()
                event.record()
            torch.cuda.synchronize()
            times += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    # Clock and temperature settle in the first half, which `power` leaves out too.
    settled = times[len(times) // 2 :]
    print(
        f"{name}: step {statistics.median(settled):.3f} ms"
        f" (first half {statistics.median(times[: len(times) // 2]):.3f}),"
        f" {power.sm_clock_mhz or math.nan:.0f} MHz, {power.watts or math.nan:.0f} W,"
        f" peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
