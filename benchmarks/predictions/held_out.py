"""Error and coverage of predictions whose die family, dtype or kernel is held out.

    python -m benchmarks.predictions.held_out DATA_DIRECTORY

DATA_DIRECTORY holds the tables of `accuracy` and those that `tools.fit.public_sets` writes:
linears.parquet, quantise.parquet, attention.parquet, latent.parquet and vector.parquet. For every
target the coefficients are refitted without its die family (H100 and H200 are one).

  mean      of |predicted / measured - 1|, over 10 us and under, in percent
  baseline  the same by ratio of the source's time; by shape, of the roofline
  inside    measured times in the 80% interval, in percent, as on a GPU whose die was measured: its
            width comes from the errors of all dies, and mostly of the target's, at other sizes
            (every second m; every second call without one). The last row of a group is the mean of
            its targets
  left out  the same on a further die: width and factor come from the other families alone

by shape: "datasheet" has the vendor's figures alone, "described" the shipped description. 8-bit
and NVFP4 layers include the kernel that quantises the activations. NVFP4 is a dtype left out:
nothing is fitted to it, and its coefficients are those of 8 bits. It has no other GPU to judge its
interval by. fp32 and memory-bound kernels have no fitted coefficient, but the sustained fractions
of the vector units are medians over fp32 layers of the same set.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import given_folder
from onerank.annotate import Gpu, load_gpu
from onerank.annotate.models import roofline
from onerank.annotate.models.coefficients import Coefficients, Error, shipped
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.intervals import widening
from onerank.annotate.models.scale_by_ratio import predict_by_ratio
from onerank.ir.arrays import F64, Mask
from tools.fit.attention_kernel_cases import kernel_cases
from tools.fit.case_errors import errors_by_kind, errors_of, few_families, parted
from tools.fit.decode_cases import decode_cases, read_decodes
from tools.fit.evaluate_fit import (
    Case,
    Described,
    as_by_datasheet,
    as_shipped,
    step_cases,
    unmeasured_cases,
)
from tools.fit.evaluate_fit import attention_cases as attention_by_shape
from tools.fit.leave_one_out import (
    attention_cases,
    drawn,
    fits_of,
    fits_without,
    gemm_by_shape,
    gemm_cases,
    memory_cases,
    models_without,
    other_set_cases,
)
from tools.fit.measured_kernels import family, read_attention, read_products, read_table
from tools.fit.narrow_gemm_cases import (
    four_bit_cases,
    linear_cases,
    read_linears,
    tensor_scaled_cases,
)
from tools.fit.vector_cases import vector_cases

LONG_NS = 10_000

ByShape = Callable[[str], PredictFromDescription]
Measured = Callable[[str], Predict]
Cases = Callable[[ByShape, Measured], Iterable[Case]]


class Level:
    """The predictions of all groups with one knowledge of the target, and the errors from them.

    Args:
        parts: the predictions, in parts of one kind.
    """

    def __init__(self, parts: list[Case]) -> None:
        self.parts = parts
        self.few = few_families(parts)
        self.few_without = {
            name: few_families(part for part in parts if family(part.target) != name)
            for name in {family(part.target) for part in parts}
        }
        self.at_other_sizes: dict[bool, dict[str, Error]] = {}
        self.without: dict[tuple[str, str], Error | None] = {}

    def held(self, part: Case) -> tuple[Mask, Mask | None]:
        """Return which times are inside, on a measured and on a further die; None: no other GPU."""
        measured = np.zeros(len(part.error), dtype=bool)
        seen = replace(part, widening=widening(part.target, shipped(), part.kind))
        half = _every_second(part)
        for mask, odd in ((half, True), (~half, False)):
            error = self._other_half(part.kind, odd=odd)
            of_die = error.dies.get(family(part.target), 1.0)
            bound = of_die * seen.widening * error.high * error.of_length(part.predicted_ns)
            measured[mask] = (np.abs(part.error) <= bound)[mask]
        other = self._without(part.kind, part.target)
        if other is None:
            return measured, None
        bound = part.widening * other.high * other.of_length(part.predicted_ns)
        return measured, np.abs(part.error) <= bound

    def _other_half(self, kind: str, *, odd: bool) -> Error:
        """Return the errors of a kind over the half of the sizes that is not `odd`."""
        if odd not in self.at_other_sizes:
            halves = [_rows_at(part, _every_second(part) != odd) for part in self.parts]
            cases = [part for part in halves if len(part.error)]
            self.at_other_sizes[odd] = errors_by_kind(cases, self.few, shipped())
        return self.at_other_sizes[odd][kind]

    def _without(self, kind: str, target: Gpu) -> Error | None:
        """Return the errors of a kind on the other dies; None: no other GPU has predictions."""
        if (kind, target.name) not in self.without:
            of_kind = [part for part in self.parts if part.kind == kind]
            # Kinds of one family, such as "gemm_same_die", have the width of its other GPUs.
            others = [part for part in of_kind if family(part.target) != family(target)]
            others = others or [part for part in of_kind if part.target.name != target.name]
            factors = self.few_without[family(target)]
            # A kind of one family has no factor of others: that of kinds with the least one.
            factor = factors.get(kind, min(factors.values(), default=1.0))
            error = errors_of(others, factor) if others else None
            self.without[kind, target.name] = error
        return self.without[kind, target.name]


def _every_second(case: Case) -> Mask:
    """Return which predictions have every second m, or are every second one, bool[d]."""
    sizes, at = np.unique(case.rows, return_inverse=True)
    return (at if len(sizes) > 1 else np.arange(len(case.rows))) % 2 == 0


def _rows_at(case: Case, mask: Mask) -> Case:
    """Return the case at these predictions."""
    chosen = {name: getattr(case, name)[mask] for name in ("measured_ns", "predicted_ns", "rows")}
    return replace(case, **chosen)


def main() -> None:
    """Print one table for each group."""
    folder = given_folder(__doc__, "gemm.parquet", "linears.parquet")
    groups, fits = groups_of(folder)
    by_shape, measured = models_without(fits)
    predicted = {name: widened(cases(by_shape, measured), fits) for name, cases in groups.items()}
    # An interval depends on the kind and on how the target is described, not on the group.
    by_level: dict[str, list[Case]] = {}
    for name, cases in predicted.items():
        parts = [part for case in cases for part in parted(case)]
        by_level.setdefault(_level(name), []).extend(parts)
    levels = {level: Level(parts) for level, parts in by_level.items()}
    for name, level in levels.items():
        print(f"\nfactors for a further family, {name}:")
        print(", ".join(f"{kind} {factor:.3f}" for kind, factor in level.few.items()))
    rows: list[list[float]] = []
    for name, cases in groups.items():
        baseline = [*cases(lambda _: roofline.predict_from_datasheet, lambda _: predict_by_ratio)]
        for kind in dict.fromkeys(case.kind for case in predicted[name]):
            rows += table(name, kind, predicted[name], baseline, levels[_level(name)])
    distribution(rows)
    versions_apart(folder)


def distribution(rows: list[list[float]]) -> None:
    """Print how many shares of the tables are in each range."""
    edges = (0, 65, 75, 85, 90, 100)
    print("\nshares of the tables, in percent")
    names = "".join(f"{f'{low} to {high}':>10}" for low, high in pairwise(edges))
    print(f"{'':10}{'shares':>8}{names}{'mean':>8}")
    for heading, columns in (("inside", (4, 5)), ("left out", (6, 7))):
        every = np.array([row[column] for row in rows for column in columns])
        shares = every[~np.isnan(every)]
        counts, _ = np.histogram(shares, edges)
        numbers = "".join(f"{count:10}" for count in counts)
        print(f"{heading:10}{len(shares):8}{numbers}{shares.mean():8.1f}")


def versions_apart(folder: Path) -> None:
    """Print how far two frameworks or versions are apart on one GPU, over the same 8-bit layers.

    No prediction from a shape can be closer to both than half of it.
    """
    rows = read_table(
        folder / "linears.parquet", ["gpu", "dataset", "dtype", "m", "n", "k", "time_us"]
    )
    # vLLM's rows have at most 256 tokens, and TensorRT-LLM's in fp8 one scale for a tensor.
    kept = {
        "fp8": pl.col("dataset").str.starts_with("sglang"),
        "fp8_block": ~pl.col("dataset").str.starts_with("vllm"),
    }
    print(
        "\n8-bit linear layers, two datasets on one GPU: mean of |ratio - 1| over and under 10 us"
    )
    print(f"{'gpu':10}{'dtype':11}{'of':20}{'to':20}{'count':>7}{'mean':>7}{'under':>7}")
    for dtype, condition in kept.items():
        of_type = rows.filter(pl.col("dtype") == dtype, condition)
        groups = sorted(set(of_type.select("gpu", "dataset").iter_rows()))
        for (gpu, before), (other, after) in combinations(groups, 2):
            if gpu != other:
                continue
            of, to = (
                of_type.filter(pl.col("gpu") == gpu, pl.col("dataset") == name)
                for name in (before, after)
            )
            both = of.join(to, on=["m", "n", "k"], suffix="_to")
            times = (both[name].to_numpy() for name in ("time_us_to", "time_us"))
            measured, reference = (time.astype(np.float64) * 1000 for time in times)
            apart, long = np.abs(reference / measured - 1), measured > LONG_NS
            figures = (mean(apart, long) * 100, mean(apart, ~long) * 100)
            print(f"{gpu:10}{dtype:11}{before:20}{after:20}{len(both):7}", end="")
            print("".join(f"{figure:7.1f}" for figure in figures))


def _level(name: str) -> str:
    """Return what is known of the targets of a group: "datasheet" or "described"."""
    return name.rsplit(", ", 1)[1]


def groups_of(folder: Path) -> tuple[dict[str, Cases], dict[str, Coefficients]]:
    """Return title -> the group's cases, and die family -> the coefficients without it."""
    products, attention = read_products(folder), read_attention(folder)
    linears, decodes = read_linears(folder), read_decodes(folder)
    fits = fits_without(products, attention, linears, folder)
    products = drawn(products)
    by_datasheet = as_by_datasheet([load_gpu(name) for name in products.times_ns])

    def bf16(described: Described) -> Cases:
        return lambda by_shape, measured: [
            *gemm_by_shape(products, by_shape, described),
            *gemm_cases(products, described, measured),
        ]

    def memory(_: ByShape, measured: Measured) -> list[Case]:
        return [*memory_cases(folder, measured("")), *unmeasured_cases(folder)]

    groups: dict[str, Cases] = {
        "bf16 GEMMs, datasheet": bf16(by_datasheet),
        "bf16 GEMMs, described": bf16(as_shipped),
        "bf16 GEMMs in other sets, datasheet": lambda by_shape, measured: [
            *other_set_cases(folder, by_datasheet, by_shape, measured)
        ],
        "bf16 GEMMs in other sets, described": lambda by_shape, measured: [
            *other_set_cases(folder, as_shipped, by_shape, measured)
        ],
        "8-bit linear layers, datasheet": lambda by_shape, measured: linear_cases(
            linears, by_shape, measured, by_datasheet
        ),
        "8-bit linear layers, described": lambda by_shape, measured: linear_cases(
            linears, by_shape, measured
        ),
        "8-bit GEMMs with one scale for a tensor, described": lambda by_shape, _: (
            tensor_scaled_cases(folder, by_shape)
        ),
        "linear layers in NVFP4, described": lambda by_shape, _: four_bit_cases(folder, by_shape),
        "attention, described": lambda by_shape, measured: [
            *attention_by_shape(attention, by_shape),
            *attention_cases(attention, measured),
            *kernel_cases(folder, by_shape),
        ],
        "attention of one query, described": lambda by_shape, measured: decode_cases(
            decodes, by_shape, measured
        ),
        "fp32 operators, datasheet": lambda by_shape, measured: vector_cases(
            folder, measured(""), by_shape(""), by_datasheet
        ),
        "fp32 operators, described": lambda by_shape, measured: vector_cases(
            folder, measured(""), by_shape("")
        ),
        "fp16 norms and activations, described": memory,
        "memory-bound kernels of captured steps, described": lambda _, __: [*step_cases()],
    }
    return groups, fits


