"""The cost models by name, and the interface that they implement."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import learned, roofline, scale_by_ratio, scale_measured
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.prediction_terms import PredictedDurations, TermRecord

Predict = Callable[[KernelFeatures, Gpu, Gpu], PredictedDurations]
"""(kernels, source, target) -> the kernels' durations on the target."""

PredictFromDescription = Callable[[KernelFeatures, Gpu], PredictedDurations]
"""(kernels, target) -> durations of kernels that were not measured."""


class _Transfer(Protocol):
    """A `Predict` that also records terms."""

    def __call__(
        self, kernels: KernelFeatures, source: Gpu, target: Gpu, *, record: TermRecord | None = None
    ) -> PredictedDurations: ...


class _FromDescription(Protocol):
    """A `PredictFromDescription` that also records terms."""

    def __call__(
        self, kernels: KernelFeatures, target: Gpu, *, record: TermRecord | None = None
    ) -> PredictedDurations: ...


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts kernel durations on a target GPU.

    Attributes:
        name: identifies the model in reports and in the annotation of re-costed graphs.
        predict: transfers measured durations from the source GPU.
        from_description: predicts unmeasured kernels, as in a CPU capture.
        has_intervals: whether the shipped errors apply to it.
        resolves_kernels: whether attention becomes the kernel that the target runs.
        looks_up: whether a measurement of the same call on the target takes precedence.
    """

    name: str
    predict: _Transfer
    from_description: _FromDescription = roofline.predict_from_datasheet
    has_intervals: bool = False
    resolves_kernels: bool = False
    looks_up: bool = False


_LEARNED = CostModel(
    "learned",
    learned.predict_learned,
    learned.predict_from_description,
    has_intervals=True,
    resolves_kernels=True,
)

MODELS: dict[str, CostModel] = {
    "ratio": CostModel("ratio", scale_by_ratio.predict_by_ratio),
    "roofline": CostModel("roofline", roofline.predict_by_roofline),
    "residual": CostModel("residual", scale_measured.predict_by_residual, has_intervals=True),
    "learned": _LEARNED,
    "auto": replace(_LEARNED, looks_up=True),
}
"""Cost models by their name on the command line.

"auto" is the learned model with look-ups in the kernel databases, and the most accurate.
"""
