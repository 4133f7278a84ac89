"""`python -m tools.fit DATA`: fit the learned model and write its coefficients."""

import argparse
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, cast

import msgspec
import numpy as np

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database import open_library
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.error_kinds import KINDS
from onerank.annotate.models.gpu_distance import properties
from onerank.annotate.recost.recost import source_gpu
from onerank.ir.chakra import read
from onerank.ir.errors import AnnotateError
from tools.fit.case_errors import errors_by_kind, few_families
from tools.fit.evaluate_fit import (
    STEP_KINDS,
    Case,
    captured_cases,
    looked_up_cases,
)
from tools.fit.leave_one_out import datasheet_cases, every_case, fits_without, fitted
from tools.fit.measured_kernels import family, read_attention, read_products
from tools.fit.narrow_gemm_cases import read_linears

_PROVENANCE = {
    "gemm": "bf16 GEMMs of A100, L40S, H100, H200, B200: ai-dynamo/aiconfigurator, "
    "sglang 0.5.10 benchmark set, CUDA graph replay (Apache-2.0); 1500 shapes drawn with seed 2",
    "call_gap": "what a call of that set takes beyond the kernel that the profiler records, the "
    "median of 38 GEMMs under 30 us on an H100 (2026-11-28-gemm-durations-h100): 0.87 us",
    "attention": "flash-attention forward of A100, L40S, H100, H200 in that benchmark set, which "
    "also writes keys and values to a cache; Blackwell's floor: TensorRT-LLM's kernels on a B200, "
    "in the benchmark sets sglang 0.5.14 and vllm 0.24.0 of aiconfigurator",
    "finely_scaled": "linear layers in fp8 and block-scaled fp8 of H100, H200, L40S, B200, with "
    "the quantisation of their activations: the benchmark sets sglang 0.5.14, vllm 0.24.0 and "
    "trtllm 1.3.0rc20 of aiconfigurator-core 0.12.0 (Apache-2.0)",
    "experts": "experts of MoE layers in bf16 of A100, H100, H200, L40S, B200 by SGLang's and "
    "vLLM's Triton kernels and by CUTLASS's grouped GEMMs: the benchmark sets sglang 0.5.10 and "
    "0.5.14, vllm 0.19.0 to 0.24.0 and trtllm 1.0.0 to 1.3.0rc20 of aiconfigurator-core 0.12.0, "
    "each library's shrunk toward the fit to all",
    "errors": "ln(measured / predicted) with the target's die family left out of the fit; memory: "
    "layer operators of A100 and H100 from microsoft/vidur (MIT) and fp32 operators of V100, T4 "
    "and A100 from sitar-lab/NeuSight (MIT), memory_same_die: those fp32 operators on two A100s "
    "and a step of a Llama-8B on an H100 and an H200, gemm_same_die: bf16 GEMMs of an H100 "
    "and an H200 in four benchmark sets and in that step, "
    "memory_unmeasured: the same by the datasheet, and PyTorch's kernels in captured steps of a "
    "Llama-8B on H100 and H200, in the project's traces; memory_unknown_layout: those of three "
    "axes or more without strides; "
    "product: bf16 GEMMs by the residual model and NeuSight's fp32 GEMMs of V100, T4, A100 "
    "and H100; "
    "gemm_8bit: those linear layers; attention_unmeasured: attention of that benchmark set by its "
    "shape, the usual kernels of each architecture in the three later ones, and cuDNN's both "
    "passes in the shipped H200's database; attention_other: the other kernels of the three, with "
    "the factor of the other families; resized: 2, 4 and 8 times the "
    "size and back on one GPU, 256 rows or tokens at least; looked_up_other_versions: that "
    "benchmark set against another of aiconfigurator on H200 and B200, and against the layers' "
    "GEMMs of vidur; looked_up: captured steps of Llama-3-8B on an H200 (four layers of "
    "tp 4, eight whole ones, sequences of 2048) against rows of the same versions; "
    "composed: convolutions and recurrent layers of baidu-research/DeepBench (Apache-2.0) "
    "on V100 and T4, by the shipped tiles; experts_unmeasured: the experts' layers by the kernels "
    "that the fit has, the target's family left out; grouped_unmeasured: torch's grouped GEMMs of "
    "eleven sizes on an H100 and an H200, sizes left out (2026-11-28-grouped-gemms-h200); "
    "state_unmeasured: operators of layers with states in five models on H100s and H200s, each "
    "kernel left out (2026-11-28-state-errors-hopper); "
    "decode_flash2, decode_flash_mla: decodes of sizes that chose no coefficient "
    "(2026-11-27-flash2-blind-h100, 2026-11-27-flash-mla-2-hopper), low and high 1.04 "
    "times the error that 80% of them do not exceed: the factor of most kinds in `few`",
    "shared_in_steps": "classes of kernels in 104 steps of twelve models on an H100, predicted "
    "from shapes before they were measured: the root mean square over models of a class's median "
    "error, the larger of the two sets that were measured on different days "
    "(2026-11-28-serving-intervals-h100); an H200 has those of the H100, with which 58 of 62 steps "
    "of seven models on H200s are inside their intervals (2026-11-28-grouped-gemms-h200)",
}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("data", type=Path, help="folder with the measurements")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--step", type=Path, action="append", default=[],
        help="captured step on the GPU of a shipped kernel database, for the errors of look-ups; "
        "without a step these errors stay unchanged",
    )  # fmt: skip
    options = parser.parse_args()
    products = read_products(options.data)
    gpus = [load_gpu(name) for name in products.times_ns]
    linears = read_linears(options.data)
    fits = fits_without(products, read_attention(options.data), linears, options.data)
    cases = [*every_case(options.data, fits), *looked_up_cases(options.data)]
    for step in options.step:
        cases += _looked_up(step)
    kinds = dict.fromkeys(case.kind for case in cases)
    # A file without these errors would not load, so those of the shipped file stay.
    kept = {kind: shipped().errors[kind] for kind in STEP_KINDS if not options.step}
    # Measured by benchmarks/predictions: deepbench.py, flash2_forward.py and latent_decode.py.
    measured = (
        *("composed", "grouped_unmeasured", "state_unmeasured"),
        *("decode_flash2", "decode_flash_mla"),
    )
    kept |= {kind: shipped().errors[kind] for kind in measured}
    if missing := [kind for kind in KINDS[1:] if kind not in {**kinds, **kept}]:
        parser.error(
            f"{options.data} lacks the measurements for the errors of {', '.join(missing)}"
        )
    coefficients = fitted(products, read_attention(options.data), gpus, linears, options.data)
    few = few_families(cases)
    errors = errors_by_kind(cases, few, coefficients) | kept
    described = [*datasheet_cases(options.data, fits)]
    by_datasheet = errors_by_kind(described, few_families(described), coefficients)
    # Estimates that happen to be better than a description do not narrow an interval.
    datasheet_errors = {
        k: error for k, error in by_datasheet.items() if error.high > errors[k].high
    }
    provenance = {
        "fitted": f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"numpy {np.__version__}",
        "gpus": ", ".join(gpu.name for gpu in gpus),
        "few": _few_text(few),
        **_PROVENANCE,
    }
    coefficients = msgspec.structs.replace(
        coefficients,
        provenance=provenance,
        errors=errors,
        dies=_dies(cases),
        datasheet_errors=datasheet_errors,
        # Measured by benchmarks/serving/step_intervals.py.
        shared_in_steps=shipped().shared_in_steps,
    )
    options.output.write_text(to_toml(coefficients), encoding="utf-8")


