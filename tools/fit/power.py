"""Fit the power model to calls that were held: `python -m tools.fit.power DATABASE`.

DATABASE is what `onerank bench --grid power` wrote. Printed are the coefficients, and how far off
they are where nothing was fitted: on each class of calls left out, on products of another campaign
(`--products`, a parquet table of `gpu, dtype, m, n, k, time_us, power_w`), and on whole steps whose
power was read for some seconds (`--step`, captures with `--timed-steps`). With `-o` the
coefficients are written as `annotate/models/power.toml` has them.
"""

import argparse
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.describe_gpu import fit
from onerank.annotate.energy import SETTLED_S, PowerTimeline, report_energy
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.power import Coefficients, PowerModel, drawn
from onerank.ir import Graph
from onerank.ir.chakra import read
from onerank.ir.errors import AnnotateError
from tools.fit.power_samples import Powers, read_held, read_products

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Errors:
    """Predicted over measured, minus 1.

    Attributes:
        energy: of all calls' energy together.
        calls: of each, float64[d].
    """

    energy: float
    calls: F64


def errors_of(coefficients: F64, measured: Powers) -> Errors:
    """Return how far the model is off on calls that were held."""
    shares = drawn(measured.use, Coefficients(*coefficients.tolist()))
    predicted = np.minimum(1, shares)
    whole = (predicted @ measured.duration_s) / (measured.share @ measured.duration_s)
    return Errors(float(whole) - 1, predicted / measured.share - 1)


def without_its_class(held: Powers) -> F64:
    """Return the error of each call from a fit to the other classes, float64[d]."""
    names = np.array(held.names)
    found = np.zeros(len(names))
    for name in dict.fromkeys(held.names):
        own = names == name
        found[own] = errors_of(fit([held.only(~own)]), held.only(own)).calls
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """A captured step: its power as read, and as the model has it, in W."""

    name: str
    read_w: float
    made_w: float

    @property
    def error(self) -> float:
        """Made over read, minus 1."""
        return self.made_w / self.read_w - 1


def step_of(name: str, graph: Graph, model: PowerModel) -> Step:
    """Return the power of a captured step.

    Raises:
        AnnotateError: it was not measured on a known GPU for long enough.
    """
    measured, sensors = graph.job.measurement, graph.job.device.sensors
    window = sum(measured.step_ns) * 1e-9
    if sensors is None or sensors.power_mw is None or window < SETTLED_S:
        raise AnnotateError(
            f"{name}: its power was read for {window:.1f} s; expected {SETTLED_S:g} s or more: "
            "capture it with more --timed-steps"
        )
    gpu = load_gpu(graph.job.device.name)
    step = measured.median_step_ns or 0
    busy = round(step * min(1, measured.gpu_busy_ns / max(1, measured.profiled_step_ns)))
    course = PowerTimeline(step, busy, "measured")
    made = report_energy(graph, gpu, course, model=model)
    return Step(name, sensors.power_mw.median / 1e3, made.mean_power_mw / 1e3)


def model_of(
    held: list[Powers], products: list[Powers], steps: list[tuple[str, Graph]], source: str
) -> tuple[PowerModel, list[Step]]:
    """Return the fitted model with its errors, and what it makes of the steps."""
    found = fit(held)
    left_out = np.concatenate([without_its_class(one) for one in held])
    low, high = np.quantile(-np.log1p(left_out), [0.1, 0.9])
    names = ", ".join(one.gpu.name for one in held)
    count = sum(len(one.share) for one in held)
    model = PowerModel(
        source=source,
        fitted=f"{datetime.now(UTC):%Y-%m-%d}, to {count} calls of every class on {names}",
        kernel_low=round(float(low), 3),
        kernel_high=round(float(high), 3),
        step_error=0.0,
        step_errors="",
        coefficients=Coefficients(*(round(float(one), 3) for one in found)),
    )
    made = [step_of(name, graph, model) for name, graph in steps]
    told = [(f"a step on {names}", one.error) for one in made]
    told += [(f"products of {one.gpu.name}", errors_of(found, one).energy) for one in products]
    worst = max((abs(error) for _, error in told), default=1.0)
    text = ", ".join(f"{name} {error:+.1%}" for name, error in told)
    errors = {"step_error": round(worst, 3), "step_errors": text}
    return msgspec.structs.replace(model, **errors), made


