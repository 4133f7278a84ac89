"""Exports of a kept bundle for simulators of serving; those run outside of this repository."""

import hashlib
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
import yaml

from onerank.capture.serving.compositions import Composition
from onerank.cli import onerank as onerank_command
from onerank.ir.errors import ExportError
from onerank.plan.cluster import ClusterLink, ClusterNetwork
from onerank.serving.bundle import Bundle, read_bundle
from onerank.serving.simulators.aiconfigurator import export_aiconfigurator
from onerank.serving.simulators.llmservingsim import export_llmservingsim
from onerank.serving.simulators.options import (
    AiconfiguratorOptions,
    LinkedSimulatorOptions,
    VidurOptions,
)
from onerank.serving.simulators.sglang_sim import export_sglang_sim
from onerank.serving.simulators.step_collectives import TracedStep, collective_sizes
from onerank.serving.simulators.vidur import export_vidur
from onerank.serving.tables import RankMemory, StepRow
from tests.cli.invoke_cli import invoke, refused

LAYERS, HIDDEN = 2, 256

EXPORTS = {
    "vidur": export_vidur,
    "llmservingsim": export_llmservingsim,
    "aiconfigurator": export_aiconfigurator,
    "sglang-sim": export_sglang_sim,
}

OPTIONS = {export_vidur: VidurOptions, export_aiconfigurator: AiconfiguratorOptions}
"""Options of simulators that have more than `LinkedSimulatorOptions`."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a Llama of two layers, tp 1, predicted for an H100.

    Its traces are empty but for a decode and a prefill, which are those of tp 2.
    """
    directory = tmp_path_factory.mktemp("kept") / "bundle"
    shutil.copytree(Path(__file__).parent / "bundle", directory)
    (directory / "tp2").rename(directory / "traces")
    for number in range(1, 9):
        (directory / "traces" / f"{number}.et").touch()
    return directory


def changed(bundle: Path, **fields: Any) -> Bundle:
    """Return the bundle with other fields of its manifest."""
    read = read_bundle(bundle)
    manifest = msgspec.structs.replace(read.manifest, **fields)
    return Bundle(manifest, read.rows, read.kernel_rows, bundle)


def row_of(bundle: Bundle, composition: Composition) -> tuple[Any, dict[str, int]]:
    """Return the row of a composition, and the time of each of its modules."""
    number = [row.composition for row in bundle.rows].index(composition) + 1
    times = {kernel.module: kernel.time_ns for kernel in bundle.kernel_rows if kernel.row == number}
    return bundle.rows[number - 1], times


def write_export(export: Any, bundle: Bundle, output: Path, **options: Any) -> Any:
    """Return what an export wrote with the options of its simulator."""
    return export(bundle, OPTIONS.get(export, LinkedSimulatorOptions)(output=output, **options))


def refuses(code: str, export: Any, bundle: Bundle, output: Path, **options: Any) -> None:
    """Check that an export fails with a code and writes nothing."""
    with pytest.raises(ExportError) as error:
        write_export(export, bundle, output / "refused", **options)
    assert error.value.code == code
    assert not (output / "refused").exists()


# All simulators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("simulator", EXPORTS)
@pytest.mark.parametrize("kept", ["prefill", "decode"])
def test_a_bundle_of_one_kind_of_steps(bundle: Path, tmp_path: Path, simulator: str, kept: str):
    read = read_bundle(bundle)
    rows = tuple(
        row if row.kind == kept else msgspec.structs.replace(row, fits=False) for row in read.rows
    )
    one = Bundle(read.manifest, rows, read.kernel_rows)
    refuses("export-steps-missing", EXPORTS[simulator], one, tmp_path, model="a/b")


@pytest.mark.parametrize("simulator", ["llmservingsim", "aiconfigurator", "sglang-sim"])
def test_a_bundle_without_the_memory_of_its_device(bundle: Path, tmp_path: Path, simulator: str):
    memory = msgspec.structs.replace(read_bundle(bundle).manifest.memory, device_bytes=0)
    unknown = changed(bundle, memory=memory)
    refuses("export-memory-unknown", EXPORTS[simulator], unknown, tmp_path, model="a")


# Vidur --------------------------------------------------------------------------------------------

PREDICTOR = "vidur/execution_time_predictor/sklearn_execution_time_predictor.py"


