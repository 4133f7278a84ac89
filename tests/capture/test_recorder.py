"""Rank 1 of 4 on real torch: what is recorded, what the tensors hold after, what is left behind."""

# ruff: noqa: E402 (torch is optional)

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from onerank.capture.calls import CommCall
from onerank.capture.recorder import MARK, Recorder
from onerank.ir.errors import CaptureError

pytestmark = pytest.mark.filterwarnings(
    # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these.
    "ignore:.*is deprecated. Please use:FutureWarning"
)

WORLD = (0, 1, 2, 3)
BF16 = torch.bfloat16


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(rank=1, world_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.start()
    yield recorder
    recorder.stop()
    assert not dist.is_initialized()


def world() -> Any:
    return c10d._get_default_group()


def summary(recorder: Recorder) -> list[tuple[str, int]]:
    return [(call.collective, call.bytes) for call in recorder.calls]


# What is recorded --------------------------------------------------------------------------------


def test_collectives_in_order_with_bytes_of_the_input(recorder: Recorder):
    pair = recorder.new_group("tp", [1, 0])
    dist.all_reduce(torch.ones(3, 5, dtype=BF16))
    dist.all_gather_into_tensor(torch.empty(16), torch.ones(4), async_op=True).wait()
    dist.reduce_scatter_tensor(torch.empty(6), torch.ones(12), group=pair)
    dist.all_to_all_single(
        torch.empty(9, dtype=torch.int64),
        torch.arange(6),
        output_split_sizes=[2, 2, 2, 3],
        input_split_sizes=[0, 1, 2, 3],
    )
    dist.broadcast(torch.ones(7, dtype=torch.float64), src=2)
    dist.send(torch.ones(2, 2), dst=3, tag=5)
    dist.recv(torch.empty(2, 2), src=0, group=pair, tag=6)
    dist.reduce(torch.ones(1), dst=3)
    dist.barrier()

    everyone = {"group": "world", "group_ranks": WORLD, "peer": None, "tag": None}
    plain = {**everyone, "asynchronous": False, "in_split_sizes": (), "out_split_sizes": ()}
    two = {"group": "tp", "group_ranks": (0, 1)}
    splits = {"in_split_sizes": (0, 1, 2, 3), "out_split_sizes": (2, 2, 2, 3)}
    p2p = {"asynchronous": True}
    assert [vars(call) for call in recorder.calls] == [
        plain | row("all_reduce", 0, 30, "bfloat16", 15),
        plain | row("all_gather", 1, 16, "float32", 4) | {"asynchronous": True},
        plain | row("reduce_scatter", 2, 48, "float32", 12) | two,
        plain | row("all_to_all", 3, 48, "int64", 6) | splits,
        plain | row("broadcast", 4, 56, "float64", 7) | {"peer": 2},
        plain | row("send", 5, 16, "float32", 4) | p2p | {"peer": 3, "tag": 5},
        plain | row("recv", 6, 16, "float32", 4) | p2p | two | {"peer": 0, "tag": 6},
        plain | row("reduce", 7, 4, "float32", 1) | {"peer": 3},
        plain | row("barrier", 8, 0, "uint8", 0),
    ]
    assert recorder.groups == {"world": WORLD, "tp": (0, 1)}


def row(collective: str, sequence: int, size: int, dtype: str, elements: int) -> dict[str, Any]:
    return {
        "collective": collective,
        "sequence": sequence,
        "bytes": size,
        "dtype": dtype,
        "elements": elements,
    }


def test_list_forms_count_the_own_input(recorder: Recorder):
    shards = [torch.zeros(2) for _ in WORLD]
    dist.all_gather(shards, torch.tensor([1.0, 2.0]))
    assert torch.stack(shards).tolist() == [[1.0, 2.0]] * 4

    out = torch.zeros(2)
    dist.reduce_scatter(out, [torch.full((2,), float(rank)) for rank in WORLD])
    assert out.tolist() == [1.0, 1.0]

    dist.gather(torch.ones(3), None, dst=0)
    gathered = [torch.zeros(3) for _ in WORLD]
    dist.gather(torch.ones(3), gathered, dst=1)
    assert torch.stack(gathered).sum() == 12

    dist.scatter(out, [torch.full((2,), 10.0 * rank) for rank in WORLD], src=1)
    assert out.tolist() == [10.0, 10.0]

    received = [torch.zeros(size) for size in (1, 2, 3, 4)]
    world().alltoall(received, [torch.ones(2) for _ in WORLD]).wait()
    assert [tensor.tolist() for tensor in received] == [[1.0] * size for size in (1, 2, 3, 4)]

    assert summary(recorder) == [
        ("all_gather", 8),
        ("reduce_scatter", 32),
        ("gather", 12),
        ("gather", 12),
        ("scatter", 8),
        ("all_to_all", 32),
    ]
    assert [call.peer for call in recorder.calls] == [None, None, 0, 1, 1, None]


def test_a_coalesced_call_is_one_call_of_the_sum(recorder: Recorder):
    group = world()
    group.allreduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
    outputs = [[torch.zeros(2), torch.zeros(1)] for _ in WORLD]
    group.allgather_coalesced(outputs, [torch.ones(2), torch.full((1,), 2.0)]).wait()
    assert [[t.tolist() for t in by_rank] for by_rank in outputs] == [[[1.0, 1.0], [2.0]]] * 4
    wide, narrow = torch.zeros(8), torch.zeros(4, dtype=BF16)
    group.allgather_into_tensor_coalesced(
        [wide, narrow], [torch.ones(2), torch.ones(1, dtype=BF16)]
    ).wait()
    assert wide.sum() == 8
    assert narrow.sum() == 4
    out = [torch.zeros(1), torch.zeros(2)]
    group.reduce_scatter_tensor_coalesced(out, [torch.arange(4.0), torch.arange(8.0)]).wait()
    assert [tensor.tolist() for tensor in out] == [[1.0], [2.0, 3.0]]
    assert [(c.collective, c.bytes, c.dtype, c.elements) for c in recorder.calls] == [
        ("all_reduce", 20, "float32", 5),
        ("all_gather", 12, "float32", 3),
        ("all_gather", 10, "uint8", 10),
        ("reduce_scatter", 48, "float32", 12),
    ]


def test_coalescing_managers_and_batches(recorder: Recorder):
    with c10d._coalescing_manager():
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        dist.all_reduce(torch.ones(4))
    works.wait()
    batch = [
        dist.P2POp(dist.isend, torch.ones(5), 2),
        dist.P2POp(dist.irecv, torch.ones(6), 0),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert summary(recorder) == [("all_reduce", 20), ("all_reduce", 16), ("send", 20), ("recv", 24)]
    assert [call.peer for call in recorder.calls[2:]] == [2, 0]


def test_functional_collectives(recorder: Recorder):
    assert funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [1.0, 1.0]
    gathered = funcol.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    assert gathered.tolist() == [1.0] * 8
    assert summary(recorder) == [("all_reduce", 8), ("all_gather", 8)]


def test_compiled_code(recorder: Recorder):
    @torch.compile(backend="aot_eager")
    def double_and_sum(tensor: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)

    assert double_and_sum(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert summary(recorder) == [("all_reduce", 12)]


def test_groups_are_named_by_their_creator(recorder: Recorder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = dist.new_group([1, 2])
    again = dist.new_group([0, 1], group_desc="mesh_dp")
    for group in (mesh["dp"].get_group(), mesh["tp"].get_group(), unnamed, again):
        dist.all_reduce(torch.ones(1), group=group)
    names = [call.group for call in recorder.calls]
    assert names == ["mesh_dp", "mesh_tp", unnamed.group_name, f"mesh_dp/{again.group_name}"]
    assert [recorder.groups[name] for name in names] == [(1, 3), (0, 1), (1, 2), (0, 1)]


# What the tensors hold ---------------------------------------------------------------------------


def test_values_are_finite_and_leave_the_random_state_alone(recorder: Recorder):
    before = torch.get_rng_state()
    full = torch.empty(8)
    dist.all_gather_into_tensor(full, torch.tensor([1.0, 2.0]))
    assert full.tolist() == [1.0, 2.0] * 4
    own = torch.empty(2)
    dist.reduce_scatter_tensor(own, torch.arange(8.0))
    assert own.tolist() == [2.0, 3.0]
    exchanged = torch.empty(5)
    dist.all_to_all_single(exchanged, torch.arange(2.0), [1, 1, 1, 2], [0, 0, 1, 1])
    assert exchanged.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]

    for dtype in (torch.float32, BF16, torch.float8_e4m3fn):
        received = torch.full((1000,), float("nan")).to(dtype)
        dist.recv(received, src=0)
        assert received.float().std().item() == pytest.approx(0.02, rel=0.1)
        scattered = torch.full((1000,), float("nan")).to(dtype)
        dist.scatter(scattered, None, src=0)
        assert scattered.float().std().item() == pytest.approx(0.02, rel=0.1)
    ids = torch.full((4,), -1)
    dist.irecv(ids, src=2).wait()
    assert ids.tolist() == [0, 0, 0, 0]
    anyone = torch.full((4,), -1)
    dist.irecv(anyone).wait()
    assert anyone.tolist() == [0, 0, 0, 0]
    assert recorder.calls[-1].peer is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, BF16, torch.float8_e5m2, torch.int64])
@pytest.mark.parametrize("size", [1, 15, 16, 48])
def test_replication_keeps_every_bit(recorder: Recorder, dtype: torch.dtype, size: int):
    own = torch.arange(size).to(dtype)
    full = torch.zeros(4 * size, dtype=dtype)
    dist.all_gather_into_tensor(full, own)
    assert full.tolist() == own.tolist() * 4


def test_an_in_place_all_gather_does_not_disturb_autograd(recorder: Recorder):
    weight = torch.zeros(8, requires_grad=True)
    buffer = torch.arange(8.0)
    loss = (weight * buffer).sum()  # saves `buffer` for backward
    dist.all_gather_into_tensor(buffer, buffer[2:4])
    assert buffer.tolist() == [2.0, 3.0] * 4
    loss.backward()  # a bumped version counter would raise here
    with torch.no_grad():
        dist.broadcast(weight, src=0)


def test_meta_tensors(recorder: Recorder):
    dist.all_reduce(torch.empty(1 << 40, dtype=BF16, device="meta"))
    dist.recv(torch.empty(3, device="meta"), src=0)
    assert summary(recorder) == [("all_reduce", 2 << 40), ("recv", 12)]


# Parallel training -------------------------------------------------------------------------------


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))


