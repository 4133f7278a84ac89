"""`capture run --device none`: experts that routers of a script choose, and the tokens they get."""

import json
from typing import Any

import pytest
from notes import has_note
from without_device import LINEAR, captured, run

from onerank.ir import Graph, Phase

ROUTED = """
    import torch
    from torch import nn
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(4))
    gate = nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    for step in range(5):
        x = torch.randn(2, 60, 32, device="cuda")
        weights, chosen = gate(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            mask = chosen == number
            if mask.any():
                first, second, slot = mask.nonzero(as_tuple=True)
                y[first, second] += weights[mask][:, None] * expert(x[first, second])
        assert len(torch.bincount(chosen.flatten(), minlength=4).tolist()) == 4
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("routing", "tokens"), [("balanced", [60] * 4), ("lines.csv", [120, 60, 60, 0])]
)
def test_a_router_of_the_script_chooses_experts_by_moe_routing(routing, tokens, tmp_path):
    (tmp_path / "lines.csv").write_text("2,1,1,0\n")
    path = tmp_path / routing if routing.endswith("csv") else routing
    graph = captured(tmp_path, ROUTED, "--moe-routing", path)
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [n for n in tokens if n]
    assert has_note(graph.job.measurement.notes, "no-device-routers", str(path))


def test_a_router_with_one_expert_a_token_chooses_by_argmax(tmp_path):
    text = ROUTED.replace(".topk(2, dim=-1)", ".max(-1, keepdim=True)").replace(
        "        y = torch.zeros_like(x)",
        "        chosen = gate(x).argmax(-1, keepdim=True)\n        y = torch.zeros_like(x)",
    )
    graph = captured(tmp_path, text)
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [30] * 4


@pytest.mark.parametrize(
    "count",
    [
        "with torch.no_grad(): right = (output[:, :4].argmax(-1) == 0).sum().item()",
        "labels = output[:, :2].long(); right = labels == output[:, :4].topk(2)[1].cpu().cuda()",
    ],
)
def test_a_script_that_counts_right_predictions_has_no_router(count, tmp_path):
    graph = captured(tmp_path, LINEAR.format(setup="", statement=count))
    assert not has_note(graph.job.measurement.notes, "no-device-routers")


def test_a_script_reads_actions_and_a_large_image(tmp_path):
    act = "assert output.softmax(-1).multinomial(1).T.cpu().numpy().shape == (1, len(output))"
    image = "assert (output.mean() + torch.ones(17 << 20, device='cuda')).cpu().numpy()[-1] == 1"
    graph = captured(tmp_path, LINEAR.format(setup="", statement=f"{act}; {image}"))
    assert has_note(graph.job.measurement.notes, "no-device-stand-ins", "train.py")


@pytest.mark.parametrize("routing", ["two.csv", "three.csv", "model"])
def test_a_choice_of_experts_needs_one_distribution_of_these_experts(routing, tmp_path):
    (tmp_path / "two.csv").write_text("1,1,1,1\n2,1,1,0\n")
    (tmp_path / "three.csv").write_text("1,1,1\n")
    path = tmp_path / routing if routing.endswith("csv") else routing
    done = run(tmp_path, ROUTED.replace("if mask.any():", "if True:"), "--moe-routing", path)
    assert done.returncode == 2
    assert "error[no-device-value]: train.py:14: aten::nonzero" in done.stderr
    assert not (tmp_path / "trace.et").exists()


GATED = """
    import torch
    from torch import nn
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(4))
    gate = nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    tokens = {tokens}
    rows, four = torch.arange(tokens, device="cuda")[:, None], torch.arange(4, device="cuda")
    for step in range(5):
        x = torch.randn(tokens, 32, device="cuda")
        scores = gate(x)
        weights, chosen = scores.topk(2, dim=-1)
        gates = {gates}
        gates = gates / gates.sum(-1, keepdim=True)
        places = {places}
        parts = [e(p) for e, p in zip(experts, x[places].split((gates > 0).sum(0).tolist()))]
        mixed = torch.cat(parts) * gates.t()[gates.t() > 0][:, None]
        y = torch.zeros_like(x).index_add(0, places, mixed)
        loss = y.sum()
        loss *= torch.tensor(0.5, device="cuda")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


SCATTERED = "torch.zeros_like(scores).scatter(1, chosen, weights.softmax(-1))"


