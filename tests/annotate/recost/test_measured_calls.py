"""Calls that an H200 ran (2026-11-28-hopper-kernels-h200), predicted from their shapes."""

import json
from typing import Any

import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.cost_model import MODELS
from onerank.annotate.models.features import Timing
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.annotate.recost.from_datasheet import UnmeasuredRequest, recost_cpu_capture
from onerank.ir import Device, GraphBuilder, Job, Kind
from onerank.ir.measurement import Measurement

BF16, F32, I64 = "Tensor(c10::BFloat16)", "Tensor(float)", "Tensor(long)"
FP8 = "Tensor(c10::Float8_e4m3fn)"

# Operator, operands, result, values of the arguments, us of the kernel.
CALLS: list[tuple[str, list[Any], Any, list[Any], float]] = [
    ("aten::_log_softmax", [(BF16, [2048, 128256])], (BF16, [2048, 128256]), [], 518),
    ("aten::_log_softmax", [(F32, [2048, 128256])], (F32, [2048, 128256]), [], 1017),
    ("aten::_log_softmax", [(F32, [16384, 1536])], (F32, [16384, 1536]), [], 54.4),
    ("aten::nll_loss_forward", [(BF16, [4096, 32000]), (I64, [4096])], (BF16, []), [], 18.5),
    ("aten::mul", [(BF16, [1, 4096]), (F32, [1, 4096])], (F32, [1, 4096]), [], 2.6),
    ("aten::sum", [(F32, [50000, 1000])], (F32, [50000]), ["", [-1]], 56.4),
    (
        "aten::addmm",
        [(BF16, [50304, 1024]), (BF16, [50304, 256]), (BF16, [256, 1024])],
        (BF16, [50304, 1024]),
        [],
        80,
    ),
    ("aten::mm", [(F32, [2048, 2048])] * 2, (F32, [2048, 2048]), [], 52),
    (
        "aten::_scaled_grouped_mm",
        [(FP8, [16384, 4096]), (FP8, [8, 4096, 14336])],
        (BF16, [16384, 14336]),
        [],
        1625,
    ),
    (
        "aten::_scaled_grouped_mm",
        [(FP8, [14336, 1024]), (FP8, [1024, 4096])],
        (BF16, [8, 14336, 4096]),
        [],
        417,
    ),
    (
        "triton::liger_cross_entropy_kernel",
        [(BF16, [4096, 32000]), (I64, [4096])],
        (BF16, [4096, 32000]),
        [],
        221,
    ),
]


def test_calls_take_what_they_took_on_an_h200():
    builder = GraphBuilder()
    for start, (op, inputs, output, values, _) in enumerate(CALLS):
        builder.add(
            kind=Kind.HOST_OP,
            thread=1,
            start_ns=start,
            name=op,
            op=op,
            input_types=json.dumps([kind for kind, _ in inputs]),
            input_shapes=json.dumps([shape for _, shape in inputs]),
            input_values=json.dumps(values),
            output_types=json.dumps([output[0]]),
            output_shapes=json.dumps([output[1]]),
        )
    # The GEMMs in float32 ran in TF32.
    job = Job(device=Device("cpu", "none"), measurement=Measurement(tf32_gemms=True))
    request = UnmeasuredRequest(
        target=load_gpu("H200"),
        model=MODELS["auto"],
        passes=NO_PASSES,
        databases=(),
        timing=Timing.KERNEL,
    )
    nodes = recost_cpu_capture(builder.build(job), request).nodes
    taken_us = (nodes.duration_ns / 1000).tolist()
    measured_us = [us for *_, us in CALLS]
    assert taken_us == pytest.approx(measured_us, rel=0.14)
