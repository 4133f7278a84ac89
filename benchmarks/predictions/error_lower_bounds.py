"""Lower bounds on the error of predicted products: models with more knowledge of the target.

    python -m benchmarks.predictions.error_lower_bounds DATA_DIRECTORY

DATA_DIRECTORY holds gemm.parquet, gemm_power.parquet and vidur_mlp_fp16.parquet, as for
accuracy.py. GEMMs are in bf16, predicted from their shapes alone, and over 10 us. Errors are
percent of the measured time.

  datasheet, calibrated, described
                 the model without the target's die family, see accuracy.py
  two factors    calibrated, with a factor for compute-bound and one for memory-bound GEMMs. Both
                 are the best ones over all measurements of the target: a bound for what two
                 microbenchmarks can tell
  itself         the model fitted to the target alone
  others'        itself, corrected by the model's errors on each other die family when fitted to
                 it, with the best weights for this target
  neighbours     itself, corrected by its errors on this target at the next smaller and larger m, n
                 and k: all shapes but one are measured, and the error is smooth
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import given_folder
from onerank.annotate import Gpu, load_gpu
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.learned import predict_learned
from onerank.annotate.models.tile_times import tile_times
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import as_by_datasheet, as_calibrated
from tools.fit.leave_one_out import fits_without, fitted
from tools.fit.measured_kernels import Products, family, of_products, read_products

LONG_NS = 10_000

SIZES = ["m", "n", "k"]


def main() -> None:
    """Print all tables."""
    folder = given_folder(__doc__, "gemm.parquet", "gemm_power.parquet", "vidur_mlp_fp16.parquet")
    products = read_products(folder)
    fits = fits_without(products, None)
    forms(products, fits)
    next_rows(products)
    compare_datasets(folder, products)
    layers(folder, products, fits)


def forms(products: Products, fits: dict[str, Coefficients]) -> None:
    """Print the error by the model's knowledge about the target."""
    gpus = [load_gpu(name) for name in products.times_ns]
    times = products.times_ns
    calibrated = as_calibrated(gpus, products)
    rows: dict[str, dict[str, F64]] = {}
    for name, describe in (
        ("datasheet", as_by_datasheet(gpus)),
        ("calibrated", calibrated),
        ("described", lambda gpu: gpu),
    ):
        rows[name] = {g.name: by_shape(describe(g), products, fits[family(g)]) for g in gpus}
    rows["two factors"] = {
        g.name: two_factors(g, products, rows["calibrated"][g.name], times[g.name]) for g in gpus
    }
    rows["itself"] = {g.name: by_shape(g, products, fitted(products, None, [g])) for g in gpus}
    off = {name: np.log(times[name] / predicted) for name, predicted in rows["itself"].items()}
    rows["others'"], rows["neighbours"] = {}, {}
    for gpu in gpus:
        predicted, long = rows["itself"][gpu.name], times[gpu.name] > LONG_NS
        corrections = np.stack([off[g.name] for g in gpus if family(g) != family(gpu)], axis=1)
        weights = np.linalg.lstsq(corrections[long], off[gpu.name][long], rcond=None)[0]
        rows["others'"][gpu.name] = predicted * np.exp(corrections @ weights)
        rows["neighbours"][gpu.name] = predicted * np.exp(
            around(products.shapes[:, 1:4], off[gpu.name])
        )

    print("\nbf16 products by their shapes: mean error over 10 us / of these m >= 512")
    print(f"{'known':14}" + "".join(f"{gpu.name:>16}" for gpu in gpus) + f"{'mean':>16}")
    for name, predicted in rows.items():
        cells = [errors(products, predicted[gpu.name], times[gpu.name]) for gpu in gpus]
        cells.append((float(np.mean([c[0] for c in cells])), float(np.mean([c[1] for c in cells]))))
        print(f"{name:14}" + "".join(f"{long:8.1f} /{tall:6.1f}" for long, tall in cells))

    print("\nCorrelation between GPUs of what the model is off when fitted to each, over 10 us on")
    print("both: of single shapes / of the means of each with its neighbours")
    smooth = {n: (o + around(products.shapes[:, 1:4], o)) / 2 for n, o in off.items()}
    for one, other in combinations(gpus, 2):
        long = (times[one.name] > LONG_NS) & (times[other.name] > LONG_NS)
        pair = [np.corrcoef(x[one.name][long], x[other.name][long])[0, 1] for x in (off, smooth)]
        print(f"{one.name:15}{other.name:15}{pair[0]:+6.2f} /{pair[1]:+6.2f}")


