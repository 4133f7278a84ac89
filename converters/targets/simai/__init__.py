"""Export graphs as SimAI workload text."""

from onerank.converters.targets.simai.simai_exporter import SimaiExport, export

__all__ = ["SimaiExport", "export"]
