"""Recurrent layers without a device are cuDNN's one operator."""

import json
from pathlib import Path

import numpy as np
import pytest
from without_device import captured

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Graph, Phase

SCRIPT = """
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    model = nn.{layer}.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn({shape}, device="cuda", requires_grad=True)
        {statement}
        y.sum().backward()
        assert [p.grad.shape for p in model.parameters()] == [p.shape for p in model.parameters()]
        assert x.grad.shape == x.shape
        optimizer.step()
        optimizer.zero_grad()
"""
PACKED = "y = pad_packed_sequence(model(pack_padded_sequence(x, torch.tensor([7, 5, 2])))[0])[0]"


def recurrent(
    directory: Path, layer: str, shape: str, statement: str, like: str = "H100-SXM"
) -> Graph:
    text = SCRIPT.format(layer=layer, shape=shape, statement=statement)
    return captured(directory, text, "--like", like)


def flops_of(graph: Graph, operator: str) -> list[int]:
    costs = op_costs_of(graph)
    names = graph.text("op")
    counts = zip(costs.index.tolist(), costs.flops.tolist(), strict=True)
    return [flops for index, flops in counts if names[index] == operator]


@pytest.mark.parametrize(
    ("layer", "shape", "statement", "products"),
    [
        # Tokens, times the elements of all weight matrices.
        (
            "LSTM(64, 32, 2, dropout=0.5)",
            "(7, 3, 64)",
            "y, (h, c) = model(x); assert y.shape == (7, 3, 32) and c.shape == (2, 3, 32)",
            21 * 4 * 32 * (64 + 32 + 32 + 32),
        ),
        (
            "GRU(64, 32, 2, bidirectional=True, batch_first=True)",
            "(8, 5, 64)",
            "y, h = model(x); assert y.shape == (8, 5, 64) and h.shape == (4, 8, 32)",
            40 * 3 * 32 * 2 * (64 + 32 + 64 + 32),
        ),
        (
            "RNN(64, 16, bias=False)",
            "(7, 3, 64)",
            "y, h = model(x); assert h.shape == (1, 3, 16)",
            21 * 16 * (64 + 16),
        ),
        (
            "LSTM(64, 16, proj_size=8)",
            "(7, 3, 64)",
            "y, (h, c) = model(x); assert (h.shape[2], c.shape[2]) == (8, 16)",
            21 * (64 * (64 + 8) + 8 * 16),
        ),
        ("LSTM(64, 32)", "(7, 3, 64)", PACKED, 14 * 4 * 32 * (64 + 32)),
    ],
)
def test_a_recurrent_layer_is_one_operator(layer, shape, statement, products, tmp_path):
    graph = recurrent(tmp_path, layer, shape, statement)
    assert flops_of(graph, "aten::_cudnn_rnn") == [2 * products]
    assert flops_of(graph, "aten::_cudnn_rnn_backward") == [4 * products]
    assert not [op for op in graph.text("op") if op in ("aten::mm", "aten::addmm", "aten::sigmoid")]


@pytest.mark.parametrize(
    ("layer", "shape", "measured"),
    [
        ("LSTM(256, 512, 3, dropout=0.2)", "(64, 16, 256)", 35782912),
        ("GRU(256, 512, 3, dropout=0.2)", "(64, 16, 256)", 42074368),
        ("RNN(512, 512, 2, dropout=0.1, bidirectional=True)", "(128, 8, 512)", 12845312),
        ("LSTM(650, 650, 2)", "(35, 40, 650)", 40040256),
    ],
)
def test_the_reserve_space_is_kept_for_the_backward(layer, shape, measured, tmp_path):
    """It has the bytes that `_cudnn_rnn` returned on an H100, in the allocator's units of 512."""
    graph = recurrent(tmp_path, layer, shape, "y, _ = model(x)")
    log = graph.job.measurement.memory
    expected = -(-measured // 512) * 512
    (block,) = np.flatnonzero(np.array(log.blocks.bytes) == expected)
    assert log.blocks.phase[block] == Phase.FORWARD
    (backward,) = (i for i, op in enumerate(graph.text("op")) if op == "aten::_cudnn_rnn_backward")
    freed_by = [n for n in range(len(log.blocks)) if log.blocks.node[n] == graph.nodes.id[backward]]
    assert log.blocks.freed_at[block] > min(log.blocks.allocated_at[n] for n in freed_by)


def test_autocast_runs_a_recurrent_layer_in_16_bits(tmp_path):
    statement = """with torch.autocast("cuda", torch.bfloat16):
            y, _ = model(x)
        assert y.dtype == torch.bfloat16"""
    graph = recurrent(tmp_path, "LSTM(64, 32)", "(7, 3, 64)", statement)
    (row,) = (i for i, op in enumerate(graph.text("op")) if op == "aten::_cudnn_rnn")
    assert "BFloat16" in graph.text("input_types")[row]


@pytest.mark.parametrize(("like", "calls"), [("H100-SXM", 1), ("T4", 0)])
def test_cudnn_runs_bfloat16_from_ampere_on(like, calls, tmp_path):
    statement = "model.bfloat16(); y, _ = model(x.bfloat16())"
    graph = recurrent(tmp_path, "LSTM(64, 32)", "(7, 3, 64)", statement, like)
    assert graph.text("op").count("aten::_cudnn_rnn") == calls


def test_without_cudnn_a_recurrent_layer_runs_as_other_operators(tmp_path):
    statement = "torch.backends.cudnn.enabled = False; y, _ = model(x)"
    graph = recurrent(tmp_path, "LSTM(64, 32)", "(7, 3, 64)", statement)
    assert flops_of(graph, "aten::_cudnn_rnn") == []
    assert sum(op in ("aten::mm", "aten::addmm") for op in graph.text("op")) >= 8


def test_a_gru_cell_is_two_products_and_a_fused_operator(tmp_path):
    """Its workspace has 5 numbers for each of its state, as in RNN.cu."""
    graph = recurrent(tmp_path, "GRUCell(64, 32)", "(7, 64)", "y = model(x)")
    operators = graph.text("op")
    (row,) = (i for i, op in enumerate(operators) if op == "aten::_thnn_fused_gru_cell")
    assert json.loads(graph.text("output_shapes")[row]) == [[7, 32], [7, 160]]
    assert operators.count("aten::_thnn_fused_gru_cell_backward") == 1
    # Forward, and the gradients of both weights and of x; the first state is a constant.
    assert sum(flops_of(graph, "aten::mm")) == 2 * 7 * 3 * 32 * (3 * 64 + 2 * 32)
