"""Export a workload that ASTRA-sim runs: traces of all ranks, groups and configuration."""

from onerank.converters.targets.astra_sim.exporter import Export, export, export_ranks

__all__ = ["Export", "export", "export_ranks"]
