"""Against torch's FlopCounterMode, on operators that really ran, read from execution traces."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onerank.annotate.op_costs.node_costs import work_of
from onerank.annotate.op_costs.op_classes import op_class
from onerank.ir import UNKNOWN, Kind

torch = pytest.importorskip("torch")


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[Callable[[], Any]], list[dict[str, Any]]]:
    def run(step: Callable[[], Any]) -> list[dict[str, Any]]:
        path = tmp_path / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        observer.start()
        step()
        observer.stop()
        observer.unregister_callback()
        return [n for n in json.loads(path.read_text())["nodes"] if n["name"].startswith("aten::")]

    return run


def work_of_node(node: dict[str, Any]):
    sides = [
        (json.dumps(node[side]["shapes"]), json.dumps(node[side]["types"]))
        for side in ("inputs", "outputs")
    ]
    return work_of(node["name"], *sides, json.dumps(node["inputs"]["values"]))


def flops_of(nodes: list[dict[str, Any]], *names: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in nodes:
        if node["name"].removeprefix("aten::") in names:
            found[node["name"].removeprefix("aten::")] += work_of_node(node).flops
    return found


def counted(step: Callable[[], Any]) -> dict[str, int]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    return {
        str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()
    }


def test_llama_forward_and_backward(traced):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(0, 128, (2, 32))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    nodes = traced(step)
    expected = counted(step)
    assert dict(flops_of(nodes, "mm")) == {"mm": expected["mm"]}
    # 2 layers; 2 * b * h * s * s * (d + d), halved by causality
    forward = 2 * (2 * 2 * 4 * 32 * 32 * (16 + 16)) // 2
    attention = flops_of(
        nodes,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    assert sorted(attention.values()) == [forward, forward * 5 // 2]


def test_every_operator_of_a_training_step_is_known(traced):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 64, (2, 16))

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    unknown = {
        node["name"]
        for node in traced(step)
        if op_class(node["name"], "", Kind.HOST_OP).name not in ("NOTHING",)
        and node["inputs"]["shapes"]
        and work_of_node(node).flops == UNKNOWN
    }
    assert unknown <= {"aten::nll_loss_nd", "aten::cross_entropy_loss"}  # composites


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: torch.nn.Conv1d(4, 8, 3), (2, 4, 9)),
        (lambda: torch.nn.Conv2d(4, 8, 3, stride=2), (2, 4, 9, 9)),
        (lambda: torch.nn.ConvTranspose2d(4, 6, 3), (2, 4, 8, 8)),
    ],
)
def test_convolutions(traced, module, shape):
    layer, x = module(), torch.randn(shape, requires_grad=True)

    def step() -> None:
        layer(x).sum().backward()

    found = flops_of(traced(step), "convolution", "convolution_backward")
    assert dict(found) == counted(step)


def test_products(traced):
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    x, y, z = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)

    def step() -> None:
        torch.mm(a, b)
        torch.addmm(c, a, b)
        torch.bmm(x, y)
        torch.baddbmm(z, x, y)

    found = flops_of(traced(step), "mm", "addmm", "bmm", "baddbmm")
    assert dict(found) == counted(step)


def test_flash_attention_formula():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = (2, 8, 128, 64)
    text = json.dumps([list(shape)] * 3)
    types = json.dumps(["Tensor(c10::BFloat16)"] * 3)
    values = json.dumps([None, None, None, 0.0, False])
    name = "aten::_scaled_dot_product_flash_attention"
    assert work_of(name, (text, types), values=values).flops == sdpa_flop_count(shape, shape, shape)
    text, types = json.dumps([list(shape)] * 4), json.dumps(["Tensor(c10::BFloat16)"] * 4)
    values = json.dumps([None] * 11 + [False])
    assert work_of(f"{name}_backward", (text, types), values=values).flops == (
        sdpa_backward_flop_count(shape, shape, shape, shape)
    )


def test_recurrent_layers(traced):
    lstm, x = torch.nn.LSTM(32, 64, num_layers=2), torch.randn(10, 4, 32)
    names = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
    found = flops_of(traced(lambda: lstm(x)[0].sum().backward()), *names)
    # 40 tokens meet 4 gates x 64 rows x (32 + 64) and x (64 + 64); backward each product twice
    forward = 2 * 40 * (256 * 96 + 256 * 128)
    assert dict(found) == dict(zip(names, (forward, 2 * forward), strict=True))
    shapes = json.dumps([[10, 4, 32], [[256, 32], [256, 64], [256], [256]]])
    kinds = json.dumps(["Tensor(float)", f"GenericList[{','.join(['Tensor(float)'] * 4)}]"])
    assert work_of("aten::_cudnn_rnn", (shapes, kinds)).flops == 2 * 40 * 256 * 96
