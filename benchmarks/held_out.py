"""Error and coverage of predictions whose die family, dtype or kernel is held out.

    PYTHONPATH=. python benchmarks/held_out.py DATA_DIRECTORY

DATA_DIRECTORY holds the tables of benchmarks/accuracy.py and those that `tools.fit.public_sets`
writes: linears.parquet, attention.parquet and vector.parquet. For every target the coefficients are
refitted without its die family (H100 and H200 are one).

  mean      of |predicted / measured - 1|, over 10 us and under, in percent
  baseline  the same by ratio of the source's time; by shape, of the roofline
  inside    measured times in the 80% interval, in percent. Its width comes from the other families,
            with the factor for a further family. The last row of a group is the mean of its targets

by shape: "datasheet" has the vendor's figures alone, "described" the shipped description. 8-bit
layers include the kernel that quantises the activations. fp32 and memory-bound kernels have no
fitted coefficient, but the sustained fractions of the vector units are medians over fp32 layers of
the same set.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import given_folder

from onerank.annotate import load_gpu
from onerank.annotate.models import roofline, scale_measured
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.intervals import widening
from onerank.annotate.models.learned import predict_by_ratio
from tools.fit.evaluate_fit import (
    Case,
    Described,
    as_by_datasheet,
    as_shipped,
    unmeasured_cases,
)
from tools.fit.evaluate_fit import attention_cases as attention_by_shape
from tools.fit.leave_one_out import (
    attention_cases,
    drawn,
    errors_of,
    few_families,
    fits_of,
    fits_without,
    gemm_by_shape,
    gemm_cases,
    memory_cases,
    models_without,
    parted,
)
from tools.fit.measured_kernels import family, read_attention, read_products
from tools.fit.public_cases import kernel_cases, linear_cases, read_linears, vector_cases

Mask = npt.NDArray[np.bool_]

LONG_NS = 10_000

ByShape = Callable[[str], PredictFromDescription]
Measured = Callable[[str], Predict]
Cases = Callable[[ByShape, Measured], Iterable[Case]]


def main() -> None:
    """Print one table for each group."""
    folder = given_folder(__doc__, "gemm.parquet", "linears.parquet")
    groups, fits = groups_of(folder)
    by_shape, measured = models_without(fits)
    predicted = {name: widened(cases(by_shape, measured), fits) for name, cases in groups.items()}
    few = few_families(
        replace(part, kind=f"{name} {part.kind}")
        for name, cases in predicted.items()
        for case in cases
        for part in parted(case)
    )
    print(f"\nfactor for a further family: {few:.3f}")
    for name, cases in groups.items():
        baseline = [*cases(lambda _: roofline.predict, lambda _: predict_by_ratio)]
        for kind in dict.fromkeys(case.kind for case in predicted[name]):
            table(name, kind, predicted[name], baseline, few)


def groups_of(folder: Path) -> tuple[dict[str, Cases], dict[str, Coefficients]]:
    """Return title -> the group's cases, and die family -> the coefficients without it."""
    products, attention = read_products(folder), read_attention(folder)
    linears = read_linears(folder)
    fits = fits_without(products, attention, linears, folder)
    products = drawn(products)
    by_datasheet = as_by_datasheet([load_gpu(name) for name in products.times_ns])

    def bf16(described: Described) -> Cases:
        return lambda by_shape, measured: [
            *gemm_by_shape(products, by_shape, described),
            *gemm_cases(products, described, measured),
        ]

    def memory(_: ByShape, measured: Measured) -> list[Case]:
        # The learned model has the residual model for these kernels.
        model = measured("")
        ratio = model if model is predict_by_ratio else scale_measured.predict
        return [*memory_cases(folder, ratio), *unmeasured_cases(folder)]

    groups: dict[str, Cases] = {
        "bf16 products, datasheet": bf16(by_datasheet),
        "bf16 products, described": bf16(as_shipped),
        "8-bit linear layers, datasheet": lambda by_shape, measured: linear_cases(
            linears, by_shape, measured, by_datasheet
        ),
        "8-bit linear layers, described": lambda by_shape, measured: linear_cases(
            linears, by_shape, measured
        ),
        "attention, described": lambda by_shape, measured: [
            *attention_by_shape(attention, by_shape),
            *attention_cases(attention, measured),
            *kernel_cases(folder, by_shape),
        ],
        "fp32 operators, described": lambda by_shape, measured: vector_cases(
            folder, measured(""), by_shape("")
        ),
        "fp16 norms and activations, described": memory,
    }
    return groups, fits


