"""Capture on a GPU; skipped where there is none."""

import gzip
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import onerank
from onerank.capture.collective_kernels import CollectiveEmulation, uniform
from onerank.capture.fake_world.recorder import Recorder
from onerank.ir import Collective, Graph, Kind, Phase
from onerank.ir.steady_state import steady_state_step

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
            "--tp-style",
            request.param,
            "-o",
            directory / "trace.et",
            "--raw-dir",
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
    measured = json.loads(done.stdout)
    return onerank.read(directory / "trace.et"), json.loads(profile)["traceEvents"], measured


def gpu_events(events: list[dict]) -> list[dict]:
    return [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_kernel_time_is_kinetos_to_the_nanosecond(captured):
    graph, events, measured = captured
    total = sum(round(event["dur"] * 1000) for event in gpu_events(events))
    markers = [event for event in events if event["name"] == "onerank_standin_marker"]
    calls = graph.mask(Kind.COLLECTIVE).sum()
    assert len([event for event in markers if event["cat"] == "kernel"]) == calls
    left_out = len(gpu_events(events)) - measured["gpu_ops"]
    if left_out == calls:  # megatron: only the markers run in its all-reduces' place
        marked = sum(round(event["dur"] * 1000) for event in markers if event["cat"] == "kernel")
        assert measured["gpu_time_ns"] == total - marked
    else:  # hf: one copy stands for the all-gather of the logits
        assert left_out == calls + 1
        assert measured["gpu_time_ns"] < total
    assert graph.nodes.duration_ns[graph.gpu_compute].sum() == measured["gpu_time_ns"]


def test_peak_memory_is_the_allocators(captured):
    _, events, measured = captured
    on_gpu = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 1]
    assert measured["peak_memory_bytes"] == max(e["args"]["Total Allocated"] for e in on_gpu)


def test_every_phase_and_the_device_are_there(captured):
    graph, _, measured = captured
    phases = set(graph.nodes.phase[graph.gpu_compute].tolist())
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= phases
    assert graph.job.device.name == torch.cuda.get_device_name()
    assert measured["profiled_step_ns"] > 0
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
    measured = json.loads(done.stdout)
    kinds = {(use["type"], use["phase"]) for use in measured["collectives"]}
    assert kinds & {("all_gather", "forward"), ("all_to_all", "forward")}
    assert kinds & {("all_to_all", "backward"), ("reduce_scatter", "backward")}
    shard = 2 * 512 // 4 * 4 * 64 * 2  # bytes of one rank's keys: batch, length, heads, width
    assert {use["bytes"] for use in measured["collectives"]} & {shard, 2 * shard}


@pytest.fixture
def recorder():
    made = Recorder(1, 4, emulation=CollectiveEmulation(uniform(300.0)))
    made.start()
    yield made
    torch.cuda.synchronize()
    made.stop()


@pytest.mark.parametrize("paced", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("count", [1, 7, 1000, 327_683])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_stand_ins_leave_what_the_emulation_promises(recorder, dtype, count, asynchronous, paced):
    recorder.paced = paced
    full = torch.randint(0, 100, (4 * count,), device="cuda").to(dtype)
    own = full[count : 2 * count]

    def done(call, *tensors):
        work = call(*tensors, async_op=asynchronous)
        if asynchronous:
            work.wait()

    summed, gathered = full.clone(), torch.empty_like(full)
    scattered, exchanged = torch.empty_like(own), torch.empty_like(full)
    done(dist.all_reduce, summed)
    done(dist.all_gather_into_tensor, gathered, own)
    done(dist.reduce_scatter_tensor, scattered, full)
    done(dist.all_to_all_single, exchanged, full)
    assert torch.equal(summed, full)
    assert torch.equal(gathered, own.repeat(4))
    assert torch.equal(scattered, own)
    assert torch.equal(exchanged, full)


def test_a_paced_call_takes_its_time_on_nccls_grid(recorder):
    tensor = torch.randn(64 << 20, device="cuda", dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
    took = sorted(e.device_time for e in profiler.events() if e.name == "onerank_standin_paced")
    expected = tensor.nbytes * 1.5 / 300e3 + 28.8  # us: three quarters twice, and the ring's steps
    assert took[2] == pytest.approx(expected, rel=0.02)


def test_stand_ins_take_no_memory_of_torchs(recorder):
    tensor = torch.randn(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True).wait()
    assert torch.cuda.max_memory_allocated() == before


def test_stand_ins_go_into_cuda_graphs(recorder):
    tensor, gathered = torch.randn(1000, device="cuda"), torch.empty(4000, device="cuda")

    def step():
        work = dist.all_gather_into_tensor(gathered, tensor, async_op=True)
        twice = tensor * 2
        work.wait()
        return twice + gathered[:1000]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    gathered.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(gathered, tensor.repeat(4))


OVERLAP = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
layers = [nn.Linear(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=20)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(40):
    model(torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_ddp_overlaps_and_keeps_both_times(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OVERLAP)
    code = "from onerank.cli import capture; capture()"
    command = [sys.executable, "-c", code, "run", script, "--dp", "4", "--busbw-gb-s", "300"]
    command += ["-o", tmp_path / "trace.et", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.et")
    calls = graph.mask(Kind.COLLECTIVE) & (graph.nodes.comm_bytes > 1 << 20)
    assert calls.sum() >= 2
    compute = graph.gpu_compute
    assert not set(graph.nodes.stream[calls]) & set(graph.nodes.stream[compute])
    assert (graph.nodes.duration_ns[calls] > 0).all()
    assert (graph.nodes.uncontended_ns[compute] > 0).mean() > 0.95
    waiting = graph.edges.target[np.isin(graph.edges.source, np.flatnonzero(calls))]
    assert compute[waiting].any()  # what reads the gradients waits for them
    measured = graph.job.measurement
    assert len(measured.host_step_ns) == 3
    assert measured.host_overhead is not None
    assert 0.2 <= measured.host_overhead.host_factor <= 1.2
    step = steady_state_step(graph, as_captured=True)
    assert step is not None
    assert step.step_ns + step.residual_ns == measured.median_step_ns
    assert measured.emulated_calls is not None
    assert measured.emulated_calls.asynchronous >= calls.sum()
    assert measured.emulated_calls.host_ns > 0


def test_a_sharded_model_is_never_whole_on_the_gpu(tmp_path):
    """Of 24 blocks of 64 MiB each of 4 ranks has a fourth, and one at a time whole."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                             num_attention_heads=16, num_key_value_heads=16, vocab_size=1024)
        model = LlamaForCausalLM(config).to("cuda")
        whole = 4 * sum(p.numel() for p in model.parameters())
        peak = torch.cuda.max_memory_allocated()
        assert peak < 0.35 * whole, (peak, whole)
        assert model.device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(0, 1024, (1, 64), device=model.device)
        while True:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            assert loss.item() < 20
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    command = [sys.executable, "-m", "onerank", "capture", "run", script, "--dp", "4", "--fsdp"]
    done = subprocess.run(
        [*command, "-o", tmp_path / "t.et"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    layer = 4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024
    gathers = [node for node in graph if node.collective is Collective.ALL_GATHER]
    assert [node.value("comm_bytes") for node in gathers].count(4 * layer // 4) == 2 * 24