ONE_HOT = "(nn.functional.one_hot(chosen, 4) * weights.softmax(-1)[..., None]).sum(1)"


INDEXED = "torch.zeros_like(scores).index_put((rows, chosen), weights)"


MASKED = "scores.softmax(-1).masked_fill((chosen[..., None] != four).all(1), 0)"


@pytest.mark.parametrize(
    ("tokens", "gates", "places"),
    [
        (120, SCATTERED, "gates.nonzero()[gates.nonzero()[:, 1].argsort(), 0]"),
        (120, SCATTERED, "torch.where(gates.t())[1]"),
        # Too many for their numbers to be kept, if they were known.
        (32768, SCATTERED, "torch.where(gates.t() != 0)[1]"),
        (120, ONE_HOT, "torch.where(gates.t().bool())[1]"),
        (120, INDEXED, "torch.where(~(gates.t() == 0))[1]"),
        (120, MASKED, "gates.t().contiguous().nonzero(as_tuple=True)[1]"),
    ],
)
def test_the_tokens_of_experts_are_those_with_weights_above_0(tokens, gates, places, tmp_path):
    (tmp_path / "lines.csv").write_text("2,1,1,0\n")
    text = GATED.format(tokens=tokens, gates=gates, places=places)
    graph = captured(tmp_path, text, "--moe-routing", tmp_path / "lines.csv")
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [tokens, tokens // 2, tokens // 2, 0]
    assert has_note(graph.job.measurement.notes, "no-device-nonzero-weights", "train.py:16")


@pytest.mark.parametrize(
    "statement",
    [
        "zeros = torch.zeros_like(output); zeros[:, 0] += output[:, 0]; zeros.nonzero()",
        "zeros = torch.zeros_like(output); zeros.copy_(output); zeros.nonzero()",
        "torch.zeros_like(output).index_add(1, torch.arange(32).cuda(), output).nonzero()",
        "(torch.zeros_like(output) < output).nonzero()",
        "zeros = torch.zeros_like(output); zeros.data = output.detach(); zeros.nonzero()",
        "(output * torch.ones_like(output).tril()).clamp_min(0.1).nonzero()",
    ],
)
def test_zeros_that_unknown_numbers_overwrite_are_unknown(statement, tmp_path):
    done = run(tmp_path, LINEAR.format(setup="", statement=statement))
    assert done.returncode == 2
    assert "error[no-device-value]" in done.stderr


FOLLOWED = """
    import copy
    import torch
    gate = torch.nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
    out = torch.empty(16, 4, device="cuda")
    for step in range(5):
        s = gate(torch.randn(16, 32, device="cuda"))
        w, c = s.topk(2, -1)
        g = torch.zeros_like(s).scatter(-1, c, w)
        with torch.no_grad():
            torch.mul(g, g, out=out)
            g.view(4, 16).t().reshape(-1).view(torch.int32)
            torch.zeros(4, 6, device="cuda").expand(2, 4, 6).reshape(8, 6).view(-1)
            g.sum((0, 1)), g.mean(dtype=torch.float64), g.sum(dim=0, keepdim=True)
            sizes = [torch.cat([g, part]).split([16, 16])[0].nonzero().shape for part in (g, s)]
            g.as_strided((2, 2), (1, 1)), g[::2, None, ..., 1:], g * 2, 3 * g
            torch.where(g > 0, g, 0.0), torch.where(s > 0, g, s)
            zeros = torch.nn.init.zeros_(torch.nn.Linear(8, 512).weight)
            zeros.data = zeros.data[256:].clone()
            zeros.cuda()
            copy.deepcopy(torch.nn.LayerNorm(8)).cuda()
            half = g.mul_(s).t().clone()[:2].nonzero().shape[0]
            g[:, 0] = s[:, 0]
            g.masked_fill_(s > 0, 1.0)
        print(sizes, half)
        s.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_zero_patterns_follow_operators_of_many_kinds(tmp_path):
    """Two of four experts of 16 tokens are chosen; a balanced choice gives 16 to two of them."""
    done = run(tmp_path, FOLLOWED)
    assert done.returncode == 0, done.stderr
    assert "[torch.Size([32, 2]), torch.Size([32, 2])] 16" in done.stdout + done.stderr


LAYERED = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
            self.gate = nn.Linear(32, 4)

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                row, slot = torch.where(chosen == number)
                y = y.index_add(0, row, expert(x[row]) * weights[row, slot, None])
            return y

    model = nn.Sequential(*(Experts() for _ in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(120, 32, device="cuda", requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_each_router_of_a_script_has_a_line_of_a_routing_file(tmp_path):
    lines = [[2, 1, 1, 0], [1, 1, 1, 1], [0, 0, 2, 2]]
    table = tmp_path / "lines.csv"
    table.write_text("\n".join(",".join(map(str, line)) for line in lines) + "\n")
    graph = captured(tmp_path, LAYERED, "--moe-routing", table)
    products = shapes_of(graph, "aten::mm", graph.nodes.phase == Phase.FORWARD)
    of_experts = [first[0] for first, second in products if second == [32, 32]]
    assert of_experts == [120, 60, 60, 0, 60, 60, 60, 60, 0, 0, 120, 120]


@pytest.mark.parametrize("lines", [2, 4])
def test_a_routing_file_needs_a_line_for_each_router_of_a_script(lines, tmp_path):
    (tmp_path / "lines.csv").write_text("1,1,1,1\n" * lines)
    done = run(tmp_path, LAYERED, "--moe-routing", tmp_path / "lines.csv")
    assert done.returncode == 2
    assert "error[routing-layer-count]" in done.stderr
    assert f"{lines} lines" in done.stderr
    assert not (tmp_path / "trace.et").exists()


EXCHANGED = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(2))
    gate = nn.Linear(32, 2 * ranks, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    def exchanged(counts):
        if {base}:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            return received
        received = [*torch.empty_like(counts).view(ranks, -1).unbind()]
        dist.all_to_all(received, [*counts.view(ranks, -1).unbind()])
        return torch.cat(received)
    for step in range(5):
        x = torch.randn(96, 32, device="cuda")
        _, chosen = gate(x).topk(1, dim=-1)
        sent = torch.bincount(chosen.flatten(), minlength=2 * ranks)
        received = exchanged(sent)
        splits = [c.view(ranks, 2).sum(1).tolist() for c in (received, sent)]
        rows = torch.empty(sum(splits[0]), 32, device="cuda")
        dist.all_to_all_single(rows, x[chosen.flatten().argsort()], *splits)
        parts = rows.split(received.tolist())
        loss = sum(experts[n % 2](part).sum() for n, part in enumerate(parts)) + gate(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("base", [True, False])
def test_a_rank_gets_the_tokens_that_equal_peers_route_to_its_experts(base, tmp_path):
    (tmp_path / "lines.csv").write_text("4,2,1,1\n")
    text = EXCHANGED.format(base=base)
    rows: dict[int, list[int]] = {}
    for rank in (0, 1):
        options = ("--dp", "2", "--rank", rank, "--moe-routing", tmp_path / "lines.csv")
        graph = captured(tmp_path, text, *options)
        sizes = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
        rows[rank] = [n for n in sizes if n != 32]
    # Both ranks route 96 tokens; experts 0 and 1 are on rank 0.
    assert rows == {0: [48, 24, 48, 24], 1: [12, 12, 12, 12]}


def shapes_of(graph: Graph, operator: str, chosen: Any = None) -> list[Any]:
    """Return the shapes of the operands of each call of an operator, of all or chosen nodes."""
    rows = [i for i, op in enumerate(graph.text("op")) if op == operator]
    rows = [i for i in rows if chosen is None or chosen[i]]
    shapes = graph.text("input_shapes")
    return [json.loads(shapes[row]) for row in rows]


GENERATES = """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=8)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=8, **sizes, **heads)).cuda().eval()
    tokens = torch.ones(2, 4, dtype=torch.long, device="cuda")
    model.generate(tokens, max_new_tokens=2, pad_token_id=0, num_beams=4)
"""


def test_beams_that_generation_chooses_are_no_experts(tmp_path):
    """The search chooses among 8, as the two layers' routers do."""
    (tmp_path / "lines.csv").write_text("1,1,1,1,1,1,1,1\n2,2,2,2,0,0,0,0\n")
    options = ("--moe-routing", tmp_path / "lines.csv", "--steps", "decode")
    graph = captured(tmp_path, GENERATES, *options)
    assert has_note(graph.job.measurement.notes, "no-device-routers")
