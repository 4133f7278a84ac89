"""Passes compared with captures of what they predict."""

import textwrap
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from notes import has_note, note_of
from own_process import run_command
from raised import raises_code

import onerank
from onerank.analysis.step_time import replay
from onerank.annotate import CLASSES, PassOptions, characterise, classify, load_gpu, recost
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.passes.attention.fuse import FusedAttention
from onerank.annotate.passes.attention.unfuse import EagerAttention
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change
from onerank.ir import UNKNOWN, Edges, Evidence, Kind, Nodes, Reason

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
    resize = Resize(Change(0, after[0]), Change(0, after[1]))
    applied = resize.apply(capture(*before))
    assert has_note(applied.notes, "resize-blocks-unmatched")
    resized = characterise(applied.graph)
    assert operators(resized) == operators(real)
    fills = np.array([op == "aten::fill_" for op in operators(resized)])
    shapes = [
        np.array(graph.text("input_shapes"), dtype=object)[~fills] for graph in (resized, real)
    ]
    assert (shapes[0] == shapes[1]).all()
    assert resized.text("output_shapes") == real.text("output_shapes")
    for name in ("flops", "bytes_read", "bytes_written", "comm_bytes"):
        columns = [getattr(graph.nodes, name) for graph in (resized, real, first)]
        assert (columns[0] == columns[1]).all(), name
        assert (columns[0] != columns[2]).any(), name
    gradients = resized.nodes.phase == onerank.ir.Phase.BACKWARD
    gradients &= np.array([group == "dp" for group in resized.text("group")])
    assert gradients.any()
    assert (resized.nodes.comm_bytes == first.nodes.comm_bytes)[gradients].all()
    tokens = np.array([group == "tp" for group in resized.text("group")])
    factor = after[0] * after[1] / (before[0] * before[1])
    assert (resized.nodes.comm_bytes == factor * first.nodes.comm_bytes)[tokens].all()
    memory = [report_memory(graph) for graph in (resized, real, first)]
    step_bytes = [report.peak_bytes - report.start_bytes for report in memory]
    assert step_bytes[0] == step_bytes[1] != step_bytes[2]


def test_memory_that_a_resize_cannot_follow(capture):
    graph = capture(64, 2)
    resize = Resize(Change(0, 128), Change(0, 2))
    without_frees = graph.with_columns(bytes_freed=np.zeros(len(graph), dtype=np.int64))
    assert has_note(resize.apply(without_frees).notes, "resize-blocks-without-free")
    measurement = msgspec.structs.replace(graph.job.measurement, memory=None)
    without_log = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    resized = resize.apply(without_log)
    assert has_note(resized.notes, "resize-peak-unknown")
    assert resized.graph.job.measurement.peak_memory_bytes == 0


def test_attention_of_other_dtypes_stays_fused(capture):
    graph = recost(capture(64, 2), "H100")
    in_first_layer = [module == "model.layers.0.self_attn" for module in graph.text("module")]
    types = [
        text.replace("Tensor(float)", "Tensor(double)") if first else text
        for first, text in zip(in_first_layer, graph.text("input_types"), strict=True)
    ]
    unfused = EagerAttention().apply(graph.with_columns(input_types=types), load_gpu("H100"))
    # One forward and one backward, of the first of two layers.
    note_of(unfused.job.measurement.notes, "eager-stays-fused", 2)


def test_the_cpu_capture_becomes_the_gpu_step_at_that_size(capture):
    passes = PassOptions(sizes=Resize(Change(64, 128), Change(2, 3)))
    resized = recost(capture(64, 2), "H100", passes=passes)
    real = recost(capture(128, 3), "H100")
    assert (resized.nodes.duration_ns == real.nodes.duration_ns).all()
    note_of(resized.job.measurement.notes, "what-if-size", 128, 64, 3)


