"""Export graphs as a GOAL schedule (Group Operation Assembly Language) for LogGOPSim."""

from onerank.converters.targets.goal.goal_exporter import Export, export, export_ranks

__all__ = ["Export", "export", "export_ranks"]
