"""Measuring calls: which are requested, how they are made, timed and reported, on a CPU."""

import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from onerank.annotate.kernel_db.calls import call_key
from onerank.capture.bench import requests
from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.bench_runner import Bench, Message, child_on, measure_isolated
from onerank.capture.bench.measure_call import Account, Replays
from onerank.capture.bench.random_operands import layouts, overload_of, with_random_operands
from onerank.capture.bench.requests import BenchRequest, trace_requests
from onerank.capture.profiling.nvml import Power
from onerank.converters.sources.kineto import convert_directory
from onerank.ir.errors import CaptureError

CPU = torch.device("cpu")
TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: where cores are busy, waiting for the last of many is all that is timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_runner_times_calls_cold_and_warm() -> None:
    small, large = BenchOperand((64, 64), "float32"), BenchOperand((1024, 1024), "float32")
    calls = [
        BenchCall("aten::mm", (small, small.swapped(0, 1))),
        BenchCall("aten::mm", (large, large)),
        BenchCall("aten::add_", (large, BenchOperand((), "float64", host=True), 1)),
        BenchCall("aten::no_such_operator", (small,)),
    ]
    account = Account(requested=len(calls))
    found = list(Bench(CPU).measure([BenchRequest((one,)) for one in calls], account))
    assert account.done == 3
    assert dict(account.failed) == {
        f"torch {torch.__version__} has no operator aten::no_such_operator": 1
    }
    got = {(one.call.op, one.call.arguments[0], one.l2): one for one in found}
    assert len(got) == len(found) == 5
    tiny = got["aten::mm", small, "warm"]
    assert tiny.call.layout() == {"1": [1, 64]}
    for one in found:
        assert 0 < one.timing.p10_ns <= one.timing.median_ns <= one.timing.p90_ns
        assert one.timing.samples >= 5
        assert len(one.launched.names) == len(one.launched.times_ns) == 1
    assert got["aten::mm", large, "warm"].timing.median_ns > 20 * tiny.timing.median_ns


def test_every_call_of_the_grid_has_an_operator_and_a_key() -> None:
    wanted = requests.training_grid()
    calls = [one.layouts[0] for one in wanted]
    assert len(set(calls)) == len(calls) > 3000
    assert any(one.sustained for one in wanted)
    for call in calls:
        assert overload_of(call)._schema.name == call.op
        assert call_key(call.op, *call.texts()) is not None


def test_the_grid_of_power_spans_every_class_and_is_held() -> None:
    wanted = requests.power_grid()
    assert all(one.sustained for one in wanted)
    calls = [one.layouts[0] for one in wanted]
    assert len(set(calls)) == len(calls) < 75, "some two minutes"
    assert set(calls) <= {one.layouts[0] for one in requests.training_grid() if one.sustained}
    operators = {call.op.removeprefix("aten::") for call in calls}
    assert operators >= {"mm", "_scaled_mm", "_cudnn_attention_backward", "_fused_rms_norm",
                         "silu", "sum", "_fused_adamw_", "_log_softmax", "copy_"}  # fmt: skip


def test_a_held_call_runs_without_a_pause() -> None:
    times: list[tuple[float, float]] = []

    def work() -> None:
        begin = time.perf_counter()
        time.sleep(0.002)
        times.append((begin, time.perf_counter()))

    replays = Replays([work], on_gpu=False)
    times.clear()
    begin = time.perf_counter()
    timing = replays.sustain(0.3)
    spent = time.perf_counter() - begin
    slept = [end - start for start, end in times]
    assert 0.3 <= spent < 0.3 + 16 * max(slept), "eight calls at once, and what began before"
    assert sum(slept) > 0.9 * spent
    late = [end - start for start, end in times if start >= begin + 0.15]
    assert timing.median_ns == pytest.approx(1e9 * statistics.median(late), rel=0.3)
    assert timing.samples < len(times), "only those of the second half"


def test_a_call_of_a_trace_comes_back_with_the_key_of_its_node() -> None:
    bf16 = "Tensor(c10::BFloat16)"
    shapes = "[[[1,2,64],[1,2,64]],[]]"
    types = json.dumps([f"GenericList[{bf16},{bf16}]", "Int"])
    values = '[[[1,2,0,128,2,"cuda:0"],[3,4,0,128,2,"cuda:0"]],-1]'
    call = BenchCall.parse("aten::cat", shapes, types, values)
    assert call == BenchCall(
        "aten::cat", ((BenchOperand((1, 2, 64)), BenchOperand((1, 2, 64))), -1)
    )
    assert call_key("aten::cat", *call.texts()) == call_key("aten::cat", shapes, types, values)


