"""Context parallelism: the same numbers as of the whole sequence, and what is communicated."""

import os
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import multiprocessing

from onerank.annotate import recost
from onerank.capture import Options, Plan, capture, context_gather, context_mask, context_model
from onerank.capture.attended import Manner
from onerank.capture.attention import attend, attend_backward
from onerank.capture.context import Context
from onerank.capture.data_groups import Groups
from onerank.capture.data_parallel import DataParallelism
from onerank.capture.exact import ExactPeers, ExactWorld
from onerank.capture.models import ModelSlicing
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
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
          "v_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
          "num_hidden_layers": 2}  # fmt: skip
"""Keys of 16 features, values of 8."""
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


def compared(
    one: Any, labels: torch.Tensor | None = None, more: dict[str, Any] | None = None, **options: Any
) -> Any:
    given = tokens()
    batch = {"input_ids": given, "labels": given if labels is None else labels, **(more or {})}
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
    "latent attention": ("DeepseekV3", LATENT, {"world": World.of(tp=2, cp=2)}),
    "latent attention, stages": ("DeepseekV2", LATENT, {"world": World.of(cp=3, pp=2)}),
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
    monkeypatch.setattr(
        Context, "attend", lambda *given: attend_all(*given[:4], replace(given[4], window=None))
    )
    rows = compared(model("Mistral", sliding_window=11), world=World.of(cp=2))
    assert sum(row.breaches for row in rows if row.what == "gradients") > 0


# Padding, packing and attention of the model's own ------------------------------------------------

BEFORE = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
BEFORE[0, :5] = 0
BEHIND = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
BEHIND[1, 17:] = 0
PACKED = {
    "position_ids": torch.stack(
        [torch.arange(SEQUENCE) % 14, torch.cat([torch.arange(n) for n in (7, 8, 9)])]
    ),
    "use_cache": False,  # with a cache transformers looks at no position ids
}
OWN = {"attn_implementation": "eager"}
SINKS = {**EXPERTS, "head_dim": 8, "sliding_window": 7}
CAPPED = {**OWN, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8}
CHUNKS = {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 10,
          "moe_layers": [], "layer_types": ["chunked_attention", "full_attention"]}  # fmt: skip

STRUCTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "padded before": ("Llama", {}, {"attention_mask": BEFORE}, {"cp": 3}),
    "padding that is learnt": ("Qwen3", {}, {"attention_mask": BEHIND}, {"tp": 2, "cp": 2}),
    "packed": ("Llama", {}, PACKED, {"cp": 3}),
    "packed, windows": ("Mistral", {"sliding_window": 5}, PACKED, {"cp": 2, "pp": 2}),
    "packed, latent": ("DeepseekV3", LATENT, PACKED, {"cp": 2}),
    "packed, experts": ("Mixtral", EXPERTS, PACKED, {"cp": 2, "ep": 2}),
    "packed, with a cache": ("Llama", {}, {**PACKED, "use_cache": True}, {"cp": 2}),
    "labels shifted already": ("Llama", {}, {"shift_labels": tokens(7)}, {"cp": 2}),
    "own attention": ("Llama", OWN, {}, {"cp": 3}),
    "capped": ("Gemma2", CAPPED, {}, {"tp": 2, "cp": 2}),
    "capped, padded": ("Gemma2", CAPPED, {"attention_mask": BEFORE}, {"cp": 2, "pp": 2}),
    "capped, packed": ("Gemma2", CAPPED, PACKED, {"cp": 3}),
    "sinks": ("GptOss", SINKS, {}, {"cp": 2, "ep": 2}),
    "sinks, packed": ("GptOss", SINKS, PACKED, {"cp": 2}),
    "within chunks": ("Llama4Text", CHUNKS, {"attention_mask": BEFORE}, {"cp": 2}),
}


@pytest.mark.parametrize("form", STRUCTURES)
def test_parts_of_padded_and_packed_sequences_agree_with_the_whole(form):
    kind, changes, more, sizes = STRUCTURES[form]
    labels = tokens()
    labels[BEFORE == 0] = -100
    rows = compared(model(kind, **changes), labels, more, world=World.of(**sizes))
    assert sum(row.breaches for row in rows) == 0
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
def test_padding_behind_that_is_not_learnt_needs_no_mask(monkeypatch, comm):
    masks: list[Any] = []
    attend_all = Context.attend

    def noted(*given: Any) -> torch.Tensor:
        masks.append(given[5])
        return attend_all(*given)

    monkeypatch.setattr(Context, "attend", noted)
    labels = tokens().masked_fill(BEHIND == 0, -100)
    rows = compared(model(), labels, {"attention_mask": BEHIND}, world=World.of(cp=3), cp_comm=comm)
    assert sum(row.breaches for row in rows) == 0
    assert masks == [None] * 3 * 2 + [None] * (len(masks) - 6)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_documents_that_are_mixed_are_found_out(monkeypatch, kind):
    monkeypatch.setattr(context_mask, "_knows_positions", lambda _: False)
    changes = CAPPED if kind == "Gemma2" else {}
    rows = compared(model(kind, **changes), None, PACKED, world=World.of(cp=2))
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


