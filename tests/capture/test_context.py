"""Context parallelism: the same numbers as of the whole sequence, and what is communicated."""

import os
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import multiprocessing

from onerank.annotate import recost
from onerank.capture import Options, Plan, capture, context_gather, context_model
from onerank.capture.attention import attend, attend_backward
from onerank.capture.context import Context
from onerank.capture.data_groups import Groups
from onerank.capture.data_parallel import DataParallelism
from onerank.capture.rank_slice import slice_to_rank
from onerank.capture.recorder import Recorder
from onerank.capture.slices import compare_slices
from onerank.converters.astra_sim import export
from onerank.ir import Collective, World
from onerank.ir.check import check
from onerank.ir.errors import SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 24,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 24}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BATCH, SEQUENCE = 2, 24


def model(kind: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def gpt2(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **QUIET, **changes))


def tokens(seed: int = 1, length: int = SEQUENCE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE["vocab_size"], (BATCH, length), generator=generator)


def compared(one: Any, labels: torch.Tensor | None = None, **options: Any) -> Any:
    given = tokens()
    batch = {"input_ids": given, "labels": given if labels is None else labels}
    rows, why_not, _ = compare_slices(one, (), batch, Options(**options), lambda _: None)
    assert not why_not
    return rows


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "alone": ("Llama", {}, {"world": World.of(cp=2)}),
    "three ranks": ("Llama", {}, {"world": World.of(cp=3)}),
    "sequence parallel": ("Qwen3", {}, {"world": World.of(tp=2, cp=2), "sequence": True}),
    "transformers' borders": ("Mistral", {}, {"world": World.of(tp=2, cp=2), "flavour": "hf"}),
    "stages, tied": ("Gemma", {"head_dim": 8}, {"world": World.of(cp=2, pp=2)}),
    "fewer experts' ranks": ("Mixtral", EXPERTS, {"world": World.of(cp=4, ep=2)}),
    "more experts' ranks": ("Mixtral", EXPERTS, {"world": World.of(cp=2, dp=2, ep=4)}),
    "everything": (
        "Mixtral",
        EXPERTS,
        {"world": World.of(tp=2, cp=2, pp=2, ep=2), "sequence": True},
    ),
}


@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_a_sequence_agree_with_the_whole(form, comm):
    kind, changes, options = FORMS[form]
    ignored = tokens()
    ignored[0, 5:9] = -100
    rows = compared(model(kind, **changes), ignored, **options, cp_comm=comm)
    assert sum(row.breaches for row in rows) == 0
    losses = next(row for row in rows if row.what == "loss")
    assert losses.tensors == options["world"].size // options["world"].sizes.get("pp", 1)
    gradients = [row for row in rows if row.what == "gradients"]
    assert len(gradients) >= 8
    assert all(0 < row.max_rel < 1e-4 for row in gradients)