def train(model: nn.Module, steps: int = 2) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ddp(recorder: Recorder):
    # 8*16 + 16 + 16*8 + 8 = 280 float32 parameters, one bucket.
    losses = train(DistributedDataParallel(mlp()))
    assert all(torch.isfinite(torch.tensor(losses)))
    assert summary(recorder)[-4:] == [
        ("all_reduce", 1120),
        ("broadcast", 20),  # DDP settles its buckets after the first backward: 4 indices and ...
        ("broadcast", 4),  # ... a count, then the size of each bucket, in int32
        ("all_reduce", 1120),
    ]
    assert ("broadcast", 1120) in summary(recorder)[:-4]
    assert recorder.calls[-1].asynchronous


def test_fsdp2(recorder: Recorder):
    model = mlp()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    losses = train(model)
    assert all(torch.isfinite(torch.tensor(losses)))
    # A quarter of each layer (36 and 34 parameters) is gathered for forward and again for backward;
    # whole gradients (144 and 136 parameters) are scattered.
    assert summary(recorder) == 2 * [
        ("all_gather", 144),
        ("all_gather", 136),
        ("all_gather", 136),
        ("all_gather", 144),
        ("reduce_scatter", 544),
        ("reduce_scatter", 576),
    ]


def test_tensor_parallel(recorder: Recorder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(mlp(), mesh, plan)
    setup = len(recorder.calls)
    losses = train(model)
    assert all(torch.isfinite(torch.tensor(losses)))
    # The row-wise layer sums its 4 x 8 output; the input needs no gradient.
    assert summary(recorder)[setup:] == [("all_reduce", 128)] * 2


# What a script sees of torch.distributed ---------------------------------------------------------


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
    with pytest.warns(UserWarning, match="stands for rank 1 of 4") as caught:
        dist.init_process_group("gloo", rank=0, world_size=8)
    assert caught[0].filename == __file__
    assert dist.get_rank() == 1


def test_split_group(recorder: Recorder):
    half = dist.split_group(split_ranks=[[0, 2], [1, 3]], group_desc="half")
    dist.all_reduce(torch.ones(1), group=half)
    assert (recorder.calls[0].group, recorder.calls[0].group_ranks) == ("half", (1, 3))
    assert dist.split_group(half, split_ranks=[[1]]) is None
    with pytest.raises(ValueError, match="split_ranks cannot be None or empty"):
        dist.split_group(half)


class HighPriority:
    is_high_priority_stream = True


def test_a_part_of_a_group_has_its_priority_and_backend_unless_it_asks_for_its_own(
    recorder: Recorder,
):
    def priority(group: Any) -> bool:
        return recorder.group_of(group).high_priority

    plain = dist.split_group(split_ranks=[[0, 1]])
    asked = dist.split_group(split_ranks=[[0, 1]], pg_options=HighPriority())
    urgent = dist.new_group([1, 3], backend="gloo", pg_options=HighPriority())
    part = dist.split_group(urgent, split_ranks=[[0]])
    assert [priority(group) for group in (plain, asked, urgent, part)] == [False, True, True, True]
    assert dist.get_backend(part) == "gloo"


def test_the_world_has_the_priority_it_was_initialised_with(recorder: Recorder):
    assert not recorder.group_of(None).high_priority
    dist.init_process_group("gloo", pg_options=HighPriority())
    assert recorder.group_of(None).high_priority


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.send_object_list([1]), "given as None in the world and None in group"),
        (lambda: dist.recv_object_list([1]), "given as None in the world and None in group"),
        (lambda: dist.send_object_list([1], 2, group_dst=2), "2 in the world and 2 in group"),
        (lambda: dist.send_object_list([1], dst=1), "rank 1 cannot send to itself"),
        (lambda: dist.gather_object(1, None, dst=1), "must be specified on destination rank"),
        (lambda: dist.scatter_object_list([1], None, src=1), "must provide non-None"),
    ],
)
def test_what_torch_refuses_of_objects_is_refused(
    recorder: Recorder, call: Callable[[], object], message: str
):
    with pytest.raises(ValueError, match=message):
        call()
    assert recorder.calls == []


