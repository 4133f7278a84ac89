"""Rank 1 of 4 on real torch: what is recorded, and what the tensors hold after."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from msgspec import structs
from raised import raises_code
from recorded import summary
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

from onerank.capture.collective_record import CommCall, payload_of
from onerank.capture.fake_world.c10d_ops import C10dOperators
from onerank.capture.fake_world.collective_launch import COMM_RANGE
from onerank.capture.fake_world.recorder import Recorder

pytestmark = pytest.mark.filterwarnings(
    # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor; 2.11 knows only these.
    "ignore:.*is deprecated. Please use:FutureWarning"
)

WORLD = (0, 1, 2, 3)
BF16 = torch.bfloat16


def world() -> Any:
    return c10d._get_default_group()


# What is recorded --------------------------------------------------------------------------------


def test_collectives_in_order_with_bytes_of_the_input(recorder: Recorder):
    pair = recorder.new_group("tp", [1, 0])
    dist.all_reduce(torch.ones(3, 5, dtype=BF16))
    dist.all_gather_into_tensor(torch.empty(16), torch.ones(4), async_op=True).wait()
    dist.reduce_scatter_tensor(torch.empty(6), torch.ones(12), dist.ReduceOp.AVG, group=pair)
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
    plain |= {"phase": None, "micro_batch": None, "reduction": None, "symmetric": False}
    plain |= {"exchanged_bytes": None}
    two = {"group": "tp", "group_ranks": (0, 1)}
    splits = {"in_split_sizes": (0, 1, 2, 3), "out_split_sizes": (2, 2, 2, 3)}
    p2p = {"asynchronous": True}
    assert [structs.asdict(call) for call in recorder.calls] == [
        plain | row("all_reduce", 0, 30, "bfloat16", 15) | {"reduction": "sum"},
        plain | row("all_gather", 1, 16, "float32", 4) | {"asynchronous": True},
        plain | row("reduce_scatter", 2, 48, "float32", 12) | two | {"reduction": "avg"},
        # Of nine rows that it receives, seven are from others.
        plain | row("all_to_all", 3, 48, "int64", 6) | splits | {"exchanged_bytes": 7 * 8},
        plain | row("broadcast", 4, 56, "float64", 7) | {"peer": 2},
        plain | row("send", 5, 16, "float32", 4) | p2p | {"peer": 3, "tag": 5},
        plain | row("recv", 6, 16, "float32", 4) | p2p | two | {"peer": 0, "tag": 6},
        plain | row("reduce", 7, 4, "float32", 1) | {"peer": 3, "reduction": "sum"},
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
        ("scatter", 32),
        ("all_to_all", 32),
    ]
    assert [call.peer for call in recorder.calls] == [None, None, 0, 1, 1, None]


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch has no gather_single")
def test_a_gather_into_one_tensor(recorder: Recorder):
    dist.gather_single(torch.ones(3), None, dst=0)
    gathered = torch.zeros(12)
    dist.gather_single(torch.tensor([1.0, 2.0, 3.0]), gathered, dst=1)
    assert gathered.tolist() == [1.0, 2.0, 3.0] * 4
    assert summary(recorder) == [("gather", 12), ("gather", 12)]
    assert [call.peer for call in recorder.calls] == [0, 1]
    with raises_code("collective-sizes"):
        dist.gather_single(torch.ones(3), torch.zeros(8), dst=1)


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


def test_a_batch_is_sent_before_it_is_received(recorder: Recorder):
    """As its order says nothing, and a simulator's ranks would wait for each other's sends."""
    batch = [
        dist.P2POp(dist.irecv, torch.zeros(6), 0),
        dist.P2POp(dist.isend, torch.ones(5), 2),
        dist.P2POp(dist.irecv, torch.ones(7), 2),
        dist.P2POp(dist.isend, torch.ones(8), 0),
    ]
    works = dist.batch_isend_irecv(batch)
    kinds = [("send", 20), ("send", 32), ("recv", 24), ("recv", 28)]
    assert summary(recorder) == kinds
    handled = [work.result()[0].numel() for work in works]  # a handle for each, in its place
    assert handled == [6, 5, 7, 8]


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


def test_compiled_ddp_leaves_the_recorder_untraced(recorder: Recorder):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))  # whose buffers each forward sends
    compiled = torch.compile(DistributedDataParallel(model), backend="eager")
    for _ in range(3):
        compiled(torch.randn(2, 4)).sum().backward()
    assert {call.collective for call in recorder.calls} >= {"all_reduce", "broadcast"}
    for function in (C10dOperators._broadcast, C10dOperators._launch, Recorder.record, payload_of):
        assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)


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


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bits8)),
            "collective-unknown-dtype",
        ),
        (
            lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            "collective-unsupported",
        ),
        (
            lambda: dist.all_gather_into_tensor(torch.zeros(9), torch.zeros(2)),
            "collective-sizes",
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4, 2).t()),
            "collective-not-contiguous",
        ),
        (
            lambda: world().allreduce_coalesced([torch.zeros(1), torch.zeros(1, dtype=BF16)]),
            "collective-mixed-dtypes",
        ),
        (
            lambda: dist.broadcast_object_list([1], src=2, group=dist.new_group([0, 1])),
            "group-rank-not-member",
        ),
        (
            lambda: dist.send(torch.ones(1), group_dst=4),
            "peer-out-of-range",
        ),
        (
            lambda: dist.broadcast(torch.ones(1), group_src=-1),
            "peer-out-of-range",
        ),
    ],
)
def test_invalid_calls_are_errors(recorder: Recorder, call: Callable[[], object], code: str):
    with raises_code(code):
        call()


def test_an_operator_that_the_recorder_does_not_know():
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("teleport_(Tensor t, __torch__.torch.classes.c10d.ProcessGroup group) -> ()")
    recorder = Recorder(rank=1, world_size=4)
    try:
        recorder.start()
        with raises_code("collective-unsupported"):
            torch.ops.c10d.teleport_(torch.ones(1), dist.group.WORLD.boxed())
    finally:
        recorder.stop()
        library._destroy()


def test_invalid_ranks_and_groups_are_errors(recorder: Recorder):
    with raises_code("world-too-large"):
        Recorder(rank=0, world_size=10**12)
    with raises_code("rank-out-of-range"):
        Recorder(rank=4, world_size=4)
    with raises_code("group-exists"):
        Recorder(rank=0, world_size=2).start()
    with raises_code("group-without-rank"):
        recorder.new_group("dp", [0, 2])
    recorder.new_group("dp", [1, 3])
    with raises_code("group-redefined"):
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
    marks = [node for node in nodes if node["name"] == COMM_RANGE]
    texts = [node["inputs"]["values"][-1] for node in marks]
    parsed = [{key: frozen(value) for key, value in parse(text)} for text in texts]
    read = [CommCall(**call, group_ranks=recorder.groups[call["group"]]) for call in parsed]
    assert sorted(read, key=lambda call: call.sequence) == recorder.calls

    trace_events = json.loads(kineto.read_text())["traceEvents"]
    events = [event for event in trace_events if event.get("name") == COMM_RANGE]
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
