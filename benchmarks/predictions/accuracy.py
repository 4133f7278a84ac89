"""Error of predictions for another GPU, on GPUs outside the fit.

    python -m benchmarks.predictions.accuracy DATA_DIRECTORY

DATA_DIRECTORY holds gemm.parquet (gpu, dtype, m, n, k, time_us), attention_prefill.parquet,
vidur_mlp_fp16.parquet, neusight_nodes_fp32.parquet, gemm_power.parquet and the tables of
`tools.fit.public_sets`; parts whose file is missing are skipped with a note. For every target the
learned model is refitted without the target's die family (H100 and H200 are one); the source's
measurement is an input, as it is in a trace.

Knowledge about a target:
  datasheet    the vendor's figures; achievable bandwidth and launch floor, in clock cycles, are
               means over the other families, the sustained fraction is what the power limit allows
  calibrated   datasheet plus two microbenchmarks: mean rates of 27 large and of 8 skinny products
  described    the shipped description, whose fractions and floor were measured in this dataset
  itself       the learned model fitted only to the target: a bound for the form of the model
The form of the models was found on these GPUs, their coefficients were not: a new family may fare
worse. Errors are percent of the measured time. Kernels over 10 us unless a column says "all".
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import given_folder
from benchmarks.power import power_transfer
from benchmarks.predictions import kernel_db_accuracy
from onerank.annotate import load_gpu, recost
from onerank.annotate.models import roofline, scale_measured
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.learned import (
    predict_learned,
)
from onerank.annotate.models.prediction_terms import PredictedDurations
from onerank.annotate.models.scale_by_ratio import predict_by_ratio
from onerank.annotate.op_costs.cost_record import GemmShape
from onerank.ir import Device, Edges, Evidence, Graph, Job, Kind, Nodes, StringTable
from onerank.ir.arrays import F64, Mask
from tools.fit.case_errors import errors_of, few_families
from tools.fit.evaluate_fit import POWER_FILE, Case, as_by_datasheet, as_calibrated, looked_up_cases
from tools.fit.leave_one_out import (
    attention_cases,
    every_case,
    fits_without,
    fitted,
    gemm_cases,
    memory_cases,
    models_without,
)
from tools.fit.measured_kernels import (
    Products,
    family,
    of_layers,
    of_memory,
    of_products,
    read_attention,
    read_products,
)
from tools.fit.narrow_gemm_cases import LINEARS_FILE, read_linears, retyped_cases

LONG_NS = 10_000

PLAIN: dict[str, Predict] = {
    "ratio": predict_by_ratio,
    "roofline": roofline.predict_by_roofline,
    "residual": scale_measured.predict_by_residual,
}


def main() -> None:
    """Print all tables."""
    folder = given_folder(__doc__, "gemm.parquet")
    products = read_products(folder)
    fused = "attention_prefill.parquet"
    softmax = read_attention(folder) if (folder / fused).is_file() else None
    public = (folder / LINEARS_FILE).is_file()
    linears = read_linears(folder) if public else ()
    fits = fits_without(products, softmax, linears, folder if public else None)
    gemm(products, fits)
    fp8(folder, fits)
    if have(folder, fused):
        attention(folder, fits)
    if have(folder, "vidur_mlp_fp16.parquet"):
        memory(folder)
        layers(folder, fits)
        compare_datasets(folder, products)
    if have(folder, "neusight_nodes_fp32.parquet"):
        published(folder)
    kernel_db_accuracy.tables(folder, products, fits)
    if have(folder, POWER_FILE):
        power_transfer.table(folder, fits)
    coverage(folder, fits)
    million()


def have(folder: Path, name: str) -> bool:
    """Return whether a file exists; print a note if it does not."""
    if (folder / name).is_file():
        return True
    print(f"\n{folder / name}: no such file, so its part is left out")
    return False


def learned(fits: dict[str, Coefficients]) -> Callable[[str], Predict]:
    """Return the function from a family to the learned model that has not seen it."""
    return lambda without: (
        lambda kernels, source, target: predict_learned(kernels, source, target, fits[without])
    )


def figures(case: Case, mask: Mask) -> list[float]:
    """Return mean, median, 90th percentile and the time-weighted mean of absolute errors."""
    times, predicted = case.measured_ns[mask], case.predicted_ns[mask]
    error = np.abs(predicted / times - 1) * 100
    weighted = float(np.abs(predicted - times).sum() / times.sum() * 100)
    return [float(x) for x in (error.mean(), np.median(error), np.quantile(error, 0.9), weighted)]


def bins(case: Case) -> dict[str, Mask]:
    """Return the shapes of each column."""
    long = case.measured_ns > LONG_NS
    rows = case.rows
    return {
        "over 10 us": long,
        "m >= 512": long & (rows >= 512),
        "m <= 64": long & (rows <= 64),
        "all": np.ones(len(long), dtype=bool),
    }


def table(title: str, cases_of: Iterable[tuple[str, list[Case]]], columns: list[str]) -> None:
    """Print one row for each case, then the means over the pairs of each model."""
    print(f"\n{title}\nmean / median / p90 / time-weighted")
    print(f"{'from':15}{'to':15}{'model':24}" + "".join(f"{name:>29}" for name in columns))
    means: dict[str, F64] = {}
    for name, cases in cases_of:
        rows = [[figures(case, bins(case)[column]) for column in columns] for case in cases]
        for case, row in zip(cases, rows, strict=True):
            print(f"{case.source.name:15}{case.target.name:15}{name:24}" + cells(row))
        means[name] = np.mean(rows, axis=0)
    for name, row in means.items():
        print(f"{'mean of the pairs':30}{name:24}" + cells(row.tolist()))


def cells(row: list[list[float]]) -> str:
    """Return the text of one row's columns."""
    return "".join("   " + " /".join(f"{figure:5.1f}" for figure in group) for group in row)