def vidur_checkout(directory: Path, trained: str = "") -> Path:
    """Write what the export reads of a checkout of Vidur."""
    names = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act",
             "input_layernorm", "post_attention_layernorm", "attn_rope", "add",
             "attn_kv_cache_save")  # fmt: skip
    listed = ", ".join(f'"{name}"' for name in names)
    path = directory / PREDICTOR
    path.parent.mkdir(parents=True)
    path.write_text(
        f"model_names = [{listed}{trained}]\n"
        'self._train_model(model_name="attn_prefill")\nself._train_model(model_name="attn_decode")\n'
        'df[(df["n_head"] == 1) & (df["prefill_chunk_size"] == 0)]\n'
    )
    models = directory / "vidur/config/model_config.py"
    models.parent.mkdir(parents=True)
    models.write_text('        return "small/llama"\n')
    return directory


def test_vidur_gets_times_of_layers(bundle: Path, tmp_path: Path):
    output, vidur = tmp_path / "profiling", vidur_checkout(tmp_path / "vidur")
    invoke(onerank_command, "export", "vidur", bundle, "--model", "small/llama",
           "--checkout", vidur, "-o", output)  # fmt: skip
    read = read_bundle(bundle)
    directory = output / "compute" / "h100" / "small" / "llama"
    mlp = pl.read_csv(directory / "mlp.csv")
    assert mlp["n_embd"].unique().to_list() == [HIDDEN]
    _, times = row_of(read, Composition(0, 0, 1, 128, 0))
    (row,) = mlp.filter(pl.col("num_tokens") == 128).to_dicts()
    up = sum(times[f"model.layers.*.mlp.{name}"] for name in ("up_proj", "gate_proj"))
    assert row["time_stats.mlp_up_proj.median"] == pytest.approx(up / LAYERS / 1e6, rel=0.02)
    attention = pl.read_csv(directory / "attention.csv")
    decodes = attention.filter(~pl.col("is_prefill"))
    assert decodes["prefill_chunk_size"].sum() == 0
    assert attention.filter(pl.col("is_prefill"))["time_stats.attn_decode.median"].null_count() > 0
    assert attention["time_stats.attn_kv_cache_save.median"].min() > 0
    # The million sequences of the grid do not fit, and so are no batch that Vidur may form.
    assert decodes["batch_size"].max() == 64
    assert mlp["num_tokens"].max() == max(row.new_tokens for row in read.rows if row.fits)


def test_vidur_gets_contexts_as_long_as_a_sequence(bundle: Path, tmp_path: Path):
    """Those of the grid's largest step sum to 32,768 tokens; a sequence may have more."""
    written = write_export(
        export_vidur, changed(bundle, longest=65536), tmp_path / "long", model="a"
    )
    assert pl.read_csv(written.attention)["kv_cache_size"].max() == 65535
    memory = msgspec.structs.replace(read_bundle(bundle).manifest.memory, tokens_that_fit=1000)
    written = write_export(
        export_vidur, changed(bundle, memory=memory), tmp_path / "full", model="a"
    )
    attention = pl.read_csv(written.attention)
    cached = attention["batch_size"] * attention["kv_cache_size"]
    assert 900 < (cached + attention["prefill_chunk_size"]).max() <= 1000


def test_a_vidur_of_another_format(bundle: Path, tmp_path: Path):
    arguments = ("export", "vidur", bundle, "-o", tmp_path / "o", "--model")
    other = vidur_checkout(tmp_path / "other", trained=', "attn_moe"')
    same = vidur_checkout(tmp_path / "same")
    refused(onerank_command, *arguments, "small/llama", "--checkout", other,
            error="vidur-version-unknown", naming="attn_moe")  # fmt: skip
    refused(onerank_command, *arguments, "no/model", "--checkout", same,
            error="vidur-model-unknown", naming="small/llama")  # fmt: skip
    refused(onerank_command, *arguments, "a", "--checkout", tmp_path, error="vidur-version-unknown")
    assert not (tmp_path / "o").exists()


def test_what_vidur_has_no_tables_for(bundle: Path, tmp_path: Path):
    other = changed(bundle, device="MI300X")
    refuses("vidur-device-unknown", export_vidur, other, tmp_path, model="a")
    read = read_bundle(bundle)
    others = tuple(k for k in read.kernel_rows if "mlp.down_proj" not in (k.module or ""))
    lacking = Bundle(read.manifest, read.rows, others)
    refuses("vidur-model-unsupported", export_vidur, lacking, tmp_path, model="a")


