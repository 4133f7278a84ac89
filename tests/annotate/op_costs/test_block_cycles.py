"""Kernels that their warps and blocks limit, against kernels on an H200 (torch 2.11)."""

from dataclasses import replace

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import floor_share_of, op_class
from onerank.annotate.op_costs.operands import Call, Tensor

F32, F16, BF16, I64 = ("float32", 4), ("float16", 2), ("bfloat16", 2), ("int64", 8)


def predicted_us(call: Call) -> float:
    """Return the time of a call on an H200 from shapes, in us."""
    op = f"aten::{call.op}"
    record = work_of_call(op, call)
    share = floor_share_of(op_class(op)) * record.floor_factor
    kernels = kernels_of([replace(record, floor_share=share)], np.zeros(1))
    times_ns, _ = predict_from_datasheet(kernels, load_gpu("H200"))
    return times_ns[0] / 1000


def call(op: str, *operands: Tensor | None, result: Tensor, values: tuple = ()) -> Call:
    inputs = tuple(None if operand is None else (operand,) for operand in operands)
    return Call(op, inputs, ((result,),), values)


@pytest.mark.parametrize(
    ("op", "rows", "width", "dtype", "measured_us"),
    [
        ("sum", 37_500_000, 4, F32, 969.5),
        ("sum", 9_375_000, 16, BF16, 989.9),
        ("sum", 4_687_500, 32, F32, 1029.0),
        ("amax", 4_687_500, 32, F32, 1175.2),
        ("var", 4_687_500, 32, F32, 1916.0),
        ("sum", 3_191_489, 47, F32, 748.7),
        ("mean", 1_171_875, 128, F32, 291.6),
        ("sum", 1_171_875, 128, BF16, 154.7),
        ("sum", 585_937, 256, BF16, 158.1),
    ],
)
def test_sums_of_short_rows(op, rows, width, dtype, measured_us):
    made = call(
        op, Tensor((rows, width), *dtype), result=Tensor((rows,), *dtype), values=("", [-1])
    )
    assert predicted_us(made) == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "measured_us"),
    [
        (1_200_000, 4, F32, 723.1),
        (1_200_000, 128, BF16, 722.9),
        (200_000, 32, F32, 121.7),
        (200_000, 512, F32, 205.6),
        (20_000, 128, F32, 13.4),
        (1_200_000, 4, BF16, 15.5),  # rows of 8 bytes have another kernel
    ],
)
def test_a_gathered_row_takes_a_block(rows, width, dtype, measured_us):
    table, index = Tensor((100_000, width), *dtype), Tensor((rows, width), *I64)
    index = replace(index, recorded_strides=(1, 0))
    made = call("gather", table, None, index, result=Tensor((rows, width), *dtype), values=("", 0))
    assert predicted_us(made) == pytest.approx(measured_us, rel=0.22)


@pytest.mark.parametrize(
    ("op", "rows", "width", "dtype", "measured_us"),
    [
        ("index_add_", 1_200_000, 128, F32, 1121.7),
        ("index_add_", 200_000, 512, BF16, 846.6),
        ("scatter_add_", 1_200_000, 128, F32, 466.5),
        ("scatter_add_", 200_000, 32, BF16, 26.6),
        ("scatter_add_", 1_200_000, 1, F32, 17.2),
        ("scatter_reduce_", 1_200_000, 128, F32, 705.4),
    ],
)
def test_elements_that_are_added_by_index(op, rows, width, dtype, measured_us):
    table, source = Tensor((100_000, width), *dtype), Tensor((rows, width), *dtype)
    whole = "scatter" in op
    index = Tensor((rows, width) if whole else (rows,), *I64)
    made = call(op, table, None, index, source, result=table, values=("", 0))
    assert predicted_us(made) == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "channels_last", "measured_us"),
    [
        ("cudnn_batch_norm", (1, 64, 1448, 1448), F16, False, 1348.6),
        ("cudnn_batch_norm", (256, 64, 56, 56), F32, False, 457.8),
        ("cudnn_batch_norm", (32, 256, 56, 56), F16, False, 105.7),
        ("cudnn_batch_norm", (256, 64, 56, 56), F32, True, 158.4),
        ("native_batch_norm", (256, 64, 56, 56), BF16, False, 857.8),
        ("native_batch_norm", (256, 64, 56, 56), BF16, True, 299.6),
        ("cudnn_batch_norm_backward", (64, 32, 112, 112), F16, False, 1100.7),
        ("cudnn_batch_norm_backward", (1, 128, 512, 512), F32, False, 410.1),
        ("native_batch_norm_backward", (64, 32, 112, 112), BF16, False, 1395.2),
        ("native_batch_norm_backward", (256, 64, 56, 56), BF16, True, 225.1),
    ],
)
def test_a_block_normalises_a_channel(op, shape, dtype, channels_last, measured_us):
    _, channels, height, width = shape
    strides = (channels * height * width, 1, width * channels, channels)
    image = Tensor(shape, *dtype, recorded_strides=strides if channels_last else ())
    operands = (image, image) if "backward" in op else (image,)
    assert predicted_us(call(op, *operands, result=image)) == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize(
    ("rows", "numbers", "measured_us"),
    [(1024, 64, 5584.0), (4096, 3, 87122.7), (8192, 128, 372406)],
)
def test_a_block_computes_a_distance(rows, numbers, measured_us):
    x = Tensor((4, rows, numbers), *F32)
    made = call("_cdist_forward", x, x, result=Tensor((4, rows, rows), *F32))
    assert predicted_us(made) == pytest.approx(measured_us, rel=0.02)


