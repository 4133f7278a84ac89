"""Chains of loads bound kernels with few rows."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models import roofline
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.load_chains import chain_of, far_load_of
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Tensor

H100 = load_gpu("H100")


def call(op: str, shape: tuple[int, ...], result: tuple[int, ...], item: int = 4, axis: int = -1):
    dtype = {2: "bfloat16", 4: "float32", 8: "int64"}[item]
    x, y = Tensor(shape, dtype, item), Tensor(result, dtype, item)
    return Call(op, ((x,), (), ()), ((y,),), (None, axis, None))


def rows(op: str, *shape: int, item: int = 4, axis: int = -1) -> Call:
    return call(op, shape, shape, item, axis)


def indexed(op: str, operand: tuple[int, ...], index: tuple[int, ...], axis: int) -> Call:
    x, at = Tensor(operand, "float32", 4), Tensor(index, "int64", 8)
    return Call(op, ((x,), (), (at,)), ((Tensor(index, "float32", 4),),), (None, axis, None))


@pytest.mark.parametrize(
    ("made", "measured_us"),
    [
        (indexed("gather", (1, 256), (1, 8), 1), 2.05),
        (indexed("gather", (64, 256), (64, 8), 1), 4.83),
        (indexed("scatter_", (16, 128), (16, 8), 1), 2.18),
        (indexed("scatter_", (64, 128), (64, 8), 1), 4.83),
        (indexed("gather", (65536, 64), (8, 64), 0), 2.0),  # whole rows
        (indexed("gather", (600, 256), (600, 8), 1), 9.02),
        (indexed("scatter_add_", (96, 64), (96, 6), 1), 5.54),
        # Up to 16 rows one after another.
        (indexed("index_select", (65536, 4096), (12,), 0), 8.90),
        (indexed("index_add_", (65536, 1024), (12,), 0), 10.46),
        (indexed("index_select", (65536, 4096), (17,), 0), 2.08),
        (indexed("flip", (2, 6144), (2, 6144), 0), 3.33),
        (indexed("index_put_", (65536, 4), (4,), 0), 4.03),
    ],
)
def test_an_element_waits_for_its_index(made: Call, measured_us: float):
    """Kernels of an H100, torch 2.11, which start in 1.22 us; a load takes 0.41.

    The loads come from memory, because the cases of that benchmark take turns.
    """
    assert 1.22 + 0.41 * chain_of(made) * far_load_of(made) == pytest.approx(measured_us, rel=0.12)


@pytest.mark.parametrize(
    ("made", "loads"),
    [
        (rows("native_layer_norm", 16, 7168, item=2), 0.69 * 2 * 14),
        (rows("native_layer_norm", 16, 7169, item=2), 0.69 * 2 * 15),
        (rows("_fused_rms_norm", 16, 7168, item=2), 14),
        (rows("_softmax", 600, 896), 0.23 * 32 - 1),  # 32 numbers of a row for each thread
        # 192 numbers of a row for each thread, which reads two or four at a time.
        (call("std", (96, 6144), (96, 1), 2), 96 * 0.8),
        (call("amax", (96, 6144), (96, 1), 2), 48 * 0.535),
        (call("argmax", (), (4,), 4), 1.05),  # of a scalar, with a result of another shape
        (rows("_softmax", 8, 128256), 3 * 32),
        (rows("_softmax", 8, 12288), 3),  # the row stays in shared memory
        (call("argmax", (8, 128256), (8,), 4), 63 * 1.05),
        (call("sum", (8, 128256), (128256,), 4), 0),  # along the rows
        (call("sum", (4096, 4096), (), 4), 4 * 0.535),  # several blocks share it: 16 numbers each
        (rows("cumsum", 1024, 256, item=8, axis=0), 1024 * 0.386),
        # 512, 128 and 32 threads for rows of 4096; a single row is divided among blocks.
        (rows("cumsum", 8, 128256), 3.5 * 126),
        (rows("cumsum", 64, 4096), 3.5 * 16),
        (rows("cumsum", 1024, 4096), 3.5 * 64),
        (rows("cumsum", 1, 4096), 0),
        (rows("cumsum", 0, 4096), 0),
        (rows("add", 16, 7168), 0),
    ],
)
def test_loads_that_wait_for_each_other(made: Call, loads: float):
    assert chain_of(made) == pytest.approx(loads)
    assert work_of_call(f"aten::{made.op}", made).chain == pytest.approx(loads)


@pytest.mark.parametrize(
    ("made", "measured_us"),
    [
        # An H100, torch 2.11, operands in the cache: 2026-11-27-small-operators-blind-h100.
        (rows("native_layer_norm", 3, 8192, item=2), 11.04),
        (rows("native_layer_norm", 40, 3584, item=2), 6.24),
        (call("std", (40, 3584), (40, 1), 2), 21.06),
        # 2026-11-27-small-operators-h100
        (rows("_softmax", 1, 128256), 40.9),
        (rows("cumsum", 1500, 256, item=8, axis=0), 237.6),
        (rows("cumsum", 8192, 256, item=8, axis=0), 3172.6),
        (rows("cumsum", 64, 4096), 24.3),
        (rows("cumsum", 1024, 4096), 86.5),
    ],
)
def test_times_of_few_rows_on_an_h100(made: Call, measured_us: float):
    kernels = kernels_of([work_of_call(f"aten::{made.op}", made)], np.zeros(1))
    (ns,), (rule,) = roofline.predict_from_datasheet(kernels, H100)
    assert ns / 1e3 == pytest.approx(measured_us, rel=0.15)
    assert rule == Rule.CHAIN


def test_other_vendors_and_the_roofline_of_the_literature_have_no_chains():
    kernels = kernels_of([Work(0, 1000, 1000, chain=100)], np.zeros(1))
    chained, plain = (
        model(kernels, *gpus)[0].item()
        for model, gpus in (
            (roofline.predict_from_datasheet, (H100,)),
            (roofline.predict_by_roofline, (H100, H100)),
        )
    )
    assert chained - plain == pytest.approx(41_000, rel=0.01)
    mi300x = load_gpu("MI300X")
    assert roofline.predict_from_datasheet(kernels, mi300x)[0].item() < 10_000
