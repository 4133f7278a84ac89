"""Kineto trace and execution trace to graph."""

from onerank.converters.kineto.convert import (
    ALONE,
    EXECUTION_TRACE,
    JOB,
    PROFILE,
    STRUCTURE,
    Sources,
    convert,
    convert_directory,
    history_name,
    profile_name,
)
from onerank.converters.kineto.history import Action, History, lingering
from onerank.converters.kineto.report import Conversion

__all__ = [
    "ALONE",
    "EXECUTION_TRACE",
    "JOB",
    "PROFILE",
    "STRUCTURE",
    "Action",
    "Conversion",
    "History",
    "Sources",
    "convert",
    "convert_directory",
    "history_name",
    "lingering",
    "profile_name",
]