def test_a_call_that_ends_its_process_costs_itself_alone() -> None:
    """The child is played: it dies whenever it is to measure the third of five calls."""
    calls = [BenchCall("aten::silu", (BenchOperand((size,)),)) for size in (1, 2, 3, 4, 5)]
    wanted = [BenchRequest((one,)) for one in calls]
    starts: list[int] = []

    def start(
        given: Sequence[BenchRequest], one_by_one: frozenset[int], seconds: float
    ) -> Iterator[Message]:
        starts.append(len(given))
        account = Account(requested=len(given))
        together = [place for place in range(len(given)) if place not in one_by_one]
        for batch in (
            ([[place] for place in sorted(one_by_one)] + [together]) if one_by_one else [together]
        ):
            yield "begin", batch
            if any(given[place] is wanted[2] for place in batch):
                yield "died", -11
                return
            for place in batch:
                account.done += 1
                yield "end", (place, account)
        yield "finished", account

    account, ends = Account(requested=5), Counter[str]()
    found = measure_isolated(wanted, account, start, advance=lambda: ends.update(["end"]))
    assert list(found) == []
    assert starts == [5, 5, 2]
    assert (account.done, dict(account.untried), ends["end"]) == (4, {}, 5)
    reason = "aten::silu: ended the process by signal 11 (SIGSEGV)"
    assert dict(account.failed) == {reason: 1}


def _silus(count: int) -> list[BenchRequest]:
    return [
        BenchRequest((BenchCall("aten::silu", (BenchOperand((size + 1,)),)),))
        for size in range(count)
    ]


def test_calls_after_too_many_that_end_the_process_are_given_up() -> None:
    def start(
        given: Sequence[BenchRequest], one_by_one: frozenset[int], seconds: float
    ) -> Iterator[Message]:
        yield "begin", [0]
        yield "died", -11

    account = Account(requested=20)
    assert not list(measure_isolated(_silus(20), account, start))
    assert sum(account.failed.values()) == 12
    assert dict(account.untried) == {"12 calls before them ended the process": 8}


def test_calls_without_time_are_reported() -> None:
    account = Account(requested=3)
    assert not list(Bench(CPU).measure(_silus(3), account, seconds=0))
    assert dict(account.untried) == {"no time was left": 3}


def test_what_an_interrupted_child_did_is_reported() -> None:
    def start(
        given: Sequence[BenchRequest], one_by_one: frozenset[int], seconds: float
    ) -> Iterator[Message]:
        account = Account(requested=len(given))
        for place, measured in enumerate(Bench(CPU).measure(given, account)):
            yield measured
            yield "end", (place, account)

    account = Account(requested=3)
    with contextlib.closing(measure_isolated(_silus(3), account, start)) as found:
        next(found)
        next(found)
    assert (account.done, dict(account.untried)) == (1, {"interrupted": 2})


def test_a_failure_is_reported_with_the_end_of_its_call() -> None:
    """So that a call that is tried again after a crash counts once."""
    wanted = [BenchRequest((BenchCall("aten::no_such_operator", ()),)), *_silus(1)]
    account = Account(requested=2)
    found = Bench(CPU).measure(wanted, account)
    next(found)
    assert (account.done, sum(account.failed.values())) == (0, 0)
    assert not list(found)
    assert (account.done, sum(account.failed.values())) == (1, 1)


def test_a_child_measures_and_tells() -> None:
    small = BenchOperand((64, 64), "float32")
    calls = [BenchCall("aten::mm", (small, small)), BenchCall("aten::no_such", (small,))]
    account = Account(requested=2)
    found = list(measure_isolated([BenchRequest((one,)) for one in calls], account, child_on(CPU)))
    assert [(one.call, one.l2) for one in found] == [(calls[0], "warm")]
    assert (account.done, dict(account.untried), sum(account.failed.values())) == (1, {}, 1)


def test_whole_numbers_of_an_unknown_range_are_no_operands() -> None:
    call = BenchCall(
        "aten::put_", (BenchOperand((8,)), BenchOperand((4,), "int64"), BenchOperand((4,)), False)
    )
    account = Account(requested=1)
    assert not list(Bench(CPU).measure([BenchRequest((call,))], account))
    (why,) = account.failed
    assert why == "aten::put_: argument 1 holds integers whose valid range is unknown"


