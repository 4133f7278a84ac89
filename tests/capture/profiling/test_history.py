"""The allocator's history of a step: snapshots as torch gives them out, written by hand."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import onerank
from onerank.annotate.memory.memory_report import report_memory
from onerank.capture.profiling.allocator_snapshots import (
    Pools,
    Storage,
    history_of,
    is_complete,
    lingering_as,
    resident_by_class,
    settings_of,
)
from onerank.converters.sources.kineto import AllocatorAction
from onerank.converters.sources.kineto.memory_events import History, join_history
from onerank.converters.sources.kineto.read.trace_columns import MemoryRows
from onerank.ir import AllocatorSettings

MIB = 1 << 20

SIDE = 0x5581_AC30  # a stream is a pointer in a snapshot, the default one 0


def block(address: int, size: int, state: str = "active_allocated", requested: int | None = None):
    requested = size if requested is None else requested
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": [],
    }


def segment(address: int, stream: int, *blocks: dict, pool: tuple[int, int] = (0, 0)) -> dict:
    size = sum(one["size"] for one in blocks)
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": stream,
        "segment_type": "large" if size > 2 * MIB else "small",
        "segment_pool_id": pool,
        "is_expandable": False,
        "blocks": list(blocks),
    }


def entry(action: str, address: int, size: int, stream: int = 0, **more) -> dict:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": 1_700_000_000_000_000,
        "frames": [],
        **more,
    }


SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
}


def snapshot(segments: list[dict], trace: list[dict], **settings) -> dict:
    merged = {**SETTINGS, **settings}
    return {"segments": segments, "device_traces": [trace], "allocator_settings": merged}


HELD = [
    segment(0x7000_0000, 0, block(0x7000_0000, 24 * MIB, requested=24 * MIB - 100)),
    segment(
        0x6000_0000,
        SIDE,
        block(0x6000_0000, 4 * MIB),
        block(0x6040_0000, 8 * MIB, "active_awaiting_free"),
        block(0x60C0_0000, 8 * MIB, "inactive"),
    ),
    segment(0x5000_0000, 0, block(0x5000_0000, MIB, requested=MIB - 7), block(0x5010_0000, MIB)),
]

# an all-gather's output on the side stream, read by the default one, which runs on after its free
STEP = [
    entry("alloc", 0x6040_0000, 6 * MIB - 300, SIDE),
    entry("alloc", 0x4000_0000, 30 * MIB),
    entry("segment_alloc", 0x3000_0000, 20 * MIB),
    entry("alloc", 0x3000_0000, 2 * MIB),
    entry("free_requested", 0x6040_0000, 6 * MIB - 300, SIDE),
    entry("free_requested", 0x3000_0000, 2 * MIB),
    entry("free_completed", 0x3000_0000, 2 * MIB),
    entry("free_completed", 0x6040_0000, 6 * MIB - 300, SIDE),
    entry("alloc", 0x6040_0000, MIB + 1, SIDE),
    entry("free_requested", 0x7000_0000, 24 * MIB - 100),
    entry("free_completed", 0x7000_0000, 24 * MIB - 100),
]

BEFORE = [entry("alloc", 0x7000_0000, 24 * MIB - 100), entry("snapshot", 0, 28 * MIB)]


def rows(*events: tuple[int, int]) -> MemoryRows:
    """Return the profiler's account: address, and bytes as the allocator rounds them."""
    count = len(events)
    nothing = np.zeros(count, dtype=np.int64)
    address, size = (np.array(column, dtype=np.int64) for column in zip(*events, strict=True))
    return MemoryRows(
        thread=nothing,
        start_ns=np.arange(count),
        event_index=np.arange(count),
        bytes=size,
        address=address,
        allocated=nothing,
        reserved=nothing,
        device_type=np.ones(count, dtype=np.int64),
        stream=np.full(count, -1),
    )


PROFILED = [
    (0x1000_0000, 512),  # before the history began
    (0x6040_0000, 6 * MIB),
    (0x4000_0000, 30 * MIB),
    (0x3000_0000, 2 * MIB),
    (0x6040_0000, -6 * MIB),
    (0x3000_0000, -2 * MIB),
    (0x6040_0000, MIB + 512),
    (0x7000_0000, -24 * MIB),
    (0x1000_0000, -512),  # after it ended
]


