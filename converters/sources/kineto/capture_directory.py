"""The directory of a capture's raw traces, as `capture run --raw-dir` keeps it: convert it."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from onerank.converters.sources.kineto.convert_rank import SHAPES_ONLY, Sources, convert
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.ir import Evidence, Graph, Job
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

# The files in it.
JOB = "job.json"
PROFILE = "profile.json.gz"
UNCONTENDED = "uncontended.json.gz"
STRUCTURE = "structure.json.gz"
EXECUTION_TRACE = "et.json.gz"
HISTORY = "memory.json"


def profile_name(number: int) -> str:
    """Return the name of the Kineto trace of a capture's profiled step `number`, from 0."""
    return _numbered(PROFILE, number)


def history_name(number: int) -> str:
    """Return the name of the allocator's history of profiled step `number`, from 0."""
    return _numbered(HISTORY, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 0 else name.replace(".", f".{number}.", 1)


def is_capture(directory: Path) -> bool:
    """Return whether a directory holds the files of one rank's capture, with or without its job."""
    return (directory / JOB).exists() or _file(directory, STRUCTURE).exists()


def _file(directory: Path, name: str) -> Path:
    """Return the path of a trace; if only the unzipped file exists, the path of that."""
    plain = directory / name.removesuffix(".gz")
    return plain if plain.exists() and not (directory / name).exists() else directory / name


def convert_directory(directory: Path) -> tuple[Graph, Conversion]:
    """Lower the files that a capture keeps in a directory.

    Raises:
        TraceError: the directory is not a capture, or a file cannot be read or linked.
    """
    job, missing_job = _read_job(directory)
    profiles = 0 if job.device.type == SHAPES_ONLY else _count_profiles(directory)
    uncontended = _file(directory, UNCONTENDED)
    sources = Sources(
        kineto=_file(directory, STRUCTURE),
        et=_file(directory, EXECUTION_TRACE),
        profiles=tuple(_file(directory, profile_name(number)) for number in range(profiles)),
        # A step on shapes alone has no profile, and the history is that of its structure.
        histories=tuple(directory / history_name(number) for number in range(max(1, profiles))),
        uncontended=uncontended if uncontended.exists() else None,
        graphs=directory,
    )
    graph, report = convert(sources, job)
    report.notes.extend(missing_job)
    return (_without_times(graph) if job.device.type == SHAPES_ONLY else graph), report


def _without_times(graph: Graph) -> Graph:
    """Return the graph of a step that ran on shapes alone: its times only order the events."""
    nothing = np.zeros(len(graph), dtype=np.int64)
    evidence = np.full(len(graph), Evidence.NONE, dtype=np.uint8)
    measurement = msgspec.structs.replace(graph.job.measurement, profiled_step_ns=0)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return replace(graph, job=job).with_columns(duration_ns=nothing, evidence=evidence)


def _read_job(directory: Path) -> tuple[Job, list[Note]]:
    """Return the job of a capture, and a note if its file is missing."""
    path = directory / JOB
    # Traces are passed on without the job too: the Kineto trace names world, groups and device.
    if not path.exists() and is_capture(directory):
        return Job(), [
            Note(
                f"{directory} has no {JOB}: world, groups and device come from the Kineto trace; "
                "the time of a step without the profiler is unknown",
                code="job-file-missing",
            )
        ]
    try:
        return msgspec.json.decode(path.read_bytes(), type=Job), []
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f"{directory}: expected the files of `capture run --raw-dir`; {JOB}: {reason}",
            code="raw-directory-incomplete",
        ) from error


def _count_profiles(directory: Path) -> int:
    """Return the number of profiled steps in a directory, numbered from 0 without a gap.

    At least 1: if the first is missing, reading it gives the error that names its file.
    """
    return next(n for n in count(1) if not _file(directory, profile_name(n)).exists())
