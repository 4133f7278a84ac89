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
    """What the database knows of one kernel of a call on the target.

    Attributes:
        kernel_ns: of the kernel of this name; nan where the target runs others.
        rest_ns: of the operator's own kernels that the trace has none of, for its others to share.
        whole_ns: of all that the call launches.
        source_ns: of the kernel on the GPU that measured the graph; nan where no row has it.
        spread: standard deviation in ln of the samples, and of layouts that may be meant.
        rows: what it is the geometric mean of.
        source: what `source_ns` is the geometric mean of.
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
        """Operators that the target has rows of."""
        return frozenset(key.operator for key in self.target)

    def match(self, key: CallKey, kernel: str = "", ran: Collection[str] = ()) -> Match | None:
        """Return what is known of a call, None where no row is of it.

        Several rows of one call differ in layout, cache state and versions. The layout is that of
        the rows with the kernel's name, on the source, else on the target; where no row has it,
        any. Of one layout and state the graph's versions come first, then the latest. A step's
        operands are partly in the cache: of a cold and a warm row it is the geometric mean (with
        operands of 1.6 to 25 MB, cold rows are 3 to 41% above captured steps on an H200, warm ones
        1 to 13% below: `benchmarks/kernel_db_accuracy.py --step`).

        Args:
            key: the call.
            kernel: name of a kernel that the call launched as the graph was measured; "" where
                none did.
            ran: names of all kernels that it launched then.
        """
        rows = self.target.get(key)
        if not rows:
            return None
        here = self._best([row for row in self.source.get(key, ()) if kernel in row.kernels])
        layouts = {row.layout for row in here}
        likely = [row for row in rows if row.layout in layouts]
        chosen = self._best(likely or [row for row in rows if kernel in row.kernels] or rows)
        every = dict.fromkeys(row.layout for row in chosen)
        each = [
            _middle([sum(row.kernel_ns) for row in chosen if row.layout == one]) for one in every
        ]
        samples = max(np.log(row.p90_ns / row.p10_ns) for row in chosen)
        return Match(
            kernel_ns=_middle([_each_ns(row, kernel) for row in chosen]),
            rest_ns=_middle([_rest_ns(row, ran) for row in chosen]),
            whole_ns=_middle([sum(row.kernel_ns) for row in chosen]),
            source_ns=_middle([_each_ns(row, kernel) for row in here]),
            spread=float(np.hypot(samples, np.log(max(each) / min(each))) / 2 / HALF_WIDTH),
            rows=chosen,
            source=here,
        )

    def _best(self, rows: Iterable[KernelRow]) -> tuple[KernelRow, ...]:
        """Return one row for each layout and cache state, chosen by versions and date."""
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
    """Return the time of a row's kernels with other names, without copies and fills; or nan."""
    pairs = list(zip(row.kernels, row.kernel_ns, strict=True))
    own = [pair for pair in pairs if not pair[0].startswith(_MOVES)] or pairs
    return sum(time for name, time in own if name not in ran) or np.nan


def _middle(times: Sequence[float]) -> float:
    """Return the geometric mean; nan of none, and where one is."""
    return np.nan if not times else float(np.exp(np.mean(np.log(times))))


def release(version: str) -> str:
    """Return `2.11.0` of `2.11.0+cu130`."""
    return version.split("+", 1)[0]


def library_for(
    model: CostModel,
    databases: Sequence[str | Path],
    gpus: tuple[Gpu | None, Gpu],
    graph: Graph,
) -> Library | None:
    """Return the kernel databases' rows of source and target; None where a model needs none.

    Of a target with figures that are set they are those of the target as described.

    Raises:
        AnnotateError: databases are given that the model does not look up in, or of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a file cannot be read.
    """
    if databases and not model.looks_up:
        raise AnnotateError(
            f"the {model.name} model looks nothing up: leave the kernel database out, or the model",
            code="database-model-ignores",
        )
    source, target = gpus[0], gpus[1].as_described
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
    """Return the rows of both GPUs in the shipped databases and the user's; None: there are none.

    Raises:
        DatabaseError: a file is no kernel database.
        AnnotateError: a file given has rows of neither GPU, or none has any of the target.
        OSError: a file cannot be read.
    """
    gpus = [target] if source is None else [target, source]
    tables = [read_database(path) for path in _shipped(target) if _has(path, gpus)]
    for path in given:
        table = read_database(path)
        held = table["gpu"].unique().sort().to_list()
        if not any(is_called(gpu, name) for gpu in gpus for name in held):
            whose = f"measured on {', '.join(held)}" if held else "empty"
            raise AnnotateError(
                f"{path}: a kernel database {whose}, and the target is {target.name}; leave it out",
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
            f"{paths}: measured on {gpus[-1].name} alone, which serves only beside rows of the "
            f"target {target.name}; give a database of it too, or leave it out",
            code="database-source-only",
        )
    return library


def _shipped(target: Gpu) -> list[Path]:
    """Return the shipped databases, if one of them holds the target."""
    every = sorted(SHIPPED.glob("*.parquet"))
    return every if any(_has(path, [target]) for path in every) else []


def _has(path: Path, gpus: Sequence[Gpu]) -> bool:
    """Return whether a database has rows of a GPU; reads one column."""
    names = pl.read_parquet(path, columns=["gpu"])["gpu"].unique()
    return any(is_called(gpu, name) for gpu in gpus for name in names)


def _by_call(table: pl.DataFrame, gpu: Gpu | None) -> dict[CallKey, list[KernelRow]]:
    """Return the rows of a GPU by call."""
    names = [name for name in table["gpu"].unique() if gpu is not None and is_called(gpu, name)]
    found: dict[CallKey, list[KernelRow]] = {}
    for row in rows_of(table.filter(pl.col("gpu").is_in(names))):
        key = CallKey(row.operator, row.shapes, row.dtypes, row.attributes)
        found.setdefault(key, []).append(row)
    return found
