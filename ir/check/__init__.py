"""Check Chakra files and whole workloads for all that stalls ASTRA-sim or bends its figures."""

from onerank.ir.check.findings import RULES, Finding
from onerank.ir.check.workload import check, check_file, check_workload

__all__ = ["RULES", "Finding", "check", "check_file", "check_workload"]
