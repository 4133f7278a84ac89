"""Gradients of slices are clipped by the norm of the whole model's: four real ranks."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from real_ranks import run_ranks
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.data.apply_data_parallel import DataParallelism
from onerank.capture.parallelize.data.data_groups import DataGroups
from onerank.capture.parallelize.data.grad_clipping import Clipping
from onerank.capture.parallelize.pipeline.stage import TiedEmbedding
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.ir import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

RANKS, VOCABULARY, LIMIT = 4, 64, 0.05
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
TIED = {"tie_word_embeddings": True}
TENSOR, EXPERTS = World.of(tp=2, dp=2), World.of(tp=2, dp=2, ep=2)
JOBS: dict[str, tuple[str, World, str | None, bool, float]] = {
    "tp, pp, tied": ("llama", World.of(tp=2, pp=2), None, False, 2.0),
    "pp, dp, tied": ("llama", World.of(pp=2, dp=2), "ddp", False, 2.0),
    "pp, zero 1, tied": ("llama", World.of(pp=2, dp=2), "zero1", False, 2.0),
    "pp, zero 2, tied": ("llama", World.of(pp=2, dp=2), "zero2", False, 2.0),
    "pp, fsdp, tied": ("llama", World.of(pp=2, dp=2), "fsdp", False, 2.0),
    "largest": ("llama", World.of(tp=2, pp=2), None, False, float("inf")),
    "sp": ("mixtral", TENSOR, "ddp", True, 2.0),
    "tp, ep": ("mixtral", EXPERTS, "ddp", False, 2.0),
    "ep of two": ("mixtral", World.of(dp=4, ep=2), "ddp", False, 2.0),
    "third order": ("mixtral", EXPERTS, "ddp", False, 3.0),
    "fsdp": ("mixtral", TENSOR, "fsdp", False, 2.0),
    "fsdp, ep": ("mixtral", World.of(dp=4, ep=4), "fsdp", False, 2.0),
    "fsdp, tp, ep": ("mixtral", EXPERTS, "fsdp", False, 2.0),
    "zero 1": ("mixtral", TENSOR, "zero1", True, 2.0),
    "zero 2, ep": ("mixtral", EXPERTS, "zero2", False, 2.0),
}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, **TIED))
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))


def tokens(data: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data)
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator)


def step(candidate: Any, batches: Sequence[torch.Tensor], kind: float) -> tuple[float, Any]:
    """Return the norm that clipping returns, and the change of the last norm in the step."""
    optimizer = torch.optim.SGD(candidate.parameters(), lr=1.0)
    for batch in batches:
        (candidate(input_ids=batch, labels=batch).loss / len(batches)).backward()
    total = nn.utils.clip_grad_norm_(candidate.parameters(), LIMIT, norm_type=kind)
    before = whole(candidate.model.norm)
    optimizer.step()
    return float(total), None if before is None else whole(candidate.model.norm) - before


def whole(norm: Any) -> torch.Tensor | None:
    weight = getattr(norm, "weight", None)  # only the last stage has it
    if weight is None:
        return None
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def clip_on_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    for name, (kind, world, form, sequence, order) in JOBS.items():
        candidate = model(kind)
        sliced = slice_to_rank(
            candidate, world, rank, new_group, SlicingOptions(sequence=sequence, peers_absent=False)
        )
        data = DataParallelism(form, DataGroups(new_group, world, rank)) if form else None
        shards = data.shards if data else None
        clipping = Clipping({candidate: sliced}, world, rank, new_group, shards)
        batch = tokens(world.point(rank).get("dp", 0))
        if data is None:
            with clipping.installed():
                results[name, rank] = step(candidate, [batch], order)
        else:
            with data.installed(), clipping.installed():
                results[name, rank] = step(candidate, [batch], order)
    world = World.of(tp=4)
    for infinite_rank, fused in itertools.product((2, RANKS), (False, True)):  # rank 2, or none
        candidate = model("llama")
        sliced = slice_to_rank(
            candidate, world, rank, new_group, SlicingOptions(peers_absent=False)
        )
        with Clipping({candidate: sliced}, world, rank, new_group, None).installed():
            results["skips", infinite_rank, fused, rank] = skip(
                candidate, infinite_rank, rank, fused
            )
    for fused in (False, True):
        candidate = nn.Linear(8, 4)
        data = DataParallelism("zero1", DataGroups(new_group, World.of(dp=4), rank))
        with data.installed():
            results["skips", "zero 1", fused, rank] = skip_sharded(candidate, rank, fused)


def skip(candidate: Any, infinite_rank: int, rank: int, fused: bool) -> tuple[bool, float]:
    """Return whether a GradScaler skips the step in which rank `infinite_rank` found an infinity.

    and the scale after the step.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(candidate.parameters(), lr=1.0, fused=fused)
    scaler.scale(candidate(input_ids=tokens(0), labels=tokens(0)).loss).backward()
    part = candidate.model.layers[0].self_attn.q_proj.weight
    before = part.detach().clone()
    if rank == infinite_rank:
        part.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, part), scaler.get_scale()


