"""Gradients of parameters that --sp replicates are summed in one flat all-reduce per step."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.data.apply_data_parallel import DataParallelism
from onerank.capture.parallelize.data.data_groups import DataGroups
from onerank.capture.parallelize.data.grad_accumulation import DeferredGradSync
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.ir import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

LAYERS, HIDDEN, VOCABULARY = 2, 32, 64

NORMS = 2 * LAYERS + 1

LENGTHS = (2, 2, 2, 3, 3, 3, 1)  # micro-batches of each step


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    )


def loss(model_to_train: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    return model_to_train(input_ids=tokens, labels=tokens).loss


def accumulate(model_to_train: Any, step: int) -> None:
    """Accumulate the gradients of a step."""
    for micro_batch in range(LENGTHS[step]):
        loss(model_to_train, 10 * step + micro_batch).backward()


def gradient_between(model_to_train: Any, step: int) -> None:
    """Call torch.autograd.grad between two micro-batches."""
    weight = model_to_train.model.norm.weight
    loss(model_to_train, step).backward()
    (gradient,) = torch.autograd.grad(loss(model_to_train, step + 1), weight)
    loss(model_to_train, step + 2).backward()
    weight.grad = weight.grad + gradient


def ascend(model_to_train: Any, step: int) -> None:
    """Compute gradients at perturbed weights (sharpness-aware minimisation)."""
    loss(model_to_train, step).backward()
    with torch.no_grad():
        before = [p.clone() for p in model_to_train.parameters()]
        for p in model_to_train.parameters():
            p.add_(p.grad, alpha=0.1)
            p.grad = None
    loss(model_to_train, step).backward()
    with torch.no_grad():
        for p, weight in zip(model_to_train.parameters(), before, strict=True):
            p.copy_(weight)


def train(
    model_to_train: Any,
    compute: Any,
    *,
    closure: bool = False,
    clears: bool = True,
    rate: float = 0.5,
) -> torch.Tensor:
    """Return the weight of a norm after steps with `compute`."""
    optimizer = torch.optim.SGD(model_to_train.parameters(), lr=rate)
    for step in range(len(LENGTHS)):
        backward_closure = functools.partial(compute, model_to_train, step)
        if closure:
            optimizer.step(backward_closure)
        else:
            backward_closure()
            optimizer.step()
        if clears:
            optimizer.zero_grad()
    return model_to_train.model.layers[0].input_layernorm.weight.detach()


SCRIPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulated": (accumulate, {}),
    "autograd.grad between": (gradient_between, {}),
    "ascent": (ascend, {}),
    "closure": (accumulate, {"closure": True}),
    "never cleared": (accumulate, {"clears": False, "rate": 0.02}),
}


def train_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    for name, (compute, options) in SCRIPTS.items():
        model_to_train = model()
        world = World.of(tp=2)
        sliced = slice_to_rank(
            model_to_train,
            world,
            rank,
            new_group,
            SlicingOptions(sequence=True, peers_absent=False),
        )
        with DeferredGradSync({model_to_train: sliced}).installed():
            results[name, rank] = train(model_to_train, compute, **options)


def test_steps_match_the_whole_model():
    results = run_ranks(train_rank, 2)
    for name, (compute, options) in SCRIPTS.items():
        expected = train(model(), compute, **options)
        for rank in range(2):
            torch.testing.assert_close(results[name, rank], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [None, "ddp", "zero1", "fsdp"])
def test_one_flat_all_reduce_after_the_last_backward(form):
    """It starts after two equal steps; under FSDP each --dp rank has half of a gradient."""
    world = World.of(tp=2, dp=2 if form else 1)
    recorder = Recorder(0, world.size)
    recorder.start()
    model_to_train = model()
    sliced = slice_to_rank(
        model_to_train, world, 0, recorder.new_group, SlicingOptions(sequence=True)
    )
    calls_per_backward: list[list[int]] = []
    with DeferredGradSync({model_to_train: sliced}).installed():
        data = DataParallelism(form, DataGroups(recorder.new_group, world, 0)) if form else None
        with data.installed() if data else torch.enable_grad():
            optimizer = torch.optim.AdamW(model_to_train.parameters())
            for _ in range(3):
                for micro_batch in range(2):
                    micro_batch_loss = loss(model_to_train, micro_batch)
                    if micro_batch == 0:  # between forward and backward, as torch's tutorials
                        optimizer.zero_grad()
                    before = len(recorder.calls)
                    micro_batch_loss.backward()
                    calls = recorder.calls[before:]
                    calls_per_backward.append(
                        [c.bytes for c in calls if (c.group, c.collective) == ("tp", "all_reduce")]
                    )
                assert model_to_train.model.norm.weight.grad is not None
                optimizer.step()
    recorder.stop()
    norm_bytes = 4 * HIDDEN
    assert calls_per_backward[:4] == [[norm_bytes] * NORMS] * 4  # the rounds are not known yet
    assert calls_per_backward[4:] == [[], [NORMS * norm_bytes // (2 if form == "fsdp" else 1)]]
