"""The buffers of reductions: sizes in bytes that an H100 with torch 2.11 allocated."""

import pytest
import torch

from onerank.capture.no_device.operators.reduction_buffers import buffer_bytes, reduced_dims

MIB = 1 << 20
H100 = {"threads": 2048, "sm_count": 132}


@pytest.mark.parametrize(
    ("shape", "reduced", "expected"),
    [
        # Gradients of biases of 2,048, 8,192 and 6,144 elements.
        ((4096, 2048), (0,), (64 * MIB, 64)),
        ((8192, 2048), (0,), (128 * MIB, 64)),
        ((4096, 8192), (0,), (132 * MIB, 256)),
        ((4096, 6144), (0,), (132 * MIB, 192)),
        ((4, 1024, 2048), (0, 1), (64 * MIB, 64)),
        ((4096, 2048), (1,), (0, 0)),
        ((16, 2048), (0,), (0, 0)),
        ((1, 2048), (0,), (0, 0)),
    ],
)
def test_columns_that_several_blocks_sum(shape, reduced, expected):
    source = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert buffer_bytes(source, set(reduced), **H100) == expected


def test_a_sum_of_all_elements_takes_little():
    source = torch.empty(10**7, device="meta")
    bytes_taken, semaphores = buffer_bytes(source, {0}, **H100)
    assert (bytes_taken, semaphores) == (4 * 528, 4)


def test_dimensions_of_a_call():
    source = torch.empty(2, 3, 4, device="meta")
    assert reduced_dims("sum", (source,), {}) == {0, 1, 2}
    assert reduced_dims("sum", (source, [-1], True), {}) == {2}
    assert reduced_dims("amax", (source,), {"dim": 1}) == {1}
    assert reduced_dims("linalg_vector_norm", (source, 2.0, [0]), {}) == {0}
    assert reduced_dims("mean", (source.sum(),), {"dim": [0]}) == set()
