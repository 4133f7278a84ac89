"""Export a bundle as a replay table of SGLang Simulator, which runs SGLang's own scheduler.

SGLang Simulator (`tools/sglang-simulator` of github.com/sgl-project/sglang) replaces the forward of
a model by a predictor of its time. Its replay predictor reads a JSON file: the sorted pairs of new
tokens and KV cache of a batch's sequences -> seconds. For a batch that the table lacks it takes the
row with the nearest number of sequences, new tokens and KV cache.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onerank.annotate.gpus.gpu import Gpu
from onerank.capture.serving.compositions import Composition
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replace_files
from onerank.serving.bundle import Bundle
from onerank.serving.simulators.operator_times import (
    Extent,
    cache_notes,
    deployment,
    described_gpu,
    growing,
    model_dtype,
    require_memory,
    step_ns,
)
from onerank.serving.simulators.options import LinkedSimulatorOptions
from onerank.serving.simulators.step_collectives import StepCollectives

_PREDICTOR = Path("src/sglang_simulator/time_predictor/replay.py")

# The simulator weighs differences by the spread of each size in the table, so that the nearest row
# has the same number of sequences wherever there is one.
_EVERY_BATCH = 64

# Ratio of neighbouring contexts, and of chunks: half of it is the largest error of their size.
_CONTEXTS, _CHUNKS = 1.15, 1.15

# Prompts of a prefill.
_PREFILLS = (1, 2, 4, 8)

_DTYPES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


@dataclass(frozen=True)
class SglangSimExport:
    """A table written for SGLang Simulator.

    Attributes:
        table: replay table.
        config: the simulator's configuration, which names the table.
        rows: rows of the table.
        options: options of the simulator's server that use the files.
        notes: how far the simulator's KV cache is that of the model.
    """

    table: Path
    config: Path
    rows: int
    options: tuple[str, ...]
    notes: tuple[Note, ...] = ()


def export_sglang_sim(bundle: Bundle, options: LinkedSimulatorOptions) -> SglangSimExport:
    """Write the steps of a bundle for SGLang Simulator.

    Args:
        bundle: the bundle.
        options: the model is a local directory; None: a directory that is written, with its
            configuration and without a tokenizer. The checkout is SGLang's, or its
            `tools/sglang-simulator`.

    Raises:
        ExportError: the model's dtype, the sizes of its collectives or the device's memory or link
            are not known, or the checkout reads another format.
        AnnotateError: the bundle has too few points.
    """
    require_memory(bundle, "SGLang Simulator")
    extent = Extent.of(bundle, "SGLang Simulator")
    described = described_gpu(bundle, options.gpu)
    if options.checkout is not None:
        _check_version(options.checkout)
    name, tp = deployment(bundle, "SGLang Simulator")
    config = _config(bundle, described, tp)
    collectives = StepCollectives.of(bundle, tp, described, options.link_gb_per_s)
    times: dict[str, float] = {}
    # The bundle's own steps are found exactly, mixed ones too (`--enable-mixed-chunk`).
    own = [row.composition for row in bundle.rows if row.fits and row.is_composed]
    for step in (*_steps(extent), *own):
        times[_key(step)] = (step_ns(bundle, step) + collectives.time_ns(step)) / 1e9
    output, model = options.output, options.model
    table, simulator = output / "replay_table.json", output / "simulator.json"
    files = {table: _json(times), simulator: _json(config)}
    directory = output.absolute() / "model"
    if model is None:
        described_model = {"architectures": [name], **bundle.manifest.config}
        files[directory / "config.json"] = _json(described_model)
    replace_files(files)
    run_options = (
        *("--model-path", model or str(directory)),
        *("--sim-config-path", str(simulator.absolute())),
        *("--chunked-prefill-size", str(extent.new_tokens)),
        *("--max-running-requests", str(extent.decodes)),
    )
    if extent.cached_tokens is not None:
        run_options += ("--max-total-tokens", str(extent.cached_tokens))
    if model is None:
        run_options += ("--skip-tokenizer-init",)
    return SglangSimExport(
        table,
        simulator,
        len(times),
        run_options,
        notes=(
            *cache_notes(
                bundle,
                "--max-total-tokens has the tokens that fit if all layers keep all tokens",
            ),
        ),
    )


def _steps(extent: Extent) -> Iterator[Composition]:
    """Yield the decodes and prefills of the table."""
    contexts = growing(1, extent.longest_context, _CONTEXTS)
    every = min(_EVERY_BATCH, extent.decodes)
    for decodes in [*range(1, every), *growing(every, extent.decodes, _CHUNKS)]:
        for context in contexts:
            step = Composition(decodes, context)
            if extent.holds(step):
                yield step
    for prefills in _PREFILLS:
        most = extent.new_tokens // prefills
        # A prefill of one token has the key of a decode.
        for tokens in growing(2, most, _CHUNKS) if most > 1 else []:
            # Several prompts of one batch rarely have a context.
            for context in (0, *growing(16, extent.longest_context, 1.3 if prefills == 1 else 2)):
                step = Composition(0, 0, prefills, tokens, context)
                if extent.holds(step):
                    yield step


def _key(c: Composition) -> str:
    """Return the key of a step: each sequence's new tokens and KV cache, sorted."""
    pairs = [[c.prefill_tokens, c.prefill_context]] * c.prefills
    pairs += [[1, c.decode_context]] * c.decodes
    return json.dumps(sorted(pairs))


