"""Evaluate database look-ups against another campaign and against a captured step."""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database import Library
from onerank.annotate.kernel_db.interpolate import SOURCE_SHARE, Basis, look_up
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.intervals import TINY_NS
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.recost.recost import source_gpu
from onerank.ir import Graph
from tools.fit.datasheet_eval import VIDUR_FILE, Case
from tools.fit.measured_kernels import F64, read_products

POWER_FILE = "gemm_power.parquet"
STEP_KINDS = ("looked_up", "looked_up_loosely")
# Shortest layers that are compared: their campaign records whole microseconds.
_LONG_NS = 10_000
_SIZES = ["m", "n", "k"]


class Campaigns(NamedTuple):
    """The same 16-bit products measured twice.

    Attributes:
        name: name of the second campaign.
        sizes: m, n and k, float64[d, 3].
        first: name of a description -> times of the first campaign in ns, float64[d].
        second: the same for the second campaign.
    """

    name: str
    sizes: F64
    first: dict[str, F64]
    second: dict[str, F64]


def campaigns(folder: Path) -> Iterator[Campaigns]:
    """Yield each campaign in the folder, compared with that of `gemm.parquet`.

    `gemm_power.parquet` has the same bf16 GEMMs on two GPUs. `vidur_mlp_fp16.parquet` has layers in
    fp16 on two others, of which those over 10 us are used.

    Raises:
        FormatError: `gemm.parquet` is missing or lacks a column.
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
            pl.Series(f"first {gpu}", products.times_ns[description])
            for gpu, description in names.items()
        )
        both = table.join(first, on=_SIZES).sort(_SIZES)
        yield Campaigns(
            name,
            both.select(_SIZES).to_numpy(),
            {description: both[f"first {gpu}"].to_numpy() for gpu, description in names.items()},
            {
                description: both[gpu].to_numpy().astype(np.float64) * 1000
                for gpu, description in names.items()
            },
        )


def looked_up_cases(folder: Path) -> Iterator[Case]:
    """Yield look-ups of the first campaign for the second, on one GPU and on two.

    No family is excluded, because nothing of a look-up is fitted.
    """
    for campaign in campaigns(folder):
        rows = campaign.sizes[:, 0]
        for name, times in campaign.second.items():
            gpu = load_gpu(name)
            yield Case("looked_up_otherwise", gpu, gpu, times, campaign.first[name], rows)
        for source, target in permutations(campaign.second, 2):
            gpus = load_gpu(source), load_gpu(target)
            predicted_ns = (
                campaign.first[target]
                * (campaign.second[source] / campaign.first[source]) ** SOURCE_SHARE
            )
            yield Case("looked_up_otherwise", *gpus, campaign.second[target], predicted_ns, rows)


def captured_cases(graph: Graph, library: Library) -> Iterator[Case]:
    """Yield the kernels of a captured step with look-ups for the GPU that ran it.

    Kernels of one name and call are one entry with their median time.

    Raises:
        AnnotateError: the GPU is not known.
    """
    gpu = source_gpu(graph, None)
    costs = op_costs_of(graph)
    all_nodes = np.ones(len(costs.index), dtype=bool)
    lookups = look_up(
        graph, costs, all_nodes, Basis(library, None, gpu, predict_from_description, shipped())
    )
    known = np.isfinite(lookups.time_ns) & (lookups.rules == Rule.LOOKED_UP)
    rows = pl.DataFrame(
        {
            "call": costs.call[known],
            "name": graph.nodes.name[costs.index[known]],
            "measured": graph.nodes.duration_ns[costs.index[known]].astype(np.float64),
            "looked_up": lookups.time_ns[known],
            "loosely": lookups.doubt.loosely[known],
        }
    )
    kernels = rows.filter(pl.col("measured") > 0).group_by("call", "name")
    medians = pl.col("measured", "looked_up").median()
    each = kernels.agg(medians, pl.col("loosely").first()).sort("call", "name")
    times, looked_up_ns = (each[name].to_numpy() for name in ("measured", "looked_up"))
    loosely = (looked_up_ns <= TINY_NS) | each["loosely"].to_numpy()
    for kind, selected in (("looked_up", ~loosely), ("looked_up_loosely", loosely)):
        yield Case(
            kind, gpu, gpu, times[selected], looked_up_ns[selected], np.zeros(int(selected.sum()))
        )
