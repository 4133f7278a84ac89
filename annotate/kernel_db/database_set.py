"""All available kernel databases: the rows of a GPU, and the row that represents a call.

A row's figure is the profiler's kernel duration, like durations in a trace. It is not the replayed
time: repeating one GEMM throttles a GPU more than a step does, an H200 by 12 to 20%. Replays show
how much samples vary; multiplied by their clocks, they also give the ratio of two sizes of a call
on the GPU that measured the graph (`at_one_clock`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import is_called
from onerank.annotate.kernel_db.call_keys import CallKey
from onerank.annotate.kernel_db.database import KernelRow, merge, read_database, rows_of
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.intervals import HALF_WIDTH
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError

SHIPPED = Path(__file__).parents[1] / "databases"

_MOVES = ("Memset", "Memcpy")


class Match(NamedTuple):
    """The database rows for one kernel of a call on the target.

    Attributes:
        kernel_ns: time of the kernel of this name; nan if the target runs other kernels.
        rest_ns: time of the call's kernels whose names the trace lacks, without copies and fills.
        whole_ns: time of all kernels of the call.
        source_ns: time of the kernel on the GPU that measured the graph; nan without a row.
        spread: standard deviation in ln, of the samples and of the possible layouts.
        rows: rows of the target; each time is a geometric mean over them.
        source: rows of the source, for `source_ns`.
    """

    kernel_ns: float
    rest_ns: float
    whole_ns: float
    source_ns: float
    spread: float
    rows: tuple[KernelRow, ...]
    source: tuple[KernelRow, ...]


@dataclass(frozen=True, slots=True)
class Library:
    """Rows of all available databases.

    Attributes:
        target: rows of the target GPU, by call.
        source: rows of the GPU that measured the graph, by call.
        versions: software of the graph -> version; empty if not recorded.
    """

    target: dict[CallKey, list[KernelRow]]
    source: dict[CallKey, list[KernelRow]]
    versions: Mapping[str, str]

    @property
    def operators(self) -> frozenset[str]:
        """Operators of the target's rows."""
        return frozenset(key.operator for key in self.target)

    def match(self, key: CallKey, kernel: str = "", ran: Collection[str] = ()) -> Match | None:
        """Return the match of a call; None without a row.

        Several rows of one call differ in layout, cache state and versions. The layout is that of
        rows with the kernel's name, first on the source, then on the target; without such rows all
        layouts count. Among rows of one layout and state the graph's versions take precedence, then
        the latest date. A step's operands are partly in the cache, so the result is the geometric
        mean of a cold and a warm row: with operands of 1.6 to 25 MB, cold rows are 3 to 41% above
        captured steps on an H200, warm ones 1 to 13% below
        (`benchmarks/kernel_db_accuracy.py --step`).

        Args:
            key: the call.
            kernel: name of a kernel that the call launched in the graph; "" if not known.
            ran: names of all kernels that it launched in the graph.
        """
        rows = self.target.get(key)
        if not rows:
            return None
        source_rows = self._best([row for row in self.source.get(key, ()) if kernel in row.kernels])
        layouts = {row.layout for row in source_rows}
        likely = [row for row in rows if row.layout in layouts]
        chosen = self._best(likely or [row for row in rows if kernel in row.kernels] or rows)
        chosen_layouts = dict.fromkeys(row.layout for row in chosen)
        layout_ns = [
            _middle([sum(row.kernel_ns) for row in chosen if row.layout == layout])
            for layout in chosen_layouts
        ]
        # Rows that differ in layout and may both be meant add to the spread of the samples.
        samples = max(np.log(row.p90_ns / row.p10_ns) for row in chosen)
        return Match(
            kernel_ns=_middle([_each_ns(row, kernel) for row in chosen]),
            rest_ns=_middle([_rest_ns(row, ran) for row in chosen]),
            whole_ns=_middle([sum(row.kernel_ns) for row in chosen]),
            source_ns=_middle([_each_ns(row, kernel) for row in source_rows]),
            spread=float(
                np.hypot(samples, np.log(max(layout_ns) / min(layout_ns))) / 2 / HALF_WIDTH
            ),
            rows=chosen,
            source=source_rows,
        )

    def _best(self, rows: Iterable[KernelRow]) -> tuple[KernelRow, ...]:
        """Return one row for each layout and cache state, chosen by versions and date."""
        # Ascending, since the dict below keeps the last row of each state.
        ordered = sorted(rows, key=lambda row: (self.ran_with(row), row.date))
        best = {(row.layout, row.l2): row for row in ordered}
        return tuple(best[state] for state in sorted(best))

    def ran_with(self, row: KernelRow) -> bool:
        """Return whether a row was measured with the graph's versions of torch and CUDA."""
        torch, cuda = (self.versions.get(name, "") for name in ("torch", "cuda"))
        return release(torch) == release(row.torch) and cuda in ("", row.cuda)


