"""Predictions for dtypes, kernels and architectures that the fit has not seen."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from notes import note_of

from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import has_figure, is_known_by_shape
from onerank.annotate.models.attention_time import attention_tiles, decode_terms
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import KINDS, kinds_of
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns
from onerank.annotate.models.gpu_distance import distance_from_fitted, tile_model_weight
from onerank.annotate.models.intervals import widening
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.models.prediction_terms import Rule, TermRecord
from onerank.annotate.models.scale_measured import predict_by_residual
from onerank.annotate.models.tile_kernels import TileKernel, scaled_kernels
from onerank.annotate.op_costs.cost_record import Scales
from onerank.annotate.passes.unmeasured_attention import swap_unmeasured_attention
from onerank.ir.arrays import F64
from tools.fit.measured_kernels import (
    Attention,
    Products,
    of_attention,
    of_memory,
    of_products,
)

A100, H100, B200, V100, RTX = (
    load_gpu(name) for name in ("A100", "H100", "B200", "V100", "RTX-PRO-6000")
)


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


def test_heads_wider_than_256_have_tiles_of_half_the_queries():
    narrow, wide = (
        of_attention(
            Attention(np.array([[1, 4, 4, 16, 16, d, d, 1, 0]], dtype=float), {}), np.ones(1)
        )
        for d in (256, 512)
    )
    prefill = np.array([[1, 4, 4, 4096, 4096, 512, 512, 1, 0]], dtype=float)
    assert attention_tiles(H100, prefill).item() == 2 * attention_tiles(
        H100, np.where(prefill == 512, 256, prefill)
    )
    # 16 queries fill one tile of either: the products of both take equally long.
    (narrow_ns,), (wide_ns,) = (predict_from_description(k, H100)[0] for k in (narrow, wide))
    assert wide_ns == pytest.approx(narrow_ns, rel=0.03)


def test_long_memory_bound_kernels_are_surer_on_nvidias_gpus():
    """2, 100 and 800 MB take 1.6, 35 and 279 us on an H100."""
    short, usual, long = (of_memory(np.ones(1), np.array([moved])) for moved in (2e6, 1e8, 8e8))
    assert kind(short, None, H100) == "memory_unmeasured_short"
    assert kind(usual, None, H100) == "memory_unmeasured"
    assert kind(long, None, H100) == "memory_unmeasured_long"
    assert kind(long, None, load_gpu("MI300X")) == "memory_unmeasured"
    errors = shipped().errors
    short, usual, long = (
        errors[f"memory_unmeasured{length}"].high for length in ("_short", "", "_long")
    )
    assert long < min(short, usual) / 2.5


def test_attention_without_a_measured_kernel_is_slower_and_less_certain():
    c = shipped()
    assert (is_known_by_shape(H100), is_known_by_shape(RTX)) == (True, False)
    alone = msgspec.structs.replace(c, other_attention=1.0)
    slow, fast = (predict_from_description(attention(4096), RTX, each)[0] for each in (c, alone))
    floor = c.attention_on(RTX).floor * RTX.launch_floor_ns
    assert (slow - floor) / (fast - floor) == pytest.approx(1.5)
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
    slow, fast = (predict_from_description(attention(32768), gpu, each)[0] for each in (c, equal))
    # Far from the fitted GPUs, part of the prediction is the residual model's.
    assert slow / fast == pytest.approx(slower ** tile_model_weight(gpu, c), rel=1e-3)


def test_a_named_kernel_without_a_figure_is_noted():
    """A capture without a device names the kernel: an A100 and an RTX have no figure of it."""
    operators = ["aten::_efficient_attention_forward"]

    def swapped(gpu):
        times, rules = predict_from_description(attention(4096), gpu)
        (slower, of_swap), notes = swap_unmeasured_attention(
            attention(4096), (times, rules), gpu, "usual", operators
        )
        kinds = kinds_of(attention(4096), (slower, of_swap), None, gpu)
        return (slower / times).item(), KINDS[kinds[0]], notes

    factor, kind_of_swap, notes = swapped(load_gpu("A100"))
    assert (factor, kind_of_swap) == (pytest.approx(1.5, rel=0.01), "attention_other")
    note_of(notes, "attention-kernel-without-figure", 1, "efficient", "A100-SXM-80GB", "ampere")
    factor, kind_of_swap, notes = swapped(H100)
    assert (factor, kind_of_swap) == (pytest.approx(3.55, rel=0.01), "attention_unmeasured")
    note_of(notes, "attention-kernel-assumed", 1, "efficient", "H100-SXM")
    # No kernel of the architecture was measured, so its prediction has the factor already.
    factor, kind_of_swap, notes = swapped(RTX)
    assert (factor, kind_of_swap) == (1, "attention_other")
    assert "1 times" not in note_of(notes, "attention-kernel-without-figure", 1, "efficient").text


def test_flash_attention_3_runs_on_hopper_alone():
    """Its time is that of Hopper's usual kernel; any other GPU runs its own usual kernel."""
    operators, kernels = ["flash_attn_3::fwd"], attention(4096)
    for gpu, runs in ((H100, None), (load_gpu("A100"), "flash2"), (B200, "cudnn")):
        predicted = predict_from_description(kernels, gpu)
        (swapped, rules), notes = swap_unmeasured_attention(
            kernels, predicted, gpu, "usual", operators
        )
        assert (swapped, rules) == predicted
        if runs is None:
            assert not notes
        else:
            note_of(notes, "attention-kernel-assumed", 1, runs)
    (flash2, _), _ = swap_unmeasured_attention(
        *(kernels, predict_from_description(kernels, H100), H100, "usual"),
        ["aten::_flash_attention_forward"],
    )
    assert flash2 > 1.3 * predict_from_description(kernels, H100)[0]


