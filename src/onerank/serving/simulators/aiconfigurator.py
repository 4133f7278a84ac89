"""Export a bundle as forward-pass data of aiconfigurator, which predicts and compares deployments.

aiconfigurator (github.com/ai-dynamo/aiconfigurator) reads, with `--forward-model fpm`, a table of
whole steps, in ms: prefills by batch, new tokens and KV cache, decodes by batch and KV cache. It
interpolates, and refuses what lies outside the table. A system's directory contains a description
of the GPU and, for each backend and version, the table with a file of metadata.
"""

import ast
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
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
    Extent,
    cache_notes,
    deployment,
    described_gpu,
    growing,
    has_experts,
    model_dtype,
    require_memory,
    step_ns,
    token_sizes,
)
from onerank.serving.simulators.options import AiconfiguratorOptions
from onerank.serving.simulators.step_collectives import StepCollectives

_TABLE = "fpm_forward_perf"

# Version of the table's format, and its names for what the coordinates and latencies are. The
# reader refuses any other; `onerank` in the metadata says where the times are from.
_FORMAT = {
    "schema_name": "aic_fpm_forward_perf",
    "schema_version": 6,
    "coordinate_system": "iteration_totals_balanced_v1",
    "measurement_policy": "dynamo_native_single_sample_v1",
}

# Columns that select a model's rows, besides its path: those of an unquantised model on one GPU.
_IDENTITY: dict[str, Any] = {
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
    "comm_quant_mode": "half",
    "kv_cache_dtype": "bfloat16",
    "tp": 1,
    "pp": 1,
    "dp": 1,
    "moe_tp": 1,
    "moe_ep": 1,
    "cp": 1,
    "moe_backend": "auto",
    "attention_backend": "auto",
    "enable_wideep": False,
    "enable_eplb": False,
}

_READER = Path("aiconfigurator_core/sdk/operations/fpm_forward.py")

# Prompts of a prefill. The reader takes a step of more prompts for one of the most in the table, if
# those of equal tokens take equally long there.
_PREFILLS = (1, 2, 4, 8)


@dataclass(frozen=True)
class AiconfiguratorExport:
    """Data written for aiconfigurator.

    Attributes:
        table: file of the steps.
        system: file that describes the GPU.
        rows: rows of the table.
        options: options of `aiconfigurator cli estimate` that use the files.
        notes: how far the simulator's KV cache is that of the model.
    """

    table: Path
    system: Path
    rows: int
    options: tuple[str, ...]
    notes: tuple[Note, ...] = ()


_SIZED_BY = (
    "aiconfigurator sizes the KV cache by the model's configuration and the memory of the GPU"
)