def by_shape(gpu: Gpu, products: Products, c: Coefficients) -> F64:
    """Return what the tiles alone say of each product in ns."""
    made, _ = tile_times(of_products(products, products.times_ns[gpu.name]), gpu, c)
    return made


def two_factors(gpu: Gpu, products: Products, made: F64, times: F64) -> F64:
    """Return `made` times the median of measured / made of its bound, over 10 us."""
    batch, m, n, k, item, result = products.shapes.T
    rate = gpu.tensor_flops_per_s(products.dtype)
    assert rate, f"{gpu.name} has no {products.dtype} rate"
    moved = batch * (item * (m * k + k * n) + result * m * n)
    compute = 2 * batch * m * n * k / rate > moved / gpu.bandwidth_bytes_per_s
    scaled = made.copy()
    for bound in (compute, ~compute):
        scaled[bound] *= np.median((times / made)[bound & (times > LONG_NS)])
    return scaled


def around(sizes: F64, values: F64) -> F64:
    """Return the mean of `values` at the next sizes along each axis, 0 where there is none."""
    total, count = np.zeros(len(values)), np.zeros(len(values))
    for axis in range(3):
        other_axes = [sizes[:, other_axis] for other_axis in range(3) if other_axis != axis]
        order = np.lexsort([sizes[:, axis], *other_axes])
        left, right = order[:-1], order[1:]
        is_neighbour = np.all([part[left] == part[right] for part in other_axes], axis=0)
        for row, neighbour in (
            (left[is_neighbour], right[is_neighbour]),
            (right[is_neighbour], left[is_neighbour]),
        ):
            total[row] += values[neighbour]
            count[row] += 1
    return total / np.maximum(count, 1)


def errors(products: Products, predicted: F64, times: F64) -> tuple[float, float]:
    """Return the mean error over 10 us, and of these with 512 rows or more."""
    off, long = np.abs(predicted / times - 1) * 100, times > LONG_NS
    return float(off[long].mean()), float(off[long & (products.shapes[:, 1] >= 512)].mean())


def next_rows(products: Products) -> None:
    """Print how one more row changes the time of a GEMM."""
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}
    pairs = [
        (row, place[m + 1, n, k])
        for (m, n, k), row in place.items()
        if m > 1 and (m + 1, n, k) in place
    ]
    left, right = np.array(pairs).T
    tall = products.shapes[left, 1] >= 512
    print(
        "\nProducts of m and m + 1 rows: ln(time / time) in percent. A model that gives all pairs"
    )
    print("one ratio is at least half the mean deviation off.")
    heads = f"{'pairs':>7}{'mean':>8}{'mean deviation':>16}{'p80':>7}{'p90':>7}{'above 20%':>11}"
    print(f"{'gpu':15}{'products':24}{heads}")
    for name, times in products.times_ns.items():
        long = times[left] > LONG_NS
        for sort, rows in (("over 10 us, m >= 512", long & tall), ("to 10 us, m > 1", ~long)):
            step = np.log(times[right] / times[left])[rows] * 100
            off = np.abs(step - np.median(step))
            print(
                f"{name:15}{sort:24}{rows.sum():7}{step.mean():+8.1f}{off.mean():16.1f}"
                f"{np.quantile(off, 0.8):7.1f}{np.quantile(off, 0.9):7.1f}"
                f"{(off > 20).mean() * 100:10.0f}%"
            )