def widened(cases: Iterable[Case], fits: dict[str, Coefficients]) -> list[Case]:
    """Return the cases with the widening of their target."""
    return [
        replace(case, widening=widening(case.target, fits_of(fits, case), case.kind))
        for case in cases
    ]


def table(
    name: str,
    kind: str,
    cases: list[Case],
    baseline: list[Case],
    level: Level,
) -> list[list[float]]:
    """Print error, baseline and coverage of one kind of a group by target, and return the rows.

    Args:
        name: the group.
        kind: of its predictions.
        cases: the group's predictions.
        baseline: the same by the baseline.
        level: all predictions with this knowledge of the target.
    """
    chosen = [at for at, case in enumerate(cases) if case.kind == kind]
    print(f"\n{name}: {kind}")
    print(f"{'target':17}{'count':>8}{'mean':>7}{'under':>7}{'baseline':>10}{'under':>7}", end="")
    print(f"{'inside':>8}{'under':>7}{'left out':>10}{'under':>7}")
    rows: list[list[float]] = []
    for target in dict.fromkeys(cases[at].target.name for at in chosen):
        of_target = [at for at in chosen if cases[at].target.name == target]
        row = [
            *means([cases[at] for at in of_target]),
            *means([baseline[at] for at in of_target]),
            *inside([cases[at] for at in of_target], level),
        ]
        rows.append(row)
        count = sum(len(cases[at].measured_ns) for at in of_target)
        print(f"{target:17}{count:8}{text(row)}")
    columns = np.array(rows).T
    known = [mean(column, ~np.isnan(column)) for column in columns]
    print(f"{'mean':25}{text(known)}")
    return rows