def test_objects_go_into_lists_of_the_groups_size(recorder: Recorder):
    with pytest.raises(IndexError):
        dist.all_gather_object([None] * 3, "own")


def test_scattered_objects_take_what_the_largest_takes(recorder: Recorder):
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["a", "b" * 50, "c", "d"], src=1)
    assert out == ["b" * 50]
    dist.scatter_object_list(out, ["a" * 70, "b", "c", "d"], src=1)
    assert out == ["b"]
    sizes = [call.bytes for call in recorder.calls if call.dtype == "uint8"]
    assert sizes == [len(pickle.dumps("b" * 50)), len(pickle.dumps("a" * 70))]


def test_object_collectives_answer_with_the_own_object(recorder: Recorder):
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

    with pytest.warns(UserWarning, match="rank 0 is not there.*rank 1 keeps its own") as caught:
        dist.broadcast_object_list([own], src=0)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="recv_object_list: rank 3 is not there"):
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


def test_stop_puts_everything_back():
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


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bits8)),
            "all_reduce of dtype torch.bits8: the recorder knows float64",
        ),
        (
            lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            "c10d::allreduce_ cannot be recorded: the size of a sparse tensor",
        ),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(9), torch.zeros(2)),
            "all_gather: the full tensor has 9 elements, the shard 2; "
            "a group of 4 ranks needs 4 x 2 = 8",
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4, 2).t()),
            r"shape \(2, 4\) and strides \(1, 2\); it must be contiguous",
        ),
        (
            lambda: world().allreduce_coalesced([torch.zeros(1), torch.zeros(1, dtype=BF16)]),
            r"one all_reduce of several dtypes \(bfloat16, float32\)",
        ),
        (
            lambda: dist.broadcast_object_list([1], src=2, group=dist.new_group([0, 1])),
            r"rank 2 is not in group '.*': ranks \(0, 1\)",
        ),
        (
            lambda: dist.send(torch.ones(1), group_dst=4),
            "send with rank 4 of group 'world': its ranks are 0 to 3",
        ),
        (
            lambda: dist.broadcast(torch.ones(1), group_src=-1),
            "broadcast with rank -1 of group 'world': its ranks are 0 to 3",
        ),
    ],
)
def test_what_cannot_be_recorded_is_an_error(
    recorder: Recorder, call: Callable[[], object], message: str
):
    with pytest.raises(CaptureError, match=message):
        call()