@pytest.mark.parametrize(("op", "measured_us"), [("_standard_gamma", 89.6), ("binomial", 710.9)])
def test_draws_that_take_longer_than_their_bytes(op, measured_us):
    x = Tensor((1 << 22,), *F32)
    assert predicted_us(call(op, x, result=x)) == pytest.approx(measured_us, rel=0.05)


def image(planes: int, size: int, dtype: tuple[str, int], last: bool) -> Tensor:
    channels = planes // 8
    strides = (channels * size * size, 1, size * channels, channels) if last else ()
    return Tensor((8, channels, size, size), *dtype, recorded_strides=strides)


@pytest.mark.parametrize(
    ("op", "planes", "sizes", "layout", "measured_us"),
    [
        ("upsample_bilinear2d", 16384, (8, 4), (F32, False), 2686.5),
        ("upsample_bilinear2d", 16384, (8, 32), (F32, False), 6187.0),
        ("upsample_bilinear2d", 152, (128, 256), (F32, False), 69.4),
        ("upsample_bilinear2d", 2048, (32, 128), (BF16, True), 313.0),
        ("upsample_bilinear2d_backward", 168, (64, 512), (F32, False), 1793.7),
        ("upsample_bilinear2d_backward", 2048, (1, 64), (F32, False), 16982.7),
        ("upsample_bilinear2d_backward", 2048, (32, 128), (BF16, False), 1499.2),
        ("upsample_bilinear2d_backward", 256, (128, 512), (F32, True), 575.1),
        ("upsample_nearest2d", 768, (64, 256), (BF16, True), 311.6),
        ("upsample_nearest2d_backward", 768, (64, 256), (BF16, True), 58.8),
        ("upsample_bicubic2d", 168, (64, 128), (F32, False), 88.3),
        ("upsample_bicubic2d_backward", 168, (64, 128), (F32, False), 431.3),
    ],
)
def test_images_that_are_resampled(op, planes, sizes, layout, measured_us):
    """From the first size to the second; layouts are dtypes, and whether channels come last."""
    small, large = (image(planes, size, *layout) for size in sizes)
    given, made = (large, small) if op.endswith("_backward") else (small, large)
    assert predicted_us(Call(op, ((given,),), ((made,),))) == pytest.approx(measured_us, rel=0.27)


@pytest.mark.parametrize(
    ("op", "planes", "sizes", "layout", "measured_us"),
    [
        ("avg_pool2d", 4096, (112, 3, 1), (F16, False), 667.0),
        ("avg_pool2d", 4096, (112, 3, 2), (F16, True), 360.3),
        ("avg_pool2d_backward", 4096, (112, 2, 2), (F16, False), 926.2),
        ("avg_pool2d_backward", 4096, (56, 3, 1), (BF16, True), 456.0),
        ("max_pool2d_with_indices", 512, (256, 3, 2), (BF16, False), 137.5),
        ("max_pool2d_with_indices", 16384, (28, 5, 1), (F16, False), 373.4),
        ("max_pool2d_with_indices_backward", 98304, (14, 5, 1), (BF16, False), 522.8),
    ],
)
def test_images_that_are_pooled(op, planes, sizes, layout, measured_us):
    """Sizes are those of the image, the window and its stride, by which images shrink."""
    size, window, stride = sizes
    whole, pooled = (image(planes, each, *layout) for each in (size, size // stride))
    given, made = (pooled, whole) if op.endswith("_backward") else (whole, pooled)
    lists = ([window, window], [stride, stride])
    values = (None, None, *lists) if op.endswith("_backward") else (None, *lists)
    call = Call(op, ((given,),), ((made,),), values)
    assert predicted_us(call) == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "measured_us"),
    [
        ("grid_sampler_2d", (64, 256, 8, 8), F32, 46.3),
        ("grid_sampler_2d", (4, 48, 160, 160), F32, 79.2),
        ("grid_sampler_2d_backward", (24, 32, 64, 64), F16, 186.8),
        ("grid_sampler_2d_backward", (2, 128, 128, 128), F32, 216.0),
        ("reflection_pad2d", (6, 150, 80, 80), F32, 37.9),
        ("replication_pad2d_backward", (3, 512, 56, 56), F32, 26.1),
        ("_log_softmax", (8, 1000, 64, 64), F32, 1207.5),
        ("_log_softmax", (8, 21, 512, 512), F16, 132.2),
        ("_log_softmax_backward_data", (8, 21, 512, 512), F32, 175.7),
        ("nll_loss2d_forward", (4, 19, 512, 512), F32, 134.4),
        ("nll_loss2d_forward", (32, 2, 256, 256), F32, 33.8),
        ("nll_loss2d_backward", (8, 21, 512, 512), F32, 107.2),
    ],
)
def test_pixels_that_are_sampled_padded_and_classified(op, shape, dtype, measured_us):
    pixels = Tensor(shape, *dtype)
    operands = (None, pixels) if op == "nll_loss2d_backward" else (pixels, pixels)
    values = ("", "", 1) if "backward" in op else ("", 1)
    assert predicted_us(call(op, *operands, result=pixels, values=values)) == pytest.approx(
        measured_us, rel=0.27
    )


@pytest.mark.parametrize(
    ("batch", "rows", "numbers", "power", "measured_us"),
    [(8, 2048, 3, 1.0, 10_852), (8, 2048, 3, 2.0, 11_984), (1, 4096, 128, 2.0, 11_000)],
)
def test_gradients_of_distances(batch, rows, numbers, power, measured_us):
    x, distances = Tensor((batch, rows, numbers), *F32), Tensor((batch, rows, rows), *F32)
    made = call("_cdist_backward", distances, x, x, result=x, values=("", "", "", power))
    assert predicted_us(made) == pytest.approx(measured_us, rel=0.1)
