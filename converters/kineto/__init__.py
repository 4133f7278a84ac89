"""Kineto trace and execution trace to graph."""

from onerank.converters.kineto.convert import (
    EXECUTION_TRACE,
    JOB,
    PROFILE,
    STRUCTURE,
    Sources,
    convert,
    convert_directory,
    profile_name,
)
from onerank.converters.kineto.report import Conversion

__all__ = [
    "EXECUTION_TRACE",
    "JOB",
    "PROFILE",
    "STRUCTURE",
    "Conversion",
    "Sources",
    "convert",
    "convert_directory",
    "profile_name",
]
