"""Export a bundle as a profile of LLMServingSim 2, a simulator of serving clusters on ASTRA-sim.

LLMServingSim (github.com/casys-kaist/LLMServingSim) looks up the time of each layer of an engine in
tables of one GPU, model and tensor-parallel size, in microseconds: `dense.csv` by tokens,
`per_sequence.csv` by sequences, `attention.csv` by the prefill, its KV cache, the decodes and
theirs, `moe.csv` by tokens and active experts. It interpolates linearly. Its own profiler measures
each size of tensor parallelism as a model with tp 1. Collectives are ASTRA-sim's.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from onerank.annotate.gpus.gpu import Gpu
from onerank.capture.serving.compositions import Composition
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replace_files
from onerank.serving.bundle import Bundle
from onerank.serving.simulators.operator_times import (
    EXPERTS,
    LAYER,
    Extent,
    OperatorTimes,
    ServedRank,
    cache_notes,
    described_gpu,
    growing,
    link_gb_per_s,
    model_dtype,
    require_memory,
    step_ns,
    token_sizes,
)
from onerank.serving.simulators.options import LinkedSimulatorOptions

# Layer of a decoder in the simulator's catalogs -> its modules.
_LAYER = {
    "qkv_proj": LAYER + r"\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)",
    "rotary_emb": LAYER + r"\.self_attn(\.rotary_emb)?",
    "o_proj": LAYER + r"\.self_attn\.o_proj",
    # Runs twice in a layer. The engine's kernel includes the residual addition.
    "layernorm": LAYER + r"(\.(input|post_attention)_layernorm)?",
}

_MLP = {
    "gate_up_proj": LAYER + r"\.mlp\.(gate_proj|up_proj|gate_up_proj)",
    "act_fn": LAYER + r"\.mlp(\.act_fn)?",
    "down_proj": LAYER + r"\.mlp\.down_proj",
}

# The gate and the experts are one layer of the simulator.
_MOE = {"moe": rf"{LAYER}\.({EXPERTS}|(mlp|block_sparse_moe)(\.(gate|router)(\..*)?)?)"}

_QK_NORM = {"qk_norm": LAYER + r"\.self_attn\.(q_norm|k_norm)"}

_ATTENTION = {
    "prefill": LAYER + r"\.self_attn\.step_attention\.prefill",
    "decode": LAYER + r"\.self_attn\.step_attention\.decode",
    "cache_write": LAYER + r"\.self_attn\.step_attention\.(prefill|decode)\.cache_write",
}

_TRACES = Path("serving/core/trace_generator.py")
_CATALOGS = Path("profiler/models")

# The simulator rounds times to nanoseconds, and to 1 at least. Sampling is not in a bundle.
_NO_TIME_US = 0.001

# Host memory of the simulator's own example of an H100 cluster. Steps read their token numbers
# from it and write the sampled ones: 16 ns for each token of a model of 4096 features.
_HOST_MEMORY = {"mem_size": 1024, "mem_bw": 512, "mem_latency": 0}

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class LLMServingSimExport:
    """A profile written for LLMServingSim.

    Attributes:
        profile: directory of the tables.
        model_config: file with the model's shapes.
        cluster: file that describes a cluster of one instance.
        rows: rows of the tables.
        options: options of `python -m serving` that use the files.
        notes: how far the simulator's KV cache is that of the model.
    """

    profile: Path
    model_config: Path
    cluster: Path
    rows: int
    options: tuple[str, ...]
    notes: tuple[Note, ...] = ()


_SIZED_BY = "mem_util leaves room for the tokens that fit if all layers keep all tokens"


def export_llmservingsim(bundle: Bundle, options: LinkedSimulatorOptions) -> LLMServingSimExport:
    """Write the tables of a bundle for LLMServingSim.

    Args:
        bundle: the bundle.
        options: the output gets the layout of a checkout; the default name of the model is its
            class.

    Raises:
        ExportError: the model has other operators, the device's memory, description or link is not
            known, or the checkout reads another format.
        AnnotateError: the bundle has too few points.
    """
    served = ServedRank.of(bundle, "LLMServingSim")
    require_memory(bundle, "LLMServingSim")
    extent = Extent.of(bundle, "LLMServingSim")
    described = described_gpu(bundle, options.gpu)
    manifest = bundle.manifest
    output, model = options.output, options.model or served.model
    architecture = _architecture(bundle, served)
    if options.checkout is not None:
        _check_version(options.checkout, architecture)
    config = _model_config(bundle, served, architecture)
    hardware = re.sub(r"[^\w.-]+", "-", manifest.device)
    if served.has_experts and served.tp * served.ep > 1:
        # The simulator takes the experts' times of the smallest tensor-parallel size of a profile,
        # which therefore has one size.
        hardware += f"-tp{served.tp}-ep{served.ep}"
    tables = _tables(bundle, served, extent)
    profile = Path("profiler/perf") / hardware / model / _DTYPES[config["torch_dtype"]]
    cluster = Path("configs/cluster") / f"{model.replace('/', '_')}_{hardware}_tp{served.tp}.json"
    model_config = Path("configs/model") / f"{model}.json"
    names = {"model_name": model, "hardware": hardware}
    files = {
        **{
            output / profile / f"tp{served.tp}" / f"{name}.csv": _csv(columns, rows)
            for name, (columns, rows) in tables.items()
        },
        output / profile / "meta.yaml": _json(_meta(bundle, extent)),
        output / model_config: _json(config),
        output / cluster: _json(_cluster(bundle, served, names, described, options.link_gb_per_s)),
    }
    replace_files(files)
    run_options = (
        *("--cluster-config", str(cluster), "--dtype", config["torch_dtype"]),
        *("--max-num-batched-tokens", str(extent.new_tokens)),
        *("--max-num-seqs", str(extent.decodes)),
    )
    rows = sum(len(rows) for _, rows in tables.values())
    return LLMServingSimExport(
        output / profile,
        output / model_config,
        output / cluster,
        rows,
        run_options,
        notes=tuple(cache_notes(bundle, _SIZED_BY)),
    )


def _architecture(bundle: Bundle, served: ServedRank) -> str:
    """Return the simulator's name of the model's list of layers."""
    has_norms = _has(bundle, _QK_NORM["qk_norm"])
    if served.has_experts:
        return "qwen3_moe" if has_norms else "mixtral"
    return "qwen3" if has_norms else "llama"


def _has(bundle: Bundle, pattern: str) -> bool:
    return any(re.fullmatch(pattern, module) for module in bundle.modules)


_Row = tuple[Any, ...]


def _tables(
    bundle: Bundle, served: ServedRank, extent: Extent
) -> dict[str, tuple[Sequence[str], list[_Row]]]:
    """Return the columns and rows of each table.

    Raises:
        ExportError: the model lacks the modules of a layer, or has modules of none.
    """
    layers = _LayerTimes.of(bundle, served)
    dense: list[_Row] = []
    for tokens in token_sizes(extent.new_tokens):
        step = Composition(prefills=1, prefill_tokens=tokens)
        for name in layers.dense:
            # Each step embeds once, so this row carries the gaps between the step's kernels.
            gaps_us = _gaps_us(bundle, step) if name == "embedding" else 0.0
            dense.append((name, tokens, layers.us(name, step) + gaps_us))
    per_sequence: list[_Row] = []
    # A step with a prefill has one sequence more than decodes.
    for sequences in token_sizes(extent.decodes + 1):
        step = Composition(decodes=sequences, decode_context=1)
        per_sequence.append(("lm_head", sequences, layers.us("lm_head", step)))
        per_sequence.append(("sampler", sequences, _NO_TIME_US))
    attention = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    tables: dict[str, tuple[Sequence[str], list[_Row]]] = {
        "dense": (("layer", "tokens", "time_us"), dense),
        "per_sequence": (("layer", "sequences", "time_us"), per_sequence),
        "attention": (attention, _attention(bundle, layers, extent)),
    }
    if served.has_experts:
        columns = ("tokens", "activated_experts", "time_us")
        tables["moe"] = columns, _moe(bundle, served, layers, extent)
    return tables


def _moe(bundle: Bundle, served: ServedRank, layers: "_LayerTimes", extent: Extent) -> list[_Row]:
    """Return the rows of `moe.csv`.

    The simulator looks up the tokens of its rank that reach an expert of the rank, by its balanced
    gate: of a group of n ranks, 1 - (1 - 1/n)^k of them. The rows have the times of the steps whose
    tokens this gate turns into theirs. Few tokens activate few experts, in the bundle's times too,
    so the rows have one number of experts.
    """
    experts, per_token = _experts(bundle)
    group = served.tp * served.ep
    share = 1 - (1 - 1 / group) ** per_token
    rows: list[_Row] = []
    for tokens in token_sizes(max(1, round(extent.new_tokens * share))):
        step = Composition(prefills=1, prefill_tokens=max(1, round(tokens / share)))
        rows.append((tokens, max(1, experts // group), layers.us("moe", step)))
    return rows


def _experts(bundle: Bundle) -> tuple[int, int]:
    """Return the number of experts, and how many of them a token is sent to.

    Raises:
        ExportError: the configuration does not have the simulator's names.
    """
    config = bundle.manifest.config
    experts = config.get("num_local_experts", config.get("num_experts"))
    per_token = config.get("num_experts_per_tok")
    if not isinstance(experts, int) or not isinstance(per_token, int):
        raise _unsupported(
            bundle, "its configuration has no num_local_experts or num_experts, or no "
            "num_experts_per_tok",
        )  # fmt: skip
    return experts, per_token


def _attention(bundle: Bundle, layers: "_LayerTimes", extent: Extent) -> list[_Row]:
    """Return the rows of `attention.csv`, whose key (0, 0) means that a step has no such part."""
    contexts = growing(16, extent.longest_context, 2)
    # Attention grows with the square of a chunk, and the simulator interpolates linearly. It is
    # faster for chunks of whole blocks, as engines use them, so those of the bundle have a row.
    own = {row.prefill_tokens for row in bundle.rows if row.fits and row.prefill_tokens}
    chunks = sorted({*growing(16, extent.new_tokens, 1.4), *own})
    prefill_us, decode_us = {(0, 0): 0.0}, {(0, 0): 0.0}
    for chunk, context in itertools.product(chunks, (0, *contexts)):
        step = Composition(0, 0, 1, chunk, context)
        prefill_us[chunk, context] = layers.us("prefill", step)
    for batch, context in itertools.product(growing(1, extent.decodes, 2), contexts):
        decode_us[batch, context] = layers.us("decode", Composition(batch, context))

    @cache
    def write_us(tokens: int) -> float:
        return layers.us("cache_write", Composition(prefills=1, prefill_tokens=tokens))

    return [
        (*prefill, *decode, prefill_us[prefill] + decode_us[decode] + write_us(tokens))
        for prefill, decode in itertools.product(prefill_us, decode_us)
        if (tokens := prefill[0] + decode[0])
    ]


@dataclass(frozen=True)
class _LayerTimes:
    """Times of the simulator's layers.

    Attributes:
        times: of all calls in a step.
        calls: name of a layer -> its calls in a step.
        dense: names of the layers in `dense.csv`.
    """

    times: OperatorTimes
    calls: Mapping[str, int]
    dense: tuple[str, ...]

    @classmethod
    def of(cls, bundle: Bundle, served: ServedRank) -> "_LayerTimes":
        """Return the times of a bundle.

        Raises:
            ExportError: the model lacks the modules of a layer, or has modules of none.
        """
        of_layer = _LAYER | (_QK_NORM if _has(bundle, _QK_NORM["qk_norm"]) else {})
        mlp = _MOE if served.has_experts else _MLP
        once = {
            # The model itself selects the last token of each sequence. The head comes before the
            # embedding, whose pattern matches its path too.
            "lm_head": rf"lm_head|{re.escape(served.model)}|",
            # The frequencies of the positions are computed once.
            "embedding": r"\w+(\.embed_tokens|\.rotary_emb)?",
            "final_layernorm": r"\w+\.norm",
        }
        patterns = {**of_layer, **mlp, **_ATTENTION, **once}
        modules: dict[str, list[str]] = {name: [] for name in patterns}
        for module in bundle.modules:
            layer = next((n for n, path in patterns.items() if re.fullmatch(path, module)), None)
            if layer is None:
                raise _unsupported(bundle, f"no layer of the simulator contains {module}")
            modules[layer].append(module)
        times = OperatorTimes.of(
            bundle, modules, lambda name: _unsupported(bundle, f"it has no modules for {name}")
        )
        decoders = served.layers
        calls = {name: 1 if name in once else decoders for name in patterns}
        calls["layernorm"] = 2 * decoders
        dense = (*of_layer, *(() if served.has_experts else mlp))
        return cls(times, calls, (*dense, "embedding", "final_layernorm"))

    def us(self, layer: str, step: Composition) -> float:
        """Return the time of one call of a layer."""
        return self.times.ns(layer, step) / self.calls[layer] / 1e3


def _gaps_us(bundle: Bundle, composition: Composition) -> float:
    """Return the time of a step beyond its kernels: gaps of a CUDA graph, or the host's."""
    kernels = bundle.interpolation.step(composition).gpu_ns or 0
    return max(0, step_ns(bundle, composition) - kernels) / 1e3


