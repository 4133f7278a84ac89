"""Tables of a benchmark run and of a kernel database."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from onerank.cli.terminal import counted, lines, table
from onerank.display import time

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.capture.bench.gpu_limits import Microbenchmarks


class Benched(msgspec.Struct, frozen=True):
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
    notes: tuple[str, ...]


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
    rows += [("note", note) for note in done.notes]
    lines(rows, done.output)


def render_merged(read: Mapping[str, int], rows: int, replaced: int, output: str) -> None:
    """Print the databases that were read, and the rows that were written."""
    files = [("read", f"{path}: {counted(count, 'row')}") for path, count in read.items()]
    lines([*files, ("written", f"{counted(rows, 'row')}; {replaced} were replaced by later ones")],
          output)  # fmt: skip


def render_contents(summaries: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print a table of operators."""
    columns = ("gpu", "operator", "dtype", "calls", "rows", "shortest", "longest", "torch")
    rows = [
        (summary["gpu"], summary["operator"], summary["dtype"], summary["calls"], summary["rows"],
         time(summary["shortest_ns"]), time(summary["longest_ns"]), summary["torch"])
        for summary in summaries
    ]  # fmt: skip
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
