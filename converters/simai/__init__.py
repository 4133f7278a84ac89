"""Graphs as SimAI workload text."""

from onerank.converters.simai.exporter import Export, export

__all__ = ["Export", "export"]
