"""Predictions of latent attention (MLA) over whole prompts, from the table of `public_sets`.

Nothing is fitted to it: its coefficients are those of attention with equal heads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_time import is_measured_latent
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.prediction_terms import Rule
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import Case
from tools.fit.measured_kernels import Attention, family, of_attention, read_table

LATENT_PREFILL_FILE = "latent_prefill.parquet"

_SIZES = ["batch", "rows", "heads"]

# DeepSeek's sizes: heads without and with a rotary position, and of a value; the latent vector.
_PLAIN, _ROTARY, _VALUE, _LATENT = 128, 64, 128, 512

_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class LatentPrefills:
    """Latent attention over whole prompts by one kernel on one GPU.

    Attributes:
        gpu: the GPU.
        dataset: framework and version.
        absorbed: whether queries meet the latent vectors instead of keys and values of each head.
        attention: the calls.
        times_ns: with the kernels of `other_ns`, float64[d].
    """

    gpu: Gpu
    dataset: str
    absorbed: bool
    attention: Attention
    times_ns: F64

    def other_ns(self) -> F64:
        """Return the time of the other kernels of a row, float64[d].

        SGLang's FlashAttention writes the latent vectors to the cache. The others also rotate the
        queries' positions in place and copy the rotated position of the keys to every head.
        """
        batch, heads, _, rows, *_ = self.attention.shapes.T
        tokens = batch * rows
        moved = tokens * 2 * (_LATENT + _ROTARY)
        if not self.absorbed:
            moved = moved + tokens * heads * 3 * _ROTARY
        launches = 1 if self.absorbed else 2
        stream_ns = _ITEM_BYTES * moved * 1e9 / self.gpu.bandwidth_bytes_per_s
        return launches * self.gpu.launch_floor_ns + stream_ns


def read_latent_prefills(folder: Path) -> list[LatentPrefills]:
    """Read `latent_prefill.parquet`.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    columns = ["gpu", "dataset", "kernel", *_SIZES, "time_us"]
    rows = read_table(folder / LATENT_PREFILL_FILE, columns)
    read: list[LatentPrefills] = []
    for (name, dataset, kernel), of_kernel in rows.sort(columns).group_by(
        "gpu", "dataset", "kernel", maintain_order=True
    ):
        gpu, absorbed = load_gpu(str(name)), kernel in ("flash_attention", "triton")
        table = of_kernel.group_by(_SIZES).agg(pl.col("time_us").median()).sort(_SIZES)
        batch, rows_, heads = (table[size].to_numpy().astype(np.float64) for size in _SIZES)
        ones = np.ones(len(table))
        key_heads = ones if absorbed else heads
        width, value = (_LATENT + _ROTARY, _LATENT) if absorbed else (_PLAIN + _ROTARY, _VALUE)
        sizes = (batch, heads, key_heads, rows_, rows_, width * ones, value * ones, ones, 0 * ones)
        times_ns = table["time_us"].to_numpy().astype(np.float64) * 1000
        attention = Attention(np.stack(sizes, axis=1), {gpu.name: times_ns})
        read.append(LatentPrefills(gpu, str(dataset), absorbed, attention, times_ns))
    return read


def latent_prefill_cases(
    measured: list[LatentPrefills], by_shape: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield latent attention over whole prompts by its shape.

    Args:
        measured: the calls.
        by_shape: family that is left out -> the model of unmeasured kernels.
    """
    for each in measured:
        kernels = of_attention(each.attention, each.times_ns)
        predicted_ns, rules = by_shape(family(each.gpu))(kernels, each.gpu)
        predicted_ns = predicted_ns + each.other_ns()
        rows = each.attention.shapes[:, 3]
        known = is_measured_latent(each.gpu, each.attention.shapes).all()
        known &= not (rules == Rule.OTHER_ATTENTION).any()
        kind = "attention_unmeasured" if known else "attention_other"
        yield Case(kind, each.gpu, each.gpu, each.times_ns, predicted_ns, rows)
