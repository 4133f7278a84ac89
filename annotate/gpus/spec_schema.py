"""The schema of a GPU description: allowed figures, their units and dependencies; JSON Schema."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from onerank.ir.errors import TargetError

# The tile model has one set of coefficients for each of the two. Blackwell's RTX boards (sm_120)
# multiply with `mma.sync`, as Ada does, so they belong to the first.
SYNCHRONOUS = ("volta", "turing", "ampere", "ada", "blackwell-rtx")
ASYNCHRONOUS = ("hopper", "blackwell", "rubin")
"""Architectures whose warps load operands of the tensor cores, and those with a copy engine (TMA).
"""

OTHER_ARCHITECTURE = "other"
"""The architecture of a description that is not listed: no cost model has figures for it."""

ARCHITECTURES = (
    *SYNCHRONOUS,
    *ASYNCHRONOUS,
    *("cdna2", "cdna3", "cdna4"),
    *("ascend-910b", "ascend-910c", "gaudi3", "tpu-v5p", "tpu-v6e", "trainium2"),
    OTHER_ARCHITECTURE,
)
"""Architectures that a description may name; a new one is "other"."""

ESTIMATED = (
    *("memory_achievable_fraction", "launch_floor_ns"),
    *("tensor_sustained_fraction", "vector_sustained_fraction"),
)
"""Figures that only a measurement gives; `datasheet_estimates` fills in absent ones."""

ESTIMATE_SOURCE = "onerank_estimate"
"""Key under [sources] of figures that `datasheet_estimates` adds to a description."""


class Range(NamedTuple):
    """The range of a figure of a description, its meaning, and whether it is required."""

    low: float
    high: float
    meaning: str
    required: bool = False


_MATRIX_UNITS = ("bf16", "fp16", "tf32", "fp8", "fp4", "int8", "fp32", "fp64")

TENSOR = {u: f"{u}_tensor_{'tops' if u == 'int8' else 'tflops'}" for u in _MATRIX_UNITS}

VECTOR = {"fp32": "fp32_vector_tflops", "fp64": "fp64_vector_tflops"}

# Peak rate -> its possible sustained fractions; the first one in the description counts.
FRACTIONS: dict[str, tuple[str, ...]] = {
    **{TENSOR[u]: (f"{u}_sustained_fraction", "tensor_sustained_fraction") for u in TENSOR},
    **dict.fromkeys(VECTOR.values(), ("vector_sustained_fraction",)),
}

SIXTEEN_BIT = (TENSOR["bf16"], TENSOR["fp16"])

INSTEAD_OF = {
    "measured_copy_gb_per_s": ("memory_achievable_fraction",),
    "measured_gemm_tflops": ("bf16_sustained_fraction", "tensor_sustained_fraction"),
}
"""Measurement -> the fractions that it replaces or complements."""

RISES_WITH = {"max_clock_mhz": "boost_clock_mhz"}
"""Figure -> the overridden figure that it stays in proportion to."""

COMPUTE_CAPABILITY = "[1-9][0-9]?[.][0-9]"
"""The form of CUDA's compute capability: a major number, a dot, a minor one."""

_GB_PER_S = "in 1e9 bytes per second"

_TFLOPS = "in 1e12 operations per second"

_SUSTAINED = "the fraction of the peak that long kernels sustain under the power cap"

POWER_PARTS = {
    "base": "that any kernel draws",
    "active": "that an occupied GPU adds",
    "tensor": "that GEMMs at the sustained rate add",
    "memory": "that traffic at the sustained bandwidth adds",
    "vector": "that vector operations at the sustained rate would add",
}