# LLMServingSim ------------------------------------------------------------------------------------

LLAMA_LAYERS = """
sequence:
  prologue: [embedding]
  pre_attn: [layernorm, qkv_proj, rotary_emb, attention]
  post_attn: [o_proj, layernorm]
  mlp_dense: [gate_up_proj, act_fn, down_proj]
  mlp_moe: []
  head: [final_layernorm, lm_head, sampler{more}]
"""


def llmservingsim_checkout(directory: Path, more: str = "", columns: str = "kv_decode") -> Path:
    """Write what the export reads of a checkout of LLMServingSim."""
    catalog = directory / "profiler/models/llama.yaml"
    catalog.parent.mkdir(parents=True)
    catalog.write_text(LLAMA_LAYERS.format(more=more))
    traces = directory / "serving/core/trace_generator.py"
    traces.parent.mkdir(parents=True)
    names = ("tokens", "sequences", "prefill_chunk", "kv_prefill", "n_decode", columns, "time_us")
    traces.write_text("\n".join(f'df["{name}"]' for name in names))
    return directory


def simulated_us(profile: Path, tokens: int, sequences: int, attention: dict[str, int]) -> float:
    """Return the time of a step as LLMServingSim sums its layers."""
    dense = pl.read_csv(profile / "dense.csv").filter(pl.col("tokens") == tokens)
    us = dict(zip(dense["layer"], dense["time_us"], strict=True))
    head = pl.read_csv(profile / "per_sequence.csv").filter(pl.col("sequences") == sequences)
    (attention_us,) = pl.read_csv(profile / "attention.csv").filter(**attention)["time_us"]
    layer = 2 * us["layernorm"] + attention_us
    layer += sum(us[name] for name in ("qkv_proj", "rotary_emb", "o_proj"))
    layer += sum(us[name] for name in ("gate_up_proj", "act_fn", "down_proj"))
    return us["embedding"] + LAYERS * layer + us["final_layernorm"] + head["time_us"].sum()


def test_the_layers_of_llmservingsim_sum_to_a_step(bundle: Path, tmp_path: Path):
    checkout = llmservingsim_checkout(tmp_path / "checkout")
    invoke(onerank_command, "export", "llmservingsim", bundle, "--model", "small/llama",
           "--checkout", checkout, "-o", tmp_path / "o")  # fmt: skip
    profile = tmp_path / "o/profiler/perf/H100-SXM/small/llama/bf16/tp1"
    read = read_bundle(bundle)
    prefill, times = row_of(read, Composition(0, 0, 1, 512, 0))
    shape = {"prefill_chunk": 512, "kv_prefill": 0, "n_decode": 0, "kv_decode": 0}
    assert simulated_us(profile, 512, 1, shape) == pytest.approx(prefill.graph_ns / 1e3, rel=0.01)
    dense = pl.read_csv(profile / "dense.csv")
    (down,) = dense.filter(layer="down_proj", tokens=512)["time_us"]
    assert down == pytest.approx(times["model.layers.*.mlp.down_proj"] / LAYERS / 1e3, rel=0.01)
    decode, _ = row_of(read, Composition(8, 512))
    shape = {"prefill_chunk": 0, "kv_prefill": 0, "n_decode": 8, "kv_decode": 512}
    assert simulated_us(profile, 8, 8, shape) == pytest.approx(decode.graph_ns / 1e3, rel=0.01)
    meta = yaml.safe_load((profile.parent / "meta.yaml").read_text())
    assert meta["engine_effective"] == {"max_num_batched_tokens": 512, "max_num_seqs": 64}


def test_the_gaps_of_a_cuda_graph_are_in_the_step(bundle: Path, tmp_path: Path):
    read = read_bundle(bundle)
    gap_ns = 40_000
    rows = tuple(
        msgspec.structs.replace(row, graph_ns=row.graph_ns and row.graph_ns + gap_ns)
        for row in read.rows
    )
    written = write_export(
        export_llmservingsim, Bundle(read.manifest, rows, read.kernel_rows), tmp_path
    )
    shape = {"prefill_chunk": 512, "kv_prefill": 0, "n_decode": 0, "kv_decode": 0}
    step_us = simulated_us(written.profile / "tp1", 512, 1, shape)
    before, _ = row_of(read, Composition(0, 0, 1, 512, 0))
    assert step_us == pytest.approx((before.graph_ns + gap_ns) / 1e3, rel=0.01)


