"""Capture one rank: run the script, observe its windows, convert the traces to a graph."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from onerank.capture.job_metadata import job_of
from onerank.capture.options import Options
from onerank.capture.parallelize.fewer_layers import Layers
from onerank.capture.parallelize.tensor.slicer import Sliced
from onerank.capture.profiling.profiled_windows import PLAIN_EXECUTION_TRACE
from onerank.capture.profiling.raw_traces import compress, keep
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run_as_rank import run_as_rank
from onerank.converters.sources.kineto import EXECUTION_TRACE, JOB, Conversion, convert_directory
from onerank.ir import Graph


@dataclass(frozen=True)
class Capture:
    """A captured rank: the graph, how it was converted, and what was sliced.

    `layers` tells of a model that was built with fewer layers how many it has, and how they repeat.
    """

    graph: Graph
    conversion: Conversion
    sliced: list[tuple[str, Sliced]]
    layers: Layers | None = None


def capture(
    script: Path, args: Sequence[str], options: Options, progress: Progress = lambda _: None
) -> Capture:
    """Run `script` as one rank of a job that is not there, and lower what was recorded.

    Args:
        script: a training script that steps an optimizer.
        args: the script's own arguments.
        options: what to capture.
        progress: told in a few words what goes on.

    Raises:
        CaptureError: the script cannot be captured as asked.
    """
    with run_as_rank(script, args, options, progress) as rank_run:
        job = job_of(rank_run, options)
        progress("linking the traces")
        raw = rank_run.raw
        compress(raw / PLAIN_EXECUTION_TRACE, raw / EXECUTION_TRACE)
        (raw / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(job)))
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
        graph, conversion = convert_directory(raw)
        return Capture(graph, conversion, rank_run.models.sliced, rank_run.shallow.layers)
