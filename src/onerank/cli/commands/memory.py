"""`onerank memory`: the peak memory of a step, and whether it fits a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import GIGABYTES, TRACE, as_json, read_trace, reports_errors
from onerank.cli.dataclass_to_click import SIZE, with_options
from onerank.cli.terminal import lines, print_json, table
from onerank.display import size
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.annotate.memory.memory_report import MemoryReport


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The GPU whose memory the step should fit, and the length of the tables."""

    target: str | None = option(
        "GPU that the step should fit: a name of `onerank gpus`, or a description.  [default: the "
        "device of the trace]",
        default=None,
        metavar="GPU|FILE",
    )
    non_allocator_gb: float | None = option(
        "GB of the CUDA context and NCCL, outside the allocator.  [default: the larger of "
        "measurements on H200s and public reports]",
        default=None,
        type=GIGABYTES,
    )
    rows: int = option(
        "Rows of each table; --json has all.", default=12, type=SIZE, show_default=True
    )


@click.command()
@click.argument("trace", type=TRACE)
@with_options(MemoryOptions)
@as_json
@reports_errors
def memory(trace: Path, options: MemoryOptions, as_json: bool) -> None:
    """Show the peak memory of TRACE by class, what the allocator reserves, and whether it fits."""
    import onerank

    other_gb = options.non_allocator_gb
    report = onerank.memory(read_trace(trace), options.target, non_allocator_gb=other_gb)
    if as_json:
        print_json(report)
    else:
        render_memory(report, title=str(trace), rows=options.rows)


def render_memory(report: "MemoryReport", title: str, rows: int) -> None:
    """Print the peak by class, its largest parts, and changes that would make the step fit."""
    lines(_figures(report), title)
    peak = report.peak_bytes
    if report.classes:
        table(
            "Peak by class",
            ("class", "bytes", "share"),
            [
                (name, size(bytes_held), f"{bytes_held / peak:.1%}" if peak else "-")
                for name, bytes_held in sorted(report.classes.items(), key=lambda item: -item[1])
            ],
        )
        table(
            f"Of the step's own blocks at the peak, by module ({_shown(report.modules, rows)})",
            ("module", "class", "blocks", "bytes"),
            [
                (row.module or "(none)", row.memory_class, row.blocks, size(row.bytes))
                for row in report.modules[:rows]
            ],
            texts=(0, 1),
        )
    nodes = sorted(report.nodes, key=lambda node: -node.peak_bytes)
    table(
        f"Nodes with the most live memory ({_shown(nodes, rows)})",
        ("node", "name", "module", "phase", "allocated", "freed", "peak", "live after"),
        [
            (
                *(node.id, node.name, node.module, node.phase),
                *(size(node.allocated_bytes), size(node.freed_bytes)),
                *(size(node.peak_bytes), size(node.live_bytes)),
            )
            for node in nodes[:rows]
        ],
        texts=(1, 2, 3),
    )
    if report.mitigations:
        table(
            f"What would make it fit {report.target}",
            ("change", "fits", "peak", "arithmetic"),
            [
                (
                    mitigation.change,
                    "yes" if mitigation.suffices else "no",
                    size(mitigation.peak_bytes),
                    mitigation.arithmetic,
                )
                for mitigation in report.mitigations
            ],
            texts=(0, 1, 3),
        )


def _figures(report: "MemoryReport") -> list[tuple[str, str]]:
    pairs = [("peak in use", f"{size(report.peak_bytes)}, {size(report.start_bytes)} at the start")]
    if report.measured_peak_bytes:
        error = report.peak_bytes / report.measured_peak_bytes - 1
        pairs.append(("peak of the capture", f"{size(report.measured_peak_bytes)} ({error:+.2%})"))
    if report.early_peak_bytes is not None:
        early = f"up to {size(report.early_peak_bytes)}, when DDP allocates its buckets again"
        pairs.append(("peak of an early step", early))
    if report.peak_node is not None:
        pairs.append(("reached at", f"node {report.peak_node}"))
    if report.simulated_reserved_bytes is not None:
        reserved = f"{size(report.simulated_reserved_bytes)} simulated"
        if report.reserved_bytes:
            error = report.simulated_reserved_bytes / report.reserved_bytes - 1
            reserved = f"{size(report.reserved_bytes)} in the capture, {reserved} ({error:+.2%})"
        pairs.append(("reserved", reserved))
    if report.fragmentation_bytes is not None:
        pairs.append(("fragmentation", f"{size(report.fragmentation_bytes)} reserved, not in use"))
    pairs.append(("classes at the start", report.source))
    if report.non_allocator:
        outside_bytes = sum(buffer.bytes for buffer in report.non_allocator)
        pairs.append(("outside the allocator", size(outside_bytes)))
        pairs += [
            ("", f"{size(buffer.bytes)}  {buffer.what} ({buffer.source})")
            for buffer in report.non_allocator
        ]
    if report.capacity_bytes:
        pairs.append(
            (report.target or "device", f"{size(report.capacity_bytes)}: {_verdict(report)}")
        )
    return pairs + [("note", str(note)) for note in report.notes]


def _verdict(report: "MemoryReport") -> str:
    if report.fits:
        return "fits"
    if report.fits_without_overhead:
        return "fits only without the memory outside the allocator"
    return "does not fit"


def _shown(rows: Sequence[object], limit: int) -> str:
    return f"{min(limit, len(rows))} of {len(rows)}"
