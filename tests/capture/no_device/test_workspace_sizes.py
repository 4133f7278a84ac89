"""Workspaces of single operators against the allocator's events on an H200 (torch 2.11)."""

import pytest
import torch

from onerank.capture.no_device.operators.workspace_sizes import workspace_bytes

MB = 1_000_000
F32, BF16 = torch.float32, torch.bfloat16


def tensor(shape: tuple[int, ...], dtype: torch.dtype, last: bool = False) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


@pytest.mark.parametrize(
    ("shape", "key_heads", "measured"),
    [
        ((1, 8, 512, 64), 8, [1_065_216]),
        ((2, 16, 1024, 64), 16, [8_519_936]),
        # Query heads that share keys: the gradients of each head, too.
        ((2, 32, 2048, 128), 8, [134_742_272]),
    ],
)
def test_gradients_of_cudnn_attention(shape, key_heads, measured):
    query, key = tensor(shape, BF16), tensor((shape[0], key_heads, *shape[2:]), BF16)
    args = (query, query, key, key)
    assert workspace_bytes("_scaled_dot_product_cudnn_attention_backward", args, ()) == measured


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((2, 16, 1024, 64), [131_072, 8_396_800]),
        ((2, 10, 300, 80), [24_000, 3_933_120]),
        ((1, 12, 197, 64), [9_456, 787_200]),
        ((3, 12, 700, 64), [100_800, 6_494_400]),
    ],
)
def test_gradients_of_memory_efficient_attention(shape, measured):
    args = (tensor(shape, BF16),) * 4
    name = "_scaled_dot_product_efficient_attention_backward"
    assert workspace_bytes(name, args, ()) == measured


@pytest.mark.parametrize(
    ("image", "weight", "stride", "operand", "measured_mb"),
    [
        # Copies of image, result and filter to channels last, and sums of the filter's gradient.
        ((64, 128, 56, 56), (128, 128, 3, 3), 2, (BF16, False), (64.520, 64.520, 66.880)),
        ((8, 320, 64, 64), (320, 320, 3, 3), 1, (BF16, False), (43.786, 43.786, 47.719)),
        ((64, 512, 14, 14), (512, 512, 3, 3), 2, (F32, False), (41.550, 41.550, 50.201)),
        ((64, 64, 56, 56), (64, 64, 3, 3), 1, (BF16, True), (0.0, 0.0, 1.918)),
        # Three channels count as eight.
        ((64, 3, 224, 224), (64, 3, 7, 7), 2, (BF16, True), (51.430, 51.634, 57.552)),
        # One product for each image.
        ((64, 512, 28, 28), (128, 512, 1, 1), 1, (F32, False), (0.0, 0.0, 16.777)),
    ],
)
def test_convolutions_copy_operands_to_channels_last(image, weight, stride, operand, measured_mb):
    side = image[2] // stride
    x, w = tensor(image, *operand), tensor(weight, *operand)
    y = tensor((image[0], weight[0], side, side), *operand)
    rest = ([stride] * 2, [weight[2] // 2] * 2, [1, 1], False, [0, 0], 1)
    forward = workspace_bytes("convolution", (x, w, None, *rest), [y])
    backward = [
        workspace_bytes("convolution_backward", (y, x, w, None, *rest, wanted), ())
        for wanted in ([True, False, False], [False, True, False])
    ]
    found = [sum(sizes) / MB for sizes in (forward, *backward)]
    assert found[:2] == pytest.approx(measured_mb[:2], rel=0.005)
    # How cuDNN divides the sums is not known.
    assert found[2] == pytest.approx(measured_mb[2], rel=0.1, abs=1.0)


@pytest.mark.parametrize(
    ("kind", "sizes", "run", "dtype", "measured"),
    [
        ((4, 2), (1024, 2, 1), (128, 40), BF16, 114_885_184),
        ((4, 2), (650, 4, 1), (35, 16), F32, 98_201_216),
        ((4, 2), (1024, 2, 2), (35, 40), F32, 295_207_488),
        ((3, 3), (1024, 2, 2), (128, 40), F32, 457_572_928),
        ((3, 3), (650, 1, 1), (128, 16), BF16, 29_537_408),
        ((1, 1), (650, 2, 1), (128, 40), F32, 93_633_792),
    ],
)
def test_recurrent_layers(kind, sizes, run, dtype, measured):
    (gates, mode), (size, layers, directions), (steps, batch) = kind, sizes, run
    weights = []
    for layer in range(layers):
        for _ in range(directions):
            width = size * directions if layer else size
            weights += [tensor((gates * size, width), dtype), tensor((gates * size, size), dtype)]
    x = tensor((steps, batch, size), dtype)
    state = tensor((layers * directions, batch, size), dtype)
    args = (x, weights, 2, None, state, state, mode, size, 0, layers, False, 0.0, True)
    (found,) = workspace_bytes("_cudnn_rnn", (*args, directions == 2, [], None), ())
    assert found == pytest.approx(measured, rel=0.05)
