"""The kernel database: measured durations of calls on a GPU, a table in a parquet file.

One row per call (see `call_key`), GPU, operand layout, cache state and library versions. Merging
databases keeps rows that differ in any of these; of the same call measured twice, the later row
stays.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import polars as pl

from onerank.ir.errors import DatabaseError, first_line
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
        kernel_ns: median uncontended time of each, by the profiler.
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
    return _latest(pl.DataFrame(records, schema=SCHEMA, orient="row"))


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
    try:
        return _checked(table)
    except DatabaseError as error:
        raise DatabaseError(f"{path}: {error}", code="database-malformed") from None


def merge(tables: Sequence[pl.DataFrame]) -> Merged:
    """Merge databases, with the latest row of each identity."""
    joined = pl.concat([*tables, pl.DataFrame(schema=SCHEMA)])
    table = _latest(joined)
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


def _latest(table: pl.DataFrame) -> pl.DataFrame:
    """Return the latest row of each identity, sorted so that the columns compress well."""
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
    _refuse(table, pl.any_horizontal(pl.col(*_required()).is_null()), "a required value is missing")
    _refuse(table, _holes("shapes", "dtypes", "kernels", "kernel_ns"), "a list has a null element")
    _refuse(table, ~pl.col("l2").is_in([COLD, WARM]), f'l2 is neither "{COLD}" nor "{WARM}"')
    _refuse(
        table,
        pl.col("shapes").list.len() != pl.col("dtypes").list.len(),
        "shapes and dtypes differ in length",
    )
    _refuse(
        table,
        (pl.col("kernels").list.len() != pl.col("kernel_ns").list.len())
        | (pl.col("kernels").list.len() == 0),
        "kernels and kernel_ns differ in length, or are empty",
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
    repeated = table.height - table.n_unique(subset=list(IDENTITY)) if table.height else 0
    if repeated:
        raise DatabaseError(
            f"{repeated} rows repeat another's {', '.join(IDENTITY)}; `onerank bench merge` keeps "
            "the latest of each",
            code="database-repeated-rows",
        )
    return table.select(SCHEMA.names())


def _required() -> list[str]:
    return [name for name in SCHEMA if name not in _OPTIONAL]


def _holes(*lists: str) -> pl.Expr:
    return pl.any_horizontal(
        *(pl.col(name).list.eval(pl.element().is_null()).list.any() for name in lists)
    )


def _refuse(table: pl.DataFrame, invalid: pl.Expr, reason: str) -> None:
    rows: Any = table.select(invalid.fill_null(value=False).arg_true()).to_series()
    if len(rows):
        operator = table["operator"][int(rows[0])]
        raise DatabaseError(
            f"row {rows[0]} ({operator}): {reason}; {len(rows)} such rows", code="database-bad-row"
        )
