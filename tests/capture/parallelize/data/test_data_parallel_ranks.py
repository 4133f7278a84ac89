"""Two real ranks of a script without distributed code, against one process with both batches."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import run_ranks
from torch import nn

from onerank.capture.parallelize.data import zero as buckets
from onerank.capture.parallelize.data.apply_data_parallel import DataParallelism
from onerank.capture.parallelize.data.data_groups import DataGroups
from onerank.ir import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

FORMS = ("ddp", "zero1", "zero2", "fsdp")
SIZE, STEPS = 2, 3


class Tower(nn.Module):
    """A repeated block, a tied weight, an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x * self.scale.sum())


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    # it creates states at construction; `train` passes it closures
    "Adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.5
    ),
}


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 11, (4, 5), generator=generator)


def train(kind: str, micro_batches: int, clips: bool, ranks: list[int]) -> dict[str, torch.Tensor]:
    """Take some steps on the batches of these ranks, as a script without distributed code."""
    torch.manual_seed(ranks[0] if len(ranks) == 1 else 0)  # the first rank's weights are broadcast
    model = Tower()
    optimizer = OPTIMIZERS[kind](model)
    parameters = list(model.parameters())

    def backward(step: int, micro: int) -> None:
        tokens = torch.cat([batch(step, micro, rank) for rank in ranks])
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        (loss / micro_batches).backward()

    def last_backward(step: int) -> None:
        backward(step, micro_batches - 1)
        if clips:
            nn.utils.clip_grad_norm_(parameters, 0.05)
            nn.utils.clip_grad_value_(parameters, 0.02)

    for step in range(STEPS):
        for micro in range(micro_batches - 1):
            backward(step, micro)
        if kind == "Adagrad":  # as Lightning steps
            optimizer.step(partial(last_backward, step))
        else:
            last_backward(step)
            optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def averages(ranks: list[int]) -> dict[str, torch.Tensor]:
    """Return averages of the weights over some steps, as torch's AveragedModel keeps them."""
    torch.manual_seed(0)
    model = Tower()
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        tokens = torch.cat([batch(step, 0, rank) for rank in ranks])
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return {name: whole(p.detach()) for name, p in averaged.module.named_parameters()}


def whole(parameter: Any) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.clone()


class Expert(nn.Module):
    """A dense layer that all ranks hold, and an expert that only this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in self.expert.parameters():
            parameter._onerank_axis = "edp"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x))


def expert_step(rank: int, *, peers_absent: bool) -> dict[str, torch.Tensor]:
    """Return the change of the parameters in a step; with absent peers, the gradients."""
    torch.manual_seed(5)
    model = Expert()
    with torch.no_grad():
        model.expert.weight.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for micro in range(2):  # both communicate, because the last backward is not known yet
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(SIZE * micro + rank))
        model(x).square().mean().backward()
    if peers_absent:
        return {name: p.grad.clone() for name, p in model.named_parameters()}
    before = {name: whole(p.detach()) for name, p in model.named_parameters()}
    optimizer.step()
    return {name: before[name] - whole(p.detach()) for name, p in model.named_parameters()}


JOBS = [
    (kind, micro, clips)
    for kind in OPTIMIZERS
    for micro, clips in ((1, False), (3, False), (2, True))
]


def train_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Any) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    buckets.BUCKET_ELEMENTS = 70  # several buckets; a rank's shard of the last is padding only
    for form in FORMS:
        for job in JOBS:
            groups = DataGroups(new_group, World.of(dp=SIZE), rank)
            with DataParallelism(form, groups).installed():
                # FSDP shards each rank's weights without a broadcast, so they must be equal.
                trained = (
                    train_from_equal_weights(job, rank) if form == "fsdp" else train(*job, [rank])
                )
            results[form, job, rank] = trained
        with DataParallelism(form, DataGroups(new_group, World.of(dp=SIZE), rank)).installed():
            results[form, "averages", rank] = averages([rank])
        groups = DataGroups(new_group, World.of(dp=SIZE, ep=SIZE), rank)
        with DataParallelism(form, groups).installed():
            results[form, "expert", rank] = expert_step(rank, peers_absent=False)


def train_from_equal_weights(job: tuple[str, int, bool], rank: int) -> dict[str, torch.Tensor]:
    seed = torch.manual_seed
    torch.manual_seed = lambda _: seed(0)
    try:
        return train(*job, [rank])
    finally:
        torch.manual_seed = seed


@pytest.fixture(scope="module")
def trained() -> Any:
    """Parameters after the steps, of every form, job and rank."""
    return run_ranks(train_rank, SIZE)


@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_match_one_process_with_both_batches(trained, form, job):
    expected = train(*job, [0, 1])
    for rank in range(SIZE):
        for name, parameter in expected.items():
            parameter_on_rank = trained[form, job, rank][name]
            torch.testing.assert_close(parameter_on_rank, parameter, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_weight_averages_match_one_process(trained, form):
    """A copy of the model from before its first forward is sharded with it."""
    expected = averages([0, 1])
    for rank in range(SIZE):
        for name, parameter in expected.items():
            parameter_on_rank = trained[form, "averages", rank][name]
            torch.testing.assert_close(parameter_on_rank, parameter, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_averages_over_all_tokens_without_communication(trained, form):
    gradients = [expert_step(rank, peers_absent=True) for rank in range(SIZE)]
    for rank in range(SIZE):
        change = trained[form, "expert", rank]
        for part in ("weight", "bias"):
            dense = (gradients[0][f"dense.{part}"] + gradients[1][f"dense.{part}"]) / SIZE
            torch.testing.assert_close(change[f"dense.{part}"], dense, atol=1e-6, rtol=1e-5)
            expert = gradients[rank][f"expert.{part}"] / SIZE
            torch.testing.assert_close(change[f"expert.{part}"], expert, atol=1e-6, rtol=1e-5)
