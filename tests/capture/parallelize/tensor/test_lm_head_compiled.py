"""Compiled models that call cross_entropy in their forward: the loss stays parallel."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from encoder_decoder_job import encoder_decoder
from raised import raises_code
from real_ranks import run_ranks
from torch import nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model
from onerank.capture.parallelize.tensor.plan_file import ModuleRule, ShardingPlan

WORDS, WIDTH, TOKENS, SIZE = 64, 16, 24, 2

LOSSES: dict[str, Any] = {
    "function of a module": lambda self, x, y: nn.functional.cross_entropy(x, y, ignore_index=-1),
    "function": lambda self, x, y: cross_entropy(x, y, ignore_index=-1),
    "class": lambda self, x, y: CrossEntropyLoss(ignore_index=-1)(x, y),
    "class of a module": lambda self, x, y: nn.CrossEntropyLoss(ignore_index=-1)(x, y),
    "part of the model": lambda self, x, y: self.loss(x, y),
}


class Model(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.loss = nn.CrossEntropyLoss(ignore_index=-1)
        self.how = LOSSES[loss]

    def forward(self, words, targets):
        return self.how(self, self.head(self.block(self.norm(self.words(words)))), targets)


STYLES = {"words": "embedding_rowwise", "block.0": "colwise", "block.2": "rowwise", "head": "head"}

PLAN = ShardingPlan("Model", {name: ModuleRule(style) for name, style in STYLES.items()})


def build_case(kind: str) -> tuple[Any, dict[str, Any], ShardingPlan | None]:
    if kind not in LOSSES:
        return (*encoder_decoder(kind, layers=1), None)
    torch.manual_seed(0)
    model, generator = Model(kind), torch.Generator().manual_seed(1)
    words, targets = (torch.randint(low, WORDS, (TOKENS,), generator=generator) for low in (0, -1))
    return model, {"words": words, "targets": targets}, PLAN


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


# AOTAutograd, of which a third of a compilation's time is, sees the same graph for each way to
# call the loss, and the same collectives at the ends of T5, Bart and Whisper. Dynamo does not.
ALSO_AOT = ("function", "T5")


def recorded(
    kind: str, *, compiled: bool, normed: bool = True
) -> tuple[float, Counter[tuple[str, int]]]:
    model, batch, plan = build_case(kind)
    if not normed:
        model.norm = nn.Identity()
    recorder = Recorder(1, SIZE)
    recorder.start()
    try:
        slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron", plan=plan)
        if compiled:
            backend = "aot_eager" if kind in ALSO_AOT else "eager"
            model.compile(backend=backend, fullgraph=kind in LOSSES)
        output = model(**batch)
        loss = loss_of(output)
        loss.backward()
        calls = Counter((call.collective, call.bytes) for call in recorder.calls)
        if compiled and kind == "T5":  # in this test, as its compilation takes seconds
            logits = output.logits
            assert len(recorder.calls) == calls.total()
            check_gathered_on_use(logits, recorder)
            with torch.no_grad():
                assert isinstance(model(**batch).logits, torch.Tensor)
    finally:
        recorder.stop()
    return loss.item(), calls


def check_gathered_on_use(logits: Any, recorder: Recorder) -> None:
    """Assert that logits are gathered when they are read in addition to the loss, and once."""
    before = len(recorder.calls)
    assert logits.shape == (2, 8, WORDS)
    assert torch.softmax(logits, -1).sum().item() == pytest.approx(16)
    assert (logits == logits.clone()).all()
    assert logits[0, :, 1:].argmax(-1).shape == (8,)
    assert [call.collective for call in recorder.calls[before:]] == ["all_gather"]


@pytest.mark.parametrize("kind", [*LOSSES, "T5", "Bart", "Whisper"])
def test_compiled_collectives_match_uncompiled_ones(kind):
    torch.compiler.reset()
    plain, whole = nn.functional.cross_entropy, nn.CrossEntropyLoss
    loss, calls = recorded(kind, compiled=True)
    eager_loss, eager_calls = recorded(kind, compiled=False)
    assert loss == pytest.approx(eager_loss, abs=1e-5)
    assert calls == eager_calls
    tokens = TOKENS if kind in LOSSES else 16
    assert calls["all_reduce", tokens * 4] == 3  # maximum, the label's logit, sum
    assert nn.functional.cross_entropy is plain
    assert nn.CrossEntropyLoss is whole


def test_an_embedding_directly_before_a_block():
    """As in OLMo-2, whose norms follow the blocks."""
    torch.compiler.reset()
    loss, calls = recorded("function", compiled=True, normed=False)
    assert (loss, calls) == recorded("function", compiled=False, normed=False)


# Compiled encoder-decoders make the same calls as uncompiled ones, whose gradients are compared in
# `test_encoder_decoder`; their compilation takes 19 s.
CASES = ("class", "function")


def run_rank(rank: int, results: Any) -> None:
    for kind in CASES:
        model, batch, plan = build_case(kind)
        slice_model(model, dist.group.WORLD, "megatron", peers_absent=False, plan=plan)
        model.compile(backend="aot_eager", fullgraph=True)
        loss = loss_of(model(**batch))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results[kind, rank] = loss.item(), gradients


@pytest.fixture(scope="module")
def slices() -> Any:
    return run_ranks(run_rank, SIZE)


@pytest.mark.parametrize("kind", CASES)
def test_compiled_slices_match_the_whole_model(slices, kind):
    whole, batch, _ = build_case(kind)
    expected_loss = loss_of(whole(**batch))
    expected_loss.backward()
    for rank in range(SIZE):
        loss, gradients = slices[kind, rank]
        assert loss == pytest.approx(expected_loss.item(), abs=1e-5)
        for name, parameter in whole.named_parameters():
            expected, gradient = parameter.grad, gradients[name]
            for dim in range(expected.dim()):
                if expected.shape[dim] != gradient.shape[dim]:
                    expected = expected.chunk(SIZE, dim)[rank]
            torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=name)


def test_logits_of_a_causal_model_are_gathered_on_use():
    torch.compiler.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS,
    )  # fmt: skip
    ids = torch.randint(0, WORDS, (2, 8))
    model, batch = transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
    recorder = Recorder(1, SIZE)
    recorder.start()
    try:
        slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron")
        model.compile(backend="aot_eager")
        output = model(**batch)
        before, logits = len(recorder.calls), output.logits
        assert len(recorder.calls) == before
        check_gathered_on_use(logits, recorder)
        with torch.no_grad():
            assert isinstance(model(**batch).logits, torch.Tensor)
    finally:
        recorder.stop()


def test_a_compiled_loss_unsupported_on_sharded_logits_is_refused():
    torch.compiler.reset()
    model, batch, plan = build_case("class")
    model.how = lambda self, x, y: nn.CrossEntropyLoss(label_smoothing=0.1)(x, y)
    recorder = Recorder(1, SIZE)
    recorder.start()
    try:
        slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron", plan=plan)
        model.compile(backend="aot_eager")
        with raises_code("tp-cross-entropy-arguments", naming="label_smoothing"):
            model(**batch)
    finally:
        recorder.stop()
