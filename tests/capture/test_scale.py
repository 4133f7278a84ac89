"""One rank of a world of 100,000: a hybrid mesh, and marks that do not grow with the world."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from onerank.capture.fake_world.collective_launch import COMM_RANGE
from onerank.capture.fake_world.recorder import Recorder

RANK, WORLD = 77_777, 100_000
SHARDS = 8


def test_hybrid_shards_and_ddp_as_rank_77777(tmp_path):
    recorder = Recorder(RANK, WORLD)
    recorder.start()
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "et.json"))
    try:
        dist.init_process_group("gloo")
        shape, names = (WORLD // SHARDS, SHARDS), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        sharded = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        fully_shard(sharded, mesh=mesh)
        copied = DistributedDataParallel(nn.Linear(64, 1, bias=False))
        optimizer = torch.optim.SGD([*sharded.parameters(), *copied.parameters()])
        del recorder.calls[:]  # what DDP checks and broadcasts as it is built
        # Marks exist only while a profiler runs; the structure window has both, too.
        with profile(activities=[ProfilerActivity.CPU]):
            observer.start()
            loss = copied(sharded(torch.randn(2, 64))).sum()
            loss.backward()
            optimizer.step()
            observer.stop()
    finally:
        observer.unregister_callback()
        recorder.stop()
    assert loss.isfinite()
    first = RANK // SHARDS * SHARDS
    shard, replica = tuple(range(first, first + SHARDS)), tuple(range(RANK % SHARDS, WORLD, SHARDS))
    weights = 2 * 64 * 64 * 4
    found = {(call.collective, call.group_ranks, call.bytes) for call in recorder.calls}
    assert found == {
        ("all_gather", shard, weights // SHARDS),
        ("reduce_scatter", shard, weights),
        ("all_reduce", replica, weights // SHARDS),
        ("all_reduce", tuple(range(WORLD)), 64 * 4),
    }
    nodes = json.loads((tmp_path / "et.json").read_text())["nodes"]
    marks = [node["inputs"]["values"][-1] for node in nodes if node["name"] == COMM_RANGE]
    assert len(marks) == len(recorder.calls)
    assert max(map(len, marks)) < 400  # characters: without 100,000 ranks


def test_a_receive_from_any_source(recorder):
    tensor = torch.empty(3)
    source = dist.recv(tensor)
    assert source == 0
    assert tensor.isfinite().all()
    (call,) = recorder.calls
    assert (call.collective, call.peer, call.bytes, call.tag) == ("recv", None, 12, 0)
    assert dist.recv(tensor, src=3, tag=5) == 3
    assert recorder.calls[1].peer == 3
