"""Error of kernel database look-ups, from datasets that measured GPUs twice.

    python -m benchmarks.predictions.kernel_db_accuracy DATA_DIRECTORY

`accuracy` prints this among its tables. DATA_DIRECTORY holds gemm.parquet; parts
whose other files are missing (gemm_power.parquet, vidur_mlp_fp16.parquet,
attention_prefill.parquet) are skipped with a note.

  between      a database of some of a dataset's shapes predicts the others of the same dataset:
               the model corrected by its error around them (`annotate/kernel_db`), and
               fitted without the target's die family
  looked up    one dataset's time of the shape itself, compared with another dataset's
  on both      the same, with half of the source's own deviation between the datasets
  learned      from the source's time in the second dataset, with no measurement of the target

Where there is a shipped database of the H200, the captured step of `traces/h200-llama-8b-4l-tp4` is
looked up in it and compared with the measured step, with a step's caches and clocks; other
steps with `--step FILE`. Half of that database's rows are of calls of this trace.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

import onerank
from benchmarks.harness import parser_of, print_conditions
from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.database import COLD, SHIPPED, WARM, Library, open_library
from onerank.annotate.kernel_db.interpolate import interpolate
from onerank.annotate.kernel_db.look_up import SOURCE_SHARE, Basis, look_up
from onerank.annotate.kernel_db.node_durations import best_of
from onerank.annotate.models.coefficients import Coefficients, shipped
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES
from onerank.annotate.recost.recost import source_gpu
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import POWER_FILE, VIDUR_FILE, dataset_pairs
from tools.fit.leave_one_out import fits_without
from tools.fit.measured_kernels import (
    Products,
    family,
    of_attention,
    of_memory,
    of_products,
    read_attention,
    read_products,
)

LONG_NS = 10_000

LEAST_NS = 3_000

READ_MB = (1.6, 6, 12, 25)

QUERIES = 1500

PARTS = (0.5, 0.02, 0.005)

TRACE = Path(__file__).parents[2] / "traces" / "h200-llama-8b-4l-tp4"


class Measured(NamedTuple):
    """Kernels of one sort on one GPU: sizes in ln, times, and what the model says of them."""

    name: str
    gpu: Gpu
    sizes: F64
    times_ns: F64
    modelled_ns: F64


def figures(predicted: F64, times: F64) -> str:
    """Return mean, median, 90th percentile and the time-weighted mean of absolute errors."""
    if not len(times):
        return f"{'-':>27}"
    error = np.abs(predicted / times - 1) * 100
    weighted = np.abs(predicted - times).sum() / times.sum() * 100
    row = (error.mean(), np.median(error), np.quantile(error, 0.9), weighted)
    return " /".join(f"{figure:5.1f}" for figure in row)


def tables(folder: Path, products: Products, fits: dict[str, Coefficients]) -> None:
    """Print all parts."""
    columns = f"{'over 10 us':>29}{'all':>30}"
    print("\nLooked up: mean / median / p90 / time-weighted")
    for name in (POWER_FILE, VIDUR_FILE, "attention_prefill.parquet"):
        if not (folder / name).is_file():
            print(f"{folder / name}: no such file, so its part is left out")
    print(
        "\nbetween rows of one dataset; covered: rows that the others predict; "
        "inside: of the 80% interval by leaving rows out"
    )
    print(f"{'rows':>6} {'':14}{'GPU':13}{'covered':>8}{'inside':>8}  {'':10}{columns}")
    for measured in every(folder, products, fits):
        for part in PARTS:
            between(measured, part)
    print(f"\none dataset from another\n{'':24}{'from':15}{'to':15}{'how':12}{columns}")
    for line in across(folder, products, fits):
        print(line)
    shipped_step = convert_directory(TRACE)[0]
    step(shipped_step, TRACE.name)
    caches(shipped_step, TRACE.name)


def every(folder: Path, products: Products, fits: dict[str, Coefficients]) -> Iterator[Measured]:
    """Yield the measurements of each dataset, by GPU."""
    for name, times in products.times_ns.items():
        gpu = load_gpu(name)
        modelled, _ = predict_from_description(of_products(products, times), gpu, fits[family(gpu)])
        yield Measured("bf16 products", gpu, np.log(products.shapes[:, :4]), times, modelled)
    if (folder / "attention_prefill.parquet").is_file():
        attention = read_attention(folder)
        size = attention.shapes[:, 5] == 128
        for name, times in attention.times_ns.items():
            gpu = load_gpu(name)
            modelled, _ = predict_from_description(
                of_attention(attention, times), gpu, fits[family(gpu)]
            )
            sizes = np.log(attention.shapes[size, :5])
            yield Measured("attention 128", gpu, sizes, times[size], modelled[size])
    if (folder / VIDUR_FILE).is_file():
        rows = pl.read_parquet(folder / VIDUR_FILE)
        rows = rows.filter(pl.col("kind").cast(pl.String) == "mem", pl.col("time_ms") > 0)
        rows = rows.filter(pl.col("op").cast(pl.String) == "input_layernorm")
        grouped = rows.group_by("gpu", "bytes", "tokens", maintain_order=True)
        medians = grouped.agg(pl.col("time_ms").median())
        for (name,), part in medians.group_by("gpu", maintain_order=True):
            gpu = load_gpu(str(name))
            moved, tokens, times = (
                part[column].to_numpy().astype(np.float64)
                for column in ("bytes", "tokens", "time_ms")
            )
            modelled, _ = predict_from_description(of_memory(times * 1e6, moved), gpu)
            sizes = np.log(np.stack([moved, moved / tokens], axis=1))
            yield Measured("fp16 norms", gpu, sizes, times * 1e6, modelled)


def between(measured: Measured, part: float) -> None:
    """Print the error of shapes predicted from a part of the dataset's other shapes."""
    rng = np.random.default_rng(3)
    count = len(measured.times_ns)
    is_stored = rng.random(count) < part
    queries = np.flatnonzero(~is_stored)
    queries = rng.choice(queries, min(QUERIES, len(queries)), replace=False)
    off = np.log(measured.times_ns / measured.modelled_ns)
    interpolated = interpolate(measured.sizes[is_stored], off[is_stored], measured.sizes[queries])
    is_predicted = np.isfinite(interpolated.off)
    rows, true = queries[is_predicted], measured.times_ns[queries[is_predicted]]
    predicted = measured.modelled_ns[rows] * np.exp(interpolated.off[is_predicted])
    inside = np.abs(np.log(true / predicted)) <= interpolated.bound[is_predicted]
    start = (
        f"{is_stored.sum():6} {measured.name:14}{measured.gpu.name:15}{is_predicted.mean():6.0%}"
    )
    long = true > LONG_NS
    for how, times, share in (
        ("between", predicted, f"{inside.mean():8.1%}" if len(inside) else f"{'-':>8}"),
        ("the model", measured.modelled_ns[rows], f"{'':8}"),
    ):
        print(f"{start}{share}  {how:10}  {figures(times[long], true[long])}   "
              f"{figures(times, true)}")  # fmt: skip


