"""Pipelines: schedules, and the graph of every rank from those of the captured stages."""

from onerank.converters.pipeline.columns import AXIS
from onerank.converters.pipeline.expand import RankGraph, expand
from onerank.converters.pipeline.memory import Peak, peak_memory, peaks
from onerank.converters.pipeline.schedule import KINDS, Action, Schedule, most_in_flight

__all__ = [
    "AXIS",
    "KINDS",
    "Action",
    "Peak",
    "RankGraph",
    "Schedule",
    "expand",
    "most_in_flight",
    "peak_memory",
    "peaks",
]
