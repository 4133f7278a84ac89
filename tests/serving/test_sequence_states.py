"""`capture serve` of models with a state of constant size per sequence: results, bytes, FLOPs."""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from own_process import run_command
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import onerank
from onerank.annotate import load_gpu
from onerank.annotate.op_costs.state_operators import DELTA_CHUNK
from onerank.capture.options import Options
from onerank.capture.serving import engine_step, sequence_states, state_operators
from onerank.capture.serving.attention_windows import CacheNeed
from onerank.capture.serving.build_model import build_model, materialise, read_config
from onerank.capture.serving.compositions import Composition
from onerank.capture.serving.engine_step import RepeatableStep, running
from onerank.capture.serving.latent_attention import latent_modules
from onerank.capture.serving.measure_grid import _served, loaded_server
from onerank.ir.errors import CaptureError
from onerank.serving.build_bundle import recost_bundle
from onerank.serving.bundle import Bundle, read_bundle
from onerank.serving.simulators.aiconfigurator import export_aiconfigurator
from onerank.serving.simulators.options import AiconfiguratorOptions, LinkedSimulatorOptions
from onerank.serving.simulators.sglang_sim import export_sglang_sim

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "dtype": "bfloat16",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4,
}  # fmt: skip

# Layers, heads, states and convolutions of the published configurations; other sizes are small.
QWEN3_NEXT_80B = {
    # huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct
    **SMALL, **EXPERTS, "model_type": "qwen3_next", "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "shared_expert_intermediate_size": 32, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
GRANITE_4_SMALL = {
    # huggingface.co/ibm-granite/granite-4.0-h-small
    **SMALL, **EXPERTS, "model_type": "granitemoehybrid", "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "shared_intermediate_size": 32, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 128,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
}  # fmt: skip
KIMI_LINEAR_48B = {
    # huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Base
    **SMALL, **EXPERTS, "model_type": "kimi_linear", "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_num_heads": 32,
    "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "n_shared_experts": 1,
    "layer_types": ["full_attention" if layer in (3, 7, 11, 15, 19, 23, 26) else "linear_attention"
                    for layer in range(27)],
}  # fmt: skip
NEMOTRON_H_8B = {
    # huggingface.co/nvidia/Nemotron-H-8B-Base-8K: 24 layers of Mamba 2, 4 of attention, 24 MLPs
    **SMALL, "model_type": "nemotron_h", "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
JAMBA_52B = {
    # huggingface.co/ai21labs/Jamba-v0.1: a layer of attention in eight; 2 x 4,096 channels. The
    # first 8 of its 32 layers, which the others repeat.
    **SMALL, **EXPERTS, "model_type": "jamba", "num_hidden_layers": 8, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8,
    "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
FALCON_MAMBA_7B = {
    # huggingface.co/tiiuae/falcon-mamba-7b, 2 of its 64 equal layers
    **SMALL, "model_type": "falcon_mamba", "num_hidden_layers": 2, "hidden_size": 4096,
    "intermediate_size": 8192, "state_size": 16, "conv_kernel": 4, "time_step_rank": 8,
}  # fmt: skip


def built(directory: Path, config: dict[str, Any]) -> Any:
    """Return a model with weights on the CPU."""
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    model = build_model(read_config(path), "cpu", shapes_only=False)
    materialise(model, "cpu")
    return model


@pytest.mark.parametrize(
    ("config", "per_token", "state_bytes"),
    [
        # 12 layers of 2 key-value heads of 256. 36 layers: the last 3 inputs of a convolution of
        # 2 x 16 x 128 + 32 x 128 channels, and 32 states of 128 x 128; 2 bytes each.
        (QWEN3_NEXT_80B, 12 * 2 * 2 * 256 * 2, 36 * 2 * (3 * 8192 + 32 * 128 * 128)),
        # 36 layers: 128 x 64 + 2 x 128 channels, and 128 states of 64 x 128.
        (GRANITE_4_SMALL, 4 * 2 * 8 * 128 * 2, 36 * 2 * (3 * 8448 + 128 * 64 * 128)),
        # 7 layers cache a latent vector of 512 and a rotary part of 64. 20 layers: 3 x 32 x 128
        # channels, and 32 states of 128 x 128 in float32.
        (KIMI_LINEAR_48B, 7 * 576 * 2, 20 * (2 * 3 * 12288 + 4 * 32 * 128 * 128)),
        # 24 layers: 128 x 64 + 2 x 8 x 128 channels. Its configuration's default is a state in
        # float32; a configuration may name another dtype.
        (NEMOTRON_H_8B, 4 * 2 * 8 * 128 * 2, 24 * (2 * 3 * 10240 + 4 * 128 * 64 * 128)),
        ({**NEMOTRON_H_8B, "mamba_ssm_cache_dtype": "bfloat16"}, 4 * 2 * 8 * 128 * 2,
         24 * 2 * (3 * 10240 + 128 * 64 * 128)),
    ],
    ids=["Qwen3-Next", "Granite 4", "Kimi Linear", "Nemotron-H", "Nemotron-H, bfloat16"],
)  # fmt: skip
def test_the_cache_of_published_models(
    tmp_path: Path, config: dict[str, Any], per_token: int, state_bytes: int
):
    served, _ = _served(built(tmp_path, config), Options(), "cpu", None, None)
    assert served.cache_need == CacheNeed(per_token, (), state_bytes)
    assert served.cache_need.of_sequence(999) == 1000 * per_token + state_bytes
    step = Composition(decodes=3, decode_context=9, prefills=2, prefill_tokens=8)
    assert served.cache_need.of_step(step) == 46 * per_token + 5 * state_bytes


@pytest.mark.parametrize(
    ("config", "per_token", "state_bytes"),
    [
        # A layer of 8 key-value heads of 128. 7 layers: the last 3 inputs of a convolution and 16
        # numbers for each of 8,192 channels; 2 bytes each.
        (JAMBA_52B, 2 * 8 * 128 * 2, 7 * 2 * 8192 * (3 + 16)),
        (FALCON_MAMBA_7B, 0, 2 * 2 * 8192 * (3 + 16)),
    ],
    ids=["Jamba", "Falcon-Mamba"],
)
def test_the_states_of_published_models_with_mamba_1(
    tmp_path: Path, config: dict[str, Any], per_token: int, state_bytes: int
):
    """On shapes alone: their channels follow from hidden sizes whose weights would be large."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_command(
        "capture", "serve", tmp_path / "config.json", "--device", "none", "--tp", 8,
        "-o", tmp_path / "bundle", "--grid", "decode: batch=1 context=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    memory = read_bundle(tmp_path / "bundle").manifest.memory
    assert memory.kv_bytes_per_token == per_token // 8
    assert memory.state_bytes_per_sequence == state_bytes // 8


FEW = {**SMALL, **EXPERTS, "num_hidden_layers": 4, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 16, "dtype": "float32"}  # fmt: skip
FEW_QWEN = {
    **FEW, "model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
FEW_BAMBA = {
    **FEW, "model_type": "bamba", "attn_layer_indices": [1, 3], "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4,
}  # fmt: skip
FEW_KIMI = {
    **FEW, "model_type": "kimi_linear", "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "n_shared_experts": 1,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
FEW_JAMBA = {
    **FEW, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1,
    "expert_layer_period": 2, "mamba_d_state": 8, "mamba_dt_rank": 8,
}  # fmt: skip
FEW_FALCON_MAMBA = {**FEW, "model_type": "falcon_mamba", "state_size": 8, "time_step_rank": 4}
FEW_MINIMAX = {
    **FEW, "model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 2,
    "block_size": 4,
}  # fmt: skip
FEW_RECURRENT_GEMMA = {
    **FEW, "model_type": "recurrent_gemma", "lru_width": 64, "num_key_value_heads": 1,
    "block_types": ["recurrent", "attention"], "attention_window_size": 16,
}  # fmt: skip
FEW_FALCON_H1 = {
    **FEW, "model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_rms_norm": True,
}  # fmt: skip
FEW_LFM2 = {**FEW, "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}


def recorded_latents(model: Any) -> dict[int, torch.Tensor]:
    """Return a dictionary that receives what each layer of latent attention expands.

    By layer, the latent vectors with the rotary parts. Not from the cache: in transformers 5.17,
    layers with an indexer cache expanded keys.
    """
    latents: dict[int, torch.Tensor] = {}

    def record(layer: int, expand: Any, *parts: torch.Tensor) -> Any:
        latents[layer] = torch.cat(parts, dim=-1)
        return expand(*parts)

    for module in latent_modules(model):
        module.expand_kv = functools.partial(record, module.layer_idx, module.expand_kv)
    return latents


def step_like_transformers(
    directory: Path, config: dict[str, Any], composition: Composition
) -> RepeatableStep:
    """Return a step of a served model, after a comparison of its logits with transformers'.

    The caches and states of the step hold what transformers computes for the tokens before it.
    """
    model, c = built(directory, config), composition
    step = RepeatableStep.of(model, composition, 128, "cpu")
    engine_step.give_attention_scopes(step)
    other = read_config(directory / "config.json")
    reference = AutoModelForCausalLM.from_config(other, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    latents = recorded_latents(reference)
    expected: list[torch.Tensor] = []
    tokens = step.arguments["input_ids"][0]
    chunk = c.prefills * c.prefill_tokens
    for part, count, new, context, ids in (
        ("prefill", c.prefills, c.prefill_tokens, c.prefill_context, tokens[:chunk]),
        ("decode", c.decodes, 1, c.decode_context, tokens[chunk:]),
    ):
        if not count:
            continue
        lightning = config["model_type"] == "minimax"
        cache = MiniMaxCache() if lightning else DynamicCache(config=other)
        before_ids = torch.randint(0, 128, (count, context))
        # transformers 5.24 renamed the argument, and drops that of another name.
        name = next(key for key, value in step.arguments.items() if value is step.cache)
        with torch.no_grad():
            reference(before_ids, **{name: cache}, use_cache=True)
        for (layer, of_part, value), cached in step.cache.tensors.items():
            if of_part == part:
                held = cache.layers[layer]
                before = held.values if value else held.keys
                cached[:, :, :context] = latents.get(layer, before)
        for (layer, of_part, kind), state in step.cache.states.tensors.items():
            if of_part == part and lightning:
                state.copy_(cache.linear_cache[layer])
            elif of_part == part and config["model_type"] == "recurrent_gemma":
                block = reference.model.layers[layer].temporal_block
                convolution = kind == "convolution"
                state.copy_(block.conv1d_state if convolution else block.rg_lru.recurrent_states)
            elif of_part == part:
                held = cache.layers[layer]
                before = held.conv_states if kind == "convolution" else held.recurrent_states
                before = next(iter(before.values())) if isinstance(before, dict) else before[0]
                state.copy_(before[..., before.shape[-1] - state.shape[-1] :])
        with torch.no_grad():
            # Without a cache: transformers' scan of Mamba 1 does not read the state before.
            output = reference(torch.cat((before_ids, ids.view(count, new)), dim=1))
        expected.append(output.logits[:, -1])
    with torch.no_grad(), running(step.cache), step.cache.states.running():
        logits = model(**step.arguments).logits[0]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)
    return step


@pytest.mark.parametrize(
    "config",
    [FEW_QWEN, FEW_BAMBA, FEW_JAMBA, FEW_FALCON_MAMBA, FEW_KIMI, FEW_LFM2, FEW_MINIMAX,
     FEW_RECURRENT_GEMMA],
    ids=["delta rule", "Mamba 2", "Jamba", "Mamba 1", "KDA", "short convolution", "lightning",
         "RecurrentGemma"],
)  # fmt: skip
@pytest.mark.parametrize("composition", [Composition(3, 7, 2, 5, 4), Composition(2, 6)], ids=str)
def test_a_step_computes_what_transformers_computes(
    tmp_path: Path, config: dict[str, Any], composition: Composition
):
    assert step_like_transformers(tmp_path, config, composition).cache.states.tensors


def test_parts_of_mamba_1_run_apart_and_are_joined_in_the_layout_of_the_scan():
    """Between the projections of a layer, each part is alone; the scan writes channels first."""
    layer = sequence_states._StatefulLayer(sequence_states._Parts(), None)
    rows, projected, seen = torch.randn(1, 8, 6), [], []
    mixer = SimpleNamespace(in_proj=lambda x: x, out_proj=lambda x: projected.append(x) or x)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        scanned = layer.by_part(lambda _, part: part, self.in_proj(x))
        return self.out_proj(scanned.transpose(1, 2).contiguous().transpose(1, 2))

    with sequence_states.SequenceStates(Composition(3, 7, 1, 5, 4)).running():
        out = layer.mamba_mixer(mixer, forward, rows)
    torch.testing.assert_close(out, rows)
    assert (seen, len(projected), projected[0].stride()[1:]) == ([5, 3], 1, (1, 8))


def test_layers_that_share_keys_cache_none(tmp_path: Path):
    """The last two of Gemma-3n's layers attend to the keys of the last layer of their type."""
    config = {
        **FEW, "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 6,
        "laurel_rank": 8, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
        "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": [64] * 6,
    }  # fmt: skip
    cache = step_like_transformers(tmp_path, config, Composition(3, 4, 2, 3, 2)).cache
    assert {layer for layer, _, _ in cache.tensors} == {0, 1, 2, 3}
    assert {layer: window.tokens for layer, window in cache.windows.items()} == {0: 6, 2: 6}
    per_token = 2 * 2 * 16 * 4
    with loaded_server(tmp_path / "config.json", Options()) as server:
        need = server.served.cache_need
        assert need.bytes_per_token == 4 * per_token
        assert [(window.layers, window.bytes_per_token) for window in need.windowed] == [
            (2, 2 * per_token)
        ]


GRID = (
    "decode: batch=2 context=100; decode: batch=32 context=100; prefill: tokens=128 context=0; "
    "prefill: tokens=512 context=0; mixed: tokens=64 context=0 batch=4 decode_context=100"
)
"""Two steps of decodes, two of a prefill, and a mixed one: points 1 to 5."""

CONTEXTS = (
    "decode: batch=2 context=100,1000; decode: batch=32 context=100; "
    "prefill: tokens=128 context=0,1000; prefill: tokens=512 context=0; "
    "mixed: tokens=64 context=0 batch=4 decode_context=100"
)
"""Also a decode and a prefill after more tokens: points 2 and 5 of 7."""


def served_bundle(
    directory: Path, config: dict[str, Any], *options: str, grid: str = GRID
) -> Bundle:
    """Return the bundle of a model without a device."""
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    done = run_command(
        "capture", "serve", directory / "config.json", "--device", "none", "-o",
        directory / "bundle", *options, "--grid", grid,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_bundle(directory / "bundle")


def summed(bundle: Bundle, row: int, suffix: str) -> tuple[int, int]:
    """Return the FLOPs and bytes of the modules with a suffix in a step."""
    rows = [
        kernel
        for kernel in bundle.kernel_rows
        if kernel.row == row and (kernel.module or "").endswith(suffix)
    ]
    assert rows, suffix
    return sum(kernel.flops for kernel in rows), sum(kernel.bytes for kernel in rows)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the bundle of a Qwen3-Next with one layer of each kind."""
    config = {
        **FEW_QWEN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    return served_bundle(tmp_path_factory.mktemp("qwen"), config, grid=CONTEXTS)


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the bundle of a Bamba with one layer of each kind."""
    config = {
        **FEW_BAMBA, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_chunk_size": 64,
    }  # fmt: skip
    return served_bundle(tmp_path_factory.mktemp("bamba"), config, grid=CONTEXTS)


def test_the_work_of_the_delta_rule_by_hand(qwen: Bundle):
    # 96 channels, 4 inputs each and SiLU; 4 heads with a state of 16 x 8.
    convolution, update = (2 * 4 + 3) * 96, 7 * 4 * 16 * 8
    # Chunks of 64: keys with keys and queries, the inverse and its two products, three products
    # with the state, and the scores times values.
    scan = 4 * (6 * 64 * 16 + 4 * 64 * 8 + 6 * 16 * 8 + 64 * 64 // 3)
    for row, decodes in ((1, 2), (2, 2), (3, 32), (7, 4)):
        flops, moved = summed(qwen, row, ".step_state.decode")
        assert flops == decodes * (convolution + update)
        # The convolution reads rows, its weight and states, and writes rows and states. The copies
        # and the update have queries and keys of 2 x 16, values of 4 x 8, a decay in float32 and a
        # rate, and the states read and written.
        rows = decodes * 2 * (2 * 96 + 2 * 3 * 96) + 2 * 96 * 4
        states = decodes * (2 * (2 * 32 + 2 * 32 + 4) + 4 * 4 + 2 * 2 * 4 * 16 * 8)
        # transformers 5.17 splits the rows into contiguous values; 5.23 does not.
        copied = 2 * 32 + (32 if Version(transformers.__version__) >= Version("5.18") else 0)
        assert moved == rows + states + decodes * 2 * 2 * copied
    for row, tokens in ((4, 128), (5, 128), (6, 512), (7, 64)):
        assert summed(qwen, row, ".step_state.prefill")[0] == tokens * (convolution + scan)
    # Projections: queries, keys, values and gates of 32 features, and 2 for each of 4 heads.
    for row, tokens in ((1, 2), (6, 512)):
        assert summed(qwen, row, ".in_proj_qkvz")[0] == 2 * tokens * 64 * 4 * 32
        assert summed(qwen, row, ".in_proj_ba")[0] == 2 * tokens * 64 * 8
        assert summed(qwen, row, ".linear_attn.out_proj")[0] == 2 * tokens * 32 * 64


def test_the_work_of_lightning_attention_by_hand(tmp_path: Path):
    bundle = served_bundle(tmp_path, {**FEW_MINIMAX, "num_hidden_layers": 2,
                                      "layer_types": ["linear_attention", "full_attention"]},
                           "--tp", "2")  # fmt: skip
    memory = bundle.manifest.memory
    # Two heads of 16 x 16, and one key-value head of 16, of a rank.
    assert memory.state_bytes_per_sequence == 2 * 2 * 16 * 16
    assert memory.kv_bytes_per_token == 2 * 2 * 16
    for row, decodes in ((1, 2), (2, 32), (5, 4)):
        flops, moved = summed(bundle, row, ".step_state.decode")
        assert flops == decodes * 2 * 5 * 16 * 16
        # Queries, keys, values and results in float32; slopes, and states read and written.
        assert moved == decodes * 4 * 4 * 2 * 16 + 2 * 2 + decodes * 2 * 2 * 2 * 16 * 16
    # Blocks of 256 are computed whole, in parts of 32 up to a query's own.
    of_token = 2 * 144 * 32 + 4 * 16 * 16
    for row, tokens in ((3, 256), (4, 512), (5, 256)):
        assert summed(bundle, row, ".step_state.prefill")[0] == 2 * tokens * of_token
    for row, tokens in ((1, 2), (4, 512)):
        assert summed(bundle, row, ".self_attn.qkv_proj")[0] == 2 * tokens * 64 * 3 * 32
        assert summed(bundle, row, ".self_attn.output_gate")[0] == 2 * tokens * 64 * 32
    # Sums after the embedding, two attentions, a norm and two mixtures; and the gathered logits.
    assert onerank.read(dict(bundle.traces())[1]).communication.sum() == 7


@pytest.mark.parametrize("tp", [1, 2])
def test_the_work_of_mamba_1_by_hand(tmp_path: Path, tp: int):
    config = {**FEW_JAMBA, "num_hidden_layers": 2, "num_experts": 1}
    bundle = served_bundle(tmp_path, config, "--tp", str(tp))
    # 128 channels with a bias of the convolution; states of 8; D, and a gate with SiLU.
    channels = 128 // tp
    convolution, update = (2 * 4 + 3) * channels, channels * (8 * 8 + 2 + 4)
    scan = channels * (8 * 8 + 2 + 4 + 2)
    for row, decodes in ((1, 2), (2, 32), (5, 4)):
        flops, moved = summed(bundle, row, ".step_state.decode")
        assert flops == decodes * (convolution + update)
        # The convolution has its rows, of which a copy is made, because they are half of a
        # projection's; weights with a bias; and states read and written.
        rows = (
            2 * decodes * 2 * 2 * channels + 2 * channels * (4 + 1) + decodes * 2 * 2 * 3 * channels
        )
        # The update has inputs, steps, gates and results; B and C; A and the bias in float32, D;
        # and states.
        operands = decodes * 2 * (4 * channels + 2 * 8) + channels * (4 * 8 + 4 + 4)
        assert moved == rows + operands + decodes * 2 * 2 * 8 * channels
    for row, tokens in ((3, 128), (4, 512), (5, 64)):
        assert summed(bundle, row, ".step_state.prefill")[0] == tokens * (convolution + scan)
    for row, tokens in ((1, 2), (4, 512)):
        assert summed(bundle, row, ".mamba.in_proj")[0] == 2 * tokens * 64 * 2 * channels
        assert summed(bundle, row, ".mamba.x_proj")[0] == 2 * tokens * channels * (8 + 16)
        assert summed(bundle, row, ".mamba.out_proj")[0] == 2 * tokens * channels * 64
    # Sums after the embedding, x_proj, Mamba, attention and two MLPs, and the gathered logits. In a
    # mixed step, x_proj runs for the prefills and for the decodes, as in vLLM.
    of_decode, of_both = (
        onerank.read(dict(bundle.traces())[row]).communication.sum() for row in (1, 5)
    )
    assert (of_decode, of_both) == ((7, 8) if tp > 1 else (0, 0))
    assert summed(bundle, 5, ".mamba.x_proj")[0] == 2 * (64 + 4) * channels * (8 + 16)


def test_the_work_of_mamba_2_by_hand(bamba: Bundle):
    # 8 heads of 16, states of 8, 2 groups: 128 + 2 x 16 channels with a bias of the convolution.
    convolution, update = (2 * 4 + 3) * 160, 6 * 8 * 16 * 8 + 2 * 8 * 16
    scan = 2 * 64 * 8 * 2 + 8 * 16 * (4 * 8 + 64)
    for row, decodes in ((1, 2), (3, 32), (7, 4)):
        assert summed(bamba, row, ".step_state.decode")[0] == decodes * (convolution + update)
    for row, tokens in ((4, 128), (6, 512), (7, 64)):
        assert summed(bamba, row, ".step_state.prefill")[0] == tokens * (convolution + scan)
    for row, tokens in ((1, 2), (6, 512)):
        assert summed(bamba, row, ".mamba.in_proj")[0] == 2 * tokens * 64 * (128 + 160 + 8)


@pytest.mark.parametrize("name", ["qwen", "bamba"])
def test_states_do_not_grow_with_the_context(name: str, request: pytest.FixtureRequest):
    bundle: Bundle = request.getfixturevalue(name)
    memory = bundle.manifest.memory
    short, long = bundle.rows[:2]
    per_token = 2 * 2 * 16 * 2
    assert memory.kv_bytes_per_token == per_token
    assert long.peak_bytes - short.peak_bytes == 2 * 900 * per_token
    assert summed(bundle, 1, ".step_state.decode") == summed(bundle, 2, ".step_state.decode")
    # 30 more decodes have 30 more states; activations are those of 30 more tokens.
    state_bytes = memory.state_bytes_per_sequence
    assert state_bytes == 2 * {"qwen": 3 * 96 + 4 * 16 * 8, "bamba": 3 * 160 + 8 * 16 * 8}[name]
    before = [memory.bytes_of(row.composition) for row in (bundle.rows[0], bundle.rows[2])]
    assert before[1] - before[0] >= 30 * (state_bytes + 101 * per_token)
    interpolation = bundle.interpolation
    for part in ("prefill", "decode"):
        modules = [module for module in bundle.modules if module.endswith(f".step_state.{part}")]
        time = interpolation.module(modules)
        if part == "decode":
            assert time(Composition(8, 64)) == time(Composition(8, 4000)) > 0
        else:
            assert time(Composition(0, 0, 1, 256, 0)) == time(Composition(0, 0, 1, 256, 3000)) > 0


def test_states_limit_the_batch(qwen: Bundle, tmp_path: Path):
    memory, longest = qwen.manifest.memory, qwen.manifest.longest
    room = memory.cache_room_bytes
    each = memory.kv_bytes_per_token * longest + memory.state_bytes_per_sequence
    assert memory.sequences_that_fit(longest - 1) == room // each
    assert memory.tokens_that_fit == room // memory.kv_bytes_per_token
    assert "serve-sequence-states" in {note.code for note in qwen.manifest.notes}
    written = export_sglang_sim(qwen, LinkedSimulatorOptions(output=tmp_path / "s"))
    tokens = int(written.options[written.options.index("--max-total-tokens") + 1])
    # SGLang allocates the states of its largest batch first.
    left = room - 32 * memory.state_bytes_per_sequence
    assert tokens == left // memory.kv_bytes_per_token
    assert [note.code for note in written.notes] == ["export-sequence-states"]
    written = export_aiconfigurator(qwen, AiconfiguratorOptions(output=tmp_path / "a"))
    assert [note.code for note in written.notes] == ["export-sequence-states"]


def test_a_layer_that_keeps_its_states_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Modules hold the states of one batch, so a step would be one sequence."""
    monkeypatch.setattr(sequence_states, "is_recurrent_block", lambda module: False)
    model = built(tmp_path, FEW_RECURRENT_GEMMA)
    if not hasattr(model.config, "layer_types"):
        pytest.skip("this version of transformers does not name the model's types of layers")
    with pytest.raises(CaptureError) as error:
        _served(model, Options(), "cpu", None, None)
    assert error.value.code == "serve-state-unsupported"


def test_a_cpu_runs_a_reference_and_says_so(tmp_path: Path):
    config = {**FEW_LFM2, "num_hidden_layers": 1, "layer_types": ["conv"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run_command(
        "capture", "serve", tmp_path / "config.json", "-o", tmp_path / "b",
        "--grid", "decode: batch=2 context=4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = {note.code for note in read_bundle(tmp_path / "b").manifest.notes}
    assert {"serve-sequence-states", "serve-reference-states"} <= notes


def test_capture_and_annotate_have_the_same_chunks():
    """Scratch memory and work of the delta rule; capture may not import the formulas of work."""
    assert state_operators.CHUNK == DELTA_CHUNK


def test_fla_gets_the_states_of_a_convolution_without_a_copy(monkeypatch: pytest.MonkeyPatch):
    """Its tensor has one more input, in the same memory."""
    monkeypatch.setattr(state_operators, "on_gpu", lambda _: True)
    state = state_operators.convolution_state(torch.zeros(1), (2, 6, 3))
    whole = state_operators._state_of_fla(state)
    assert whole.shape == (2, 6, 4)
    assert whole.is_contiguous()
    state[1, 5, 2] = 7.0
    assert whole[1, 5, 3] == 7.0
    assert state.nbytes == 4 * 2 * 6 * 3


def test_fla_writes_the_states_of_decodes_over_the_old_ones(monkeypatch: pytest.MonkeyPatch):
    """In the states' own type: engines have no second copy, in float32, at the peak of a step."""

    def kernel(q: torch.Tensor, *_: Any, initial_state: torch.Tensor, **__: Any) -> Any:
        n, heads, width = q.shape[0], q.shape[2], q.shape[3]
        after = q.new_empty(n, heads, width, 8, dtype=torch.float32)
        after.copy_(2 * initial_state)
        return q.new_empty((n, 1, heads, 8)), after

    monkeypatch.setattr(state_operators, "_package", lambda *_: kernel)
    state = torch.ones(3, 2, 4, 8, dtype=torch.bfloat16)
    q, v, rate = torch.ones(3, 1, 2, 4), torch.ones(3, 1, 2, 8), torch.ones(3, 1, 2)
    out = state_operators._recurrent(True)(q, q, v, rate, rate, state)
    assert out.shape == v.shape
    assert (state == 2).all()
    assert "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_gpu_without_the_kernels_of_engines_is_refused(
    monkeypatch: pytest.MonkeyPatch, by_channel: bool
):
    monkeypatch.setitem(sys.modules, "fla", None)
    for module in ("fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, module, None)
    for prefill in (True, False):
        with pytest.raises(CaptureError) as error:
            state_operators._delta(prefill, gpu=True, by_channel=by_channel)
        assert error.value.code == "serve-kernels-missing"
        assert "pip install flash-linear-attention" in str(error.value)


def test_heads_that_ranks_do_not_divide_are_whole_on_each(tmp_path: Path, qwen: Bundle):
    """Four ranks divide the four value heads and not the two key heads."""
    config = {
        **FEW_QWEN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    point = "decode: batch=2 context=100"
    whole = served_bundle(tmp_path, config, "--tp", "4", grid=point).manifest
    assert whole.memory.state_bytes_per_sequence == qwen.manifest.memory.state_bytes_per_sequence
    assert whole.memory.whole_state_layers == 1
    assert "serve-whole-states" in {note.code for note in whole.notes}
    recosted, _ = recost_bundle(read_bundle(tmp_path / "bundle"), load_gpu("H200"))
    assert recosted.manifest.memory.whole_state_layers == 1
    assert "serve-whole-states" in {note.code for note in recosted.manifest.notes}


@pytest.mark.parametrize(
    ("config", "whole_bytes"),
    [
        # Two layers of 3 x 3 x 4 x 16 inputs of convolutions and 4 states of 16 x 16; 4 bytes each.
        (FEW_KIMI, 2 * 4 * (3 * 192 + 4 * 16 * 16)),
        (
            {**FEW_KIMI, "model_type": "bailing_hybrid", "n_group": 1, "topk_group": 1},
            2 * 4 * (3 * 192 + 4 * 16 * 16),
        ),
        # Two layers of 2 x 64 inputs.
        (FEW_LFM2, 2 * 4 * 2 * 64),
        ({**FEW_LFM2, "model_type": "lfm2_moe", "num_dense_layers": 1}, 2 * 4 * 2 * 64),
        ({**FEW_LFM2, "model_type": "lfm3", "conv_L_cache": 5}, 2 * 4 * 4 * 64),
        # Two layers of four heads of 16 x 16.
        (FEW_MINIMAX, 2 * 4 * 4 * 16 * 16),
        # Two layers of 128 channels.
        (FEW_JAMBA, 2 * 4 * 128 * (3 + 8)),
    ],
    ids=["Kimi Linear", "Bailing", "LFM2", "LFM2-MoE", "LFM3", "MiniMax", "Jamba"],
)
def test_ranks_have_half_of_the_states(tmp_path: Path, config: dict[str, Any], whole_bytes: int):
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no such model")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    step = Composition(decodes=2, decode_context=4, prefills=1, prefill_tokens=8)
    for tp in (1, 2):
        with loaded_server(file, Options(tp=tp)) as server:
            served = server.served
            server.step(step)()
        assert served.state_bytes_per_sequence == whole_bytes // tp
        assert served.whole_state_layers == 0


def test_ranks_of_one_group_have_copies_of_it(tmp_path: Path):
    """Falcon-H1's norm counts its groups, and each part of a projection has a factor."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FEW_FALCON_H1))
    for tp in (1, 2, 4):
        with loaded_server(file, Options(tp=tp)) as server:
            server.step(Composition(decodes=2, decode_context=4, prefills=1, prefill_tokens=8))()
        # Four layers: 3 inputs of the channels of 128 / tp features, and of B and C of 8 each; a
        # state of 16 x 8 for each of 8 / tp heads.
        expected = 4 * 4 * (3 * (128 // tp + 2 * 8) + 8 // tp * 16 * 8)
        assert server.served.state_bytes_per_sequence == expected
        assert server.served.kv_bytes_per_token == 4 * 2 * max(1, 2 // tp) * 16 * 4


def test_a_plan_keeps_layers_whole(tmp_path: Path):
    """The lines that the error advises are a plan; its text is part of what a result depends on."""
    config = {
        **FEW_BAMBA, "hidden_size": 48, "mamba_n_heads": 6, "mamba_n_groups": 3,
        "num_hidden_layers": 2, "attn_layer_indices": [1],
    }  # fmt: skip
    file, plan = tmp_path / "config.json", tmp_path / "plan.toml"
    file.write_text(json.dumps(config))
    command = (
        "capture", "serve", file, "--tp", 2, "-o", tmp_path / "bundle",
        "--grid", "decode: batch=2 context=4",
    )  # fmt: skip
    advice = run_command(*command).stderr
    assert "error[tp-unplanned-module]" in advice
    lines = [line for line in advice.splitlines() if line.startswith(("model", "[", '"'))]
    plan.write_text("\n".join(lines))
    command = *command, "--sharding-plan", plan, "--store", tmp_path / "store"
    done = run_command(*command)
    assert done.returncode == 0, done.stderr
    manifest = read_bundle(tmp_path / "bundle").manifest
    assert manifest.memory.whole_state_layers == 1
    # 6 heads of 16 channels, and keys and queries of 3 groups of 8; 4 bytes each.
    assert manifest.memory.state_bytes_per_sequence == 4 * (3 * (96 + 48) + 96 * 8)
    plan.write_text(plan.read_text().replace("Bamba", "Llama"))
    other = run_command(*command)
    assert other.returncode == 2
    assert "error[nothing-parallel]" in other.stderr
    assert "LlamaForCausalLM" in other.stderr
    assert "BambaForCausalLM" in other.stderr


def test_ranks_have_the_states_of_their_heads(tmp_path: Path, qwen: Bundle):
    """Tensor parallelism slices heads and channels, and sums after each layer."""
    config = {
        **FEW_QWEN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    sliced = served_bundle(tmp_path, config, "--tp", "2")
    whole, half = qwen.manifest.memory, sliced.manifest.memory
    assert 2 * half.state_bytes_per_sequence == whole.state_bytes_per_sequence
    assert half.whole_state_layers == 0
    assert "serve-whole-states" not in {note.code for note in sliced.manifest.notes}
    for row, of_whole in ((1, 1), (2, 3), (3, 4), (4, 6)):
        part = "decode" if row < 3 else "prefill"
        assert sliced.rows[row - 1].composition == qwen.rows[of_whole - 1].composition
        for module in (
            f".step_state.{part}", ".in_proj_qkvz", ".in_proj_ba", ".linear_attn.out_proj"
        ):  # fmt: skip
            assert 2 * summed(sliced, row, module)[0] == summed(qwen, of_whole, module)[0]
