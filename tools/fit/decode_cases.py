"""Attention of one query per sequence by the kernels of inference engines: fits and predictions.

The coefficients of a prediction are fitted without the target's die family, or without the kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import scipy.optimize

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_time import (
    LATENT_ARCHITECTURES,
    decode_terms,
    latent_terms,
)
from onerank.annotate.models.coefficients import (
    Decode,
    LatentDecode,
)
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.gpu_distance import same_die
from onerank.ir.arrays import F64
from tools.fit.attention_kernel_cases import (
    ATTENTION_SIZES,
    LEAST_ALONE,
    SEED,
    USUAL,
    forward_shapes,
    read_engine_attention,
)
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.fit_tiles import fit_robustly, rates_of
from tools.fit.measured_kernels import (
    CACHE_SERVED,
    Attention,
    family,
    of_attention,
    read_table,
)

_optimize: Any = scipy.optimize  # it has no types

LATENT_FILE = "latent.parquet"

# The same of attention with one query per sequence. SGLang's on an A100 is FlashAttention-3's code
# for Ampere, which no other framework runs there.
_USUAL_DECODE = {
    **USUAL,
    "ampere": ("vllm_flash_attn",),
    "blackwell": ("trtllm_mha", "vllm_flashinfer_trtllmdecode"),
}
# Other kernels of one query per sequence: cases, but no part of a fit.
_OTHER_DECODE = {"ampere": ("flash_attention",)}

# Widths of a key and a value of latent attention: DeepSeek's.
_LATENT_SIZES = 576, 512

_DECODE_CALLS = 2000  # of each GPU, dataset and kernel


@dataclass(frozen=True, slots=True)
class Decodes:
    """Attention of one query per sequence, of one GPU, dataset and kernel.

    Attributes:
        gpu: the GPU.
        dataset: framework and version.
        shapes: `AttentionShape` of each call without a window, float64[d, 9].
        times_ns: times with the write of a key and a value per sequence, float64[d].
        usual: whether libraries run the kernel on the architecture.
        latent: whether it is latent attention.
    """

    gpu: Gpu
    dataset: str
    shapes: F64
    times_ns: F64
    usual: bool = True
    latent: bool = False

    @property
    def name(self) -> str:
        """GPU, dataset and kind of attention."""
        return f"{self.gpu.name}, {self.dataset}{', latent' if self.latent else ''}"

    @property
    def framework(self) -> str:
        """Framework of the dataset."""
        return self.dataset.split(" ", 1)[0]

    @property
    def alone_ns(self) -> F64:
        """The time without that write, whose bytes are negligible, float64[d]."""
        return np.maximum(self.times_ns - self.gpu.launch_floor_ns, LEAST_ALONE * self.times_ns)


def read_decodes(folder: Path) -> list[Decodes]:
    """Read the calls with one query per sequence in `attention.parquet` and `latent.parquet`.

    Raises:
        FormatError: a file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    return [*_read_grouped(folder), *_read_latent(folder)]