def gemm(products: Products, fits: dict[str, Coefficients]) -> None:
    """Print the error for bf16 GEMMs by model and by knowledge about the target."""
    gpus = [load_gpu(name) for name in products.times_ns]
    fits_to_target = {gpu.name: fitted(products, None, [gpu]) for gpu in gpus}
    rows: list[tuple[str, list[Case]]] = []
    for name, model in PLAIN.items():
        rows.append(
            (f"{name}, described", list(gemm_cases(products, lambda g: g, lambda _, m=model: m)))
        )
    for level, described in (
        ("datasheet", as_by_datasheet(gpus)),
        ("calibrated", as_calibrated(gpus, products)),
        ("described", lambda gpu: gpu),
    ):
        rows.append((f"learned, {level}", list(gemm_cases(products, described, learned(fits)))))
    rows.append(
        (
            "learned, itself",
            list(
                gemm_cases(
                    products,
                    lambda gpu: gpu,
                    lambda _: (
                        lambda kernels, source, target: predict_learned(
                            kernels, source, target, fits_to_target[target.name]
                        )
                    ),
                )
            ),
        )
    )
    count = len(products.shapes)
    table(f"bf16 products, {count} shapes", rows, ["over 10 us", "m >= 512", "m <= 64", "all"])


def fp8(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print the error for fp8 GEMMs, a data type without fitted coefficients."""
    products = read_products(folder, "fp8")
    rows = [(f"{n}, described", list(gemm_cases(products, lambda g: g, lambda _, m=m: m)))
            for n, m in PLAIN.items()]  # fmt: skip
    rows.append(("learned, described", list(gemm_cases(products, lambda g: g, learned(fits)))))
    table(f"fp8 products, {len(products.shapes)} shapes", rows, ["over 10 us", "m >= 512"])
    if not (folder / LINEARS_FILE).is_file():
        print(f"\nfp8 products from bf16 products: {LINEARS_FILE} is missing")
        return
    by_shape, _ = models_without(fits)
    models: dict[str, Callable[[str], PredictFromDescription]] = {
        "roofline of both": lambda _: roofline.predict_from_datasheet,
        "tiles of both": by_shape,
        # The ratio of the bytes of their operands.
        "half the time": lambda _: (
            lambda kernels, _: PredictedDurations(
                kernels.gemm[kernels.call, GemmShape._fields.index("operand_bytes")],
                np.zeros(len(kernels.call), dtype=np.uint8),
            )
        ),
    }
    table(
        "fp8 products with one scale from bf16 products on the same GPU (--dtype fp8)",
        [(name, list(retyped_cases(folder, model))) for name, model in models.items()],
        ["over 10 us", "m >= 512", "all"],
    )


def attention(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print the error for forward attention.

    A100 and L40S run flash-attention 2, H100 and H200 flash-attention 3.
    """
    measured = read_attention(folder)
    rows = [(n, list(attention_cases(measured, lambda _, m=m: m))) for n, m in PLAIN.items()]
    rows.append(("learned", list(attention_cases(measured, learned(fits)))))
    count = len(measured.shapes)
    table(f"attention forward, {count} shapes (m: queries)", rows, ["all", "m >= 512"])


def memory(folder: Path) -> None:
    """Print the error for norms, rotary embeddings, activations and additions, timed to 1 us."""
    models = {**PLAIN, "learned": predict_learned}
    rows = [(name, list(memory_cases(folder, model))) for name, model in models.items()]
    table("fp16 layer operators without products", rows, ["over 10 us", "all"])


def layers(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print the sum over all operators of a transformer layer but attention, fp16."""
    rows = pl.read_parquet(folder / "vidur_mlp_fp16.parquet")
    index = ["model", "tp", "tokens", "op", "kind", "bytes", "m", "n", "k"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    pairs = grouped.pivot(on="gpu", index=index, values="time_ms").drop_nulls(["A100", "H100"])
    pairs = pairs.filter(pl.all_horizontal(pl.col("A100", "H100") > 0))
    models: dict[str, Callable[[str], Predict]] = {n: (lambda _, m=m: m) for n, m in PLAIN.items()}
    models["learned"] = learned(fits)
    print("\nA layer without attention, end to end: percent off, of the sum of its operators")
    print(
        f"{'from':6}{'to':6}{'model':30}{'cases':>7}{'mean':>7}{'median':>8}{'p90':>7}{'signed':>8}"
    )
    for source, target in (("A100", "H100"), ("H100", "A100")):
        for name, model in models.items():
            gpus = load_gpu(source), load_gpu(target)
            parts: list[pl.DataFrame] = []
            for kind, part in pairs.partition_by("kind", as_dict=True).items():
                times = part[source].to_numpy().astype(np.float64) * 1e6
                if str(kind[0]) == "gemm":
                    sizes = [part[c].to_numpy().astype(np.float64) for c in ("m", "n", "k")]
                    ones = np.ones(len(part))
                    shapes = np.stack([ones, *sizes, 2 * ones, 2 * ones], axis=1)
                    # vidur's times are sums of the profiler's durations.
                    profiled = Products("float16", shapes, {}, per_call=False)
                    kernels = of_products(profiled, times)
                else:
                    kernels = of_layers(times, part)
                predicted, _ = model(family(gpus[1]))(kernels, *gpus)
                parts.append(part.with_columns(pl.Series("made", predicted)))
            every = pl.concat(parts).with_columns(pl.col(target) * 1e6)
            cases = {name: every}
            if name == "learned":
                products = pl.col("kind").cast(pl.String) == "gemm"
                for measured_part, where in (
                    ("products as measured", products),
                    ("rest as measured", ~products),
                ):
                    predicted = pl.when(where).then(target).otherwise("made").alias("made")
                    cases[f"learned, {measured_part}"] = every.with_columns(predicted)
            for label, operators in cases.items():
                end_to_end(f"{source:6}{target:6}{label:30}", operators, target)


def end_to_end(head: str, operators: pl.DataFrame, target: str) -> None:
    """Print the error of the layers' sums: column `made` against the target's column."""
    sums = operators.group_by("model", "tp", "tokens").agg(pl.col("made", target).sum())
    off = (sums["made"] / sums[target] - 1).to_numpy() * 100
    error = np.abs(off)
    row = (error.mean(), np.median(error), np.quantile(error, 0.9))
    print(f"{head}{len(off):7}" + "".join(f"{figure:8.1f}" for figure in row), end="")
    print(f"{off.mean():+8.1f}")


def compare_datasets(folder: Path, products: Products) -> None:
    """Print the difference between two datasets on one GPU, for GEMMs that both measured."""
    rows = pl.read_parquet(folder / "vidur_mlp_fp16.parquet")
    rows = rows.filter(pl.col("kind").cast(pl.String) == "gemm", pl.col("time_ms") > 0)
    index = ["model", "tp", "tokens", "op", "m", "n", "k"]
    rows = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median() * 1e6)
    print(
        "\nThe same products on the same GPU in both datasets (fp16 here, bf16 there): percent off"
    )
    print(f"{'gpu':6}{'products over 10 us':>20}{'mean':>7}{'layers':>8}{'mean of their sums':>20}")
    for name in ("A100", "H100"):
        sizes = pl.DataFrame(products.shapes[:, 1:4], schema=["m", "n", "k"]).cast(pl.Int64)
        bf16_rows = sizes.with_columns(there=pl.Series(products.times_ns[load_gpu(name).name]))
        fp16_rows = rows.filter(pl.col("gpu").cast(pl.String) == name).cast(
            dict.fromkeys("mnk", pl.Int64)
        )
        joined = fp16_rows.join(bf16_rows, on=["m", "n", "k"], how="left")
        off = (pl.col("there") / pl.col("time_ms") - 1).abs() * 100
        long = joined.drop_nulls("there").filter(pl.col("there") > LONG_NS)
        sums = (
            joined.group_by("model", "tp", "tokens")
            .agg(pl.col("there").is_null().any().alias("lacks"), pl.col("there", "time_ms").sum())
            .filter(~pl.col("lacks"))
        )
        print(
            f"{name:6}{len(long):20}{long.select(off.mean()).item():7.1f}"
            f"{len(sums):8}{sums.select(off.mean()).item():20.1f}"
        )


NEUSIGHT = {
    "A100-40P": "A100-SXM-40GB",  # the PCIe card has its clock and bandwidth
    "A100-80P": "A100-PCIe-80GB",
    "V100": "V100",
    "T4": "T4",
}


def published(folder: Path) -> None:
    """Print the error for fp32 nodes of language models, with that of published predictors."""
    rows = pl.read_parquet(folder / "neusight_nodes_fp32.parquet")
    undescribed = sorted({*rows["gpu"].unique()} - {*NEUSIGHT})
    print("\nfp32 nodes of BERT, GPT-2, GPT-3 and OPT on vector units; no views or lookups")
    print(f"mean error per node / of the sum of a case's nodes. No description: {undescribed}")
    keys = ["desc", "name", "ph"]
    published_columns = {n: f"p_{n}" for n in ("roofline", "habitat", "neusight")}
    totals: dict[str, list[tuple[float, F64]]] = {}
    heads = ["ratio", "roofline", "learned", *(f"{n} (published)" for n in published_columns)]
    print(f"{'from':10}{'to':10}{'nodes':>6}  " + "".join(f"{head:>23}" for head in heads))
    for source, target in permutations(NEUSIGHT, 2):
        left, right = (rows.filter(pl.col("gpu") == gpu) for gpu in (source, target))
        pairs = left.select(*keys, pl.col("T").alias("before")).join(right, on=keys)
        pairs = pairs.filter(pl.col("T") > 0, pl.col("before") > 0, pl.col("By") > 0)
        pairs = pairs.filter(pl.col("kind").cast(pl.String) != "mem")
        if pairs.is_empty():
            continue
        before, after, flops, moved = (
            pairs[name].to_numpy().astype(np.float64) for name in ("before", "T", "F", "By")
        )
        product = pairs["kind"].cast(pl.String).is_in(["Linear", "BMM"]).to_numpy()
        kernels = replace(
            of_memory(before * 1e6, moved),
            flops=flops,
            matmul=product,
            matmul_class=product,
            dtypes=("float32",),
        )
        gpus = load_gpu(NEUSIGHT[source]), load_gpu(NEUSIGHT[target])
        predicted = {
            "ratio": predict_by_ratio(kernels, *gpus)[0] / 1e6,
            "roofline": roofline.predict_by_roofline(kernels, *gpus)[0] / 1e6,
            "learned": predict_learned(kernels, *gpus)[0] / 1e6,
            **{f"{n} (published)": pairs[c].to_numpy() for n, c in published_columns.items()},
        }
        text = ""
        for name, times in predicted.items():
            node = float(np.mean(np.abs(times / after - 1)) * 100)
            sums = pairs.select("desc").with_columns(
                made=pl.Series(times), measured=pl.Series(after)
            )
            sums = sums.group_by("desc", maintain_order=True).sum()
            off = np.abs((sums["made"] / sums["measured"] - 1).to_numpy()) * 100
            text += f"{node:13.1f} /{off.mean():5.1f} e2e"
            totals.setdefault(name, []).append((node, off))
        print(f"{source:10}{target:10}{len(pairs):6}  {text}")
    line = "".join(
        f"{np.mean([n for n, _ in pairs_of_model]):13.1f} /"
        f"{np.concatenate([o for _, o in pairs_of_model]).mean():5.1f} e2e"
        for pairs_of_model in totals.values()
    )
    print(f"{'mean':26}  {line}")


def coverage(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print how often the 80% interval contains the measured time, for families outside the fit.

    A kind that one GPU measured has no width from another GPU, so it is left out.
    """
    print(
        "\nThe 80% interval: percent of measured times inside, the target's family left out of\n"
        "its width, which has the factor for a further family"
    )
    print(f"{'prediction':32}{'target':17}{'count':>8}{'inside':>8}{'below':>7}{'above':>7}")
    cases = [*every_case(folder, fits), *looked_up_cases(folder)]
    few = few_families(cases)
    for kind in dict.fromkeys(case.kind for case in cases):
        inside: list[Mask] = []
        of_kind = [case for case in cases if case.kind == kind]
        families = {family(case.target) for case in of_kind}
        names = dict.fromkeys(case.target.name for case in of_kind)
        if len(names) == 1:
            print(f"{kind:32}{next(iter(names)):17} alone")
            continue
        for name in names:
            other_cases = [
                case
                for case in of_kind
                if (
                    family(case.target) != family(load_gpu(name))
                    if len(families) > 1
                    else case.target.name != name
                )
            ]
            error = errors_of(other_cases, few[kind])
            measured = np.concatenate(
                [
                    case.error / case.widening / error.of_length(case.predicted_ns)
                    for case in of_kind
                    if case.target.name == name
                ]
            )
            below, above = measured < error.low, measured > error.high
            inside.append(~below & ~above)
            print(f"{kind:32}{name:17}{len(measured):8}{inside[-1].mean() * 100:8.1f}"
                  f"{below.mean() * 100:7.1f}{above.mean() * 100:7.1f}")  # fmt: skip
        pooled = np.concatenate(inside)
        print(f"{kind:32}{'all':17}{len(pooled):8}{pooled.mean() * 100:8.1f}")


def million() -> None:
    """Print the time and memory of annotating a million kernels of a thousand distinct calls."""
    count, distinct = 1_000_000, 1000
    strings = StringTable()
    rng = np.random.default_rng(0)
    m, n, k = (64 * rng.integers(1, 128, distinct) for _ in range(3))
    call = rng.integers(0, distinct, count)
    product = strings.encode(["aten::mm"])[0]
    addition = strings.encode(["aten::add"])[0]
    shapes = strings.encode([f"[[{a},{c}],[{c},{b}]]" for a, b, c in zip(m, n, k, strict=True)])
    results = strings.encode([f"[[{a},{b}]]" for a, b in zip(m, n, strict=True)])
    types = strings.encode(['["Tensor(c10::BFloat16)","Tensor(c10::BFloat16)"]'] * 1)[0]
    out_types = strings.encode(['["Tensor(c10::BFloat16)"]'])[0]
    nodes = Nodes.of(
        count,
        id=np.arange(count),
        op=np.where(np.arange(count) % 2 == 0, product, addition),
        kind=np.full(count, Kind.KERNEL),
        duration_ns=rng.integers(3000, 1_000_000, count),
        evidence=np.full(count, Evidence.MEASURED),
        input_shapes=shapes[call],
        input_types=np.full(count, types),
        output_shapes=results[call],
        output_types=np.full(count, out_types),
    )
    none = np.zeros(0, dtype=np.int64)
    edges = Edges.from_pairs(count, none, none, none.astype(np.uint8))
    graph = Graph(nodes, edges, strings, Job(device=Device("cuda", "H200")))
    before = peak_bytes()
    begun, worked = time.perf_counter(), time.process_time()
    recosted = recost(graph, "A100")
    took, worked = time.perf_counter() - begun, time.process_time() - worked
    assert (recosted.nodes.p10_ns > 0).all()
    print(f"\n{count} kernels of {2 * distinct} distinct calls: {took:.2f} s ({worked:.2f} s of "
          f"one core), the process at most "
          f"{peak_bytes() / 1e9:.2f} GB, {before / 1e9:.2f} GB before")  # fmt: skip


def peak_bytes() -> int:
    """Return the largest resident size of this process so far (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
