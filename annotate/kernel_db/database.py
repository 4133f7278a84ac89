"""The kernel database: measured durations of calls, read from and written to parquet files.

One row per call (see `call_key`), GPU, operand layout, cache state and library versions. Merging
databases keeps rows that differ in any of these; of the same call measured twice, the later row
stays.

A row's figure is the profiler's kernel duration, like durations in a trace. It is not the replayed
time: repeating one GEMM throttles a GPU more than a step does, an H200 by 12 to 20%. Replays show
how much samples vary; multiplied by their clocks, they also give the ratio of two sizes of a call
on the GPU that measured the graph (`at_one_clock`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import is_called
from onerank.annotate.kernel_db.calls import CallKey, Layout, layout_of_row
from onerank.annotate.models.cost_model import CostModel
from onerank.annotate.models.intervals import HALF_WIDTH
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError, DatabaseError, errors_at, first_line
from onerank.ir.output_files import write_tables

COLD, WARM = "cold", "warm"


class KernelRow(msgspec.Struct, frozen=True):
    """One call, measured on one GPU.

    Attributes:
        gpu: name as CUDA reports it.
        operator: `aten::mm`, as graph nodes name it.
        shapes: of every tensor operand, list elements one by one.
        dtypes: of the same operands: "bfloat16".
        attributes: JSON: other arguments that select the kernel, by position; see `call_key`.
        layout: JSON: properties that a graph does not record: index of an operand in `shapes` ->
            its strides if it is not contiguous, or "host".
        kernels: names of the kernels that one call launched, copies and fills included, in order.
        kernel_ns: median uncontended time of each, by the profiler; see also `at_settled_clock`.
        median_ns: time of one call by CUDA events around replays of a CUDA graph.
        p10_ns: 10th percentile of the samples.
        p90_ns: 90th percentile.
        samples: replays timed.
        l2: "cold": operands are not in the last-level cache; "warm": as much as fits is.
        sm_clock_mhz: read during the replays; None if not available.
        power_w: board power, if the call ran long enough; else None.
        temperature_c: read during the replays.
        energy_mj: energy of one call, idle power included, if `power_w` is known.
        torch: version.
        cuda: version that torch was built for.
        cudnn: version.
        driver: version.
        triton: version; "" for any library that is not installed.
        date: UTC, ISO 8601.
    """

    gpu: str
    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: str
    layout: str
    kernels: tuple[str, ...]
    kernel_ns: tuple[int, ...]
    median_ns: int
    p10_ns: int
    p90_ns: int
    samples: int
    l2: Literal["cold", "warm"]
    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    energy_mj: float | None
    torch: str
    cuda: str
    cudnn: str
    driver: str
    triton: str
    date: str

    @property
    def key(self) -> CallKey:
        """The key of the call."""
        record: dict[str, Any] = msgspec.json.decode(self.layout) if self.layout else {}
        tf32 = bool(record.get("tf32"))
        return CallKey(self.operator, self.shapes, self.dtypes, self.attributes, tf32)


SCHEMA = pl.Schema(
    {
        "gpu": pl.String(),
        "operator": pl.String(),
        "shapes": pl.List(pl.List(pl.Int64)),
        "dtypes": pl.List(pl.String),
        "attributes": pl.String(),
        "layout": pl.String(),
        "kernels": pl.List(pl.String),
        "kernel_ns": pl.List(pl.Int64),
        "median_ns": pl.Int64(),
        "p10_ns": pl.Int64(),
        "p90_ns": pl.Int64(),
        "samples": pl.Int32(),
        "l2": pl.String(),
        "sm_clock_mhz": pl.Int32(),
        "power_w": pl.Float64(),
        "temperature_c": pl.Int32(),
        "energy_mj": pl.Float64(),
        "torch": pl.String(),
        "cuda": pl.String(),
        "cudnn": pl.String(),
        "driver": pl.String(),
        "triton": pl.String(),
        "date": pl.String(),
    }
)
"""Columns of the file, in order: the fields of `KernelRow`."""

CALL = ("operator", "shapes", "dtypes", "attributes")
"""Columns of a call's key."""

# Another version may run another kernel for the same call, so rows of both are kept.
VERSIONS = ("torch", "cuda", "cudnn", "driver", "triton")

IDENTITY = ("gpu", *CALL, "layout", "l2", *VERSIONS)
"""Columns that identify a row: no two rows of a database agree in all of them."""

_OPTIONAL = ("sm_clock_mhz", "power_w", "temperature_c", "energy_mj")


class Merged(NamedTuple):
    """A merged database, and the number of rows that later ones replaced."""

    table: pl.DataFrame
    replaced: int


def table_of(rows: Iterable[KernelRow]) -> pl.DataFrame:
    """Return rows as a table, with the latest row of each identity."""
    records = [msgspec.structs.asdict(row) for row in rows]
    return _latest_rows(pl.DataFrame(records, schema=SCHEMA, orient="row"))


