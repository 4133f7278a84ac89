"""`onerank bench`: measure calls into a kernel database, describe the GPU, merge databases.

`onerank bench link` is in `bench_link`.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.commands.bench_link import link
from onerank.cli.common import (
    INPUT,
    OUTPUT,
    POSITIVE,
    TRACE,
    UsageError,
    as_json,
    keep_inputs,
    reports_errors,
)
from onerank.cli.dataclass_to_click import SectionedGroup, with_options
from onerank.cli.terminal import advancing, counted, lines, print_json, table
from onerank.display import time
from onerank.option_fields import option

if TYPE_CHECKING:
    import polars

    from onerank.annotate import Gpu
    from onerank.annotate.kernel_db.database import KernelRow
    from onerank.capture.bench.gpu_limits import Microbenchmarks
    from onerank.capture.bench.measure_call import Measured
    from onerank.capture.bench.requests import BenchRequest
    from onerank.ir.notes import Note


DATABASE = INPUT


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The GPU to measure on."""

    gpu: int = option(
        "CUDA device to measure on.", default=0, type=click.IntRange(0), show_default=True
    )


@dataclass(frozen=True, kw_only=True)
class DescribeOptions(GpuOptions):
    """The description to write, and what it takes from another."""

    output: Path = option("Description to write (TOML).", "-o", "--output", type=OUTPUT)
    base_gpu: str | None = option(
        "Description of the figures that are not measured.  [default: this GPU's]",
        default=None,
        metavar="GPU|FILE",
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(GpuOptions):
    """What to measure, for how long, and the database to write."""

    grid: Literal["training", "power"] | None = option(
        "training: shapes of common models. power: calls from idle to the power limit, two "
        "seconds each, with their power.",
        default=None,
    )
    minutes: float | None = option(
        "Start no call after this time; calls with the most total time come first.",
        default=None,
        type=POSITIVE,
    )
    update: Path | None = option(
        "Skip calls that this database has for this GPU and these libraries; write both.",
        default=None,
        type=DATABASE,
        metavar="DATABASE",
    )
    output: Path = option("Kernel database to write.", "-o", "--output", type=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The database to write."""

    output: Path = option("Kernel database to write.", "-o", "--output", type=OUTPUT)


@dataclass(frozen=True)
class Described:
    """A measured GPU and its description.

    Attributes:
        output: the description that was written.
        gpu: its contents.
        measured: the results of the microbenchmarks.
    """

    output: Path
    gpu: "Gpu"
    measured: "Microbenchmarks"


@dataclass(frozen=True)
class Benched:
    """The result of a benchmark run.

    Attributes:
        output: the database.
        gpu: CUDA's name of the GPU.
        versions: library -> version.
        rows: rows written.
        requested: number of calls to measure.
        measured: calls measured.
        other_kernels: operators of the traces that launched other kernels on this GPU -> calls.
        untried: reason -> number of calls that were not tried.
        failed: reason -> number of calls that could not be measured.
        dropped: reason -> number of the traces' kernels that were not tried.
        inner: operators whose kernels another operator launches -> calls.
        notes: statements on the run.
    """

    output: str
    gpu: str
    versions: dict[str, str]
    rows: int
    requested: int
    measured: int
    other_kernels: dict[str, int]
    untried: dict[str, int]
    failed: dict[str, int]
    dropped: dict[str, int]
    inner: dict[str, int]
    notes: "tuple[Note, ...]"


@dataclass(frozen=True)
class MergedFiles:
    """A kernel database made from several.

    Attributes:
        output: the database that was written.
        rows: rows written.
        replaced: rows left out, because a later database measured the same call.
        read: database -> its rows.
    """

    output: Path
    rows: int
    replaced: int
    read: dict[str, int]


@dataclass(frozen=True)
class StoredOperator:
    """The calls of one operator in a kernel database.

    Attributes:
        gpu: CUDA's name of the GPU.
        operator: ATen operator.
        dtype: data type of the first operand.
        calls: distinct calls.
        rows: rows; a call has several if it was measured with several versions of a library.
        shortest_ns: shortest median time of a row.
        longest_ns: longest median time of a row.
        torch: versions of torch, with commas between.
    """

    gpu: str
    operator: str
    dtype: str
    calls: int
    rows: int
    shortest_ns: int
    longest_ns: int
    torch: str


@click.command()
@with_options(DescribeOptions)
@as_json
@reports_errors
def describe(options: DescribeOptions, as_json: bool) -> None:
    """Measure the rates and the power of the GPU, and write its description.

    Measures GEMMs in each data type, a copy, the cache, the launch floor, idle power and the
    coefficients of the power model in about two minutes. `annotate --target FILE` reads the
    description.
    """
    from datetime import UTC, datetime

    from onerank.annotate.describe_gpu import described, to_toml
    from onerank.annotate.gpus.registry import find_gpu, load_gpu
    from onerank.capture.bench.bench_runner import Bench, on_device, versions
    from onerank.capture.bench.gpu_limits import COUNT, microbenchmarks
    from onerank.ir.errors import TargetError
    from onerank.ir.output_files import replace_file

    with on_device(options.gpu) as device:
        # Figures that no benchmark measures, such as memory size and SM count, come from it.
        base = load_gpu(options.base_gpu) if options.base_gpu else find_gpu(device.name)
        if base is None:
            raise TargetError(
                f"no description ships for {device.name}; its datasheet's figures are needed: "
                "give one with --base-gpu FILE (`onerank gpus --schema` shows its form)",
                code="gpu-no-description",
            )
        runner = Bench(device.torch)
        with advancing(COUNT, "measuring") as advance:
            limits = microbenchmarks(runner, advance)
        board = runner.board
        software = versions(board.driver() if board else "")
    library_versions = ", ".join(f"{name} {text}" for name, text in software.items() if text)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    description = described(
        base,
        limits.sustained,
        {
            "measured_gemm_tflops": limits.gemm_tflops,
            "measured_skinny_gb_per_s": limits.skinny_gb_per_s,
            "measured_copy_gb_per_s": limits.copy_gb_per_s,
            "l2_bandwidth_gb_per_s": limits.cache_gb_per_s,
            "launch_floor_ns": limits.floor_ns,
            "idle_w": limits.idle_w,
            "tdp_w": limits.limit_w,
        },
        f"onerank bench describe on {device.name}, {date}; {library_versions}; CUDA graph replays "
        "on random operands; all calls ran for two seconds except short GEMMs and those of the "
        "mean rates",
        date,
    )
    replace_file(options.output, to_toml(description).encode())
    if as_json:
        print_json(Described(options.output, description, limits))
    else:
        render_described(description, base, limits, str(options.output))


# Seconds between writes of the database: what an aborted run loses at most.
_WRITTEN_EACH_S = 30


class _MeasuresByDefault(SectionedGroup):
    """A group whose default subcommand is `measure`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # `onerank bench trace.et -o k.parquet`: the first argument is a trace or an option.
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["measure", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_MeasuresByDefault)
def bench() -> None:
    """Measure kernels on the GPU: `onerank bench TRACE... -o FILE`, or a subcommand."""


bench.add_command(describe)
bench.add_command(link)


@bench.command()
@click.argument("traces", nargs=-1, type=TRACE, metavar="[TRACE]...")
@with_options(MeasureOptions)
@as_json
@reports_errors
def measure(traces: tuple[Path, ...], options: MeasureOptions, as_json: bool) -> None:
    """Measure every distinct call of the TRACEs, or of a grid, on the GPU.

    Times are those of CUDA graph replays on random operands, after the clocks have settled. Rows
    are written every half minute.
    """
    if not traces and options.grid is None:
        raise UsageError(
            "give traces, or --grid training or power, or both", code="bench-nothing-to-measure"
        )
    output, update = options.output, options.update
    # --update may be the output: its rows are read first, and written with the new ones.
    keep_inputs(output, *traces)
    from onerank.annotate.kernel_db.database import read_database, table_of
    from onerank.capture.bench.bench_runner import child_on, measure_isolated, on_device, versions
    from onerank.capture.bench.measure_call import Account
    from onerank.capture.profiling.nvml import Board
    from onerank.ir.notes import Note

    requests, dropped = _calls_to_measure(traces, options.grid)
    stored = read_database(update) if update else table_of([])
    writer = _RowWriter(stored, output)
    account = Account(requested=len(requests))
    with on_device(options.gpu) as device:
        board = Board()
        software = versions(board.driver())
        notes = [Note(board.missing, code="sensors-not-read")] if board.missing else []
        if update:
            requested = len(requests)
            requests = lacking(requests, stored, device.name, software)
            skipped = f"{counted(requested - len(requests), 'call')} skipped: {update} has them"
            notes.append(Note(skipped, code="bench-calls-known"))
            account.requested = len(requests)
        seconds = 60 * options.minutes if options.minutes else float("inf")
        with advancing(len(requests), "measuring") as advance:
            # Calls run in a child process, because a kernel can end its process.
            child = child_on(device.torch)
            measurements = measure_isolated(
                requests, account, child, seconds=seconds, advance=advance
            )
            rows = (_row(measurement, device.name, software) for measurement in measurements)
            # Closing ends the child process at once when this one is interrupted.
            with contextlib.closing(measurements):
                notes += writer.add_all(rows)
    done = Benched(
        output=str(output),
        gpu=device.name,
        versions=software,
        rows=writer.write(),
        requested=account.requested,
        measured=account.done,
        other_kernels=dict(account.other_kernels.most_common()),
        untried=dict(account.untried),
        failed=dict(account.failed.most_common()),
        dropped=dropped,
        inner=dict(account.inner.most_common()),
        notes=tuple(notes),
    )
    print_json(done) if as_json else render_benched(done)


class _RowWriter:
    """Collects measured rows, and writes them with the stored ones every half minute.

    Args:
        stored: rows of earlier runs.
        output: the database to write.

    Attributes:
        rows: the measured rows.
    """

    def __init__(self, stored: "polars.DataFrame", output: Path) -> None:
        self.rows: list[KernelRow] = []
        self._stored = stored
        self._output = output
        self._written_s = monotonic()

    def add(self, row: "KernelRow") -> None:
        """Collect a row; write all if the last time is long ago."""
        self.rows.append(row)
        if monotonic() > self._written_s + _WRITTEN_EACH_S:
            self.write()

    def add_all(self, rows: "Iterable[KernelRow]") -> "list[Note]":
        """Collect rows until they end or the user interrupts; return a note on an interruption.

        Raises:
            CaptureError: a row could not be measured; those before are written.
        """
        from onerank.ir.errors import CaptureError
        from onerank.ir.notes import Note

        try:
            for row in rows:
                self.add(row)
        except KeyboardInterrupt:
            text = "interrupted: the rows measured until then were written"
            return [Note(text, code="bench-interrupted")]
        except CaptureError as error:
            if not self.rows:
                raise
            # A run takes hours; an error in its last call must not lose the others.
            self.write()
            saved = f"the {len(self.rows)} rows measured until then are in {self._output}"
            raise CaptureError(f"{error}; {saved}", code=error.code) from error
        return []

    def write(self) -> int:
        """Write all rows; return their number."""
        from onerank.annotate.kernel_db.database import merge, table_of, write_database

        # New rows come last, because `merge` keeps the later of two equal calls.
        table = merge([self._stored, table_of(self.rows)]).table
        write_database(table, self._output)
        self._written_s = monotonic()
        return len(table)


def _calls_to_measure(
    traces: Sequence[Path], grid: str | None
) -> "tuple[list[BenchRequest], dict[str, int]]":
    """Return the distinct calls to measure, and reason -> kernels of the traces without a call."""
    import onerank
    from onerank.capture.bench.requests import power_grid, trace_requests, training_grid
    from onerank.ir.errors import CaptureError

    requests: dict[Any, BenchRequest] = {}
    dropped: dict[str, int] = {}
    for path in traces:
        plan = trace_requests(onerank.read(path))
        if not plan.requests:
            raise CaptureError(
                f"{path}: no GPU operation has an operator with recorded arguments; expected a "
                "trace captured on a GPU",
                code="bench-no-operators",
            )
        for request in plan.requests:
            # A call can launch other kernels in another trace: one request has all of them.
            earlier = requests.get(request.layouts)
            kernels = request.kernels | earlier.kernels if earlier else request.kernels
            requests[request.layouts] = dataclasses.replace(request, kernels=kernels)
        for why, count in plan.dropped.items():
            dropped[why] = dropped.get(why, 0) + count
    if grid is not None:
        for request in training_grid() if grid == "training" else power_grid():
            # A trace's request stays: it also names the kernels to compare with.
            requests.setdefault(request.layouts, request)
    return list(requests.values()), dropped


def lacking(
    requests: "list[BenchRequest]", database: "polars.DataFrame", gpu: str, versions: dict[str, str]
) -> "list[BenchRequest]":
    """Return the requests without a row in the database for this GPU and these versions."""
    import polars

    from onerank.annotate.kernel_db.calls import CallKey, call_key, canonical
    from onerank.annotate.kernel_db.database import rows_of

    # Another version of a library runs another kernel for the same call.
    same = [polars.col(name) == value for name, value in {"gpu": gpu, **versions}.items()]
    measured_kernels: dict[tuple[CallKey | None, str], set[str]] = {}
    for row in rows_of(database.filter(same)):
        measured_kernels.setdefault((row.key, row.layout), set()).update(row.kernels)

    # The trace does not record layouts, which decide between kernels: a call is known only if a row
    # ran a kernel of the trace.
    def is_known(request: "BenchRequest") -> bool:
        kernel_sets = (
            measured_kernels.get(
                (call_key(call.op, *call.texts(), tf32=call.tf32), canonical(call.layout()))
            )
            for call in request.layouts
        )
        return any(
            kernels and (not request.kernels or request.kernels & kernels)
            for kernels in kernel_sets
        )

    return [request for request in requests if not is_known(request)]


def _row(measurement: "Measured", gpu: str, versions: dict[str, str]) -> "KernelRow":
    from onerank.annotate.kernel_db.calls import call_key, canonical
    from onerank.annotate.kernel_db.database import KernelRow as Row
    from onerank.annotate.kernel_db.node_durations import at_settled_clock

    key = call_key(measurement.call.op, *measurement.call.texts())
    assert key is not None, f"{measurement.call.op} has no key"
    median = measurement.timing.median_ns
    row = Row(
        gpu=gpu,
        operator=key.operator,
        shapes=key.shapes,
        dtypes=key.dtypes,
        attributes=key.attributes,
        layout=canonical(measurement.call.layout()),
        kernels=measurement.launched.names,
        kernel_ns=measurement.launched.times_ns,
        median_ns=median,
        p10_ns=measurement.timing.p10_ns,
        p90_ns=measurement.timing.p90_ns,
        samples=measurement.timing.samples,
        l2=measurement.l2,
        sm_clock_mhz=measurement.sm_clock_mhz,
        power_w=measurement.power_w,
        temperature_c=measurement.temperature_c,
        # W x ns is 1e-9 J, and 1e-6 mJ.
        energy_mj=measurement.power_w * median * 1e-6 if measurement.power_w else None,
        **versions,
        date=measurement.date,
    )
    return at_settled_clock(row)


@bench.command("merge")
@click.argument("databases", nargs=-1, required=True, type=DATABASE)
@with_options(MergeOptions)
@as_json
@reports_errors
def merge_databases(databases: tuple[Path, ...], options: MergeOptions, as_json: bool) -> None:
    """Merge databases; of two rows of the same call the later one stays."""
    from onerank.annotate.kernel_db.database import merge, read_database, write_database

    tables = [read_database(path) for path in databases]
    merged = merge(tables)
    write_database(merged.table, options.output)
    counts = {str(path): len(table) for path, table in zip(databases, tables, strict=True)}
    done = MergedFiles(options.output, len(merged.table), merged.replaced, counts)
    print_json(done) if as_json else render_merged(done)


@bench.command()
@click.argument("database", type=DATABASE)
@as_json
@reports_errors
def show(database: Path, as_json: bool) -> None:
    """Show the contents of a database: GPUs, operators, data types, calls, times."""
    from onerank.annotate.kernel_db.database import contents, read_database

    operators = [StoredOperator(**row) for row in contents(read_database(database)).to_dicts()]
    print_json(operators) if as_json else render_contents(operators, str(database))


def render_benched(done: Benched) -> None:
    """Print the number of measured calls, and the other calls with their reasons."""
    software = ", ".join(f"{name} {version}" for name, version in done.versions.items() if version)
    rows: list[tuple[str, str]] = [
        ("gpu", f"{done.gpu}; {software}"),
        ("measured", f"{done.measured} of {counted(done.requested, 'call')}, {done.rows} rows"),
    ]
    rows += [("untried", f"{counted(n, 'call')}: {why}") for why, n in done.untried.items()]
    if done.other_kernels:
        operators = ", ".join(f"{count} x {op}" for op, count in done.other_kernels.items())
        rows.append(
            ("differ", f"launched other kernels on this GPU than in the trace: {operators}")
        )
    rows += [("failed", f"{count} x {why}") for why, count in done.failed.items()]
    rows += [("dropped", f"{counted(n, 'kernel')}: {why}") for why, n in done.dropped.items()]
    rows += [("inner", f"{counted(count, 'call')}: {name}") for name, count in done.inner.items()]
    rows += [("note", str(note)) for note in done.notes]
    lines(rows, done.output)


def render_merged(done: MergedFiles) -> None:
    """Print the databases that were read, and the rows that were written."""
    files = [("read", f"{path}: {counted(count, 'row')}") for path, count in done.read.items()]
    written = f"{counted(done.rows, 'row')}; {done.replaced} were replaced by later ones"
    lines([*files, ("written", written)], str(done.output))


def render_contents(operators: Sequence[StoredOperator], title: str) -> None:
    """Print a table of operators."""
    columns = ("gpu", "operator", "dtype", "calls", "rows", "shortest", "longest", "torch")
    rows = [
        (
            *(row.gpu, row.operator, row.dtype, row.calls, row.rows),
            *(time(row.shortest_ns), time(row.longest_ns), row.torch),
        )
        for row in operators
    ]
    table(title, columns, rows, texts=(0, 1, 2, 7))


def render_described(
    description: "Gpu", base: "Gpu", limits: "Microbenchmarks", output: str
) -> None:
    """Print the measured figures next to those of the base description."""
    rows = [
        (name, f"{figure.value:g}", _before(base, name))
        for name, figure in description.figures.items()
        if figure.source == "bench"
    ]
    table(f"{output}: {description.name}", ("figure", "measured", base.name), rows)
    sustained = [
        (call.unit or "memory", " x ".join(map(str, call.sizes)), time(call.median_ns),
         f"{call.flops / call.median_ns / 1e3:.0f}", f"{call.nbytes / call.median_ns:.0f}",
         f"{call.power_w:.0f}" if call.power_w else "-", call.sm_clock_mhz or "-")
        for call in limits.sustained
    ]  # fmt: skip
    columns = ("unit", "m x n x k", "time", "TFLOPS", "GB/s", "W", "MHz")
    table("sustained calls", columns, sustained, texts=(0, 1))
    lines([(f"no {unit}", why) for unit, why in limits.refused.items()])


def _before(gpu: "Gpu", name: str) -> str:
    figure = gpu.figures.get(name)
    return "-" if figure is None else f"{figure.value:g}"
