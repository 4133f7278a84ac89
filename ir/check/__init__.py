"""Check Chakra files and whole workloads for all that stalls ASTRA-sim or bends its figures."""

from onerank.ir.check.calls import Call, NodeType
from onerank.ir.check.findings import RULES, Finding
from onerank.ir.check.programs import Course, End, Program
from onerank.ir.check.structure import Dag, lowest_id_first
from onerank.ir.check.workload import check, check_file, check_workload

__all__ = [
    "RULES",
    "Call",
    "Course",
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