def across(folder: Path, products: Products, fits: dict[str, Coefficients]) -> Iterator[str]:
    """Yield a line for each second dataset, pair of GPUs and method."""
    for pair in dataset_pairs(folder):
        shapes = np.stack(
            [np.ones(len(pair.sizes)), *pair.sizes.T, *np.full((2, len(pair.sizes)), 2.0)], axis=1
        )
        same = Products(products.dtype, shapes, pair.second)
        for target, true in pair.second.items():
            long = true > LONG_NS
            rows: list[tuple[str, str, F64]] = [("", "looked up", pair.first[target])]
            for source in pair.second:
                if source == target:
                    continue
                gpus = load_gpu(source), load_gpu(target)
                ratio = (pair.second[source] / pair.first[source]) ** SOURCE_SHARE
                rows.append((source, "on both", pair.first[target] * ratio))
                kernels = of_products(same, pair.second[source])
                rows.append(
                    (source, "learned", predict_learned(kernels, *gpus, fits[family(gpus[1])])[0])
                )
            for source, how, predicted in rows:
                head = f"{pair.name:24}{source:15}{target:15}{how:12}"
                cells = f"{figures(predicted[long], true[long])}   {figures(predicted, true)}"
                yield head + cells
    yield from around(folder, products, fits)


def around(folder: Path, products: Products, fits: dict[str, Coefficients]) -> Iterator[str]:
    """Yield the error of the layers' GEMMs, interpolated between rows of the GEMM dataset."""
    if not (folder / VIDUR_FILE).is_file():
        return
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "gemm")
    index = ("gpu", "m", "n", "k")
    medians = rows.group_by(index).agg(pl.col("time_ms").median()).sort(index)
    for (name,), part in medians.group_by("gpu", maintain_order=True):
        gpu = load_gpu(str(name))
        shapes = part.select("m", "n", "k").to_numpy().astype(np.float64)
        measured_shapes = {tuple(shape) for shape in products.shapes[:, 1:4].tolist()}
        new = np.array([tuple(shape) not in measured_shapes for shape in shapes.tolist()])
        true = part["time_ms"].to_numpy() * 1e6
        chosen = np.flatnonzero(new & (true > LONG_NS))
        chosen = np.random.default_rng(3).choice(chosen, QUERIES, replace=False)
        ones = np.ones(len(chosen))
        full = np.stack([ones, *shapes[chosen].T, 2 * ones, 2 * ones], axis=1)
        queries = Products("float16", full, {})
        modelled_queries = predict_from_description(
            of_products(queries, true[chosen]), gpu, fits[family(gpu)]
        )[0]
        times = products.times_ns[gpu.name]
        modelled = predict_from_description(of_products(products, times), gpu, fits[family(gpu)])[0]
        off = np.log(times / modelled)
        interpolated = interpolate(np.log(products.shapes[:, :4]), off, np.log(full[:, :4]))
        is_predicted = np.isfinite(interpolated.off)
        rows_of = {
            "between": modelled_queries[is_predicted] * np.exp(interpolated.off[is_predicted]),
            "the model": modelled_queries[is_predicted],
        }
        reach = np.hypot(
            shipped().errors["looked_up_other_versions"].high, interpolated.bound[is_predicted]
        )
        inside = np.abs(np.log(true[chosen][is_predicted] / rows_of["between"])) <= reach
        for how, predicted in rows_of.items():
            head = f"{VIDUR_FILE:24}{'':15}{gpu.name:15}{how:12}"
            errors = figures(predicted, true[chosen][is_predicted])
            shares = f"predicted {is_predicted.mean():.0%}, inside {inside.mean():.1%}"
            yield f"{head}{errors}   {shares}"


