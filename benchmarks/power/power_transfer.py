"""Power of kernels on a GPU outside the fit, and GEMMs' energy by shape, against a constant power.

    python -m benchmarks.power.power_transfer DATA_DIRECTORY

DATA_DIRECTORY holds gemm.parquet and gemm_power.parquet (bf16 GEMMs of an H200 and a B200, the mean
of NVML's readings over a run), and, if there, experts_power.parquet and attention_power.parquet of
`tools.fit.public_sets`. Kernels of 200 us and more. The power model is fitted to another GPU than
the target: to the calls that the shipped H200 database held for two seconds, or to the B200's
GEMMs. The times by shape come from coefficients without the target's die family.

  power    mean of |predicted / reading - 1| over the GEMMs, from their measured times, in percent
  energy   error of reading times time, summed, from their measured times, in percent
  shape    the same from predicted times; in brackets the error of the summed predicted time
  0.9 TDP  the same columns for a GPU that always draws 0.9 of its power limit

A GEMM's reading contains a part of the run before it, and some GEMMs multiply zeros
(`tools.fit.public_powers` has the evidence for both):

  random   GEMMs that take as long as with random weights, by their times in gemm.parquet
  faster   GEMMs that take less than 1 / 1.1 of that: their weights are zeros
  steady   all, against the predicted power instead of the reading that it causes

Several GPUs share the tables of experts and attention, so the run before each row is unknown: their
predictions are the steady power, and readings of a second after a pause are too low.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import given_folder
from onerank.annotate import load_gpu
from onerank.annotate.describe_gpu import Powers
from onerank.annotate.kernel_db.database import SHIPPED
from onerank.annotate.models.coefficients import Coefficients
from onerank.ir.arrays import F64, Mask
from tools.fit.evaluate_fit import POWER_FILE
from tools.fit.fit_power import FittedPower, errors_between, read_measured
from tools.fit.leave_one_out import fits_without, models_without
from tools.fit.measured_kernels import Products, family, of_products, read_products
from tools.fit.narrow_gemm_cases import LINEARS_FILE, read_linears
from tools.fit.public_powers import (
    ATTENTION_POWER_FILE,
    EXPERTS_POWER_FILE,
    GemmRuns,
    read_attention_powers,
    read_expert_powers,
    read_gemm_runs,
)

CONSTANT = 0.9
"""Share of the power limit that the baseline draws."""

# The coefficients change by less than 1% from the third correction to the fourth.
_CORRECTIONS, _LEAST_SHARE = 3, 0.1


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
    measured = {runs.powers.gpu.name: runs for runs in read_gemm_runs(folder / POWER_FILE)}
    held = read_measured(SHIPPED / "H200.parquet")
    shipped = FittedPower.of(held)
    print("\nPower and energy of bf16 GEMMs of 200 us and more, percent")
    print(f"{'':34}{'':>7}{'onerank':>29}{'0.9 TDP':>29}")
    heads = ("power", "energy", "shape", "")
    print(f"{'target':8}{'fitted to':17}{'GEMMs':9}{'count':>7}" + 2 * _cells(heads))
    for target, runs in measured.items():
        predicted_s = _times_by_shape(target, runs.sizes, fits)
        models = {name: _fitted(others) for name, others in measured.items() if name != target}
        models[f"{held[0].gpu.name} (shipped)"] = shipped
        for source, model in models.items():
            for name, where, by_sensor in (
                ("random", runs.long & runs.with_random_weights, True),
                ("faster", runs.long & ~runs.with_random_weights, True),
                ("all", runs.long, True),
                ("steady", runs.long, False),
            ):
                cells = [_errors(runs, predicted_s, each, where, by_sensor=by_sensor)
                         for each in (model, None)]  # fmt: skip
                texts = "".join(_cells(_texts(errors)) for errors in cells)
                print(f"{target:8}{source:17}{name:9}{where.sum():7}{texts}")
    _print_others(folder, shipped)


def _fitted(runs: GemmRuns) -> FittedPower:
    """Return the fit to GEMMs with random weights, from readings without the runs before them."""
    where = runs.long & runs.with_random_weights
    calls = runs.powers
    model = FittedPower.of([calls.only(where)])
    for _ in range(_CORRECTIONS):
        shares = model.shares(calls)
        steady = np.maximum(calls.share + shares - runs.readings(shares), _LEAST_SHARE)
        model = FittedPower.of([replace(calls, share=steady).only(where)])
    return model


def _print_others(folder: Path, model: FittedPower) -> None:
    """Print the errors of experts and attention, of the tables in `folder` that exist."""
    kinds: list[Powers] = []
    if (folder / EXPERTS_POWER_FILE).is_file():
        kinds += read_expert_powers(folder / EXPERTS_POWER_FILE)
    if (folder / ATTENTION_POWER_FILE).is_file():
        kinds += read_attention_powers(folder / ATTENTION_POWER_FILE)
    if not kinds:
        return
    print("\nExperts and attention of vLLM 0.22.0 in bf16, 200 us and more, by the shipped model")
    print(f"{'':31}{'onerank':>15}{'0.9 TDP':>15}{'reading / limit':>26}")
    heads = "".join(f"{name:>{width}}" for name, width in (("power", 8), ("energy", 7)))
    print(f"{'target':8}{'kind':16}{'count':>7}{heads}{heads}{'10%':>10}{'50%':>8}{'90%':>8}")
    for powers in kinds:
        cells = ""
        for shares in (model.shares(powers), np.full(len(powers.share), CONSTANT)):
            errors = errors_between(shares, powers)
            cells += f"{100 * np.abs(errors.calls).mean():8.1f}{100 * errors.energy:+7.1f}"
        quantiles = "".join(f"{q:8.2f}" for q in np.quantile(powers.share, [0.1, 0.5, 0.9]))
        count = len(powers.share)
        print(f"{powers.gpu.name:8}{powers.names[0]:16}{count:7}{cells}  {quantiles}")


def _times_by_shape(target: str, sizes: F64, fits: dict[str, Coefficients]) -> F64:
    """Return the predicted times of GEMMs m x n x k in s, by coefficients without the family."""
    count, gpu = len(sizes), load_gpu(target)
    shapes = np.column_stack([np.ones(count), sizes, np.full((count, 2), 2.0)])
    kernels = of_products(Products("bfloat16", shapes, {}), np.ones(count))
    by_shape, _ = models_without(fits)
    return by_shape(family(gpu))(kernels, gpu)[0] * 1e-9


def _errors(
    runs: GemmRuns, predicted_s: F64, model: FittedPower | None, where: Mask, *, by_sensor: bool
) -> tuple[float, float, float, float]:
    """Return the errors of power, of energy, of energy by shape and of the summed time.

    Args:
        runs: measured.
        predicted_s: predicted times.
        model: predicts the power; None: the constant.
        where: the GEMMs that count.
        by_sensor: judge the reading that the predicted power causes, not the power itself.
    """
    powers = runs.powers
    constant = np.full(len(powers.share), CONSTANT)
    steady = constant if model is None else model.shares(powers)
    shares = runs.readings(steady) if by_sensor else steady
    by_shape = constant if model is None else model.shares(_at_times(powers, predicted_s))
    # The sensor lags in measured time, so a power by shape is read as the one from measured times.
    by_shape = by_shape * shares / steady
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
