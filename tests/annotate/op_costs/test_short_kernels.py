"""Short kernels of PyTorch, as in decodes, against kernels on an H100 and an H200 (torch 2.11)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of
from onerank.annotate.op_costs.op_classes import floor_share_of, op_class
from onerank.annotate.op_costs.operands import Tensor

_NAMES = {"bfloat16": "c10::BFloat16", "float32": "float"}


def work(op: str, *inputs, output, strides=()) -> Work:
    """Return the work of a call of (shape, dtype) operands; a list of them is one operand."""
    shapes, types = [], []
    for operand in inputs:
        listed = isinstance(operand, list)
        several = operand if listed else [operand]
        names = [f"Tensor({_NAMES[dtype]})" for _, dtype in several]
        shapes.append([shape for shape, _ in several] if listed else several[0][0])
        types.append(f"GenericList[{','.join(names)}]" if listed else names[0])
    return work_of(
        f"aten::{op}",
        (json.dumps(shapes), json.dumps(types)),
        (json.dumps([output[0]]), json.dumps([f"Tensor({_NAMES[output[1]]})"])),
        strides=json.dumps(strides) if strides else "",
    )


def predicted(op: str, record: Work, gpu: str = "H100") -> tuple[float, Rule]:
    """Return the time in us from shapes, and its rule."""
    share = floor_share_of(op_class(f"aten::{op}")) * record.floor_factor
    kernels = kernels_of([replace(record, floor_share=share)], np.zeros(1))
    times_ns, rules = predict_from_datasheet(kernels, load_gpu(gpu))
    return times_ns[0] / 1000, Rule(int(rules[0]))


@pytest.mark.parametrize(
    ("gpu", "rows", "width", "measured_us"),
    [
        ("H100", 1, 512, 2.05),
        ("H100", 1, 7168, 2.85),
        ("H100", 4, 4096, 3.65),
        ("H100", 16, 512, 2.70),
        ("H100", 16, 1536, 4.98),
        ("H100", 16, 4096, 8.99),
        ("H100", 16, 7168, 14.34),
        ("H100", 256, 4096, 9.15),
        ("H100", 512, 7168, 15.23),
        ("H200", 1024, 4096, 9.50),
        # More than half of the cache: the loads come from memory.
        ("H100", 2048, 4096, 20.1),
        ("H100", 2048, 7168, 37.6),
    ],
)
def test_means_of_a_few_rows_wait_for_the_loads_of_a_thread(gpu, rows, width, measured_us):
    record = work("mean", ([1, rows, width], "float32"), output=([1, rows, 1], "float32"))
    time_us, rule = predicted("mean", record, gpu)
    assert rule is Rule.CHAIN
    assert time_us == pytest.approx(measured_us, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "rows", "width", "measured_us"),
    [("H100", 20_000, 4096, 112.7), ("H100", 3000, 16_384, 69.6), ("H200", 50_000, 1000, 56.6)],
)
def test_a_mean_of_many_rows_is_bound_by_memory_or_by_the_sms(gpu, rows, width, measured_us):
    record = work("mean", ([rows, width], "float32"), output=([rows, 1], "float32"))
    time_us, _ = predicted("mean", record, gpu)
    assert time_us == pytest.approx(measured_us, rel=0.05)


def test_kernels_that_compute_addresses_start_more_slowly():
    # Measured: 1.2 to 1.4 us, 1.8 to 2.3 us and 2.7 us; sizes take hardly any time.
    row = [1, 1, 4096]
    equal = work("mul", (row, "bfloat16"), (row, "bfloat16"), output=(row, "bfloat16"))
    spread = work("mul", (row, "float32"), ([1, 1, 2], "float32"), output=(row, "float32"))
    wider = work("copy_", (row, "float32"), (row, "bfloat16"), output=(row, "float32"))
    calls = ("mul", equal), ("mul", spread), ("copy_", wider)
    times_us = [predicted(op, record)[0] for op, record in calls]
    assert times_us == pytest.approx([1.22, 2.15, 2.7], rel=0.05)


def test_a_concatenation_with_a_strided_operand_handles_elements_singly():
    # Halves of the heads of a rotary embedding, 8.4 MB: 10.5 us measured.
    halves = [([1, 32, 512, 64], "bfloat16")] * 2
    result = ([1, 32, 512, 128], "bfloat16")
    strides = [[[32 * 512 * 64, 64, 2048, 1], [32 * 512 * 128, 128, 4096, 1]]]
    slow_us, rule = predicted("cat", work("cat", halves, output=result, strides=strides))
    fast_us, _ = predicted("cat", work("cat", halves, output=result))
    assert rule is Rule.ISSUE
    assert slow_us == pytest.approx(10.5, rel=0.15)
    assert fast_us < slow_us / 2


def test_operands_in_half_of_the_cache_do_not_come_from_memory():
    # A square of 8.4 MB takes 2.5 us on an H100; from memory it would take 4.1.
    shape = [1, 256, 4096]
    record = work("pow", (shape, "float32"), output=(shape, "float32"))
    assert predicted("pow", record)[0] == pytest.approx(2.5, rel=0.15)
    shape = [1, 4096, 4096]
    record = work("pow", (shape, "float32"), output=(shape, "float32"))
    from_memory_us = 2 * 4 * 4096**2 / load_gpu("H100").bandwidth_bytes_per_s * 1e6
    assert predicted("pow", record)[0] == pytest.approx(from_memory_us + 1.22, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 1), (1, 9), True),
        ((1, 32, 1, 64), (4096, 128, 128, 1), False),
        ((2, 3), (1, 2), False),
    ],
)
def test_contiguous_tensors(shape, strides, contiguous):
    assert Tensor(shape, "bfloat16", 2, strides).contiguous is contiguous


def test_a_norm_of_many_short_rows_takes_a_block_for_each():
    """Queries of 16 heads of 128: 91 us on an H100, where their bytes take 35."""
    heads = ([1, 8192, 16, 128], "bfloat16")
    weight = ([128], "bfloat16")
    record = work("_fused_rms_norm", heads, weight, output=heads)
    assert predicted("_fused_rms_norm", record)[0] == pytest.approx(91, rel=0.1)
    wide = ([1, 1024, 1, 16384], "bfloat16")
    record = work("_fused_rms_norm", wide, ([16384], "bfloat16"), output=wide)
    assert predicted("_fused_rms_norm", record)[0] < 50