def test_the_kv_cache_of_llmservingsim_is_the_bundles(bundle: Path, tmp_path: Path):
    manifest = read_bundle(bundle).manifest
    written = write_export(export_llmservingsim, read_bundle(bundle), tmp_path)
    cluster = json.loads(written.cluster.read_text())
    (instance,) = cluster["nodes"][0]["instances"]
    npu = instance["npu_mem"]
    room = npu["mem_size"] * 2**30 * npu["mem_util"] - manifest.memory.weights_bytes
    tokens = room / manifest.memory.kv_bytes_per_token
    assert tokens == pytest.approx(manifest.memory.tokens_that_fit, abs=1)
    config = json.loads(written.model_config.read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")


def test_tensor_parallel_sizes_share_a_profile(bundle: Path, tmp_path: Path):
    write_export(export_llmservingsim, read_bundle(bundle), tmp_path)
    written = write_export(export_llmservingsim, changed(bundle, tp=2), tmp_path)
    assert sorted(path.name for path in written.profile.iterdir()) == ["meta.yaml", "tp1", "tp2"]
    cluster = json.loads(written.cluster.read_text())
    assert (cluster["link_bw"], cluster["link_latency"]) == (450, 830)
    assert cluster["nodes"][0]["instances"][0]["num_npus"] == 2


@pytest.mark.parametrize("simulator", ["llmservingsim", "aiconfigurator", "sglang-sim"])
def test_a_gpu_without_a_description(bundle: Path, tmp_path: Path, simulator: str):
    other = changed(bundle, tp=2, device="Other GPU")
    refuses("export-gpu-unknown", EXPORTS[simulator], other, tmp_path, model="a")
    shipped = resources.files("onerank.annotate") / "gpus" / "T4.toml"
    lines = shipped.read_text().splitlines(keepends=True)
    described = tmp_path / "other.toml"
    described.write_text("".join(line for line in lines if not line.startswith("link_")))
    options = {"model": "a", "gpu": str(described)}
    refuses("export-link-unknown", EXPORTS[simulator], other, tmp_path, **options)


def test_the_memory_bandwidth_is_that_of_the_description(bundle: Path, tmp_path: Path):
    """ASTRA-sim takes 3 bytes / bandwidth for each byte of a reduction."""
    other = changed(bundle, tp=2, device="Other GPU")
    written = write_export(export_llmservingsim, other, tmp_path, gpu="H200", link_gb_per_s=32)
    cluster = json.loads(written.cluster.read_text())
    assert cluster["link_bw"] == 32
    assert cluster["nodes"][0]["instances"][0]["npu_mem"]["mem_bw"] == 4800
    assert written.profile.parts[-3] == "Other-GPU"


def test_norms_of_queries_and_keys_are_qwen3s(bundle: Path, tmp_path: Path):
    read = read_bundle(bundle)
    norms = tuple(
        msgspec.structs.replace(kernel, module=f"model.layers.*.self_attn.{name}_norm")
        for kernel in read.kernel_rows
        if (kernel.module or "").endswith(".input_layernorm")
        for name in "qk"
    )
    written = write_export(
        export_llmservingsim,
        Bundle(read.manifest, read.rows, (*read.kernel_rows, *norms)),
        tmp_path,
    )
    assert json.loads(written.model_config.read_text())["model_type"] == "qwen3"
    dense = pl.read_csv(written.profile / "tp1" / "dense.csv").filter(tokens=512)
    us = dict(zip(dense["layer"], dense["time_us"], strict=True))
    _, times = row_of(read, Composition(0, 0, 1, 512, 0))
    norm_us = times["model.layers.*.input_layernorm"] / LAYERS / 1e3
    assert us["qk_norm"] == pytest.approx(2 * norm_us, rel=0.01)


def test_an_llmservingsim_of_another_format(bundle: Path, tmp_path: Path):
    arguments = ("export", "llmservingsim", bundle, "-o", tmp_path / "o", "--checkout")
    for name, options in (("layers", {"more": ", mtp"}), ("columns", {"columns": "kv_total"})):
        other = llmservingsim_checkout(tmp_path / name, **options)
        refused(onerank_command, *arguments, other, error="llmservingsim-version-unknown",
                naming="mtp" if name == "layers" else "kv_decode")  # fmt: skip
    refused(onerank_command, *arguments, tmp_path, error="llmservingsim-version-unknown")
    broken = llmservingsim_checkout(tmp_path / "broken")
    (broken / "profiler/models/llama.yaml").write_text("[")
    refused(onerank_command, *arguments, broken, error="llmservingsim-version-unknown")
    assert not (tmp_path / "o").exists()


def test_a_model_that_llmservingsim_has_no_layers_for(bundle: Path, tmp_path: Path):
    code, export = "llmservingsim-model-unsupported", export_llmservingsim
    read = read_bundle(bundle)
    experts = msgspec.structs.replace(read.kernel_rows[0], module="model.layers.*.mlp.experts")
    refuses(code, export, Bundle(read.manifest, read.rows, (*read.kernel_rows, experts)), tmp_path)
    others = tuple(k for k in read.kernel_rows if "mlp.down_proj" not in (k.module or ""))
    refuses(code, export, Bundle(read.manifest, read.rows, others), tmp_path)
    config = read.manifest.config
    refuses(code, export, changed(bundle, config={**config, "dtype": "float64"}), tmp_path)
    shapeless = {name: value for name, value in config.items() if name != "intermediate_size"}
    refuses(code, export, changed(bundle, config=shapeless), tmp_path)


def with_experts(bundle: Path, **fields: Any) -> Bundle:
    """Return the bundle as that of a model whose layers have eight experts instead of an MLP."""
    read = read_bundle(bundle)
    kernels = tuple(
        msgspec.structs.replace(kernel, module="model.layers.*.mlp.experts")
        if ".mlp" in (kernel.module or "")
        else kernel
        for kernel in read.kernel_rows
    )
    config = {**read.manifest.config, "num_local_experts": 8, "num_experts_per_tok": 2}
    manifest = msgspec.structs.replace(read.manifest, config=config, **fields)
    return Bundle(manifest, read.rows, kernels, bundle)


def test_experts_are_a_table_of_llmservingsim(bundle: Path, tmp_path: Path):
    read = with_experts(bundle)
    written = write_export(export_llmservingsim, read, tmp_path)
    profile = written.profile / "tp1"
    moe = pl.read_csv(profile / "moe.csv")
    assert set(moe["activated_experts"]) == {8}
    mlp = {"gate_up_proj", "act_fn", "down_proj"}
    assert not mlp & set(pl.read_csv(profile / "dense.csv")["layer"])
    number = [row.composition for row in read.rows].index(Composition(0, 0, 1, 512, 0)) + 1
    experts_ns = sum(
        kernel.time_ns
        for kernel in read.kernel_rows
        if kernel.row == number and "experts" in (kernel.module or "")
    )
    (time_us,) = moe.filter(tokens=512)["time_us"]
    assert time_us == pytest.approx(experts_ns / LAYERS / 1e3, rel=0.01)
    assert json.loads(written.model_config.read_text())["model_type"] == "mixtral"
    cluster = json.loads(written.cluster.read_text())
    assert cluster["nodes"][0]["instances"][0]["ep_size"] == 1


def test_ranks_of_experts_are_instances_of_llmservingsim(bundle: Path, tmp_path: Path):
    alone = write_export(export_llmservingsim, with_experts(bundle), tmp_path)
    shared = write_export(export_llmservingsim, with_experts(bundle, ep=2), tmp_path)
    (node,) = json.loads(shared.cluster.read_text())["nodes"]
    sizes = [[i[key] for key in ("tp_size", "ep_size", "dp_group")] for i in node["instances"]]
    assert (node["num_instances"], sizes) == (2, [[1, 2, "A"]] * 2)
    one, two = (pl.read_csv(each.profile / "tp1" / "moe.csv") for each in (alone, shared))
    assert set(two["activated_experts"]) == {4}
    # Of 512 tokens that go to two experts each, three quarters reach one of two ranks.
    (whole,) = one.filter(tokens=512)["time_us"]
    (reached,) = two.filter(tokens=384)["time_us"]
    assert reached == pytest.approx(whole, rel=0.002)
    # The simulator would take the experts of tp 1 for all sizes of a profile.
    assert alone.profile.parts[-3] != shared.profile.parts[-3]


def test_experts_that_llmservingsim_cannot_count(bundle: Path, tmp_path: Path):
    read = with_experts(bundle)
    config = {name: n for name, n in read.manifest.config.items() if name != "num_local_experts"}
    manifest = msgspec.structs.replace(read.manifest, config=config)
    unnamed = Bundle(manifest, read.rows, read.kernel_rows)
    refuses("llmservingsim-model-unsupported", export_llmservingsim, unnamed, tmp_path)
    checkout = llmservingsim_checkout(tmp_path / "dense")
    refuses("llmservingsim-version-unknown", export_llmservingsim, read, tmp_path,
            checkout=checkout)  # fmt: skip


# aiconfigurator -----------------------------------------------------------------------------------

READER = "aiconfigurator_core/sdk/operations/fpm_forward.py"
IDENTITY = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode",
            "kv_cache_dtype", "tp", "pp", "dp", "moe_tp", "moe_ep", "cp", "moe_backend",
            "attention_backend", "enable_wideep", "enable_eplb")  # fmt: skip


