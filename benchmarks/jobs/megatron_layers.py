r"""Two layers of a GPT as one rank of Megatron-LM's tensor parallelism computes them.

    onerank capture run benchmarks/jobs/megatron_layers.py --device none --like A100 \
        -o 1024-4-2.et -- --hidden 1024 --micro-batch 4 --tp 2

Attention is not fused, and dropout is on, as in Megatron-DeepSpeed of 2022. Collectives are absent.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 51200
SEQUENCE = 1024


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, tp: int) -> None:
        super().__init__()
        self.heads = heads // tp
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden // tp)
        self.out = nn.Linear(hidden // tp, hidden)
        self.up = nn.Linear(hidden, 4 * hidden // tp)
        self.down = nn.Linear(4 * hidden // tp, hidden)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=2)
        q, k, v = (p.reshape(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        shares = functional.dropout(scores.masked_fill(mask, -1e4).softmax(3), 0.1)
        y = self.out((shares @ v).transpose(1, 2).reshape(batch, length, -1))
        x = x + functional.dropout(y, 0.1)
        y = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(y, 0.1)


class Gpt(nn.Module):
    def __init__(self, hidden: int, heads: int, tp: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY // tp, hidden)
        self.positions = nn.Embedding(SEQUENCE, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, tp) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(SEQUENCE, device=tokens.device)
        x = functional.dropout(self.tokens(tokens) + self.positions(places), 0.1)
        for layer in self.layers:
            x = layer(x, mask)
        logits = functional.linear(self.norm(x), self.tokens.weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main() -> None:
    """Train for two steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    args = parser.parse_args()
    model = Gpt(args.hidden, args.heads, args.tp).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = args.micro_batch, SEQUENCE
    tokens = torch.randint(VOCABULARY // args.tp, shape, device="cuda")
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
    for _ in range(20):
        model(tokens, mask).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
