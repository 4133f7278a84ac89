"""How many times over kernels stream their operator's bytes."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models import datasheet, roofline
from onerank.annotate.models.kernels import kernels_of
from onerank.annotate.work.passes import passes_of
from onerank.annotate.work.record import Work
from onerank.annotate.work.shapes import Call, Tensor


def call(op: str, *shape: int, item: int = 2, saved: int = 8) -> Call:
    dtype = {2: "bfloat16", 4: "float32"}[item]
    x, sums = Tensor(shape, dtype, item), Tensor((saved,), "float32", 4)
    return Call(op, ((x,),), ((x,), (sums,), (sums,)), ())


@pytest.mark.parametrize(
    ("made", "passes"),
    [
        (call("native_layer_norm", 4096, 4096), 1.8),
        (call("native_layer_norm_backward", 4096, 4096), 2.7),
        (call("native_batch_norm", 32, 8, 56, 56), 1.5),
        (call("native_batch_norm", 32, 8, 56, 56, saved=0), 1.0),  # by running sums
        (call("native_batch_norm_backward", 32, 8, 56, 56), 5 / 3),
        (call("_softmax", 12, 1024, 1024), 1.0),
        (call("_log_softmax", 4096, 32000, item=4), 1.85),
        (call("_log_softmax_backward_data", 4096, 8000, item=4), 1.0),
        (call("_log_softmax_backward_data", 4096, 32000, item=4), 1.4),
        (call("index_add_", 4096, 2048), 5.7),
        (call("index_add_", 4096, 2048, item=4), 1.0),
        (call("add", 4096, 4096), 1.0),
    ],
)
def test_passes(made: Call, passes: float):
    assert passes_of(made) == passes


def test_what_nobody_measured_streams_its_bytes_so_often(gpu_file):
    # 4 MB at 1 TB/s are 4 us, 2.5 times over 10; the baseline of the field knows no passes
    gpu = load_gpu(gpu_file())
    kernels = kernels_of([Work(0, 2_000_000, 2_000_000, passes=2.5)], np.zeros(1))
    assert datasheet.predict(kernels, gpu)[0] == pytest.approx(12_000)
    assert roofline.predict(kernels, gpu, gpu)[0] == pytest.approx(6_000)
