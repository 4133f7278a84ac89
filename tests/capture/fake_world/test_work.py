"""Work handles of asynchronous calls: their wait ranges, and the tensors they keep."""

import gc
import json

import torch
import torch.distributed as dist
from raised import raises_code
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, profile


def waits(path, run) -> list[int]:
    """Numbers of the calls whose waits are marked in an execution trace of `run`."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(path))
    with profile():
        observer.start()
        run()
        observer.stop()
    observer.unregister_callback()
    nodes = json.loads(path.read_text())["nodes"]
    marks = [node for node in nodes if node["name"] == "onerank::wait"]
    return [json.loads(mark["inputs"]["values"][-1])["sequence"] for mark in marks]


def test_waits_are_marked_with_the_call_they_are_for(recorder, tmp_path):
    tensor = torch.ones(4)

    def run():
        first = dist.all_reduce(tensor, async_op=True)
        second = dist.all_reduce(tensor, async_op=True)
        dist.all_reduce(tensor)  # blocking: its wait is no event of its own
        second.wait()
        first.wait()

    assert waits(tmp_path / "et.json", run) == [1, 0]


def test_a_wait_for_the_future_is_a_wait_for_the_call(recorder, tmp_path):
    tensor = torch.ones(4)

    def run():
        first = dist.all_reduce(tensor, async_op=True).get_future()
        second = dist.all_reduce(tensor, async_op=True).get_future()
        assert torch.equal(second.wait()[0], torch.ones(4))
        first.wait()

    assert waits(tmp_path / "et.json", run) == [1, 0]


def test_cpp_waits_through_the_handle(recorder, tmp_path):
    """Functional collectives keep the handle in C++ alone, and wait when the result is used."""

    def run():
        result = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        gc.collect()
        assert torch.equal(result + 1, torch.full((4,), 2.0))

    assert waits(tmp_path / "et.json", run) == [0]


def test_ddp_takes_the_future(recorder, tmp_path):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3):  # agrees on its buckets in the first two
        model(torch.ones(2, 4)).sum().backward()

    def run():
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()

    assert waits(tmp_path / "et.json", run) == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_results_stay_until_someone_took_them(recorder):
    work = dist.all_reduce(torch.full((3,), 2.0), async_op=True)
    assert torch.equal(work.get_future().value()[0], torch.full((3,), 2.0))
    work.wait()
    assert torch.equal(work.result()[0], torch.full((3,), 2.0))
    assert work.is_completed()
    assert work.is_success()


def test_a_result_that_was_not_kept_is_refused(recorder):
    forgotten = dist.all_reduce(torch.ones(3), async_op=True)
    dist.all_reduce(torch.ones(3), async_op=True)  # the first is over: its tensors may go
    with raises_code("work-tensors-freed"):
        forgotten.result()
    forgotten.wait()  # still works


def test_pacing_needs_a_network(recorder):
    assert not recorder.paced
    recorder.paced = True
    assert not recorder.paced


def test_host_time_of_calls_and_waits(recorder):
    times = recorder.call_times
    dist.all_reduce(torch.ones(3))
    times.enabled = True
    for _ in range(2):  # steps
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        dist.all_reduce(torch.ones(3))
    times.enabled = False
    calls = times.per_step(2)
    assert (calls.synchronous, calls.asynchronous, calls.waits) == (1, 1, 1)
    assert calls.host_ns > 0
