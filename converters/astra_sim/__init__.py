"""Export a graph as a workload that ASTRA-sim runs: traces of all ranks, groups, configuration."""

from onerank.converters.astra_sim.exporter import Export, export, export_ranks

__all__ = ["Export", "export", "export_ranks"]
