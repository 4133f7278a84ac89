"""Routers inside graphs that Inductor compiled without a device."""

from notes import has_note
from without_device import captured

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Graph, Kind

EXCHANGED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._functional_collectives import (
        all_to_all_single, all_to_all_single_autograd
    )
    torch._dynamo.config.capture_scalar_outputs = True
    dist.init_process_group("nccl")
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(64, 8, bias=False, device="cuda")
            self.expert = nn.Parameter(torch.randn(64, 128, device="cuda"))
        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            order = chosen.flatten().argsort(stable=True)
            counts = nn.functional.one_hot(chosen.flatten(), 8).sum(0)
            received = all_to_all_single(counts, None, None, dist.group.WORLD)
            received = torch.ops._c10d_functional.wait_tensor(received)
            sent, got = counts.view(4, 2).sum(1).tolist(), received.view(4, 2).sum(1).tolist()
            rows = all_to_all_single_autograd(x[order // 2], got, sent, dist.group.WORLD)
            return (rows @ self.expert).sum() * weights.sum()
    model = torch.compile(Experts(), fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        model(torch.randn(100, 64, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def _products(graph: Graph) -> list[int]:
    """Return the FLOPs of each matrix product in increasing order."""
    work = op_costs_of(graph)
    names = [graph.strings[int(op)] for op in graph.nodes.op[work.index]]
    pairs = zip(names, work.flops, strict=True)
    return sorted(int(flops) for name, flops in pairs if name == "aten::mm")


def test_a_compiled_router_decides_how_many_tokens_ranks_exchange(tmp_path):
    (tmp_path / "lines.csv").write_text("4,2,1,1,1,1,1,1\n")
    options = ("--dp", 4, "--torchrun", "--moe-routing", tmp_path / "lines.csv")
    graph = captured(tmp_path, EXCHANGED, *options)
    # Of the 200 choices, 100 are of the two experts of rank 0, of each of four equal ranks.
    rows = 4 * 100
    gate, expert = 2 * 100 * 64 * 8, 2 * rows * 64 * 128
    assert _products(graph) == [gate, gate, expert, expert]
    sizes = graph.nodes.comm_bytes[graph.nodes.kind == Kind.COLLECTIVE]
    assert sizes.tolist() == [8 * 8, 200 * 64 * 4]
    assert has_note(graph.job.measurement.notes, "no-device-routers")


LOOP = """
    import torch
    from torch import nn
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(64, 4, bias=False, device="cuda")
            self.experts = nn.Parameter(torch.randn(4, 64, 64, device="cuda"))
        def forward(self, x):
            scores = self.gate(x)
            chosen = scores.argmax(-1)
            order = chosen.argsort(stable=True)
            counts = nn.functional.one_hot(chosen, 4).sum(0)
            rows, parts, start = x[order], [], 0
            for expert, count in enumerate(counts.tolist()):
                parts.append(rows[start : start + count] @ self.experts[expert])
                start += count
            return torch.cat(parts).sum() * scores.sum()
    model = torch.compile(Experts())
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        model(torch.randn(80, 64, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_script_reads_the_counts_of_a_compiled_router(tmp_path):
    (tmp_path / "lines.csv").write_text("5,3,1,1\n")
    graph = captured(tmp_path, LOOP, "--moe-routing", tmp_path / "lines.csv")
    gate = 2 * 80 * 64 * 4
    experts = [2 * rows * 64 * 64 for rows in (40, 24, 8, 8)]
    assert _products(graph) == sorted([gate, gate, *experts, *experts])
