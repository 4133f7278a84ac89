"""Predictions of attention over prompts by the kernels of inference engines.

The coefficients of a prediction are fitted without the target's die family.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import scipy.optimize

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_time import attention_ns
from onerank.annotate.models.coefficients import AttentionCoefficients, shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.prediction_terms import Rule
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.fit_tiles import rates_of, robust_loss, stored_ns
from tools.fit.measured_kernels import Attention, family, of_attention, read_table

_optimize: Any = scipy.optimize  # it has no types

ATTENTION_KERNELS_FILE = "attention.parquet"

# architecture -> names of the kernels that libraries run there, as `attention_kernels` has them.
USUAL = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "ada": ("vllm_flash_attn_fa2",),
    "hopper": ("fa3", "vllm_flash_attn_fa3"),
    "blackwell": ("trtllm_mha", "vllm_flashinfer_trtllmprefill"),
}

# Heads up to which the factor of other kernels is computed. With heads of 512 single kernels take
# 1.6 (TensorRT-LLM's, B200) to 6.3 times (Triton's, H100) as long as by their shape, which says
# nothing about usual heads.
_WIDEST_HEAD = 256

_LEAST_QUERIES = 16  # frameworks run other kernels for fewer

_CALLS = 400  # of each GPU, attention kernel and head size

SEED = 4
"""Seed of the calls that are drawn from a table."""

ATTENTION_SIZES = ["batch", "rows", "keys", "heads", "kv_heads", "head_dim"]
"""Columns with the sizes of a call."""

LEAST_ALONE = 0.2
"""Least share of attention in a measured time that includes a write to a cache."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """Causal attention of one GPU, kernel and head size.

    Attributes:
        gpu: the GPU.
        usual: whether libraries run this kernel on the architecture.
        shapes: `AttentionShape` of each call without a window, float64[d, 9].
        times_ns: times with the write of keys and values, float64[d].
    """

    gpu: Gpu
    usual: bool
    shapes: F64
    times_ns: F64


def _read_calls(folder: Path) -> Iterator[_Calls]:
    """Yield the calls in `attention.parquet`, without those that are nearly decoding.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    rows = read_engine_attention(folder)
    rows = rows.filter(pl.col("phase") == "context", pl.col("rows") >= _LEAST_QUERIES)
    groups = rows.group_by("gpu", "dataset", "kernel", "head_dim", maintain_order=True)
    for (name, _, kernel, _), measured in groups:
        gpu = load_gpu(str(name))
        table = measured.sample(min(_CALLS, len(measured)), seed=SEED)
        usual = str(kernel) in USUAL.get(gpu.architecture, ())
        shapes = forward_shapes(table, causal=True)
        yield _Calls(gpu, usual, shapes, table["time_us"].to_numpy() * 1000)


def read_engine_attention(folder: Path) -> pl.DataFrame:
    """Return the calls in `attention.parquet`, of prompts and of decodes.

    Raises:
        FormatError: the file is missing or lacks a column.
    """
    columns = ["gpu", "dataset", "kernel", "phase", *ATTENTION_SIZES, "time_us"]
    return read_table(folder / ATTENTION_KERNELS_FILE, columns)


def forward_shapes(table: pl.DataFrame, *, causal: bool) -> F64:
    """Return `AttentionShape` of forward attention without a window, float64[d, 9]."""
    batch, queries, keys, heads, key_heads, d = (
        table[column].to_numpy().astype(np.float64) for column in ATTENTION_SIZES
    )
    none = np.zeros(len(table))
    return np.stack([batch, heads, key_heads, queries, keys, d, d, none + causal, none], axis=1)


