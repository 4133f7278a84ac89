"""`capture run --ranks`: write a trace for each captured rank, and show the table of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from onerank.analysis.summary import Summary, summarise
from onerank.cli.commands.convert import render_conversion
from onerank.cli.terminal import counted, lines, print_json, table
from onerank.display import size, time
from onerank.ir.scratch import scratch_directory

if TYPE_CHECKING:
    from onerank.capture import CapturedRanks as RanksOfJob
    from onerank.ir import Graph

_SPANS = 6
"""Runs of ranks in a table cell; --json has all."""


class CapturedRank(msgspec.Struct, frozen=True):
    """One of several captured ranks.

    Attributes:
        rank: the rank that ran.
        represents: all ranks that do the same work, this one included.
        trace: file that was written.
        step_ns: median step without a profiler; for an extrapolated trace, the fitted line's value
            at its depth.
        summary: summary of the trace.
    """

    rank: int
    represents: tuple[int, ...]
    trace: Path
    step_ns: int | None
    summary: Summary


class CapturedRanks(msgspec.Struct, frozen=True):
    """All captured ranks.

    Attributes:
        ranks: one record each.
        missing: ranks that no captured rank represents.
    """

    ranks: list[CapturedRank]
    missing: tuple[int, ...]


def spans(ranks: Sequence[int]) -> str:
    """Return ascending ranks as runs: `0-3, 8-11`; many runs are cut, and the ranks counted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs[:_SPANS]]
    more = f", ... ({counted(len(ranks), 'rank')})" if len(runs) > _SPANS else ""
    return ", ".join(texts) + more


def _render(captured: Sequence[CapturedRank], missing: tuple[int, ...], world: str) -> None:
    rows = [
        (
            rank.rank,
            spans(rank.represents),
            rank.summary.nodes,
            size(rank.summary.peak_memory_bytes) if rank.summary.peak_memory_bytes else "-",
            time(rank.step_ns),
            rank.trace.name,
        )
        for rank in captured
    ]
    columns = ("rank", "represents", "nodes", "peak memory", "step", "trace")
    table(
        f"{counted(len(captured), 'rank')} captured; the world has {world}",
        columns,
        rows,
        texts=(1, 5),
    )
    notes = dict.fromkeys(note for rank in captured for note in rank.summary.notes)
    pairs = [("written to", str(captured[0].trace.parent))] + [("note", note) for note in notes]
    if missing:
        pairs.append(("missing", f"no trace represents the ranks {spans(missing)}: an export to "
                      "all ranks needs them"))  # fmt: skip
    lines(pairs)


def _captured_rank(
    rank: int, represents: tuple[int, ...], trace: Path, graph: "Graph"
) -> CapturedRank:
    depths = graph.job.measurement.depths
    summary = summarise(graph)
    step_ns = depths.step_ns.at_depth if depths else summary.measured_step_ns
    return CapturedRank(rank, represents, trace, step_ns, summary)


def _write_all(graphs: Mapping[Path, "Graph"]) -> None:
    """Write each graph to its file; no file appears before all are written."""
    parent = next(iter(graphs)).absolute().parent
    with scratch_directory(parent) as scratch:
        for path, graph in graphs.items():
            graph.write(scratch / path.name)
        for path in graphs:
            (scratch / path.name).replace(path)


def write_in_turn(done: "RanksOfJob", world: str, output: Path, *, as_json: bool) -> None:
    """Write `NAME.RANK.et` next to `output` for each captured rank, and show a table of them.

    Args:
        done: the captures by rank.
        world: sizes of the world's axes, as text.
        output: path from which the names of the traces are derived.
        as_json: whether to print JSON.
    """
    traces = {rank: output.with_suffix(f".{rank}{output.suffix}") for rank in done.captures}
    _write_all({traces[rank]: capture.graph for rank, capture in done.captures.items()})
    captured = [
        _captured_rank(rank, done.represents[rank], traces[rank], capture.graph)
        for rank, capture in done.captures.items()
    ]
    if as_json:
        print_json(CapturedRanks(captured, done.missing))
    else:
        for rank, capture in done.captures.items():
            render_conversion(capture.conversion, capture.sliced, f"Linked, rank {rank}")
        _render(captured, done.missing, world)
