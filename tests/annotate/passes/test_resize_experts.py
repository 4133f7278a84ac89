"""Resized mixtures of experts, compared with captures at that size."""

import textwrap
from collections import Counter

import numpy as np
import pytest
from own_process import run_command
from raised import raises_code

import onerank
from onerank.annotate import characterise
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change

# tokens of all experts, 2 x 64 x 2, are as many as the intermediate size is wide
TRAIN = """
    import sys
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    length, batch = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(0)
    config = MixtralConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=256,
                           num_attention_heads=4, num_key_value_heads=2, vocab_size=224,
                           num_local_experts=16, experts_implementation=sys.argv[3])
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        tokens = torch.randint(0, 224, (batch, length))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LONGER = Resize(Change(0, 96), Change(0, 7))


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Return a function that captures the script with the given arguments."""
    folder = tmp_path_factory.mktemp("experts")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAIN))

    def take(length, batch, *options, experts="grouped_mm"):
        out = folder / "t.et"
        done = run_command(
            "capture", "run", script, *options, "-o", out, "--", length, batch, experts
        )
        assert done.returncode == 0, done.stderr
        return onerank.read(out)

    return take


def test_experts_get_their_share_of_the_tokens(capture):
    before = capture(64, 2, "--ep", 4)
    first, real = characterise(before), characterise(capture(96, 7, "--ep", 4))
    resized = characterise(LONGER.apply(before).graph)
    both = (resized, real)
    ops = [[op.replace("zero_", "fill_") for op in graph.text("op")] for graph in both]
    assert ops[0] == ops[1]
    fills = np.array([op == "aten::fill_" for op in ops[0]])
    shapes = [np.array(graph.text("input_shapes"), dtype=object)[~fills] for graph in both]
    assert (shapes[0] == shapes[1]).all()
    assert resized.text("output_shapes") == real.text("output_shapes")
    for name in ("flops", "bytes_read", "bytes_written", "comm_bytes"):
        columns = [getattr(graph.nodes, name) for graph in (*both, first)]
        assert (columns[0] == columns[1]).all(), name
        assert (columns[0] != columns[2]).any(), name
    grouped = Counter(op for op, change in zip(ops[0], first.nodes.flops, strict=True) if change)
    assert grouped["aten::_grouped_mm"] == 2 * 6  # a layer: two products, each with two gradients
    memory = [report_memory(graph) for graph in (*both, first)]
    step_bytes = [report.peak_bytes - report.start_bytes for report in memory]
    assert step_bytes[0] == pytest.approx(
        step_bytes[1], rel=2e-3
    )  # buffers of counts under 1 kB stay
    assert step_bytes[0] > 2 * step_bytes[2]


def test_an_unbalanced_router_is_refused(capture):
    uneven = capture(64, 2, "--ep", 4, "--moe-routing", "zipf:1")
    with raises_code("resize-expert-rows", naming=("the 128 tokens",)):
        LONGER.apply(uneven)


def test_experts_one_after_another_are_refused(capture):
    with raises_code("resize-expert-tokens"):
        LONGER.apply(capture(64, 2, experts="eager"))