def export_aiconfigurator(bundle: Bundle, options: AiconfiguratorOptions) -> AiconfiguratorExport:
    """Write the steps of a bundle for aiconfigurator.

    Args:
        bundle: the bundle.
        options: the output is a directory of systems. The model is a path as it is given to
            aiconfigurator: a name, or a directory with a config.json; None: a directory that is
            written. The checkout contains `aiconfigurator_core`.

    Raises:
        ExportError: the model has another dtype, the sizes of its collectives or the
            device's memory or link are not known, or the checkout reads another format.
        TargetError: the bundle's device has no description.
        AnnotateError: the bundle has too few points.
    """
    require_memory(bundle, "aiconfigurator")
    extent = Extent.of(bundle, "aiconfigurator")
    described = described_gpu(bundle, options.gpu)
    if options.checkout is not None:
        _check_version(options.checkout)
    name, tp = deployment(bundle, "aiconfigurator")
    _check_model(bundle)
    output = options.output
    device = bundle.manifest.device.lower().replace(" ", "_").replace("-", "_")
    names = _Names(f"{device}_onerank", options.backend, options.version)
    model_directory = output.absolute() / "model"
    model_path = options.model or str(model_directory)
    collectives = StepCollectives.of(bundle, tp, described, options.link_gb_per_s)
    shared = {
        "cell_id": f"onerank-{name}",
        "model_path": model_path,
        **names.columns,
        "weight_quantization": _IDENTITY["gemm_quant_mode"],
        **_IDENTITY,
        **_parallelism(bundle, tp),
        "partition_policy": "balanced_v1",
    }
    rows = [shared | row for row in _timed_steps(bundle, extent, collectives)]
    table = _parquet(rows)
    table_file = output / names.directory / f"{_TABLE}.parquet"
    system_file = output / f"{names.system}.yaml"
    description = yaml.safe_dump(_system(bundle, described, names.system), sort_keys=False)
    files = {
        table_file: table,
        table_file.with_suffix(".metadata.json"): _json(_metadata(bundle, names, table, len(rows))),
        system_file: description.encode(),
    }
    if options.model is None:
        # The reader selects its model by `architectures`, which configurations need not have.
        config = {"architectures": [name], **bundle.manifest.config}
        files[model_directory / "config.json"] = _json(config)
    replace_files(files)
    run_options = (
        *("--systems-paths", str(output.absolute()), "--system", names.system),
        *("--backend", names.backend, "--backend-version", names.version),
        *("--forward-model", "fpm", "--model-path", model_path),
        *_parallel_options(bundle, tp),
    )
    notes = cache_notes(bundle, _SIZED_BY)
    return AiconfiguratorExport(table_file, system_file, len(rows), run_options, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Names:
    """Names by which aiconfigurator finds the data: GPU, engine and the engine's version."""

    system: str
    backend: str
    version: str

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the table that have them."""
        return {
            "system": self.system,
            "backend": self.backend,
            "backend_version": self.version,
        }

    @property
    def directory(self) -> Path:
        """Directory of the data, below that of the systems."""
        return Path("data") / self.system / self.backend / self.version


def _timed_steps(
    bundle: Bundle, extent: Extent, collectives: StepCollectives
) -> Iterator[dict[str, Any]]:
    """Yield the coordinates and the time of each step of the table."""
    for step in _steps(extent):
        latency_ns = step_ns(bundle, step) + collectives.time_ns(step)
        yield _coordinates(step) | {"latency_ms": latency_ns / 1e6}


def _parallelism(bundle: Bundle, tp: int) -> dict[str, int]:
    """Return the columns of a deployment's parallel sizes.

    Experts are sliced within the ranks of a tensor-parallel group, and shared among groups, each of
    which computes its own sequences.
    """
    ep = bundle.manifest.ep
    return {"tp": tp, "dp": ep, "moe_tp": tp if has_experts(bundle) else 1, "moe_ep": ep}


def _parallel_options(bundle: Bundle, tp: int) -> tuple[str, ...]:
    """Return aiconfigurator's options for the parallel sizes."""
    if not has_experts(bundle):
        return ("--tp-size", str(tp))
    ep = str(bundle.manifest.ep)
    return (
        *("--tp-size", str(tp), "--attention-dp-size", ep),
        *("--moe-tp-size", str(tp), "--moe-ep-size", ep),
    )


def _metadata(bundle: Bundle, names: _Names, table: bytes, rows: int) -> dict[str, Any]:
    """Return the content of the file next to a table."""
    return {
        **_FORMAT,
        **names.columns,
        "row_count": rows,
        "parquet_sha256": hashlib.sha256(table).hexdigest(),
        "onerank": {
            "device": bundle.manifest.device,
            "times": bundle.manifest.source,
            "versions": bundle.manifest.versions,
        },
    }


def _steps(extent: Extent) -> Iterator[Composition]:
    """Yield the steps of the table."""
    contexts = growing(1, extent.longest_context, 2)
    for prefills in _PREFILLS:
        for tokens in token_sizes(extent.new_tokens // prefills):
            for context in (0, *contexts):
                step = Composition(0, 0, prefills, tokens, context)
                if tokens and extent.holds(step):
                    yield step
    # Between two batches the reader interpolates from one above the smaller to the larger, and
    # takes a batch for an end if the next number is in the table: engines pad a batch to such ends.
    ends = growing(1, extent.decodes, 1.4)
    for decodes in sorted({*ends, *(end + 1 for end in ends if end < extent.decodes)}):
        for context in contexts:
            step = Composition(decodes, context)
            if extent.holds(step):
                yield step


def _coordinates(c: Composition) -> dict[str, Any]:
    """Return the coordinates of a step, which are totals of its sequences."""
    if c.prefills:
        new, cached = c.prefills * c.prefill_tokens, c.prefills * c.prefill_context
        kind = "prefill"
    else:
        # A decode reads the token that it computes.
        kind, new, cached = "decode", 0, c.decodes * (c.decode_context + 1)
    return {
        "workload_kind": kind,
        "batch_size": c.sequences,
        "total_prefill_tokens": new,
        "total_kv_read_tokens": cached,
    }


def _system(bundle: Bundle, gpu: Gpu, system: str) -> dict[str, Any]:
    """Return the description of a system of the bundle's GPU."""
    memory = bundle.manifest.memory
    described = gpu.figures.get("link_bandwidth_gb_per_s")
    link = described.value * 1e9 if described else gpu.peak_bandwidth_bytes_per_s
    flops = {
        f"{name}_tc_flops": round(rate)
        for name, dtype in (("bfloat16", "bfloat16"), ("fp8", "float8_e4m3fn"), ("int8", "int8"))
        if (rate := gpu.peak_tensor_flops_per_s(dtype))
    }
    return {
        "data_dir": f"data/{system}",
        "gpu": {
            "mem_bw": round(gpu.peak_bandwidth_bytes_per_s),
            "mem_capacity": memory.device_bytes,
            **flops,
            "power": gpu.tdp_w,
            "sm_version": gpu.capability,
        },
        # The reader needs links; a table of whole steps contains all communication.
        "node": {
            "num_gpus_per_node": 8,
            "inter_node_bw": round(link),
            "intra_node_bw": round(link),
        },
        # The memory outside the allocator contains NCCL's; the reader has an entry for each size. A
        # recording does not show this memory, so the KV cache that the reader sizes is too large.
        "misc": {
            "nccl_mem": dict.fromkeys((1, 2, 4, 8), 0),
            "other_mem": memory.outside_bytes or 0,
        },
    }


def _check_model(bundle: Bundle) -> None:
    """Refuse a model whose rows other values of the columns would select.

    Raises:
        ExportError: the model has another dtype.
    """
    dtype = model_dtype(bundle)
    if dtype != "bfloat16":
        raise ExportError(
            f"aiconfigurator's table is written for models in bfloat16, and "
            f"{bundle.manifest.model} has {dtype}",
            code="aiconfigurator-model-unsupported",
        )


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import polars as pl

    encoded = io.BytesIO()
    pl.DataFrame(rows).write_parquet(encoded)
    return encoded.getvalue()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _check_version(checkout: Path) -> None:
    """Refuse a checkout that selects rows by other columns than the written ones.

    Raises:
        ExportError: it does, or it is no aiconfigurator.
    """
    path = next((p for p in (checkout / _READER, checkout / "aic-core/src" / _READER)
                 if p.is_file()), checkout / _READER)  # fmt: skip
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ExportError(
            f"{path}: {getattr(error, 'strerror', None) or error}\n  expected a checkout of "
            "aiconfigurator 0.12, or the site-packages that it is installed in",
            code="aiconfigurator-version-unknown",
        ) from error
    columns: list[Any] = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [getattr(target, "id", None) for target in targets] == ["_CELL_MATCH_COLUMNS"]:
            columns = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    if columns != [*_IDENTITY]:
        differing = sorted({str(column) for column in columns} ^ {*_IDENTITY})
        raise ExportError(
            f"{path} reads another format: {', '.join(differing) or 'another order'}\n"
            "  this onerank writes the format of aiconfigurator 0.12",
            code="aiconfigurator-version-unknown",
        )
