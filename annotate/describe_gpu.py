"""Describe a GPU from measurements: sustained rates in place of shipped figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import check_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.models.power import PowerCoefficients, utilization
from onerank.ir.arrays import F64, Mask
from onerank.ir.errors import TargetError
from onerank.ir.measurement import SustainedCall

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tfloat32", "fp8": "float8_e4m3fn"}

# Least calls with a power for a fit of the five coefficients.
_FEWEST = 8


# Start of the fit: figures near the H200's coefficients in `models/power.toml`.
_START = (0.2, 0.3, 0.8, 0.3, 5.0)

# Limit for a fit that does not converge; it ends earlier when a step gains less than 1e-10.
_STEPS = 500


@dataclass(frozen=True, slots=True)
class Powers:
    """Measured calls on one GPU.

    Attributes:
        gpu: its description.
        use: utilization by each call, see `power.utilization`, float64[d, 5].
        share: measured power over the power limit, float64[d].
        duration_s: duration of each call, float64[d].
        names: operator or class of each call.
    """

    gpu: Gpu
    use: F64
    share: F64
    duration_s: F64
    names: tuple[str, ...]

    def only(self, where: Mask) -> "Powers":
        """Return the calls at `where`, bool[d]."""
        names = tuple(name for name, kept in zip(self.names, where.tolist(), strict=True) if kept)
        return Powers(self.gpu, self.use[where], self.share[where], self.duration_s[where], names)


def fit(measured: list[Powers]) -> F64:
    """Return the coefficients, each at least 0, of share = min(1, `power.power_share`), float64[5].

    Levenberg-Marquardt on the squared relative error, since SciPy is no dependency at run time.
    """
    use = np.concatenate([calls.use for calls in measured])
    share = np.concatenate([calls.share for calls in measured])
    damping = 1e-3
    x: F64 = np.array(_START)
    error = np.minimum(1, use @ x) / share - 1
    for _ in range(_STEPS):
        # At the limit the share is 1 whatever the coefficients, so these calls have no slope.
        slope = use * ((use @ x) < 1)[:, None] / share[:, None]
        normal = slope.T @ slope
        ridge = damping * np.diag(np.diag(normal) + 1e-9)
        trial = np.maximum(0, x + np.linalg.solve(normal + ridge, -slope.T @ error))
        trial_error = np.minimum(1, use @ trial) / share - 1
        gain = float(error @ error - trial_error @ trial_error)
        if gain > 0:
            x, error, damping = trial, trial_error, damping / 3
            if gain < 1e-10 * float(error @ error):
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return x


def described(
    like: Gpu,
    calls: Sequence[SustainedCall],
    figures: Mapping[str, float | None],
    source: str,
    date: str,
) -> Gpu:
    """Return the description of a measured GPU.

    Sustained fractions are medians over large GEMMs. The power model's coefficients are fitted to
    bf16 GEMMs and to calls that move memory.

    Args:
        like: description with the datasheet's figures, and figures that were not measured.
        calls: sustained calls.
        figures: measured figures, None if a measurement was impossible.
        source: how everything was measured.
        date: of the measurement.

    Raises:
        TargetError: a measured figure is outside its range, so `like` describes another GPU.
    """
    values = {name: value for name, value in figures.items() if value is not None}
    values |= _fractions(like, calls)
    gpu = _with(like, values, source, date)
    powers = _powers(gpu, calls)
    if powers is None:
        return gpu
    names = (f"power_{name}" for name in PowerCoefficients.__struct_fields__)
    return _with(gpu, dict(zip(names, fit([powers]).tolist(), strict=True)), source, date)


def _fractions(like: Gpu, calls: Sequence[SustainedCall]) -> dict[str, float]:
    """Return the sustained fraction of each peak in the description, from large GEMMs."""
    fractions: dict[str, float] = {}
    for unit in dict.fromkeys(call.unit for call in calls if call.unit):
        name = "vector_sustained_fraction" if unit == "fp32" else f"{unit}_sustained_fraction"
        dtype = "float32" if unit == "fp32" else _DTYPES[unit]
        peak = like.peak_tensor_flops_per_s(dtype)
        large = [
            call.flops / call.median_ns * 1e9
            for call in calls
            # Smaller GEMMs do not fill the GPU and never reach the power limit; `LARGE_SHAPES`
            # starts here too.
            if call.unit == unit and min(call.sizes) >= 4096
        ]
        if peak is not None and large:
            fractions[name] = float(np.median(large)) / peak
    return fractions


def _powers(gpu: Gpu, calls: Sequence[SustainedCall]) -> Powers | None:
    """Return the calls to fit the power model to; None if too few have a power."""
    rate, limit = gpu.tensor_flops_per_s("bfloat16"), gpu.tdp_w
    selected = [
        (call, call.power_w) for call in calls if call.power_w and call.unit in ("bf16", "")
    ]
    if rate is None or limit is None or len(selected) < _FEWEST:
        return None
    seconds = np.array([call.median_ns * 1e-9 for call, _ in selected])
    product = np.array([call.unit != "" for call, _ in selected])
    flops = np.array([call.flops for call, _ in selected], dtype=np.float64)
    moved = np.array([call.nbytes for call, _ in selected], dtype=np.float64)
    use = utilization(
        seconds, np.where(product, flops / rate, 0), moved, np.where(product, 0, flops), gpu
    )
    share = np.array([watts for _, watts in selected]) / limit
    return Powers(gpu, use, share, seconds, tuple(call.unit for call, _ in selected))


def _with(gpu: Gpu, values: Mapping[str, float], source: str, date: str) -> Gpu:
    """Return the description with measured figures.

    Raises:
        TargetError: a figure is out of range.
    """
    measured = {
        name: Figure(float(f"{value:.4g}"), "bench", "measured") for name, value in values.items()
    }
    described = msgspec.structs.replace(
        gpu,
        name=f"{gpu.board} (measured {date})",
        aliases=(),
        sources={**gpu.sources, "bench": source},
        figures={**gpu.figures, **measured},
    )
    try:
        check_gpu(described)
    except TargetError as error:
        raise TargetError(
            f"measured: {error}\n  give the description of this GPU with --base-gpu",
            code="gpu-measurement-mismatch",
        ) from None
    return described


def to_toml(gpu: Gpu) -> str:
    """Return a description as the text of its file."""
    lines = [f"{name} = {_text(getattr(gpu, name))}" for name in ("name", "vendor", "architecture")]
    if gpu.compute_capability:
        lines.append(f"compute_capability = {_text(gpu.compute_capability)}")
    if gpu.aliases:
        lines.insert(1, f"aliases = [{', '.join(_text(alias) for alias in gpu.aliases)}]")
    used = {figure.source for figure in gpu.figures.values()}
    lines += ["", "[sources]"]
    lines += [f"{key} = {_text(text)}" for key, text in gpu.sources.items() if key in used]
    lines += ["", "[figures]"]
    for name, figure in gpu.figures.items():
        value = f"value = {figure.value:.10g}, source = {_text(figure.source)}"
        lines.append(f"{name} = {{ {value}, confidence = {_text(figure.confidence)} }}")
    return "\n".join([*lines, ""])


def _text(value: str) -> str:
    """Return a TOML string: every JSON string is one."""
    return msgspec.json.encode(value).decode()