def aiconfigurator_checkout(directory: Path, columns: tuple[str, ...] = IDENTITY) -> Path:
    """Write what the export reads of aiconfigurator."""
    path = directory / READER
    path.parent.mkdir(parents=True)
    path.write_text(f"_CELL_MATCH_COLUMNS = {columns!r}\n")
    return directory


def test_aiconfigurator_gets_whole_steps(bundle: Path, tmp_path: Path):
    checkout = aiconfigurator_checkout(tmp_path / "checkout")
    invoke(onerank_command, "export", "aiconfigurator", bundle, "--model", "small/llama",
           "--checkout", checkout, "-o", tmp_path / "o")  # fmt: skip
    directory = tmp_path / "o/data/h100_sxm_onerank/vllm/onerank"
    steps = pl.read_parquet(directory / "fpm_forward_perf.parquet")
    read = read_bundle(bundle)
    for composition, new, cached in (
        (Composition(0, 0, 1, 512, 0), 512, 0),
        (Composition(0, 0, 1, 64, 256), 64, 256),
        (Composition(8, 512), 0, 8 * 513),
    ):
        row, _ = row_of(read, composition)
        (latency_ms,) = steps.filter(
            workload_kind=row.kind, batch_size=row.batch, total_prefill_tokens=new,
            total_kv_read_tokens=cached,
        )["latency_ms"]  # fmt: skip
        assert latency_ms == pytest.approx(row.graph_ns / 1e6, rel=0.01)
    # A batch between two of the table is interpolated from one above the smaller.
    batches = set(steps.filter(workload_kind="decode")["batch_size"])
    assert {1, 2, 3, 8, 9, 63, 64} - batches <= {63}
    assert max(batches) == 64
    metadata = json.loads((directory / "fpm_forward_perf.metadata.json").read_text())
    table = (directory / "fpm_forward_perf.parquet").read_bytes()
    assert metadata["parquet_sha256"] == hashlib.sha256(table).hexdigest()
    assert metadata["row_count"] == len(steps)
    system = yaml.safe_load((tmp_path / "o/h100_sxm_onerank.yaml").read_text())
    assert system["data_dir"] == "data/h100_sxm_onerank"
    assert system["gpu"]["mem_capacity"] == read.manifest.memory.device_bytes
    assert system["gpu"]["sm_version"] == 90
    # NVIDIA's datasheet, dense.
    rates = [system["gpu"][f"{name}_tc_flops"] for name in ("bfloat16", "fp8", "int8")]
    assert rates == [989e12, 1979e12, 1979e12]


