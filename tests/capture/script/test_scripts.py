"""Training scripts of many styles, captured in this process."""

import textwrap
from pathlib import Path

import pytest
import torch
from raised import raises_code
from torch.profiler import ProfilerActivity, profile

from onerank.capture import Options, WindowPlan, capture
from onerank.converters.sources.kineto.link.host_timeline import host_timeline
from onerank.converters.sources.kineto.lowering.select_nodes import leaves
from onerank.converters.sources.kineto.read.kineto_trace import load_kineto
from onerank.ir import Graph, Kind, Phase

PLAN = WindowPlan(warm_up=1, timed_steps=1)

LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    def step(model=model):
        tokens = torch.randint(0, 64, (2, 8))
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(directory: Path, text: str, *, tp: int = 2) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(LLAMA) + textwrap.dedent(text))
    return capture(path, [], Options(tp=tp, windows=PLAN)).graph


COMPLETE = {
    "catches everything": """
        for _ in range(12):
            try:
                step()
            except:
                pass
    """,
    "trains in a thread": """
        import threading
        def train():
            for _ in range(12):
                step()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    """,
    "raises on its way out": """
        try:
            for _ in range(12):
                step()
        finally:
            raise RuntimeError("no report to write")
    """,
    "forks its loader": """
        from torch.utils.data import DataLoader
        for _ in DataLoader(range(24), batch_size=2, num_workers=1):
            step()
    """,
    "moves off the meta device": """
        with torch.device("meta"):
            model = LlamaForCausalLM(model.config)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(12):
            step(model)
    """,
    "reads logits before it trains": """
        tokens = torch.tensor([[1, 2]])
        with torch.no_grad():
            for _ in range(2):  # the first call is the one in which the model is sliced
                assert model(input_ids=tokens).logits.shape == (1, 2, 64)
        for _ in range(12):
            step()
    """,
    "compiles": """
        compiled = torch.compile(model, backend="eager")
        for _ in range(12):
            step(compiled)
    """,
}


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of hooks, threads of their exceptions
@pytest.mark.parametrize("style", COMPLETE)
def test_a_script_that(style, tmp_path):
    graph = run(tmp_path, COMPLETE[style])
    # 4 of the layer, one more each for embedding and head, and three of the loss
    assert graph.mask(Kind.COLLECTIVE).sum() == 4 + 2 + 3


def test_a_refusal_that_the_script_catches_is_reported(tmp_path):
    caught = """
        model = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "vocab_size": 65}))
        for _ in range(12):
            try:
                step(model)
            except Exception:
                continue
    """
    with raises_code("tp-indivisible-vocabulary", naming="(65 = 2 x 32 + 1)"):
        run(tmp_path, caught)


def test_os_exit_is_reported(tmp_path):
    with raises_code("script-exited", naming=("os._exit(0)", "1 optimizer step")):
        run(tmp_path, "step()\nimport os\nos._exit(0)")


def test_a_deep_copy_is_not_sliced_again(tmp_path):
    copied = """
        import copy
        twin = copy.deepcopy(model.to("cpu"))
        for _ in range(12):
            with torch.no_grad():
                assert twin(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 64)
            step()
    """
    assert run(tmp_path, copied)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_a_checkpoint_is_backward_of_its_module(reentrant, tmp_path):
    graph = run(
        tmp_path,
        f"""
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({{"use_reentrant": {reentrant}}})
        for _ in range(12):
            step()
        """,
    )
    attention = [n for n in graph if n.name == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert [node.phase for node in attention] == [Phase.FORWARD, Phase.BACKWARD]
    backward = [n for n in graph if n.phase is Phase.BACKWARD and n.kind is Kind.HOST_OP]
    assert len(backward) > 50
    assert [node.name for node in backward if not node.value("module")] == []
    assert {node.value("micro_batch") for node in backward} == {0}
    # each product of the layer twice, but the last: checkpoint ends before it is recomputed
    down = [n for n in graph if n.name == "aten::mm" and n.text("module").endswith("down_proj")]
    assert len(down) == (4 if reentrant else 3)
    assert all(node.text("input_shapes") for node in down)


def test_a_running_sum_begins_no_micro_batch(tmp_path):
    accumulates = """
        tokens = torch.randint(0, 64, (2, 8))
        for _ in range(12):
            total = 0
            for _ in range(2):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / 2
                loss.backward()
                total = total + loss
            optimizer.step()
            optimizer.zero_grad()
    """
    graph = run(tmp_path, accumulates)
    numbers = {node.value("micro_batch") for node in graph if node.kind is Kind.HOST_OP}
    assert numbers == {-1, 0, 1}


LEAVES = {
    "a scalar is copied to the tensor's dtype": (lambda x: x.mul_(2.0), ["aten::mul_"]),
    "an output is filled first": (lambda x: x.sum(), ["aten::sum"]),
    "a mean sums and divides": (lambda x: x.mean(0), ["aten::sum", "aten::div_"]),
    "a sort numbers its elements": (lambda x: x.sort(), ["aten::sort"]),
    "a scatter copies": (
        lambda x: x.scatter(0, torch.zeros(1, 4, dtype=torch.int64), 1.0),
        ["aten::zero_", "aten::scatter"],
    ),
    "a loss averages its own work": (
        lambda x: torch.nn.functional.mse_loss(x, x),
        ["aten::mse_loss"],
    ),
    "a clone is a copy": (lambda x: x.clone(), ["aten::copy_"]),
    "zeros are a fill": (torch.zeros_like, ["aten::zero_"]),
    "views are free": (lambda x: x.t().reshape(2, 8)[0].unsqueeze(0).chunk(2), ["aten::copy_"]),
    "a product adds its bias": (
        lambda x: torch.nn.functional.linear(x, x, x[0]),
        ["aten::addmm"],
    ),
}


@pytest.mark.parametrize("what", LEAVES)
def test_the_operator_that_does_the_work_is_the_node(what, tmp_path):
    function, expected = LEAVES[what]
    x = torch.randn(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        function(x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    timeline = host_timeline(load_kineto(tmp_path / "trace.json"))
    names = [timeline.name(index) for index in leaves(timeline)]
    assert names == expected
