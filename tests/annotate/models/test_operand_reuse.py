"""Which operands of a step the last-level cache still has."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.operand_reuse import OperandReuse
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Graph

BF16 = "Tensor(c10::BFloat16)"
H100 = load_gpu("H100")
SMALL, LARGE = 1 << 20, 1 << 26  # elements of a kernel of 4 MB, and of one of 256 MB


def place(storage: int, numel: int, device: str = "cuda:0") -> list[Any]:
    return [storage, storage, 0, numel, 2, device]


def exp(read: int, written: int, numel: int) -> dict[str, Any]:
    return {
        "op": "aten::exp",
        "inputs": [(BF16, [numel])],
        "outputs": [(BF16, [numel])],
        "values": [place(read, numel)],
        "written": [place(written, numel)],
    }


@pytest.fixture
def step(trace: Callable[..., Graph]) -> Callable[..., KernelFeatures]:
    """Return the features of kernels that run one after another."""

    def make(*operators: dict[str, Any]) -> KernelFeatures:
        graph = trace(*operators, device="H100")
        texts = {0: graph.strings.encode([""])[0]}
        written = [json.dumps(o["written"], separators=(",", ":")) for o in operators]
        codes = graph.strings.encode(written)
        kernels = np.flatnonzero(graph.compute)
        column = np.full(len(graph), texts[0])
        column[kernels] = codes
        starts = graph.nodes.start_ns.copy()
        starts[kernels] = np.arange(len(kernels)) * 1000
        graph = graph.with_columns(output_values=column, start_ns=starts)
        return KernelFeatures.of(graph, op_costs_of(graph))

    return make


def test_bytes_between_two_uses(step):
    kernels = step(exp(1, 2, SMALL), exp(2, 3, SMALL), exp(1, 4, SMALL), exp(9, 5, LARGE))
    moved = [4 * SMALL, 4 * SMALL, 4 * SMALL, 4 * LARGE]
    assert kernels.reuse.share[:, 0] == pytest.approx([0.5] * 4)
    # The first reads what the third of the step before read; 9 is used once per step.
    expected = [moved[3], 0, moved[1], sum(moved[:3])]
    assert kernels.reuse.between[:, 0] == pytest.approx(expected)


def test_an_operand_of_long_ago_comes_from_memory(step):
    kernels = step(exp(1, 2, SMALL), exp(2, 3, SMALL), exp(8, 9, LARGE), exp(3, 4, SMALL))
    assert kernels.cached_share(H100) == pytest.approx([0.5, 1, 0, 0.5])
    assert kernels.miss_s(H100) * 1e9 == pytest.approx([270, 0, 270, 270])
    fresh, cold = kernels.s_per_byte(H100)[[1, 3]]
    assert cold == pytest.approx((fresh + 1 / H100.bandwidth_bytes_per_s) / 2)


def test_kernels_of_an_optimizer_divide_its_lists(trace):
    """Two operators update the same list of four tensors of 4 MB, in four kernels each."""
    numel = SMALL * 2
    lists = {
        "inputs": [(f"GenericList[{','.join([BF16] * 4)}]", [[numel]] * 4)],
        "values": [[place(storage, numel) for storage in range(1, 5)]],
        "kernels": [(f"multi_tensor_apply_{part}", 10_000) for part in range(4)],
    }
    graph = trace(*({"op": "aten::_foreach_mul_"} | lists for _ in range(2)), device="H100")
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    # A part was last used before the other three parts, which are read and written.
    assert kernels.reuse.share.sum(axis=1) == pytest.approx(np.full(8, 0.5))
    assert kernels.reuse.between.max(axis=1) == pytest.approx(np.full(8, 3 * 4 * numel))


def test_numbers_on_the_cpu_and_operands_without_a_place_are_not_followed(step):
    on_cpu = exp(1, 2, SMALL) | {"values": [place(1, SMALL, "cpu")]}
    unknown = exp(1, 2, SMALL) | {"values": [None]}
    no_address = exp(2**64 - 5, 2, SMALL)
    kernels = step(on_cpu, unknown, no_address, exp(8, 9, LARGE))
    assert kernels.reuse.share[:3].tolist() == [[0, 0, 0]] * 3
    assert kernels.cached_share(H100)[:3] == pytest.approx([1, 1, 1])
    assert OperandReuse.unknown(2).cached_share(np.array([0.0, 1e12]), 5e7).tolist() == [1, 0]
