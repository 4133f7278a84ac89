"""Steps of engines from one GPU's operators, re-costed for another, against that GPU's operators.

    python -m benchmarks.serving.serving_transfer DATA_DIRECTORY

DATA_DIRECTORY holds linears.parquet, attention.parquet and experts.parquet, which
`tools.fit.public_sets` writes: aiconfigurator's measurements of single operators.

No engine ran. A step is the sum of what the tables of H100 SXM and H200 have of one rank: linear
layers and the head, attention with its write to the KV cache, and the experts of MoE layers, in
bf16. It has no norms, activations, rotary positions, collectives, gaps or host. The rows of one GPU
are re-costed for the other by the model that `annotate --target` uses, without a measurement there,
and their sum is compared with the sum of the other GPU's own rows.

The tables have a grid of sizes. A product with n or k between two of them is the weighted mean of
its neighbours, on both GPUs with equal weights. One with n above the grid is two products, and one
with n below it, Mixtral's router of 8 experts, has the smallest n. The benchmarks repeat an
operator with the same operands, so a cache serves weights that fit into it; in an engine none
would.

  mean    of |re-costed sum / measured sum - 1| in percent
  signed  mean of re-costed sum / measured sum - 1
  kept    the mean error if the source's times are taken unchanged
  ratio   the mean error by the ratio of the GPUs' peaks, as annotate --model ratio

"shipped" has the coefficients of the package, which were fitted to rows of both GPUs among others.
"left out" has those of a fit without Hopper. Both carry over equal shares of a measured deviation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import given_folder
from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.cost_model import Predict
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.learned import predict_learned
from onerank.annotate.models.scale_by_ratio import predict_by_ratio
from onerank.annotate.op_costs.engine_operators import ExpertSizes
from onerank.ir.arrays import F64
from tools.fit.expert_cases import ExpertLayers, read_experts
from tools.fit.leave_one_out import fits_without, models_without
from tools.fit.measured_kernels import (
    Attention,
    Products,
    family,
    of_attention,
    of_products,
    read_attention,
    read_products,
    read_table,
)

GPUS = "H100-SXM", "H200"


@dataclass(frozen=True)
class Dataset:
    """The dataset of one framework, and the kernels in it.

    Attributes:
        name: of the dataset.
        linear: kernel of linear layers.
        attention: kernel of attention.
        experts: kernel of experts.
    """

    name: str
    linear: str
    attention: str
    experts: str


DATASETS = (
    Dataset("vllm 0.24.0", "torch.nn.functional.linear", "vllm_flash_attn_fa3",
             "vllm_unquantizedfusedmoe_triton_tritonexperts"),
    Dataset("sglang 0.5.14", "sglang_torch_linear", "fa3", "sglang_fused_moe_triton"),
    Dataset("trtllm 1.3.0rc20", "torch_flow", "torch_flow", "moe_torch_flow_cutlass"),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One rank of a model; heads, widths and vocabulary are those of the rank.

    Attributes:
        name: model and tensor-parallel size.
        layers: decoder layers.
        hidden: features.
        heads: query heads.
        kv_heads: key-value heads.
        inner: width of the MLP, or of an expert.
        words: columns of the head.
        experts: experts of a layer; 0 for an MLP.
        chosen: experts of a token.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    words: int
    experts: int = 0
    chosen: int = 0


MODELS = (
    Model("Llama-3.1-8B, tp 1", 32, 4096, 32, 8, 14336, 128256),
    Model("Llama-3.1-70B, tp 4", 80, 8192, 16, 2, 7168, 32064),
    Model("Llama-3.1-70B, tp 8", 80, 8192, 8, 1, 3584, 16032),
    Model("Qwen3-32B, tp 2", 64, 5120, 32, 4, 12800, 75968),
    Model("Qwen3-30B-A3B, tp 1", 48, 2048, 32, 4, 768, 151936, 128, 8),
    Model("Mixtral-8x7B, tp 2", 32, 4096, 16, 4, 7168, 16000, 8, 2),
)
HEAD_SIZE = 128

DECODES = [(batch, keys) for batch in (1, 8, 32, 128, 256) for keys in (512, 2048, 8192, 32768)
           if batch * keys <= 1 << 21]  # fmt: skip
PREFILLS = (512, 1024, 2048, 4096, 8192)
STEPS_OFFERED = len(MODELS) * (len(DECODES) + len(PREFILLS))


@dataclass(frozen=True)
class Operator:
    """Calls of an operator in a step, as rows of the tables with weights.

    Attributes:
        kind: "linear", "attention", "decode" or "experts".
        sizes: m, n, k; or batch, queries, keys, heads, kv_heads; or the sizes of `ExpertSizes`.
        count: calls in the step, with the weight of the row.
    """

    kind: str
    sizes: tuple[int, ...]
    count: float


def products(m: int, n: int, k: int, count: float, grid: Sequence[int]) -> Iterator[Operator]:
    """Yield a product as products of the grid's n and k; m is one of the grid's."""
    if n > grid[-1]:
        yield from products(m, n // 2, k, 2 * count, grid)
        return
    for size_n, weight_n in neighbours(n, grid):
        for size_k, weight_k in neighbours(k, grid):
            yield Operator("linear", (m, size_n, size_k), count * weight_n * weight_k)


def neighbours(size: int, grid: Sequence[int]) -> list[tuple[int, float]]:
    """Return the sizes of the grid around a size, with the weights of a linear interpolation.

    A size below the grid has the smallest of it.
    """
    at = int(np.searchsorted(grid, size))
    if at == 0 or grid[at] == size:
        return [(grid[at], 1.0)]
    low, high = grid[at - 1], grid[at]
    weight = (size - low) / (high - low)
    return [(low, 1 - weight), (high, weight)]


def step(model: Model, batch: int, queries: int, keys: int, grid: Sequence[int]) -> list[Operator]:
    """Return the operators of a step: a decode if each sequence has one query, else a prefill."""
    m, layers = batch * queries, model.layers
    heads = HEAD_SIZE * model.heads
    kind = "decode" if queries == 1 else "attention"
    attention = batch, queries, keys, model.heads, model.kv_heads
    operators = [
        *products(m, heads + 2 * HEAD_SIZE * model.kv_heads, model.hidden, layers, grid),
        *products(m, model.hidden, heads, layers, grid),
        *products(batch, model.words, model.hidden, 1, grid),
        Operator(kind, attention, layers),
    ]
    if model.experts:
        router = products(m, model.experts, model.hidden, layers, grid)
        sizes = m, model.chosen, model.experts, model.hidden, 2 * model.inner, model.inner
        return [*operators, *router, Operator("experts", sizes, layers)]
    return [
        *operators,
        *products(m, 2 * model.inner, model.hidden, layers, grid),
        *products(m, model.hidden, model.inner, layers, grid),
    ]


Times = dict[tuple[str, tuple[int, ...]], float]


def read_times(folder: Path, dataset: Dataset) -> dict[str, Times]:
    """Return GPU -> operator -> measured time in ns."""
    times: dict[str, Times] = {name: {} for name in GPUS}
    linears = read_table(
        folder / "linears.parquet", ["gpu", "dataset", "kernel", "dtype", "m", "n", "k", "time_us"]
    ).filter(
        pl.col("gpu").is_in(GPUS),
        pl.col("dataset") == dataset.name,
        pl.col("kernel") == dataset.linear,
        pl.col("dtype") == "bfloat16",
    )
    attention = read_table(
        folder / "attention.parquet",
        ["gpu", "dataset", "kernel", "phase", "batch", "rows", "keys", "heads", "kv_heads",
         "head_dim", "time_us"],
    ).filter(
        pl.col("gpu").is_in(GPUS),
        pl.col("dataset") == dataset.name,
        pl.col("kernel") == dataset.attention,
        pl.col("head_dim") == HEAD_SIZE,
    )  # fmt: skip
    kind = pl.when(pl.col("phase") == "generation").then(pl.lit("decode"))
    attention = attention.with_columns(kind=kind.otherwise(pl.lit("attention")))
    for table, columns in (
        (linears.with_columns(kind=pl.lit("linear")), ["m", "n", "k"]),
        (attention, ["batch", "rows", "keys", "heads", "kv_heads"]),
    ):
        medians = table.group_by("gpu", "kind", *columns).agg(pl.col("time_us").median())
        for gpu, name, *sizes, time_us in medians.iter_rows():
            times[gpu][name, tuple(sizes)] = time_us * 1000
    for layers in read_experts(folder):
        names = layers.gpu.name, layers.dataset, layers.kernel
        if names in {(gpu, dataset.name, dataset.experts) for gpu in GPUS}:
            for sizes, time_ns in zip(layers.layers, layers.times_ns, strict=True):
                times[layers.gpu.name]["experts", _fields(sizes)] = float(time_ns)
    return times


def _fields(s: ExpertSizes) -> tuple[int, ...]:
    return s.tokens, s.chosen, s.experts, s.hidden, s.first, s.inner


def recosted(
    times: Times,
    operators: Sequence[tuple[str, tuple[int, ...]]],
    dataset: Dataset,
    gpus: tuple[Gpu, Gpu],
    model: Predict,
) -> Times:
    """Return the operators' times on the second GPU, predicted from those on the first."""
    source, target = gpus
    predicted: Times = {}
    for kind in ("linear", "attention", "decode", "experts"):
        sizes = [of for name, of in operators if name == kind]
        if not sizes:
            continue
        measured = np.array([times[kind, of] for of in sizes])
        # The write of a key and a value for each sequence is another kernel: a launch.
        floors = (source.launch_floor_ns, target.launch_floor_ns) if kind == "decode" else (0, 0)
        alone = np.maximum(measured - floors[0], 0.2 * measured)
        kernels = _features(kind, sizes, alone, dataset, source)
        result = model(kernels, source, target)[0] + floors[1]
        predicted |= {(kind, of): float(ns) for of, ns in zip(sizes, result, strict=True)}
    return predicted