def compare_datasets(folder: Path, products: Products) -> None:
    """Print the difference between two datasets with the same harness on the same GPU."""
    rows = pl.read_parquet(folder / "gemm_power.parquet")
    rows = rows.with_columns(pl.col("gpu").cast(pl.String))
    print("\nThe same products on the same GPU in gemm_power.parquet, next to gemm.parquet")
    print(f"{'gpu':15}{'over 10 us':>11}{'mean error':>12}{'median':>8}{'signed':>8}")
    for name in rows["gpu"].unique(maintain_order=True):
        gpu = load_gpu(name)
        joined = rows.filter(pl.col("gpu") == name).cast(dict.fromkeys(SIZES, pl.Int64))
        joined = joined.join(measured(products, gpu), on=SIZES, how="inner")
        off = (joined["there"] / (joined["time_us"] * 1e3) - 1).to_numpy() * 100
        off = off[(joined["there"] > LONG_NS).to_numpy()]
        print(
            f"{gpu.name:15}{len(off):11}{np.abs(off).mean():12.1f}{np.median(np.abs(off)):8.1f}"
            f"{off.mean():+8.1f}"
        )


def measured(products: Products, gpu: Gpu) -> pl.DataFrame:
    """Return m, n, k and the measured time in ns of each product on a GPU."""
    sizes = pl.DataFrame(products.shapes[:, 1:4], schema=SIZES).cast(pl.Int64)
    return sizes.with_columns(there=pl.Series(products.times_ns[gpu.name]))


def layers(folder: Path, products: Products, fits: dict[str, Coefficients]) -> None:
    """Print the layers of another dataset next to this dataset's measurements."""
    rows = pl.read_parquet(folder / "vidur_mlp_fp16.parquet").filter(pl.col("time_ms") > 0)
    index = ["model", "tp", "tokens", "op", "kind", *SIZES]
    rows = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median() * 1e6)
    pairs = rows.pivot(on="gpu", index=index, values="time_ms").drop_nulls(["A100", "H100"])
    pairs = pairs.cast(dict.fromkeys(SIZES, pl.Int64))
    product = pairs["kind"].cast(pl.String) == "gemm"
    print("\nA layer's products on the GPU they are predicted for: the dataset of gemm.parquet")
    print("has measured them (bf16), that of the layers too (fp16). ln(the former / the latter) by")
    print("rows, percent, over 10 us; then layers all of whose products it has, the sum of these:")
    print("mean error and signed, predicted from the layer's source, and measured in gemm.parquet")
    heads = "".join(f"{head:>12}" for head in ("to 64", "to 256", "to 1024", "more"))
    print(f"{'from':6}{'to':6}{heads}{'layers':>8}{'predicted':>18}{'measured there':>18}")
    for source, target in (("A100", "H100"), ("H100", "A100")):
        gpus = load_gpu(source), load_gpu(target)
        part = pairs.filter(product)
        sizes = part.select(SIZES).to_numpy().astype(np.float64)
        ones = np.ones((len(part), 1))
        shapes = np.concatenate([ones, sizes, 2 * ones, 2 * ones], axis=1)
        times = part[source].to_numpy().astype(np.float64)
        # vidur's times are sums of the profiler's durations.
        kernels = of_products(Products("float16", shapes, {}, per_call=False), times)
        predicted, _ = predict_learned(kernels, *gpus, fits[family(gpus[1])])
        part = part.with_columns(made=pl.Series(predicted))
        part = part.join(measured(products, gpus[1]), on=SIZES, how="left")
        measured_there = part.drop_nulls("there").filter(pl.col(target) > LONG_NS)
        apart = np.log((measured_there["there"] / measured_there[target]).to_numpy()) * 100
        rows_of = measured_there["m"].to_numpy()
        cells = ""
        for low, high in ((0, 64), (64, 256), (256, 1024), (1024, np.inf)):
            inside = (rows_of > low) & (rows_of <= high)
            cells += f"{apart[inside].mean():+12.1f}"
        sums = part.group_by("model", "tp", "tokens").agg(
            pl.col("there").is_null().any().alias("lacks"), pl.col("there", "made", target).sum()
        )
        sums = sums.filter(~pl.col("lacks"))
        cells_of_sums = ""
        for column in ("made", "there"):
            off = (sums[column] / sums[target] - 1).to_numpy() * 100
            cells_of_sums += f"{np.abs(off).mean():10.1f}{off.mean():+8.1f}"
        print(f"{source:6}{target:6}{cells}{len(sums):8}{cells_of_sums}")


if __name__ == "__main__":
    main()