def test_an_operator_that_the_recorder_does_not_know():
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("teleport_(Tensor t, __torch__.torch.classes.c10d.ProcessGroup group) -> ()")
    recorder = Recorder(rank=1, world_size=4)
    try:
        recorder.start()
        with pytest.raises(
            CaptureError, match=r"c10d::teleport_ cannot be recorded: torch .* has this"
        ):
            torch.ops.c10d.teleport_(torch.ones(1), dist.group.WORLD.boxed())
    finally:
        recorder.stop()
        library._destroy()


def test_ranks_and_groups_must_fit(recorder: Recorder):
    with pytest.raises(CaptureError, match="rank 4 of a world of 4: ranks are 0 to 3"):
        Recorder(rank=4, world_size=4)
    with pytest.raises(CaptureError, match="a default process group exists already"):
        Recorder(rank=0, world_size=2).start()
    with pytest.raises(CaptureError, match=r"ranks \(0, 2\) without rank 1"):
        recorder.new_group("dp", [0, 2])
    recorder.new_group("dp", [1, 3])
    with pytest.raises(CaptureError, match=r"exists with ranks \(1, 3\)"):
        recorder.new_group("dp", [0, 1])


# The profiler's streams --------------------------------------------------------------------------


def test_each_call_is_marked_in_both_traces(recorder: Recorder, tmp_path: Path):
    trace, kineto = tmp_path / "et.json", tmp_path / "kineto.json"
    observer = ExecutionTraceObserver().register_callback(str(trace))
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        dist.all_gather_into_tensor(torch.empty(16), torch.ones(4))
        dist.all_reduce(torch.ones(3, dtype=BF16), group=recorder.new_group('a "b" \\', [1, 2]))
    profiler.export_chrome_trace(str(kineto))

    nodes = json.loads(trace.read_text())["nodes"]
    marks = [node for node in nodes if node["name"] == MARK]
    texts = [node["inputs"]["values"][-1] for node in marks]
    told = [{key: frozen(value) for key, value in parse(text)} for text in texts]
    read = [CommCall(**call, group_ranks=recorder.groups[call["group"]]) for call in told]
    assert sorted(read, key=lambda call: call.sequence) == recorder.calls

    events = [e for e in json.loads(kineto.read_text())["traceEvents"] if e.get("name") == MARK]
    found = {event["args"]["Record function id"] for event in events}
    assert found == {rf_id(node) for node in marks}
    assert len(found) == 2

    # The emulation's one copy lies inside the mark, the mark inside the operator.
    by_id = {node["id"]: node for node in nodes}
    (gather,) = (mark for mark in marks if '"all_gather"' in mark["inputs"]["values"][-1])
    assert by_id[gather["ctrl_deps"]]["name"] == "c10d::_allgather_base_"
    copies = [node for node in nodes if node["name"] == "aten::copy_"]
    assert [copy["ctrl_deps"] for copy in copies] == [gather["id"]]


def parse(text: str) -> Any:
    return json.loads(text).items()


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def rf_id(node: dict[str, Any]) -> int:
    return next(a["value"] for a in node["attrs"] if a["name"] == "rf_id")
