"""Sequence parallelism: what is communicated, as Megatron-LM does, and what is refused.

That it computes what the whole model does is shown in test_slicer.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from job_options import axes
from notes import note_of
from raised import raises_code
from transformers import LlamaConfig, LlamaForCausalLM

from onerank.capture import Options
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model
from onerank.capture.verify.slice_check import compare_slices
from onerank.ir import World

LAYERS, HIDDEN, VOCABULARY = 2, 32, 96
BATCH, SEQUENCE, TP = 3, 16, 4


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
        )
    )


@pytest.fixture
def recorder():
    recorder = Recorder(1, TP)
    recorder.start()
    yield recorder
    recorder.stop()


def sliced(recorder: Recorder, tp_style: str = "megatron") -> LlamaForCausalLM:
    model = llama()
    slice_model(model, recorder.new_group("tp", range(TP)), tp_style, sequence=True)
    return model


def tokens(length: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_collectives_of_a_step_and_their_bytes(recorder, checkpointed):
    model = sliced(recorder)
    if checkpointed:  # with or without what stands before the first layer, by transformers' version
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=tokens(), labels=tokens()).loss
    forward = Counter((call.collective, call.bytes) for call in recorder.calls)
    loss.backward()
    every = Counter((call.collective, call.bytes) for call in recorder.calls)
    whole = BATCH * SEQUENCE * HIDDEN * 4
    shard = whole // TP  # all-gathers count what the rank gives
    of_the_loss = {("all_reduce", BATCH * SEQUENCE * 4): 3}
    assert forward == {
        ("reduce_scatter", whole): 2 * LAYERS + 1,  # attention, MLP; embedding
        ("all_gather", shard): 2 * LAYERS + 1,  # attention, MLP; head
        **of_the_loss,
    }
    again = LAYERS if checkpointed else 0  # each layer runs twice, up to its last saved tensor
    reduced = every[("reduce_scatter", whole)]
    assert reduced - 4 * LAYERS - 2 in ({LAYERS, LAYERS + 1} if checkpointed else {0})
    assert every == {
        ("reduce_scatter", whole): reduced,
        ("all_gather", shard): 6 * LAYERS + 3 + 2 * again,  # a third for the weights' gradients
        ("all_reduce", HIDDEN * 4): 2 * LAYERS + 1,  # gradients of the norms
        **of_the_loss,
    }


def test_substitute_hidden_states_differ_by_token(recorder):
    """A GEMM runs faster on equal rows, and absent peers add no partial sums."""
    model = sliced(recorder)
    seen: list[torch.Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(input_ids=torch.arange(SEQUENCE).repeat(BATCH, 1))  # few of them in this rank's shard
    (states,) = seen
    assert states.shape == (BATCH, SEQUENCE // TP, HIDDEN)
    assert len(torch.unique(states.flatten(0, 1), dim=0)) == BATCH * SEQUENCE // TP


def test_training_without_peers_stays_finite(recorder):
    model = sliced(recorder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        loss = model(input_ids=(ids := tokens()), labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < loss < 2 * torch.tensor(VOCABULARY).log()
    assert 0 < norm < 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gathers_in_its_dtype(recorder, dtype):
    model = sliced(recorder)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    gathered = {call.dtype for call in recorder.calls if call.collective == "all_gather"}
    assert str(dtype).removeprefix("torch.") in gathered
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())


EXPERTS, TOP_K = 4, 2


def mixture(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "num_experts_per_tok": TOP_K,
    }
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_the_experts_get_the_tokens_of_all_shards(recorder):
    """Each rank routes its shard; tokens, indices and weights are gathered, sums scattered."""
    one = mixture("Mixtral", num_local_experts=EXPERTS)
    slice_model(one, recorder.new_group("tp", range(TP)), "megatron", sequence=True)
    loss = one(input_ids=tokens(), labels=tokens()).loss
    forward = len(recorder.calls)
    loss.backward()
    mine = BATCH * SEQUENCE // TP
    gather, scatter = ("all_gather", mine * HIDDEN * 4), ("reduce_scatter", TP * mine * HIDDEN * 4)
    calls = [(call.collective, call.bytes) for call in recorder.calls]
    assert calls[3:7] == [  # after those of the embedding and of attention
        ("all_gather", mine * TOP_K * 8),  # which experts, int64
        gather,
        ("all_gather", mine * TOP_K * 4),
        scatter,
    ]
    in_backward = Counter(calls[forward:])
    assert in_backward[("reduce_scatter", TP * mine * TOP_K * 4)] == 1
    assert in_backward[("all_reduce", EXPERTS * HIDDEN * 4)] == 1  # the router's gradient
    assert in_backward[gather] == 2 + 2 + 1  # leaving attention, experts; embedding; weights of two
    assert in_backward[scatter] == 3


def test_sharded_experts_get_the_tokens_of_all_shards_after_the_all_to_all():
    recorder = Recorder(0, 4)
    recorder.start()
    one = mixture("Mixtral", num_local_experts=EXPERTS)
    world = World.of(tp=2, dp=2, ep=2)
    balanced = Routing("balanced")
    slice_to_rank(
        one, world, 0, recorder.new_group, SlicingOptions(sequence=True, routing=balanced)
    )
    one(input_ids=tokens(), labels=tokens()).loss.backward()
    recorder.stop()
    rows = BATCH * SEQUENCE // 2 * TOP_K  # tokens of this rank's shard, to each of two experts
    calls = [(call.group, call.collective, call.bytes) for call in recorder.calls]
    first = next(at for at, call in enumerate(calls) if call[0] == "ep")
    there = rows * HIDDEN * 4
    assert calls[first : first + 6] == [
        ("ep", "all_gather", EXPERTS * 8),  # how many tokens to which expert
        ("tp", "all_gather", EXPERTS * 8),
        ("ep", "all_to_all", there),
        ("tp", "all_gather", there),
        ("tp", "reduce_scatter", 2 * there),
        ("ep", "all_to_all", there),
    ]


LATENTS, ROTARY = 16, 8
LATENT = {"q_lora_rank": LATENTS, "kv_lora_rank": LATENTS, "qk_rope_head_dim": ROTARY,
          "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1,
          "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip


def test_latent_attention_gathers_its_latents_and_the_rotary_part(recorder):
    """As in Megatron-LM's multi_latent_attention.py; down projections run on the shard."""
    one = mixture("DeepseekV3", **LATENT)
    slice_model(one, recorder.new_group("tp", range(TP)), "megatron", sequence=True)
    widths: list[tuple[int, ...]] = []
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        part = one.model.layers[0].self_attn.get_submodule(name)
        part.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape)))
    loss = one(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    forward = len(recorder.calls)
    loss.backward()
    calls = [(call.collective, call.bytes) for call in recorder.calls]
    mine, all_of_it = BATCH * SEQUENCE // TP * 4, BATCH * SEQUENCE * 4
    assert widths == [(BATCH, SEQUENCE // TP, HIDDEN)] * 2
    assert calls[1:5] == [  # after that of the embedding
        ("all_gather", mine * LATENTS),  # of the queries
        ("all_gather", mine * ROTARY),
        ("all_gather", mine * LATENTS),  # of keys and values
        ("reduce_scatter", all_of_it * HIDDEN),
    ]
    backward = Counter(calls[forward:])
    assert backward[("all_gather", mine * LATENTS)] == 2  # again, for the weights' gradients
    assert backward[("reduce_scatter", all_of_it * LATENTS)] == 2
    assert backward[("reduce_scatter", all_of_it * ROTARY)] == 1
    down = {HIDDEN * LATENTS * 4, HIDDEN * (LATENTS + ROTARY) * 4}
    assert all(backward[("all_reduce", size)] == 1 for size in down)  # of replicated weights
    assert backward[("all_reduce", LATENTS * 4)] == 2  # of their norms


def test_latent_attention_with_other_uses_of_its_input_is_refused(recorder):
    one = mixture("DeepseekV3", **LATENT)
    slice_model(one, recorder.new_group("tp", range(TP)), "megatron", sequence=True)
    attention = one.model.layers[0].self_attn
    run = attention.forward
    attention.forward = lambda hidden_states, **given: run(hidden_states * 2, **given)
    with raises_code("sp-unsupported-module", naming="mul of hidden states"):
        one(input_ids=tokens())


QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def test_shared_experts_match_the_whole_model():
    one = mixture("Qwen2Moe", **QWEN, shared_expert_intermediate_size=32)
    batch = {"input_ids": tokens(), "labels": tokens()}
    for world in (World.of(tp=2), World.of(tp=2, dp=2, ep=2)):
        options = Options(**axes(world), sp=True)
        rows, why_not, notes = compare_slices(one, (), batch, options, lambda _: None)
        assert not why_not
        note_of(notes, "verify-model-routing", "--moe-routing balanced")
        assert {row.module for row in rows} >= {
            "Qwen2MoeSparseMoeBlock.shared_expert_gate",
            "Qwen2MoeMLP.gate_proj",
        }
        assert sum(row.breaches for row in rows) == 0


def test_a_sequence_that_does_not_divide_shows_the_arithmetic(recorder):
    with raises_code("sp-sequence-indivisible", naming="(18 = 4 x 4 + 2)"):
        sliced(recorder)(input_ids=tokens(18))


def test_unsupported_models_are_refused(recorder):
    with raises_code("sp-style", naming="--tp-style megatron"):
        sliced(recorder, "hf")
    embedded = torch.randn(BATCH, SEQUENCE, HIDDEN)
    with raises_code("sp-inputs-embeds", naming="inputs_embeds"):
        sliced(recorder)(inputs_embeds=embedded)