def test_kernels_of_an_architecture_left_out_of_the_fit_are_unknown():
    """Blackwell's kernels are not FlashAttention, which other architectures run too."""
    c = shipped()
    without = msgspec.structs.replace(c, attention_floor={})
    slow, rules = predict_from_description(attention(4096), B200, without)
    assert KINDS[kinds_of(attention(4096), (slow, rules), None, B200)[0]] == "attention_other"
    assert has_figure(H100, without)
    assert (has_figure(B200, without), has_figure(B200, c)) == (False, True)


@pytest.mark.parametrize("rows", [4096, 1])
def test_the_kernels_of_an_operator_take_its_time_together(rows: int):
    """CuDNN's backward launches five kernels, a GEMM divided along k two."""
    whole = attention(rows)
    kernels = whole.select(np.zeros(2, dtype=np.int64))
    kernels = replace(kernels, duration_ns=np.array([1e3, 3e3]), operator_ns=np.full(2, 4e3))
    ((whole_ns,), _), record = predict_from_description(whole, H100), TermRecord(np.arange(2))
    times, _ = predict_from_description(kernels, H100, record=record)
    assert times == pytest.approx([whole_ns / 4, whole_ns * 3 / 4])
    assert [record.roots[row].evaluate() for row in range(2)] == pytest.approx(times)


def test_decoding_reads_keys_and_values_from_memory():
    """64 sequences x 4 key heads x 32768 keys x 512 B are 4.29 GB: 1.48 ms at 2.90 TB/s."""
    shapes = np.array([[64, 32, 4, 1, 32768, 128, 128, 0, 0]], dtype=float)
    kernels = of_attention(Attention(shapes, {}), np.ones(1))
    (predicted_ns,), rules = predict_from_description(kernels, H100)
    assert predicted_ns == pytest.approx(1.5e6, rel=0.03)
    assert rules[0] == Rule.DECODE
    assert kind(kernels, None, H100) == "decode_unmeasured"
    short = np.array([[1, 32, 4, 1, 64, 128, 128, 0, 0]], dtype=float)
    of_short = of_attention(Attention(short, {}), np.ones(1))
    assert kind(of_short, None, H100) == "decode_unmeasured_short"
    assert kind(kernels, None, RTX) == "decode_other"
    assert kind(kernels, B200, H100) == "decode"
    assert kind(kernels, load_gpu("H200"), H100) == "attention_same_die"