def _features(
    kind: str, sizes: list[tuple[int, ...]], times_ns: F64, dataset: Dataset, gpu: Gpu
) -> KernelFeatures:
    if kind == "experts":
        layers = [ExpertSizes(*of) for of in sizes]
        return ExpertLayers(gpu, dataset.name, dataset.experts, layers, times_ns).features()
    if kind == "linear":
        shapes = np.array([[1, *of, 2, 2] for of in sizes], dtype=np.float64)
        return of_products(Products("bfloat16", shapes, {}), times_ns)
    rows = [
        [batch, heads, kv_heads, queries, keys, HEAD_SIZE, HEAD_SIZE, float(queries > 1), 0]
        for batch, queries, keys, heads, kv_heads in sizes
    ]
    shapes = np.array(rows, dtype=np.float64)
    return of_attention(Attention(shapes, {}, per_call=False), times_ns)


@dataclass(frozen=True)
class Result:
    """A step on the target: sums of its operators in ns, by kind."""

    model: str
    kind: str
    label: str
    measured: dict[str, float]
    predicted: dict[str, float]
    source: dict[str, float]
    ratio: dict[str, float]

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return sum(self.predicted.values()) / sum(self.measured.values()) - 1


def results(
    dataset: Dataset, times: dict[str, Times], names: tuple[str, str], model: Predict
) -> Iterator[Result]:
    """Yield the steps whose operators both tables have, of `STEPS_OFFERED`."""
    gpus = load_gpu(names[0]), load_gpu(names[1])
    before, after = (times[name] for name in names)
    grid = sorted({of[1] for kind, of in before if kind == "linear"})
    for each in MODELS:
        steps = [("decode", f"{b} at {k}", step(each, b, 1, k, grid)) for b, k in DECODES]
        steps += [("prefill", f"{t}", step(each, 1, t, t, grid)) for t in PREFILLS]
        complete = [
            (kind, label, operators)
            for kind, label, operators in steps
            if all((o.kind, o.sizes) in before and (o.kind, o.sizes) in after for o in operators)
        ]
        every = list(dict.fromkeys((o.kind, o.sizes) for *_, of in complete for o in of))
        tables = [
            after,
            recosted(before, every, dataset, gpus, model),
            before,
            recosted(before, every, dataset, gpus, predict_by_ratio),
        ]
        for kind, label, operators in complete:
            sums: list[dict[str, float]] = []
            for table in tables:
                of_kind: dict[str, float] = {}
                for o in operators:
                    ns = o.count * table[o.kind, o.sizes]
                    of_kind[o.kind] = of_kind.get(o.kind, 0.0) + ns
                sums.append(of_kind)
            yield Result(each.name, kind, label, *sums)