BALANCED = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mixtral", {"world": World.of(cp=2, ep=2)}),
        ("Mixtral", {"world": World.of(tp=2, cp=2), "sequence": True}),
        ("Qwen3Moe", {"world": World.of(tp=2), "sequence": True}),
        ("GptOss", {"world": World.of(cp=3)}),
    ],
)
def test_routers_are_balanced_over_the_whole_sequence(kind, options, padded):
    more = {"attention_mask": BEFORE} if padded else None
    labels = tokens().masked_fill(BEFORE == 0, -100)
    rows = compared(model(kind, **BALANCED), labels, more, **options)
    assert sum(row.breaches for row in rows) == 0


def test_routers_balanced_over_a_part_are_found_out(monkeypatch):
    monkeypatch.setattr(context_model, "adds_balancing_loss", lambda *_: False)
    rows = compared(model("Mixtral", **BALANCED), world=World.of(cp=2))
    assert sum(row.breaches for row in rows) > 0


def test_counts_of_routed_tokens_are_summed_and_the_loss_is_told(recorder):
    one = model("Mixtral", **BALANCED)
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, flavour="megatron")
    output = one(input_ids=tokens(), labels=tokens())
    reduced = [call.bytes for call in recorder.calls if call.collective == "all_reduce"]
    assert reduced == [4 * (4 + 1), 4 * 2]  # of 4 experts and all tokens; of both losses
    assert 1 <= output.aux_loss < 4  # 2 experts a token: 2 if they are even


# What a rank communicates ------------------------------------------------------------------------


def recorded(recorder: Recorder, comm: Any) -> tuple[int, list[tuple[str, int]]]:
    one = model()
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, flavour="megatron", cp_comm=comm)
    loss = one(input_ids=tokens(), labels=tokens()).loss
    forward = len(recorder.calls)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in one.parameters())
    return forward, [(call.collective, call.bytes) for call in recorder.calls]


def test_a_model_that_is_never_moved_is_whole_up_to_its_first_call(recorder):
    one = model("Gemma2", **CAPPED)

    def slice_one(found: Any) -> Any:
        return slice_to_rank(found, World.of(cp=4), 1, recorder.new_group, flavour="megatron")

    with ModelSlicing(slice_one).installed():
        for _ in range(2):
            one(input_ids=tokens(), labels=tokens())
    calls = [(call.collective, call.bytes) for call in recorder.calls]
    assert calls == [*[("all_gather", PART)] * 4, ("all_reduce", 4)] * 2


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


@dataclass(frozen=True)
class Seen:
    causal: bool = True
    window: int | None = None
    masked: bool = False


