"""Results of operators on fake tensors that repeat an earlier call."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onerank.capture.no_device.operators.fake_kernels import RepeatedCalls

aten: Any = torch.ops.aten


class Calls:
    """Runs operators through `RepeatedCalls`, and counts those that run their implementation."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.repeated = RepeatedCalls()
        self.ran = 0

    def tensor(self, *shape: int, **options: Any) -> torch.Tensor:
        with self.mode:
            return torch.empty(*shape, **options)

    def run(self, func: Any, tensor: torch.Tensor, *args: Any) -> Any:
        def implementation(*args: Any) -> Any:
            self.ran += 1
            with self.mode:
                return func(*args)

        return self.repeated.run(implementation, func, (tensor,), (tensor, *args), {})


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_a_view_shares_the_storage_of_its_own_operand(calls: Calls):
    first, second = calls.tensor(4, 6), calls.tensor(4, 6)
    calls.run(aten.slice.Tensor, first, 0, 1, 3)
    view = calls.run(aten.slice.Tensor, second, 0, 1, 3)
    assert calls.ran == 1
    assert (view.shape, view.stride(), view.storage_offset()) == ((2, 6), (6, 1), 6)
    assert view.untyped_storage()._cdata == second.untyped_storage()._cdata


def test_a_result_has_a_new_storage(calls: Calls):
    tensor = calls.tensor(4, 6, dtype=torch.bfloat16)
    results = [calls.run(aten.exp.default, tensor) for _ in range(3)]
    assert calls.ran == 1
    assert {result.dtype for result in results} == {torch.bfloat16}
    assert len({result.untyped_storage()._cdata for result in (tensor, *results)}) == 4


def test_several_results_are_views_of_one_operand(calls: Calls):
    for _ in range(2):
        parts = calls.run(aten.split.Tensor, calls.tensor(4, 6), 2)
    assert calls.ran == 1
    assert [(part.shape, part.storage_offset()) for part in parts] == [((2, 6), 0), ((2, 6), 12)]
    assert len({part.untyped_storage()._cdata for part in parts}) == 1


def test_equal_numbers_of_other_types_are_other_calls(calls: Calls):
    tensor = calls.tensor(3, dtype=torch.int64)
    assert calls.run(aten.add.Scalar, tensor, 1).dtype == torch.int64
    assert calls.run(aten.add.Scalar, tensor, 1.0).dtype == torch.float32
    assert calls.ran == 2


def test_an_operator_that_writes_runs_each_time(calls: Calls):
    tensor = calls.tensor(3)
    assert all(calls.run(aten.add_.Scalar, tensor, 1) is tensor for _ in range(2))
    assert calls.ran == 2


def test_a_view_in_inference_mode_is_no_inference_tensor(calls: Calls):
    # A script that trains, then evaluates: timm expands a class token.
    tensor = calls.tensor(1, 1, 6)
    calls.run(aten.expand.default, tensor, [4, 1, 6])
    calls.run(aten.exp.default, tensor)
    with torch.inference_mode():
        view = calls.run(aten.expand.default, tensor, [4, 1, 6])
        result = calls.run(aten.exp.default, tensor)
        created = calls.tensor(1, 1, 6)
        of_inference = calls.run(aten.expand.default, created, [4, 1, 6])
    assert calls.ran == 2
    inference = [each.is_inference() for each in (view, result, created, of_inference)]
    assert inference == [False, True, True, True]