WINDOWS = {
    "within a chunk": ("Mistral", {"sliding_window": 4}, {"world": World.of(cp=2)}),
    "over chunks": ("Mistral", {"sliding_window": 11}, {"world": World.of(tp=2, cp=3)}),
    "layers that take turns": (
        "Gemma3Text",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
         "head_dim": 8},
        {"world": World.of(cp=2, pp=2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", WINDOWS)
def test_windows_reach_into_the_chunks_of_others(form):
    kind, changes, options = WINDOWS[form]
    rows = compared(model(kind, **changes), **options)
    assert sum(row.breaches for row in rows) == 0
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


def test_a_window_that_is_left_out_is_found_out(monkeypatch):
    attend_all = Context.attend
    monkeypatch.setattr(Context, "attend", lambda *given: attend_all(*given[:5]))
    rows = compared(model("Mistral", sliding_window=11), world=World.of(cp=2))
    assert sum(row.breaches for row in rows if row.what == "gradients") > 0


def test_learned_positions_are_those_of_the_part():
    rows = compared(gpt2(), world=World.of(cp=3))
    assert sum(row.breaches for row in rows) == 0


def test_the_last_token_of_a_chunk_learns_from_the_first_of_the_next():
    labels = torch.full((BATCH, SEQUENCE), -100)
    labels[:, 6] = 5  # the first token of chunk 1, which rank 1 has; rank 0 predicts it
    labels[:, 18] = 7  # the first token of chunk 3, which rank 0 has; rank 1 predicts it
    rows = compared(model(), labels, world=World.of(cp=2))
    assert sum(row.breaches for row in rows) == 0


def test_gradients_that_are_not_sent_back_are_found_out(monkeypatch):
    def own_alone(x: torch.Tensor, group: Any) -> torch.Tensor:
        chunks = x.chunk(2 * group.size(), dim=2)
        return torch.cat([chunks[chunk] for chunk in context_gather.chunks_of(group)], dim=2)

    monkeypatch.setattr(context_gather, "_shares", own_alone)
    rows = compared(model(), world=World.of(cp=2))
    wrong = {row.module for row in rows if row.what == "gradients" and row.breaches}
    assert {"LlamaAttention.k_proj", "LlamaAttention.v_proj"} <= wrong
    assert "LlamaForCausalLM.lm_head" not in wrong


def test_a_loss_of_the_own_part_alone_is_found_out(monkeypatch):
    monkeypatch.setattr(context_model._SumOfParts, "apply", lambda loss, *_: loss)
    rows = compared(model(), world=World.of(cp=2))
    assert next(row for row in rows if row.what == "loss").breaches == 2


# What a rank communicates ------------------------------------------------------------------------


def recorded(recorder: Recorder, comm: Any) -> tuple[int, list[tuple[str, int]]]:
    one = model()
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, flavour="megatron", cp_comm=comm)
    loss = one(input_ids=tokens(), labels=tokens()).loss
    forward = len(recorder.calls)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in one.parameters())
    return forward, [(call.collective, call.bytes) for call in recorder.calls]


PART = BATCH * 2 * (SEQUENCE // 4) * 8 * 4  # of the keys of 2 heads with 8 features, fp32


def test_the_calls_of_gathered_attention_and_their_bytes(recorder):
    forward, calls = recorded(recorder, "all_gather")
    gather, scatter = ("all_gather", PART), ("reduce_scatter", 4 * PART)
    assert calls[:forward] == [gather] * 4 + [("all_reduce", 4)]  # keys and values of 2 layers
    assert calls[forward:] == [gather, gather, scatter, scatter] * 2


def test_the_calls_of_a_ring_and_their_bytes(recorder):
    forward, calls = recorded(recorder, "p2p")
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
"""Form -> how activations are recomputed: with reentrant autograd or not."""


def train(one: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = one(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {name: p.detach() for name, p in one.named_parameters()}
    weights = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone()
               for n, p in named.items()}  # fmt: skip
    return {**weights, "loss": loss.detach()}


def one_rank(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=SIZE)

    def new_group(_: str, ranks: Any) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    world = World.of(cp=SIZE)
    for form, reentrant in RECOMPUTED.items():
        one = model()
        comm = "p2p" if form in ("ddp", "zero1") else "all_gather"
        slice_to_rank(one, world, rank, new_group, flavour="hf", alone=False, cp_comm=comm)
        if reentrant is not None:
            one.gradient_checkpointing_enable({"use_reentrant": reentrant})
            one.train()
        with DataParallelism(form, Groups(new_group, world, rank)).installed():
            results[form, rank] = train(one)
    dist.barrier()  # none leaves while another is at work
    dist.destroy_process_group()


def test_two_ranks_learn_from_a_sequence_what_one_does():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # one import of torch for all
    context.set_forkserver_preload(["onerank.capture.rank_slice"])
    with context.Manager() as manager:
        results = manager.dict()
        multiprocessing.start_processes(
            one_rank, args=(port, results), nprocs=SIZE, start_method="forkserver"
        )
        found = dict(results)
    expected = train(model())
    assert len(found) == len(RECOMPUTED) * SIZE
    for key, trained in found.items():
        for name, value in expected.items():
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
        world=world,
        rank=5,
        sequence=True,
        data_parallel=data,
        cp_comm=comm,
        plan=Plan(warm_up=2, pure=1),
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
    assert len(gathered) == 6 * 2 + 3  # as of `--sp` alone: of the logits there is none
    made = export(recost(graph, "H100"), tmp_path / "workload")
    assert made.ranks == 8
    assert check(tmp_path / "workload") == []
    if binary := os.environ.get("ASTRA_SIM_BIN"):
        run = [tmp_path / "workload" / "run.sh", "roofline", Path(binary).resolve()]
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "all 8 ranks finished" in done.stdout + done.stderr


# The kernels -------------------------------------------------------------------------------------

DEVICES = [
    ("cpu", torch.float32),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 9), (True, 50)])
@pytest.mark.parametrize("queries", [40, 72])
def test_kernels_compute_attention_to_a_part_of_the_keys(device, dtype, causal, window, queries):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys, heads, key_heads, width = 72, 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, width)]
    given = [torch.randn(shape, generator=generator) for shape in [*shapes, shapes[0]]]
    q, k, v, gradient = (x.to(device, dtype) for x in given)
    how = {"causal": causal, "scale": 0.3, "window": window}
    found = attend(q, k, v, **how)
    gradients = attend_backward(gradient, q, k, v, found, **how)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(heads // key_heads, 1) for x in exact[1:])]
    scores = wide[0] @ wide[1].mT * 0.3
    if causal:
        rows, columns = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
        seen = (columns <= rows) & (columns > rows - (window or keys))
        scores = scores.masked_fill(~seen.to(device), float("-inf"))
    output = scores.softmax(-1) @ wide[2]
    wanted = torch.autograd.grad(output, exact, gradient.double())
    allowed = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    close = {"atol": allowed, "rtol": allowed}
    torch.testing.assert_close(found.output.double(), output, **close)
    torch.testing.assert_close(found.log_sums.double(), scores.logsumexp(-1), **close)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)


