"""`capture serve` of models whose layers see a part of a sequence: cache, results and bytes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from own_process import run_command
from transformers import AutoModelForCausalLM, DynamicCache

from onerank.capture.options import Options
from onerank.capture.serving import engine_step
from onerank.capture.serving.attention_windows import (
    AttentionWindow,
    CacheNeed,
    WindowedLayers,
)
from onerank.capture.serving.build_model import build_model, materialise, read_config
from onerank.capture.serving.compositions import Composition, parse_grid
from onerank.capture.serving.engine_step import RepeatableStep
from onerank.capture.serving.measure_grid import _served
from onerank.capture.serving.step_attention import attend
from onerank.serving.bundle import Bundle, read_bundle
from onerank.serving.latency_interpolation import Interpolation
from onerank.serving.part_sizes import AttentionForm
from onerank.serving.serving_curves import serving_figures
from onerank.serving.simulators.aiconfigurator import export_aiconfigurator
from onerank.serving.simulators.operator_times import Extent
from onerank.serving.simulators.options import AiconfiguratorOptions, LinkedSimulatorOptions
from onerank.serving.simulators.sglang_sim import export_sglang_sim
from onerank.serving.tables import Part, RankMemory
from tests.serving.test_latency_interpolation import rows_of

# Layers, key-value heads and windows of the published models; other sizes are small.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B = {
    **SMALL, "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 131072,
}  # fmt: skip
GEMMA3_12B = {
    **SMALL, "model_type": "gemma3_text", "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    "max_position_embeddings": 131072,
}  # fmt: skip
MISTRAL_7B = {
    **SMALL, "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None,
    "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA4_SCOUT = {
    **SMALL, "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192,
    "intermediate_size_mlp": 64, "num_local_experts": 2, "max_position_embeddings": 1 << 20,
}  # fmt: skip


def configured(directory: Path, config: dict[str, Any]) -> Any:
    """Return a configuration, read from a file."""
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return read_config(path)


@pytest.mark.parametrize(
    ("config", "per_token", "windows", "sequence"),
    [
        # 12 of 24 layers; keys and values of 8 heads of 64 elements, 2 bytes each.
        (GPT_OSS_20B, 49152, [(AttentionWindow(128), 12)], (131071, 24576 * (131072 + 128))),
        # Below the window, each token counts in all layers.
        (GPT_OSS_20B, 49152, [(AttentionWindow(128), 12)], (127, 49152 * 128)),
        # Five of six layers, 40 of 48.
        (GEMMA3_12B, 393216, [(AttentionWindow(1024), 40)], (131071, 8192 * (8 * 131072 + 40960))),
        (MISTRAL_7B, 131072, [], (32767, 131072 * 32768)),
        # Three of four layers have chunks of 8192 tokens.
        (LLAMA4_SCOUT, 196608, [(AttentionWindow(8192, chunked=True), 36)],
         (131071, 4096 * (12 * 131072 + 36 * 8192))),
    ],
)  # fmt: skip
def test_the_cache_of_published_models(
    tmp_path: Path,
    config: dict[str, Any],
    per_token: int,
    windows: list[tuple[AttentionWindow, int]],
    sequence: tuple[int, int],
):
    model = build_model(configured(tmp_path, config), "cpu", shapes_only=False)
    materialise(model, "cpu")
    served, _ = _served(model, Options(), "cpu", None, None)
    assert served.kv_bytes_per_token == per_token
    context, in_sequence = sequence
    assert [(layers.window, layers.layers) for layers in served.kv_windows] == windows
    assert served.cache_need.of_sequence(context) == in_sequence
    assert served.cache_need == CacheNeed(per_token, served.kv_windows)


FEW = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
       "dtype": "float32", "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {**FEW, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4},
        {**FEW, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {**FEW, "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 4,
         "intermediate_size_mlp": 64, "num_local_experts": 2, "attn_temperature_tuning": False},
    ],
    ids=["sliding", "mixed layers", "chunks"],
)  # fmt: skip
@pytest.mark.parametrize(
    "composition",
    [
        Composition(3, 7, 2, 5, 4),
        Composition(3, 2, 2, 7, 9),
        Composition(2, 8, 1, 3, 1),
        Composition(1, 12),
    ],
    ids=str,
)
def test_a_step_with_windows_computes_what_transformers_computes(
    tmp_path: Path, config: dict[str, Any], composition: Composition
):
    """The cache lacks the tokens outside of a window; transformers masks them."""
    read = configured(tmp_path, config)
    model = build_model(read, "cpu", shapes_only=False)
    materialise(model, "cpu")
    step = RepeatableStep.of(model, composition, 128, "cpu")
    engine_step.give_attention_scopes(step)
    with torch.no_grad(), engine_step.running(step.cache):
        logits = model(**step.arguments).logits[0]
    assert step.cache.windows
    reference = AutoModelForCausalLM.from_config(read, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    c, tokens = composition, step.arguments["input_ids"][0]
    chunk = c.prefills * c.prefill_tokens
    expected: list[torch.Tensor] = []
    for part, count, new, context, ids in (
        ("prefill", c.prefills, c.prefill_tokens, c.prefill_context, tokens[:chunk]),
        ("decode", c.decodes, 1, c.decode_context, tokens[chunk:]),
    ):
        if not count:
            continue
        cache = DynamicCache()
        for layer in range(config["num_hidden_layers"]):
            held = step.cache.cached_before(part, layer)
            assert (held < context) == (layer in step.cache.windows and context > held)
            before: list[torch.Tensor] = []
            for value in (False, True):
                cached = step.cache.tensors[layer, part, value]
                assert cached.shape[2] == held + new
                # What is outside of the window must not matter.
                outside = cached.new_empty(*cached.shape[:2], context - held, 16).normal_()
                before.append(torch.cat((outside, cached[:, :, :held]), dim=2))
            cache.update(before[0], before[1], layer)
        with torch.no_grad():
            output = reference(ids.view(count, new), past_key_values=cache)
        expected.append(output.logits[:, -1])
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the bundle of a small gpt-oss with one layer of each kind, without a device."""
    directory = tmp_path_factory.mktemp("windowed")
    config = {**GPT_OSS_20B, "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    done = run_command(
        "capture", "serve", directory / "config.json", "--device", "none", "-o",
        directory / "bundle", "--grid",
        "decode: batch=2 context=1000,4000; prefill: tokens=32 context=0,4000; "
        "prefill: tokens=300 context=0,4000 batch=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_bundle(directory / "bundle")


def test_a_decode_reads_the_window_only(bundle: Bundle):
    moved = [
        sum(
            kernel.bytes
            for kernel in bundle.kernel_rows
            if kernel.row == row and (kernel.module or "").endswith(".step_attention.decode")
        )
        for row in (1, 2)
    ]
    # Of 3,000 more tokens, the layer without a window reads keys and values of 2 sequences.
    assert moved[1] - moved[0] == 2 * 3000 * 2 * 8 * 64 * 2
    # Queries and results of 64 heads of 64 elements, in 2 layers.
    cached = 2 * 2 * 8 * 64 * 2 * (1001 + 128)
    assert moved[0] == pytest.approx(cached + 2 * 2 * 2 * 64 * 64 * 2, rel=0.01)


def prefill_attention(bundle: Bundle, row: int) -> tuple[int, int]:
    """Return the FLOPs and bytes of the prefills' attention in a step."""
    of_row = [
        kernel
        for kernel in bundle.kernel_rows
        if kernel.row == row and (kernel.module or "").endswith(".step_attention.prefill")
    ]
    return sum(kernel.flops or 0 for kernel in of_row), sum(kernel.bytes or 0 for kernel in of_row)


@pytest.mark.parametrize("config", [GPT_OSS_20B, LLAMA4_SCOUT], ids=["sliding", "chunks"])
def test_a_prefill_longer_than_the_window_computes_the_window_only(
    tmp_path: Path, config: dict[str, Any]
):
    """Two prefills of 300 tokens, without context and after 4,000 tokens, counted by hand."""
    chunked = config is LLAMA4_SCOUT
    types = ["chunked_attention" if chunked else "sliding_attention", "full_attention"]
    small = {**config, "num_hidden_layers": 2, "layer_types": types, "attention_chunk_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(small))
    done = run_command(
        "capture", "serve", tmp_path / "config.json", "--device", "none", "-o", tmp_path / "b",
        "--grid", "prefill: tokens=300 context=0,4000 batch=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bundle = read_bundle(tmp_path / "b")
    heads, key_heads, size = config["num_attention_heads"], 8, config["head_dim"]
    # A query's own key counts as a half, as under a causal mask.
    if chunked:
        # Chunks start at tokens 0, 128 and 256; at 3968, 4096, 4224: 32 tokens are before 4000.
        windowed = [2 * 128 * 64 + 44 * 22, 96 * (32 + 48) + 128 * 64 + 76 * 38]
        held = [300, 332]
    else:
        # 128 queries see 1 to 128 keys, the others 128.
        windowed = [128 * 64 + 172 * 127.5, 300 * 127.5]
        held = [300, 427]
    for row, (context, pairs, keys) in enumerate(zip((0, 4000), windowed, held, strict=True), 1):
        flops, moved = prefill_attention(bundle, row)
        of_layers = pairs + 300 * (context + 150)
        assert flops == 2 * heads * of_layers * 2 * (size + size)
        # Queries, results and their sums of exponentials in two layers; keys and values.
        of_queries = 2 * 2 * heads * 300 * (2 * size * 2 + 4)
        of_keys = 2 * key_heads * (keys + context + 300) * 2 * size * 2
        # The parts of chunks are joined by a copy. A call returns the state of random numbers.
        joined = 2 * 2 * heads * 300 * size * 2 if chunked else 0
        calls = 1 + (3 if chunked else 1)
        assert moved == of_queries + of_keys + joined + calls * 3 * 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("tokens", "context"), [(300, 0), (200, 4000), (1000, 100)])
def test_flash_attention_sees_the_window_that_the_mask_shows(
    chunked: bool, tokens: int, context: int
):
    window = AttentionWindow(128, chunked=chunked)
    cached = window.seen_before(context) + tokens
    q = torch.randn(2, 8, tokens, 64, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 2, 2, cached, 64, dtype=torch.bfloat16, device="cuda")
    flash = attend(q, k, v, None, window)
    exact = attend(q.float(), k.float(), v.float(), None, window)
    torch.testing.assert_close(flash.float(), exact, rtol=2e-2, atol=2e-2)


def test_the_memory_of_a_step_has_the_window_only(bundle: Bundle):
    short, long = bundle.rows[:2]
    assert long.peak_bytes - short.peak_bytes == 2 * 3000 * 2048
    memory = bundle.manifest.memory
    assert memory.kv_windows == (WindowedLayers(AttentionWindow(128), 1, 2048),)
    predicted = [memory.bytes_of(row.composition) for row in bundle.rows[:2]]
    assert predicted[1] - predicted[0] == 2 * 3000 * 2048


def test_the_largest_batch_follows_from_windows(bundle: Bundle):
    memory = bundle.manifest.memory
    room = memory.tokens_that_fit * 4096
    assert memory.sequences_that_fit(131071) == room // (2048 * (131072 + 128))
    largest = serving_figures(bundle).largest
    assert largest.contexts[-1] == 131071
    assert largest.batches[-1] == memory.sequences_that_fit(131071)
    assert largest.batches[0] == memory.tokens_that_fit // 65
    assert "serve-windowed-layers" in {note.code for note in bundle.manifest.notes}


@pytest.mark.parametrize("window", [AttentionWindow(7), AttentionWindow(7, chunked=True)], ids=str)
def test_keys_and_products_are_those_of_the_mask(window: AttentionWindow):
    for context in (0, 3, 6, 7, 20):
        for new in (1, 2, 7, 30):
            queries = np.arange(context, context + new)[:, None]
            keys = np.arange(context + new)[None, :]
            near = keys // 7 == queries // 7 if window.chunked else queries - keys < 7
            seen = near & (keys <= queries)
            assert window.seen_before(context) + new == seen.any(axis=0).sum()
            assert window.products(context, new) == seen.sum() - new / 2


def windowed_times(c: Composition) -> dict[Part, float]:
    """Return the times of parts: half of the layers have a window of 128 tokens."""
    parts: dict[Part, float] = {"tokens": 1e6 + 1e3 * c.new_tokens, "head": 1e5}
    if c.decodes:
        keys = c.decode_context + 1
        parts["decode_attention"] = 1e5 + 20 * c.decodes * (keys + min(keys, 128))
    if c.prefills:
        tokens, keys = c.prefills * c.prefill_tokens, c.prefill_context + c.prefill_tokens / 2
        parts["prefill_attention"] = 3e5 + 0.1 * tokens * (keys + min(keys, 128))
    return parts


def test_interpolation_knows_the_window():
    """From few points on both sides of a window, the part that no longer grows is separated."""
    grid = parse_grid(
        "decode: batch=1,16,128 context=16,64,4096; prefill: tokens=32,2048 context=0,8192"
    )
    rows, kernels = rows_of(grid, windowed_times)
    others = parse_grid("decode: batch=4,48 context=128,256,512,1024,2048")
    errors: dict[bool, float] = {}
    for form in (AttentionForm(), AttentionForm(windows=((AttentionWindow(128), 0.5),))):
        attention = Interpolation.of(rows, kernels, form).module(["decode_attention"])
        expected = [windowed_times(c)["decode_attention"] for c in others]
        relative = [abs(attention(c) / ns - 1) for c, ns in zip(others, expected, strict=True)]
        errors[bool(form.windows)] = max(relative)
    assert errors[True] < 0.01
    assert errors[True] < errors[False] / 4


def test_a_bundle_has_the_form_of_its_layers(bundle: Bundle):
    assert bundle.interpolation.form.windows == ((AttentionWindow(128), 0.5),)


def test_exports_write_the_lower_bound_and_say_so(bundle: Bundle, tmp_path: Path):
    memory, longest = bundle.manifest.memory, bundle.manifest.longest
    written = export_sglang_sim(bundle, LinkedSimulatorOptions(output=tmp_path / "s"))
    tokens = written.options[written.options.index("--max-total-tokens") + 1]
    assert int(tokens) == memory.tokens_that_fit
    (note,) = written.notes
    assert note.code == "export-windowed-layers"
    assert f"{memory.sequences_that_fit(longest - 1):,} sequences of {longest:,}" in note.text
    written = export_aiconfigurator(bundle, AiconfiguratorOptions(output=tmp_path / "a"))
    assert [note.code for note in written.notes] == ["export-windowed-layers"]


def test_steps_that_fit_by_their_windows_are_exported(bundle: Bundle):
    """A step of long sequences fits that would not if all layers kept all tokens."""
    extent = Extent.of(bundle, "SGLang Simulator")
    batch = bundle.manifest.memory.sequences_that_fit(131070)
    assert batch * 131071 > extent.cached_tokens
    assert extent.holds(Composition(batch, 131070))
    assert not extent.holds(Composition(batch + 1, 131070))


def test_a_memory_record_without_windows_counts_all_tokens(bundle: Bundle):
    """Bundles of earlier versions have no `kv_windows`."""
    record = msgspec.to_builtins(bundle.manifest.memory)
    del record["kv_windows"]
    memory = msgspec.convert(record, RankMemory)
    assert memory.sequences_that_fit(131071) == memory.tokens_that_fit // 131072