def line(title: str, chosen: Sequence[Result]) -> None:
    """Print the errors of steps."""
    if not chosen:
        return
    errors = np.array([each.error for each in chosen])
    plain = [
        np.array([sum(getattr(each, name).values()) / sum(each.measured.values()) - 1
                  for each in chosen])
        for name in ("source", "ratio")
    ]  # fmt: skip
    print(f"{title:58}{len(chosen):5}{np.abs(errors).mean():8.1%}{errors.mean():+8.1%}", end="")
    print(f"{np.quantile(np.abs(errors), 0.9):8.1%}{np.abs(errors).max():8.1%}", end="")
    print("".join(f"{np.abs(other).mean():8.1%}" for other in plain))


def main() -> None:
    """Print the tables."""
    folder = given_folder(__doc__, "linears.parquet", "attention.parquet", "experts.parquet")
    fits = fits_without(read_products(folder), read_attention(folder), (), folder)
    _, measured = models_without(fits)
    models: dict[str, Predict] = {
        "shipped": predict_learned, "left out": measured(family(load_gpu(GPUS[0]))),
    }  # fmt: skip
    every: dict[str, list[Result]] = {}
    for dataset in DATASETS:
        times = read_times(folder, dataset)
        for names in permutations(GPUS, 2):
            for title, model in models.items():
                every.setdefault(f"{names[0]} for {names[1]}, {title}", []).extend(
                    results(dataset, times, names, model)
                )
    print(f"\n{'steps of three datasets':58}{'':5}{'mean':>8}{'signed':>8}{'p90':>8}{'most':>8}"
          f"{'kept':>8}{'ratio':>8}")  # fmt: skip
    for title, of in every.items():
        line(title, of)
        # The batches and contexts of the datasets differ, and some lack an operator's sizes.
        missing = len(DATASETS) * STEPS_OFFERED - len(of)
        print(f"{'  not in both tables':58}{missing:5}")
        for kind in ("prefill", "decode"):
            line(f"  {kind}", [each for each in of if each.kind == kind])
            for model in MODELS:
                line(
                    f"    {model.name}",
                    [each for each in of if (each.kind, each.model) == (kind, model.name)],
                )
    print("\nby operator, shipped: steps, share of their measured time, mean error of sums, signed")
    for title, of in every.items():
        if title.endswith("left out"):
            continue
        for kind in ("linear", "attention", "decode", "experts"):
            with_kind = [each for each in of if kind in each.measured]
            errors = np.array([e.predicted[kind] / e.measured[kind] - 1 for e in with_kind])
            share = np.mean([e.measured[kind] / sum(e.measured.values()) for e in with_kind])
            print(f"{title:42}{kind:12}{len(errors):5}{share:8.1%}{np.abs(errors).mean():8.1%}"
                  f"{errors.mean():+8.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
