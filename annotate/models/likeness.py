"""How alike GPUs are: cuts of one die, and how far one is from those that were fitted to."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import ASYNCHRONOUS, SYNCHRONOUS, Coefficients

_UNKNOWN_ARCHITECTURE = 0.7
_PROVEN = 1.0  # as far outside as the families that were left out
_HELD = 1.3, 3.3
"""So far outside the weight of this model stays as it is, on NVIDIA's GPUs.

An L40S, 1.3 outside where its family is left out, is told best by three parts of this model and one
of the other. A V100 and a T4 are 2.3 and 3.3 outside: so their products are 1.17 and 1.19 times off
in DeepBench, from each other's measurement 1.14 and 1.21; were the weight to fall on, 1.25 and
1.18, 1.23 and 1.28 (benchmarks/deepbench.py).
"""


def same_die(one: Gpu, other: Gpu) -> bool:
    """Return whether two GPUs are cuts of one die: architecture, and FLOPs per SM and cycle.

    A die family that the fit leaves out is up to 1.3 outside the others, and predicted well. A
    figure that is set makes no other die of it.
    """
    rates = [properties(gpu.as_described)["flops_per_sm_and_cycle"] for gpu in (one, other)]
    alike = 0.9 < rates[0] / rates[1] < 1 / 0.9 if all(rates) else False
    return one.architecture == other.architecture and alike


def is_asynchronous(gpu: Gpu) -> bool:
    """Return whether a GPU's matrix units are fed by an engine that copies tiles."""
    return gpu.architecture in ASYNCHRONOUS


def outside(gpu: Gpu, c: Coefficients) -> float:
    """Return how far a GPU is outside the range of those fitted to, in ln, summed; 0: inside."""
    distance = 0.0
    for name, value in properties(gpu).items():
        least, most = c.hull[name]
        distance += max(0.0, np.log(least / value), np.log(value / most)) if value else 1.0
    known = gpu.architecture in (*SYNCHRONOUS, *ASYNCHRONOUS)
    return float(distance) + (0.0 if known else _UNKNOWN_ARCHITECTURE)


def trust_in(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of this model for a GPU: 1 unless it is unlike those fitted to.

    A die family that the fit leaves out is up to 1.3 outside the others, and predicted well. A
    figure that is set leaves the weight as it was: what it changes is to be seen, and not what
    another mixture of models would.
    """
    distance, (least, most) = outside(gpu.as_described, c), _HELD
    if gpu.is_nvidia:
        distance -= min(max(0.0, distance - least), most - least)
    return float(np.exp(-max(0.0, distance - _PROVEN)))


def trust_in_parts(gpu: Gpu, c: Coefficients) -> float:
    """Return the same for what is made of several products.

    1 for NVIDIA's GPUs as near as a T4: convolutions are told there by the tiles alone, and the
    other model has them as one product, which on a V100 and a T4 takes half their time.
    """
    near = _HELD[1] if gpu.is_nvidia else _PROVEN
    return float(np.exp(-max(0.0, outside(gpu.as_described, c) - near)))


def properties(gpu: Gpu) -> dict[str, float]:
    """Return what places a GPU among others."""
    types = ("bfloat16", "float16", "float32")
    peak = next((rate for t in types if (rate := gpu.peak_tensor_flops_per_s(t))), 0.0)
    return {
        "sm_count": float(gpu.sm_count),
        "clock_hz": gpu.clock_hz,
        "flops_per_sm_and_cycle": peak / gpu.sm_count / gpu.clock_hz,
        "flops_per_byte": peak / gpu.peak_bandwidth_bytes_per_s,
        "l2_bytes": float(gpu.l2_bytes or 0),
    }
