"""Pipeline parallelism: schedules, and the graph of every rank from captured stages."""

from onerank.converters.expand.pipeline.expand_stages import (
    StagePeak,
    expand,
    peak_memory,
    peaks,
)
from onerank.converters.expand.pipeline.schedules import (
    KINDS,
    Action,
    PipelineSchedule,
    most_in_flight,
)
from onerank.converters.expand.pipeline.stages import AXIS

__all__ = [
    "AXIS",
    "KINDS",
    "Action",
    "PipelineSchedule",
    "StagePeak",
    "expand",
    "most_in_flight",
    "peak_memory",
    "peaks",
]