def test_unfused_attention_equals_the_eager_model(capture):
    fused = recost(capture(64, 2), "H100")
    real = recost(capture(64, 2, "eager"), "H100")
    unfused = EagerAttention().apply(fused, load_gpu("H100"))
    assert has_note(unfused.job.measurement.notes, "what-if-eager-attention")

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
        assert inside(unfused, kind) == inside(real, kind) != inside(fused, kind)
    total = [int(g.nodes.flops[g.gpu_compute].clip(0).sum()) for g in (unfused, real, fused)]
    assert total[0] == pytest.approx(total[1], rel=1e-3)
    assert total[1] > 1.02 * total[2]
    peaks = [report_memory(graph).peak_bytes for graph in (unfused, real, fused)]
    # the scores, float32: 2 sequences, 2 of 4 heads (TP 2), 64 x 64, in each of two layers
    assert peaks[0] - peaks[2] > 2 * 4 * 2 * 2 * 64 * 64
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
    with raises_code("unfuse-no-fused-attention"):
        EagerAttention().apply(real, load_gpu("H100"))


def only_positions(kernels):
    """Return whether kernels are a few of those that make a mask; nothing reads some of them."""
    allowed = {"aten::arange", "aten::add", "aten::scalar_tensor", "aten::zero_"}
    return kernels.total() <= 6 and {op for op, _ in kernels} <= allowed


def product_flops(graph):
    """Return the FLOPs of products and attention."""
    index = np.flatnonzero(graph.gpu_compute)
    sorts = np.array([CLASSES[code].value for code in classify(graph, index)])
    return int(graph.nodes.flops[index][np.isin(sorts, ["gemm", "attention"])].sum())


