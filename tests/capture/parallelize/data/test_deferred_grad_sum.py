"""Gradients of what --sp replicates are summed in one flat call a step: real ranks, and one."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.data.auto_wrap import DataParallelism
from onerank.capture.parallelize.data.data_groups import Groups
from onerank.capture.parallelize.data.grad_accumulation import DeferredGradSync
from onerank.capture.parallelize.shard_model import slice_to_rank
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


def loss(one: Any, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
    return one(input_ids=tokens, labels=tokens).loss


def accumulate(one: Any, step: int) -> None:
    """A step's gradients, seen behind the last backward; the weights follow in `train`."""
    for micro_batch in range(LENGTHS[step]):
        loss(one, 10 * step + micro_batch).backward()


def asked(one: Any, step: int) -> None:
    """A gradient that is asked for by itself, between two micro-batches."""
    weight = one.model.norm.weight
    loss(one, step).backward()
    (gradient,) = torch.autograd.grad(loss(one, step + 1), weight)
    loss(one, step + 2).backward()
    weight.grad = weight.grad + gradient


def ascend(one: Any, step: int) -> None:
    """Sharpness-aware minimisation: up by a first gradient, which is then cleared."""
    loss(one, step).backward()
    with torch.no_grad():
        before = [p.clone() for p in one.parameters()]
        for p in one.parameters():
            p.add_(p.grad, alpha=0.1)
            p.grad = None
    loss(one, step).backward()
    with torch.no_grad():
        for p, was in zip(one.parameters(), before, strict=True):
            p.copy_(was)


def train(
    one: Any, ways: Any, *, closure: bool = False, clears: bool = True, rate: float = 0.5
) -> torch.Tensor:
    """Return a norm's weight after steps whose gradients come so."""
    optimizer = torch.optim.SGD(one.parameters(), lr=rate)
    for step in range(len(LENGTHS)):
        compute = functools.partial(ways, one, step)
        if closure:
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()
        if clears:
            optimizer.zero_grad()
    return one.model.layers[0].input_layernorm.weight.detach()


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulated": (accumulate, {}),
    "asked": (asked, {}),
    "ascent": (ascend, {}),
    "closure": (accumulate, {"closure": True}),
    "never cleared": (accumulate, {"clears": False, "rate": 0.02}),
}


def one_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    for name, (ways, how) in WAYS.items():
        one = model()
        world = World.of(tp=2)
        sliced = slice_to_rank(
            one, world, rank, new_group, tp_style="megatron", sequence=True, peers_absent=False
        )
        with DeferredGradSync({one: sliced}).installed():
            results[name, rank] = train(one, ways, **how)


def test_the_steps_are_those_of_the_whole_model():
    results = run_ranks(one_rank, 2)
    for name, (ways, how) in WAYS.items():
        expected = train(model(), ways, **how)
        for rank in range(2):
            torch.testing.assert_close(results[name, rank], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [None, "ddp", "zero1", "fsdp"])
def test_one_flat_call_behind_the_last_backward(form):
    """Once two steps were alike; FSDP's ranks of --dp have half of each gradient."""
    world = World.of(tp=2, dp=2 if form else 1)
    recorder = Recorder(0, world.size)
    recorder.start()
    one = model()
    sliced = slice_to_rank(one, world, 0, recorder.new_group, tp_style="megatron", sequence=True)
    found: list[list[int]] = []
    with DeferredGradSync({one: sliced}).installed():
        data = DataParallelism(form, Groups(recorder.new_group, world, 0)) if form else None
        with data.installed() if data else torch.enable_grad():
            optimizer = torch.optim.AdamW(one.parameters())
            for _ in range(3):
                for micro_batch in range(2):
                    result = loss(one, micro_batch)
                    if micro_batch == 0:  # between forward and backward, as torch's tutorials
                        optimizer.zero_grad()
                    before = len(recorder.calls)
                    result.backward()
                    calls = recorder.calls[before:]
                    found.append(
                        [c.bytes for c in calls if (c.group, c.collective) == ("tp", "all_reduce")]
                    )
                assert one.model.norm.weight.grad is not None
                optimizer.step()
    recorder.stop()
    each = 4 * HIDDEN
    assert found[:4] == [[each] * NORMS] * 4  # not known yet
    assert found[4:] == [[], [NORMS * each // (2 if form == "fsdp" else 1)]]
