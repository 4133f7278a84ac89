"""Fit the power model to sustained calls: `python -m tools.fit.fit_power DATABASE`.

DATABASE is the output of `onerank bench --grid power`. The program prints the coefficients and
their errors on data outside the fit: on each class of calls left out of the fit, on GEMMs of
another dataset (`--products`, see `public_powers`), on experts of MoE layers and attention of one
query (`--experts` and `--attention`, tables of `public_sets`), and on whole steps whose power was
sampled for some seconds (`--step`, captures with `--timed-steps`). With `-o` it writes the
coefficients in the format of `annotate/models/power.toml`.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from onerank.annotate.describe_gpu import Powers, fit
from onerank.annotate.energy import SETTLED_S, StepDurations, report_energy
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.annotate.kernel_db.calls import call_of
from onerank.annotate.kernel_db.database import KernelRow, read_database, rows_of
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.power import (
    PowerCoefficients,
    PowerModel,
    power_share,
    utilization_of,
)
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir import Graph
from onerank.ir.arrays import F64
from onerank.ir.chakra import read
from onerank.ir.errors import AnnotateError, FormatError, TargetError
from tools.fit.public_powers import (
    DECODE,
    GemmRuns,
    read_attention_powers,
    read_expert_powers,
    read_gemm_runs,
)

# Operator -> number of lists among its operands, which a key stores flattened.
_LISTS = {
    **dict.fromkeys(("_foreach_add_", "_foreach_mul_", "_foreach_div_", "_foreach_sqrt"), 1),
    **dict.fromkeys(("_foreach_lerp_",), 2),
    **dict.fromkeys(("_foreach_addcmul_", "_foreach_addcdiv_"), 3),
    **dict.fromkeys(("_fused_adamw_", "_fused_adam_"), 5),
}

_AS_OPERAND = (OpClass.ELEMENTWISE, OpClass.NORM, OpClass.SOFTMAX)

# The schema of fused Adam has a list after the fourth, AMSGrad's maxima: it is empty and in no key.
_FUSED = 5


def read_measured(path: Path) -> list[Powers]:
    """Read the calls of a kernel database whose power was measured, an entry for each GPU.

    Raises:
        DatabaseError: the file is no kernel database.
        FormatError: no row has a power.
        OSError: the file cannot be read.
        TargetError: a GPU has no description, or one without power limit.
    """
    rows = [row for row in rows_of(read_database(path)) if row.power_w is not None]
    if not rows:
        raise FormatError(
            f"{path}: no row has a power; expected sustained calls of `onerank bench --grid power`",
            code="fit-no-power",
        )
    names = dict.fromkeys(row.gpu for row in rows)
    return [_powers_of(name, [row for row in rows if row.gpu == name]) for name in names]


def _powers_of(name: str, rows: list[KernelRow]) -> Powers:
    gpu = find_gpu(name)
    if gpu is None or gpu.tdp_w is None:
        raise TargetError(
            f"{name}: the fit needs a description with tdp_w", code="fit-gpu-incomplete"
        )
    nanoseconds = np.array([row.median_ns for row in rows], dtype=np.float64)
    classes = [op_class(row.operator) for row in rows]
    constant = np.array([each is OpClass.MEMSET for each in classes])
    kernels = replace(kernels_of([_work(row) for row in rows], nanoseconds), constant=constant)
    use = utilization_of(kernels, gpu)
    share = np.array([row.power_w or 0.0 for row in rows]) / gpu.tdp_w
    names = tuple(each.value for each in classes)
    return Powers(gpu, use, share, nanoseconds * 1e-9, names)


def _work(row: KernelRow) -> Work:
    """Return the work of a row's call, assuming results like its operands."""
    call = call_of(row.key)
    if call is None:
        raise FormatError(
            f"{row.operator}: an operand of {', '.join(row.dtypes)} has no size",
            code="fit-unknown-size",
        )
    work = work_of_call(row.operator, with_results(call))
    # TF32 is a setting and not a type: operands are float32.
    if work.dtype == "float32" and row.key.tf32:
        return replace(work, dtype="tfloat32")
    return work


