"""`onerank predict`: single operators on a GPU, without a trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.common import GB_PER_S, OUTPUT, UsageError, as_json, keep_inputs, reports_errors
from onerank.cli.dataclass_to_click import SIZE, SectionedCommand, headings, with_options
from onerank.cli.terminal import evidence, lines, print_json, table
from onerank.display import time
from onerank.option_fields import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onerank.analysis.predict_ops import OpPrediction

GEMM = "GEMM [m, k] x [k, n], and norm of m rows of n"

ATTENTION = "Attention, forward"

ELEMENTWISE = "Elementwise"

COLLECTIVE = "Collective"


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """The operator that `predict` predicts, and the GPU. Each operator needs its own sizes."""

    target: str = option(
        "GPU to predict: a name of `onerank gpus`, or a description.", metavar="GPU|FILE"
    )
    database: tuple[Path, ...] = option(
        "Kernel database of the target, in addition to the shipped ones; may be repeated.",
        default=(),
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
    )
    output: Path | None = option(
        "Table to write (.csv or .parquet): the rows of FILE and their predictions.",
        "-o",
        "--output",
        default=None,
        type=OUTPUT,
    )
    # Choices are spelled out, so that --help loads no model. Tests compare them with the library's.
    dtype: Literal["bf16", "fp16", "fp32", "fp8", "fp4"] | None = option(
        "Data type of the operands; fp8 and fp4 only for GEMMs.  [default: bf16]", default=None
    )
    batch: int | None = option(
        "GEMMs in a batch, or sequences of attention.", default=None, type=SIZE
    )
    m: int | None = option("Rows of the result.", heading=GEMM, default=None, type=SIZE)
    n: int | None = option("Columns of the result.", heading=GEMM, default=None, type=SIZE)
    k: int | None = option("Inner size of a GEMM.", heading=GEMM, default=None, type=SIZE)
    scales: Literal["tensor", "row", "block"] | None = option(
        "Granularity of fp8 scales.  [default: tensor]", heading=GEMM, default=None
    )
    norm: Literal["rms", "layer"] | None = option(
        "Kind of norm.  [default: rms]", heading=GEMM, default=None
    )
    heads: int | None = option("Query heads.", heading=ATTENTION, default=None, type=SIZE)
    kv_heads: int | None = option(
        "Key and value heads.  [default: as --heads]", heading=ATTENTION, default=None, type=SIZE
    )
    seq: int | None = option("Query length.", heading=ATTENTION, default=None, type=SIZE)
    kv_seq: int | None = option(
        "Key length.  [default: as --seq]", heading=ATTENTION, default=None, type=SIZE
    )
    head_dim: int | None = option("Size of a head.", heading=ATTENTION, default=None, type=SIZE)
    causal: bool = option(
        "Attend to all keys, not only to earlier ones.",
        "--no-causal",
        heading=ATTENTION,
        default=True,
    )
    numel: int | None = option(
        "Elements of the result.", heading=ELEMENTWISE, default=None, type=SIZE
    )
    function: Literal["add", "mul", "silu", "gelu", "exp", "copy_"] | None = option(
        "PyTorch's operator.  [default: add]", heading=ELEMENTWISE, default=None
    )
    collective: (
        Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"] | None
    ) = option("Kind of collective.  [default: all_reduce]", heading=COLLECTIVE, default=None)
    nbytes: int | None = option(
        "Input bytes of one rank.", heading=COLLECTIVE, default=None, type=SIZE
    )
    ranks: int | None = option("Ranks of the group.", heading=COLLECTIVE, default=None, type=SIZE)
    busbw_gb_s: float | None = option(
        "Bus bandwidth, as nccl-tests reports it.  [default: the link bandwidth of the "
        "description]",
        heading=COLLECTIVE,
        default=None,
        type=GB_PER_S,
        metavar="GB/S",
    )


_TIMED = (
    ("kernel", "its duration, as a profiler records it"),
    ("call", "from one call to the next in a replayed CUDA graph, as benchmarks time it"),
)

_NOT_SIZES = ("target", "database", "output")


@click.command(cls=SectionedCommand, sections=headings(PredictOptions))
@click.argument("what", metavar="OP|FILE")
@with_options(PredictOptions)
@as_json
@reports_errors
def predict(what: str, options: PredictOptions, as_json: bool) -> None:
    """Predict how long an operator takes on a GPU, without a trace.

    OP is gemm, attention, norm, elementwise or collective; its sizes are options. FILE is a CSV or
    parquet file with a column "op" and a column for each size. An operator is predicted as
    `annotate` predicts those of a CPU capture, with an 80% interval. The time of a collective is
    its wire bytes over the bus bandwidth, as in `onerank replay`, without an interval.
    """
    from dataclasses import asdict

    from onerank.analysis.predict_ops import OPS, names_of_sizes, op_calls, predict_calls

    sizes = {
        name: value
        for name, value in asdict(options).items()
        if name not in _NOT_SIZES and value is not None
    }
    path = None if what in OPS else Path(what)
    # --no-causal has a value in any case.
    if path is not None and len(sizes) > 1:
        raise UsageError(
            "FILE has the sizes: give only --target, --database and --output",
            code="predict-file-and-sizes",
        )
    # A row of a table has columns of other operators; an option of another one is a mistake.
    read = names_of_sizes(what) if path is None else set(sizes)
    unread = [name for name, value in sizes.items() if name not in read and value is not True]
    if unread:
        raise UsageError(
            f"{what} has no {', '.join(unread)}; it reads {', '.join(sorted(read))}",
            code="predict-size-unused",
        )
    if options.output is not None and options.output.suffix not in (".csv", ".parquet"):
        raise UsageError(
            f"--output {options.output} ends neither in .csv nor in .parquet",
            code="predict-output",
        )
    rows: list[dict[str, Any]] = [{"op": what, **sizes}] if path is None else _read(path)
    if options.output is not None:
        keep_inputs(options.output, path, *options.database)
    predictions = predict_calls(op_calls(rows), options.target, databases=options.database)
    if options.output is not None:
        times = ("duration_ns", "p10_ns", "p90_ns", "call_ns", "call_p10_ns", "call_p90_ns")
        columns = (*times, "bound", "evidence")
        predicted_rows = [
            {**row, **{name: getattr(prediction, name) for name in columns}}
            for row, prediction in zip(rows, predictions, strict=True)
        ]
        _write(options.output, predicted_rows)
    if as_json:
        print_json(predictions)
    else:
        _render(predictions)


def _render(predictions: "Sequence[OpPrediction]") -> None:
    """Print predicted operators."""
    rows = [
        (
            f"{p.call.op} {p.call.sizes}",
            p.call.dtype,
            time(p.duration_ns),
            "-" if p.p10_ns is None else f"{time(p.p10_ns)} to {time(p.p90_ns)}",
            "-" if p.call_ns is None else time(p.call_ns),
            p.bound,
            evidence(p.evidence),
        )
        for p in predictions
    ]
    columns = ("", "dtype", "kernel", "80% interval", "call", "bound by", "evidence")
    table(f"On {predictions[0].target}", columns, rows, texts=(0, 1, 5, 6))
    lines(_TIMED)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV or parquet file.

    Raises:
        AnnotateError: the file is neither, is damaged, or has no rows.
        OSError: the file cannot be read.
    """
    import io

    import polars as pl

    from onerank.ir.errors import AnnotateError

    if path.suffix not in (".csv", ".parquet"):
        raise AnnotateError(
            f"{path} is neither an operator nor a .csv or .parquet file\n"
            "  give gemm, attention, norm, elementwise, collective, or such a file",
            code="predict-what",
        )
    # Read here and not by polars, so that a missing file is an OSError with its name.
    data = io.BytesIO(path.read_bytes())
    try:
        table = pl.read_csv(data) if path.suffix == ".csv" else pl.read_parquet(data)
    except (pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise AnnotateError(
            f"{path}: cannot be read as {path.suffix[1:]}: {error}", code="predict-file"
        ) from None
    if table.is_empty():
        raise AnnotateError(
            f"{path}: has no rows\n  give a row for each operator", code="predict-no-rows"
        )
    return table.to_dicts()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as parquet if the name ends in .parquet, else as CSV."""
    import io

    import polars as pl

    from onerank.ir.output_files import replace_file

    # By default polars infers types from the first 100 rows, and a mixed table lacks sizes there.
    table, data = pl.DataFrame(rows, infer_schema_length=None), io.BytesIO()
    table.write_parquet(data) if path.suffix == ".parquet" else table.write_csv(data)
    replace_file(path, data.getvalue())
