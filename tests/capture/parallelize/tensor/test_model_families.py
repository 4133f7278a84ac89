"""Slices of recent families of transformers' models, compared with the whole model."""

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from encoder_decoder_job import encoder_decoder
from job_options import axes
from raised import raises_code

from onerank.capture import Options
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.experts.expert_parallel import shard_experts
from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model
from onerank.capture.parallelize.tensor.module_styles import TensorParallelStyle
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan, read_plan
from onerank.capture.verify.slice_check import compare_slices
from onerank.ir import World

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
          "topk_group": 1}  # fmt: skip

LATENT = {**ROUTED, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "q_lora_rank": 16,
          "kv_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8}  # fmt: skip

LINEAR = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Afmoe": {**EXPERTS, "head_dim": 8, "num_dense_layers": 1, "sliding_window": 8,
              "layer_types": ["sliding_attention", "full_attention"]},
    "Apertus": {},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
              "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8},
    "BioGpt": {},
    "Bloom": {"num_key_value_heads": 4},
    "CodeGen": {"num_attention_heads": 8, "num_key_value_heads": 8, "rotary_dim": 4},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "window_size": 5,
               "attention_types": [[["global", "local"], 1]]},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "FalconH1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8,
                 "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_rms_norm": True,
                 "ssm_multipliers": [0.5, 1.5, 2.0, 0.25, 0.75]},
    "FalconMamba": {"state_size": 8, "time_step_rank": 4},
    "Persimmon": {},
    "StableLm": {},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "Doge": {},
    "GraniteMoeHybrid": {"num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_heads": 8,
                         "shared_intermediate_size": 32, "mamba_d_head": 8, "mamba_d_state": 8,
                         "mamba_chunk_size": 8, "layer_types": ["mamba", "attention"]},
    "GraniteMoeShared": {"num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 32},
    "HunYuanMoEV1": {"head_dim": 8, "num_experts": 4, "moe_topk": [2, 2]},
    "Jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "MiMoV2Flash": {**EXPERTS, "head_dim": 8},
    "MiniCPM3": LATENT,
    "MiniMaxM3VLText": {**EXPERTS, "head_dim": 8, "num_local_experts": 4, "n_shared_experts": 1,
                        "shared_intermediate_size": 32, "dense_intermediate_size": 64,
                        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8, "rotary_dim": 4},
    "NanoChat": {},
    "Roberta": {"is_decoder": True, "type_vocab_size": 1},
    "DeepseekV3": LATENT,
    "DiffLlama": {},
    "Dots3NoteText": {**LATENT, "num_hidden_layers": 3, "qk_rope_head_dim": 4, "head_dim": 12,
                      "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2,
                      "shared_experts_intermediate_size": 16, "sliding_window": 8,
                      "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
                      "swa_q_lora_rank": 16, "swa_kv_lora_rank": 8, "swa_head_dim": 16,
                      "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "Ernie4_5": {"head_dim": 8},
    "Gemma3nText": {"head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8,
                    "sliding_window": 8, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": 64, "intermediate_size": [64] * 4,
                    "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4Text": {"head_dim": 8, "global_head_dim": 8, "num_hidden_layers": 4,
                   "num_kv_shared_layers": 2, "sliding_window": 8,
                   "layer_types": ["sliding_attention", "full_attention"] * 2,
                   "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5},
    "Glm4Moe": {**ROUTED, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Granite": {},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "BailingHybrid": {**LATENT, "num_experts": 4, "num_experts_per_tok": 2,
                      "moe_intermediate_size": 16, "linear_num_heads": 4, "linear_head_dim": 8,
                      "layer_types": ["linear_attention", "full_attention"]},
    "KimiLinear": {**LATENT, "q_lora_rank": None, "num_experts": 4, "num_experts_per_tok": 2,
                   "n_shared_experts": 1, "moe_intermediate_size": 16, "linear_num_heads": 4,
                   "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "Lfm2Moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3": {"layer_types": ["conv", "full_attention"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Llama4Text": {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 64,
                   "moe_layers": [1], "attention_chunk_size": 8},
    "LongcatFlash": {**LATENT, "num_layers": 2, "head_dim": 8, "ffn_hidden_size": 64,
                     "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "Olmo": {},
    "Olmo3": {"sliding_window": 5},
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {},
    "Phimoe": {"num_local_experts": 4},
    "NemotronH": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
                  "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
                  "chunk_size": 8, "head_dim": 8},
    "OlmoHybrid": {key: value for key, value in LINEAR.items() if "expert" not in key},
    "Qwen3Next": LINEAR,
    "Qwen3_5Text": {key: value for key, value in LINEAR.items() if "expert" not in key},
    "SmolLM3": {},
}  # fmt: skip

TENSOR, STAGES, SEQUENCE = {"tp": 2}, {"pp": 2}, {"tp": 2, "sp": 1}

SHARED = {"dp": 2, "ep": 2}

BOTH, ALL = {**TENSOR, **SHARED}, {**SEQUENCE, **SHARED}

AGREE = [
    ("Afmoe", ALL),  # a gate of the attention's output; no plan but for embedding and head
    ("Apertus", TENSOR),  # an activation with two weights
    *((kind, TENSOR) for kind in ("GPTJ", "GPTNeo", "Persimmon", "StableLm")),  # onerank's plans
    ("Bloom", TENSOR),  # a bias for each head and sequence
    ("Bloom", {"tp": 4}),
    ("CodeGen", {**SEQUENCE, "pp": 2}),  # four blocks of queries, values and keys
    ("Dots3NoteText", TENSOR),  # an indexer, whole on each rank
    ("Falcon", {**SEQUENCE, "pp": 2}),  # queries, their key and its value together
    ("Mpt", {**SEQUENCE, "pp": 2}),  # a bias for each head, q, k and v in one projection
    *((kind, SEQUENCE) for kind in ("BioGpt", "OPT", "XGLM")),  # an MLP in the layer itself
    ("OPT", STAGES),  # lists its final norm before its layers
    ("DeepseekV3", BOTH),
    ("DeepseekV3", ALL),
    ("DeepseekV3", {**SEQUENCE, "pp": 2}),
    ("DeepseekV3", STAGES),
    ("Ernie4_5", TENSOR),
    ("Gemma2", TENSOR),
    ("Gemma2", STAGES),
    ("Gemma3nText", TENSOR),  # layers that share keys, narrow layers that stay whole
    ("Gemma4Text", TENSOR),
    ("Glm4Moe", TENSOR),
    ("Glm4Moe", SHARED),
    ("GptOss", BOTH),  # a sink per head, experts with biases
    ("GptOss", ALL),
    ("GptOss", STAGES),
    ("Granite", TENSOR),
    ("GraniteMoe", TENSOR),  # whose plan leaves attention out
    ("GraniteMoeShared", SEQUENCE),
    ("HunYuanMoEV1", BOTH),  # a norm for each head, a router within a module
    ("Llama4Text", STAGES),  # asks the embedding where its weights are
    ("Llama4Text", SHARED),  # whose experts compute every token
    ("Llama4Text", BOTH),
    ("Llama4Text", {"cp": 2}),
    ("LongcatFlash", TENSOR),  # experts that return their input; two attentions in a layer
    ("LongcatFlash", SEQUENCE),  # whose routers' weights are read past their module
    ("LongcatFlash", {"cp": 2}),
    ("MiMoV2Flash", TENSOR),  # sinks in some layers, values wider than keys
    ("MiniMaxM3VLText", TENSOR),  # gathers all round its attention; shared experts packed
    ("MiniCPM3", STAGES),  # divides hidden states between norm and head
    ("Olmo", TENSOR),
    ("Olmo", SEQUENCE),
    ("Olmo", STAGES),  # whose final norm has no weights
    ("Olmo3", TENSOR),
    ("Olmo3", {**SEQUENCE, "pp": 2}),  # a norm over all heads, gathered
    ("Olmo3", {"cp": 2}),
    ("Phi", STAGES),  # drops out what it embeds by a module behind its layers
    ("Phi3", TENSOR),
    ("Phimoe", BOTH),
    ("Bamba", TENSOR),  # the groups of Mamba 2, each with its heads
    ("Bamba", SEQUENCE),
    ("FalconH1", TENSOR),  # attention and Mamba 2 in each layer, factors of the projection's parts
    ("FalconMamba", TENSOR),  # norms without weights between Mamba 1's projections
    ("Jamba", TENSOR),  # channels of Mamba 1, whose B and C are sums over the ranks
    ("Jamba", SEQUENCE),
    ("BailingHybrid", TENSOR),  # as Kimi-Linear, with a decay from one projection
    ("KimiLinear", TENSOR),  # a decay for each channel of a head, from a narrow projection
    ("KimiLinear", SEQUENCE),
    ("Lfm2", TENSOR),  # short convolutions
    ("Lfm2", SEQUENCE),
    ("Lfm2Moe", TENSOR),  # experts in some layers
    ("Lfm3", TENSOR),  # a gate for each head
    ("NemotronH", TENSOR),  # an MLP without a gate
    ("OlmoHybrid", TENSOR),  # a projection for each operand of linear attention
    ("Qwen3Next", TENSOR),  # linear attention by heads, a fused projection by key heads
    ("Qwen3Next", {"tp": 4}),  # two key heads: gathered around linear attention
    ("Qwen3Next", SEQUENCE),
    ("Qwen3_5Text", TENSOR),  # three parts in a projection of linear attention
    ("Qwen3Next", SHARED),
    ("Qwen3Next", STAGES),  # a cache of another sort for each layer
    ("SmolLM3", TENSOR),
]


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **FAMILIES[kind]})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


def compared(
    kind: str,
    sizes: dict[str, int],
    plan: ShardingPlan | None = None,
    tp_style: TensorParallelStyle = "megatron",
) -> Any:
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    world = World.of(**{axis: size for axis, size in sizes.items() if axis != "sp"})
    options = Options(
        **axes(world), sp="sp" in sizes, moe_routing="model", sharding_plan=plan, tp_style=tp_style
    )
    rows, why_not, _ = compare_slices(
        model(kind), (), {"input_ids": ids, "labels": ids}, options, lambda _: None
    )
    assert not why_not
    return rows


@pytest.mark.parametrize(("kind", "sizes"), AGREE)
def test_slices_match_the_whole_model(kind, sizes):
    rows = compared(kind, sizes)
    assert not [row for row in rows if row.breaches]
    assert {row.what for row in rows} >= {"loss", "gradients", "weights"}


@pytest.mark.parametrize(
    ("kind", "sizes", "code", "names"),
    [
        (
            *("Bloom", SEQUENCE, "sp-model-structure"),
            ("transformer.word_embeddings_layernorm",),
        ),
        (
            *("CodeGen", {"tp": 4}, "plan-multiple-indivisible"),
            ("--tp 4 times 4", "num_attention_heads = 8", "(8 = 16 x 0 + 8)"),
        ),
        ("DiffLlama", TENSOR, "tp-unplanned-parameters", ("model.layers.0.self_attn",)),
        ("Dots3NoteText", {"tp": 4}, "tp-indivisible-heads", ("(2 = 4 x 0 + 2)",)),
        ("Dots3NoteText", {"cp": 2}, "cp-layer-type", ("indexed_attention",)),
        ("LongcatFlash", SHARED, "ep-no-experts", ("LongcatFlashForCausalLM", "4 experts")),
        ("Doge", {"cp": 2}, "cp-own-mask", ("DogeAttention", "8 keys", "16")),
        ("Jamba", STAGES, "pp-layer-types", ("JambaConfig", "layer_types")),
        ("Llama4Text", SEQUENCE, "sp-dense-experts", ("model.layers.1.feed_forward.experts",)),
        ("NanoChat", STAGES, "pp-norm-twice", ("--pp: NanoChatForCausalLM",)),
        ("NanoChat", SEQUENCE, "pp-norm-twice", ("--sp: NanoChatForCausalLM",)),
        ("Roberta", {"cp": 2}, "cp-padding-positions", ("RobertaForCausalLM",)),
        ("Qwen3Next", {"cp": 2}, "cp-layer-type", ("linear_attention",)),
    ],
)
def test_unsupported_models_are_refused(kind, sizes, code, names):
    with raises_code(code, naming=names):
        compared(kind, sizes)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("GraniteMoeHybrid", "mamba.in_proj")],
)
def test_a_refusal_shows_a_plan_that_completes_the_models_plan(kind, missing, tmp_path):
    with raises_code("tp-unplanned-module", naming=(missing, "--sharding-plan FILE")) as refused:
        compared(kind, TENSOR)
    plan = tmp_path / "plan.toml"
    plan.write_text(str(refused.value).partition("\n\n")[2])
    assert not [row for row in compared(kind, TENSOR, read_plan(plan)) if row.breaches]


