"""The power that a kernel draws: a linear model of utilization, and the limit of the GPU."""

import functools
import tomllib
from pathlib import Path

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.tile_kernels import executed_over_counted, loads_of_small_tiles
from onerank.ir.arrays import F64

_SHIPPED = Path(__file__).with_name("power.toml")

# Traffic of one repeated value as a share of that of random values: DRAM and buses draw power when
# their lines change. An H200 drew 347 W while it filled 537 MB with one value at 3.3 TB/s, and 574
# to 609 W while it copied as many bytes at 4.1 TB/s (the shipped database, 2026-11-21).
_CONSTANT_TRAFFIC = 0.3

# Loads from the cache as a share of traffic of the memory. With tiles of 64 x 64 the experts of an
# engine load 0.9 to 3 times what the memory could move. Chosen on vLLM's experts on an H200: of
# readings above 0.9 of the limit the mean error is 6.8% without these loads, 1.0% with 0.5 and 0.8%
# with 0.7; of all readings 22.2, 20.4 and 20.6%. On a B200, which took no part in the choice, 0.5
# lowers the errors from 15.0 to 3.1% and from 19.5 to 12.6%.
_CACHE_TRAFFIC = 0.5

# Vector operations per attention score, forward and backward. A softmax has five (see
# `op_costs.memory_bound`); the backward repeats it and adds the four of its gradient.
_PER_SCORE = 5.0, 9.0


class PowerCoefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the power limit, see `power_share`.

    Attributes:
        base: drawn by any kernel, however small.
        active: added by an occupied GPU.
        tensor: added by GEMMs at the sustained rate.
        memory: added by traffic at the achievable bandwidth.
        vector: added by vector operations at the sustained rate. Kernels stay below this
            rate, because an operation takes several instructions, so the fitted value exceeds 1.
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
        at_limit: mean power of a GPU whose kernels would draw more than the limit, as a share of
            the limit. Its regulator stays below it.
        kernel_low: 10th percentile of ln(measured / predicted), with the call's class left out.
        kernel_high: 90th percentile.
        step_error: largest error of summed energy outside the fit.
        step_errors: each of these errors, as text.
        coefficients: for GPUs whose description has none.
    """

    source: str
    fitted: str
    at_limit: float
    kernel_low: float
    kernel_high: float
    step_error: float
    step_errors: str
    coefficients: PowerCoefficients


@functools.cache
def power_model() -> PowerModel:
    """Return the fitted power model."""
    return msgspec.convert(tomllib.loads(_SHIPPED.read_text(encoding="utf-8")), PowerModel)


def coefficients_of(gpu: Gpu, model: PowerModel) -> PowerCoefficients:
    """Return the coefficients of a GPU's description, or the fitted ones if it has none."""
    described = gpu.power_coefficients
    return model.coefficients if described is None else PowerCoefficients(*described)


def base_share(gpu: Gpu, model: PowerModel) -> float:
    """Return the least power of a busy GPU as a share of its limit.

    A GPU draws no less while it works than while it idles, and the fitted base does not know the
    idle power of this GPU.
    """
    base = coefficients_of(gpu, model).base
    if gpu.idle_w is None or not gpu.tdp_w:
        return base
    return max(base, gpu.idle_w / gpu.tdp_w)


def utilization(  # noqa: PLR0917
    seconds: F64, tensor: F64, moved: F64, vector: F64, gpu: Gpu, loaded: F64 | float = 0.0
) -> F64:
    """Return the utilization of a GPU by kernels, one column per term of `PowerCoefficients`.

    The result is float64[n, 5].

    Args:
        seconds: durations.
        tensor: time of the GEMMs at the sustained rate, in seconds; 0 for other work.
        moved: bytes read and written.
        vector: vector operations.
        gpu: the GPU.
        loaded: bytes loaded from the cache, beyond those of GEMMs with large tiles.
    """
    # Operands in the last-level cache make the rate of bytes exceed the
    # bandwidth; memory itself draws no more than at full bandwidth.
    memory = np.minimum(1, moved / seconds / gpu.bandwidth_bytes_per_s)
    memory = memory + _CACHE_TRAFFIC * loaded / seconds / gpu.bandwidth_bytes_per_s
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
    """Return the utilization of a GPU by kernels, see `utilization`.

    Experts' kernels also multiply the empty rows of their tiles, and their small tiles load
    operands from the cache more often than those of other GEMMs.
    """
    work = np.nan_to_num(kernels.flops)
    tensor = np.where(kernels.matmul, np.nan_to_num(work / kernels.rates(gpu).sustained), 0.0)
    tensor = tensor * executed_over_counted(kernels.parts, len(kernels.gemm))[kernels.call]
    vector = np.where(kernels.matmul, work * _scores_per_flop(kernels), work)
    seconds = np.maximum(kernels.duration_ns, 1) * 1e-9
    moved = np.nan_to_num(kernels.bytes) * np.where(kernels.constant, _CONSTANT_TRAFFIC, 1.0)
    loaded = loads_of_small_tiles(kernels.parts, len(kernels.gemm))[kernels.call]
    loaded = loaded * kernels.share_of_operator
    return utilization(seconds, tensor, moved, vector, gpu, loaded)


def power_share(use: F64, c: PowerCoefficients) -> F64:
    """Return the power of kernels as a share of the power limit; one kernel may exceed it.

    base + active u_a + tensor u_t + memory u_m + vector u_v: u_a is the share of its time after the
    launch; u_t, u_m and u_v are its rates over the sustained ones. The limit applies to the mean of
    some hundredths of a second: a repeated kernel stays below it, a single one may exceed it.
    """
    terms = use * np.array(msgspec.structs.astuple(c))
    return terms[:, :4].sum(axis=1) + np.minimum(1, terms[:, 4])


def _scores_per_flop(kernels: KernelFeatures) -> F64:
    """Return the vector operations of attention per FLOP of its GEMMs, float64[n]."""
    columns: list[F64] = list(kernels.attention[kernels.call].T)
    _, _, _, _, _, d, dv, _, backward, *_ = columns
    # FLOPs of the GEMMs per score: two GEMMs forward, five backward (see `attention_time`).
    forward = _PER_SCORE[0] / np.maximum(1, 2 * (d + dv))
    both = _PER_SCORE[1] / np.maximum(1, 2 * (3 * d + 2 * dv))
    return np.where(d > 0, np.where(backward > 0, both, forward), 0.0)
