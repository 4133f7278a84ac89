"""Describe a GPU from measurements: sustained rates in place of shipped figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import check_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.models.power import Coefficients, utilization
from onerank.ir.errors import TargetError
from onerank.ir.job.microbenchmarks import SustainedCall

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tfloat32", "fp8": "float8_e4m3fn"}

_FEWEST = 8


F64 = npt.NDArray[np.float64]

_START = (0.2, 0.3, 0.8, 0.3, 5.0)

_STEPS = 500


@dataclass(frozen=True, slots=True)
class Powers:
    """Measured calls on one GPU.

    Attributes:
        gpu: its description.
        use: what each uses of it, see `power.utilization`, float64[d, 5].
        share: measured power over the power limit, float64[d].
        duration_s: float64[d].
        names: operator, or class, of each.
    """

    gpu: Gpu
    use: F64
    share: F64
    duration_s: F64
    names: tuple[str, ...]

    def only(self, where: npt.NDArray[np.bool_]) -> "Powers":
        """Return some of the calls."""
        names = tuple(name for name, kept in zip(self.names, where.tolist(), strict=True) if kept)
        return Powers(self.gpu, self.use[where], self.share[where], self.duration_s[where], names)


def fit(given: list[Powers]) -> F64:
    """Return the coefficients, float64[5], of share = min(1, `power.power_share`), none below 0.

    Levenberg-Marquardt on the squared relative error; at the limit the model has no slope.
    """
    use = np.concatenate([one.use for one in given])
    share = np.concatenate([one.share for one in given])
    damping = 1e-3
    found: F64 = np.array(_START)
    error = np.minimum(1, use @ found) / share - 1
    for _ in range(_STEPS):
        slope = use * ((use @ found) < 1)[:, None] / share[:, None]
        normal = slope.T @ slope
        ridge = damping * np.diag(np.diag(normal) + 1e-9)
        tried = np.maximum(0, found + np.linalg.solve(normal + ridge, -slope.T @ error))
        left = np.minimum(1, use @ tried) / share - 1
        gain = float(error @ error - left @ left)
        if gain > 0:
            found, error, damping = tried, left, damping / 3
            if gain < 1e-10 * float(error @ error):
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return found


def described(
    like: Gpu,
    held: Sequence[SustainedCall],
    others: Mapping[str, float | None],
    source: str,
    date: str,
) -> Gpu:
    """Return the description of a GPU that was measured.

    Sustained fractions are medians over large GEMMs. The power model's coefficients are fitted to
    bf16 GEMMs and to calls that move memory.

    Args:
        like: provides the datasheet's figures, and figures that were not measured.
        held: sustained calls.
        others: measured figures, None if a measurement was impossible.
        source: how everything was measured.
        date: of the measurement.

    Raises:
        TargetError: a measured figure is outside its range, so `like` describes another GPU.
    """
    values = {name: value for name, value in others.items() if value is not None}
    values |= _fractions(like, held)
    made = _with(like, values, source, date)
    powers = _powers(made, held)
    if powers is None:
        return made
    names = (f"power_{name}" for name in Coefficients.__struct_fields__)
    return _with(made, dict(zip(names, fit([powers]).tolist(), strict=True)), source, date)


def _fractions(like: Gpu, held: Sequence[SustainedCall]) -> dict[str, float]:
    """Return the sustained part of each peak that the description has."""
    found: dict[str, float] = {}
    for unit in dict.fromkeys(one.unit for one in held if one.unit):
        name = "vector_sustained_fraction" if unit == "fp32" else f"{unit}_sustained_fraction"
        dtype = "float32" if unit == "fp32" else _DTYPES[unit]
        peak = like.peak_tensor_flops_per_s(dtype)
        large = [
            one.flops / one.median_ns * 1e9
            for one in held
            if one.unit == unit and min(one.sizes) >= 4096
        ]
        if peak is not None and large:
            found[name] = float(np.median(large)) / peak
    return found


def _powers(gpu: Gpu, held: Sequence[SustainedCall]) -> Powers | None:
    """Return what the power model is fitted to; None where too few calls have a power."""
    rate, limit = gpu.tensor_flops_per_s("bfloat16"), gpu.tdp_w
    kept = [(one, one.power_w) for one in held if one.power_w and one.unit in ("bf16", "")]
    if rate is None or limit is None or len(kept) < _FEWEST:
        return None
    seconds = np.array([one.median_ns * 1e-9 for one, _ in kept])
    product = np.array([one.unit != "" for one, _ in kept])
    flops = np.array([one.flops for one, _ in kept], dtype=np.float64)
    moved = np.array([one.nbytes for one, _ in kept], dtype=np.float64)
    use = utilization(
        seconds, np.where(product, flops / rate, 0), moved, np.where(product, 0, flops), gpu
    )
    share = np.array([watts for _, watts in kept]) / limit
    return Powers(gpu, use, share, seconds, tuple(one.unit for one, _ in kept))


def _with(gpu: Gpu, values: Mapping[str, float], source: str, date: str) -> Gpu:
    """Return the description with measured figures.

    Raises:
        TargetError: one is outside what can be.
    """
    measured = {
        name: Figure(float(f"{value:.4g}"), "bench", "measured") for name, value in values.items()
    }
    made = msgspec.structs.replace(
        gpu,
        name=f"{gpu.board} (measured {date})",
        aliases=(),
        sources={**gpu.sources, "bench": source},
        figures={**gpu.figures, **measured},
    )
    try:
        check_gpu(made)
    except TargetError as error:
        raise TargetError(
            f"measured: {error}. Is it the description of another GPU? Give --base-gpu with the "
            "right "
            "one",
            code="gpu-measurement-mismatch",
        ) from None
    return made


def to_toml(gpu: Gpu) -> str:
    """Return a description as the text of its file."""
    lines = [f"{name} = {_text(getattr(gpu, name))}" for name in ("name", "vendor", "architecture")]
    if gpu.compute_capability:
        lines.append(f"compute_capability = {_text(gpu.compute_capability)}")
    if gpu.aliases:
        lines.insert(1, f"aliases = [{', '.join(_text(one) for one in gpu.aliases)}]")
    used = {figure.source for figure in gpu.figures.values()}
    lines += ["", "[sources]"]
    lines += [f"{key} = {_text(text)}" for key, text in gpu.sources.items() if key in used]
    lines += ["", "[figures]"]
    for name, figure in gpu.figures.items():
        value = f"value = {figure.value:.10g}, source = {_text(figure.source)}"
        lines.append(f"{name} = {{ {value}, confidence = {_text(figure.confidence)} }}")
    return "\n".join([*lines, ""])


def _text(value: str) -> str:
    """Return a TOML string; JSON's escapes are among TOML's."""
    return msgspec.json.encode(value).decode()
