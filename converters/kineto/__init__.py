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
    profile_name,
)
from onerank.converters.kineto.report import Conversion

__all__ = [
    "ALONE",
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
