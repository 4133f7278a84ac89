"""What `onerank bench` did and what a kernel database holds, for people."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onerank.cli.render import counted, lines, table, time

if TYPE_CHECKING:
    from onerank.cli.bench import Benched


def render_benched(done: "Benched") -> None:
    """Print what was measured, and what was not and why."""
    software = ", ".join(f"{name} {one}" for name, one in done.versions.items() if one)
    rows: list[tuple[str, str]] = [
        ("gpu", f"{done.gpu}; {software}"),
        ("measured", f"{done.measured} of {counted(done.asked, 'call')}, {done.rows} rows"),
    ]
    if done.left:
        rows.append(("no time", f"{counted(done.left, 'call')}: give more --minutes"))
    if done.other_kernels:
        rows.append(
            ("differ", f"{counted(done.other_kernels, 'call')} launched other kernels here than in "
             "the trace")
        )  # fmt: skip
    rows += [("failed", f"{count} x {why}") for why, count in done.failed.items()]
    rows += [("left out", f"{counted(n, 'kernel')}: {why}") for why, n in done.left_out.items()]
    rows += [("inner", f"{counted(count, 'call')}: {name}") for name, count in done.inner.items()]
    rows += [("note", note) for note in done.notes]
    lines(rows, done.output)


def render_merged(read: Mapping[str, int], rows: int, replaced: int, output: str) -> None:
    """Print what was merged."""
    told = [("read", f"{path}: {counted(count, 'row')}") for path, count in read.items()]
    lines([*told, ("written", f"{counted(rows, 'row')}; {replaced} gave way to later ones")],
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
