"""What kernels take beyond one pass over their operands: passes, cycles, floors."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models import roofline, scale_measured
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.kernel_overheads import (
    cached_passes_of,
    cycles_of,
    passes_of,
    rereads_of,
)
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import op_class
from onerank.annotate.op_costs.operands import Call, Tensor


def call(op: str, *shape: int, item: int = 2, saved: int = 8) -> Call:
    dtype = {2: "bfloat16", 4: "float32"}[item]
    x, sums = Tensor(shape, dtype, item), Tensor((saved,), "float32", 4)
    return Call(op, ((x,),), ((x,), (sums,), (sums,)), ())


@pytest.mark.parametrize(
    ("made", "passes"),
    [
        (call("native_layer_norm", 4096, 4096), 1.5),
        (call("native_layer_norm_backward", 4096, 4096), 2.7),
        (call("native_batch_norm", 32, 8, 56, 56), 1.5),
        (call("native_batch_norm", 32, 8, 56, 56, saved=0), 1.0),  # by running sums
        (call("native_batch_norm_backward", 32, 8, 56, 56), 5 / 3),
        (call("_softmax", 12, 1024, 1024), 1.0),
        (call("_log_softmax", 4096, 32000, item=4), 1.5),
        (call("_log_softmax_backward_data", 4096, 8000, item=4), 1.0),
        (call("_log_softmax_backward_data", 4096, 32000, item=4), 1.4),
        (call("add", 4096, 4096), 1.0),
    ],
)
def test_passes(made: Call, passes: float):
    assert passes_of(made) == passes


def test_a_hopper_gpu_keeps_short_rows_of_norms():
    passes = [cached_passes_of(call("_fused_rms_norm", 4096, width)) for width in (2048, 8192)]
    assert passes == [1.05, 1.45]
    made = call("_fused_rms_norm", 1 << 17, 2048, item=4)
    work = work_of_call("aten::_fused_rms_norm", made)
    bytes_moved = [
        roofline.datasheet_terms(kernels_of([work], np.ones(1)), gpu).memory_s[0]
        * gpu.bandwidth_bytes_per_s
        for gpu in map(load_gpu, ("H100", "A100"))
    ]
    moved = work.bytes_read + work.bytes_written
    assert bytes_moved == pytest.approx([moved * (1.05 + 0.4 / 3), moved * 1.45], rel=1e-3)


def test_what_the_memory_sees_again():
    calls = (
        call("_log_softmax", 4096, 32000, item=4),
        call("_softmax", 12, 1024, 1024),
        call("native_layer_norm", 4096, 4096),
        call("index_add_", 4096, 2048),
    )
    assert [rereads_of(one) for one in calls] == [1.5, 1.0, 1.0, 1.0]


def test_what_is_read_again_goes_by_bandwidth():
    """A softmax of 1 GB at an H200's 4.11 TB/s: 0.45 ms of its 0.54 are memory's, not 0.24."""
    gpus = load_gpu("H200"), load_gpu("H100")
    moved = [
        scale_measured.predict_by_residual(
            kernels_of([Work(0, 5 * 10**8, 5 * 10**8, rereads=rereads)], np.array([540_000.0])),
            *gpus,
        )[0][0]
        for rereads in (1.85, 1.0)
    ]
    by_memory = gpus[0].bandwidth_bytes_per_s / gpus[1].bandwidth_bytes_per_s
    assert by_memory == pytest.approx(1.418, abs=1e-3)
    assert [ns / 540_000 for ns in moved] == pytest.approx([1.325, 1.137], abs=0.005)


def two(op: str, left: tuple[int, ...], right: tuple[int, ...], items: str = "22") -> Call:
    names = {"2": "bfloat16", "4": "float32", "8": "float64"}
    pair = zip((left, right), items, strict=True)
    x, y = (Tensor(shape, names[item], int(item)) for shape, item in pair)
    return Call(op, ((x,), (y,)), ((x,),), ())


@pytest.mark.parametrize(
    ("made", "elements"),
    [
        (two("mul", (64, 100), (64, 100)), 0),
        (two("mul", (64, 100), (), "28"), 0),  # one number
        (two("mul", (64, 100), (100,)), 6400),
        (two("mul_", (64, 100), (64, 1)), 6400),
        (two("mul", (1, 64, 100), (64, 100)), 0),
        (two("copy_", (64, 100), (64, 100), "42"), 6400),  # widened
        (two("copy_", (64, 100), (64, 100), "24"), 0),
        (two("copy_", (64, 100), (1, 100)), 6400),
    ],
)
def test_elements_that_are_found_one_by_one(made: Call, elements: int):
    assert cycles_of(made, op_class(f"aten::{made.op}")) == pytest.approx(elements / 1.34)


def test_sums_add_one_by_one():
    assert cycles_of(call("sum", 64, 100), op_class("aten::sum")) == pytest.approx(6400 / 2.5)


def sum_of_parts(parts: int, outputs: int) -> Call:
    x, total = Tensor((parts, outputs), "bfloat16", 2), Tensor((outputs,), "bfloat16", 2)
    return Call("sum", ((x,),), ((total,),), (None, [0], False, None))


# Parts and outputs that chose no constant, and us on an H100: 2026-11-28-sums-h100.
@pytest.mark.parametrize(
    ("parts", "outputs", "measured_us"),
    [(2, 33_554_432, 142.0), (4, 7_340_032, 33.3), (7, 20_000_000, 150.1), (8, 16_777_216, 107.8)],
)
def test_a_sum_of_parts_has_a_thread_for_four_outputs(parts: int, outputs: int, measured_us: float):
    made = sum_of_parts(parts, outputs)
    h100, cycles = load_gpu("H100"), cycles_of(made, op_class("aten::sum"))
    by_cycles = cycles / h100.sm_count / h100.max_clock_hz * 1e6
    by_bytes = 2 * (parts + 1) * outputs / h100.bandwidth_bytes_per_s * 1e6
    assert max(by_cycles, by_bytes) == pytest.approx(measured_us, rel=0.1)
    few = sum_of_parts(8192, 4096)  # blocks share few outputs
    assert cycles_of(few, op_class("aten::sum")) == pytest.approx(8192 * 4096 / 4.5)


@pytest.mark.parametrize(
    ("made", "cycles"),
    [
        (call("native_layer_norm", 64, 1100), 64 * (250 + 0.38 * 1100)),
        (call("_fused_rms_norm", 64, 32, item=4), 64 * (165 + 0.37 * 128)),
        (call("_log_softmax", 4096, 32000, item=4), 4096 * (1500 + 32000 * 0.8)),
        (call("_softmax", 12, 1024, 1024), 0),
        (call("topk", 8192, 256, item=4), 8192 * 256 / 0.08),
    ],
)
def test_rows_that_are_read_more_than_once_take_cycles(made: Call, cycles: float):
    assert cycles_of(made, op_class(f"aten::{made.op}")) == pytest.approx(cycles)


def test_a_search_among_a_power_of_two_of_bounds_waits_for_the_cache():
    """4.2 million values among 8,192 and 10,000 bounds: 99.3 and 65.8 us on an H100."""
    values, found = Tensor((1 << 22,), "float32", 4), Tensor((1 << 22,), "int64", 8)
    h100 = load_gpu("H100")
    for bounds, measured_us in ((8192, 99.3), (10_000, 65.8)):
        sorted_bounds = Tensor((bounds,), "float32", 4)
        made = Call("searchsorted", ((sorted_bounds,), (values,)), ((found,),), ())
        cycles = cycles_of(made, op_class("aten::searchsorted"))
        us = cycles / h100.sm_count / h100.max_clock_hz * 1e6
        assert us == pytest.approx(measured_us, rel=0.1)


# Numbers of a group, and us of both kernels on an H100: 2026-11-27-small-operators-blind-h100.
@pytest.mark.parametrize(
    ("size", "measured_us"), [(36, 37.0), (112, 50.2), (256, 97.6)], ids=["36", "112", "256"]
)
def test_a_group_norm_of_small_groups_takes_a_warp_for_each(size: int, measured_us: float):
    h100, made = load_gpu("H100"), call("native_group_norm", 1500, 32 * size, saved=48_000)
    cycles = cycles_of(made, op_class("aten::native_group_norm"))
    us = cycles / h100.sm_count / h100.clock_hz * 1e6
    assert us + 2 * 1.2 == pytest.approx(measured_us, rel=0.15)


def test_index_fill_computes_the_address_of_each_element():
    """1,500 rows, in each 1,500 numbers by an index of the last axis: 7.7 us on an H100."""
    x, index = Tensor((1500, 8192), "bfloat16", 2), Tensor((1500,), "int64", 8)
    made = Call("index_fill_", ((x,), (), (index,)), ((x,),), ("t", -1, "t", 0.0))
    cycles = cycles_of(made, op_class("aten::index_fill_"))
    h100 = load_gpu("H100")
    us = cycles / h100.sm_count / h100.clock_hz * 1e6
    assert us + 1.2 == pytest.approx(7.7, rel=0.15)


def test_elements_take_the_cycles_of_all_sms(gpu_file):
    # 4 MB at 1 TB/s are 4 us; 2e6 cycles on 100 SMs at 1 GHz are 20
    gpu = load_gpu(gpu_file())
    kernels = kernels_of([Work(0, 2_000_000, 2_000_000, cycles=2e6)], np.zeros(1))
    (ns,), (rule,) = roofline.predict_from_datasheet(kernels, gpu)
    assert ns == pytest.approx(22_000)
    assert rule == Rule.ISSUE
    assert roofline.predict_by_roofline(kernels, gpu, gpu)[0] == pytest.approx(6_000)


def test_unmeasured_operators_stream_their_bytes_so_often(gpu_file):
    # 4 MB at 1 TB/s are 4 us, 2.5 times over 10; the baseline of the field knows no passes
    gpu = load_gpu(gpu_file())
    kernels = kernels_of([Work(0, 2_000_000, 2_000_000, passes=2.5)], np.zeros(1))
    assert roofline.predict_from_datasheet(kernels, gpu)[0] == pytest.approx(12_000)
    assert roofline.predict_by_roofline(kernels, gpu, gpu)[0] == pytest.approx(6_000)


# Kernels of a training step of ConvNeXt-B on an H100, us, which chose no constant:
# 2026-11-28-four-gpu-jobs-3-4xh100.
@pytest.mark.parametrize(
    ("op", "rows", "width", "item", "measured_us"),
    [
        ("native_layer_norm", 602_112, 128, 4, 913.4),
        ("native_layer_norm", 150_528, 256, 4, 268.2),
        ("native_layer_norm", 37_632, 512, 4, 88.5),
        ("sum", 602_112, 128, 2, 241.0),
        ("sum", 37_632, 512, 2, 54.7),
        ("sum", 37_632, 2048, 2, 75.9),
        ("sum", 602_112, 128, 4, 283.1),
        ("sum", 37_632, 512, 4, 76.1),
    ],
)
def test_norms_of_narrow_rows_and_sums_that_blocks_share(
    op: str, rows: int, width: int, item: int, measured_us: float
):
    made = call(op, rows, width, item=item)
    if op == "sum":
        total = Tensor((width,), made.inputs[0][0].dtype, item)
        made = Call("sum", made.inputs, ((total,),), (None, [0], False, None))
    kernel = kernels_of([work_of_call(f"aten::{op}", made)], np.ones(1))
    predicted_ns, _ = roofline.predict_from_datasheet(kernel, load_gpu("H100"))
    assert predicted_ns[0] / 1e3 == pytest.approx(measured_us, rel=0.18)


def test_operands_of_two_dtypes_are_loaded_singly():
    """19.3 million elements: 87.4 us on an H100, and 79.6 in float32 alone."""
    mixed = two("mul", (96, 784, 256), (96, 784, 256), "24")
    assert cycles_of(mixed, op_class("aten::mul")) == pytest.approx(96 * 784 * 256 / 0.87)
    alone = two("mul", (96, 784, 256), (96, 784, 256), "44")
    assert cycles_of(alone, op_class("aten::mul")) == 0


# Backwards of norms in training steps, both kernels, us: on H100s, on which the constants were
# chosen (2026-11-28-four-gpu-jobs-3-4xh100 and -4), and on an H200 (2026-11-28-norm-weights-h200).
@pytest.mark.parametrize(
    ("op", "gpu", "shape", "item", "measured_us"),
    [
        ("native_layer_norm_backward", "H100", (18_912, 1024), 4, 177.5),  # a block has all rows
        ("native_layer_norm_backward", "H100", (150_528, 256), 4, 312.0),  # blocks divide the rows
        ("native_layer_norm_backward", "H100", (602_112, 128), 4, 764.0),  # narrow rows
        ("_fused_rms_norm_backward", "H100", (16_384, 2048), 2, 148.0),
        ("native_layer_norm_backward", "H200", (50_176, 256), 4, 261.9),
        ("native_layer_norm_backward", "H200", (12_544, 512), 4, 81.1),
    ],
)
def test_the_backward_of_a_norm(
    op: str, gpu: str, shape: tuple[int, int], item: int, measured_us: float
):
    rows, width = shape
    x = Tensor((rows, width), {2: "bfloat16", 4: "float32"}[item], item)
    weight, mean = Tensor((width,), x.dtype, item), Tensor((rows, 1), "float32", 4)
    inputs = ((x,), (x,), None, (mean,), (mean,), (weight,), (weight,))
    made = Call(op, inputs, ((x,), (weight,), (weight,)))
    kernel = kernels_of([work_of_call(f"aten::{op}", made)], np.ones(1))
    predicted_ns, _ = roofline.predict_from_datasheet(kernel, load_gpu(gpu))
    assert predicted_ns[0] / 1e3 == pytest.approx(measured_us, rel=0.1)


def test_a_norm_without_weights_has_no_sums_of_them():
    x, mean = Tensor((12_544, 512), "float32", 4), Tensor((12_544, 1), "float32", 4)
    without = Call(
        "native_layer_norm_backward",
        ((x,), (x,), None, (mean,), (mean,), None, None),
        ((x,), None, None),
    )
    assert cached_passes_of(without) == passes_of(without) == 1.15
    assert work_of_call("aten::native_layer_norm_backward", without).tail == 0


def _elementwise_us(op: str, item: int, elements: int, scalar: Tensor | None) -> float:
    """Return the predicted time on an H200 of a call with a 0-d operand."""
    x = Tensor((elements,), {2: "bfloat16", 4: "float32"}[item], item)
    operands = ((x,),) if scalar is None else ((x,), (scalar,))
    outputs = ((x,), (Tensor((elements,), "bool", 1),)) if op == "native_dropout" else ((x,),)
    works = [work_of_call(f"aten::{op}", Call(op, operands, outputs, ()))]
    kernels = kernels_of(works, np.ones(1))
    (ns,), _ = roofline.predict_from_datasheet(kernels, load_gpu("H200"))
    return ns / 1e3


# (operator, bytes of an element, elements, us): kernels of steps captured on an H200, torch 2.11.
@pytest.mark.parametrize(
    ("op", "item", "elements", "measured"),
    [
        ("mul_", 4, 2_560_000, 9.12),
        ("mul_", 4, 7_680_000, 23.6),
        ("mul_", 4, 41_026_400, 114.8),
        ("div_", 2, 1_769_472, 5.41),
    ],
)
def test_a_scalar_on_the_gpu_is_an_operand(op: str, item: int, elements: int, measured: float):
    scalar = Tensor((), {2: "bfloat16", 4: "float32"}[item], item)
    assert _elementwise_us(op, item, elements, scalar) == pytest.approx(measured, rel=0.12)
    number = Tensor((), "float64", 8)
    assert _elementwise_us(op, item, elements, number) < 0.9 * measured


@pytest.mark.parametrize(
    ("item", "elements", "measured"),
    [(2, 6_553_600, 13.1), (2, 16_777_216, 29.5), (2, 25_165_824, 43.9), (4, 25_165_824, 72.1)],
)
def test_dropout_takes_the_time_of_its_random_numbers(item: int, elements: int, measured: float):
    assert _elementwise_us("native_dropout", item, elements, None) == pytest.approx(
        measured, rel=0.1
    )