def test_decoding_by_the_kernel_that_an_operator_names():
    """CuDNN takes 5.1 us for 4 sequences of 128 keys on an H100, FlashAttention-2 8.3."""
    shapes = np.array([[4, 32, 8, 1, 128, 128, 128, 0, 0]] * 3, dtype=float)
    kernels = of_attention(Attention(shapes, {}), np.ones(3))
    operators = ["aten::_cudnn_attention_forward", "aten::_flash_attention_forward", "aten::other"]
    predicted = predict_from_description(kernels, H100)
    ((cudnn, flash2, usual), rules), notes = swap_unmeasured_attention(
        kernels, predicted, H100, "usual", operators
    )
    assert (cudnn, flash2) == (pytest.approx(5141, rel=0.1), pytest.approx(8323, rel=0.1))
    assert usual == predicted[0][2]
    assert rules.tolist() == [Rule.DECODE, Rule.SCHEDULED, Rule.DECODE]
    kinds = kinds_of(kernels, (np.array([cudnn, flash2, usual]), rules), None, H100)
    assert [KINDS[at] for at in kinds[:2]] == ["decode_unmeasured_short", "decode_flash2"]
    assert [note.code for note in notes] == ["attention-kernel-assumed"] * 2


def test_windowed_prefills_of_flash_attention_2():
    """Measured on an H100: 32 heads of 128, window of 4096, 8192 and 16384 tokens; 16 heads of 256.

    The keys are those that a tile of 128 queries sees in the mean; the last number are those that
    the last tile sees. The last call has heads of 64 and a window that hides one key of 8192.
    """
    measured_us = (1519.7, 3321.7, 463.5, 1613.8)
    shapes = np.array([
        [1, 32, 8, 8192, 3200, 128, 128, 0, 0, 4223],
        [1, 32, 8, 16384, 3712, 128, 128, 0, 0, 4223],
        [1, 16, 8, 8192, 1088, 256, 256, 0, 0, 1151],
        [1, 32, 8, 8192, 4224, 64, 64, 0, 0, 8192],
    ], dtype=float)  # fmt: skip
    kernels = of_attention(Attention(shapes, {}), np.ones(4))
    predicted = predict_from_description(kernels, H100)
    (durations, _), _ = swap_unmeasured_attention(
        *(kernels, predicted, H100, "usual"),
        ["aten::_flash_attention_forward"] * 4,
    )
    assert durations == pytest.approx(np.multiply(measured_us, 1e3), rel=0.1)


def test_attention_of_cudnn_with_a_mask():
    """Measured on an H200, alone: heads of 80, which chose no figure, without and with a mask."""
    measured_us = np.array([87.1, 162.0, 282.6, 460.0])
    shapes = np.array([
        [8, 12, 12, 1024, 1024, 80, 80, 0, backward, 0, mask]
        for backward in (0, 1)
        for mask in (0, 1)
    ], dtype=float)  # fmt: skip
    operators = ["aten::_cudnn_attention_forward"] * 2 + ["aten::_cudnn_attention_backward"] * 2
    kernels, gpu = of_attention(Attention(shapes, {}), np.ones(4)), load_gpu("H200")
    predicted = predict_from_description(kernels, gpu)
    (durations, _), _ = swap_unmeasured_attention(kernels, predicted, gpu, "usual", operators)
    assert durations[1::2] / durations[::2] == pytest.approx(
        measured_us[1::2] / measured_us[::2], rel=0.08
    )