def step(graph: Graph, name: str) -> None:
    """Print the error of the shipped database for a captured step of its GPU, by class.

    Only the step's calls are looked up, as for a capture on a CPU; its measured times are the
    reference. The model divides an operator's predicted time among its kernels in proportion to
    their measured times.
    """
    gpu = source_gpu(graph, None)
    print(f"\n{name}: a step captured on {gpu.name}, from the calls alone")
    library = open_library([], gpu, None, graph.job.measurement.versions)
    if library is None:
        print(f"{SHIPPED}: no database of {gpu.name} there, so this part is left out")
        return
    costs = op_costs_of(graph)
    kernels = KernelFeatures.of(graph, costs)
    by_model = predict_from_description(kernels, gpu)
    modelled = by_model.duration_ns
    basis = Basis(library, None, gpu, predict_from_description, shipped())
    every = np.ones(len(modelled), dtype=bool)
    best = best_of(graph, costs, kernels, by_model, basis, where=every)
    true = kernels.duration_ns
    predicted_ns, rules = best.durations
    (low, high), total = intervals(
        kernels, best.durations, None, gpu, shipped(), uncertainty=best.uncertainty
    )
    heads = f"{'time':>10}{'looked up':>11}{'between':>9}{'inside':>8}{'sum':>8}   nodes{'':23}"
    print(f"{'':18}{heads}{'the model alone: sum':>22}   nodes")
    exact, between = rules == Rule.LOOKED_UP, rules == Rule.BETWEEN
    classes = {op_class.value: costs.is_class(op_class) for op_class in CLASSES}
    for label, in_class in (*classes.items(), ("all", every)):
        rows = in_class & ~kernels.over_link & (true > 0)
        if not rows.any():
            continue
        part = true[rows].sum()
        inside = (low <= true) & (true <= high)
        print(f"{label:18}{part / 1e6:7.2f} ms{true[rows & exact].sum() / part:11.1%}"
              f"{true[rows & between].sum() / part:9.1%}{inside[rows].mean():8.1%}"
              f"{predicted_ns[rows].sum() / part - 1:+8.1%}   "
              f"{figures(predicted_ns[rows], true[rows])}   "
              f"{modelled[rows].sum() / part - 1:+19.1%}   "
              f"{figures(modelled[rows], true[rows])}")  # fmt: skip
    print(f"80% interval of the sum {total.p10_ns / 1e6:.2f} to {total.p90_ns / 1e6:.2f} ms")


