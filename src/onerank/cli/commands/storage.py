"""`onerank storage`: data loading and checkpoints as nodes of a trace."""

from pathlib import Path

import click

from onerank.cli.common import (
    BYTES,
    GBPS,
    TRACE,
    TRACE_OUTPUT,
    as_json,
    keep_inputs,
    print_json,
    reports_errors,
)


@click.command()
@click.argument("trace", type=TRACE)
@click.option("-o", "--output", type=TRACE_OUTPUT, required=True, help="Chakra trace to write.")
@click.option("--storage-gb-s", type=GBPS, required=True,
              metavar="GB/S",
              help="What one rank reads and writes a second.")  # fmt: skip
@click.option("--batch-bytes", type=BYTES, default=0, help="Bytes that a rank loads for each step.")
@click.option("--checkpoint-every", type=click.IntRange(1, 2**62),
              help="Steps between two checkpoints.")  # fmt: skip
@click.option("--checkpoint-bytes", type=BYTES,
              help="Default: parameters and optimizer state of the capture.")  # fmt: skip
@click.option("--no-prefetch", is_flag=True, help="Let the step wait for its batch.")
@as_json
@reports_errors
def storage(
    trace: Path,
    output: Path,
    storage_gb_s: float,
    batch_bytes: int,
    checkpoint_every: int | None,
    checkpoint_bytes: int | None,
    no_prefetch: bool,
    as_json: bool,
) -> None:
    """Add the reading of a batch and a step's share of a checkpoint to TRACE."""
    import onerank
    from onerank.annotate.passes.storage_nodes import Storage, with_storage
    from onerank.cli.render.tables import lines, size, time

    keep_inputs(output, trace)
    before = onerank.read(trace)
    given = Storage(
        gbps=storage_gb_s,
        batch_bytes=batch_bytes,
        checkpoint_every=checkpoint_every or 0,
        checkpoint_bytes=checkpoint_bytes,
        prefetch=not no_prefetch,
    )
    made = with_storage(before, given)
    made.write(output)
    added = [made.node(index) for index in range(len(before), len(made))]
    rows = [
        {
            "name": node.name,
            "kind": node.kind.name.lower(),
            "bytes": max(node.value("bytes_read"), node.value("bytes_written")),
            "duration_ns": node.duration_ns,
        }
        for node in added
    ]
    notes = made.job.measurement.notes[len(before.job.measurement.notes) :]
    if as_json:
        print_json({"output": str(output), "nodes": rows, "notes": notes})
    else:
        pairs = [
            (str(row["name"]), f"{size(float(row['bytes']))} in {time(float(row['duration_ns']))}")
            for row in rows
        ]
        pairs += [("note", note) for note in notes]
        lines(pairs, f"{trace} -> {output}")
