"""The graph: columns, process groups, checks, text form, Chakra reader and writer."""

from onerank.ir.build import GraphBuilder
from onerank.ir.edges import Edges
from onerank.ir.graph import Graph
from onerank.ir.job import (
    Annotation,
    Depths,
    Device,
    Job,
    Line,
    Measurement,
    Module,
    Pipeline,
    ProcessGroup,
    RankClass,
    Reading,
    ScopeTime,
    Sensors,
    World,
    axis_of,
)
from onerank.ir.kinds import (
    COMMUNICATION,
    GPU_COMPUTE,
    Collective,
    Evidence,
    Kind,
    Phase,
    Reason,
)
from onerank.ir.nodes import UNKNOWN, Node, Nodes
from onerank.ir.strings import StringTable

__all__ = [
    "COMMUNICATION",
    "GPU_COMPUTE",
    "UNKNOWN",
    "Annotation",
    "Collective",
    "Depths",
    "Device",
    "Edges",
    "Evidence",
    "Graph",
    "GraphBuilder",
    "Job",
    "Kind",
    "Line",
    "Measurement",
    "Module",
    "Node",
    "Nodes",
    "Phase",
    "Pipeline",
    "ProcessGroup",
    "RankClass",
    "Reading",
    "Reason",
    "ScopeTime",
    "Sensors",
    "StringTable",
    "World",
    "axis_of",
]
