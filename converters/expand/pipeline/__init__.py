"""Pipeline parallelism: schedules, and the graph of every rank from captured stages."""

from onerank.converters.expand.pipeline.expand_stages import (
    Peak,
    expand,
    peak_memory,
    peaks,
)
from onerank.converters.expand.pipeline.schedules import KINDS, Action, Schedule, most_in_flight
from onerank.converters.expand.pipeline.stages import AXIS

__all__ = [
    "AXIS",
    "KINDS",
    "Action",
    "Peak",
    "Schedule",
    "expand",
    "most_in_flight",
    "peak_memory",
    "peaks",
]