def with_results(call: Call) -> Call:
    """Return a call of a key with its lists restored and with its results."""
    lists, inputs = _LISTS.get(call.op, 0), call.inputs
    if lists:
        each = len(inputs) // lists
        tensors = [operand[0] for operand in inputs if operand]
        parts = [tuple(tensors[at * each : (at + 1) * each]) for at in range(lists)]
        inputs = (*parts[:4], (), *parts[4:]) if lists == _FUSED else tuple(parts)
        outputs = inputs[:1] if not call.op.endswith("_") else ()
        return replace(call, inputs=inputs, outputs=outputs)
    tensors = [operand[0] for operand in inputs if operand]
    return replace(call, outputs=tuple((operand,) for operand in _results(call, tensors)))


def _results(call: Call, tensors: list[Tensor]) -> list[Tensor]:
    operator_class = op_class(f"aten::{call.op}")
    if call.op in ("mm", "_scaled_mm"):
        left, right = tensors[:2]
        # Products in fp8 write 16 bits.
        item = ("bfloat16", 2) if call.op == "_scaled_mm" else (left.dtype, left.item_bytes)
        return [Tensor((left.shape[0], right.shape[1]), *item)]
    if operator_class is OpClass.ATTENTION:
        # The gradients are shaped like query, key and value, which follow the output's gradient.
        return tensors[1:4] if "backward" in call.op else tensors[:1]
    # Together the operands are as large as the result.
    if call.op == "cat":
        return tensors
    if call.op == "embedding":
        table, index = tensors[:2]
        return [Tensor((*index.shape, table.shape[-1]), table.dtype, table.item_bytes)]
    if call.op == "embedding_dense_backward":
        gradient, rows = tensors[0], call.value(2)
        return [Tensor((rows, gradient.shape[-1]), gradient.dtype, gradient.item_bytes)]
    # By broadcasting, the result is as large as the largest operand.
    return [max(tensors, key=lambda tensor: tensor.numel)] if operator_class in _AS_OPERAND else []


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors: predicted over measured, minus 1.

    Attributes:
        energy: error of the summed energy of all calls.
        calls: error of each call's power, float64[d].
    """

    energy: float
    calls: F64


@dataclass(frozen=True, slots=True)
class FittedPower:
    """Coefficients, and what a GPU at its limit draws.

    Attributes:
        coefficients: see `PowerCoefficients`, float64[5].
        at_limit: see `PowerModel`.
    """

    coefficients: F64
    at_limit: float

    @classmethod
    def of(cls, measured: list[Powers]) -> Self:
        """Return the fit to sustained calls."""
        coefficients = fit(measured)
        wanted, drawn = (
            np.concatenate(each)
            for each in (
                [_wanted(coefficients, calls) for calls in measured],
                [calls.share for calls in measured],
            )
        )
        # A sensor is off by some percent, so the median may exceed the limit.
        limited = drawn[wanted > 1]
        return cls(coefficients, min(1.0, float(np.median(limited))) if len(limited) else 1.0)

    def shares(self, measured: Powers) -> F64:
        """Return the power of each call as a share of the limit, float64[d]."""
        return np.minimum(self.at_limit, _wanted(self.coefficients, measured))


def _wanted(coefficients: F64, measured: Powers) -> F64:
    """Return the power of each call without a limit, float64[d]."""
    return power_share(measured.use, PowerCoefficients(*coefficients.tolist()))


def errors_of(model: FittedPower, measured: Powers) -> Errors:
    """Return the error of the model on sustained calls."""
    return errors_between(model.shares(measured), measured)


def errors_between(shares: F64, measured: Powers) -> Errors:
    """Return the error of predicted shares of the power limit, float64[d]."""
    whole = (shares @ measured.duration_s) / (measured.share @ measured.duration_s)
    return Errors(float(whole) - 1, shares / measured.share - 1)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Calls of another dataset, to judge a fit by.

    Attributes:
        name: of the kind of calls and the GPU.
        powers: the calls.
        runs: the runs of the calls, if a reading contains a part of the run before.
    """

    name: str
    powers: Powers
    runs: GemmRuns | None = None

    @classmethod
    def of_runs(cls, runs: GemmRuns) -> Self:
        """Return a dataset of GEMMs."""
        return cls(f"GEMMs of {runs.powers.gpu.name}", runs.powers, runs)

    def errors(self, model: FittedPower) -> Errors:
        """Return the errors of the calls; of GEMMs, of those with random weights."""
        if self.runs is None:
            return errors_of(model, self.powers)
        where = self.runs.long & self.runs.with_random_weights
        readings = self.runs.readings(model.shares(self.powers))
        return errors_between(readings[where], self.powers.only(where))