def _model_config(bundle: Bundle, served: ServedRank, architecture: str) -> dict[str, Any]:
    """Return the model's configuration as the simulator reads it.

    Raises:
        ExportError: a shape or the dtype is not one of the simulator's.
    """
    config = bundle.manifest.config
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
              "vocab_size")  # fmt: skip
    absent = [name for name in needed if name not in config]
    if absent:
        raise _unsupported(bundle, f"its configuration has no {absent[0]}")
    if served.has_experts:
        _experts(bundle)
    dtype = model_dtype(bundle)
    if dtype not in _DTYPES:
        raise _unsupported(bundle, f"its dtype is {dtype}")
    # The type of the model names the simulator's list of layers: Mistral's are Llama's.
    return {**config, "model_type": architecture, "torch_dtype": dtype}


def _meta(bundle: Bundle, extent: Extent) -> dict[str, Any]:
    """Return the profile's metadata; the simulator warns of batches beyond its limits."""
    manifest = bundle.manifest
    return {
        "gpu": manifest.device,
        "model": manifest.model,
        "profiler": f"onerank, times {manifest.source}",
        "versions": manifest.versions,
        "tp_degrees": [manifest.tp],
        "engine_effective": {
            "max_num_batched_tokens": extent.new_tokens,
            "max_num_seqs": extent.decodes,
        },
        "skew_fit": {"enabled": False},
    }