def _each_ns(row: KernelRow, kernel: str) -> float:
    """Return the mean time of a row's kernels with a name; nan if there is none."""
    times = [time for name, time in zip(row.kernels, row.kernel_ns, strict=True) if name == kernel]
    return sum(times) / len(times) if times else np.nan


def _rest_ns(row: KernelRow, ran: Collection[str]) -> float:
    """Return the time of a row's kernels that are not in `ran`; nan if there is none.

    Copies and fills count only in a row that has nothing else.
    """
    pairs = list(zip(row.kernels, row.kernel_ns, strict=True))
    compute = [pair for pair in pairs if not pair[0].startswith(_MOVES)] or pairs
    return sum(time for name, time in compute if name not in ran) or np.nan


def _middle(times: Sequence[float]) -> float:
    """Return the geometric mean; nan without times, or if a time is nan."""
    return np.nan if not times else float(np.exp(np.mean(np.log(times))))


def release(version: str) -> str:
    """Return a version without its build: "2.11.0" for "2.11.0+cu130"."""
    return version.split("+", 1)[0]


def library_for(
    model: CostModel,
    databases: Sequence[str | Path],
    gpus: tuple[Gpu | None, Gpu],
    graph: Graph,
) -> Library | None:
    """Return the kernel databases' rows of source and target; None if the model needs none.

    Overridden figures of the target do not matter: rows are those of the target as described.

    Raises:
        AnnotateError: databases are given that the model does not look up in, or of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a file cannot be read.
    """
    if databases and not model.looks_up:
        raise AnnotateError(
            f"the {model.name} model does not use kernel databases\n  leave out the database, or "
            "use the auto model",
            code="database-model-ignores",
        )
    source, target = gpus[0], gpus[1].as_described
    # On the GPU that measured the graph, its own times are better than rows of another run.
    if source == target or not model.looks_up:
        return None
    versions = graph.job.measurement.versions
    return open_library([Path(path) for path in databases], target, source, versions)


def open_library(
    given: Sequence[Path],
    target: Gpu,
    source: Gpu | None,
    versions: Mapping[str, str] | None = None,
) -> Library | None:
    """Return the rows of both GPUs in the shipped and the given databases; None without rows.

    Raises:
        DatabaseError: a file is no kernel database.
        AnnotateError: a given file has rows of neither GPU, or no file has rows of the target.
        OSError: a file cannot be read.
    """
    gpus = [target] if source is None else [target, source]
    tables = [read_database(path) for path in _shipped(target) if _has(path, gpus)]
    for path in given:
        table = read_database(path)
        measured_gpus = table["gpu"].unique().sort().to_list()
        if not any(is_called(gpu, name) for gpu in gpus for name in measured_gpus):
            contents = f"measured on {', '.join(measured_gpus)}" if measured_gpus else "empty"
            raise AnnotateError(
                f"{path}: a kernel database {contents}, but the target is {target.name}\n"
                "  leave out the database",
                code="database-other-gpu",
            )
        tables.append(table)
    if not tables:
        return None
    rows = merge(tables).table
    library = Library(_by_call(rows, target), _by_call(rows, source), versions or {})
    if not library.target:
        paths = ", ".join(str(path) for path in given)
        raise AnnotateError(
            f"{paths}: measured only on {gpus[-1].name}; rows of the source need rows of the "
            f"target {target.name}\n  add a database of the target, or leave out this one",
            code="database-source-only",
        )
    return library


def _shipped(target: Gpu) -> list[Path]:
    """Return all shipped databases if one has rows of the target, else none."""
    paths = sorted(SHIPPED.glob("*.parquet"))
    return paths if any(_has(path, [target]) for path in paths) else []


def _has(path: Path, gpus: Sequence[Gpu]) -> bool:
    """Return whether a database has rows of one of the GPUs; reads one column."""
    names = pl.read_parquet(path, columns=["gpu"])["gpu"].unique()
    return any(is_called(gpu, name) for gpu in gpus for name in names)


def _by_call(table: pl.DataFrame, gpu: Gpu | None) -> dict[CallKey, list[KernelRow]]:
    """Return the rows of a GPU by call."""
    names = [name for name in table["gpu"].unique() if gpu is not None and is_called(gpu, name)]
    by_call: dict[CallKey, list[KernelRow]] = {}
    for row in rows_of(table.filter(pl.col("gpu").is_in(names))):
        key = CallKey(row.operator, row.shapes, row.dtypes, row.attributes)
        by_call.setdefault(key, []).append(row)
    return by_call