def taken(pools: Pools | None = None) -> History:
    before, after = snapshot(HELD, BEFORE), snapshot(HELD, [*BEFORE, *STEP])
    return history_of(before, after, 0, pools or Pools())


def test_a_step_is_what_came_between_two_snapshots():
    found = taken()
    a, f, u = AllocatorAction.ALLOCATED, AllocatorAction.FREED, AllocatorAction.USABLE
    assert found.action == (a, a, a, f, f, u, u, a, f, u)
    assert found.bytes[:3] == (6 * MIB - 300, 30 * MIB, 2 * MIB)
    assert found.pool == (1, 0, 0, 1, 0, 0, 1, 1, 0, 0)
    assert found.settings is None
    assert found.reserved_bytes == 0


def test_a_scripts_bounded_history_is_not_taken_for_the_step():
    first = [entry("alloc", 512 * i, 512) for i in range(10)]
    assert is_complete(snapshot([], first[:4]), snapshot([], first), 0)
    assert is_complete(snapshot([], []), snapshot([], first), 0)
    moved_on = [*first[3:], *(entry("alloc", 512 * i, 512) for i in range(20, 23))]
    assert not is_complete(snapshot([], first), snapshot([], moved_on), 0)  # a ring, as full
    assert not is_complete(snapshot([], first[:4]), snapshot([], moved_on), 0)
    assert not is_complete(snapshot([], []), snapshot([], []), 0)


def test_the_profilers_events_get_pool_request_and_how_long_memory_lingers():
    joined = join_history(taken(), rows(*PROFILED))
    assert joined is not None
    assert joined.pool.tolist() == [0, 1, 0, 0, 1, 0, 1, 0, 0]
    assert joined.requested[1] == 6 * MIB - 300
    assert joined.requested[6] == MIB + 1
    # freed fourth, and one other event came before its memory could be used
    assert joined.lingers.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_memory_whose_use_does_not_end_in_the_step_lingers_to_its_end():
    history = History(
        action=(
            AllocatorAction.ALLOCATED,
            AllocatorAction.FREED,
            AllocatorAction.ALLOCATED,
            AllocatorAction.ALLOCATED,
        ),
        address=(512, 512, 1024, 2048),
        bytes=(1, 1, 1, 1),
        pool=(0, 0, 0, 0),
    )
    joined = join_history(history, rows((512, 512), (512, -512), (1024, 512), (2048, 512)))
    assert joined is not None
    assert joined.lingers.tolist() == [0, 2, 0, 0]


def test_a_history_of_another_course_tells_nothing():
    assert join_history(taken(), rows(*PROFILED[:4], *PROFILED[5:])) is None
    assert join_history(taken(), rows(*PROFILED[:3])) is None


def test_memory_lingers_as_it_did_without_a_profiler():
    """The other stream is at the block for two events more: the host is further ahead."""
    # what is allocated meanwhile takes another block
    further = [*STEP[:7], {**STEP[8], "addr": 0x2000_0000}, *STEP[9:10], STEP[7], *STEP[10:]]
    before = snapshot(HELD, BEFORE)
    other = history_of(before, snapshot(HELD, [*BEFORE, *further]), 0, Pools())
    profiled = taken()
    joined = join_history(lingering_as(profiled, other), rows(*PROFILED))
    assert joined is not None
    assert joined.lingers.tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert joined.requested.tolist() == join_history(profiled, rows(*PROFILED)).requested.tolist()
    same = join_history(lingering_as(profiled, profiled), rows(*PROFILED))
    assert same.lingers.tolist() == join_history(profiled, rows(*PROFILED)).lingers.tolist()


def test_another_step_may_have_a_few_events_more_at_its_ends():
    other_block = {**STEP[8], "addr": 0x2000_0000}
    step = [*STEP[:7], other_block, STEP[9], STEP[7], *STEP[10:]]
    further = [entry("alloc", 0x1000_0000, 9), *step]
    other = history_of(snapshot(HELD, []), snapshot(HELD, further), 0, Pools())
    joined = join_history(lingering_as(taken(), other), rows(*PROFILED))
    assert joined is not None
    assert joined.lingers.tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 0]


def test_a_step_that_did_other_things_tells_nothing_of_this_one():
    other = history_of(snapshot(HELD, []), snapshot(HELD, STEP[1:4] * 20), 0, Pools())
    assert lingering_as(taken(), other) == taken()
    assert lingering_as(taken(), History()) == taken()


