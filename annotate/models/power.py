"""The power that a kernel draws: the power model's terms, and the limit of the GPU."""

import functools
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures

F64 = npt.NDArray[np.float64]

_SHIPPED = Path(__file__).with_name("power.toml")

_PER_SCORE = 5.0, 9.0
"""Vector operations per attention score, forward and backward.

Those of a softmax, and of its gradient in the backward.
"""


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the power limit, see `power_share`.

    Attributes:
        base: what any kernel draws, however small.
        active: what an occupied GPU adds.
        tensor: what products at the sustained rate add.
        memory: what traffic at the achievable bandwidth adds.
        vector: what vector operations at the sustained rate would add; no kernel comes near, as a
            counted operation takes several instructions.
    """

    base: float
    active: float
    tensor: float
    memory: float
    vector: float


class PowerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted power model, as in `power.toml`.

    Attributes:
        source: origin of the measurements.
        fitted: when, and to what.
        kernel_low: ln(measured / predicted) of a call of a class left out of the fit, 10 %.
        kernel_high: the same, 90 %.
        step_error: largest error of summed energy outside the fit.
        step_errors: the steps behind it.
        coefficients: of any GPU.
    """

    source: str
    fitted: str
    kernel_low: float
    kernel_high: float
    step_error: float
    step_errors: str
    coefficients: Coefficients


@functools.cache
def power_model() -> PowerModel:
    """Return the fitted power model."""
    return msgspec.convert(tomllib.loads(_SHIPPED.read_text(encoding="utf-8")), PowerModel)


def coefficients_of(gpu: Gpu, model: PowerModel) -> Coefficients:
    """Return the coefficients of a GPU: its description's before the fitted ones."""
    own = gpu.power_coefficients
    return model.coefficients if own is None else Coefficients(*own)


def utilization(seconds: F64, tensor: F64, moved: F64, vector: F64, gpu: Gpu) -> F64:
    """Return the utilization of a GPU by kernels, one column per term of `Coefficients`.

    The result is float64[n, 5].

    Args:
        seconds: durations.
        tensor: what products would take at the sustained rate, in seconds; 0 for other work.
        moved: bytes read and written.
        vector: vector operations.
        gpu: where they run.
    """
    memory = np.minimum(1, moved / seconds / gpu.bandwidth_bytes_per_s)
    rate = gpu.vector_flops_per_s
    return np.stack(
        [
            np.ones_like(seconds),
            np.maximum(0, 1 - gpu.launch_floor_ns * 1e-9 / seconds),
            tensor / seconds,
            memory,
            vector / seconds / rate if rate else np.zeros_like(seconds),
        ],
        axis=1,
    )


def utilization_of(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the utilization of a GPU by kernels, see `utilization`."""
    work = np.nan_to_num(kernels.flops)
    tensor = np.where(kernels.matmul, np.nan_to_num(work / kernels.rates(gpu).sustained), 0.0)
    vector = np.where(kernels.matmul, work * _scores_per_flop(kernels), work)
    seconds = np.maximum(kernels.duration_ns, 1) * 1e-9
    return utilization(seconds, tensor, np.nan_to_num(kernels.bytes), vector, gpu)


def power_share(use: F64, c: Coefficients) -> F64:
    """Return the power of kernels as a share of the power limit; one kernel may exceed it.

    base + active u_a + tensor u_t + memory u_m + vector u_v: u_a is the part of its time after the
    launch, u_t, u_m and u_v what it does of the sustained rates. The limit holds the mean of some
    hundredths of a second: a kernel that repeats draws no more, one between others may.
    """
    terms = use * np.array(msgspec.structs.astuple(c))
    return terms[:, :4].sum(axis=1) + np.minimum(1, terms[:, 4])


def _scores_per_flop(kernels: KernelFeatures) -> F64:
    """Return the vector operations of attention for each FLOP of its products, float64[n]."""
    d, value, backward = (kernels.attention[kernels.call][:, column] for column in (5, 6, 8))
    forward = _PER_SCORE[0] / np.maximum(1, 2 * (d + value))
    both = _PER_SCORE[1] / np.maximum(1, 2 * (3 * d + 2 * value))
    return np.where(d > 0, np.where(backward > 0, both, forward), 0.0)