RANGES: Mapping[str, Range] = {
    "sm_count": Range(1, 2048, "the number of SMs, or compute units", True),
    "boost_clock_mhz": Range(100, 10_000, "the boost clock of the SMs in MHz", True),
    "max_clock_mhz": Range(
        100, 10_000, "the SM clock below the power limit, if above the boost clock, in MHz"
    ),
    "memory_gb": Range(1, 10_000, "the memory in 1e9 bytes", True),
    "memory_bandwidth_gb_per_s": Range(
        10, 100_000, f"the datasheet's memory bandwidth {_GB_PER_S}", True
    ),
    "memory_achievable_fraction": Range(0.1, 1, "the achievable fraction of the bandwidth"),
    "l2_mb": Range(
        0.1, 10_000, "the last-level cache that all SMs share, in 1e6 bytes (50 MiB: 52.43)"
    ),
    "l2_partitions": Range(1, 16, "the partitions of that cache, each with a copy of the data"),
    "l2_bandwidth_gb_per_s": Range(10, 1e6, f"the bandwidth of that cache {_GB_PER_S}"),
    **{TENSOR[u]: Range(0.1, 1e6, f"the dense {u} matrix peak {_TFLOPS}") for u in TENSOR},
    **{VECTOR[u]: Range(0.1, 1e5, f"the {u} vector peak {_TFLOPS}") for u in VECTOR},
    **{f: Range(0.05, 1, _SUSTAINED) for names in FRACTIONS.values() for f in names},
    "measured_gemm_tflops": Range(
        0.1,
        1e6,
        "the measured geometric-mean rate of the 27 16-bit GEMMs whose m, n and k are 4096, 8192 "
        f"or 16384, {_TFLOPS}",
    ),
    "measured_skinny_gb_per_s": Range(
        10,
        100_000,
        "the measured geometric-mean bandwidth of the 8 16-bit GEMMs of m = 16 or 64 and n and k = "
        f"8192 or 16384, with operands and results once each, {_GB_PER_S}",
    ),
    "measured_copy_gb_per_s": Range(
        10, 100_000, f"bytes read and written by a copy of 1 GB or more, measured, {_GB_PER_S}"
    ),
    # Ranges catch a wrong unit, such as us in place of ns, not an unlikely board.
    "launch_floor_ns": Range(100, 1e6, "the time of the shortest kernels in ns"),
    "elementwise_floor_ns": Range(100, 1e6, "the time of the shortest elementwise kernels in ns"),
    "tdp_w": Range(5, 10_000, "the power limit in watts"),
    "idle_w": Range(0.1, 5_000, "the power of an idle GPU in watts"),
    **{
        f"power_{part}": Range(0, 20, f"the power limit's share {drawn}: a model's coefficient")
        for part, drawn in POWER_PARTS.items()
    },
    "link_bandwidth_gb_per_s": Range(
        0.1, 100_000, f"NVLink or PCIe to its peers, one way, {_GB_PER_S}"
    ),
    "nvlink_active_w": Range(0, 1000, "what active NVLinks to peers draw, in watts"),
    "link_latency_ns": Range(10, 1e6, "the time that one more peer adds to a small ring, in ns"),
}


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure: its value in the unit of its name, its key under [sources], its confidence."""

    value: float
    source: str
    confidence: Literal["datasheet", "measured", "estimated"] = "datasheet"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message: the most similar known name, or all names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def measured_of(figures: Collection[str]) -> list[tuple[str, str]]:
    """Return (measured figure, its peak) for the microbenchmarks of a GPU."""
    peaks = [name for name in SIXTEEN_BIT if name in figures][:1]
    return [
        ("measured_skinny_gb_per_s", "memory_bandwidth_gb_per_s"),
        ("measured_copy_gb_per_s", "memory_bandwidth_gb_per_s"),
        *(("measured_gemm_tflops", peak) for peak in peaks),
    ]


def check_figures(figures: Mapping[str, Figure], sources: Mapping[str, str]) -> None:
    """Validate the figures of a description.

    Args:
        figures: figures by name.
        sources: sources that they may cite.

    Raises:
        TargetError: a figure is missing, out of range, or inconsistent with another.
    """
    required = {name: about.meaning for name, about in RANGES.items() if about.required}
    missing = [f"{name} ({required[name]})" for name in required if name not in figures]
    if missing:
        raise TargetError(f"[figures] lacks {'; '.join(missing)}", code="gpu-figures-missing")
    for name, figure in figures.items():
        about = RANGES[name]
        if not about.low <= figure.value <= about.high:
            raise TargetError(
                f"{name} is {figure.value:g}, outside {about.low:g} to {about.high:g}: "
                f"it is {about.meaning}",
                code="gpu-figure-out-of-range",
            )
        if figure.source not in sources:
            raise TargetError(
                f'{name} cites the source "{figure.source}", which is not under [sources]'
                f"{did_you_mean(figure.source, sources)}",
                code="gpu-source-unlisted",
            )
    if figures["sm_count"].value % 1:
        raise TargetError(
            f"sm_count is {figures['sm_count'].value:g}, not a whole number", code="gpu-sm-count"
        )
    _check_measured(figures)
    if {"idle_w", "tdp_w"} <= figures.keys() and figures["idle_w"].value >= figures["tdp_w"].value:
        raise TargetError(
            f"idle_w is {figures['idle_w'].value:g}, and must be below tdp_w, "
            f"{figures['tdp_w'].value:g}: {RANGES['idle_w'].meaning}",
            code="gpu-idle-power",
        )
    if not FRACTIONS.keys() & figures.keys():
        raise TargetError(
            f"no peak rate; [figures] needs one of {', '.join(FRACTIONS)}", code="gpu-no-peak-rate"
        )


def _check_measured(figures: Mapping[str, Figure]) -> None:
    """Validate that measured figures are at most their peaks."""
    if "measured_gemm_tflops" in figures and not figures.keys() & {*SIXTEEN_BIT}:
        raise TargetError(
            f"measured_gemm_tflops is of a 16-bit GEMM; also give {' or '.join(SIXTEEN_BIT)}",
            code="gpu-no-16-bit-rate",
        )
    for name, peak in measured_of(figures):
        if name in figures:
            value, most = figures[name].value, figures[peak].value
            if value > most:
                raise TargetError(
                    f"{name} is {value:g}, above its peak, {peak} = {most:g}",
                    code="gpu-figure-above-peak",
                )


def refuse_unknown(table: Any, known: Collection[str], kind: str) -> None:
    """Validate the names in a table.

    Args:
        table: a table of a description.
        known: the allowed names.
        kind: "field" or "figure".

    Raises:
        TargetError: a name is unknown, or `table` is not a table.
    """
    if not isinstance(table, dict):
        raise TargetError(f"[{kind}s] is {table!r}, not a table", code="gpu-table-expected")
    for name in cast("dict[str, Any]", table):
        if name not in known:
            raise TargetError(
                f'unknown {kind} "{name}"{did_you_mean(name, known)}\n'
                "  `onerank gpus --schema` lists all",
                code="gpu-unknown-key",
            )


_TEXT = {"type": "string", "minLength": 1}

_ABSENT = "; measured; estimated where absent, with wider intervals"

_CAPABILITY = {
    "description": "CUDA's compute capability, such as 8.6; NCCL chooses algorithms by it",
    "type": "string",
    "pattern": f"^{COMPUTE_CAPABILITY}$",
}


def gpu_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a description's TOML file.

    The schema cannot express that a figure's source must be in `sources`; `load_gpu` checks that.
    """
    figures = {
        name: {
            "description": f"{about.meaning}{_ABSENT if name in ESTIMATED else ''}",
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": about.low, "maximum": about.high},
                "source": _TEXT,
                "confidence": {"enum": ["datasheet", "measured", "estimated"]},
            },
            "required": ["value", "source"],
            "additionalProperties": False,
        }
        for name, about in RANGES.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "GPU description",
        "type": "object",
        "properties": {
            "name": _TEXT,
            "aliases": {"type": "array", "items": _TEXT},
            "vendor": _TEXT,
            "architecture": {"enum": [*ARCHITECTURES]},
            "compute_capability": _CAPABILITY,
            "sources": {"type": "object", "additionalProperties": _TEXT},
            "figures": {
                "type": "object",
                "properties": figures,
                "required": [name for name, about in RANGES.items() if about.required],
                "additionalProperties": False,
            },
        },
        "required": ["name", "vendor", "architecture", "sources", "figures"],
        "additionalProperties": False,
    }