def _cluster(
    bundle: Bundle,
    served: ServedRank,
    names: Mapping[str, str],
    gpu: Gpu,
    link_bandwidth: float | None,
) -> dict[str, Any]:
    """Return a cluster of one instance for each rank of `--ep`.

    Raises:
        ExportError: the GPUs of an instance communicate, and their link is not known.
    """
    device_bytes = bundle.manifest.memory.device_bytes
    link = link_gb_per_s(gpu, link_bandwidth, served.tp * served.ep)
    # The simulator's KV cache is the share of memory below, minus the weights.
    used = served.weights_bytes + served.kv_cache_bytes
    instance = {
        **names,
        "npu_mem": {
            "mem_size": device_bytes / 2**30,
            # ASTRA-sim adds the reads and the write of a reduction at this rate.
            "mem_bw": round(gpu.peak_bandwidth_bytes_per_s / 1e9),
            "mem_latency": 0,
            "mem_util": used / device_bytes,
        },
        "pd_type": None,
        "tp_size": served.tp,
        "num_npus": served.tp,
    }
    if served.has_experts:
        # The simulator has no experts that are sliced by tensor parallelism. Those that it shares
        # among the same ranks have the weights, FLOPs and communicated bytes of slices.
        instance["ep_size"] = served.tp * served.ep
    if served.ep > 1:
        # Each rank computes its own sequences, as an instance of a data-parallel group.
        instance["dp_group"] = "A"
    instances = [instance] * served.ep
    node = {"num_instances": served.ep, "cpu_mem": _HOST_MEMORY, "instances": instances}
    # ns of a hop of a ring; where it is not described, none, as in the simulator's own examples.
    latency = gpu.figures.get("link_latency_ns")
    return {
        "num_nodes": 1,
        # A single GPU has no link; the simulator needs a number.
        "link_bw": link or 1,
        "link_latency": latency.value if latency else 0,
        "nodes": [node],
    }