SEEN = [Seen(), Seen(causal=False), Seen(window=9), Seen(window=50), Seen(masked=True)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("values", [16, 8])
@pytest.mark.parametrize(
    "seen",
    [Seen(), Seen(causal=False), Seen(window=9), Seen(window=50), Seen(masked=True)],
    ids=str,
)
@pytest.mark.parametrize("queries", [40, 72])
def test_kernels_compute_attention_to_a_part_of_the_keys(device, dtype, values, seen, queries):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys, heads, key_heads, width = 72, 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, values),
              (2, heads, queries, values)]  # fmt: skip
    q, k, v, gradient = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    rows, columns = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if seen.causal:
        allowed = (columns <= rows) & (columns > rows - (seen.window or keys))
    mask = None
    if seen.masked:
        allowed = allowed & (columns >= 30 * torch.arange(2)[:, None, None, None])
        buffer = torch.zeros((2, 1, queries, 80), dtype=dtype)
        mask = buffer.to(device)[..., :keys].masked_fill_(~allowed.to(device), float("-inf"))
    how = {"how": Manner(0.3, seen.window), "causal": seen.causal, "mask": mask}
    found = attend(q, k, v, **how)
    gradients = attend_backward(gradient, q, k, v, found, **how)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(heads // key_heads, 1) for x in exact[1:])]
    scores = (wide[0] @ wide[1].mT * 0.3).masked_fill(~allowed.to(device), float("-inf"))
    empty = ~allowed.any(-1, keepdim=True).to(device).expand(*scores.shape[:-1], 1)
    output = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ wide[2]
    wanted = torch.autograd.grad(output, exact, gradient.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(found.output.double(), output, **close)
    some = ~empty.squeeze(-1)
    sums = scores.logsumexp(-1)
    torch.testing.assert_close(found.log_sums.double()[some], sums[some], **close)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize("values", [16, 8])
def test_dropout_drops_the_same_backward_and_leaves_the_mean(device, dtype, comm, values):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    size, part, rate = 3, 32, 0.25

    def one_rank(peers: ExactPeers) -> tuple[float, float, torch.Tensor]:
        torch.manual_seed(peers.rank)
        context = Context(peers.new_group("cp", range(size)), comm)
        q, k = (torch.randn(2, 2, part, 16, device=device, dtype=dtype) for _ in range(2))
        v = torch.randn(2, 2, part, values, device=device, dtype=dtype, requires_grad=True)
        outputs = [context.attend(q, k, v, Manner(0.3, None, rate)) for _ in range(40)]
        gradient = torch.randn_like(outputs[0])
        (for_value,) = torch.autograd.grad(outputs[0], v, gradient)
        whole = context.attend(q, k, v, Manner(0.3))
        mean = torch.stack([one.detach().float() for one in outputs]).mean(0)
        spread = (outputs[0].detach() - whole.detach()).float().square().mean()
        error = (mean - whole.detach().float()).square().mean()
        # linear in the values, however dropout falls
        return (
            float((gradient.double() * outputs[0].detach().double()).sum()),
            float((for_value.double() * v.detach().double()).sum()),
            error / spread,
        )

    found = ExactWorld(size).run(one_rank)
    forward, backward = (sum(one[place] for one in found) for place in (0, 1))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert forward == pytest.approx(backward, rel=tolerance, abs=tolerance * 100)
    assert all(0 < one[2] < 0.1 for one in found)  # 1 / 40 but for chance


def test_dropout_by_elementary_operators_has_the_gradients_of_autograd():
    how, keys = Manner(0.3, None, 0.4), 24
    q, k, v = (torch.randn(2, heads, keys, 16, dtype=torch.double, requires_grad=True)
               for heads in (4, 2, 2))  # fmt: skip
    found = attend(*(x.detach() for x in (q, k, v)), how=how, causal=True)
    (kept,) = found.random
    assert 0.5 < kept.double().mean() < 0.7
    wide = [q, *(x.repeat_interleave(2, 1) for x in (k, v))]
    hidden = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    weights = (wide[0] @ wide[1].mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
    output = (weights * kept / 0.6) @ wide[2]
    torch.testing.assert_close(found.output, output)
    gradient = torch.randn_like(output)
    mine = attend_backward(gradient, *(x.detach() for x in (q, k, v)), found, how=how, causal=True)
    for one, other in zip(mine, torch.autograd.grad(output, (q, k, v), gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_gpt2_trains_with_the_dropout_it_comes_with(recorder):
    torch.manual_seed(0)
    one = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()
    assert one.config.attn_pdrop == 0.1
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, flavour="megatron")
    losses = [one(input_ids=tokens(), labels=tokens()).loss for _ in range(2)]
    assert losses[0] != losses[1]
    losses[0].backward()
    assert all(p.grad.isfinite().all() for p in one.parameters())
    assert Counter(call.collective for call in recorder.calls) == {
        "all_gather": 2 * 2 * 3,
        "reduce_scatter": 2 * 2,
        "all_reduce": 2,
    }


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
    "padding": (model, {"attention_mask": BEFORE, "cp_comm": "p2p"}, r"use --cp-comm all_gather"),
    "packing": (model, {**PACKED, "cp_comm": "p2p"}, r"padded or packed, .* --cp-comm all_gather"),
    "own attention": (
        lambda: model("Gemma2", **CAPPED),
        {"cp_comm": "p2p"},
        r"runs its attention as 'eager', on all keys at once",
    ),
    "a mask of four dimensions": (
        model,
        {"attention_mask": torch.ones(BATCH, 1, SEQUENCE, SEQUENCE)},
        r"expected an attention_mask \[batch, 24\], or none; found \[2, 1, 24, 24\]",
    ),
    "positions of three axes": (
        model,
        {"position_ids": torch.arange(SEQUENCE).expand(3, BATCH, -1)},
        r"expected position_ids \[batch, 24\], or none; found \[3, 2, 24\]",
    ),
    "packed chunks": (lambda: model("Llama4Text", **CHUNKS), PACKED, r"attends within chunks"),
    "positions counted from the mask": (
        lambda: model("OPT", ffn_dim=64, word_embed_proj_dim=32),
        {"attention_mask": BEFORE},
        r"OPTLearnedPositionalEmbedding\), which leaves out 5 of 48 tokens",
    ),
    "no labels": (
        model,
        {"labels": None},
        r"was called without labels; .* go in as shift_labels too",
    ),
    "a tuple": (model, {"return_dict": False}, "leave return_dict=False out"),
    "attention by code of its own": (
        lambda: model("Falcon"),
        {},
        r"'sdpa', in code of its own, .* attn_implementation='sdpa'",
    ),
    "flex attention": (
        lambda: model(attn_implementation="flex_attention"),
        {},
        r"runs its attention as 'flex_attention', .* attn_implementation='sdpa'",
    ),
    "linear layers": (
        lambda: model("Llama", layer_types=["linear_attention", "full_attention"]),
        {},
        r"layers of linear_attention",
    ),
    "no language model": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)),
        {},
        r"LlamaModel is none \(transformers.PreTrainedModel with a head\)",
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
