"""The step and module timers on a GPU; skipped where there is none."""

import gc
from pathlib import Path

import pytest
import torch
from notes import has_note
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from onerank.analysis.breakdown import parts
from onerank.capture import Capture, Options, WindowPlan, capture
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.step_timers import ModuleTimer
from onerank.ir import Phase

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def captured() -> Capture:
    options = Options(tp=4, windows=WindowPlan(repeat=3))
    return capture(EXAMPLE, ["--layers", "2"], options)


def test_every_kernel_has_a_median_of_its_steps(captured):
    graph, report = captured.graph, captured.conversion
    gpu = graph.gpu_compute
    # the example reads its loss every tenth step: a copy more, and such a step is left out
    assert report.steps + report.steps_dropped == 3
    assert report.steps >= 2
    assert set(graph.nodes.samples[gpu].tolist()) == {report.steps}
    assert (graph.nodes.spread_ns[gpu] > 0).mean() > 0.5  # CUPTI's clock ticks in 32 ns
    total = graph.nodes.duration_ns[gpu].sum()
    assert min(report.step_times_ns) * 0.99 <= total <= max(report.step_times_ns) * 1.01
    assert not has_note(graph.job.measurement.notes, "peak-memory-varies")


def test_gaps_come_from_the_timed_steps(captured):
    measurement = captured.graph.job.measurement
    step = measurement.median_step_ns
    assert step is not None
    assert measurement.gpu_busy_ns > 0
    assert measurement.gpu_busy_ns < measurement.profiled_step_ns
    assert measurement.gpu_busy_ns < step * 1.05


def test_event_times_cover_the_kernels_of_their_module(captured):
    """Between events lie a module's kernels and its idle time."""
    for part in parts(captured.graph, "layer"):
        if part.role != "layer":
            continue
        assert part.timed_forward_ns is not None
        assert part.timed_backward_ns is not None
        assert part.timed_forward_ns > part.forward_ns * 0.97
        assert part.timed_backward_ns > part.backward_ns * 0.97


def test_sensors_are_in_the_device_record(captured):
    pytest.importorskip("pynvml")
    sensors = captured.graph.job.device.sensors
    assert sensors is not None
    assert sensors.samples >= 2
    assert sensors.sm_clock_mhz is not None
    assert 200 < sensors.sm_clock_mhz.median < 3000
    assert sensors.power_mw is not None
    assert 20_000 < sensors.power_mw.median < 1_500_000
    assert sensors.temperature_c is not None
    assert 10 < sensors.temperature_c.median < 110


def test_coarse_graphs_keep_the_gpu_time(captured):
    graph = captured.graph
    for grain in ("layer", "submodule"):
        coarse = graph.coarsen(grain)
        total = coarse.nodes.duration_ns[coarse.gpu_compute].sum()
        assert total == graph.nodes.duration_ns[graph.gpu_compute].sum()
        assert coarse.communication.sum() == graph.communication.sum()
        assert len(coarse.topological_order()) == len(coarse) < len(graph) / 10
        assert {node.phase for node in coarse} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def test_the_module_clock_launches_nothing_and_takes_no_memory():
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2,
                         num_attention_heads=4, vocab_size=1024)  # fmt: skip
    model = LlamaForCausalLM(config).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 1024, (2, 256), device="cuda")

    def step() -> tuple[dict[str, int], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        launched = {e.key: e.count for e in profiler.key_averages() if e.device_type == on_gpu}
        return launched, torch.cuda.max_memory_allocated()

    modules = Modules()
    with modules.installed():
        step(), step()
        gc.collect()  # what is freed within a step would lower its peak
        expected = step()
        clock = ModuleTimer(modules, on_gpu=True)
        with clock.running():
            found = step()
            clock.end_step(counts=True)
    assert found == expected
    assert len(clock.times()) > 20


def test_a_grad_scaler_skips_steps_in_fp16(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # too large: the first steps overflow
x = torch.randn(32, 64, device="cuda")
while True:
    with torch.autocast("cuda", torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    )
    graph = capture(path, [], Options(windows=WindowPlan(warm_up=1, timed_steps=1))).graph
    assert has_note(graph.job.measurement.notes, "steps-skipped")
    assert any(node.phase is Phase.OPTIMIZER for node in graph)
    products = [n for n in graph if n.phase is Phase.FORWARD and n.text("op") == "aten::addmm"]
    assert {n.value("micro_batch") for n in products} == {0}