def test_decoding_divides_the_keys_of_few_heads_among_sms():
    """One sequence of 8 key heads: 16 parts each occupy 128 of 132 SMs, which halves their keys."""
    c = shipped().decode_on(H100)
    shapes = np.array([[1, 32, 8, 1, keys, 128, 128, 0, 0] for keys in (32768, 65536)], dtype=float)
    terms = decode_terms(H100, shapes, c)
    blocks = np.array([256, 512]) / 16
    cycles = blocks * 2 * 128 * 256 / c.bytes_per_cycle + c.unit_cycles
    assert terms.compute_ns == pytest.approx(cycles * 1e9 / H100.clock_hz)
    assert terms.helper_ns == pytest.approx([c.split_floors * H100.launch_floor_ns] * 2)


def test_flash_attention_2_copies_the_queries_of_groups():
    """With one key head the copies are views, with equal heads there is no group."""
    gpu, c = load_gpu("L40S"), shipped().decode_on(load_gpu("L40S"))
    heads = [(32, 8), (32, 1), (32, 32)]
    shapes = np.array([[64, h, kv, 1, 64, 128, 128, 0, 0] for h, kv in heads], dtype=float)
    floors = decode_terms(gpu, shapes, c).helper_ns / gpu.launch_floor_ns
    assert floors == pytest.approx([c.copy_floors, 0, 0])
    assert decode_terms(H100, shapes, c).helper_ns[0] == 0


def test_latent_attention_reads_keys_once_and_multiplies_128_heads_at_the_gemm_rate():
    """256 sequences x 32768 keys x 1152 B are 9.66 GB: 3.33 ms at 2.90 TB/s of an H100.

    On an H200, 128 heads have 2.34 PFLOP, which take 2.9 ms at 0.80 PFLOP/s, its mean rate.
    """
    shapes = np.array([[256, h, 1, 1, 32768, 576, 512, 0, 0] for h in (16, 128)], dtype=float)
    kernels = of_attention(Attention(shapes, {}), np.ones(2))
    (few, many), rules = predict_from_description(kernels, H100)
    assert few == pytest.approx(3.3e6, rel=0.05)
    assert rules[0] == Rule.DECODE
    (few, many), _ = predict_from_description(kernels, load_gpu("H200"))
    assert many == pytest.approx(2.9e6, rel=0.15)
    # 1.29 times, by the rate of four benchmark sets; by that of one, 0.678 of the peak, 1.31 times.
    assert many > 1.25 * few
    # An A100 has no kernel of latent attention: its kernels read keys and values separately.
    (few, _), _ = predict_from_description(kernels, load_gpu("A100"))
    moved = 2 * 256 * 32768 * (576 + 512)
    assert few == pytest.approx(moved * 1e9 / load_gpu("A100").bandwidth_bytes_per_s, rel=0.2)
    assert kind(kernels, None, load_gpu("A100")) == "latent_other"


def test_short_kernels_take_a_larger_share_of_the_floor_on_blackwell():
    """Hopper's elementwise kernels take 0.35 of its shortest GEMM, a B200's 1.8 times as much."""
    shares = np.array([0.35, 0.77, 1.0, 2.0])
    kernels = replace(of_memory(np.ones(4), np.ones(4)), floor_share=shares)
    h20 = load_gpu("H20")
    assert kernels.floor_ns(h20) == pytest.approx(shares * h20.launch_floor_ns)
    # An H100's and an H200's were measured: they take longer, those of an H200 0.2 us less. 0.77 of
    # the floor becomes the floor at most.
    assert kernels.floor_ns(H100)[:2] == pytest.approx([1220, 2684], abs=2)
    assert kernels.floor_ns(load_gpu("H200"))[:2] == pytest.approx([990, 2427], abs=2)
    assert kernels.floor_ns(H100)[2:] == pytest.approx([2690, 5380])
    assert kernels.floor_ns(B200) / B200.launch_floor_ns == pytest.approx([0.63, 1, 1, 2])


def test_an_unseen_architecture_is_no_nearer_than_a_left_out_family():
    c = shipped()
    assert distance_from_fitted(RTX, c) < 0.3  # each figure is near those of some fitted GPU
    assert widening(RTX, c, "gemm") == pytest.approx(1.2)
    assert widening(B200, c, "gemm") == 1
    assert widening(V100, c, "product") == 1  # fp32 products are as near as on an A100
    # A T4 holds half of its boost clock within 70 W.
    assert widening(load_gpu("T4"), c, "product") == pytest.approx(1 + np.log(0.85 / 0.514))