def to_toml(model: PowerModel) -> str:
    """Return the text of `annotate/models/power.toml`."""
    c = model.coefficients
    return "\n".join(
        [
            "# Power of a kernel as a share of the limit: base + active u_a + tensor u_t +",
            "# memory u_m + vector u_v, with what it uses of what the GPU sustains.",
            "# Written by `python -m tools.fit.power`.",
            "",
            f'source = "{model.source}"',
            f'fitted = "{model.fitted}"',
            "# ln(measured / predicted) of calls of a class left out, 10 and 90 %",
            f"kernel_low = {model.kernel_low:.3f}",
            f"kernel_high = {model.kernel_high:.3f}",
            "# largest error of summed energy where nothing was fitted",
            f"step_error = {model.step_error:.3f}",
            f'step_errors = "{model.step_errors}"',
            "",
            "[coefficients]",
            *(f"{name} = {getattr(c, name):.3f}" for name in c.__struct_fields__),
            "",
        ]
    )


def table(held: list[Powers], products: list[Powers], steps: list[Step]) -> str:
    """Return the evaluation as text, a line per case."""
    found = fit(held)
    lines = [
        "  ".join(
            f"{name} {value:.3f}"
            for name, value in zip(Coefficients.__struct_fields__, found, strict=True)
        ),
        "",
        f"{'':34}{'calls':>7}{'energy':>9}{'median':>9}{'mean':>8}{'p90':>8}",
    ]
    for one in held:
        lines.append(_line(f"{one.gpu.name}, fitted to", errors_of(found, one)))
        off = without_its_class(one)
        names = np.array(one.names)
        watts = one.share * one.duration_s
        whole = ((1 + off) * watts).sum() / watts.sum() - 1
        lines.append(_line("  each class left out", Errors(float(whole), off)))
        for name in dict.fromkeys(one.names):
            own = names == name
            part = float(((1 + off[own]) * watts[own]).sum() / watts[own].sum() - 1)
            lines.append(_line(f"    {name}", Errors(part, off[own])))
    lines += [_line(f"{one.gpu.name}, products of a table", errors_of(found, one))
              for one in products]  # fmt: skip
    if steps:
        lines += ["", f"{'whole steps':34}{'read':>9}{'made':>9}"]
    lines += [f"{one.name:34}{one.read_w:7.0f} W{one.made_w:7.0f} W{one.error:+9.1%}"
              for one in steps]  # fmt: skip
    return "\n".join(lines)


def _line(title: str, errors: Errors) -> str:
    off = np.abs(errors.calls)
    return (
        f"{title:34}{len(off):7}{errors.energy:+9.1%}{np.median(off):9.1%}{off.mean():8.1%}"
        f"{np.quantile(off, 0.9):8.1%}"
    )


def main() -> None:
    """Print the evaluation; write the coefficients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("database", type=Path, help="kernel database of calls that were held")
    parser.add_argument("--products", type=Path, help="parquet table of measured products")
    parser.add_argument("--step", type=Path, action="append", default=[],
                        help="capture whose --timed-steps took 1.5 s or more")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, help="coefficients to write")
    parser.add_argument("--source", default="not told", help="where the measurements come from")
    given = parser.parse_args()
    held = read_held(given.database)
    products = read_products(given.products) if given.products else []
    steps = [(path.name, read(path)) for path in given.step]
    model, made = model_of(held, products, steps, given.source)
    sys.stdout.write(f"{table(held, products, made)}\n")
    if given.output is not None:
        given.output.write_text(to_toml(model), encoding="utf-8")


if __name__ == "__main__":
    main()
