"""torch.distributed as a script sees it on rank 1 of 4, and the errors for invalid calls."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raised import raises_code, warns_code
from recorded import summary
from torch.distributed import distributed_c10d as c10d

from onerank.capture.fake_world.recorder import Recorder


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl:UserWarning")
def test_a_script_may_initialise_any_backend(recorder: Recorder):
    dist.init_process_group(backend="nccl", init_method="env://", device_id=None)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 4, "nccl")
    gloo = dist.new_group([1, 3], backend="gloo", pg_options=object())
    assert dist.get_backend(gloo) == "gloo"
    dist.monitored_barrier(gloo)
    dist.all_reduce(torch.ones(2), group=gloo)
    assert dist.new_group([0, 2]) == dist.GroupMember.NON_GROUP_MEMBER
    assert summary(recorder) == [("barrier", 0), ("all_reduce", 8)]

    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=1, world_size=4)
    assert (dist.get_rank(), dist.get_backend()) == (1, "cpu:gloo,cuda:nccl")
    dist.all_reduce(torch.ones(3))
    assert recorder.calls[-1].group == "world"


def test_a_script_that_names_another_rank_is_warned(recorder: Recorder):
    with warns_code("rank-ignored", naming="rank 1 of 4") as caught:
        dist.init_process_group("gloo", rank=0, world_size=4)
    assert caught[0].filename == __file__
    assert dist.get_rank() == 1
    with raises_code("script-world-size"):
        dist.init_process_group("gloo", rank=0, world_size=8)


def test_split_group(recorder: Recorder):
    half = dist.split_group(split_ranks=[[0, 2], [1, 3]], group_desc="half")
    dist.all_reduce(torch.ones(1), group=half)
    assert (recorder.calls[0].group, recorder.calls[0].group_ranks) == ("half", (1, 3))
    assert dist.split_group(half, split_ranks=[[1]]) is None
    with pytest.raises(ValueError, match="split_ranks"):
        dist.split_group(half)


class HighPriority:
    is_high_priority_stream = True


def test_a_split_group_inherits_priority_and_backend_unless_they_are_given(
    recorder: Recorder,
):
    def priority(group: Any) -> bool:
        return recorder.group_of(group).high_priority

    plain = dist.split_group(split_ranks=[[0, 1]])
    explicit = dist.split_group(split_ranks=[[0, 1]], pg_options=HighPriority())
    urgent = dist.new_group([1, 3], backend="gloo", pg_options=HighPriority())
    part = dist.split_group(urgent, split_ranks=[[0]])
    groups = (plain, explicit, urgent, part)
    assert [priority(group) for group in groups] == [False, True, True, True]
    assert dist.get_backend(part) == "gloo"


def test_the_world_has_the_priority_it_was_initialised_with(recorder: Recorder):
    assert not recorder.group_of(None).high_priority
    dist.init_process_group("gloo", pg_options=HighPriority())
    assert recorder.group_of(None).high_priority


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dist.send_object_list([1]), "rank None"),
        (lambda: dist.recv_object_list([1]), "rank None"),
        (lambda: dist.send_object_list([1], 2, group_dst=2), "rank 2"),
        (lambda: dist.send_object_list([1], dst=1), "rank 1"),
        (lambda: dist.gather_object(1, None, dst=1), "gather_list"),
        (lambda: dist.scatter_object_list([1], None, src=1), "scatter_object_input_list"),
    ],
)
def test_invalid_object_collectives_raise_as_in_torch(
    recorder: Recorder, call: Callable[[], object], name: str
):
    with pytest.raises(ValueError, match=name):
        call()
    assert recorder.calls == []


def test_objects_go_into_lists_of_the_groups_size(recorder: Recorder):
    with pytest.raises(IndexError):
        dist.all_gather_object([None] * 3, "own")


def test_scattered_objects_are_padded_to_the_largest(recorder: Recorder):
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["a", "b" * 50, "c", "d"], src=1)
    assert out == ["b" * 50]
    dist.scatter_object_list(out, ["a" * 70, "b", "c", "d"], src=1)
    assert out == ["b"]
    sizes = [call.bytes for call in recorder.calls if call.dtype == "uint8"]
    assert sizes == [4 * len(pickle.dumps("b" * 50)), 4 * len(pickle.dumps("a" * 70))]


def test_object_collectives_return_this_ranks_object(recorder: Recorder):
    own = {"rank": 1}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, own)
    assert everyone == [own] * 4
    dist.gather_object(own, None, dst=0)
    gathered: list[Any] = [None] * 4
    dist.gather_object(own, gathered, dst=1)
    assert gathered == [own] * 4
    dist.broadcast_object_list([own], src=1)
    dist.send_object_list([own], dst=2)
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["a", "b", "c", "d"], src=1)
    assert out == ["b"]

    with warns_code(
        "objects-unknown", naming=("broadcast_object_list", "rank 0", "rank 1")
    ) as caught:
        dist.broadcast_object_list([own], src=0)
    assert caught[0].filename == __file__
    with warns_code("objects-unknown", naming=("recv_object_list", "rank 3")):
        assert dist.recv_object_list([own], src=3) == 3

    # The pickle of {"rank": 1}, as torch makes it, has 24 bytes; sizes are int64.
    assert summary(recorder)[:6] == [
        ("all_gather", 8),
        ("all_gather", 24),
        ("all_gather", 8),
        ("gather", 24),
        ("all_gather", 8),
        ("gather", 24),
    ]
    assert {call.dtype for call in recorder.calls} == {"int64", "uint8"}


def test_detailed_debugging_needs_no_peers():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    recorder = Recorder(rank=1, world_size=4)
    try:
        recorder.start()
        dist.all_reduce(torch.ones(1), group=dist.new_group([1, 2]))
        assert summary(recorder) == [("all_reduce", 4)]
        recorder.stop()
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        recorder.stop()
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_the_store_counts_for_all_ranks_and_refuses_unset_keys():
    recorder = Recorder(rank=1, world_size=4)
    recorder.start()
    try:
        store = c10d._get_default_store()
        store.set("mine", "here")
        assert store.get("mine") == b"here"
        assert [store.add("arrived", 1), store.add("arrived", 0)] == [4, 4]
        assert store.compare_set("first", "", "a") == store.compare_set("first", "b", "c") == b"a"
        assert [store.num_keys(), store.delete_key("mine"), store.check(["mine"])] == [
            3,
            True,
            False,
        ]
        with raises_code("store-key-missing"):
            store.get("theirs")
    finally:
        recorder.stop()


def test_the_barrier_of_a_new_group_does_not_wait(monkeypatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    recorder = Recorder(rank=1, world_size=4)
    recorder.start()
    try:
        for local in (False, True):
            group = dist.new_group([0, 1], use_local_synchronization=local)
            assert dist.get_process_group_ranks(group) == [0, 1]
    finally:
        recorder.stop()


def test_stop_restores_torch():
    functions = {name: getattr(c10d, name) for name in c10d.__all__}
    recorder = Recorder(rank=1, world_size=4)
    recorder.start()
    assert dist.init_process_group is not functions["init_process_group"]
    recorder.stop()
    recorder.stop()
    assert {name: getattr(c10d, name) for name in c10d.__all__} == functions
    assert dist.init_process_group is functions["init_process_group"]

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    gathered: list[Any] = [None]
    dist.all_gather_object(gathered, "real")
    dist.destroy_process_group()
    assert gathered == ["real"]
    assert recorder.calls == []


def test_a_barrier_on_another_gpu_of_the_node_runs_on_gpu_0(recorder: Recorder, monkeypatch):
    devices: list[list[int]] = []
    barrier = dist.ProcessGroup.barrier

    def spy(group: Any, opts: Any) -> Any:
        devices.append(opts.device_ids)
        return barrier(group, opts=opts)

    monkeypatch.setattr(dist.ProcessGroup, "barrier", spy)
    dist.barrier(device_ids=[3])  # what scripts do that name their GPU by their rank
    rank: Any = 3
    dist.barrier(device_ids=rank)  # torch ignores what is no list
    assert devices == [[0], []]
    assert summary(recorder) == [("barrier", 0)] * 2
