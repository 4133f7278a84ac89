"""`capture run --device none`: nested tensors and packed sequences, whose lengths are numbers."""

from collections import Counter

from notes import has_note
from own_process import run_command
from without_device import captured

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Graph

LENGTHS = (30, 12, 5, 51)
PAIRS = sum(length * length for length in LENGTHS)

NESTED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    table = nn.Embedding(100, 64).cuda().bfloat16()
    mixed = nn.Linear(64, 192).cuda().bfloat16()
    out = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).cuda().bfloat16()
    modules = nn.ModuleList([table, mixed, out])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)
    for step in range(5):
        parts = [torch.randint(0, 100, (length,)) for length in (30, 12, 5, 51)]
        tokens = torch.nested.nested_tensor(parts, layout=torch.jagged).to("cuda")
        x = F.embedding(tokens, table.weight)
        heads = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in mixed(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        y = out(x + attended.transpose(1, 2).flatten(-2))
        assert [len(part) for part in y.unbind()] == [30, 12, 5, 51]
        padded = torch.nested.to_padded_tensor(y, 0.0)
        assert padded.shape == (4, 51, 64)
        (padded.float().mean() + y.values().float().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

PACKED = """
    import torch
    from torch import nn
    from torch.nn.attention.varlen import varlen_attn
    mixed = nn.Linear(64, 192).cuda().bfloat16()
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    for step in range(5):
        ends = torch.zeros(5, dtype=torch.int32, device="cuda")
        ends[1:] = torch.tensor([30, 12, 5, 51], device="cuda").cumsum(0)
        x = torch.randn(98, 64, device="cuda", dtype=torch.bfloat16)
        heads = mixed(x).view(98, 3, 2, 32).unbind(1)
        causal = varlen_attn(*heads, ends, ends, 51, 51, window_size=(-1, 0))
        near = varlen_attn(*heads, ends, ends, 51, 51, window_size=(9, 0))
        (causal + near).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def flops_of(graph: Graph, part: str) -> Counter[tuple[str, int]]:
    """Return (operator, FLOPs) of the operators whose name has a part."""
    costs = op_costs_of(graph)
    ops = [graph.strings[int(op)] for op in graph.nodes.op[costs.index]]
    return Counter(pair for pair in zip(ops, costs.flops.tolist(), strict=True) if part in pair[0])


def test_jagged_nested_tensors_have_the_shapes_of_their_values(tmp_path):
    graph = captured(tmp_path, NESTED, "--like", "H100")
    costs = op_costs_of(graph)
    assert (costs.flops >= 0).all()
    products = sum(flops * count for (_, flops), count in flops_of(graph, "mm").items())
    tokens = sum(LENGTHS)
    assert products == 6 * tokens * (64 * 192 + 64 * 64)
    # Two heads of 32, causal; torch prefers FlashAttention for nested tensors.
    forward = 2 * PAIRS * (32 + 32)
    attention = flops_of(graph, "attention")
    assert attention == {
        ("aten::_flash_attention_forward", forward): 1,
        ("aten::_flash_attention_backward", forward * 5 // 2): 1,
    }


def test_compiled_nested_tensors_run_eager_with_a_note(tmp_path):
    compiled = NESTED.replace("modules = ", "out = torch.compile(out)\n    modules = ")
    graph = captured(tmp_path, compiled, "--like", "H100")
    assert has_note(graph.job.measurement.notes, "compile-failed")
    assert not has_note(graph.job.measurement.notes, "compile-graph-unbroken")
    products = flops_of(graph, "mm")
    assert sum(n * flops for (_, flops), n in products.items()) == 6 * 98 * (64 * 192 + 64 * 64)


def test_packed_sequences_count_the_pairs_of_each(tmp_path):
    graph = captured(tmp_path, PACKED, "--like", "H100")
    causal = 2 * PAIRS * (32 + 32)
    # A query sees itself and 9 keys before it.
    near = sum(sum(min(at + 1, 10) for at in range(length)) for length in LENGTHS)
    windowed = 2 * 2 * near * (32 + 32)
    assert flops_of(graph, "attention") == {
        ("aten::_flash_attention_forward", causal): 1,
        ("aten::_flash_attention_forward", windowed): 1,
        ("aten::_flash_attention_backward", causal * 5 // 2): 1,
        ("aten::_flash_attention_backward", windowed * 5 // 2): 1,
    }
    sized = run_command("annotate", "--target", "H100", "--seq", 64, tmp_path / "trace.et")
    assert sized.returncode == 2
    assert "error[resize-packed-sequences]" in sized.stderr
