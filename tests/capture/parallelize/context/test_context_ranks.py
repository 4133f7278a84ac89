"""Context parallelism: what ranks communicate, learn, and export to a simulator."""

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_job import BATCH, CAPPED, SEQUENCE, model, packed, tokens
from job_options import axes, strategy
from real_ranks import run_ranks

from onerank.annotate import recost
from onerank.capture import Options, WindowPlan, capture
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.data.apply_data_parallel import DataParallelism
from onerank.capture.parallelize.data.data_groups import DataGroups
from onerank.capture.parallelize.shard_model import ModelSlicing, SlicingOptions, slice_to_rank
from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.ir import Collective, World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


def recorded(recorder: Recorder, comm: Any, **arguments: Any) -> tuple[int, list[tuple[str, int]]]:
    sliced = model()
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions(cp_comm=comm))
    loss = sliced(input_ids=tokens(), labels=tokens(), **arguments).loss
    forward = len(recorder.calls)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in sliced.parameters())
    return forward, [(call.collective, call.bytes) for call in recorder.calls]


def test_a_model_that_is_never_moved_is_sliced_at_its_first_call(recorder):
    sliced = model("Gemma2", **CAPPED)

    def slice_model(built: Any) -> Any:
        return slice_to_rank(built, World.of(cp=4), 1, recorder.new_group, SlicingOptions())

    with ModelSlicing(slice_model).installed():
        for _ in range(2):
            sliced(input_ids=tokens(), labels=tokens())
    calls = [(call.collective, call.bytes) for call in recorder.calls]
    assert calls == [*[("all_gather", PART)] * 4, ("all_reduce", 4)] * 2


PART = BATCH * 2 * (SEQUENCE // 4) * 8 * 4  # of the keys of 2 heads with 8 features, fp32


def test_the_calls_of_gathered_attention_and_their_bytes(recorder):
    forward, calls = recorded(recorder, "all_gather")
    gather, scatter = ("all_gather", PART), ("reduce_scatter", 4 * PART)
    assert calls[:forward] == [gather] * 4 + [("all_reduce", 4)]  # keys and values of 2 layers
    assert calls[forward:] == [gather, gather, scatter, scatter] * 2


@pytest.mark.parametrize("arguments", [{}, packed((16, 8), (24,))], ids=["", "packed"])
def test_the_calls_of_a_ring_and_their_bytes(recorder, arguments):
    forward, calls = recorded(recorder, "p2p", **arguments)
    both = 2 * PART
    assert Counter(calls[:forward]) == {
        ("send", both): 3 * 2,
        ("recv", both): 3 * 2,
        ("all_reduce", 4): 1,
    }
    assert Counter(calls[forward:]) == {
        ("send", both): 2 * 2,  # keys and values at first, their gradients at last
        ("recv", both): 2 * 2,
        ("send", 2 * both): 2 * 2,  # both between
        ("recv", 2 * both): 2 * 2,
    }
    peers = {(call.collective, call.peer) for call in recorder.calls[:2]}
    assert peers == {("send", 2), ("recv", 0)}


# Two real ranks ----------------------------------------------------------------------------------

SIZE, STEPS = 2, 2

RECOMPUTED = {"ddp": None, "zero1": False, "zero2": True, "fsdp": None}

"""Strategy -> how activations are recomputed: with reentrant autograd or not."""

PACKING = {"ddp": {}, "zero1": packed((4, 20), (16, 8)), "zero2": {}, "fsdp": {}}

"""Strategy -> position ids that separate packed sequences."""


def train(sliced: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(sliced.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = sliced(input_ids=tokens(step), labels=tokens(step), **arguments).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {name: p.detach() for name, p in sliced.named_parameters()}
    weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
               for n, p in named.items()}  # fmt: skip
    return {**weights, "loss": loss.detach()}


def train_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Any) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    world = World.of(cp=SIZE)
    for form, reentrant in RECOMPUTED.items():
        sliced = model()
        comm = "p2p" if form in ("ddp", "zero1") else "all_gather"
        slice_to_rank(
            sliced,
            world,
            rank,
            new_group,
            SlicingOptions(tp_style="hf", peers_absent=False, cp_comm=comm),
        )
        if reentrant is not None:
            sliced.gradient_checkpointing_enable({"use_reentrant": reentrant})
            sliced.train()
        with DataParallelism(form, DataGroups(new_group, world, rank)).installed():
            results[form, rank] = train(sliced, PACKING[form])


def test_two_ranks_train_to_the_weights_of_one():
    trained_ranks = run_ranks(train_rank, SIZE)
    whole, in_packs = train(model(), {}), train(model(), PACKING["zero1"])
    assert len(trained_ranks) == len(RECOMPUTED) * SIZE
    for key, trained in trained_ranks.items():
        for name, value in (in_packs if key[0] == "zero1" else whole).items():
            torch.testing.assert_close(
                trained[name], value, atol=2e-6, rtol=1e-5, msg=f"{key} {name}"
            )


# A captured rank ---------------------------------------------------------------------------------

SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(20):
    tokens = torch.randint(0, 256, (2, 32))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("data", "comm"), [("fsdp", "all_gather"), ("zero1", "p2p")])
def test_a_captured_rank_is_exported_for_all(tmp_path, data, comm):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    world = World.of(tp=2, cp=2, dp=2)
    options = Options(
        **axes(world),
        rank=5,
        sp=True,
        **strategy(data),
        cp_comm=comm,
        windows=WindowPlan(warm_up=2, timed_steps=1),
    )
    graph = capture(script, [], options).graph
    groups = {group.name: (group.ranks, group.axis) for group in graph.job.groups}
    assert groups == {
        "tp": ((4, 5), "tp"),
        "cp": ((5, 7), "cp"),
        "cp+dp": ((1, 3, 5, 7), "cp+dp"),
    }
    gathered = [
        node
        for node in graph
        if node.collective is Collective.ALL_GATHER and node.text("group") == "tp"
    ]
    assert len(gathered) == 6 * 2 + 3  # as with --sp only; the unread logits are not gathered
    exported = export_astra_sim(recost(graph, "H100"), tmp_path / "workload")
    assert exported.ranks == 8
    assert check(tmp_path / "workload") == []
    if binary := os.environ.get("ASTRA_SIM_BIN"):
        run = [tmp_path / "workload" / "run.sh", "roofline", Path(binary).resolve()]
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "all 8 ranks finished" in done.stdout + done.stderr
