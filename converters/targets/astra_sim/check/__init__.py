"""Check Chakra files and whole workloads for what stalls ASTRA-sim or falsifies its results."""

from onerank.converters.targets.astra_sim.check.comm_programs import (
    CommNode,
    CommProgram,
    End,
    NodeType,
    Program,
)
from onerank.converters.targets.astra_sim.check.file_rules import Dag, lowest_id_first
from onerank.converters.targets.astra_sim.check.findings import RULES, Finding
from onerank.converters.targets.astra_sim.check.workload import check, check_file, check_workload

__all__ = [
    "RULES",
    "CommNode",
    "CommProgram",
    "Dag",
    "End",
    "Finding",
    "NodeType",
    "Program",
    "check",
    "check_file",
    "check_workload",
    "lowest_id_first",
]