def _csv(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows((*key, f"{time_us:.3f}") for *key, time_us in rows)
    return text.getvalue().encode()


def _json(value: dict[str, Any]) -> bytes:
    # YAML contains JSON, so that this is a YAML file too.
    return (json.dumps(value, indent=2) + "\n").encode()


def _check_version(checkout: Path, architecture: str) -> None:
    """Refuse a checkout that reads another format than the written one.

    Raises:
        ExportError: it reads other columns, or its list of the model's layers is another.
    """
    catalog_path = checkout / _CATALOGS / f"{architecture}.yaml"
    try:
        traces = (checkout / _TRACES).read_text(encoding="utf-8")
        catalog = yaml.safe_load(catalog_path.read_text(encoding="utf-8"))
        layers = {name for names in catalog["sequence"].values() for name in names}
    except OSError as error:
        raise ExportError(
            f"{error.filename}: {error.strerror}\n  expected a checkout of LLMServingSim 2: "
            "versions before 2026 read other tables",
            code="llmservingsim-version-unknown",
        ) from error
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExportError(
            f"{catalog_path} has no sequence of layers\n  expected a checkout of LLMServingSim 2",
            code="llmservingsim-version-unknown",
        ) from error
    optional = _QK_NORM if architecture.startswith("qwen3") else {}
    mlp = _MOE if architecture in ("mixtral", "qwen3_moe") else _MLP
    written = {*_LAYER, *optional, *mlp, "attention", "embedding", "final_layernorm", "lm_head",
               "sampler"}  # fmt: skip
    columns = {"tokens", "sequences", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode",
               "time_us"}  # fmt: skip
    differing = sorted(layers ^ written)
    if mlp is _MOE:
        columns.add("activated_experts")
    differing += sorted(name for name in columns if f'"{name}"' not in traces)
    if differing:
        raise ExportError(
            f"{checkout} reads another format: {', '.join(differing)}\n"
            "  this onerank writes the format of LLMServingSim at 5daddb2",
            code="llmservingsim-version-unknown",
        )


def _unsupported(bundle: Bundle, why: str) -> ExportError:
    return ExportError(
        "LLMServingSim's tables describe decoders with Llama's or Qwen3's operators, dense or with "
        f"experts in each layer, and {bundle.manifest.model} is not one: {why}",
        code="llmservingsim-model-unsupported",
    )
