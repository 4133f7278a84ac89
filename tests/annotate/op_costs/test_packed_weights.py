"""Products with packed weights, by torch's own kernels, against measured times."""

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models import learned
from onerank.annotate.models.features import kernels_of
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Tensor

_BYTES = {"bfloat16": 2, "int32": 4}


def tensor(*shape: int, dtype: str = "bfloat16") -> tuple[Tensor]:
    return (Tensor(shape, dtype, _BYTES[dtype]),)


def four_bit(m: int, n: int, k: int, group: int = 128) -> Work:
    packed = tensor(n // 8, k // 128, 32, 4, dtype="int32")
    given = (tensor(m, k), packed, None, tensor(k // group, n, 2))
    call = Call("_weight_int4pack_mm", given, (tensor(m, n),), (None, None, group))
    return work_of_call("aten::_weight_int4pack_mm", call)


# us on an H100 (benchmarks/results/2026-11-28-four-bit-products-h100.txt).
@pytest.mark.parametrize(
    ("m", "n", "k", "measured_us", "error"),
    [
        (1, 14336, 4096, 22.6, 0.12),
        (8, 14336, 4096, 40.1, 0.06),
        (32, 14336, 4096, 131.4, 0.03),
        (512, 14336, 4096, 2008.3, 0.03),
        (16, 4096, 4096, 21.4, 0.04),
        (1, 1024, 8192, 8.7, 0.12),
        (64, 3584, 18944, 310.6, 0.05),
    ],
)
def test_a_product_with_weights_of_four_bits_takes_the_cycles_of_its_kernel(
    m: int, n: int, k: int, measured_us: float, error: float
):
    work = four_bit(m, n, k)
    assert work.flops == 2 * m * n * k
    times, _ = learned.predict_from_description(kernels_of([work], np.zeros(1)), load_gpu("H100"))
    assert float(times[0]) / 1e3 == pytest.approx(measured_us, rel=error)