def _read_grouped(folder: Path) -> Iterator[Decodes]:
    """Yield the calls in `attention.parquet`, by kernels in `_USUAL_DECODE`, `_OTHER_DECODE`."""
    rows = read_engine_attention(folder)
    rows = rows.filter(pl.col("phase") == "generation").sort(rows.columns)
    for (name, dataset, kernel), table in rows.group_by(
        "gpu", "dataset", "kernel", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        usual = str(kernel) in _USUAL_DECODE.get(gpu.architecture, ())
        if not usual and str(kernel) not in _OTHER_DECODE.get(gpu.architecture, ()):
            continue
        cache_bytes = 4 * pl.col("batch") * pl.col("kv_heads") * pl.col("keys") * pl.col("head_dim")
        drawn = _drawn_cold(table, cache_bytes, gpu, ATTENTION_SIZES)
        shapes = forward_shapes(drawn, causal=False)
        times_ns = drawn["time_us"].to_numpy() * 1000
        yield Decodes(gpu, str(dataset), shapes, times_ns, usual=usual)


def _read_latent(folder: Path) -> Iterator[Decodes]:
    """Yield the calls in `latent.parquet`; on architectures without a kernel none is usual."""
    sizes = ["batch", "keys", "heads"]
    rows = read_table(folder / LATENT_FILE, ["gpu", "dataset", *sizes, "time_us"])
    for (name, dataset), table in rows.group_by("gpu", "dataset", maintain_order=True):
        gpu, (d, dv) = load_gpu(str(name)), _LATENT_SIZES
        times = table.group_by(sizes).agg(pl.col("time_us").median()).sort(sizes)
        drawn = _drawn_cold(times, 2 * d * pl.col("batch") * pl.col("keys"), gpu, sizes)
        batch, keys, heads = (drawn[size].to_numpy().astype(np.float64) for size in sizes)
        none = np.zeros(len(drawn))
        columns = [batch, heads, none + 1, none + 1, keys, none + d, none + dv, none, none]
        times_ns = drawn["time_us"].to_numpy() * 1000
        usual = gpu.architecture in LATENT_ARCHITECTURES
        shapes = np.stack(columns, axis=1)
        yield Decodes(gpu, str(dataset), shapes, times_ns, usual=usual, latent=True)


def _drawn_cold(
    table: pl.DataFrame, cache_bytes: pl.Expr, gpu: Gpu, sizes: Sequence[str]
) -> pl.DataFrame:
    """Return calls drawn from those that memory serves, or that take little time from it."""
    share = cache_bytes / (gpu.l2_bytes or 1)
    cold = table.filter(~share.is_between(*CACHE_SERVED))
    return cold.sample(min(_DECODE_CALLS, len(cold)), seed=SEED).sort(sizes)


DECODE_START = Decode(
    floor=2, unit_cycles=4000, bytes_per_cycle=16, split_floors=0.5, overlap=3, copy_floors=1.5
)
# On Hopper the multiply-adds hide the reads: a fit to it alone keeps the bytes per cycle.
LATENT_START = LatentDecode(floor=2, unit_cycles=4000, bytes_per_cycle=30, split_floors=0.5)


def fit_decode(decodes: Sequence[Decodes]) -> dict[str, Decode]:
    """Return architecture -> the coefficients of its attention of a few queries."""
    usual = [each for each in decodes if each.usual and not each.latent]

    def fitted(architecture: str) -> Decode:
        of_architecture = [each for each in usual if each.gpu.architecture == architecture]

        def model(each: Decodes, x: F64) -> F64:
            return decode_terms(each.gpu, each.shapes, Decode(*x.tolist())).predicted_ns

        return Decode(*_fit(of_architecture, model, msgspec.structs.astuple(DECODE_START)))

    return {name: fitted(name) for name in sorted({each.gpu.architecture for each in usual})}


def fit_latent(decodes: Sequence[Decodes]) -> LatentDecode:
    """Return the coefficients of latent attention of a few queries."""

    def model(each: Decodes, x: F64) -> F64:
        rates = rates_of(each.gpu, "bfloat16", len(each.shapes))
        return latent_terms(each.gpu, rates, each.shapes, LatentDecode(*x.tolist())).predicted_ns

    usual = [each for each in decodes if each.usual and each.latent]
    return LatentDecode(*_fit(usual, model, msgspec.structs.astuple(LATENT_START)))


def _fit(
    decodes: Sequence[Decodes], model: Callable[[Decodes, F64], F64], start: Sequence[float]
) -> list[float]:
    """Return the coefficients near `start` with which the model predicts the calls.

    Each time also has the write of a key and a value per sequence, one launch.
    """

    def residuals(x: F64) -> F64:
        return np.concatenate(
            [
                np.log(model(each, np.exp(x)) + each.gpu.launch_floor_ns) - np.log(each.times_ns)
                for each in decodes
            ]
        )

    return np.exp(fit_robustly(residuals, np.log(start))).tolist()


def elsewhere(each: Decodes, decodes: Sequence[Decodes]) -> list[Decodes]:
    """Return the calls of other datasets on the architecture; of other GPUs, if there are any.

    Kernels that are not usual are not predicted from each other.
    """
    others = [
        other
        for other in decodes
        if (other.gpu.architecture, other.latent) == (each.gpu.architecture, each.latent)
        and other.dataset != each.dataset
        and other.usual
    ]
    return [other for other in others if other.gpu != each.gpu] or others


def decode_cases(
    decodes: Sequence[Decodes],
    by_shape: Callable[[str], PredictFromDescription],
    model: Callable[[str], Predict],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention of one query per sequence by its shape, and from another GPU's time.

    By shape a call has the kind "decode_unmeasured", with the coefficients of the architecture from
    other datasets, and "decode_other" or "latent_other", without the architecture. The two also
    have calls by a kernel that no other dataset has for the architecture.

    Args:
        decodes: the calls.
        by_shape: the omitted die family, or GPU and dataset -> the model of unmeasured kernels.
        model: family that is left out -> the model of measured kernels.
        described: returns the description of a target that the prediction may use.
    """
    for each in decodes:
        gpu, target = each.gpu, described(each.gpu)
        kernels = of_attention(Attention(each.shapes, {}), each.times_ns)
        other = "latent_other" if each.latent else "decode_other"
        kinds = [(other, "")]
        if elsewhere(each, decodes):
            # The other datasets have measured another kernel, if this one is unusual.
            kinds.append(("decode_unmeasured" if each.usual else other, each.name))
        for kind, without in kinds:
            # A datasheet's other figures are estimated from the architecture, if it was measured.
            known = gpu if without else target
            predicted_ns = by_shape(without or family(gpu))(kernels, known)[0]
            predicted_ns = predicted_ns + known.launch_floor_ns
            case = Case(kind, gpu, gpu, each.times_ns, predicted_ns, each.shapes[:, 3])
            yield replace(case, without=without)
    for before, after in permutations(decodes, 2):
        # A framework's datasets run one kernel, in the version for each architecture.
        if before.gpu == after.gpu or before.framework != after.framework:
            continue
        # `of_attention` counts keys and values separately; latent attention reads them as one.
        if before.latent or after.latent:
            continue
        row_of = {tuple(shape): row for row, shape in enumerate(before.shapes.tolist())}
        rows = np.array([row_of.get(tuple(shape), -1) for shape in after.shapes.tolist()])
        both = np.flatnonzero(rows >= 0)
        kernels = of_attention(Attention(after.shapes[both], {}), before.alone_ns[rows[both]])
        target = described(after.gpu)
        predicted_ns = model(family(after.gpu))(kernels, before.gpu, target)[0]
        predicted_ns = predicted_ns + target.launch_floor_ns
        kind = "attention_same_die" if same_die(before.gpu, after.gpu) else "decode"
        gpus, rows = (before.gpu, after.gpu), after.shapes[both][:, 3]
        yield Case(kind, *gpus, after.times_ns[both], predicted_ns, rows)