def kernel_cases(
    folder: Path,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention by its shape, by GPU and kernel.

    Kernels that libraries run on the architecture have the kind "attention_unmeasured", others
    "attention_other". The fit has seen no kernel of the target's die family.

    Args:
        folder: has `attention.parquet`.
        model: family that is left out -> the model of unmeasured kernels.
        described: returns the description of a target that the prediction may use.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    cases: list[tuple[Case, bool]] = []
    others: list[Case] = []
    for call in _read_calls(folder):
        kernels = of_attention(Attention(call.shapes, {}), call.times_ns)
        predicted_ns, rules = model(family(call.gpu))(kernels, described(call.gpu))
        predicted_ns = predicted_ns + stored_ns(call.gpu, call.shapes)
        # Without Blackwell, the model already takes its usual kernels for others.
        slow = bool((rules == Rule.OTHER_ATTENTION).any())
        kind = "attention_other" if slow or not call.usual else "attention_unmeasured"
        queries = call.shapes[:, 3]
        case = Case(kind, call.gpu, call.gpu, call.times_ns, predicted_ns, queries)
        as_usual = call.usual or slow
        cases.append((case, as_usual))
        if not as_usual and float(call.shapes[:, 5].max()) <= _WIDEST_HEAD:
            others.append(case)
    for case, as_usual in cases:
        if as_usual:
            yield case
            continue
        slower = other_attention([o for o in others if family(o.target) != family(case.target)])
        floor_ns = _floor_ns(case.target)
        above_ns = np.maximum(case.predicted_ns - floor_ns, 0)
        yield replace(case, predicted_ns=case.predicted_ns + above_ns * (slower - 1))


def _floor_ns(gpu: Gpu) -> float:
    """Return the floors of attention and of its write to a cache, which no kernel changes."""
    return (shipped().attention_on(gpu).floor + 1) * gpu.launch_floor_ns


def fit_attention_floor(
    folder: Path, c: AttentionCoefficients, gpus: Sequence[Gpu], without: Collection[str]
) -> dict[str, float]:
    """Return architecture -> factor on the floors of attention, by its usual kernels.

    Args:
        folder: has `attention.parquet`.
        c: fitted to FlashAttention.
        gpus: GPUs to fit to.
        without: architectures to omit, on which FlashAttention was measured.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    names = sorted({gpu.architecture for gpu in gpus} - {*without})
    return {name: _attention_floor(folder, c, name) for name in names}


def _attention_floor(folder: Path, c: AttentionCoefficients, architecture: str) -> float:
    calls = [
        call for call in _read_calls(folder) if call.usual and call.gpu.architecture == architecture
    ]

    def cost(x: F64) -> float:
        floors = msgspec.structs.replace(c, floor=c.floor * float(np.exp(x[0])))
        costs: list[float] = []
        for call in calls:
            rates = rates_of(call.gpu, "bfloat16", len(call.shapes))
            kernel_ns = attention_ns(call.gpu, rates, call.shapes, floors)
            predicted_ns = kernel_ns + stored_ns(call.gpu, call.shapes)
            costs.append(robust_loss(np.log(call.times_ns / predicted_ns)))
        return float(np.mean(costs))

    options = {"initial_simplex": [[0.0], [0.3]], "xatol": 0.01, "fatol": 1e-4}
    solution = _optimize.minimize(cost, np.zeros(1), method="Nelder-Mead", options=options)
    return float(np.exp(solution.x[0]))


def other_attention(cases: list[Case]) -> float:
    """Return the factor on the time of attention by other kernels than its architecture's usual.

    The geometric mean over die families of measured over predicted time above the floors, of calls
    that take at least twice those.
    """
    families = sorted({family(case.target) for case in cases})
    errors: list[float] = []
    for name in families:
        of_family = [case for case in cases if family(case.target) == name]
        ratios: list[F64] = []
        for case in of_family:
            floor_ns = _floor_ns(case.target)
            long = np.minimum(case.measured_ns, case.predicted_ns) > 2 * floor_ns
            measured_ns, predicted_ns = (
                times[long] - floor_ns for times in (case.measured_ns, case.predicted_ns)
            )
            ratios.append(np.log(measured_ns / predicted_ns))
        errors.append(float(np.mean(np.concatenate(ratios))))
    return float(np.exp(np.mean(errors)))
