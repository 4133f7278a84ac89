"""Convolutions, recurrent layers, scans and group norms against kernels on an H200, in us.

Rows of benchmarks/results/2026-11-28-convolutions-h200.txt; those marked "held out" chose no
constant. torch 2.11, cuDNN 9.19.
"""

import json
from typing import Any

import pytest

from onerank.annotate.recost.recost import recost
from onerank.ir import Device, GraphBuilder, Job, Kind

DTYPES = {"f16": "Tensor(c10::Half)", "bf16": "Tensor(c10::BFloat16)", "f32": "Tensor(float)"}


def predicted_us(op: str, dtype: str, operands: list[Any], values: list[Any], out: Any) -> float:
    """Return the time of all kernels of a call on an H200, from shapes."""

    def types(of: list[Any]) -> list[str]:
        return [DTYPES[dtype] if shape else "Scalar" for shape in of]

    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP,
        thread=1,
        name=op,
        op=op,
        input_types=json.dumps(types(operands)),
        input_shapes=json.dumps(operands),
        input_values=json.dumps(values),
        output_types=json.dumps(types(out)),
        output_shapes=json.dumps(out),
    )
    graph = recost(builder.build(Job(device=Device("cpu", "none"))), "H200")
    return float(graph.nodes.duration_ns.sum()) / 1000


def convolution_us(dtype: str, image: list[int], weight: list[int], part: str) -> float:
    """Return the time of a pass of a convolution that keeps the size of its image."""
    out = [image[0], weight[0], *image[2:]]
    axes = len(image) - 2
    ones, pad = [1] * axes, [side // 2 for side in weight[2:]]
    groups = image[1] // weight[1]
    settings = [ones, pad, ones, False, [0] * axes, groups]
    if part == "forward":
        operands = [image, weight, *[[]] * 7]
        return predicted_us("aten::convolution", dtype, operands, ["", "", "", *settings], [out])
    wanted = [part == "image", part == "filter", False]
    results = [image if wanted[0] else [], weight if wanted[1] else [], []]
    values = ["", "", "", "", *settings, wanted]
    operands = [out, image, weight, *[[]] * 8]
    return predicted_us("aten::convolution_backward", dtype, operands, values, results)


@pytest.mark.parametrize(
    ("dtype", "image", "weight", "measured_us"),
    [
        ("f16", [2, 64, 64, 64, 64], [64, 64, 3, 3, 3], (369.5, 363.1, 373.3)),
        ("f16", [16, 256, 28, 28], [512, 256, 3, 3], (68.8, 74.5, 80.1)),  # held out
        ("bf16", [32, 512, 14, 14], [512, 1, 7, 7], (115.7, 147.4, 320.4)),
        ("f16", [48, 192, 28, 28], [192, 1, 7, 7], (262.4, 328.2, 523.9)),  # held out
    ],
)
def test_convolutions(dtype, image, weight, measured_us):
    found = [convolution_us(dtype, image, weight, part) for part in ("forward", "image", "filter")]
    assert found == pytest.approx(measured_us, rel=0.15)


def test_groups_of_48_channels_run_one_after_another():
    """In 16 bits, by a window of 128 points as in wav2vec 2.0; time in which a kernel runs."""
    image, weight = [4, 768, 499], [768, 48, 128]
    found = [convolution_us("f16", image, weight, part) for part in ("forward", "image")]
    assert found == pytest.approx((12329, 800), rel=0.15)


@pytest.mark.parametrize(
    ("rows", "width", "measured_us"),
    [(1_048_576, 16, 6082.3), (300_000, 24, 1741.8)],  # the second: held out
)
def test_a_scan_of_many_short_rows_has_a_block_for_each(rows, width, measured_us):
    values = ["", -1, ""]
    found = predicted_us("aten::cumsum", "f32", [[rows, width], [], []], values, [[rows, width]])
    assert found == pytest.approx(measured_us, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "dtype", "measured_us"),
    [
        ((8, 320, 64, 64), "f32", (72.3, 81.4)),
        ((12, 960, 32, 32), "f32", (71.5, 102.8)),  # held out
        ((4, 320, 96, 96), "bf16", (105.7, 81.4)),  # held out
    ],
)
def test_group_norms(shape, dtype, measured_us):
    image, channels, moments = [*shape], [shape[1]], [shape[0], 32]
    sizes = [shape[0], shape[1], shape[2] * shape[3], 32]
    forward = predicted_us(
        "aten::native_group_norm",
        dtype,
        [image, channels, channels, *[[]] * 5],
        ["", "", "", *sizes, 1e-5],
        [image, moments, moments],
    )
    backward = predicted_us(
        "aten::native_group_norm_backward",
        dtype,
        [image, image, moments, moments, channels, *[[]] * 5],
        ["", "", "", "", "", *sizes, [True] * 3],
        [image, channels, channels],
    )
    assert (forward, backward) == pytest.approx(measured_us, rel=0.2)
