"""Predictions for dtypes, kernels and architectures that the fit has not seen."""

import msgspec
import numpy as np
import pytest
from notes import note_of

from onerank.annotate import load_gpu
from onerank.annotate.models.attention_kernels import attention_tiles, is_known_by_shape
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import MODELS
from onerank.annotate.models.intervals import KINDS, kinds_of, outside, trust_in, widening
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.passes.swap_kernels import swap_unmeasured_attention
from tools.fit.measured_kernels import Attention, Products, of_attention, of_products

H100, B200, V100, RTX = (load_gpu(name) for name in ("H100", "B200", "V100", "RTX-PRO-6000"))


def attention(rows: float, heads: float = 32, key_heads: float = 4):
    shapes = np.array([[4, heads, key_heads, rows, 4096, 128, 128, 1, 0]], dtype=float)
    return of_attention(Attention(shapes, {}), np.ones(1))


def products(dtype: str, size: float = 4096, item: float = 4):
    shapes = np.array([[1, size, size, size, item, max(item, 2)]])
    return of_products(Products(dtype, shapes, {}), np.ones(1))


def kind(kernels, source, target) -> str:
    predict = predict_from_description if source is None else predict_learned
    gpus = (target,) if source is None else (source, target)
    return KINDS[kinds_of(kernels, predict(kernels, *gpus), source, target)[0]]


def test_blackwell_packs_the_heads_of_single_queries_only():
    """Eight heads share a key head: 16 queries fill one tile of 128 if packed, else eight."""
    assert attention_tiles(H100, attention(16).attention).item() == 4 * 4
    assert attention_tiles(B200, attention(16).attention).item() == 4 * 32
    assert attention_tiles(B200, attention(1).attention).item() == 4 * 4


def test_attention_without_a_measured_kernel_is_slower_and_less_certain():
    c = shipped()
    assert (is_known_by_shape(H100), is_known_by_shape(RTX)) == (True, False)
    alone = msgspec.structs.replace(c, other_attention=1.0)
    slow, fast = (predict_from_description(attention(4096), RTX, each)[0] for each in (c, alone))
    assert slow / fast == pytest.approx(1.5)
    assert kind(attention(4096), None, RTX) == "attention_other"
    assert kind(attention(4096), None, H100) == "attention_unmeasured"
    assert c.errors["attention_other"].high > 1.3 * c.errors["attention_unmeasured"].high


@pytest.mark.parametrize(
    ("target", "slower"),
    [("RTX-PRO-6000", 1.5), ("TPU-v5p", 1.5), ("MI300X", 1.0), ("H100", 1.0)],
)
def test_attention_without_a_figure_is_slower_on_gpus_of_any_vendor(target, slower):
    """AMD's kernels have published figures, which are applied to the time by their shape."""
    gpu, c = load_gpu(target), shipped()
    equal = msgspec.structs.replace(c, other_attention=1.0)
    slow, fast = (predict_from_description(attention(4096), gpu, each)[0] for each in (c, equal))
    # Far from the fitted GPUs, part of the prediction is the residual model's.
    assert slow / fast == pytest.approx(slower ** trust_in(gpu, c))


def test_a_named_kernel_without_a_figure_is_noted():
    """A capture without a device names the kernel: one of an A100 has no figure, an H100's has."""
    operators = ["aten::_efficient_attention_forward"]

    def swapped(gpu):
        predicted = predict_from_description(attention(4096), gpu)
        times, notes = swap_unmeasured_attention(
            attention(4096), predicted, gpu, MODELS["learned"], "usual", operators
        )
        return (times / predicted[0]).item(), notes

    factor, notes = swapped(load_gpu("A100"))
    assert factor == 1
    note_of(notes, "attention-kernel-without-figure", 1, "efficient", "A100-SXM-80GB", "ampere")
    factor, notes = swapped(H100)
    assert factor == pytest.approx(3.55, rel=0.01)
    note_of(notes, "attention-kernel-assumed", 1, "efficient", "H100-SXM")


def test_an_unseen_architecture_is_no_nearer_than_a_left_out_family():
    c = shipped()
    assert outside(RTX, c) < 0.3  # each figure is near those of some fitted GPU
    assert widening(RTX, c, "gemm") == pytest.approx(1.2)
    assert widening(B200, c, "gemm") == 1
    assert widening(V100, c, "product") == 1  # fp32 products are as near as on an H100


def test_kinds_name_what_is_known():
    assert kind(products("float32"), None, H100) == "product_unmeasured"
    assert kind(products("float32"), V100, H100) == "product"
    assert kind(products("bfloat16", item=2), None, H100) == "gemm_unmeasured"
    assert kind(products("bfloat16", size=128, item=2), None, H100) == "gemm_unmeasured_short"
    eight = products("float8_e4m3fn", item=1)
    assert kind(eight, None, H100) == "gemm_8bit_unmeasured"
    assert kind(eight, load_gpu("H200"), H100) == "gemm_8bit_same_die"
    assert kind(eight, B200, H100) == "gemm_8bit"


def test_fp32_products_run_at_the_rate_of_vector_units():
    """2 x 4096^3 FLOPs at 0.759 of 67 TFLOPS take 2.70 ms; the tiles make it 2.93 ms."""
    (predicted_ns,) = predict_from_description(products("float32"), H100)[0]
    assert predicted_ns == pytest.approx(2.93e6, rel=0.01)


def test_eight_bit_kernels_of_an_unmeasured_architecture_have_the_mean():
    c = shipped()
    mean = c.eight_bit_on(RTX)
    floors = [each.floor for each in c.eight_bit.values()]
    assert mean.floor == pytest.approx(np.exp(np.mean(np.log(floors))))
    assert c.eight_bit_on(B200) == c.eight_bit["blackwell"]


def test_blackwells_attention_has_a_longer_floor():
    c = shipped()
    assert c.attention_on(H100) == c.attention
    assert c.attention_on(B200).floor == c.attention.floor * c.attention_floor["blackwell"]
