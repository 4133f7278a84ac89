"""Shapes of current models, from their published configurations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder; `experts` 0: dense. `inner` is of one expert where there are several."""

    name: str
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    experts: int = 0
    chosen: int = 0
    gated: bool = True


MODELS = (
    Model("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Llama-3-70B", 8192, 28672, 64, 8, 128, 128256),
    Model("Qwen3-32B", 5120, 25600, 64, 8, 128, 151936),
    Model("Mixtral-8x7B", 4096, 14336, 32, 8, 128, 32000, 8, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, 128, 8),
    Model("Qwen2.5-7B", 3584, 18944, 28, 4, 128, 152064),
    Model("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 128256),
    Model("GPT-3-175B", 12288, 49152, 96, 96, 128, 50257, gated=False),
    Model("Llama-3.1-405B", 16384, 53248, 128, 8, 128, 128256),
    Model("GPT-2-XL", 1600, 6400, 25, 25, 64, 50257, gated=False),
    Model("Llama-3.2-3B", 3072, 8192, 24, 8, 128, 128256),
)
"""The first are measured first."""
