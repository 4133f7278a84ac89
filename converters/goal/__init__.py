"""Graphs as a GOAL schedule (Group Operation Assembly Language)."""

from onerank.converters.goal.exporter import Export, export, export_ranks

__all__ = ["Export", "export", "export_ranks"]