def test_head_gates_of_latent_attention_in_the_hf_style():
    """The number of heads and the rotary width differ by layer."""
    rows = compared("Dots3NoteText", TENSOR, tp_style="hf")
    assert not [row for row in rows if row.breaches]


def test_nonlinear_operations_on_embeddings_are_refused():
    """Under --sp embeddings are partial sums before the first layer."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    embedding = llama.model.embed_tokens
    embedding.register_forward_hook(lambda module, _, output: output + 1)
    ids = torch.randint(3, 64, (2, 16))
    options = Options(tp=2, sp=True)
    with raises_code("sp-work-before-layer") as caught:
        compare_slices(llama, (), {"input_ids": ids, "labels": ids}, options, lambda _: None)
    assert "AddBackward0" in str(caught.value)


@pytest.mark.parametrize("tp_style", ["megatron", "hf"])
def test_an_encoder_with_a_plan(tp_style):
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SHAPE))
    ids = torch.randint(3, 64, (2, 16))
    mask = torch.ones_like(ids).index_fill(1, torch.arange(12, 16), 0)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    options = Options(tp=2, tp_style=tp_style)
    rows, why_not, _ = compare_slices(bert, (), batch, options, lambda _: None)
    assert not why_not
    assert not [row for row in rows if row.breaches]


@pytest.mark.parametrize(
    ("kind", "tp_style"),
    [("T5", "megatron"), ("T5", "hf"), ("MT5", "megatron"), ("UMT5", "megatron"),
     ("Whisper", "megatron"), ("Whisper", "hf"), ("Bart", "megatron"), ("Marian", "megatron")],
)  # fmt: skip
@pytest.mark.parametrize("labelled", [True, False])
def test_an_encoder_and_its_decoder(kind, tp_style, labelled):
    one, batch = encoder_decoder(kind)
    if not labelled:
        batch["decoder_input_ids"] = batch.pop("labels").clamp(min=0)
    options = Options(tp=2, tp_style=tp_style)
    rows, why_not, _ = compare_slices(one, (), batch, options, lambda _: None)
    assert not why_not
    assert not [row for row in rows if row.breaches]
    assert {row.what for row in rows} == {"loss", "logits", "gradients", "weights"}


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5", "Whisper", "Bart", "Marian"])
def test_an_encoder_and_its_decoder_under_sequence_parallelism(kind):
    one, batch = encoder_decoder(kind)
    options = Options(tp=2, sp=True)
    rows, why_not, _ = compare_slices(one, (), batch, options, lambda _: None)
    assert not why_not
    assert not [row for row in rows if row.breaches]
    assert {row.what for row in rows} == {"loss", "logits", "gradients", "weights"}


@pytest.mark.parametrize("kind", ["T5", "Bart", "Whisper"])
def test_unsupported_encoder_decoders_are_refused(kind):
    one, batch = encoder_decoder(kind)
    options = Options(cp=2)
    with raises_code("encoder-decoder-unsupported"):
        compare_slices(one, (), batch, options, lambda _: None)


def communicated(**options: Any) -> Counter[tuple[str, int]]:
    one, batch = encoder_decoder("T5")
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        slice_model(one, recorder.new_group("tp", range(2)), "megatron", **options)
        output = one(**batch)
        output.loss.backward()
        if options:
            with raises_code("output-not-available", naming="encoder_last_hidden_state"):
                output.encoder_last_hidden_state.mean()
    finally:
        recorder.stop()
    return Counter((call.collective, call.bytes) for call in recorder.calls)


ENCODED, DECODED, BIAS = 2 * 16 * 32 * 4, 2 * 8 * 32 * 4, 2 * 4  # heads of a rank x 4 bytes


def test_collectives_of_an_encoder_decoder():
    assert communicated() == {
        # its embedding and two layers of two sums, there and back; a gradient from each layer that
        # attends to it
        ("all_reduce", ENCODED): 1 + 4 + 4 + 2,
        ("all_reduce", DECODED): 1 + 6 + 6 + 1,  # two layers of three sums; the head
        ("all_reduce", 2 * 8 * 4): 3,  # of the loss
        ("all_gather", 16 * 16 * BIAS): 1,  # of the biases' gradients
        ("all_gather", 8 * 8 * BIAS): 1,
    }


def test_collectives_of_an_encoder_decoder_under_sequence_parallelism():
    """Each decoder layer gathers the encoder's output, forward and backward."""
    assert communicated(sequence=True) == {
        ("reduce_scatter", ENCODED): 1 + 4 + 4 + 2,
        # a third for the weights' gradients; the gradient of the encoder's biases is as large
        ("all_gather", ENCODED // 2): 4 + 4 + 4 + 1 + 2 + 2 + 1,
        ("reduce_scatter", DECODED): 1 + 6 + 6 + 1,
        ("all_gather", DECODED // 2): 6 + 6 + 6 + 1 + 1,  # T5 scales what its head gets
        ("all_reduce", 32 * 4): 5 + 7,  # gradients of the norms
        ("all_reduce", 2 * 8 * 4): 3,
        ("all_gather", 8 * 8 * BIAS): 1,
    }


def test_logits_read_in_addition_to_the_loss_are_whole():
    one, batch = encoder_decoder("Whisper")
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        slice_model(one, recorder.new_group("tp", range(2)), "megatron")
        output = one(**batch)
        assert one.config.vocab_size == 64
        before = len(recorder.calls)
        assert output.logits.shape == (2, 8, 64)
        assert [call.collective for call in recorder.calls[before:]] == ["all_gather"]
    finally:
        recorder.stop()


def test_collectives_of_experts_that_compute_every_token():
    one = model("Llama4Text")
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        shard_experts(one, recorder.new_group("ep", range(2)))
        ids = torch.randint(3, 64, (2, 16))
        one(input_ids=ids, labels=ids).loss.backward()
    finally:
        recorder.stop()
    tokens, scores = 32 * 32 * 4, 32 * 2 * 4  # of a rank
    assert Counter((call.collective, call.bytes) for call in recorder.calls) == {
        ("all_gather", tokens): 2,  # forward, and the gradient of what is scattered
        ("all_gather", scores): 1,
        ("reduce_scatter", 2 * tokens): 2,
        ("reduce_scatter", 2 * scores): 1,
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_biases_passed_as_a_mask(attention):
    torch.manual_seed(0)
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, parallel_attn=False, attn_implementation=attention,
    )  # fmt: skip
    ids = torch.randint(3, 64, (2, 16))
    mask = torch.ones_like(ids).index_fill(1, torch.arange(12, 16), 0)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    options = Options(tp=2)
    one = transformers.FalconForCausalLM(config)
    rows, why_not, _ = compare_slices(one, (), batch, options, lambda _: None)
    assert not why_not
    assert not [row for row in rows if row.breaches]


def test_a_model_that_bypasses_its_linear_layers_is_refused():
    shape = {**SHAPE, "pretraining_tp": 2, "slow_but_exact": True}
    one = transformers.BloomForCausalLM(transformers.BloomConfig(**shape))
    ids = torch.randint(3, 64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    with raises_code("tp-slow-but-exact", naming=("pretraining_tp = 2", "slow_but_exact=False")):
        compare_slices(one, (), batch, Options(tp=2), lambda _: None)


def test_a_vision_tower_stays_whole():
    text = {**SHAPE, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1],
                                         "rope_theta": 10000.0}}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 4,
              "out_hidden_size": 32, "patch_size": 4, "fullatt_block_indexes": [0]}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    one = transformers.Qwen2_5_VLForConditionalGeneration(config)
    ids = torch.randint(3, 60, (2, 16))
    options = Options(tp=2)
    rows, why_not, _ = compare_slices(
        one, (), {"input_ids": ids, "labels": ids}, options, lambda _: None
    )
    assert not why_not
    assert not [row for row in rows if row.breaches]
