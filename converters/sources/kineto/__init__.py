"""Convert PyTorch's Kineto trace and execution trace to a graph."""

from onerank.converters.sources.kineto.capture_directory import (
    EXECUTION_TRACE,
    JOB,
    PROFILE,
    STRUCTURE,
    UNCONTENDED,
    convert_directory,
    history_name,
    is_capture,
    profile_name,
)
from onerank.converters.sources.kineto.convert_rank import SHAPES_ONLY, Sources, convert
from onerank.converters.sources.kineto.link.graph_replays import (
    GRAPH_REPLAY,
    graph_et_name,
    graph_kernels_name,
    graph_name,
)
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.memory_events import AllocatorAction, History, lingering

__all__ = [
    "EXECUTION_TRACE",
    "GRAPH_REPLAY",
    "JOB",
    "PROFILE",
    "SHAPES_ONLY",
    "STRUCTURE",
    "UNCONTENDED",
    "AllocatorAction",
    "Conversion",
    "History",
    "Sources",
    "convert",
    "convert_directory",
    "graph_et_name",
    "graph_kernels_name",
    "graph_name",
    "history_name",
    "is_capture",
    "lingering",
    "profile_name",
]
