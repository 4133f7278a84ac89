"""One evaluation: predicted against measured, on one GPU or from one to another."""

from dataclasses import dataclass

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from tools.fit.measured_kernels import F64

VIDUR_FILE = "vidur_mlp_fp16.parquet"


@dataclass(frozen=True, slots=True)
class Case:
    """One ordered pair of GPUs.

    Attributes:
        kind: kind of prediction, as in `error_kinds.KINDS`.
        source: GPU whose measurement was used.
        target: GPU predicted, its family left out of the fit.
        measured_ns: float64[d].
        predicted_ns: float64[d].
        rows: m of products, queries of attention, 0 of others, float64[d].
        widening: factor on the errors for a GPU this far from those fitted to, see `error_kinds`.
    """

    kind: str
    source: Gpu
    target: Gpu
    measured_ns: F64
    predicted_ns: F64
    rows: F64
    widening: float = 1.0

    @property
    def error(self) -> F64:
        """ln(measured / predicted)."""
        return np.log(self.measured_ns / self.predicted_ns)
