"""Evaluate predictions for GPUs known only by datasheet, or by two microbenchmarks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.datasheet_estimates import with_estimates
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.kernel_db.calls import CallKey, call_of, modelled_ns
from onerank.annotate.kernel_db.database import SHIPPED, read_database, rows_of
from onerank.annotate.models.calibration import MeanRates, rates_in, shapes_of
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.roofline import predict
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES
from tools.fit.fit_tiles import stored_ns
from tools.fit.measured_kernels import F64, Attention, Products, family, of_attention, of_layers

VIDUR_FILE = "vidur_mlp_fp16.parquet"


@dataclass(frozen=True, slots=True)
class Case:
    """Predictions for one ordered pair of GPUs.

    Attributes:
        kind: kind of prediction, as in `intervals.KINDS`.
        source: GPU whose measurement was used.
        target: GPU predicted, its family left out of the fit.
        measured_ns: float64[d].
        predicted_ns: float64[d].
        rows: m of products, queries of attention, 0 of others, float64[d].
        widening: factor on the errors for a GPU this far from those fitted to, see `intervals`.
        by_datasheet: whether only the target's datasheet figures were used.
    """

    kind: str
    source: Gpu
    target: Gpu
    measured_ns: F64
    predicted_ns: F64
    rows: F64
    widening: float = 1.0
    by_datasheet: bool = False

    @property
    def error(self) -> F64:
        """ln(measured / predicted)."""
        return np.log(self.measured_ns / self.predicted_ns)


Described = Callable[[Gpu], Gpu]
"""Shipped description -> the description that a prediction may use."""


def as_shipped(gpu: Gpu) -> Gpu:
    """Return the GPU with everything in its shipped description."""
    return gpu


def unmeasured_cases(folder: Path, described: Described = as_shipped) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations and additions in fp16, by GPU.

    They are predicted like operators of a CPU capture: launch floor and bandwidth. No family is
    excluded, because nothing of this is fitted.
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    # The embedding is five times slower than its bytes. PyTorch has replaced that kernel since:
    # the gather of rows in the H200's database is not slow.
    rows = rows.filter(pl.col("op").cast(pl.String) != "emb")
    index = ["model", "tp", "tokens", "op", "bytes"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    for (name,), table in grouped.filter(pl.col("time_ms") > 0).group_by(
        "gpu", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        times = table["time_ms"].to_numpy().astype(np.float64) * 1e6
        predicted_ns, _ = predict(of_layers(times, table), described(gpu))
        yield Case("memory_unmeasured", gpu, gpu, times, predicted_ns, np.zeros(len(times)))


def attention_cases(
    attention: Attention,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention of the campaign by its shape, by GPU, with the GPU's die family left out."""
    for name, times in attention.times_ns.items():
        gpu = load_gpu(name)
        predicted_ns, _ = model(family(gpu))(of_attention(attention, times), described(gpu))
        predicted_ns = predicted_ns + stored_ns(gpu, attention.shapes)
        yield Case("attention_unmeasured", gpu, gpu, times, predicted_ns, attention.shapes[:, 3])


def database_cases(
    model: Callable[[str], PredictFromDescription], described: Described = as_shipped
) -> Iterator[Case]:
    """Yield both passes of cuDNN's attention in the shipped H200's database, by their shapes."""
    gpu = load_gpu("H200")
    works: list[Work] = []
    times: list[int] = []
    for row in rows_of(read_database(SHIPPED / "H200.parquet")):
        if "_cudnn_attention" not in row.operator:
            continue
        call = call_of(CallKey(row.operator, row.shapes, row.dtypes, row.attributes))
        assert call is not None, "attention's types are known"
        works.append(work_of_call(row.operator, call))
        times.append(sum(row.kernel_ns))
    rows = np.array([work.attention[3] for work in works], dtype=np.float64)
    predicted_ns = modelled_ns(works, described(gpu), model(family(gpu)))
    measured_ns = np.array(times, dtype=np.float64)
    yield Case("attention_unmeasured", gpu, gpu, measured_ns, predicted_ns, rows)


_ESTIMATED = ("memory_achievable_fraction", "launch_floor_ns")


def as_by_datasheet(gpus: Sequence[Gpu]) -> Described:
    """Return a function that replaces the measured figures of a target by the loader's estimates.

    The estimates come from those of `gpus` that are of another die family than the target.
    """

    def described(target: Gpu) -> Gpu:
        known = {
            name: figure
            for name, figure in target.figures.items()
            if name not in _ESTIMATED
            and not name.startswith("measured")
            and not (name.endswith("_sustained_fraction") and not name.startswith("vector"))
        }
        others = [gpu for gpu in gpus if family(gpu) != family(target)]
        return with_estimates(msgspec.structs.replace(target, figures=known), lambda: others)

    return described


def as_calibrated(gpus: Sequence[Gpu], products: Products) -> Described:
    """Return a function that describes a target by its datasheet and two microbenchmarks."""
    forget = as_by_datasheet(gpus)
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}

    def reached(target: Gpu, sizes: Sequence[tuple[int, int, int]]) -> MeanRates:
        times = products.times_ns[target.name]
        return rates_in(shapes_of(sizes), times[[place[size] for size in sizes]])

    def described(target: Gpu) -> Gpu:
        measured = {
            "measured_gemm_tflops": reached(target, LARGE_SHAPES).flops / 1e12,
            "measured_skinny_gb_per_s": reached(target, SKINNY_SHAPES).bytes / 1e9,
        }
        source = next(iter(target.sources))
        figures = {n: Figure(value, source, "measured") for n, value in measured.items()}
        known = forget(target)
        return msgspec.structs.replace(known, figures={**known.figures, **figures})

    return described
