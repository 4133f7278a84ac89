"""How many GEMMs to measure on a GPU to predict the others: the tile model, refitted.

    python -m benchmarks.predictions.gemm_calibration_size DATA_DIRECTORY

DATA_DIRECTORY holds gemm.parquet, as for accuracy.py. The model starts without the target's die
family, with the rates of two microbenchmarks. Then all coefficients and both rates are refitted to
single GEMMs measured on the target. A prior holds them near the start; its width is the spread of
fits to other families (0.3 in ln; rates 0.1). Errors are percent of the measured time, means over
4000 other GEMMs of more than 10 us, predicted from their shapes alone. Every GPU counts the same.

  two rates      the start: only the mean rates of the two microbenchmarks
  the same 35    the 27 large and 8 skinny GEMMs of the microbenchmarks, with their single times
  35             random GEMMs of over 10 us: the mean of eight draws
  best 35        the draw with the lowest error, known only after measuring
  100, 300       one larger draw each
"""

from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.harness import given_folder
from onerank.annotate import Gpu, load_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.models.calibration import calibrated
from onerank.annotate.models.coefficients import GemmCoefficients
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns
from onerank.ir.arrays import F64, I64
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES
from tools.fit.evaluate_fit import as_calibrated
from tools.fit.fit_tiles import fit_robustly, from_vector, rates_of, to_vector
from tools.fit.leave_one_out import fits_without
from tools.fit.measured_kernels import Products, family, read_products

LONG_NS = 10_000
OFF = 0.1  # error of the model for a GEMM, in ln
APART, RATES_APART = 0.3, 0.1
TESTED = 4000  # GEMMs on which the error is evaluated
DRAWS, DRAWN = 8, len(LARGE_SHAPES) + len(SKINNY_SHAPES)
MORE = 100, 300


class Model(NamedTuple):
    """A target GPU with the achieved rate and bandwidth of its GEMMs, and model coefficients."""

    gpu: Gpu
    rate: float
    bandwidth: float
    c: GemmCoefficients


def main() -> None:
    """Print the table."""
    folder = given_folder(__doc__, "gemm.parquet")
    products = read_products(folder)
    fits = fits_without(products, None)
    gpus = [load_gpu(name) for name in products.times_ns]
    calibrated_gpu = as_calibrated(gpus, products)
    heads = "two rates", "the same 35", "35", "best 35", *(str(count) for count in MORE)
    print(f"{'target':15}" + "".join(f"{head:>13}" for head in heads))
    rows = []
    for gpu in gpus:
        rows.append(errors_of(products, gpu, started(calibrated_gpu(gpu), fits[family(gpu)].gemm)))
        print(f"{gpu.name:15}" + "".join(f"{error:13.1f}" for error in rows[-1]), flush=True)
    print(f"{'mean':15}" + "".join(f"{error:13.1f}" for error in np.mean(rows, axis=0)))


def started(gpu: Gpu, c: GemmCoefficients) -> Model:
    """Return a target calibrated by two microbenchmarks."""
    rates = calibrated(gpu, c)
    rate = gpu.tensor_flops_per_s("bfloat16")
    assert rate, f"{gpu.name} has no bf16 rate"
    return Model(gpu, rate * rates.compute, rates.gpu.bandwidth_bytes_per_s, c)


def errors_of(products: Products, gpu: Gpu, start: Model) -> list[float]:
    """Return the error of each column."""
    times = products.times_ns[gpu.name]
    order = np.random.default_rng(0).permutation(len(times))
    order = order[times[order] > LONG_NS]
    tested, pool = order[:TESTED], order[TESTED:]
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}
    calibration = np.array([place[size] for size in (*LARGE_SHAPES, *SKINNY_SHAPES)])
    tested = tested[~np.isin(tested, calibration)]

    def error(measured: I64) -> float:
        model = refitted(start, products.shapes[measured], times[measured])
        return mean_error(model, products.shapes[tested], times[tested])

    drawn = [error(pool[DRAWN * draw : DRAWN * (draw + 1)]) for draw in range(DRAWS)]
    return [
        mean_error(start, products.shapes[tested], times[tested]),
        error(calibration),
        float(np.mean(drawn)),
        min(drawn),
        *(error(pool[:count]) for count in MORE),
    ]


def refitted(start: Model, shapes: F64, times: F64) -> Model:
    """Return the model refitted to GEMMs measured on the target."""
    first = np.array([*to_vector(start.c), np.log(start.rate), np.log(start.bandwidth)])
    apart = np.array([APART] * (len(first) - 2) + [RATES_APART] * 2)

    def model_of(x: F64) -> Model:
        rate, bandwidth = np.exp(x[-2:]).tolist()
        return Model(start.gpu, rate, bandwidth, from_vector(x[:-2]))

    def residuals(x: F64) -> F64:
        off = np.log(predicted_ns(model_of(x), shapes) / times)
        return np.concatenate([off, OFF / apart * (x - first)])

    return model_of(fit_robustly(residuals, first))


def predicted_ns(model: Model, shapes: F64) -> F64:
    """Return the predicted times of GEMMs in ns, float64[d]."""
    gpu, peak = model.gpu, rates_of(model.gpu, "bfloat16", len(shapes)).peak
    bandwidth = min(model.bandwidth, gpu.peak_bandwidth_bytes_per_s) / 1e9
    figure = Figure(bandwidth, next(iter(gpu.sources)), "measured")
    gpu = msgspec.structs.replace(gpu, figures={**gpu.figures, "measured_copy_gb_per_s": figure})
    rates = Rates(np.minimum(peak, model.rate), peak)
    return gemm_ns(GemmTarget(gpu, rates, per_call=True), shapes, model.c)


def mean_error(model: Model, shapes: F64, times: F64) -> float:
    """Return the mean error in percent."""
    return float(np.mean(np.abs(predicted_ns(model, shapes) / times - 1)) * 100)


if __name__ == "__main__":
    main()