def _dies(cases: Sequence[Case]) -> dict[str, float]:
    """Return `Coefficients.dies`: the mean over the boards of a die."""
    boards = {case.target.name: case.target.as_described for case in cases}.values()
    rates: dict[str, list[float]] = {}
    for gpu in boards:
        rates.setdefault(family(gpu), []).append(properties(gpu)["flops_per_sm_and_cycle"])
    return {die: mean(each) for die, each in sorted(rates.items())}


def _few_text(few: dict[str, float]) -> str:
    """Return the provenance of the factors of `few_families`."""
    usual = min(few.values())
    larger = {kind: factor for kind, factor in sorted(few.items()) if factor > usual}
    others = ", ".join(f"{factor:.3f} for {kind}" for kind, factor in larger.items())
    return (
        "bounds and shared parts of the measured die families are multiplied by a factor, because "
        "a bound of few families is too narrow for a further one: with each family left out in "
        f"turn, {usual:.3f} holds 80% of its errors in the mean over kinds and families. A larger "
        f"factor holds two thirds of the errors of every GPU: {others}"
    )


def _looked_up(step: Path) -> list[Case]:
    """Return the kernels of a step with look-ups in the shipped database.

    Raises:
        AnnotateError: no shipped database has rows of the GPU.
    """
    graph = read(step)
    gpu = source_gpu(graph, None)
    library = open_library([], gpu, None, graph.job.measurement.versions)
    if library is None:
        raise AnnotateError(
            f"{step}: no shipped kernel database has rows of {gpu.name}", code="fit-no-database"
        )
    return list(captured_cases(graph, library))


def to_toml(coefficients: Coefficients) -> str:
    """Return the coefficients as TOML, with four significant digits each."""
    lines = ["# Written by `python -m tools.fit DATA -o FILE`; see coefficients.py."]
    data: dict[str, Any] = msgspec.to_builtins(coefficients)
    _table(lines, "", data)
    return "\n".join(lines) + "\n"


def _table(lines: list[str], name: str, data: dict[str, Any]) -> None:
    if name:
        lines += ["", f"[{name}]"]
    inner: dict[str, Any] = {key: value for key, value in data.items() if isinstance(value, dict)}
    lines += [f"{key} = {_text(value)}" for key, value in data.items() if key not in inner]
    for key, value in inner.items():
        _table(lines, f"{name}.{key}" if name else key, value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in cast("list[Any]", value)) + "]"
    if isinstance(value, float):
        # The fit is not better than that, and a diff of two fits shows only what changed.
        return repr(float(f"{value:.4g}"))
    return str(value)


if __name__ == "__main__":
    main()