def test_kinds_name_what_is_known():
    assert kind(products("float32"), None, H100) == "product_unmeasured"
    assert kind(products("float32"), V100, H100) == "product_short"
    assert kind(products("bfloat16", item=2), None, H100) == "gemm_unmeasured"
    assert kind(products("bfloat16", size=128, item=2), None, H100) == "gemm_unmeasured_short"
    eight = products("float8_e4m3fn", item=1)
    assert kind(eight, None, H100) == "gemm_8bit_tensor_unmeasured"
    eight = replace(eight, scales=np.full(1, Scales.ROW, dtype=np.uint8))
    assert kind(eight, None, H100) == "gemm_8bit_unmeasured"
    assert kind(eight, load_gpu("H200"), H100) == "gemm_8bit_same_die"
    assert kind(eight, B200, H100) == "gemm_8bit"
    four = products("float4_e2m1fn_x2", item=0.5625)
    assert kind(four, None, B200) == kind(four, B200, B200) == "gemm_4bit_unmeasured"


def test_values_narrower_than_keys_take_as_long_as_if_they_were_as_wide():
    """TensorRT-LLM's prefill of DeepSeek's heads, 4 prompts of 4096 and 16 heads, on an H100.

    666 us with the kernels that rotate positions and write the cache (aiconfigurator-core 0.12.0).
    """
    sizes = [4, 16, 16, 4096, 4096, 192, 128, 1, 0], [4, 16, 16, 4096, 4096, 192, 192, 1, 0]
    kernels = of_attention(Attention(np.array(sizes, dtype=float), {}), np.ones(2))
    narrow, wide = predict_from_description(kernels, H100)[0]
    assert narrow == pytest.approx(wide, rel=0.01)
    assert narrow == pytest.approx(666e3, rel=0.1)


@pytest.mark.parametrize(
    ("gpu", "width", "value", "expected"),
    [
        (H100, 192, 128, "attention_unmeasured"),
        (A100, 192, 128, "attention_other"),
        (H100, 576, 512, "attention_other"),
        (A100, 128, 128, "attention_unmeasured"),
    ],
)
def test_latent_prefill_without_a_measured_kernel_has_the_wide_interval(
    gpu, width, value, expected
):
    sizes = np.array([[4, 16, 16, 4096, 4096, width, value, 1, 0]], dtype=float)
    assert kind(of_attention(Attention(sizes, {}), np.ones(1)), None, gpu) == expected


def test_batched_fp32_products_of_an_a100_waste_half_of_a_tile():
    """A100-PCIE-40GB, 256 products of m x 1024 x 1024: 4.10 ms for 64 rows (NeuSight).

    All its batched products run in tiles of 128 x 128.
    """
    shapes = np.array([[256, m, 1024, 1024, 4, 4] for m in (64, 128)], dtype=float)
    half, whole = predict_from_description(
        of_products(Products("float32", shapes, {}), np.ones(2)), load_gpu("A100-SXM-40GB")
    )[0]
    assert half > 0.8 * whole
    assert half == pytest.approx(4.10e6, rel=0.1)


def test_fp32_products_run_at_the_rate_of_vector_units():
    """2 x 4096^3 FLOPs at 0.759 of 67 TFLOPS take 2.70 ms; the tiles make it 2.93 ms."""
    (predicted_ns,) = predict_from_description(products("float32"), H100)[0]
    assert predicted_ns == pytest.approx(2.93e6, rel=0.01)