def _config(bundle: Bundle, gpu: Gpu, tp: int) -> dict[str, Any]:
    """Return the simulator's configuration.

    Raises:
        ExportError: the dtype is not one of the simulator's.
    """
    manifest = bundle.manifest
    dtype = model_dtype(bundle)
    if dtype not in _DTYPES:
        raise ExportError(
            f"SGLang Simulator's table is written for models in {', '.join(_DTYPES)}, and "
            f"{manifest.model} has {dtype}",
            code="sglang-sim-model-unsupported",
        )
    link = gpu.figures.get("link_bandwidth_gb_per_s")
    accelerator = {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "hbm_bandwidth_gb": gpu.peak_bandwidth_bytes_per_s / 1e9,
        "hbm_capacity_gb": manifest.memory.device_bytes / 1e9,
        "intra_node_bandwidth_gb": None if link is None else link.value,
        "tflops": {
            f"{name}_TENSOR": rate / 1e12
            for name, dtype in (("BF16", "bfloat16"), ("FP16", "float16"), ("FP8", "float8_e4m3fn"))
            if (rate := gpu.peak_tensor_flops_per_s(dtype))
        },
    }
    return {
        # The replay predictor does not read the platform.
        "platform": {"accelerator": accelerator, "num_device_per_node": 8},
        "predictor": {
            "name": "replay",
            # Relative to this file.
            "database_path": "replay_table.json",
            "miss_strategy": "knn",
            "miss_knn_k": 1,
        },
        "scheduler": {
            # SGLang's tensor-parallel size counts the ranks of all data-parallel groups.
            "tp_size": tp * manifest.ep,
            "ep_size": manifest.ep,
            "dp_size": manifest.ep,
            "pp_size": 1,
            "data_type": _DTYPES[dtype],
            "kv_cache_data_type": _DTYPES[dtype],
            "backend_name": "sglang",
        },
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _check_version(checkout: Path) -> None:
    """Refuse a checkout whose replay predictor reads another format than the written one.

    Raises:
        ExportError: it does, or it is no SGLang with a simulator.
    """
    path = next((p for p in (checkout / "tools/sglang-simulator" / _PREDICTOR,
                             checkout / _PREDICTOR) if p.is_file()),
                checkout / "tools/sglang-simulator" / _PREDICTOR)  # fmt: skip
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ExportError(
            f"{path}: {error.strerror}\n  expected a checkout of SGLang with its simulator, or "
            "its directory tools/sglang-simulator",
            code="sglang-sim-version-unknown",
        ) from error
    key = r"json\.dumps\(\s*sorted\(\[req\.extend_length, req\.past_kv_length\] for req in"
    needed = {
        "the key of a batch": key,
        "miss_strategy": "miss_strategy",
        "miss_knn_k": "miss_knn_k",
    }
    differing = [name for name, pattern in needed.items() if not re.search(pattern, text)]
    if differing:
        raise ExportError(
            f"{path} reads another format: {', '.join(differing)}\n"
            "  this onerank writes the format of SGLang's replay predictor at 1b2e728",
            code="sglang-sim-version-unknown",
        )
