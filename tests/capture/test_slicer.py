"""The slicer against the whole model: two gloo ranks that really communicate."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from onerank.capture.slicer import slice_model
from onerank.ir.errors import SliceError

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16,
}
SIZE = 2


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def tokens() -> torch.Tensor:
    return torch.randint(
        0, SHAPE["vocab_size"], (3, 16), generator=torch.Generator().manual_seed(1)
    )


CASES = {
    "plain": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
}
FLAVOURS = ("megatron", "hf")


def labels_with_one_ignored() -> torch.Tensor:
    labels = tokens()
    labels[0, 3] = -100
    return labels


def one_rank(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE
    )
    for case, (kind, changes) in CASES.items():
        for flavour in FLAVOURS:
            sliced = model(kind, **changes)
            slice_model(sliced, dist.group.WORLD, flavour, alone=False)
            loss = sliced(input_ids=tokens(), labels=labels_with_one_ignored()).loss
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in sliced.named_parameters()}
            logits = sliced(input_ids=tokens()).logits.detach()
            results[case, flavour, rank] = (loss.item(), gradients, logits)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def slices() -> Any:
    """Losses, gradients and logits of every case, flavour and rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(one_rank, args=(port, results), nprocs=SIZE, join=True)
        return dict(results)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", CASES)
def test_two_slices_compute_what_the_whole_model_does(slices, case, flavour):
    kind, changes = CASES[case]
    whole = model(kind, **changes)
    output = whole(input_ids=tokens(), labels=labels_with_one_ignored())
    output.loss.backward()
    for rank in range(SIZE):
        loss, gradients, logits = slices[case, flavour, rank]
        assert loss == pytest.approx(output.loss.item(), abs=1e-5)
        torch.testing.assert_close(logits, output.logits.detach(), atol=1e-5, rtol=1e-4)
        for name, parameter in whole.named_parameters():
            expected = parameter.grad
            found = gradients[name]
            for dim in range(expected.dim()):
                if expected.shape[dim] != found.shape[dim]:
                    expected = expected.chunk(SIZE, dim)[rank]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=name)


class OneOf:
    """As much of a process group as slicing itself needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("size", "changes", "complaint"),
    [
        (3, {}, r"--tp 3 must divide the model's 4 attention heads \(4 = 3 x 1 \+ 1\)"),
        (4, {}, r"--tp 4 must divide the model's 2 key-value heads"),
        (2, {"vocab_size": 97}, r"97 vocabulary entries \(97 = 2 x 48 \+ 1\)"),
    ],
)
def test_sizes_that_do_not_divide_show_the_arithmetic(size, changes, complaint):
    with pytest.raises(SliceError, match=complaint):
        slice_model(model("llama", **changes), OneOf(size), "megatron")


def test_a_model_without_a_plan_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=96))
    with pytest.raises(SliceError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        slice_model(gpt2, OneOf(2), "megatron")


def test_an_unknown_style_is_named():
    llama = model("llama")
    llama._tp_plan["model.layers.*.mlp.up_proj"] = "sideways"
    with pytest.raises(
        SliceError, match=r"model\.layers\.0\.mlp\.up_proj is planned as 'sideways'"
    ):
        slice_model(llama, OneOf(2), "megatron")