def test_the_calls_of_a_captured_step_have_the_keys_of_its_nodes() -> None:
    graph, _ = convert_directory(TRACES / "h200-llama-8b-4l-tp4")
    plan = trace_requests(graph)
    assert plan.dropped == {}
    texts = ("op", "input_shapes", "input_types", "input_values")
    rows = zip(*(graph.text(name) for name in texts), graph.gpu_compute.tolist(), strict=True)
    keys = {call_key(*row[:4]) for row in rows if row[4]}
    made = [call_key(one.layouts[0].op, *one.layouts[0].texts()) for one in plan.requests]
    assert set(made) == keys
    assert len(keys) == 122
    first = plan.requests[0].layouts[0]
    assert first.op == "aten::mm", "products take the most time"
    assert all(one.kernels for one in plan.requests)


def test_layouts_are_those_of_training() -> None:
    left, right = BenchOperand((8, 4)), BenchOperand((4, 2))
    products = layouts(BenchCall("aten::mm", (left, right)))
    assert [one.layout() for one in products] == [
        {"1": [1, 4]},
        {},
        {"0": [1, 8]},
        {"0": [1, 8], "1": [1, 4]},
    ]
    single = BenchCall(
        "aten::mm", (BenchOperand((8, 4), "float32"), BenchOperand((4, 2), "float32"))
    )
    assert sum(one.tf32 for one in layouts(single)) == 4
    heads = BenchOperand((1, 2, 16, 8))
    tried = [one.layout() for one in layouts(BenchCall("aten::neg", (heads,)))]
    assert tried[0] == {}
    assert {"0": [256, 8, 16, 1]} in tried, "a view of [b, s, h, d]"
    assert {"0": [512, 256, 16, 1]} in tried, "the first half of each row"
    number = BenchOperand((), "float64", host=True)
    added = BenchCall("aten::add", (BenchOperand((5,)), number, 1))
    assert [one.layout() for one in layouts(added)] == [{"1": "host"}]
    flash = BenchCall("aten::_flash_attention_forward", (heads, heads, heads))
    assert len(layouts(flash)) == 2, "never with its last dimension strided"


def test_power_is_the_slope_of_the_energy_counter() -> None:
    power = Power()
    assert power.watts is None
    # millijoules: 100 W for the first 0.1 s, then 600 W
    power.updates = [(0.0, 0), (0.1, 10_000), (0.2, 70_000), (0.3, 130_000), (0.4, 190_000)]
    assert power.watts == pytest.approx(600)
    assert power.sm_clock_mhz is None
    power.clocks = [(0.0, 1980), (0.1, 1980), (0.2, 1500), (0.3, 1410), (0.4, 1440)]
    assert power.sm_clock_mhz == 1440, "median of the second half"


def test_a_child_that_cannot_begin_is_an_error() -> None:
    wanted = [BenchRequest((BenchCall("aten::silu", (BenchOperand((8,)),)),))]
    account = Account(requested=1)
    with pytest.raises(CaptureError) as raised:
        list(measure_isolated(wanted, account, lambda *_: iter([("died", 1)])))
    assert raised.value.code == "bench-process-died"


def test_an_operand_passed_twice_is_one_tensor_and_part_of_the_key() -> None:
    shapes, types = "[[4,8],[4,8]]", '["Tensor(float)","Tensor(float)"]'
    tensor, other = '[7,9,0,32,4,"cuda:0"]', '[8,9,0,32,4,"cuda:0"]'
    twice = BenchCall.parse("aten::mul", shapes, types, f"[{tensor},{tensor}]")
    apart = BenchCall.parse("aten::mul", shapes, types, f"[{tensor},{other}]")
    assert (twice.same, apart.same) == (((1, 0),), ())
    assert (twice.nbytes, apart.nbytes) == (128, 256)
    keys = [call_key("aten::mul", *one.texts()) for one in (twice, apart)]
    assert [key.attributes for key in keys if key] == ['{"1":"=0"}', "{}"]
    assert keys[0] == call_key("aten::mul", shapes, types, f"[{tensor},{tensor}]")
    squares = with_random_operands(twice, CPU).function()
    assert bool((squares >= 0).all())
    assert not bool((with_random_operands(apart, CPU).function() >= 0).all())


def test_operands_neither_vanish_nor_grow_in_place() -> None:
    one = BenchOperand((1000,), "float32")
    for op, factors in (("_foreach_div_", (1e-8,)), ("_foreach_mul_", (1e8,))):
        call = BenchCall(f"aten::{op}", ((one,), factors))
        made = with_random_operands(call, CPU)
        for _ in range(50):
            made.function()
    call = BenchCall("aten::mul_", (one, one))
    made = with_random_operands(call, CPU)
    first = made.function().abs().clone()
    for _ in range(50):
        last = made.function()
    assert torch.equal(last.abs(), first)
