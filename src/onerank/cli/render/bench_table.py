"""Tables of a benchmark run and of a kernel database."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from onerank.cli.render.tables import counted, lines, table, time

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.capture.bench.gpu_limits import Microbenchmarks


class Benched(msgspec.Struct, frozen=True):
    """The result of a benchmark run.

    Attributes:
        output: the database.
        gpu: name as CUDA reports it.
        versions: of the libraries.
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
    """Print what was measured, and what was not and why."""
    software = ", ".join(f"{name} {one}" for name, one in done.versions.items() if one)
    rows: list[tuple[str, str]] = [
        ("gpu", f"{done.gpu}; {software}"),
        ("measured", f"{done.measured} of {counted(done.requested, 'call')}, {done.rows} rows"),
    ]
    rows += [("untried", f"{counted(n, 'call')}: {why}") for why, n in done.untried.items()]
    if done.other_kernels:
        which = ", ".join(f"{count} x {op}" for op, count in done.other_kernels.items())
        rows.append(("differ", f"launched other kernels on this GPU than in the trace: {which}"))
    rows += [("failed", f"{count} x {why}") for why, count in done.failed.items()]
    rows += [("dropped", f"{counted(n, 'kernel')}: {why}") for why, n in done.dropped.items()]
    rows += [("inner", f"{counted(count, 'call')}: {name}") for name, count in done.inner.items()]
    rows += [("note", note) for note in done.notes]
    lines(rows, done.output)


def render_merged(read: Mapping[str, int], rows: int, replaced: int, output: str) -> None:
    """Print what was merged."""
    files = [("read", f"{path}: {counted(count, 'row')}") for path, count in read.items()]
    lines([*files, ("written", f"{counted(rows, 'row')}; {replaced} were replaced by later ones")],
          output)  # fmt: skip


def render_contents(found: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print a table of operators."""
    columns = ("gpu", "operator", "dtype", "calls", "rows", "shortest", "longest", "torch")
    rows = [
        (one["gpu"], one["operator"], one["dtype"], one["calls"], one["rows"],
         time(one["shortest_ns"]), time(one["longest_ns"]), one["torch"])
        for one in found
    ]  # fmt: skip
    table(title, columns, rows, texts=(0, 1, 2, 7))


def render_described(made: "Gpu", known: "Gpu", found: "Microbenchmarks", output: str) -> None:
    """Print the measured figures next to those of the base description."""
    rows = [
        (name, f"{figure.value:g}", _before(known, name))
        for name, figure in made.figures.items()
        if figure.source == "bench"
    ]
    table(f"{output}: {made.name}", ("figure", "measured", known.name), rows)
    held = [
        (one.unit or "memory", " x ".join(map(str, one.sizes)), time(one.median_ns),
         f"{one.flops / one.median_ns / 1e3:.0f}", f"{one.nbytes / one.median_ns:.0f}",
         f"{one.power_w:.0f}" if one.power_w else "-", one.sm_clock_mhz or "-")
        for one in found.sustained
    ]  # fmt: skip
    columns = ("held", "m x n x k", "time", "TFLOPS", "GB/s", "W", "MHz")
    table("calls that were held", columns, held, texts=(0, 1))
    lines([(f"no {unit}", why) for unit, why in found.refused.items()])


def _before(gpu: "Gpu", name: str) -> str:
    figure = gpu.figures.get(name)
    return "-" if figure is None else f"{figure.value:g}"
