"""Fit the power model to measured matrix products: `python -m onerank.annotate.fit.energy FILE`.

FILE is a parquet table of `gpu, dtype, m, n, k, time_us, power_w`. Printed are the coefficients and
what they do to a GPU that was left out; with `-o` they are written as `annotate/energy.toml` has
them.
"""

import argparse
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from onerank.annotate.gpu import Gpu, load_gpu
from onerank.ir.errors import FormatError, TargetError

F64 = npt.NDArray[np.float64]

COLUMNS = ("gpu", "m", "n", "k", "time_us", "power_w")
DURATION_EXPONENT = 0.25
"""Weight of a shape by its duration: between each shape alike (0) and each by its energy (1)."""
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Powers:
    """Measured products of one GPU.

    Attributes:
        gpu: its description.
        use: ones, use of the tensor units and of the memory, as shares of what it sustains,
            float64[d, 3].
        share: measured power over the power limit, float64[d].
        duration_s: float64[d].
    """

    gpu: Gpu
    use: F64
    share: F64
    duration_s: F64


def read_powers(path: Path) -> list[Powers]:
    """Read bf16 products with their power, one entry per GPU.

    Raises:
        FormatError: the file is no such table.
        TargetError: a GPU has no description, or one without power limit.
    """
    try:
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise FormatError(f"{path}: no parquet table can be read there: {error}") from None
    if lacking := [name for name in COLUMNS if name not in table.columns]:
        raise FormatError(f"{path}: lacks {', '.join(lacking)}; it has {', '.join(table.columns)}")
    if "dtype" in table.columns:
        table = table.filter(pl.col("dtype").cast(pl.String) == "bfloat16")
    return [
        _powers(load_gpu(str(key)), rows)
        for (key,), rows in table.group_by("gpu", maintain_order=True)
    ]


def _powers(gpu: Gpu, rows: pl.DataFrame) -> Powers:
    rate = gpu.tensor_flops_per_s("bfloat16")
    if gpu.tdp_w is None or rate is None:
        raise TargetError(f"{gpu.name}: the fit needs tdp_w and a bf16 rate")
    m, n, k, time, power = (rows[name].to_numpy().astype(np.float64) for name in COLUMNS[1:])
    time = time * 1e-6
    tensor = 2 * m * n * k / time / rate
    memory = 2 * (m * k + k * n + m * n) / time / gpu.bandwidth_bytes_per_s
    use = np.stack([np.ones_like(time), tensor, np.minimum(memory, 1)], axis=1)
    return Powers(gpu, use, power / gpu.tdp_w, time)


def fit(given: list[Powers]) -> F64:
    """Return (base, tensor, memory) of share = min(1, base + tensor * u_t + memory * u_m).

    Levenberg-Marquardt on the squared error; where the model is at the limit it has no slope.
    """
    use = np.concatenate([one.use for one in given])
    share = np.concatenate([one.share for one in given])
    weight = [one.duration_s**DURATION_EXPONENT for one in given]
    root = np.sqrt(np.concatenate([w / w.mean() for w in weight]))
    damping = 1e-3
    found: F64 = np.array([0.2, 0.6, 0.4])
    error = root * (np.minimum(1, use @ found) - share)
    for _ in range(_STEPS):
        slope = use * ((use @ found) < 1)[:, None] * root[:, None]
        normal = slope.T @ slope
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ error)
        tried = root * (np.minimum(1, use @ (found + step)) - share)
        gain = float(error @ error - tried @ tried)
        if gain > 0:
            found = np.asarray(found + step, dtype=np.float64)
            damping /= 3
            done = gain < 1e-10 * float(error @ error)
            error = tried
            if done:
                break
        else:
            damping *= 4
    return found


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured, minus 1.

    Attributes:
        energy: of all shapes' energy together.
        kernels: of each shape, float64[d].
    """

    energy: float
    kernels: F64


def errors_of(coefficients: F64, measured: Powers) -> Errors:
    """Return how far the model is off on measured products."""
    predicted = np.minimum(1, measured.use @ coefficients)
    whole = (predicted @ measured.duration_s) / (measured.share @ measured.duration_s)
    return Errors(float(whole) - 1, predicted / measured.share - 1)


def held_out(powers: list[Powers]) -> dict[str, tuple[F64, Errors]]:
    """Return coefficients and errors for each GPU from a fit to the others."""
    found: dict[str, tuple[F64, Errors]] = {}
    for one in powers:
        others = [other for other in powers if other is not one]
        if others:
            coefficients = fit(others)
            found[one.gpu.name] = coefficients, errors_of(coefficients, one)
    return found


def to_toml(powers: list[Powers], source: str) -> str:
    """Return the text of `annotate/energy.toml`."""
    out = held_out(powers)
    logs = np.concatenate([-np.log1p(errors.kernels) for _, errors in out.values()])
    low, high = np.quantile(logs, [0.1, 0.9])
    whole = max(abs(errors.energy) for _, errors in out.values())
    names = ", ".join(one.gpu.name for one in powers)
    lines = [
        "# Power of a kernel as a share of the limit: min(1, base + tensor * u_t + memory * u_m),",
        "# with the use of tensor units and memory as shares of what the GPU sustains.",
        "# Written by `python -m onerank.annotate.fit.energy`.",
        "",
        f'source = "{source}"',
        f'fitted = "{datetime.now(UTC):%Y-%m-%d}, on {names}"',
        "# ln(measured / predicted) of single kernels on a GPU left out, 10 and 90 %",
        f"kernel_low = {low:.3f}",
        f"kernel_high = {high:.3f}",
        "# largest error of all kernels' energy together on a GPU left out",
        f"step_error = {whole:.3f}",
        "",
    ]
    rows = {"default": fit(powers), **{one.gpu.name: fit([one]) for one in powers}}
    for name, (base, tensor, memory) in rows.items():
        lines += [
            f'[coefficients."{name}"]',
            f"base = {base:.3f}",
            f"tensor = {tensor:.3f}",
            f"memory = {memory:.3f}",
            "",
        ]
    return "\n".join(lines)


def table(powers: list[Powers]) -> str:
    """Return the evaluation as text, a line per case."""
    lines = ["fitted on      tested on      base  tensor  memory   energy   median    mean    p90"]
    cases = [
        *((one.gpu.name, one.gpu.name, fit([one]), one) for one in powers),
        *(
            ("the others", one.gpu.name, held_out(powers)[one.gpu.name][0], one)
            for one in powers
            if len(powers) > 1
        ),
        *(("all", one.gpu.name, fit(powers), one) for one in powers),
    ]
    for on, tested, coefficients, one in cases:
        errors = errors_of(coefficients, one)
        off = np.abs(errors.kernels)
        lines.append(
            f"{on:14} {tested:14} "
            + "  ".join(f"{value:.3f}" for value in coefficients)
            + f"   {errors.energy:+.1%}   {np.median(off):.1%}   {off.mean():.1%}"
            f"   {np.quantile(off, 0.9):.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the evaluation; write the coefficients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="parquet table of measured products")
    parser.add_argument("-o", "--output", type=Path, help="coefficients to write")
    parser.add_argument("--source", default="not told", help="where the measurements come from")
    given = parser.parse_args()
    powers = read_powers(given.file)
    sys.stdout.write(f"{table(powers)}\n")
    if given.output is not None:
        given.output.write_text(to_toml(powers, given.source), encoding="utf-8")


if __name__ == "__main__":
    main()