def rows_of(table: pl.DataFrame) -> list[KernelRow]:
    """Return a table as rows."""
    return [msgspec.convert(record, KernelRow) for record in table.iter_rows(named=True)]


def write_database(table: pl.DataFrame, path: Path) -> None:
    """Write a table; the file appears under its name only when complete.

    Raises:
        OSError: the file cannot be written.
    """
    write_tables({path: table}, compression_level=19)


def read_database(path: Path) -> pl.DataFrame:
    """Read a database.

    Raises:
        DatabaseError: the file is not parquet, lacks a column, or has an invalid value.
        OSError: the file cannot be read.
    """
    # Read first, so that an unreadable file raises OSError and polars only reports bad content.
    data = path.read_bytes()
    try:
        table = pl.read_parquet(data)
    # polars panics on some malformed parquet files.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise DatabaseError(
            f"{path}: cannot be read as parquet ({first_line(error)}); expected a kernel "
            "database, as `onerank bench -o` writes it",
            code="database-unreadable",
        ) from None
    with errors_at(path):
        return _checked(table)


def merge(tables: Sequence[pl.DataFrame]) -> Merged:
    """Merge databases, with the latest row of each identity."""
    # `pl.concat` refuses an empty list; the empty table gives it the schema.
    joined = pl.concat([*tables, pl.DataFrame(schema=SCHEMA)])
    table = _latest_rows(joined)
    return Merged(table, len(joined) - len(table))


def contents(table: pl.DataFrame) -> pl.DataFrame:
    """Return the contents of a database: one row for each GPU, operator and dtype.

    Returns:
        gpu, operator, dtype (of the first operand), calls, rows, shortest_ns, longest_ns, torch.
    """
    return (
        table.with_columns(dtype=pl.col("dtypes").list.first(), call=pl.struct(CALL))
        .group_by("gpu", "operator", "dtype")
        .agg(
            calls=pl.col("call").n_unique(),
            rows=pl.len(),
            shortest_ns=pl.col("median_ns").min(),
            longest_ns=pl.col("median_ns").max(),
            torch=pl.col("torch").unique().sort().str.join(", "),
        )
        .sort("gpu", "operator", "dtype")
    )


def _latest_rows(table: pl.DataFrame) -> pl.DataFrame:
    """Return the latest row of each identity, sorted so that the columns compress well."""
    # Reversed before `unique`, so that of rows with equal dates the one read last stays.
    first = table.sort("date", maintain_order=True).reverse()
    kept = first.unique(subset=IDENTITY, keep="first", maintain_order=True)
    ordered = kept.with_columns(size=pl.col("shapes").list.eval(pl.element().list.len()).list.sum())
    return ordered.sort("gpu", "operator", "dtypes", "size", "shapes", "attributes", "layout", "l2",
                        *VERSIONS).drop("size")  # fmt: skip


def _checked(table: pl.DataFrame) -> pl.DataFrame:
    """Validate a table; return it with its columns in the order of `SCHEMA`.

    Raises:
        DatabaseError: a column is missing, unknown or of another type, or a row is invalid.
    """
    missing = [name for name in SCHEMA if name not in table.columns]
    if missing:
        raise DatabaseError(
            f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; a kernel database "
            f"has {', '.join(SCHEMA)}",
            code="database-missing-column",
        )
    unknown = [name for name in table.columns if name not in SCHEMA]
    if unknown:
        raise DatabaseError(
            f"has the unknown column {unknown[0]}; a kernel database has {', '.join(SCHEMA)}",
            code="database-unknown-column",
        )
    for name, kind in SCHEMA.items():
        if table.schema[name] != kind:
            raise DatabaseError(
                f"column {name} holds {table.schema[name]}, expected {kind}",
                code="database-column-type",
            )
    _check_values(table)
    repeated = table.height - table.n_unique(subset=list(IDENTITY)) if table.height else 0
    if repeated:
        raise DatabaseError(
            f"{repeated} rows repeat another's {', '.join(IDENTITY)}; `onerank bench merge` keeps "
            "the latest of each",
            code="database-repeated-rows",
        )
    return table.select(SCHEMA.names())


