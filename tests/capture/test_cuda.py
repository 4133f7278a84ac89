"""Capture on a GPU; skipped where there is none."""

import gzip
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import onerank
from onerank.ir import Graph, Phase

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module", params=["megatron", "hf"])
def captured(request, tmp_path_factory) -> tuple[Graph, list[dict], dict]:
    """The graph, the profiled window's events, and the command's own JSON."""
    directory = tmp_path_factory.mktemp(request.param)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from onerank.cli import capture; capture()",
            "run",
            EXAMPLE,
            "--tp",
            "4",
            "--tp-flavour",
            request.param,
            "-o",
            directory / "trace.et",
            "--keep-raw",
            directory / "raw",
            "--json",
            "--",
            "--layers",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    profile = gzip.decompress((directory / "raw" / "profile.json.gz").read_bytes())
    told = json.loads(done.stdout)
    return onerank.read(directory / "trace.et"), json.loads(profile)["traceEvents"], told


def gpu_events(events: list[dict]) -> list[dict]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_kernel_time_is_kinetos_to_the_nanosecond(captured):
    graph, events, told = captured
    total = sum(round(event["dur"] * 1000) for event in gpu_events(events))
    emulates = told["gpu_ops"] < len(gpu_events(events))
    if not emulates:  # megatron: nothing runs in place of its all-reduces
        assert told["gpu_time_ns"] == total
        assert told["gpu_ops"] == len(gpu_events(events))
    else:  # hf: one copy stands for the all-gather of the logits
        assert told["gpu_ops"] == len(gpu_events(events)) - 1
        assert told["gpu_time_ns"] < total
    assert graph.nodes.duration_ns[graph.gpu_compute].sum() == told["gpu_time_ns"]


def test_peak_memory_is_the_allocators(captured):
    _, events, told = captured
    on_gpu = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 1]
    assert told["peak_memory_bytes"] == max(e["args"]["Total Allocated"] for e in on_gpu)


def test_every_phase_and_the_device_are_there(captured):
    graph, _, told = captured
    phases = set(graph.nodes.phase[graph.gpu_compute].tolist())
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= phases
    assert graph.job.device.name == torch.cuda.get_device_name()
    assert told["profiled_step_ns"] > 0
    assert len(graph.topological_order()) == len(graph)


CONTEXT_PARALLEL = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    BATCH, LENGTH, HEADS, WIDTH = 2, 512, 4, 64
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(qkv.parameters())
    while True:
        x = torch.randn(BATCH, LENGTH, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                q, k, v = (
                    part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
                    for part in qkv(x).chunk(3, dim=-1)
                )
                y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                y.float().square().mean().backward()
        assert qkv.weight.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_context_parallel(tmp_path):
    """Keys and values of the shards go round; torch gathers or rotates them."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(CONTEXT_PARALLEL))
    command = ["capture", "run", path, "--cp", "4", "--rank", "1", "-o", tmp_path / "t.et"]
    done = subprocess.run(
        [sys.executable, "-m", "onerank", *map(str, command), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    kinds = {(use["type"], use["phase"]) for use in told["collectives"]}
    assert kinds & {("all_gather", "forward"), ("all_to_all", "forward")}
    assert kinds & {("all_to_all", "backward"), ("reduce_scatter", "backward")}
    shard = 2 * 512 // 4 * 4 * 64 * 2  # bytes of one rank's keys: batch, length, heads, width
    assert {use["bytes"] for use in told["collectives"]} & {shard, 2 * shard}
