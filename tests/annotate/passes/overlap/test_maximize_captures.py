"""Maximized overlap of captures, compared with scripts that overlap communication themselves."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from notes import note_of

import onerank
from onerank.analysis.step_time import replay
from onerank.annotate import PassOptions, recost
from onerank.annotate.passes.overlap import MaximizeOverlap
from onerank.annotate.passes.pass_options import parse_sizes
from onerank.capture import Options, WindowPlan, capture
from onerank.cli.commands.annotate import annotate
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.converters.targets.goal import export_goal
from onerank.ir import Graph, Kind

TRACES = Path(__file__).parents[4] / "traces"

BUS_GB_PER_S = 10

START = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
"""

HOOKS = """
    calls = []
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(
            lambda one: calls.append(dist.all_reduce(one.grad, async_op=True)))
"""

STEPS = """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, 256)
    for _ in range(12):
        model(inputs).sum().backward()
        {reduce}
        optimizer.step()
        optimizer.zero_grad()
"""

BEHIND = "for one in model.parameters(): dist.all_reduce(one.grad)"

AWAITED = "while calls: calls.pop(0).wait()"

FSDP = """
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
"""


def captured(directory: Path, *parts: str) -> Graph:
    script = directory / "train.py"
    script.write_text("".join(map(textwrap.dedent, parts)))
    return capture(script, [], Options(dp=4, windows=WindowPlan(warm_up=1, timed_steps=1))).graph


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> Graph:
    """Gradients summed one after another after the backward."""
    return captured(tmp_path_factory.mktemp("hand"), START, STEPS.format(reduce=BEHIND))


def times_of(graph: Graph) -> tuple[int, int]:
    step_times = replay(graph, bandwidth_gb_per_s=BUS_GB_PER_S)
    return step_times.step_time_ns, step_times.exposed_communication_ns


def times(graph: Graph, overlap: str) -> tuple[int, int]:
    """Return the step time on an H200 and its exposed communication, in ns."""
    return times_of(recost(graph, "H200", passes=PassOptions(overlap=overlap)))


def test_sums_after_the_backward_overlap_like_those_of_hooks(by_hand, tmp_path):
    hooks = captured(tmp_path, START, HOOKS, STEPS.format(reduce=AWAITED))
    blocking, asynchronous = times(by_hand, "as-captured"), times(hooks, "as-captured")
    maximized = times(by_hand, "on")
    assert maximized[0] < asynchronous[0] * 1.001 < blocking[0] * 0.9
    # Unlike with hooks, each kernel of the optimizer waits only for its gradients.
    assert maximized[0] == pytest.approx(asynchronous[0], rel=0.03)
    assert maximized == times(hooks, "on")
    assert times(hooks, "off") == blocking


def test_fsdp_overlaps_gathers_and_scatters(tmp_path):
    graph = captured(tmp_path, START, FSDP, STEPS.format(reduce="pass"))
    before, after = times(graph, "as-captured"), times(graph, "on")
    assert after[0] < before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("name", ["cpu-llama-2l-tp4", "h200-llama-8b-4l-tp4"])
def test_tensor_parallelism_has_little_to_gain(name):
    """The next kernel mostly reads the sum, so few calls can overlap more compute."""
    graph = convert_directory(TRACES / name)[0]
    maximized = MaximizeOverlap().apply(graph)
    # Of all calls some overlap more, others are exposed. The slice on the H200 emulates the sum of
    # its embedding in other memory, so nothing reads it.
    counts = {"cpu-llama-2l-tp4": [17, 5, 12], "h200-llama-8b-4l-tp4": [21, 1, 19, 1]}[name]
    note = note_of(maximized.job.measurement.notes, "overlap-on")
    assert [int(count) for count in re.findall(r"\d+", note.text)] == counts


def test_overlap_with_other_passes():
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    options = {"sizes": parse_sizes("4096=8192", "2"), "attention": "eager"}
    plain = recost(graph, "H100", passes=PassOptions(**options))
    maximized = recost(graph, "H100", passes=PassOptions(**options, overlap="on"))
    assert maximized.nodes.duration_ns.sum() == plain.nodes.duration_ns.sum()
    assert times_of(maximized) < times_of(plain)


def test_sums_of_gradients_overlap_the_next_product():
    """The gradient of up_proj's input is summed while gate_proj's products run."""
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    maximized = MaximizeOverlap().apply(graph)
    (call,) = [node.index for node in maximized if node.kind is Kind.COLLECTIVE and
               node.text("module") == "model.layers.1.mlp.up_proj"]  # fmt: skip
    following = np.flatnonzero(maximized.nodes.start_ns > graph.nodes.start_ns[call])[:3].tolist()
    assert [maximized.node(i).text("op") for i in following] == [
        "aten::silu_backward", "aten::mm", "aten::mm",
    ]  # fmt: skip
    assert not any(call in dict(maximized.edges.of(i)) for i in following)


def test_exports_have_no_findings(by_hand, tmp_path):
    maximized = recost(by_hand, "H200", passes=PassOptions(overlap="on"))
    export_astra_sim(maximized, tmp_path / "out")
    assert check(tmp_path / "out") == []
    export_goal(maximized, tmp_path / "step.goal")
    assert (tmp_path / "step.goal").stat().st_size


def test_the_command(by_hand, tmp_path):
    path, out = tmp_path / "t.et", tmp_path / "o.et"
    by_hand.write(path)
    options = ["--target", "H200", "--overlap", "on", "-o", str(out), str(path)]
    result = CliRunner().invoke(annotate, options)
    assert result.exit_code == 0, result.output
    assert "of 12 calls, 12 overlap more compute" in " ".join(result.output.split())
    assert check(out) == []
    refused = CliRunner().invoke(annotate, ["--target", "H200", "--overlap", "half", str(path)])
    assert refused.exit_code == 2
    assert onerank.read(out).job.measurement.notes
