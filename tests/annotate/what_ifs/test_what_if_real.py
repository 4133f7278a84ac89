"""What-ifs against captures of what they ask for: each figure is held against a real one."""

import textwrap
from collections import Counter

import numpy as np
import pytest
from own_process import run_command

import onerank
from onerank.annotate import CLASSES, WhatIf, characterise, classify, load_gpu, recost
from onerank.annotate.memory.report import report_memory
from onerank.annotate.what_ifs.attention.unfused import EagerAttention
from onerank.annotate.what_ifs.sizes.resize import Resize
from onerank.annotate.what_ifs.sizes.sizing import Change
from onerank.ir.errors import AnnotateError

# the hidden size, the width of all heads and the captured sequence are all 64
TRAIN = """
    import sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    length, batch, attention = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=160,
                         num_attention_heads=4, num_key_value_heads=2, vocab_size=224,
                         max_position_embeddings=256, attn_implementation=attention)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        tokens = torch.randint(0, 224, (batch, length))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Return the function that captures the script at a size, each once."""
    folder = tmp_path_factory.mktemp("sizes")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    known = {}

    def take(length, batch, attention="sdpa"):
        key = (length, batch, attention)
        if key not in known:
            out = folder / f"{len(known)}.et"
            sizes = ("--tp", 2, "--dp", 2)
            done = run_command("capture", "run", script, *sizes, "-o", out, "--", *key)
            assert done.returncode == 0, done.stderr
            known[key] = onerank.read(out)
        return known[key]

    return take


def operators(graph):
    """Return the nodes' operators; torch fills small tensors by `zero_`, large ones by `fill_`."""
    return [op.replace("zero_", "fill_") for op in graph.text("op")]


@pytest.mark.parametrize(("before", "after"), [((64, 2), (128, 3)), ((128, 3), (64, 2))])
def test_a_resized_step_is_the_step_captured_at_that_size(capture, before, after):
    first, real = characterise(capture(*before)), characterise(capture(*after))
    asked = Resize(Change(0, after[0]), Change(0, after[1]))
    made = characterise(asked.apply(capture(*before)).graph)
    assert operators(made) == operators(real)
    fills = np.array([op == "aten::fill_" for op in operators(made)])
    shapes = [np.array(graph.text("input_shapes"), dtype=object)[~fills] for graph in (made, real)]
    assert (shapes[0] == shapes[1]).all()
    assert made.text("output_shapes") == real.text("output_shapes")
    for name in ("flops", "bytes_read", "bytes_written", "comm_bytes"):
        columns = [getattr(graph.nodes, name) for graph in (made, real, first)]
        assert (columns[0] == columns[1]).all(), name
        assert (columns[0] != columns[2]).any(), name
    gradients = made.nodes.phase == onerank.ir.Phase.BACKWARD
    gradients &= np.array([group == "dp" for group in made.text("group")])
    assert gradients.any()
    assert (made.nodes.comm_bytes == first.nodes.comm_bytes)[gradients].all()
    tokens = np.array([group == "tp" for group in made.text("group")])
    factor = after[0] * after[1] / (before[0] * before[1])
    assert (made.nodes.comm_bytes == factor * first.nodes.comm_bytes)[tokens].all()
    memory = [report_memory(graph) for graph in (made, real, first)]
    own = [one.peak_bytes - one.start_bytes for one in memory]  # beside what was held before
    assert own[0] == own[1] != own[2]


def test_the_cpu_capture_becomes_the_gpu_step_at_that_size(capture):
    asked = WhatIf(sizes=Resize(Change(64, 128), Change(2, 3)))
    made = recost(capture(64, 2), "H100", what_if=asked)
    real = recost(capture(128, 3), "H100")
    assert (made.nodes.duration_ns == real.nodes.duration_ns).all()
    assert any(
        note.startswith("What if the sequence were 128 instead of 64 and the micro-batch were 3")
        for note in made.job.measurement.notes
    )


def test_eager_attention_is_what_the_eager_model_runs(capture):
    fused = recost(capture(64, 2), "H100")
    real = recost(capture(64, 2, "eager"), "H100")
    made = EagerAttention().apply(fused, load_gpu("H100"))

    def inside(graph, *classes):
        kinds = [CLASSES[code].value for code in classify(graph, np.arange(len(graph)))]
        return Counter(
            (op, shapes)
            for op, shapes, kind, module in zip(
                graph.text("op"), graph.text("output_shapes"), kinds, graph.text("module"),
                strict=True,
            )
            if kind in classes and module.endswith(".self_attn")
        )  # fmt: skip

    for kind in ("gemm", "softmax"):
        assert inside(made, kind) == inside(real, kind) != inside(fused, kind)
    total = [int(g.nodes.flops[g.gpu_compute].clip(0).sum()) for g in (made, real, fused)]
    assert total[0] == pytest.approx(total[1], rel=1e-3)
    assert total[1] > 1.02 * total[2]
    peaks = [report_memory(graph).peak_bytes for graph in (made, real, fused)]
    # the scores, float32: 2 sequences, 2 of 4 heads (TP 2), 64 x 64, in each of two layers
    assert peaks[0] - peaks[2] > 2 * 4 * 2 * 2 * 64 * 64
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
    with pytest.raises(AnnotateError, match="no kernel is fused attention"):
        EagerAttention().apply(real, load_gpu("H100"))


@pytest.mark.parametrize(
    ("seq", "batch", "message"),
    [
        (Change(0, 64), Change(0, 2), "nothing changes: .* length of 64 and a micro-batch of 2"),
        (Change(100, 128), None, r"forward reads token ids of 2 x 64 .* not of sequence 100"),
        (Change(1000, 500), Change(77, 77), "no operand grows with a sequence length of 1000"),
    ],
)
def test_sizes_that_are_not_the_steps(capture, seq, batch, message):
    with pytest.raises(AnnotateError, match=message):
        Resize(seq, batch).apply(capture(64, 2))
