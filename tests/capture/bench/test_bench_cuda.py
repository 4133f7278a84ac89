"""Measuring calls on a GPU."""

import pytest
import torch

from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.bench_runner import Bench
from onerank.capture.bench.measure_call import Account
from onerank.capture.bench.requests import BenchRequest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_replays_agree_with_the_profiler_and_the_caches_differ() -> None:
    bench = Bench(torch.device("cuda", torch.cuda.current_device()))
    large = BenchOperand((4096, 4096))
    calls = [
        BenchCall("aten::mm", (large, large.swapped(0, 1))),
        BenchCall("aten::add", (BenchOperand((1 << 21,)), BenchOperand((1 << 21,)), 1)),
        BenchCall("aten::copy_", (BenchOperand((1 << 28,)), BenchOperand((1 << 28,)), False)),
    ]
    account = Account(requested=len(calls))
    found = {
        (one.call.op, one.l2): one
        for one in bench.measure([BenchRequest((one,)) for one in calls], account)
    }
    assert not account.failed
    assert not account.inner
    assert account.done == 3
    for one in found.values():
        whole = sum(one.launched.times_ns)
        assert one.timing.median_ns == pytest.approx(whole, rel=0.35, abs=2500), one
    assert found["aten::add", "warm"].timing.median_ns < found["aten::add", "cold"].timing.median_ns
    assert ("aten::copy_", "warm") not in found
    assert found["aten::copy_", "cold"].launched.names == ("Memcpy DtoD (Device -> Device)",)


def test_the_layout_that_launches_the_traced_kernel_is_measured() -> None:
    bench = Bench(torch.device("cuda", torch.cuda.current_device()))
    left, right = BenchOperand((512, 1024)), BenchOperand((1024, 768))
    layouts = tuple(
        BenchCall("aten::mm", operands)
        for operands in ((left, right), (left, right.swapped(0, 1)), (left.swapped(0, 1), right))
    )
    first = {
        one.launched.names[-1]: one.call
        for call in layouts
        for one in bench.measure([BenchRequest((call,))], Account(requested=1))
    }
    assert len(first) == 3, "cuBLAS names its kernels by the operands' layout"
    for name, call in first.items():
        account = Account(requested=1)
        wanted = BenchRequest(layouts, frozenset({name}))
        assert {one.call for one in bench.measure([wanted], account)} == {call}
        assert not account.other_kernels
