"""Evaluate predictions for GPUs known only by datasheet, or by two microbenchmarks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.kernel_db.call_features import call_of, modelled_ns
from onerank.annotate.kernel_db.call_keys import CallKey
from onerank.annotate.kernel_db.database import read_database, rows_of
from onerank.annotate.models.calibration import MeanRates, rates_in, shapes_of
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.datasheet import predict
from onerank.annotate.models.error_model import is_asynchronous
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.ir.errors import TargetError
from onerank.ir.job.microbenchmarks import LARGE, SKINNY
from tools.fit.fit_tiles import stored_ns
from tools.fit.measured_kernels import F64, Attention, Products, family, of_attention, of_layers

VIDUR_FILE = "vidur_mlp_fp16.parquet"


@dataclass(frozen=True, slots=True)
class Case:
    """One ordered pair of GPUs.

    Attributes:
        kind: kind of prediction, as in `error_kinds.KINDS`.
        source: GPU whose measurement was used.
        target: GPU predicted, its family left out of the fit.
        measured_ns: float64[d].
        predicted_ns: float64[d].
        rows: m of products, queries of attention, 0 of others, float64[d].
        widening: factor on the errors for a GPU this far from those fitted to, see `error_kinds`.
    """

    kind: str
    source: Gpu
    target: Gpu
    measured_ns: F64
    predicted_ns: F64
    rows: F64
    widening: float = 1.0

    @property
    def error(self) -> F64:
        """ln(measured / predicted)."""
        return np.log(self.measured_ns / self.predicted_ns)


DATABASES = Path(__file__).parents[1] / "databases"


def alone_cases(folder: Path) -> Iterator[Case]:
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
        made, _ = predict(of_layers(times, table), gpu)
        yield Case("memory_alone", gpu, gpu, times, made, np.zeros(len(times)))


def attention_cases(
    attention: Attention, model: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield attention of the campaign by its shape, by GPU, with the GPU's die family left out."""
    for name, times in attention.times_ns.items():
        gpu = load_gpu(name)
        made, _ = model(family(gpu))(of_attention(attention, times), gpu)
        made = made + stored_ns(gpu, attention.shapes)
        yield Case("attention_alone", gpu, gpu, times, made, attention.shapes[:, 3])


def database_cases(model: Callable[[str], PredictFromDescription]) -> Iterator[Case]:
    """Yield both passes of cuDNN's attention in the shipped H200's database, by their shapes."""
    gpu = load_gpu("H200")
    works: list[Work] = []
    times: list[int] = []
    for row in rows_of(read_database(DATABASES / "H200.parquet")):
        if "_cudnn_attention" not in row.operator:
            continue
        call = call_of(CallKey(row.operator, row.shapes, row.dtypes, row.attributes))
        assert call is not None, "attention's types are known"
        works.append(work_of_call(row.operator, call))
        times.append(sum(row.kernel_ns))
    rows = np.array([work.attention[3] for work in works], dtype=np.float64)
    made = modelled_ns(works, gpu, model(family(gpu)))
    yield Case("attention_alone", gpu, gpu, np.array(times, dtype=np.float64), made, rows)


def as_by_datasheet(gpus: Sequence[Gpu]) -> Callable[[Gpu], Gpu]:
    """Return a function that removes the measured figures from a target's description.

    Achievable bandwidth and launch floor, in clock cycles, become the means over the families of
    the other GPUs, the sustained fraction what the power limit allows, see `capped_fraction`.
    """

    def described(target: Gpu) -> Gpu:
        means = _means(gpus, target)
        figures = {
            name: figure
            for name, figure in target.figures.items()
            if not (name.endswith("_sustained_fraction") or name.startswith("measured"))
            or name.startswith("vector")
        }
        source = next(iter(target.sources))
        figures |= {name: Figure(value, source, "estimated") for name, value in means.items()}
        return msgspec.structs.replace(target, figures=figures)

    return described


def as_calibrated(gpus: Sequence[Gpu], products: Products) -> Callable[[Gpu], Gpu]:
    """Return a function that describes a target by its datasheet and two microbenchmarks."""
    forget = as_by_datasheet(gpus)
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}

    def reached(target: Gpu, sizes: Sequence[tuple[int, int, int]]) -> MeanRates:
        times = products.times_ns[target.name]
        return rates_in(shapes_of(sizes), times[[place[size] for size in sizes]])

    def described(target: Gpu) -> Gpu:
        measured = {
            "measured_gemm_tflops": reached(target, LARGE).flops / 1e12,
            "measured_skinny_gb_per_s": reached(target, SKINNY).bytes / 1e9,
        }
        source = next(iter(target.sources))
        figures = {n: Figure(value, source, "measured") for n, value in measured.items()}
        known = forget(target)
        return msgspec.structs.replace(known, figures={**known.figures, **figures})

    return described


def _means(gpus: Sequence[Gpu], target: Gpu) -> dict[str, float]:
    rest = [gpu for gpu in gpus if family(gpu) != family(target)]
    families = sorted({family(gpu) for gpu in rest})

    def mean(figure: Callable[[Gpu], float]) -> float:
        return fmean(fmean(figure(g) for g in rest if family(g) == f) for f in families)

    fraction = capped_fraction(target, rest)
    names = ("bf16_sustained_fraction", "tensor_sustained_fraction")
    return {
        "memory_achievable_fraction": mean(lambda g: g.figures["memory_achievable_fraction"].value),
        "launch_floor_ns": mean(lambda g: g.launch_floor_ns * g.clock_hz) / target.clock_hz,
        **dict.fromkeys(names, fraction),
    }


_NODE_POWER = {"ampere": 1 / 0.7}

"""Power at one speed over that of the 5 nm class: TSMC, 2020: N5 takes 30% less than N7."""

_MOST_SUSTAINED = 0.9


def capped_fraction(target: Gpu, others: Sequence[Gpu]) -> float:
    """Return the fraction of the peak that the power limit lets long products sustain.

    Power goes with rate * voltage^2, and voltage with the clock. So the part x of peak and clock at
    which the limit is met has

        node's power * peak * clock^2 * x^3 = limit * what a product needs

    What a product needs is known from GPUs whose matrix units are fed in the same way: the larger
    products of newer units move fewer operands.

    Args:
        target: its peak, boost clock, power limit and architecture are read.
        others: GPUs whose sustained fractions are known; those of one family count once.

    Raises:
        TargetError: a GPU has no bf16 rate or no power limit.
    """
    alike = [gpu for gpu in others if is_asynchronous(gpu) == is_asynchronous(target)] or others
    families = sorted({family(gpu) for gpu in alike})
    needs = [
        fmean(
            gpu.figures["bf16_sustained_fraction"].value / _power_share(gpu)
            for gpu in alike
            if family(gpu) == f
        )
        for f in families
    ]
    return min(_MOST_SUSTAINED, fmean(needs) * _power_share(target))


def _power_share(gpu: Gpu) -> float:
    peak = gpu.peak_tensor_flops_per_s("bfloat16")
    if not peak or not gpu.tdp_w:
        raise TargetError(
            f"{gpu.name}: the power-limited rate needs a bf16 rate and tdp_w",
            code="fit-gpu-incomplete",
        )
    needed = _NODE_POWER.get(gpu.architecture, 1.0) * (peak / 1e12) * (gpu.clock_hz / 1e9) ** 2
    return (gpu.tdp_w / needed) ** (1 / 3)