def test_eight_bit_kernels_of_an_unmeasured_architecture_have_one_fit_to_all():
    c = shipped()
    assert c.finely_scaled_on(RTX) == c.finely_scaled_elsewhere
    assert c.finely_scaled_on(B200) == c.finely_scaled["blackwell"]
    # The shortest layers take about as long on every GPU, whatever their launch floors.
    floors_ns = [each.floor_ns for each in c.finely_scaled.values()]
    assert min(floors_ns) < c.finely_scaled_elsewhere.floor_ns < max(floors_ns)


def test_eight_bit_kernels_have_their_own_step():
    c = shipped()
    applied = c.finely_scaled["hopper"].applied(c.gemm)
    narrow = c.finely_scaled["hopper"]
    assert (applied.step_cycles, applied.tile) == (narrow.step_cycles, c.gemm.tile)
    assert applied.asynchronous == c.gemm.asynchronous


def test_one_scale_for_a_tensor_leaves_the_tiles_of_16_bits():
    """The H200's database has 195 us in bf16 and 110 us in fp8 of 4096 x 4096 x 4096."""
    alone = products("float8_e4m3fn", item=1)
    (fast,) = predict_from_description(alone, H100)[0]
    assert fast == pytest.approx(93.0e3, rel=0.01)


def tiles_of(gpu: Gpu, shapes: F64, scale: Scales) -> dict[int, TileKernel]:
    """Return the row of each GEMM with fine scales -> its kernel."""
    c, scales = shipped(), np.full(len(shapes), scale, dtype=np.uint8)
    kernels = scaled_kernels(gpu, shapes, scales, c.gemm, c.finely_scaled_on(gpu))
    return {int(row): kernel for rows, kernel in kernels for row in rows}


def test_kernels_for_scales_of_rows_choose_tiles_by_rows_and_never_divide_k():
    counts = (16, 17, 64, 65, 128, 129, 4096)
    shapes = np.array([[1, m, 256, 16384, 1, 2] for m in counts], dtype=float)
    tiles = tiles_of(H100, shapes, Scales.ROW)
    assert [int(tiles[row].tilings[0].max()) for row in range(7)] == [16, 64, 64, 64, 64, 128, 128]
    assert [tiles[row].cluster for row in range(7)] == [1, 1, 1, 1, 1, 2, 2]
    assert all(tile.tilings[2].max() == 1 for tile in tiles.values())
    # Two blocks of 128 x 128 take longer than the tiles of DeepGEMM, which fill more SMs.
    kernels = of_products(Products("float8_e4m3fn", shapes[5:6], {}), np.ones(1))
    by_row, by_block = (
        predict_from_description(replace(kernels, scales=np.full(1, scale, np.uint8)), H100)[0]
        for scale in (Scales.ROW, Scales.BLOCK)
    )
    assert by_row.item() > 1.2 * by_block.item()


@pytest.mark.parametrize(
    ("scales", "m", "n", "k", "measured_us"),
    [
        (Scales.TORCH_ROW, 48, 5120, 3456, 12.0),
        (Scales.TORCH_ROW, 160, 2560, 2560, 10.0),
        (Scales.TORCH_ROW, 3000, 10240, 3072, 134.1),
        (Scales.TORCH_BLOCK, 48, 10240, 3072, 14.8),
        (Scales.TORCH_BLOCK, 1500, 5120, 3456, 46.3),
    ],
)
def test_torch_has_one_tile_for_fine_scales_on_hopper(scales, m, n, k, measured_us):
    """Durations of an H100, which chose nothing (2026-11-28-fine-scales-h100)."""
    shapes = np.array([[1, m, n, k, 1, 2]], dtype=float)
    assert tiles_of(H100, shapes, scales)[0].tilings.T.tolist() == [[128, 128, 1]]
    products_ = Products("float8_e4m3fn", shapes, {}, scales, per_call=False)
    (predicted_ns,) = predict_from_description(of_products(products_, np.ones(1)), H100)[0]
    assert predicted_ns == pytest.approx(measured_us * 1e3, rel=0.13)
    # Other architectures have no figures of torch's kernels, and those of engines instead.
    engine = Scales.ROW if scales == Scales.TORCH_ROW else Scales.BLOCK
    (of_torch,), (of_engine,) = (tiles_of(B200, shapes, each).values() for each in (scales, engine))
    assert (of_torch.tilings == of_engine.tilings).all()


