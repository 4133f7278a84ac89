"""How far a GPU is from those that the models were fitted to, and what the models are worth there.

`distance_from_fitted` sums, over the properties of a GPU, how far each is outside the range of the
fitted GPUs, in ln. It widens the intervals (`intervals`), and `tile_model_weight` decides with it
between the tile model and the residual model (`learned`).
"""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import ASYNCHRONOUS, OTHER_ARCHITECTURE, SYNCHRONOUS
from onerank.annotate.models.coefficients import Coefficients

# Additional distance of an architecture without a fitted `Pipeline`, which gets a mean of the two.
_UNKNOWN_ARCHITECTURE = 0.7

# Distance up to which the tile model keeps its full weight. Die families that the fit leaves out
# are 0 to 1.3 outside the rest.
_VALIDATED_DISTANCE = 1.0

# Distances from the fitted NVIDIA GPUs between which the tile model's weight stays constant. An
# L40S, 1.3 outside if its family is left out, is predicted best by three parts of the tile model
# and one of the residual model. Error factors of GEMMs in DeepBench
# (benchmarks/predictions/deepbench.py):
#
#   GPU   distance  predicted from          constant weight  falling weight
#   V100  2.3       shapes                  1.17             1.25
#   T4    3.3       shapes                  1.19             1.18
#   V100  2.3       the T4's measurement    1.14             1.23
#   T4    3.3       the V100's measurement  1.21             1.28
_FULL_WEIGHT_DISTANCES = 1.3, 3.3


def same_die(gpu: Gpu, other: Gpu) -> bool:
    """Return whether two GPUs are SKUs of one die.

    They have the same architecture, and FLOPs per SM and cycle within 10%. Overridden figures do
    not count: a what-if must not switch to the rules of another die.
    """
    # "other" names any unlisted architecture, so two such descriptions may be of different dies.
    if gpu.architecture == OTHER_ARCHITECTURE:
        return gpu.board == other.board
    rates = [properties(board.as_described)["flops_per_sm_and_cycle"] for board in (gpu, other)]
    equal_rates = 0.9 < rates[0] / rates[1] < 1 / 0.9 if all(rates) else False
    return gpu.architecture == other.architecture and equal_rates


def has_measured_die(gpu: Gpu, c: Coefficients) -> bool:
    """Return whether the errors on a GPU's die were measured, by the rule of `same_die`.

    Overridden figures do not count, as there.
    """
    rate = properties(gpu.as_described)["flops_per_sm_and_cycle"]
    measured = c.dies.get(gpu.architecture)
    return bool(measured and 0.9 < rate / measured < 1 / 0.9)


def distance_from_fitted(gpu: Gpu, c: Coefficients) -> float:
    """Return a GPU's distance from the range of the fitted GPUs: the sum over properties, in ln."""
    distance = 0.0
    for name, value in properties(gpu).items():
        least, most = c.hull[name]
        # An unknown figure counts as one unit, so that a
        # sparse description does not look like a fitted GPU.
        distance += max(0.0, np.log(least / value), np.log(value / most)) if value else 1.0
    known = gpu.architecture in (*SYNCHRONOUS, *ASYNCHRONOUS)
    return float(distance) + (0.0 if known else _UNKNOWN_ARCHITECTURE)


def tile_model_weight(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of the tile model for a GPU: 1 unless it is far from the fitted GPUs.

    A die family that the fit leaves out is up to 1.3 outside the others, and predicted well.
    """
    # Without overrides, so that a changed figure shows only its effect. With them, --override of
    # more FLOPs or a larger cache changed the mixture and made GEMMs up to 16% slower.
    distance, (least, most) = distance_from_fitted(gpu.as_described, c), _FULL_WEIGHT_DISTANCES
    if gpu.is_nvidia:
        distance -= min(max(0.0, distance - least), most - least)
    return float(np.exp(-max(0.0, distance - _VALIDATED_DISTANCE)))


def composite_tile_weight(gpu: Gpu, c: Coefficients) -> float:
    """Return the weight of the tile model for calls composed of several GEMMs.

    1 for NVIDIA GPUs as near as a T4, where the tiles predict convolutions. The residual model sees
    a single GEMM, which takes half the convolution's time on a V100 and a T4.
    """
    near = _FULL_WEIGHT_DISTANCES[1] if gpu.is_nvidia else _VALIDATED_DISTANCE
    return float(np.exp(-max(0.0, distance_from_fitted(gpu.as_described, c) - near)))


def properties(gpu: Gpu) -> dict[str, float]:
    """Return the properties of a GPU that define its distance from others."""
    types = ("bfloat16", "float16", "float32")
    peak = next((rate for dtype in types if (rate := gpu.peak_tensor_flops_per_s(dtype))), 0.0)
    return {
        "sm_count": float(gpu.sm_count),
        "clock_hz": gpu.clock_hz,
        "flops_per_sm_and_cycle": peak / gpu.sm_count / gpu.clock_hz,
        "flops_per_byte": peak / gpu.peak_bandwidth_bytes_per_s,
        "l2_bytes": float(gpu.l2_bytes or 0),
    }