def without_its_class(calls: Powers) -> F64:
    """Return the error of each call from a fit to the other classes, float64[d]."""
    names = np.array(calls.names)
    errors = np.zeros(len(names))
    for name in dict.fromkeys(calls.names):
        in_class = names == name
        errors[in_class] = errors_of(
            FittedPower.of([calls.only(~in_class)]), calls.only(in_class)
        ).calls
    return errors


@dataclass(frozen=True, slots=True)
class Step:
    """A captured step: its power by the sensor and by the model, in W."""

    name: str
    read_w: float
    modelled_w: float

    @property
    def error(self) -> float:
        """Modelled over read, minus 1."""
        return self.modelled_w / self.read_w - 1


def step_of(name: str, graph: Graph, model: PowerModel) -> Step:
    """Return the power of a captured step.

    Raises:
        AnnotateError: its sensor was not read for `SETTLED_S` seconds.
    """
    measured, sensors = graph.job.measurement, graph.job.device.sensors
    window = sum(measured.step_ns) * 1e-9
    if sensors is None or sensors.power_mw is None or window < SETTLED_S:
        raise AnnotateError(
            f"{name}: its power was read for {window:.1f} s; expected {SETTLED_S:g} s or more: "
            "capture it with more --timed-steps",
            code="fit-step-too-short",
        )
    gpu = load_gpu(graph.job.device.name)
    step = measured.median_step_ns or 0
    # Only the profiled step's busy time is known, so its share is taken.
    busy = round(step * min(1, measured.gpu_busy_ns / max(1, measured.profiled_step_ns)))
    durations = StepDurations(step, busy, "measured")
    report = report_energy(graph, gpu, durations, model=model)
    return Step(name, sensors.power_mw.median / 1e3, report.mean_power_mw / 1e3)


def model_of(
    measured: list[Powers],
    held_out: list[HeldOut],
    steps: list[tuple[str, Graph]],
    source: str,
) -> tuple[PowerModel, list[Step]]:
    """Return the fitted model with its errors, and the steps with their modelled power."""
    fitted = FittedPower.of(measured)
    left_out = np.concatenate([without_its_class(calls) for calls in measured])
    # The errors are predicted over measured, and an interval needs the inverse.
    low, high = np.quantile(-np.log1p(left_out), [0.1, 0.9])
    names = ", ".join(calls.gpu.name for calls in measured)
    count = sum(len(calls.share) for calls in measured)
    model = PowerModel(
        source=source,
        at_limit=round(fitted.at_limit, 3),
        fitted=f"{datetime.now(UTC):%Y-%m-%d}, to {count} calls of every class on {names}",
        kernel_low=round(float(low), 3),
        kernel_high=round(float(high), 3),
        # Set below: the steps' power needs a model with these coefficients.
        step_error=0.0,
        step_errors="",
        coefficients=PowerCoefficients(
            *(round(float(coefficient), 3) for coefficient in fitted.coefficients)
        ),
    )
    fitted_steps = [step_of(name, graph, model) for name, graph in steps]
    errors_by_case = [(f"a step on {names}", step.error) for step in fitted_steps]
    errors_by_case += [(case.name, case.errors(fitted).energy) for case in held_out]
    worst = max((abs(error) for _, error in errors_by_case), default=1.0)
    text = ", ".join(f"{name} {error:+.1%}" for name, error in errors_by_case)
    errors = {"step_error": round(worst, 3), "step_errors": text}
    return msgspec.structs.replace(model, **errors), fitted_steps