def test_an_empty_tile_of_a_cluster_takes_an_sm():
    """257 x 5,632 results are 132 tiles, one for each SM, and 176 in clusters of two."""
    shapes = np.array([[1, m, 5632, 1024, 1, 2] for m in (257, 512)], dtype=float)
    by_two = tiles_of(H100, shapes, Scales.ROW)[0]
    rates = Rates(*(np.full(2, rate) for rate in (1.3e15, 2e15)))
    alone, in_clusters = (
        gemm_ns(
            *(GemmTarget(H100, rates), shapes, shipped().gemm),
            kernel=by_two._replace(cluster=cluster),
        )
        for cluster in (1, 2)
    )
    assert in_clusters[0] > 1.1 * alone[0]
    assert in_clusters[1] == alone[1]


def test_deep_gemm_chooses_the_fewest_waves_then_the_fullest_then_the_smallest_tile():
    """On the 148 SMs of a B200.

    128 x 4,096: tiles of 128 x 32 are the most in one wave, 128. 4,096 x 4,096: the largest tiles,
    128 x 256 and 256 x 128, are 512 and need four waves; no tile needs fewer.
    """
    shapes = np.array([[1, m, 4096, 4096, 1, 2] for m in (128, 4096)], dtype=float)
    tiles = tiles_of(B200, shapes, Scales.BLOCK)
    assert tiles[0].tilings.T.tolist() == [[128, 32, 1]]
    rows, columns, _ = tiles[1].tilings[:, 0]
    blocks = (4096 / rows) * (4096 / columns)
    assert np.ceil(blocks / 148) == 4


def test_tensor_memory_multiplies_64_rows_in_8_bits_and_128_in_4():
    """Of a B200: an RTX 5090 has no such memory, and CUTLASS's tiles for rows are Hopper's."""
    four = 0.5 + 1 / 16
    shapes = np.array([[1, m, 4096, 4096, item, 2] for m in (8, 256) for item in (1, four)])
    least = {
        gpu.name: [
            int(kernel.tilings[0].min())
            for _, kernel in sorted(tiles_of(gpu, shapes, Scales.ROW).items())
        ]
        for gpu in (B200, load_gpu("RTX-5090"), H100)
    }
    assert least == {
        "B200": [64, 128, 64, 128],
        "RTX-5090": [16, 16, 16, 16],
        "H100-SXM": [16, 16, 128, 128],
    }


def test_blackwells_attention_has_a_longer_floor():
    c = shipped()
    assert c.attention_on(H100) == c.attention
    assert c.attention_on(B200).floor == c.attention.floor * c.attention_floor["blackwell"]


def test_memory_bound_kernels_scale_by_shape_to_another_die():
    """1.2 times the roofline's time on an A100: half of the usual deviation of 10% stays there.

    1.9 times is not bound by bandwidth, so the residual model scales it.
    """
    c, target = shipped(), load_gpu("V100")
    source = load_gpu("A100")
    moved = np.array([200e6])
    alone = of_memory(np.ones(1), moved)
    (here,), (there,) = (predict_from_description(alone, gpu)[0] for gpu in (source, target))
    kernels = of_memory(np.array([1.2 * here]), moved)
    (predicted_ns,), _ = predict_learned(kernels, source, target, c)
    assert predicted_ns == pytest.approx(there * 1.2 * np.exp(-0.05), rel=1e-3)
    slow = of_memory(np.array([1.9 * here]), moved)
    (predicted_ns,), _ = predict_learned(slow, source, target, c)
    assert predicted_ns == pytest.approx(predict_by_residual(slow, source, target)[0][0])
    assert kind(kernels, source, target) == "memory_other_die"
    # The same die keeps the residual model, whose errors are smaller there.
    assert kind(kernels, H100, load_gpu("H200")) == "memory_same_die"