# What is refused ---------------------------------------------------------------------------------

NOT_KNOWN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "length": (
        model,
        {"input_ids": tokens(length=18), "labels": tokens(length=18)},
        r"2 x 4 = 8 chunks, and the sequence has 18 tokens \(18 = 8 x 2 \+ 2\)",
    ),
    "window": (
        lambda: model("Mistral", sliding_window=8),
        {"cp_comm": "p2p"},
        r"a window of 8 tokens of 24, .* use --cp-comm all_gather",
    ),
    "padding": (
        model,
        {"attention_mask": torch.ones(BATCH, SEQUENCE).tril(20)},
        r"leaves out 5 of 48 tokens",
    ),
    "packing": (model, {"position_ids": torch.arange(SEQUENCE) % 12}, "do not pack"),
    "no labels": (model, {"labels": None}, "was called without labels"),
    "a tuple": (model, {"return_dict": False}, "leave return_dict=False out"),
    "dropout": (
        lambda: model(attention_dropout=0.1).train(),
        {},
        r"LlamaAttention drops out 0.1 of its attention",
    ),
    "eager": (
        lambda: model(attn_implementation="eager"),
        {},
        r"runs its attention as 'eager', .* attn_implementation='sdpa'",
    ),
    "linear layers": (
        lambda: model("Llama", layer_types=["linear_attention", "full_attention"]),
        {},
        r"layers of linear_attention",
    ),
    "balancing loss": (
        lambda: model("Mixtral", **EXPERTS, output_router_logits=True),
        {},
        r"output_router_logits=False",
    ),
    "no language model": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)),
        {},
        r"LlamaModel is none \(transformers.PreTrainedModel with a head\)",
    ),
    "latent attention": (
        lambda: model("DeepseekV3", num_key_value_heads=4, qk_rope_head_dim=8, q_lora_rank=16,
                      kv_lora_rank=16, v_head_dim=8, qk_nope_head_dim=8, n_routed_experts=4,
                      n_group=1, topk_group=1, first_k_dense_replace=2),
        {},
        r"keys have 16 features and values 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_what_is_not_known_is_refused(recorder, case):
    make, changes, message = NOT_KNOWN[case]
    one = make()

    called = {"input_ids": tokens(), "labels": tokens(), **changes}
    comm = called.pop("cp_comm", "all_gather")

    def slice_and_call() -> None:
        new_group = recorder.new_group
        slice_to_rank(one, World.of(cp=4), 1, new_group, flavour="megatron", cp_comm=comm)
        one(**called)

    with pytest.raises(SliceError, match=message):
        slice_and_call()


def test_logits_of_a_part_are_not_given(recorder):
    one = model()
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, flavour="megatron")
    ones = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    output = one(tokens(), ones, labels=tokens())  # by position, with a mask that masks nothing
    with pytest.raises(SliceError, match=r"rank 1 of the 4 of --cp has those of its part"):
        _ = output.logits
