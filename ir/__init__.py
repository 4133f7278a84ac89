"""The graph of one rank: nodes, edges, job, text form, and the Chakra reader and writer."""

from onerank.ir.allocations import AllocatorSettings, Blocks, MemoryClass, MemoryLog
from onerank.ir.edges import Edges
from onerank.ir.enums import COMMUNICATION, GPU_COMPUTE, Collective, Evidence, Kind, Phase, Reason
from onerank.ir.graph import Graph, GraphBuilder
from onerank.ir.job.compilation import (
    COMPILED_GRAPH,
    Compilation,
    Fusion,
    GeneratedKernel,
    ModuleTime,
)
from onerank.ir.job.job import Annotation, Job, Module
from onerank.ir.job.measurement import (
    Device,
    HostOverhead,
    LayerExtrapolation,
    Line,
    Measurement,
    Reading,
    ScopeTime,
    Sensors,
)
from onerank.ir.job.world import Pipeline, ProcessGroup, RankClass, World, axis_of
from onerank.ir.nodes import UNKNOWN, Node, Nodes
from onerank.ir.string_table import StringTable

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
    "Device",
    "Edges",
    "Evidence",
    "Fusion",
    "GeneratedKernel",
    "Graph",
    "GraphBuilder",
    "HostOverhead",
    "Job",
    "Kind",
    "LayerExtrapolation",
    "Line",
    "Measurement",
    "MemoryClass",
    "MemoryLog",
    "Module",
    "ModuleTime",
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