def test_an_aiconfigurator_of_another_format(bundle: Path, tmp_path: Path):
    arguments = ("export", "aiconfigurator", bundle, "--model", "a", "-o", tmp_path / "o",
                 "--checkout")  # fmt: skip
    code = "aiconfigurator-version-unknown"
    other = aiconfigurator_checkout(tmp_path / "other", (*IDENTITY, "enable_mtp"))
    refused(onerank_command, *arguments, other, error=code, naming="enable_mtp")
    swapped = aiconfigurator_checkout(tmp_path / "swapped", IDENTITY[::-1])
    refused(onerank_command, *arguments, swapped, error=code)
    refused(onerank_command, *arguments, tmp_path, error=code)
    assert not (tmp_path / "o").exists()


def test_the_steps_of_aiconfigurator_contain_collectives(bundle: Path, tmp_path: Path):
    tables = [
        pl.read_parquet(
            write_export(export_aiconfigurator, changed(bundle, tp=tp), tmp_path / str(tp)).table
        )
        for tp in (1, 2)
    ]
    shape = {"workload_kind": "decode", "batch_size": 8, "total_kv_read_tokens": 8 * 513}
    one, two = (table.filter(**shape)["latency_ms"].item() for table in tables)
    # An all-reduce of the embedding and two of each layer, of 256 numbers for each token, and an
    # all-gather of half of the logits.
    calls = [("all_reduce", 8 * 2 * HIDDEN)] * (1 + 2 * LAYERS) + [("all_gather", 8 * 1024)]
    link = ClusterLink(450)
    network = ClusterNetwork(2, link, link, 90, "H100-SXM")
    assert two - one == pytest.approx(sum(network.time_ns(*c, (0, 1)) for c in calls) / 1e6)
    assert set(tables[1]["tp"]) == {2}
    other = read_bundle(bundle)
    three = msgspec.structs.replace(other.rows[0], decodes=3, batch=3, new_tokens=3)
    rows = (three, *other.rows[1:])
    manifest = msgspec.structs.replace(other.manifest, tp=2)
    refuses("export-collectives-unknown", export_aiconfigurator,
            Bundle(manifest, rows, other.kernel_rows, bundle), tmp_path)  # fmt: skip


