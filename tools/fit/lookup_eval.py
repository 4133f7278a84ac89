"""Evaluate database look-ups against another campaign and against a captured step."""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database_set import Library
from onerank.annotate.kernel_db.interpolate import SOURCE_SHARE, Basis, look_up
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_model import TINY_NS
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.provenance import Rule
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.recost.recost import source_gpu
from onerank.ir import Graph
from tools.fit.datasheet_eval import VIDUR_FILE, Case
from tools.fit.measured_kernels import F64, read_products

POWER_FILE = "gemm_power.parquet"
STEP_KINDS = ("looked_up", "looked_up_loosely")
_LONG_NS = 10_000  # the layers' campaign records whole microseconds
_SIZES = ["m", "n", "k"]


class Campaigns(NamedTuple):
    """The same 16-bit products measured twice.

    Attributes:
        name: of the second campaign.
        sizes: m, n and k, float64[d, 3].
        first: name of a description -> times of the first campaign in ns, float64[d].
        second: the same of the second.
    """

    name: str
    sizes: F64
    first: dict[str, F64]
    second: dict[str, F64]


def campaigns(folder: Path) -> Iterator[Campaigns]:
    """Yield the campaigns beside that of `gemm.parquet` that the folder has.

    `gemm_power.parquet` has the same bf16 products on two GPUs, `vidur_mlp_fp16.parquet` layers in
    fp16 on two others, of which those over 10 us are taken.

    Raises:
        FormatError: `gemm.parquet` is not there or lacks a column.
        TargetError: a file has a GPU without a description.
    """
    products = read_products(folder)
    for name in (POWER_FILE, VIDUR_FILE):
        if not (folder / name).is_file():
            continue
        rows = pl.read_parquet(folder / name).with_columns(pl.col("gpu").cast(pl.String))
        if "time_ms" in rows.columns:
            rows = rows.filter(pl.col("kind").cast(pl.String) == "gemm")
            rows = rows.with_columns(time_us=pl.col("time_ms") * 1000)
            rows = rows.filter(pl.col("time_us") * 1000 > _LONG_NS)
        rows = rows.with_columns(pl.col(_SIZES).cast(pl.Float64))
        times = rows.group_by("gpu", *_SIZES).agg(pl.col("time_us").median())
        table = times.pivot(on="gpu", index=_SIZES, values="time_us").drop_nulls()
        names = {gpu: load_gpu(gpu).name for gpu in table.columns[len(_SIZES) :]}
        first = pl.DataFrame(products.shapes[:, 1:4], schema=_SIZES).with_columns(
            pl.Series(f"first {gpu}", products.times_ns[own]) for gpu, own in names.items()
        )
        both = table.join(first, on=_SIZES).sort(_SIZES)
        yield Campaigns(
            name,
            both.select(_SIZES).to_numpy(),
            {own: both[f"first {gpu}"].to_numpy() for gpu, own in names.items()},
            {own: both[gpu].to_numpy().astype(np.float64) * 1000 for gpu, own in names.items()},
        )


def looked_up_cases(folder: Path) -> Iterator[Case]:
    """Yield look-ups of the first campaign for the second, on one GPU and on two.

    No family is excluded, because nothing of a look-up is fitted.
    """
    for one in campaigns(folder):
        rows = one.sizes[:, 0]
        for name, times in one.second.items():
            gpu = load_gpu(name)
            yield Case("looked_up_otherwise", gpu, gpu, times, one.first[name], rows)
        for here, there in permutations(one.second, 2):
            gpus = load_gpu(here), load_gpu(there)
            made = one.first[there] * (one.second[here] / one.first[here]) ** SOURCE_SHARE
            yield Case("looked_up_otherwise", *gpus, one.second[there], made, rows)


def captured_cases(graph: Graph, library: Library) -> Iterator[Case]:
    """Yield the kernels of a captured step with look-ups for the GPU that ran it.

    One kernel of each name for each call, its median time.

    Raises:
        AnnotateError: the GPU is not known.
    """
    gpu = source_gpu(graph, None)
    found = op_costs_of(graph)
    every = np.ones(len(found.index), dtype=bool)
    told = look_up(
        graph, found, every, Basis(library, None, gpu, predict_from_description, shipped())
    )
    known = np.isfinite(told.time_ns) & (told.rules == Rule.LOOKED_UP)
    rows = pl.DataFrame(
        {
            "call": found.call[known],
            "name": graph.nodes.name[found.index[known]],
            "measured": graph.nodes.duration_ns[found.index[known]].astype(np.float64),
            "told": told.time_ns[known],
            "loosely": told.doubt.loosely[known],
        }
    )
    kernels = rows.filter(pl.col("measured") > 0).group_by("call", "name")
    middles = pl.col("measured", "told").median()
    each = kernels.agg(middles, pl.col("loosely").first()).sort("call", "name")
    times, made = (each[name].to_numpy() for name in ("measured", "told"))
    loosely = (made <= TINY_NS) | each["loosely"].to_numpy()
    for kind, some in (("looked_up", ~loosely), ("looked_up_loosely", loosely)):
        yield Case(kind, gpu, gpu, times[some], made[some], np.zeros(int(some.sum())))
