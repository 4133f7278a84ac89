"""A training step of a published configuration, at a size that a CPU can run.

    onerank capture run benchmarks/no_device/published_step.py -o step.et -- \
        MODEL DTYPE LAYERS BATCH

MODEL is one of `GPTS` or of the images' models, DTYPE float32 or bfloat16 (autocast), LAYERS of
a GPT alone. The sequence is 40 tokens, an image 224 x 224.
"""

import sys
from typing import Any

import torch
from torch import nn

GPTS = {  # width, heads, vocabulary; without biases, head tied to the embedding
    "nanogpt-124m": (768, 12, 50304),
    "mpt-125m": (768, 12, 50368),
    "mpt-350m": (1024, 16, 50368),
    "mpt-760m": (1536, 12, 50368),
    "mpt-1b": (2048, 16, 50368),
    "mpt-3b": (2560, 20, 50368),
    "mpt-7b": (4096, 32, 50368),
    "mpt-13b": (5120, 40, 50368),
}
SEQUENCE = 40
LONGEST = 4096


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, heads: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def images(name: str) -> nn.Module:
    import transformers as hf

    kinds: dict[str, Any] = {
        "resnet50": (hf.ResNetForImageClassification, hf.ResNetConfig(layer_type="bottleneck")),
        "vit-b16": (hf.ViTForImageClassification, hf.ViTConfig()),
        "convnext-tiny": (hf.ConvNextForImageClassification, hf.ConvNextConfig()),
    }
    kind, config = kinds[name]
    config.num_labels = 1000
    return kind(config).to(memory_format=torch.channels_last)


def main() -> None:
    name, dtype, layers, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.manual_seed(0)
    model = Gpt(*GPTS[name], layers) if name in GPTS else images(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    while True:
        if name in GPTS:
            tokens = torch.randint(0, GPTS[name][2], (batch, SEQUENCE))
            given: dict[str, Any] = {"tokens": tokens, "labels": tokens}
        else:
            x = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
            given = {"pixel_values": x, "labels": torch.randint(0, 1000, (batch,))}
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            made = model(**given)
            loss = made if name in GPTS else made.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