def widened(cases: Iterable[Case], fits: dict[str, Coefficients]) -> list[Case]:
    """Return the cases with the widening of their target."""
    return [
        replace(case, widening=widening(case.target, fits_of(fits, case), case.kind))
        for case in cases
    ]


def table(name: str, kind: str, cases: list[Case], baseline: list[Case], few: float) -> None:
    """Print error, baseline and coverage of one kind of a group, by target."""
    chosen = [at for at, case in enumerate(cases) if case.kind == kind]
    print(f"\n{name}: {kind}")
    print(f"{'target':17}{'count':>8}{'mean':>7}{'under':>7}{'baseline':>10}{'under':>7}", end="")
    print(f"{'inside':>8}{'under':>7}")
    rows: list[list[float]] = []
    for target in dict.fromkeys(cases[at].target.name for at in chosen):
        of_target = [at for at in chosen if cases[at].target.name == target]
        # Kinds of one family, such as "gemm_same_die", have the width of its other GPUs.
        others = [
            cases[at] for at in chosen if family(cases[at].target) != family(load_gpu(target))
        ] or [cases[at] for at in chosen if cases[at].target.name != target]
        row = [
            *means([cases[at] for at in of_target]),
            *means([baseline[at] for at in of_target]),
            *inside([cases[at] for at in of_target], others, few),
        ]
        rows.append(row)
        count = sum(len(cases[at].measured_ns) for at in of_target)
        print(f"{target:17}{count:8}{text(row)}")
    columns = np.array(rows).T
    known = [mean(column, ~np.isnan(column)) for column in columns]
    print(f"{'mean':25}{text(known)}")


def text(row: list[float]) -> str:
    """Return the columns of a row; nan is "-"."""
    widths = (7, 7, 10, 7, 8, 7)
    cells = ("-" if np.isnan(figure) else f"{figure:.1f}" for figure in row)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def means(cases: list[Case]) -> list[float]:
    """Return the mean errors over and under 10 us in percent; nan without cases."""
    measured = np.concatenate([case.measured_ns for case in cases])
    error = np.abs(np.concatenate([case.predicted_ns for case in cases]) / measured - 1)
    return [mean(error, measured > LONG_NS) * 100, mean(error, measured <= LONG_NS) * 100]


def mean(values: npt.NDArray[np.float64] | Mask, where: Mask) -> float:
    """Return the mean of the values at `where`; nan without any."""
    return float(values[where].mean()) if where.any() else float("nan")


def inside(cases: list[Case], others: list[Case], few: float) -> list[float]:
    """Return the percentages of times in the interval over and under 10 us."""
    if not others:
        return [float("nan")] * 2
    bounds = {
        part.kind: errors_of([p for o in others for p in parted(o) if p.kind == part.kind], few)
        for case in cases
        for part in parted(case)
        if any(p.kind == part.kind for o in others for p in parted(o))
    }
    held: list[Mask] = []
    long: list[Mask] = []
    for case in cases:
        for part in parted(case):
            if part.kind not in bounds:
                continue
            held.append(np.abs(part.error) <= bounds[part.kind].high * part.widening)
            long.append(part.measured_ns > LONG_NS)
    every, is_long = np.concatenate(held), np.concatenate(long)
    return [mean(every, is_long) * 100, mean(every, ~is_long) * 100]


if __name__ == "__main__":
    main()
