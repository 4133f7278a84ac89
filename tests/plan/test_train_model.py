"""The loop that a plan trains configurations with: what it computes again."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from own_process import call

import onerank
from onerank.plan.captures import StageCapture
from onerank.plan.config import RECOMPUTATIONS
from onerank.plan.run_captures import CaptureResult, capture_stage
from onerank.plan.train_model import RECOMPUTE

MODEL = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
  "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
  "num_key_value_heads": 4, "vocab_size": 512, "attn_implementation": "ATTENTION"
}"""

LAYERS = 2

Captured = Callable[..., CaptureResult]


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    """Return a function that captures steps of a model with an implementation of attention."""

    def capture(attention: str, *kinds: str) -> CaptureResult:
        path = tmp_path / f"{attention}.json"
        path.write_text(MODEL.replace("ATTENTION", attention))
        captures = [
            StageCapture(
                arguments=(str(path), "--seq", "32"), tp=1, sp=False, cp=1, ep=1, dp=1,
                sharding="ddp", stages=1, stage=0, layers=0, step=f"1:2:{kind}",
            )
            for kind in kinds
        ]  # fmt: skip
        return call(capture_stage, "", "H100", captures)

    return capture


def test_what_each_recomputation_runs_again(captured: Captured, tmp_path: Path):
    # Each step sets the recomputation anew, so the order of kinds matters.
    kinds = ("full", "attention", "none", "selective")
    result = captured("eager", *kinds)
    assert not result.refused
    counts: dict[str, Counter[str]] = {}
    for step, trace in result.traces.items():
        (tmp_path / "trace.et").write_bytes(trace)
        graph = onerank.read(tmp_path / "trace.et")
        counts[step.split(":")[2]] = Counter(graph.text("name"))
    # A layer has 7 products with weights, 2 with activations and a softmax. A checkpoint ends with
    # the last tensor that its backward needs, so the last product of each does not run again.
    again = {
        kind: tuple(
            counts[kind][name] - counts["none"][name]
            for name in ("aten::mm", "aten::bmm", "aten::_softmax")
        )
        for kind in kinds
    }
    assert again == {
        "none": (0, 0, 0),
        "attention": (0, LAYERS, LAYERS),
        "selective": (0, 2 * LAYERS, LAYERS),
        "full": (6 * LAYERS, 2 * LAYERS, LAYERS),
    }
    assert len(counts) == len(kinds)
    # Norms and activations.
    assert counts["selective"]["aten::silu"] == counts["full"]["aten::silu"] == 2 * LAYERS
    assert counts["attention"]["aten::silu"] == counts["none"]["aten::silu"] == LAYERS


@pytest.mark.parametrize(("attention", "kind"), [("sdpa", "attention"), ("eager", "ful")])
def test_a_recomputation_that_does_not_exist_is_refused(
    captured: Captured, attention: str, kind: str
):
    refused = captured(attention, kind).refused
    assert {code for code, _ in refused.values()} == {"script-exited"}


def test_a_later_run_tries_again_what_the_model_did_not_refuse(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import module_that_is_not_installed\n")
    captures = [StageCapture((), 1, False, 1, 1, 1, "ddp", 1, 0, 0)]
    result = call(capture_stage, str(script), "H100", captures)
    assert result.refused[""][0] == "script-raised"
    assert not result.lasts
    config = tmp_path / "config.json"
    config.write_text(MODEL.replace("ATTENTION", "sdpa"))
    arguments = (str(config), "--seq", "32")
    of_three = [StageCapture(arguments, 3, False, 1, 1, 1, "ddp", 1, 0, 0, "1:1:none")]
    result = call(capture_stage, "", "H100", of_three)
    assert result.refused["1:1:none"][0].startswith("tp-")
    assert result.lasts


def test_a_configuration_knows_the_recomputations_of_the_loop():
    assert tuple(RECOMPUTE) == RECOMPUTATIONS