def caches(graph: Graph, name: str) -> None:
    """Print the errors of cold and of warm rows, for calls of the step that have both."""
    gpu = source_gpu(graph, None)
    library = open_library([], gpu, None, graph.job.measurement.versions)
    if library is None:
        return
    costs = op_costs_of(graph)
    kernels = KernelFeatures.of(graph, costs)
    every = np.ones(len(costs.index), dtype=bool)
    times_by_state: list[F64] = []
    for state in (COLD, WARM):
        rows_of_state = {key: [row for row in rows if row.l2 == state] for key, rows in
                library.target.items()}  # fmt: skip
        of_state = Library(
            {key: rows for key, rows in rows_of_state.items() if rows}, {}, library.versions
        )
        basis = Basis(of_state, None, gpu, predict_from_description, shipped())
        times = look_up(graph, costs, every, basis)
        times_by_state.append(np.where(times.rules == Rule.LOOKED_UP, times.time_ns, np.nan))
    true, size = kernels.duration_ns, costs.bytes_read / 1e6
    in_both = np.isfinite(times_by_state[0] + times_by_state[1]) & (true > LEAST_NS)
    print(f"{name}: sums of the rows of one state over {LEAST_NS / 1e3:.0f} us, over the step's")
    for least, most in itertools.pairwise(READ_MB):
        rows = in_both & (size >= least) & (size < most)
        if rows.any():
            cold, warm = (times[rows].sum() / true[rows].sum() - 1 for times in times_by_state)
            print(f"{least:5} to {most} MB read {rows.sum():6} nodes   cold {cold:+7.1%}   "
                  f"warm {warm:+7.1%}")  # fmt: skip


def main() -> None:
    """Print the tables alone."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, nargs="?", help="directory with the measurements")
    parser.add_argument("--step", type=Path, action="append", default=[],
                        help="a captured step (.et) on a GPU with a shipped database")  # fmt: skip
    arguments = parser.parse_args()
    print_conditions()
    print((__doc__ or "").split("\n\n", 2)[2].rstrip())
    if arguments.data is not None:
        if not (arguments.data / "gemm.parquet").is_file():
            sys.exit(
                f"{arguments.data / 'gemm.parquet'}: no such file; give the directory that has it"
            )
        products = read_products(arguments.data)
        measured = arguments.data / "attention_prefill.parquet"
        attention = read_attention(arguments.data) if measured.is_file() else None
        tables(arguments.data, products, fits_without(products, attention))
    for path in arguments.step:
        graph = onerank.read(path)
        step(graph, path.name)
        caches(graph, path.name)


if __name__ == "__main__":
    main()
