"""Workloads that ASTRA-sim runs: traces of all ranks, groups and configuration; their checker.

The package imports nothing, so that `onerank check` does not import the exporter.
"""
