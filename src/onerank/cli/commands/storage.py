"""`onerank storage`: a trace with nodes that read a batch and write a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    BYTES,
    GB_PER_S,
    TRACE,
    TRACE_OUTPUT,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import lines, print_json
from onerank.display import size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.ir import Graph
    from onerank.ir.notes import Note


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """What a rank reads and writes, and its bandwidth."""

    output: Path = option("Chakra trace to write.", "-o", "--output", type=TRACE_OUTPUT)
    storage_gb_s: float = option("Storage bandwidth of a rank.", type=GB_PER_S, metavar="GB/S")
    batch_bytes: int = option(
        "Bytes that a rank loads for each step.", default=0, type=BYTES, show_default=True
    )
    checkpoint_every: int | None = option(
        "Steps between two checkpoints.  [default: no checkpoint]",
        default=None,
        type=click.IntRange(1, 2**62),
    )
    checkpoint_bytes: int | None = option(
        "Bytes of a rank's checkpoint.  [default: parameters and optimizer state of the capture]",
        default=None,
        type=BYTES,
    )
    prefetch: bool = option("Let the step wait for its batch.", "--no-prefetch", default=True)


@dataclass(frozen=True)
class StorageNode:
    """A node that reads from storage or writes to it.

    Attributes:
        name: name of the node.
        kind: kind of the node.
        bytes: bytes read or written.
        duration_ns: duration of the node.
    """

    name: str
    kind: str
    bytes: int
    duration_ns: int


@dataclass(frozen=True)
class StorageAdded:
    """The storage nodes of a trace.

    Attributes:
        output: the trace that was written.
        nodes: nodes that were added.
        notes: what was assumed.
    """

    output: Path
    nodes: list[StorageNode]
    notes: "tuple[Note, ...]"


@click.command()
@click.argument("trace", type=TRACE)
@with_options(StorageOptions)
@as_json
@reports_errors
def storage(trace: Path, options: StorageOptions, as_json: bool) -> None:
    """Add the reading of a batch and a step's share of a checkpoint to TRACE."""
    from onerank.annotate.passes.storage_nodes import StorageTraffic, with_storage

    keep_inputs(options.output, trace)
    before = read_trace(trace)
    traffic = StorageTraffic(
        gb_per_s=options.storage_gb_s,
        batch_bytes=options.batch_bytes,
        checkpoint_every=options.checkpoint_every or 0,
        checkpoint_bytes=options.checkpoint_bytes,
        prefetch=options.prefetch,
    )
    after = with_storage(before, traffic)
    after.write(options.output)
    nodes = [_storage_node(after, index) for index in range(len(before), len(after))]
    # `read_trace` has printed those of the trace.
    notes = after.job.measurement.notes[len(before.job.measurement.notes) :]
    if as_json:
        print_json(StorageAdded(options.output, nodes, notes))
    else:
        pairs = [(node.name, f"{size(node.bytes)} in {time(node.duration_ns)}") for node in nodes]
        pairs += [("note", str(note)) for note in notes]
        lines(pairs, f"{trace} -> {options.output}")


def _storage_node(graph: "Graph", index: int) -> StorageNode:
    node = graph.node(index)
    # A node reads or writes; the other figure is unknown, -1.
    moved_bytes = max(node.value("bytes_read"), node.value("bytes_written"))
    return StorageNode(node.name, node.kind.name.lower(), moved_bytes, node.duration_ns)
