"""Export graphs as SimAI workload text."""

from onerank.converters.targets.simai.simai_exporter import Export, export

__all__ = ["Export", "export"]
