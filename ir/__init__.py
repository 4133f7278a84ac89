"""The graph: columns, process groups, checks, text form, Chakra reader and writer."""

from onerank.ir.build import GraphBuilder
from onerank.ir.compilation import (
    COMPILED_GRAPH,
    Compilation,
    Fusion,
    GeneratedKernel,
    ModuleTime,
)
from onerank.ir.edges import Edges
from onerank.ir.graph import Graph
from onerank.ir.job import Annotation, Job, Module
from onerank.ir.kinds import (
    COMMUNICATION,
    GPU_COMPUTE,
    Collective,
    Evidence,
    Kind,
    Phase,
    Reason,
)
from onerank.ir.measurement import (
    Depths,
    Device,
    Line,
    Measurement,
    Pace,
    Reading,
    ScopeTime,
    Sensors,
)
from onerank.ir.memory import AllocatorSettings, Blocks, MemoryClass, MemoryLog
from onerank.ir.nodes import UNKNOWN, Node, Nodes
from onerank.ir.strings import StringTable
from onerank.ir.world import Pipeline, ProcessGroup, RankClass, World, axis_of

__all__ = [
    "COMMUNICATION",
    "COMPILED_GRAPH",
    "GPU_COMPUTE",
    "UNKNOWN",
    "AllocatorSettings",
    "Annotation",
    "Blocks",
    "Collective",
    "Compilation",
    "Depths",
    "Device",
    "Edges",
    "Evidence",
    "Fusion",
    "GeneratedKernel",
    "Graph",
    "GraphBuilder",
    "Job",
    "Kind",
    "Line",
    "Measurement",
    "MemoryClass",
    "MemoryLog",
    "Module",
    "ModuleTime",
    "Node",
    "Nodes",
    "Pace",
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