def test_fused_attention_equals_the_fused_model(capture):
    eager = capture(64, 2, "eager")
    fused = recost(eager, "H100", passes=PassOptions(attention="fused"))
    real, before = recost(capture(64, 2), "H100"), recost(eager, "H100")

    def kernels(graph):
        kinds = [CLASSES[code].value for code in classify(graph, np.arange(len(graph)))]
        return Counter(
            (op, shapes) if kind != "attention" else (kind, op.endswith("backward"))
            for op, shapes, kind in zip(
                graph.text("op"), graph.text("output_shapes"), kinds, strict=True
            )
        )

    assert only_positions(kernels(fused) - kernels(real))
    assert not kernels(real) - kernels(fused)
    attention = Counter(op for op, _ in kernels(fused).elements())["attention"]
    assert attention == 4  # two layers, forward and backward
    flops = [product_flops(graph) for graph in (fused, real, before)]
    assert flops[0] == flops[1] < flops[2]
    peaks = [report_memory(graph).peak_bytes for graph in (fused, real, before)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
    assert peaks[1] < 0.95 * peaks[2]
    kept = [graph.job.measurement.activation_bytes[0] for graph in (fused, real, before)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)
    assert kept[1] < 0.9 * kept[2]
    note_of(fused.job.measurement.notes, "what-if-fused-attention", "cudnn", 2)
    note_of(fused.job.measurement.notes, "fused-causal", 2)
    unfused = EagerAttention().apply(fused, load_gpu("H100"))
    unfused_capture = EagerAttention().apply(real, load_gpu("H100"))
    assert only_positions(kernels(unfused) - kernels(unfused_capture))
    with raises_code("fuse-no-eager-attention"):
        FusedAttention().apply(capture(64, 2), load_gpu("H100"))
    with raises_code("attention-kernel-unsupported", naming=("flash3", "A100-SXM-80GB")):
        FusedAttention("flash3").apply(eager, load_gpu("A100"))


def launched(graph):
    """Return a graph of kernels on one stream, each launched by an operator every 10 us."""
    count = len(graph)
    nodes = graph.nodes.take(np.argsort(graph.nodes.start_ns, kind="stable"))
    kernels = np.isin(nodes.kind, [Kind.KERNEL, Kind.MEMSET])
    host = nodes.take(np.flatnonzero(kernels))
    launches = len(host.id)
    issued_ns = 10_000 * np.arange(launches)
    host = replace(
        host,
        id=(host.id + np.uint64(nodes.id.max() + 1)).astype(np.uint64),
        kind=np.full(launches, Kind.HOST_OP, dtype=np.uint8),
        thread=np.ones(launches, dtype=np.int64),
        stream=np.full(launches, UNKNOWN, dtype=np.int64),
        start_ns=issued_ns,
        duration_ns=np.full(launches, 5_000, dtype=np.int64),
        bytes_allocated=np.zeros(launches, dtype=np.int64),
        bytes_freed=np.zeros(launches, dtype=np.int64),
    )
    start = np.full(count, 0, dtype=np.int64)
    start[kernels] = issued_ns + 6_000
    nodes = replace(nodes, start_ns=np.maximum.accumulate(start))
    device, rows = np.flatnonzero(kernels), np.arange(count, count + launches)
    pairs = [(rows, device, Reason.LAUNCH), (device[:-1], device[1:], Reason.STREAM_ORDER),
             (rows[:-1], rows[1:], Reason.PROGRAM_ORDER)]  # fmt: skip
    source, target = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    reason = np.repeat([pair[2] for pair in pairs], [len(pair[0]) for pair in pairs])
    edges = Edges.from_pairs(count + launches, source, target, reason.astype(np.uint8))
    return replace(graph, nodes=Nodes.joined([nodes, host]), edges=edges)


def test_host_operators_are_removed_with_their_kernels(capture):
    h100 = load_gpu("H100")
    before = launched(recost(capture(64, 2, "eager"), h100))
    changed = FusedAttention("flash2").apply(before, h100)
    host, kernels = ([graph.mask(kind) for graph in (before, changed)]
                     for kind in (Kind.HOST_OP, Kind.KERNEL))  # fmt: skip
    gone = int(kernels[0].sum() - kernels[1].sum())
    assert gone > 30
    assert int(host[0].sum() - host[1].sum()) == gone
    ops = np.array(changed.text("op"))
    fused = np.array(["_flash_attention_" in op for op in ops])
    assert fused[kernels[1]].sum() == fused[host[1]].sum() == 4
    source, reason = changed.edges.source, changed.edges.reason
    launch = reason == Reason.LAUNCH
    assert (ops[source[launch]] == ops[changed.edges.target[launch]]).all()
    assert launch.sum() == kernels[1].sum()
    nodes = changed.nodes
    assert (nodes.evidence[fused & kernels[1]] == Evidence.DATASHEET).all()
    assert (nodes.p10_ns < nodes.duration_ns)[fused & kernels[1]].all()
    assert (nodes.duration_ns < nodes.p90_ns)[fused & kernels[1]].all()
    # the host spends 10 us between removed neighbours, and 5 us before a kept operator
    last = [int(g.nodes.start_ns[g.mask(Kind.HOST_OP)].max()) for g in (before, changed)]
    assert 5_000 * gone < last[0] - last[1] <= 10_000 * gone
    assert (np.diff(nodes.start_ns[kernels[1]]) >= 0).all()
    assert replay(changed).step_time_ns < replay(before).step_time_ns
    figures = 2, int(gone + 4), 4, int(gone)
    note_of(changed.job.measurement.notes, "what-if-fused-attention", *figures)


def test_unfused_attention_cannot_be_fused_again(capture):
    """Kernels of `EagerAttention` have no storages, so they cannot be matched."""
    unfused = EagerAttention().apply(recost(capture(64, 2), "H100"), load_gpu("H100"))
    with raises_code("fuse-no-eager-attention"):
        FusedAttention().apply(unfused, load_gpu("H100"))


CHECKPOINTED = """
    import sys
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=160,
                         num_attention_heads=4, num_key_value_heads=2, vocab_size=224,
                         max_position_embeddings=256, attn_implementation=sys.argv[1])
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        optimizer.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 224, (2, 64))
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
"""


def test_fused_attention_with_recomputation(tmp_path):
    """Recomputed in backward, in each of two micro-batches: 4 calls run once, 4 with backward."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CHECKPOINTED))
    graphs = []
    for attention in ("eager", "sdpa"):
        out = tmp_path / f"{attention}.et"
        done = run_command("capture", "run", script, "-o", out, "--", attention)
        assert done.returncode == 0, done.stderr
        graphs.append(onerank.read(out))
    fused = recost(graphs[0], "H100", passes=PassOptions(attention="fused"))
    real = recost(graphs[1], "H100")
    note_of(fused.job.measurement.notes, "what-if-fused-attention", "cudnn", 8)
    assert product_flops(fused) == product_flops(real)
    assert 0 <= len(fused) - len(real) <= 12  # positions of masks that nothing reads
    peaks = [report_memory(graph).peak_bytes for graph in (fused, real, graphs[0])]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
    assert peaks[1] < 0.95 * peaks[2]
    kept = [graph.job.measurement.activation_bytes for graph in (fused, real)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)
    assert len(kept[0]) == 2


MIXED = """
    import sys
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, sort):
            super().__init__()
            self.sort, self.drops = sort, nn.Dropout(0.1 if sort == "plain" else 0.0)
            self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.register_buffer("seen", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
            self.bias = nn.Parameter(torch.zeros(1, 4, 32, 32)) if sort == "bias" else None

        def forward(self, x):
            heads = (one.view(3, 32, 4, 16).transpose(1, 2) for one in self.into(x).split(64, -1))
            q, k, v = heads
            if self.sort == "sdpa":
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                return self.out(out.transpose(1, 2).reshape(3, 32, 64))
            scores = q @ k.transpose(-2, -1) * 0.25
            if self.sort == "square":
                scores = scores.masked_fill(self.seen == 0, float("-inf"))
            if self.sort == "bias":
                scores = scores + self.bias
            out = self.drops(scores.softmax(-1)) @ v
            return self.out(out.transpose(1, 2).reshape(3, 32, 64))

    torch.manual_seed(0)
    model = nn.Sequential(*map(Attention, sys.argv[1].split(",")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        loss = model(torch.randn(3, 32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_attention_by_hand(tmp_path):
    """A buffer for a mask, dropout, and a bias that each head learns: this one stays."""
    script = tmp_path / "mixed.py"
    script.write_text(textwrap.dedent(MIXED))
    graphs = []
    for sorts in ("square,plain,bias", "sdpa,plain,bias"):
        out = tmp_path / f"{len(graphs)}.et"
        done = run_command("capture", "run", script, "-o", out, "--", sorts)
        assert done.returncode == 0, done.stderr
        graphs.append(onerank.read(out))
    fused, real = (recost(g, "H100", passes=PassOptions(attention="flash2")) for g in graphs)
    notes = fused.job.measurement.notes
    note_of(notes, "what-if-fused-attention", "flash2", 2)
    for code in ("fused-assumed-causal", "fused-dropout", "fused-stays-eager"):
        note_of(notes, code, 1)
    assert fused.text("op").count("aten::_softmax") == real.text("op").count("aten::_softmax") == 1
    assert product_flops(fused) == product_flops(real)
    forward_flops = 2 * 3 * 4 * 32 * 32 * 16 * 2  # both products of all scores
    costs = characterise(fused)
    attention = costs.nodes.flops[["_flash_attention" in op for op in costs.text("op")]]
    attention = attention[attention > 0]  # without kernels that prepare and sum gradients
    assert sorted(attention.tolist()) == sorted(
        [forward_flops // 2, forward_flops, forward_flops // 2 * 5 // 2, forward_flops * 5 // 2]
    )


@pytest.mark.parametrize(
    ("seq", "batch", "code", "names"),
    [
        (Change(0, 64), Change(0, 2), "resize-nothing-changes", ("length of 64", "batch of 2")),
        (Change(100, 128), None, "resize-sizes-unknown", ("2 x 64", "sequence 100")),
        (Change(1000, 500), Change(77, 77), "resize-nothing-grows", ("1000", "77")),
    ],
)
def test_sizes_that_the_step_does_not_have(capture, seq, batch, code, names):
    with raises_code(code, naming=names):
        Resize(seq, batch).apply(capture(64, 2))


def test_the_command_for_fused_attention(capture, tmp_path):
    eager, fused, out = (tmp_path / name for name in ("eager.et", "fused.et", "out.et"))
    capture(64, 2, "eager").write(eager)
    capture(64, 2).write(fused)
    options = ("--target", "H100", "--kernel")
    done = run_command("annotate", *options, "attention=fused", "-o", out, eager)
    assert done.returncode == 0, done.stderr
    assert "What if attention were fused (cudnn): 2 calls" in " ".join(done.stdout.split())
    assert onerank.read(out).text("op").count("aten::_softmax") == 0
    for trace, kernel, phrase in (
        (fused, "fused", "error[fuse-no-eager-attention]"),
        (eager, "aiter", "error[attention-kernel-unsupported]: aiter"),
        (eager, "flash9", "error[kernel-option-malformed]"),
    ):
        refused = tmp_path / "refused.et"
        done = run_command("annotate", *options, f"attention={kernel}", "-o", refused, trace)
        assert done.returncode == 2
        assert phrase in " ".join(done.stderr.split())
        assert not refused.exists()
