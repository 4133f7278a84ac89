"""The width of an interval from the shipped errors."""

import numpy as np

from onerank.annotate import load_gpu
from onerank.annotate.models.coefficients import shipped


def error_width(kind: str, target: str, predicted_ns: float) -> float:
    """Return ln(upper end / prediction) of a kind on a GPU of a measured die."""
    error = shipped().errors[kind]
    of_die = error.dies.get(load_gpu(target).architecture, 1.0)
    return error.high * of_die * float(error.of_length(np.array([predicted_ns]))[0])
