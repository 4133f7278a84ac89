"""Fused attention of a layer, forward and backward, by cuDNN and FlashAttention."""

from collections.abc import Iterator

from onerank.capture.bench.call import BenchCall, Operand
from onerank.capture.bench.models import Model


def attention(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield causal attention of one sequence, and of shorter ones with as many tokens."""
    heads, keys = model.heads // tp, max(1, model.key_heads // tp)
    for batch in (1, 2, 4):
        if tokens // batch >= 1024:
            yield from _cudnn(batch, heads, keys, tokens // batch, model.head)
    yield from _flash(1, heads, keys, tokens, model.head)


def _cudnn(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    """Operands [b, h, s, d] as views of [b, s, h, d], as a model's projections leave them."""
    query = Operand((batch, heads, length, head)).swapped(1, 2)
    key = Operand((batch, keys, length, head)).swapped(1, 2)
    scale = head**-0.5
    yield BenchCall(
        "aten::_cudnn_attention_forward",
        (query, key, key, None, None, None, length, length, True, 0.0, True, False, scale),
    )
    sums = Operand((batch, heads, length, 1), "float32")
    seed = Operand((), "int64")
    yield BenchCall(
        "aten::_cudnn_attention_backward",
        (query, query, key, key, query, sums, seed, seed, None, None, None, length, length, 0.0,
         True, scale),
    )  # fmt: skip


def _flash(batch: int, heads: int, keys: int, length: int, head: int) -> Iterator[BenchCall]:
    query, key = Operand((batch, length, heads, head)), Operand((batch, length, keys, head))
    scale = head**-0.5
    yield BenchCall(
        "aten::_flash_attention_forward",
        (query, key, key, None, None, length, length, 0.0, True, False, scale),
    )
    sums = Operand((batch, heads, length), "float32")
    seed, unused = Operand((2,), "int64"), Operand((), "int64")
    yield BenchCall(
        "aten::_flash_attention_backward",
        (query, query, key, key, query, sums, None, None, length, length, 0.0, True, seed, unused,
         scale),
    )  # fmt: skip
