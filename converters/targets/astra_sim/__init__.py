"""Export a workload that ASTRA-sim runs: traces of all ranks, groups and configuration."""

from onerank.converters.targets.astra_sim.exporter import AstraSimExport, export, export_ranks

__all__ = ["AstraSimExport", "export", "export_ranks"]