def text(row: list[float]) -> str:
    """Return the columns of a row; nan is "-"."""
    widths = (7, 7, 10, 7, 8, 7, 10, 7)
    cells = ("-" if np.isnan(figure) else f"{figure:.1f}" for figure in row)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def means(cases: list[Case]) -> list[float]:
    """Return the mean errors over and under 10 us in percent; nan without cases."""
    measured = np.concatenate([case.measured_ns for case in cases])
    error = np.abs(np.concatenate([case.predicted_ns for case in cases]) / measured - 1)
    return [mean(error, measured > LONG_NS) * 100, mean(error, measured <= LONG_NS) * 100]


def mean(values: F64 | Mask, where: Mask) -> float:
    """Return the mean of the values at `where`; nan without any."""
    return float(values[where].mean()) if where.any() else float("nan")


def inside(cases: list[Case], level: Level) -> list[float]:
    """Return the percentages of times in the interval over and under 10 us.

    They are those on a measured die, and those on a further one.

    Args:
        cases: of one target.
        level: all predictions with this knowledge of the target.
    """
    parts = [part for case in cases for part in parted(case)]
    long = np.concatenate([part.measured_ns > LONG_NS for part in parts])
    held = [level.held(part) for part in parts]
    measured = np.concatenate([on_measured for on_measured, _ in held])
    figures = [mean(measured, long) * 100, mean(measured, ~long) * 100]
    others = [on_other for _, on_other in held if on_other is not None]
    if len(others) < len(held):
        return [*figures, float("nan"), float("nan")]
    further = np.concatenate(others)
    return [*figures, mean(further, long) * 100, mean(further, ~long) * 100]


if __name__ == "__main__":
    main()
