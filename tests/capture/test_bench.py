"""Measuring calls: what is asked for, how it is made, timed and told. A CPU times its operators."""

import json

import torch

from onerank.annotate.call_key import call_key
from onerank.capture.bench.call import BenchCall, Operand
from onerank.capture.bench.grid import training
from onerank.capture.bench.operands import overload_of
from onerank.capture.bench.runner import Account, Bench
from onerank.capture.bench.trace import Wanted

CPU = torch.device("cpu")


def test_the_runner_times_calls_cold_and_warm() -> None:
    small, large = Operand((64, 64), "float32"), Operand((1024, 1024), "float32")
    calls = [
        BenchCall("aten::mm", (small, small.swapped(0, 1))),
        BenchCall("aten::mm", (large, large)),
        BenchCall("aten::add_", (large, Operand((), "float64", host=True), 1)),
        BenchCall("aten::no_such_operator", (small,)),
    ]
    account = Account(asked=len(calls))
    found = list(Bench(CPU).measure([Wanted((one,)) for one in calls], account))
    assert account.done == 3
    assert dict(account.failed) == {
        f"torch {torch.__version__} has no operator aten::no_such_operator": 1
    }
    got = {(one.call.op, one.call.arguments[0], one.l2): one for one in found}
    assert len(got) == len(found) == 5
    tiny = got["aten::mm", small, "warm"]
    assert tiny.call.layout() == {"1": [1, 64]}
    for one in found:
        assert 0 < one.timing.low_ns <= one.timing.median_ns <= one.timing.high_ns
        assert one.timing.samples >= 5
        assert len(one.launched.names) == len(one.launched.times_ns) == 1
    assert got["aten::mm", large, "warm"].timing.median_ns > 20 * tiny.timing.median_ns


def test_every_call_of_the_grid_has_an_operator_and_a_key() -> None:
    wanted = training()
    calls = [one.layouts[0] for one in wanted]
    assert len(set(calls)) == len(calls) > 3000
    assert any(one.held for one in wanted)
    for call in calls:
        assert overload_of(call)._schema.name == call.op
        assert call_key(call.op, *call.texts()) is not None


def test_a_call_of_a_trace_comes_back_with_the_key_of_its_node() -> None:
    bf16 = "Tensor(c10::BFloat16)"
    shapes = "[[[1,2,64],[1,2,64]],[]]"
    types = json.dumps([f"GenericList[{bf16},{bf16}]", "Int"])
    values = '[[[1,2,0,128,2,"cuda:0"],[3,4,0,128,2,"cuda:0"]],-1]'
    call = BenchCall.parse("aten::cat", shapes, types, values)
    assert call == BenchCall("aten::cat", ((Operand((1, 2, 64)), Operand((1, 2, 64))), -1))
    assert call_key("aten::cat", *call.texts()) == call_key("aten::cat", shapes, types, values)
