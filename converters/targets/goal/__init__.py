"""Export graphs as a GOAL schedule (Group Operation Assembly Language) for LogGOPSim."""

from onerank.converters.targets.goal.goal_exporter import GoalExport, export, export_ranks

__all__ = ["GoalExport", "export", "export_ranks"]
