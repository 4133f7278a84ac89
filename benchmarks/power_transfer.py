"""Power of GEMMs on a GPU outside the fit, and their energy by shape, against a constant power.

    PYTHONPATH=. python benchmarks/power_transfer.py DATA_DIRECTORY

DATA_DIRECTORY holds gemm.parquet and gemm_power.parquet (bf16 GEMMs of an H200 and a B200; power
sampled every 100 ms). GEMMs of 200 us and more: runs of shorter ones have idle time in their
samples. The power model is fitted to another GPU than the target: to the calls that the shipped
H200 database held for two seconds, or to the B200's GEMMs. The times by shape come from
coefficients without the target's die family.

  power    mean of |predicted / measured - 1| over the GEMMs, from their measured times, in percent
  energy   error of the summed energy of all GEMMs from their measured times, in percent
  shape    the same from predicted times; in brackets the error of the summed predicted time
  0.9 TDP  the same columns for a GPU that always draws 0.9 of its power limit

GEMMs with an inner size over 16,384 have separate rows, because their figures contradict a steady
state: an H200 ran 32,768 x 65,536 x 51,200 at 818 TFLOP/s and 510 W, and 32,768 x 65,536 x 16,384
at 672 TFLOP/s and 693 W, its limit. The same FLOPs at a higher clock draw more power, not less.
The sensor shows the mean of about a second, so a run of a second contains the pause before it:
after a GEMM of 6.5 ms, one of 2.6 us reads 388 W and the next 132 W. An H200 ran 8192 x 32 x 51,200
at 134 TFLOP/s and 0.99 of its limit, and 8192 x 32 x 65,536 at 135 TFLOP/s and 0.73.
16,384 was chosen after the errors of these GEMMs had been seen, on the GPUs that the rows judge, so
only the rows "all" are held out.
"""

from pathlib import Path

import numpy as np
from harness import given_folder

from onerank.annotate import load_gpu
from onerank.annotate.describe_gpu import Powers
from onerank.annotate.kernel_db.database import SHIPPED
from onerank.annotate.models.coefficients import Coefficients
from onerank.ir.arrays import F64, Mask
from tools.fit.evaluate_fit import POWER_FILE
from tools.fit.fit_power import FittedPower, gemm_powers, read_gemm_powers, read_measured
from tools.fit.leave_one_out import fits_without, models_without
from tools.fit.measured_kernels import Products, family, of_products, read_products
from tools.fit.narrow_gemm_cases import LINEARS_FILE, read_linears

CONSTANT = 0.9
"""Share of the power limit that the baseline draws."""

STEADY_K = 16_384
"""Inner size up to which the measurements agree with a steady state; chosen on these rows."""


def main() -> None:
    """Print the table alone."""
    folder = given_folder(__doc__, "gemm.parquet", POWER_FILE)
    public = (folder / LINEARS_FILE).is_file()
    linears = read_linears(folder) if public else ()
    table(folder, fits_without(read_products(folder), None, linears, folder if public else None))


def table(folder: Path, fits: dict[str, Coefficients]) -> None:
    """Print power and energy for each target and fit, and those of the constant.

    Args:
        folder: has gemm_power.parquet.
        fits: die family -> coefficients of the time model without it.
    """
    rows = read_gemm_powers(folder / POWER_FILE)
    measured = {load_gpu(name).name: gemm_powers(name, table) for name, table in rows.items()}
    sizes = {
        load_gpu(name).name: table.select("m", "n", "k").to_numpy().astype(np.float64)
        for name, table in rows.items()
    }
    held = read_measured(SHIPPED / "H200.parquet")
    print(
        "\nPower and energy of bf16 GEMMs of 200 us and more, percent; "
        f"{STEADY_K:,} was chosen on these rows"
    )
    print(f"{'':42}{'':>7}{'onerank':>29}{'0.9 TDP':>29}")
    heads = ("power", "energy", "shape", "")
    print(f"{'target':10}{'fitted to':20}{'inner size':12}{'GEMMs':>7}" + 2 * _cells(heads))
    for target, powers in measured.items():
        steady = sizes[target][:, 2] <= STEADY_K
        predicted_s = _times_by_shape(target, sizes[target], fits)
        others = {
            name: [calls.only(sizes[name][:, 2] <= STEADY_K)]
            for name, calls in measured.items()
            if name != target
        }
        # The calls of the shipped database are held longer, and of all classes.
        others |= {calls.gpu.name: [calls] for calls in held}
        for source, calls in others.items():
            model = FittedPower.of(calls)
            label = source + (" (shipped)" if source == held[0].gpu.name else "")
            for name, where in (
                (f"<= {STEADY_K}", steady),
                (f"> {STEADY_K}", ~steady),
                ("all", np.ones(len(steady), dtype=bool)),
            ):
                cells = [
                    _errors(powers, model.shares(powers), predicted_s, model, where),
                    _errors(powers, np.full(len(steady), CONSTANT), predicted_s, None, where),
                ]
                texts = "".join(_cells(_texts(errors)) for errors in cells)
                print(f"{target:10}{label:20}{name:12}{where.sum():7}{texts}")


def _times_by_shape(target: str, sizes: F64, fits: dict[str, Coefficients]) -> F64:
    """Return the predicted times of GEMMs m x n x k in s, by coefficients without the family."""
    count, gpu = len(sizes), load_gpu(target)
    shapes = np.column_stack([np.ones(count), sizes, np.full((count, 2), 2.0)])
    kernels = of_products(Products("bfloat16", shapes, {}), np.ones(count))
    by_shape, _ = models_without(fits)
    return by_shape(family(gpu))(kernels, gpu)[0] * 1e-9


def _errors(
    powers: Powers, shares: F64, predicted_s: F64, model: FittedPower | None, where: Mask
) -> tuple[float, float, float, float]:
    """Return the errors of power, of energy, of energy by shape and of the summed time.

    Args:
        powers: measured.
        shares: predicted from the measured times.
        predicted_s: predicted times.
        model: predicts the power at these; None: `shares` do not depend on the time.
        where: the GEMMs that count.
    """
    by_shape = shares if model is None else model.shares(_at_times(powers, predicted_s))
    energy = (powers.share * powers.duration_s)[where].sum()
    return (
        float(np.abs(shares / powers.share - 1)[where].mean()),
        float((shares * powers.duration_s)[where].sum() / energy - 1),
        float((by_shape * predicted_s)[where].sum() / energy - 1),
        float(predicted_s[where].sum() / powers.duration_s[where].sum() - 1),
    )


def _at_times(powers: Powers, seconds: F64) -> Powers:
    """Return the calls with other durations: their rates change in proportion."""
    use = powers.use.copy()
    use[:, 2:] *= (powers.duration_s / seconds)[:, None]
    floor_s = (1 - use[:, 1]) * powers.duration_s
    use[:, 1] = np.maximum(0, 1 - floor_s / seconds)
    # Memory draws no more than at full bandwidth.
    use[:, 3] = np.minimum(1, use[:, 3])
    return Powers(powers.gpu, use, powers.share, seconds, powers.names)


def _texts(errors: tuple[float, float, float, float]) -> tuple[str, str, str, str]:
    power, energy, by_shape, time = (100 * error for error in errors)
    return f"{power:.1f}", f"{energy:+.1f}", f"{by_shape:+.1f}", f"({time:+.1f})"


def _cells(texts: tuple[str, str, str, str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, (8, 7, 7, 7), strict=True))


if __name__ == "__main__":
    main()
