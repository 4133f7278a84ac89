"""`capture serve` of models with sparse latent attention (DSA): results, cache, FLOPs, times."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_process import run_command

from onerank.capture.options import Options
from onerank.capture.serving import sparse_attention
from onerank.capture.serving.attention_windows import AttentionWindow, CacheNeed
from onerank.capture.serving.compositions import Composition
from onerank.capture.serving.measure_grid import _served
from onerank.ir.errors import CaptureError
from onerank.serving.bundle import Bundle, read_bundle
from tests.serving.test_sequence_states import (
    EXPERTS,
    SMALL,
    built,
    step_like_transformers,
    summed,
)

# huggingface.co/deepseek-ai/DeepSeek-V3.2: layers, heads and widths of attention and indexer; other
# sizes are small.
DEEPSEEK_V32: dict[str, Any] = {
    **SMALL, **EXPERTS, "model_type": "deepseek_v32", "num_hidden_layers": 61,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 3, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
FEW: dict[str, Any] = {
    **DEEPSEEK_V32, "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 2, "index_head_dim": 16,
    "index_topk": 64, "first_k_dense_replace": 1,
}  # fmt: skip
FEW_GLM = {
    **FEW, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip


def test_the_cache_of_deepseek_v32(tmp_path: Path):
    """A latent vector of 512 and a rotary part of 64; 128 elements in 8 bits and their scale."""
    served, _ = _served(built(tmp_path, DEEPSEEK_V32), Options(), "cpu", None, None)
    assert served.cache_need == CacheNeed(61 * (2 * 576 + 128 + 4)) == CacheNeed(78324)
    assert served.latent_bytes_per_token == 78324
    assert served.attended_tokens == 2048


@pytest.mark.parametrize("config", [FEW, FEW_GLM], ids=["DeepSeek-V3.2", "GLM-5"])
@pytest.mark.parametrize("composition", [Composition(3, 7, 2, 5, 4), Composition(2, 6)], ids=str)
def test_a_step_computes_what_transformers_computes(
    tmp_path: Path, config: dict[str, Any], composition: Composition
):
    """With fewer tokens than a query attends to, the scores in 8 bits do not matter."""
    step = step_like_transformers(tmp_path, {**config, "dtype": "float32"}, composition)
    assert not step.cache.states.tensors


def test_scores_choose_the_largest_of_the_tokens_before():
    torch.manual_seed(0)
    q, keys = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 16)
    weights, cached = torch.rand(2, 3, 4), torch.zeros(2, 9, 20, dtype=torch.uint8)
    sparse_attention._store_keys(keys, cached)
    indices = sparse_attention._largest(
        sparse_attention._scores(*sparse_attention._scale_queries(q, weights, 1.0), cached), 8
    )
    exact = torch.einsum("nthd,nkd->nthk", q, keys).relu()
    exact = torch.einsum("nthk,nth->ntk", exact, weights)
    # The first of three new tokens sees 7 of 9 tokens, so its eighth choice is -1.
    assert (indices[:, 0, 7] == -1).all()
    assert (indices[:, 0, :7].sort().values == torch.arange(7)).all()
    assert (indices[:, 1].sort().values == torch.arange(8)).all()
    # The last token leaves out one: that with the least score, as far as 8 bits tell.
    for sequence in range(2):
        left_out = ({*range(9)} - {*indices[sequence, 2].tolist()}).pop()
        assert exact[sequence, 2, left_out] <= exact[sequence, 2].kthvalue(2).values * 1.1
    query, vectors = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 16)
    out = sparse_attention._attend(query, vectors, indices, 12, 0.25)
    scores = torch.einsum("nthd,nkd->nthk", query, vectors) * 0.25
    chosen = torch.zeros(2, 3, 10, dtype=torch.bool)
    chosen.scatter_(2, indices.masked_fill(indices < 0, 9).long(), True)
    masked = scores.masked_fill(~chosen[:, :, None, :9], float("-inf")).softmax(-1)
    torch.testing.assert_close(out, torch.einsum("nthk,nkd->nthd", masked, vectors[..., :12]))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the bundle of a small DeepSeek-V3.2, without a device."""
    directory = tmp_path_factory.mktemp("sparse")
    (directory / "config.json").write_text(json.dumps(FEW))
    done = run_command(
        "capture", "serve", directory / "config.json", "--device", "none", "-o",
        directory / "bundle", "--grid",
        "decode: batch=2 context=31,1000,4000; prefill: tokens=128 context=0,1000; "
        "mixed: tokens=32 context=0 batch=2 decode_context=31",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_bundle(directory / "bundle")


def test_the_work_of_sparse_attention_by_hand(bundle: Bundle):
    """Two layers; heads of 32 + 8 against vectors of 32; an indexer with 2 heads of 16."""
    quantised = 2 * 16 + 2 * (2 * 16 + 2)
    for row, tokens, pairs, chosen in (
        (1, 2, 2 * 32, 2 * 32),
        (2, 2, 2 * 1001, 2 * 64),
        (3, 2, 2 * 4001, 2 * 64),
        (4, 128, 128 * 129 // 2, 64 * 65 // 2 + 64 * 64),
        (5, 128, 128 * 1000 + 128 * 129 // 2, 128 * 64),
    ):
        part = "decode" if row < 4 else "prefill"
        flops, _ = summed(bundle, row, f".step_index.{part}")
        # Scores of 2 heads of 16; the choice reads each score.
        assert flops == 2 * (pairs * (2 * 2 * 16 + 1) + tokens * quantised)
        flops, _ = summed(bundle, row, f".step_attention.{part}")
        # Queries times the half of `kv_b_proj` for keys, results times that for values.
        absorbed = tokens * 4 * 2 * 2 * 16 * 32
        assert flops == 2 * (2 * chosen * 4 * (40 + 32) + absorbed)


def test_attention_stops_growing_and_scores_do_not(bundle: Bundle):
    _, short = summed(bundle, 2, ".step_attention.decode")
    _, long = summed(bundle, 3, ".step_attention.decode")
    assert short == long
    _, short = summed(bundle, 2, ".step_index.decode")
    _, long = summed(bundle, 3, ".step_index.decode")
    # Of 3,000 more tokens of 2 sequences in 2 layers: keys, and scores that are written and read.
    assert long - short == 2 * 2 * 3000 * (20 + 4 + 4)
    assert bundle.manifest.attended_tokens == 64
    assert bundle.interpolation.form.windows == ((AttentionWindow(64), 1.0),)
    modules = [module for module in bundle.modules if module.endswith(".step_attention.decode")]
    time = bundle.interpolation.module(modules)
    assert time(Composition(2, 2000)) == pytest.approx(time(Composition(2, 4000)))
    memory = bundle.manifest.memory
    assert memory.kv_bytes_per_token == 2 * (2 * 40 + 16 + 4)
    short, long = bundle.rows[1:3]
    assert long.peak_bytes - short.peak_bytes >= 2 * 3000 * memory.kv_bytes_per_token
    assert "serve-expanded-latents" not in {note.code for note in bundle.manifest.notes}


def test_a_gpu_is_refused():
    with pytest.raises(CaptureError) as error:
        sparse_attention._no_kernel()
    assert error.value.code == "serve-sparse-on-gpu"