@pytest.mark.parametrize("simulator", ["aiconfigurator", "sglang-sim"])
def test_collectives_of_a_recording_on_another_gpu(bundle: Path, tmp_path: Path, simulator: str):
    memory = RankMemory(read_bundle(bundle).manifest.memory.device_bytes)
    recorded = changed(bundle, tp=2, memory=memory, collectives_timed=True)
    write_export(EXPORTS[simulator], recorded, tmp_path, model="a")
    predicted = changed(bundle, tp=2, memory=memory)
    refuses("export-collectives-unknown", EXPORTS[simulator], predicted, tmp_path, model="a")


def test_aiconfigurator_gets_the_model(bundle: Path, tmp_path: Path):
    written = write_export(export_aiconfigurator, read_bundle(bundle), tmp_path)
    path = Path(written.options[written.options.index("--model-path") + 1])
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert set(pl.read_parquet(written.table)["model_path"]) == {str(path)}


def test_what_aiconfigurator_has_no_table_for(bundle: Path, tmp_path: Path):
    def refuses_this(code: str, other: Bundle) -> None:
        refuses(code, export_aiconfigurator, other, tmp_path, model="a")

    read = read_bundle(bundle)
    half = {**read.manifest.config, "dtype": "float16"}
    refuses_this("aiconfigurator-model-unsupported", changed(bundle, config=half))


def test_experts_select_rows_of_aiconfigurator(bundle: Path, tmp_path: Path):
    sliced = write_export(export_aiconfigurator, with_experts(bundle, tp=2), tmp_path / "tp2")
    names = ("tp", "dp", "moe_tp", "moe_ep")
    assert pl.read_parquet(sliced.table).select(names).unique().rows() == [(2, 1, 2, 1)]
    assert "--moe-tp-size" in sliced.options
    alone = write_export(export_aiconfigurator, with_experts(bundle), tmp_path / "tp1")
    assert pl.read_parquet(alone.table).select(names).unique().rows() == [(1, 1, 1, 1)]
    dense = write_export(export_aiconfigurator, read_bundle(bundle), tmp_path / "dense")
    assert "--moe-tp-size" not in dense.options


def test_sizes_of_collectives_grow_with_tokens_or_stay():
    """Of experts, the sizes of all-to-alls are exchanged in a gather of constant size."""

    def traced(composition: Composition, *calls: tuple[str, int]) -> Any:
        figures = dict.fromkeys(("step_ns", "p10_ns", "p90_ns", "graph_ns", "graph_low_ns",
                                 "graph_high_ns", "gpu_ns", "host_ns", "peak_bytes"))  # fmt: skip
        row = StepRow.of(composition, **figures, fits=True, source="measured")
        return TracedStep(row, tuple((name, 2, size) for name, size in calls))

    decode = traced(Composition(64, 64), ("all_gather", 64), ("all_to_all", 64 * 4096))
    prefill = traced(Composition(0, 0, 1, 512, 0), ("all_gather", 64), ("all_to_all", 512 * 4096))
    gather, tokens = collective_sizes("Mixtral", decode, prefill)
    step = Composition(0, 0, 2, 100, 0)
    assert (gather.of(step), tokens.of(step)) == (64, 200 * 4096)


# SGLang Simulator ---------------------------------------------------------------------------------


