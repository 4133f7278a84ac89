"""Ways to train: precisions, scalers, optimizers; one capture of a small model each."""

import textwrap
from pathlib import Path

import pytest
import torch
from notes import codes, note_of
from raised import raises_code

from onerank.capture import Capture, Options, WindowPlan, capture
from onerank.ir import Kind, Phase

MODEL = """
    import torch
    from torch import nn
    class Mixer(nn.Module):  # attention by what it calls alone
        def __init__(self):
            super().__init__()
            self.wide, self.back = nn.Linear(16, 48), nn.Linear(16, 16)
        def forward(self, x):
            parts = self.wide(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*parts)
            return self.back(mixed.transpose(1, 2).flatten(2))
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mix, self.b = nn.LayerNorm(16), Mixer(), nn.LayerNorm(16)
            self.grow = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        def forward(self, x):
            x = x + self.mix(self.a(x))
            return x + self.grow(self.b(x))
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.out = nn.Linear(16, 32)
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())
    model = Model()
    tokens = torch.randint(0, 32, (2, 8))
"""


def run(directory: Path, text: str, **plan: int) -> Capture:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(MODEL) + textwrap.dedent(text))
    return capture(path, [], Options(windows=WindowPlan(warm_up=1, timed_steps=1, **plan)))


OPTIMIZERS = {
    "foreach": ("torch.optim.AdamW(model.parameters(), foreach=True)", "aten::_foreach_addcdiv_"),
    "fused": ("torch.optim.AdamW(model.parameters(), fused=True)", "aten::_fused_adamw_"),
    "one by one": ("torch.optim.AdamW(model.parameters(), foreach=False)", "aten::addcdiv_"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind, tmp_path):
    made, operator = OPTIMIZERS[kind]
    loop = """
    while True:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    done = run(tmp_path, f"    optimizer = {made}\n{loop}")
    names = {n.name for n in done.graph if n.phase is Phase.OPTIMIZER}
    inner = {"aten::_foreach_addcdiv_": "aten::addcdiv_"}  # on a CPU it calls this, the leaf
    assert inner.get(operator, operator) in names
    steps = [t for t in done.graph.job.measurement.scopes if t.path == "optimizer"]
    assert [(step.phase, step.calls, step.samples) for step in steps] == [("optimizer", 1, 3)]


def test_optimizers_that_step_within_backward(tmp_path):
    """One per parameter, in a hook of its gradient, which is gone before the next one is there."""
    graph = run(
        tmp_path,
        """
        weights = [*model.parameters()]
        optimizers = {w: torch.optim.SGD([w], lr=0.1, momentum=0.9, foreach=False) for w in weights}
        def step(weight):
            optimizers[weight].step()
            optimizers[weight].zero_grad()
        for weight in weights:
            weight.register_post_accumulate_grad_hook(step)
        while True:
            model(tokens).backward()
        """,
    ).graph
    updates = [n for n in graph if n.name == "aten::mul_" and n.phase is Phase.OPTIMIZER]
    assert len(updates) == 1 + 2 * 12 + 2  # the step of each, once
    lookups = [n for n in graph if n.name == "aten::index_select" and n.phase is Phase.FORWARD]
    assert len(lookups) == 1


def test_bf16_autocast_is_seen_in_the_types(tmp_path):
    graph = run(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ).graph
    products = [n for n in graph if n.name == "aten::addmm" and n.phase is Phase.FORWARD]
    assert len(products) == 9  # four of each layer, and the head
    assert all("c10::BFloat16" in product.text("input_types") for product in products)


def test_a_step_that_a_grad_scaler_skips_is_no_step(tmp_path):
    """Every third gradient is infinite: such an iteration runs no optimizer, and is left out."""
    done = run(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for iteration in range(1, 100):
            loss = scaler.scale(model(tokens))
            (loss * float("inf") if iteration % 3 == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        repeat=3,
    )
    graph, report = done.graph, done.conversion
    lookups = [n for n in graph if n.name == "aten::index_select" and n.phase is Phase.FORWARD]
    assert len(lookups) == 1  # one iteration
    assert any(n.phase is Phase.OPTIMIZER for n in graph)
    # warm-up 1; timed 2; by module 4, 5, 7; profiler 8; profiled 11, 14 and 17, since behind those
    # that were skipped (9, 12, 15) one passes by; structure 20
    note_of(graph.job.measurement.notes, "steps-skipped", "6 of 20")
    assert len(graph.job.measurement.timed_step_ns) == 3
    assert (report.steps, report.steps_dropped) == (3, 0)


def test_steps_that_are_skipped_at_first_are_no_warm_up(tmp_path):
    """The optimizer makes its states in the first step that is not skipped."""
    done = run(
        tmp_path,
        """
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for iteration in range(100):
            loss = scaler.scale(model(tokens))
            (loss * float("inf") if iteration < 6 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    )
    # warm-up 6; timed 7; by module 8 to 10; the profiler's 11; profiled 12; structure 13
    note_of(done.graph.job.measurement.notes, "steps-skipped", "6 of 14")


def test_a_script_whose_every_step_is_skipped_does_not_run_on(tmp_path):
    with raises_code("script-scaler-skips", naming="101 steps"):
        run(
            tmp_path,
            """
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            while True:
                (scaler.scale(model(tokens)) * float("nan")).backward()
                scaler.step(optimizer)
                scaler.update()
            """,
        )


@pytest.mark.parametrize(("rate", "count"), [(0.01, 0), (1e30, 1)])
def test_numbers_that_overflow_are_noted(tmp_path, rate, count):
    graph = run(
        tmp_path,
        f"""
        optimizer = torch.optim.SGD(model.parameters(), lr={rate})
        while True:
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
        """,
    ).graph
    assert codes(graph.job.measurement.notes).count("parameters-not-finite") == count


def test_what_calls_attention_is_attention_and_grains_add_up(tmp_path):
    graph = run(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            for half in tokens.split(1):
                (model(half) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ).graph
    roles = {module.path: module.role for module in graph.job.modules}
    assert roles["layers.0.mix"] == roles["layers.1.mix.back"] == "attention"
    assert roles["layers.0.grow"] == "mlp"
    coarse = graph.coarsen("submodule")
    assert coarse.nodes.duration_ns.sum() == graph.nodes.duration_ns.sum()
    attention = [n for n in coarse if n.text("module") == "layers.1.mix"]
    assert [(n.name, n.value("micro_batch")) for n in attention] == [
        ("attention forward", 0),
        ("attention backward", 0),
        ("attention forward", 1),
        ("attention backward", 1),
    ]
    loss = [n for n in graph if n.name == "aten::nll_loss_forward"]
    assert len(loss) == 2
    assert [n.name for n in coarse].count("loss forward") == 2
    assert {n.kind for n in coarse} == {Kind.HOST_OP}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graphs(tmp_path):
    done = run(
        tmp_path,
        """
        model, tokens = model.cuda(), tokens.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        def step():
            model(tokens).backward()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        while True:
            graph.replay()
            optimizer.step()
        """,
    )
    linked = {**done.conversion.gpu_ops_linked, **done.conversion.gpu_ops_unlinked}
    assert sum(count for rule, count in linked.items() if rule.startswith("graph launch")) > 20