def skip_sharded(candidate: Any, rank: int, fused: bool) -> list[bool]:
    """Return for three steps whether each was skipped.

    In the last step one rank has an infinite gradient, of an element in another rank's shard.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(candidate.parameters(), lr=1.0, fused=fused)
    skipped: list[bool] = []
    for last in (False, False, True):
        loss = candidate(torch.ones(2, 8)).sum()
        if last and rank == 1:
            loss = loss + (candidate.weight[-1, -1] - candidate.weight[-1, -1].detach()) * float(
                "inf"
            )
        scaler.scale(loss).backward()
        before = candidate.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(torch.equal(before, candidate.weight))
    return skipped


@pytest.fixture(scope="module")
def rank_results() -> Any:
    return run_ranks(clip_on_rank, RANKS)


@pytest.mark.parametrize("name", JOBS)
def test_the_norm_matches_the_whole_model(rank_results, name):
    kind, world, _, _, order = JOBS[name]
    batches = [tokens(data) for data in range(world.sizes.get("dp", 1))]
    norm, change = step(model(kind), batches, order)
    assert norm > 3 * LIMIT or order == float("inf")
    for rank in range(RANKS):
        rank_norm, rank_change = rank_results[name, rank]
        assert rank_norm == pytest.approx(norm, rel=1e-5)
        if rank_change is not None:
            torch.testing.assert_close(rank_change, change, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_a_step_with_an_infinity_on_one_rank(rank_results, fused):
    """A fused optimizer checks in its step, if the script does not unscale before."""
    assert [rank_results["skips", 2, fused, rank] for rank in range(RANKS)] == [(True, 1.0)] * RANKS
    assert [rank_results["skips", RANKS, fused, rank] for rank in range(RANKS)] == [
        (False, 2.0)
    ] * RANKS
    sharded = [rank_results["skips", "zero 1", fused, rank] for rank in range(RANKS)]
    assert sharded == [[False, False, True]] * RANKS


@pytest.mark.parametrize(
    ("world", "expected_calls"),
    [
        (World.of(tp=4), [("tp", 4)]),
        (World.of(tp=2, pp=2), [("tp+pp", 4)]),
        (World.of(tp=2, dp=4, ep=2), [("ep", 4), ("tp", 4)]),
        (World.of(cp=2, dp=2), []),
    ],
)
def test_collectives_of_clipping(world, expected_calls):
    """Each all-reduces 4 bytes, as in Megatron-LM (get_grad_norm_fp32)."""
    recorder = Recorder(0, world.size)
    recorder.start()
    try:
        candidate = model("mixtral")
        sliced = slice_to_rank(candidate, world, 0, recorder.new_group, SlicingOptions())
        candidate(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        before = len(recorder.calls)
        with Clipping({candidate: sliced}, world, 0, recorder.new_group, None).installed():
            nn.utils.clip_grad_norm_(candidate.parameters(), LIMIT)
    finally:
        recorder.stop()
    calls = [(call.group, call.bytes) for call in recorder.calls[before:]]
    assert calls == expected_calls
    assert all(call.collective == "all_reduce" for call in recorder.calls[before:])


def test_a_non_finite_norm_is_an_error_if_the_script_requests_it():
    candidate = model("llama")
    candidate(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    candidate.model.norm.weight.grad.fill_(float("nan"))
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        sliced = slice_to_rank(candidate, World.of(tp=2), 0, recorder.new_group, SlicingOptions())
        with (
            Clipping({candidate: sliced}, World.of(tp=2), 0, recorder.new_group, None).installed(),
            pytest.raises(RuntimeError, match="`parameters`"),
        ):
            nn.utils.clip_grad_norm_(candidate.parameters(), LIMIT, error_if_nonfinite=True)
    finally:
        recorder.stop()


def test_a_disabled_scaler_communicates_nothing():
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        candidate = model("llama")
        sliced = slice_to_rank(candidate, World.of(tp=2), 0, recorder.new_group, SlicingOptions())
        optimizer, scaler = (
            torch.optim.SGD(candidate.parameters()),
            torch.amp.GradScaler(enabled=False),
        )
        candidate(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        before = len(recorder.calls)
        with Clipping({candidate: sliced}, World.of(tp=2), 0, recorder.new_group, None).installed():
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        assert len(recorder.calls) == before
    finally:
        recorder.stop()


def test_tied_gradients_are_summed_again_after_a_skipped_step(monkeypatch):
    """With infinities a script clips, but the GradScaler skips the step."""
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: summed.append(1))
    holder = nn.Embedding(4, 4)
    tied = TiedEmbedding(holder, "the group")
    optimizer = torch.optim.SGD(holder.parameters())
    for skipped in (True, False):
        holder(torch.arange(4)).sum().backward()
        tied.sum()  # as clipping does
        tied.sum()
        if not skipped:
            optimizer.step()
    assert len(summed) == 2