def sglang_checkout(directory: Path, key: str = "req.past_kv_length") -> Path:
    """Write what the export reads of a checkout of SGLang."""
    path = directory / "tools/sglang-simulator/src/sglang_simulator/time_predictor/replay.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"key = json.dumps(sorted([req.extend_length, {key}] for req in batch.reqs))\n"
        "miss_strategy, miss_knn_k = 'knn', 1\n"
    )
    return directory


def nearest(table: dict[str, float], batch: list[list[int]]) -> float:
    """Return the time of a batch that the table lacks, as SGLang Simulator finds it."""
    sizes = np.array(
        [[len(pairs), *np.sum(pairs, axis=0)] for pairs in map(json.loads, table)], dtype=float
    )
    wanted = np.array([len(batch), *np.sum(batch, axis=0)], dtype=float)
    distance = (((sizes - wanted) / sizes.std(axis=0)) ** 2).sum(axis=1)
    return [*table.values()][int(distance.argmin())]


def test_sglang_simulator_finds_the_steps_of_a_bundle(bundle: Path, tmp_path: Path):
    checkout = sglang_checkout(tmp_path / "sglang")
    invoke(onerank_command, "export", "sglang-sim", bundle, "--checkout", checkout,
           "-o", tmp_path / "o")  # fmt: skip
    config = json.loads((tmp_path / "o/simulator.json").read_text())
    assert config["scheduler"]["data_type"] == "BF16"
    assert [config["scheduler"][f"{name}_size"] for name in ("tp", "ep", "dp", "pp")] == [1] * 4
    rates = config["platform"]["accelerator"]["tflops"]
    assert rates == {"BF16_TENSOR": 989.0, "FP16_TENSOR": 989.0, "FP8_TENSOR": 1979.0}
    predictor = config["predictor"]
    assert (predictor["name"], predictor["miss_strategy"]) == ("replay", "knn")
    table = json.loads((tmp_path / "o" / predictor["database_path"]).read_text())
    read = read_bundle(bundle)
    for row in read.rows:
        if row.fits:
            c = row.composition
            pairs = [[c.prefill_tokens, c.prefill_context]] * c.prefills
            seconds = table[json.dumps(sorted(pairs + [[1, c.decode_context]] * c.decodes))]
            assert seconds == pytest.approx(row.graph_ns / 1e9, rel=0.01)
    # Sequences of a batch differ in length, and the nearest row has their sums.
    lengths = [250, 430, 610, 500]
    (between,) = read.at([Composition(4, sum(lengths) // 4)])["graph_ns"]
    found = nearest(table, [[1, length] for length in lengths])
    assert found == pytest.approx(between / 1e9, rel=0.01)
    (prefill,) = read.at([Composition(0, 0, 1, 300, 0)])["graph_ns"]
    assert nearest(table, [[300, 0]]) == pytest.approx(prefill / 1e9, rel=0.03)


def test_the_steps_of_sglang_simulator_contain_collectives(bundle: Path, tmp_path: Path):
    tables = [
        json.loads(
            write_export(
                export_sglang_sim, changed(bundle, tp=tp), tmp_path / str(tp)
            ).table.read_text()
        )
        for tp in (1, 2)
    ]
    key = json.dumps([[1, 512]] * 8)
    calls = [("all_reduce", 8 * 2 * HIDDEN)] * (1 + 2 * LAYERS) + [("all_gather", 8 * 1024)]
    link = ClusterLink(450)
    network = ClusterNetwork(2, link, link, 90, "H100-SXM")
    expected = sum(network.time_ns(*call, (0, 1)) for call in calls) / 1e9
    assert tables[1][key] - tables[0][key] == pytest.approx(expected)


def test_what_sglang_simulator_does_not_read(bundle: Path, tmp_path: Path):
    arguments = ("export", "sglang-sim", bundle, "-o", tmp_path / "o", "--checkout")
    code = "sglang-sim-version-unknown"
    other = sglang_checkout(tmp_path / "other", "req.prefix_length")
    refused(onerank_command, *arguments, other, error=code, naming=str(other))
    refused(onerank_command, *arguments, tmp_path, error=code)
    assert not (tmp_path / "o").exists()
    eight = {**read_bundle(bundle).manifest.config, "dtype": "float64"}
    refuses("sglang-sim-model-unsupported", export_sglang_sim, changed(bundle, config=eight),
            tmp_path)  # fmt: skip