def to_toml(model: PowerModel) -> str:
    """Return the text of `annotate/models/power.toml`."""
    c = model.coefficients
    return "\n".join(
        [
            "# Power of a kernel as a share of the limit: base + active u_a + tensor u_t +",
            "# memory u_m + vector u_v, with its utilization u of what the GPU sustains.",
            "# Written by `python -m tools.fit.fit_power`.",
            "",
            f'source = "{model.source}"',
            f'fitted = "{model.fitted}"',
            "# mean power at the limit, as a share of it",
            f"at_limit = {model.at_limit:.3f}",
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


def table(measured: list[Powers], held_out: list[HeldOut], steps: list[Step]) -> str:
    """Return the evaluation as text, a line per case."""
    fitted = FittedPower.of(measured)
    names = (*PowerCoefficients.__struct_fields__, "at_limit")
    values = (*fitted.coefficients.tolist(), fitted.at_limit)
    lines = [
        "  ".join(f"{name} {value:.3f}" for name, value in zip(names, values, strict=True)),
        "",
        f"{'':42}{'calls':>7}{'energy':>9}{'median':>9}{'mean':>8}{'p90':>8}",
    ]
    for calls in measured:
        lines.append(_line(f"{calls.gpu.name}, fitted to", errors_of(fitted, calls)))
        error = without_its_class(calls)
        names = np.array(calls.names)
        # Weighted by energy, as the sum over a step is.
        watts = calls.share * calls.duration_s
        mean_error = ((1 + error) * watts).sum() / watts.sum() - 1
        lines.append(_line("  each class left out", Errors(float(mean_error), error)))
        for name in dict.fromkeys(calls.names):
            in_class = names == name
            class_error = float(
                ((1 + error[in_class]) * watts[in_class]).sum() / watts[in_class].sum() - 1
            )
            lines.append(_line(f"    {name}", Errors(class_error, error[in_class])))
    lines += [_line(f"{case.name}, another dataset", case.errors(fitted)) for case in held_out]
    if steps:
        lines += ["", f"{'whole steps':42}{'read':>9}{'model':>9}"]
    lines += [f"{step.name:42}{step.read_w:7.0f} W{step.modelled_w:7.0f} W{step.error:+9.1%}"
              for step in steps]  # fmt: skip
    return "\n".join(lines)


def _line(title: str, errors: Errors) -> str:
    off = np.abs(errors.calls)
    return (
        f"{title:42}{len(off):7}{errors.energy:+9.1%}{np.median(off):9.1%}{off.mean():8.1%}"
        f"{np.quantile(off, 0.9):8.1%}"
    )


def main() -> None:
    """Print the evaluation; write the coefficients."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("database", type=Path, help="kernel database of sustained calls")
    parser.add_argument("--products", type=Path, help="parquet table of measured GEMMs")
    parser.add_argument("--experts", type=Path, help="parquet table of experts of MoE layers")
    parser.add_argument("--attention", type=Path, help="parquet table of fused attention")
    parser.add_argument("--step", type=Path, action="append", default=[],
                        help="capture whose --timed-steps took 1.5 s or more")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, help="coefficients to write")
    parser.add_argument("--source", default="unknown", help="source of the measurements")
    options = parser.parse_args()
    measured = read_measured(options.database)
    held_out: list[HeldOut] = []
    if options.products:
        held_out += [HeldOut.of_runs(runs) for runs in read_gemm_runs(options.products)]
    if options.experts:
        held_out += [
            HeldOut(f"experts of {powers.gpu.name}", powers)
            for powers in read_expert_powers(options.experts)
        ]
    if options.attention:
        # Repeats of attention over whole prompts disagree by about 20% (`public_powers`).
        held_out += [
            HeldOut(f"{powers.names[0]} of {powers.gpu.name}", powers)
            for powers in read_attention_powers(options.attention)
            if powers.names[0] == DECODE
        ]
    steps = [(path.name, read(path)) for path in options.step]
    model, fitted_steps = model_of(measured, held_out, steps, options.source)
    sys.stdout.write(f"{table(measured, held_out, fitted_steps)}\n")
    if options.output is not None:
        options.output.write_text(to_toml(model), encoding="utf-8")


if __name__ == "__main__":
    main()