def test_what_is_held_gets_its_pool_and_the_rest_is_workspace():
    storages = {
        "parameters": (Storage(24 * MIB - 100, 0x7000_0000),),
        "gradients": (Storage(4 * MIB, 0x6000_0000),),
        "other": (Storage(100, 0x5000_0100),),  # within a block
    }
    pools = Pools()
    sizes, numbers = resident_by_class(snapshot(HELD, []), 0, storages, pools)
    assert sizes == {
        "parameters": (24 * MIB - 100,),
        "gradients": (4 * MIB,),
        "other": (100,),
        "workspace": (MIB,),
    }
    assert numbers == {"parameters": (0,), "gradients": (1,), "other": (0,), "workspace": (0,)}
    assert taken(pools).pool[0] == 1  # the numbers hold for the step as well


def test_one_stream_alone_needs_no_numbers():
    storages = {"parameters": (Storage(24 * MIB, 0x7000_0000),)}
    assert resident_by_class(snapshot(HELD[:1], []), 0, storages, Pools())[1] == {}


def test_a_cuda_graphs_pool_is_another_by_its_entries_or_its_segments():
    inside = segment(0x2000_0000, SIDE, block(0x2000_0000, 2 * MIB), pool=(0, 1))
    before = snapshot(HELD, [])
    for more in ({}, {"pool_id": (0, 1)}):
        step = [*STEP, entry("alloc", 0x2000_0000, 2 * MIB, SIDE, **more)]
        if more:
            step = [{"pool_id": (0, 0), **one} for one in step]
        pools = Pools()
        found = history_of(before, snapshot([*HELD, inside], step), 0, pools)
        assert found.pool == (1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 2)
        assert pools.known == {((0, 0), 0): 0, ((0, 0), SIDE): 1, ((0, 1), SIDE): 2}


def test_the_allocators_settings():
    assert settings_of(snapshot([], [])) is None
    assert settings_of({"segments": [], "device_traces": []}) is None
    divisions = {str(1 << power): 4 if power < 3 else 0 for power in range(16)}
    options = {"expandable_segments": True, "roundup_power2_divisions": divisions}
    found = settings_of(snapshot([], [], max_split_size=128 * MIB, **options))
    assert found == AllocatorSettings(True, 128 * MIB, (4, 4, 4) + (0,) * 13)


FSDP2 = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
              for _ in range(6)]
    model = nn.Sequential(*blocks).to("cuda", torch.bfloat16)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        x = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

RECORDED_STREAM = """
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda") for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters())
    side = torch.cuda.Stream()
    while True:
        x = torch.randn(4096, 4096, device="cuda")
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            noise = torch.randn(4096, 4096, device="cuda")
        torch.cuda.default_stream().wait_stream(side)
        y = model(x + noise)
        noise.record_stream(torch.cuda.default_stream())
        del noise
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def captured(directory: Path, script: str, *options: str, **environment: str) -> onerank.Graph:
    import os

    path = directory / "train.py"
    path.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "onerank", "capture", "run", str(path), *options]
    done = subprocess.run(
        [*command, "-o", str(directory / "t.et")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return onerank.read(directory / "t.et")


@on_cuda
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_fsdp2_reserves_as_much_as_its_streams_need(tmp_path, settings):
    """Its all-gathers' and reduce-scatters' buffers are of streams of their own."""
    both = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    graph = captured(tmp_path, FSDP2, "--dp", "4", **(both if settings else {}))
    log = graph.job.measurement.memory
    assert log is not None
    assert len(set(log.blocks.pool)) > 1
    assert (log.settings is not None) == bool(settings)
    found = report_memory(graph)
    assert found.peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.01)
    assert found.simulated_reserved_bytes == pytest.approx(found.reserved_bytes, rel=0.03)


@on_cuda
def test_memory_that_another_stream_uses_lingers(tmp_path):
    graph = captured(tmp_path, RECORDED_STREAM)
    log = graph.job.measurement.memory
    assert log is not None
    size = 4096 * 4096 * 4
    noise = [row for row, pool in enumerate(log.blocks.pool) if pool]
    assert size in {log.blocks.bytes[row] for row in noise}
    assert any(log.blocks.lingers[row] > 0 for row in noise)
    found = report_memory(graph)
    # how far the host is ahead, and so how much lingers at once, is not the same in every step
    assert found.simulated_reserved_bytes == pytest.approx(found.reserved_bytes, abs=4 * size)
