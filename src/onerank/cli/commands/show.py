"""`onerank show`: what a trace holds, as a summary, by module or kernel, or as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import TRACE, UsageError, as_json, reports_errors
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import lines, print_json, say, short_kernel, table, time_or_dash
from onerank.display import flops, size, time
from onerank.export import Granularity
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.breakdown import BreakdownRow
    from onerank.ir import Graph

# Kernels that a table lists; --json has all.
_KERNEL_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The tables that `show` prints."""

    text: bool = option("Print every node in place of the summary.", default=False)
    granularity: Granularity | None = option(
        "Print a table of layers, sub-modules or kernels in place of the summary.", default=None
    )


@click.command()
@click.argument("trace", type=TRACE)
@with_options(ShowOptions)
@as_json
@reports_errors
def show(trace: Path, options: ShowOptions, as_json: bool) -> None:
    """Summarise a trace: time, FLOPs, bytes, memory, communication."""
    from onerank.analysis.summary import summarise
    from onerank.cli.summary_tables import render_summary

    if options.text and (options.granularity or as_json):
        other = "--json" if as_json else "--granularity"
        raise UsageError(f"give --text or {other}, not both", code="show-two-forms")

    graph = _read_even_broken(trace)
    if options.text:
        from onerank.ir.text import to_text

        say(to_text(graph), newline=False)
        return
    if options.granularity:
        _show_parts(graph, options.granularity, title=str(trace), as_json=as_json)
        return
    summary = summarise(graph)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(trace))


def _read_even_broken(trace: Path) -> "Graph":
    """Read a trace; without its invalid dependencies, and with a note, if it has some."""
    import onerank as package
    from onerank.ir.chakra import read_repaired
    from onerank.ir.errors import GraphError

    try:
        return package.read(trace)
    except GraphError as error:
        if error.code != "graph-dangling-edge":
            raise
    # Only here: every other command would compute figures of a graph that lacks dependencies.
    graph, repairs = read_repaired(trace)
    say(
        f"{trace} is broken: {repairs.note.text}; `onerank convert --repair` writes it so", err=True
    )
    return graph


def _show_parts(graph: "Graph", granularity: Granularity, title: str, *, as_json: bool) -> None:
    """Print the share of the step that each layer, sub-module or kernel takes."""
    from onerank.analysis.breakdown import parts

    shares = parts(graph, granularity)
    if as_json:
        print_json(shares)
    else:
        render_parts(shares, granularity, title=title)


def render_parts(parts: "Sequence[BreakdownRow]", granularity: Granularity, title: str) -> None:
    """Print a row per layer; per sub-module, summed over layers; or per kernel."""
    from onerank.analysis.breakdown import merged

    total = sum(part.time_ns for part in parts)
    # The sub-modules of all layers are one table row each; layers and kernels are not merged.
    shown = merged(parts) if granularity == "submodule" else list(parts)
    if granularity == "kernel":
        shown = sorted(shown, key=lambda part: (-part.time_ns, part.name))
    left_out = shown[_KERNEL_ROWS:] if granularity == "kernel" else []
    rows = shown[: len(shown) - len(left_out)]
    _table(
        f"{title}: {time(total)} of compute by {granularity}",
        granularity,
        rows,
        _times(rows, total),
    )
    if any(part.timed_forward_ns is not None for part in rows):
        lines([("", "by events: CUDA events (a clock on a CPU), no profiler, gaps included")])
    _table("Work and memory", granularity, rows, _work(rows))
    if left_out:
        further_ns = sum(part.time_ns for part in left_out)
        lines([("", f"and {len(left_out)} more, {time(further_ns)} (--json has all)")])


# Column heading -> cells.
_Columns = dict[str, list[str]]


def _table(
    title: str, granularity: Granularity, parts: "Sequence[BreakdownRow]", figures: _Columns
) -> None:
    """Print figures next to names and, for modules, their roles and counts."""
    columns: _Columns = {"": [part.name or "(none)" for part in parts]}
    if granularity == "kernel":
        columns[""] = [short_kernel(name) for name in columns[""]]
    else:
        columns["role"] = [part.role for part in parts]
        columns["modules"] = [str(part.instances) for part in parts]
    columns |= figures
    texts = (0,) if granularity == "kernel" else (0, 1)
    table(title, [*columns], [*zip(*columns.values(), strict=True)], texts=texts)


def _times(parts: "Sequence[BreakdownRow]", total_ns: int) -> _Columns:
    columns = {
        "nodes": [str(part.nodes) for part in parts],
        "forward": [time_or_dash(part.forward_ns) for part in parts],
        "backward": [time_or_dash(part.backward_ns) for part in parts],
        "other": [time_or_dash(part.other_ns) for part in parts],
        "share": [f"{part.time_ns / total_ns:.1%}" if total_ns else "-" for part in parts],
    }
    if any(part.timed_forward_ns is not None for part in parts):
        columns["by events: fwd"] = [time(part.timed_forward_ns) for part in parts]
        columns["bwd"] = [time(part.timed_backward_ns) for part in parts]
    return columns


def _work(parts: "Sequence[BreakdownRow]") -> _Columns:
    return {
        "FLOPs": [
            flops(part.flops) + (f" (+{part.without_flops} ?)" if part.without_flops else "")
            for part in parts
        ],
        "bytes": [size(part.bytes) for part in parts],
        "allocated": [size(part.allocated_bytes) for part in parts],
        "freed": [size(part.freed_bytes) for part in parts],
    }