def _check_values(table: pl.DataFrame) -> None:
    """Refuse a table with a row that lacks a value, or whose values contradict each other.

    Raises:
        DatabaseError: such a row; the message names it.
    """
    null = pl.any_horizontal(pl.col(*_required()).is_null())
    _refuse(table, null, "a required value is missing", "database-null-value")
    holes = _holes("shapes", "dtypes", "kernels", "kernel_ns")
    _refuse(table, holes, "a list has a null element", "database-null-element")
    _refuse(table, ~pl.col("l2").is_in([COLD, WARM]), f'l2 is neither "{COLD}" nor "{WARM}"')
    _refuse(
        table,
        pl.col("shapes").list.len() != pl.col("dtypes").list.len(),
        "shapes and dtypes differ in length",
        "database-list-lengths",
    )
    _refuse(
        table,
        (pl.col("kernels").list.len() != pl.col("kernel_ns").list.len())
        | (pl.col("kernels").list.len() == 0),
        "kernels and kernel_ns differ in length, or are empty",
        "database-list-lengths",
    )
    ordered = (pl.col("p10_ns") <= pl.col("median_ns")) & (pl.col("median_ns") <= pl.col("p90_ns"))
    _refuse(
        table,
        ~ordered | (pl.col("p10_ns") <= 0) | (pl.col("samples") <= 0),
        "expected samples > 0 and 0 < p10_ns <= median_ns <= p90_ns",
    )
    _refuse(table, pl.col("kernel_ns").list.min() <= 0, "kernel_ns must be above 0")
    _refuse(
        table,
        pl.any_horizontal(pl.col(*_OPTIONAL) <= 0),
        f"{', '.join(_OPTIONAL)} must be above 0, or absent",
    )


def _required() -> list[str]:
    return [name for name in SCHEMA if name not in _OPTIONAL]


def _holes(*lists: str) -> pl.Expr:
    return pl.any_horizontal(
        *(pl.col(name).list.eval(pl.element().is_null()).list.any() for name in lists)
    )


def _refuse(
    table: pl.DataFrame, invalid: pl.Expr, reason: str, code: str = "database-bad-value"
) -> None:
    # Only optional columns have nulls here, and those are valid.
    rows: Any = table.select(invalid.fill_null(value=False).arg_true()).to_series()
    if len(rows):
        operator = table["operator"][int(rows[0])]
        raise DatabaseError(
            f"row {rows[0]} ({operator}): {reason}; {len(rows)} such rows", code=code
        )


SHIPPED = Path(__file__).parents[1] / "databases"

# Copies and fills of a call are separate nodes in a trace.
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

    def match(
        self,
        key: CallKey,
        kernel: str = "",
        ran: Collection[str] = (),
        layout: Layout | None = None,
    ) -> Match | None:
        """Return the match of a call; None without a row.

        Several rows of one call differ in layout, cache state and versions. A given layout selects
        among them. Else the layout is that of rows with the kernel's name, first on the source,
        then on the target. Without such rows all layouts count. Among rows of one layout and state
        the graph's versions take precedence, then the latest date. A step's operands are partly in
        the cache, so the result is the geometric mean of a cold and a warm row: with operands of
        1.6 to 25 MB, cold rows are 3 to 41% above captured steps on an H200, warm ones 1 to 13%
        below (`benchmarks/predictions/kernel_db_accuracy.py --step`).

        Args:
            key: the call.
            kernel: name of a kernel that the call launched in the graph; "" if not known.
            ran: names of all kernels that it launched in the graph.
            layout: of the call in the graph; None if not known.
        """
        rows = self.target.get(key)
        if not rows:
            return None
        if layout is not None:
            equal = [row for row in rows if layout_of_row(row.layout, row.shapes) == layout]
            rows = equal or rows
        source_rows = self._best([row for row in self.source.get(key, ()) if kernel in row.kernels])
        layouts = {row.layout for row in source_rows}
        likely = [row for row in rows if row.layout in layouts]
        chosen = self._best(likely or [row for row in rows if kernel in row.kernels] or rows)
        chosen_layouts = dict.fromkeys(row.layout for row in chosen)
        layout_ns = [
            _geometric_mean([sum(row.kernel_ns) for row in chosen if row.layout == layout])
            for layout in chosen_layouts
        ]
        # Rows that differ in layout and may both be meant add to the spread of the samples.
        samples = max(np.log(row.p90_ns / row.p10_ns) for row in chosen)
        return Match(
            kernel_ns=_geometric_mean([_each_ns(row, kernel) for row in chosen]),
            rest_ns=_geometric_mean([_rest_ns(row, ran) for row in chosen]),
            whole_ns=_geometric_mean([sum(row.kernel_ns) for row in chosen]),
            source_ns=_geometric_mean([_each_ns(row, kernel) for row in source_rows]),
            spread=float(
                # Half the range from the 10th to the 90th
                # percentile is `HALF_WIDTH` standard deviations.
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


def _geometric_mean(times: Sequence[float]) -> float:
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
    # On the GPU that measured the graph, its times are better than rows of another run.
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
    # One column shows whether the other 22 have to be read.
    names = pl.read_parquet(path, columns=["gpu"])["gpu"].unique()
    return any(is_called(gpu, name) for gpu in gpus for name in names)


def _by_call(table: pl.DataFrame, gpu: Gpu | None) -> dict[CallKey, list[KernelRow]]:
    """Return the rows of a GPU by call."""
    names = [name for name in table["gpu"].unique() if gpu is not None and is_called(gpu, name)]
    by_call: dict[CallKey, list[KernelRow]] = {}
    for row in rows_of(table.filter(pl.col("gpu").is_in(names))):
        by_call.setdefault(row.key, []).append(row)
    return by_call
