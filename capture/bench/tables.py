"""Embedding, loss and optimizer: what a step does outside of its layers."""

from collections.abc import Iterator

from onerank.capture.bench.call import BenchCall, Operand
from onerank.capture.bench.models import Model
from onerank.capture.bench.products import linear

BF16, FP32 = "bfloat16", "float32"
_MEAN, _IGNORED = 1, -100


def head(model: Model, tp: int, tokens: int) -> Iterator[BenchCall]:
    """Yield the output product and the cross-entropy of its logits in float32."""
    words = model.vocabulary // tp
    yield from linear(tokens, model.hidden, words)
    narrow, wide = Operand((tokens, words)), Operand((tokens, words), FP32)
    target, one = Operand((tokens,), "int64"), Operand((), FP32)
    yield BenchCall("aten::copy_", (wide, narrow, False))
    yield BenchCall("aten::copy_", (narrow, wide, False))
    yield BenchCall("aten::_log_softmax", (wide, 1, False))
    yield BenchCall("aten::_log_softmax_backward_data", (wide, wide, 1, 6))
    yield BenchCall("aten::nll_loss_forward", (wide, target, None, _MEAN, _IGNORED))
    yield BenchCall("aten::nll_loss_backward", (one, wide, target, None, _MEAN, _IGNORED, one))
    rows = Operand((tokens, 1), FP32)
    yield BenchCall("aten::max", (wide, -1, False))
    yield BenchCall("aten::sum", (wide, (-1,), False, None))
    yield BenchCall("aten::sub_", (wide, rows, 1))
    yield BenchCall("aten::div_", (wide, rows))
    yield BenchCall("aten::mul_", (wide, rows))
    yield BenchCall("aten::exp", (wide, wide), same=((1, 0),))


def embedding(model: Model, tokens: int) -> Iterator[BenchCall]:
    """Yield the look-up of rows, its gradient, and moving rows between tokens and experts."""
    table, made = Operand((model.vocabulary, model.hidden)), Operand((tokens, model.hidden))
    index = Operand((tokens, model.hidden), "int64", strides=(1, 0))
    yield BenchCall("aten::gather", (table, 0, index, False, made))
    yield BenchCall("aten::embedding_dense_backward",
                    (made, Operand((tokens,), "int64"), model.vocabulary, -1, False))  # fmt: skip
    yield BenchCall("aten::fill_", (table, 0))
    if model.experts:
        routed = tokens * model.chosen
        rows = Operand((routed, model.hidden))
        which = Operand((routed,), "int64")
        yield BenchCall("aten::index", (made, (which,)))
        yield BenchCall("aten::index_add_", (made, 0, which, rows, 1))
        scores = Operand((tokens, model.experts), FP32)
        yield BenchCall("aten::_softmax", (scores, -1, False))
        yield BenchCall("aten::topk", (scores, model.chosen, -1, True, True))
        yield BenchCall("aten::sort", (which, True, -1, False))


def optimizer(model: Model, tp: int) -> Iterator[BenchCall]:
    """Yield Adam over the parameters of one layer: fused, and as a list of simple operators."""
    sizes = _parameters(model, tp)
    for dtype in (BF16, FP32):
        all_of = tuple(Operand(size, dtype) for size in sizes)
        steps = tuple(Operand((), FP32) for _ in sizes)
        yield BenchCall(
            "aten::_fused_adamw_",
            (all_of, all_of, all_of, all_of, (), steps, 1e-4, 0.9, 0.95, 0.1, 1e-8, False, False,
             None, None),
        )  # fmt: skip
        scalars = (1.0000001,) * len(sizes)
        yield BenchCall("aten::_foreach_mul_", (all_of, 0.999999))
        yield BenchCall("aten::_foreach_lerp_", (all_of, all_of, 0.1))
        yield BenchCall("aten::_foreach_addcmul_", (all_of, all_of, all_of, 1e-3), same=((2, 1),))
        yield BenchCall("aten::_foreach_sqrt", (all_of,))
        yield BenchCall("aten::_foreach_div_", (all_of, scalars))
        yield BenchCall("aten::_foreach_add_", (all_of, 1e-8))
        yield BenchCall("aten::_foreach_addcdiv_", (all_of, all_of, all_of, scalars))


def _parameters(model: Model, tp: int) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's parameters on one of `tp` ranks."""
    width, keys = model.heads * model.head // tp, max(1, model.key_heads // tp) * model.head
    inner, hidden = model.inner // tp, model.hidden
    found: list[tuple[int, ...]] = [(width, hidden), (keys, hidden), (keys, hidden),
                                    (hidden, width)]  # fmt: skip
    if model.experts:
        found += [(model.experts, 2 * model.inner, hidden), (model.experts, hidden, model.inner),
                  (model.experts, hidden)]  # fmt: skip
    else:
        found += [(inner, hidden)] * (2 if model.gated else 1) + [(hidden, inner)]
    return [*found, (hidden,), (hidden,)]
