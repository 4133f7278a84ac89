"""Convert the traces of several ranks in a directory, in parallel processes."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from onerank.converters.sources.kineto.capture_directory import JOB, convert_directory, is_capture
from onerank.converters.sources.kineto.convert_rank import Sources, convert
from onerank.converters.sources.kineto.lowering.diagnostics import Conversion
from onerank.converters.sources.kineto.read.json_stream import beginning, kind_of
from onerank.converters.sources.kineto.read.kineto_trace import ALL
from onerank.ir.errors import OneRankError, TraceError
from onerank.ir.output_files import moving_into

# Kineto writes `distributedInfo` before `traceEvents`: the file's beginning is enough.
_RANK_IN_FILE = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_PREFIX = "trace"


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's files.

    Attributes:
        name: name of its Chakra trace, without the suffix.
        sources: its files, or the directory of a capture.
    """

    name: str
    sources: Sources | Path


@dataclass(frozen=True, slots=True)
class Converted:
    """A rank's written Chakra trace, its number of nodes, and the report of its conversion."""

    path: Path
    nodes: int
    report: Conversion


def ranks_in(directory: Path, *, operators: bool = False) -> list[Rank]:
    """Return the ranks whose traces are in a directory, in order.

    The directory contains either directories of captures, or one Kineto trace per rank and an
    execution trace for each of them or for none. The rank comes from the Kineto trace
    (`distributedInfo`), else from the file's name (`rank3`, `worker-3`), else from the last number
    in it. Traces are named as simulators open them, PREFIX.RANK.et; directories without a rank in
    their name keep their name.

    Args:
        directory: the directory.
        operators: as for `Sources`.

    Raises:
        TraceError: there is no trace, two traces are of one rank, the rank of a trace is unknown,
            or only some ranks have an execution trace.
    """
    captures = sorted(path for path in directory.iterdir() if path.is_dir() and is_capture(path))
    if captures:
        names = [_trace_name(path.name) for path in captures]
        if len(set(names)) < len(names):
            # `rank-3` and `worker_3` would both become trace.3.
            names = [path.name for path in captures]
        return [Rank(name, path) for name, path in zip(names, captures, strict=True)]
    kineto, et = _traces_by_rank(directory)
    if not kineto:
        raise TraceError(
            f"{directory}: expected the files of `capture run --raw-dir` ({JOB}), directories of "
            "such files, or a Kineto trace (.json, .json.gz) per rank; found none of these",
            code="traces-not-found",
        )
    if et and set(et) != set(kineto):
        rank = min(set(et) ^ set(kineto))
        present, missing = ("a Kineto trace", "execution trace") if rank in kineto else (
            "an execution trace", "Kineto trace")  # fmt: skip
        raise TraceError(
            f"{directory}: rank {rank} has {present} ({kineto.get(rank) or et[rank]}) and no "
            f"{missing}; add it for every rank, or remove all execution traces",
            code="traces-unpaired",
        )
    return [
        Rank(f"{_PREFIX}.{rank}", Sources(path, et.get(rank), operators=operators))
        for rank, path in sorted(kineto.items())
    ]


def _traces_by_rank(directory: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the Kineto trace and the execution trace of each rank.

    Raises:
        TraceError: two traces are of one rank, or the rank of a trace is unknown.
    """
    kineto: dict[int, Path] = {}
    et: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        if not path.name.endswith((".json", ".json.gz")):
            continue
        head = beginning(path)
        kind = kind_of(head)
        if kind is None:
            continue
        paths = kineto if kind == "kineto" else et
        rank = _rank(path, head)
        if rank in paths:
            raise TraceError(
                f"{paths[rank]} and {path} are both of rank {rank}; expected one Kineto trace and "
                "one execution trace per rank",
                code="traces-same-rank",
            )
        paths[rank] = path
    return kineto, et


def convert_ranks(ranks: list[Rank], output: Path, *, step: str = ALL) -> list[Converted]:
    """Convert every rank to `output/<name>.et`, with one process per core.

    The files are written to a temporary directory and moved when all are complete.

    Args:
        ranks: the ranks.
        output: a directory, created if missing.
        step: step of each trace, as for `convert`.

    Raises:
        TraceError: a rank cannot be converted.
    """
    capture = next((rank.sources for rank in ranks if isinstance(rank.sources, Path)), None)
    if capture is not None and step != ALL:
        raise TraceError(
            f"{capture}: --step {step} does not apply: a capture has one step; omit --step",
            code="step-of-capture",
        )
    workers = min(len(ranks), os.cpu_count() or 1)
    # All ranks or none: an error must leave no partial directory.
    with moving_into(output) as scratch:
        jobs = [(rank, scratch / f"{rank.name}.et", step) for rank in ranks]
        if workers == 1:
            results = [_convert(*job) for job in jobs]
        else:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                results = list(_run_jobs(pool, jobs))
    return [Converted(output / path.name, nodes, report) for path, nodes, report in results]


# A written trace, its number of nodes, and the report of its conversion.
_Result = tuple[Path, int, Conversion]


def _run_jobs(pool: ProcessPoolExecutor, jobs: list[tuple[Rank, Path, str]]) -> Iterator[_Result]:
    """Yield the results in the order of the jobs; cancel waiting jobs after an error."""
    futures = [pool.submit(_convert, *job) for job in jobs]
    try:
        for future in futures:
            yield future.result()
    except (OneRankError, OSError):
        # Waiting ranks would be converted in vain.
        pool.shutdown(cancel_futures=True)
        raise


def _convert(rank: Rank, path: Path, step: str) -> _Result:
    if isinstance(rank.sources, Path):
        graph, report = convert_directory(rank.sources)
    else:
        graph, report = convert(rank.sources, step=step)
    graph.write(path)
    return path, len(graph), report


def _trace_name(directory: str) -> str:
    """Return the name of the trace of a capture's directory: `trace.3` for `rank-3`."""
    match = _RANK_IN_NAME.fullmatch(directory)
    return f"{_PREFIX}.{int(match.group(1))}" if match else directory


def _rank(path: Path, head: bytes) -> int:
    """Return the rank of a trace, from its first bytes, else from its name."""
    if match := _RANK_IN_FILE.search(head):
        return int(match.group(1))
    if match := _RANK_IN_NAME.search(path.name):
        return int(match.group(1))
    numbers = _NUMBER.findall(path.name)
    if not numbers:
        raise TraceError(
            f"{path}: its rank is unknown; expected `distributedInfo` in the trace, or a name like "
            "rank-0.json",
            code="trace-rank-unknown",
        )
    return int(numbers[-1])
