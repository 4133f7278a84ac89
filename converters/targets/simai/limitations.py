"""What a SimAI workload cannot express of a step, and caveats on the simulator's figures."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from onerank.converters.targets.simai.layer_times import EMBEDDING, LayerTimes
from onerank.converters.targets.simai.rows import WorkloadRow
from onerank.ir import Job, Kind
from onerank.ir.notes import Note

LARGEST_MESSAGE = 2**31 - 1
"""Largest pp_comm, which SimAI reads as an int."""

# SimAI-Analytical takes the time of smaller messages from a table of fixed latencies.
_SMALL_BYTES = 1 << 20

# Group sizes of that table; other sizes take no time.
_TABLED_SIZES = (2, 4, 8, 16, 32, 64, 128)

# Times up to which float32 is exact.
_EXACT_NS = 1 << 24


def losses_of(
    stages: Sequence[LayerTimes], pipeline: Sequence[Sequence[LayerTimes]], sent_bytes: int
) -> Iterator[str]:
    """Yield the losses of the format, one clause each.

    Args:
        stages: stages of the rank that the file describes.
        pipeline: stages of each rank of the pipeline.
        sent_bytes: bytes that a micro-batch sends to the next stage.
    """
    yield from _lost_of_graphs(stages)
    yield from _lost_communication(stages, sent_bytes)
    yield from _lost_ranks(stages[0].graph.job, pipeline)


def _lost_of_graphs(stages: Sequence[LayerTimes]) -> Iterator[str]:
    """Yield what rows of compute and communication cannot express."""
    edges = sum(len(stage.graph.edges) for stage in stages)
    operations = sum(int(stage.graph.gpu_compute.sum()) for stage in stages)
    yield (
        f"dependencies ({edges} edges) and overlap: a row computes, then communicates, and only "
        "weight-gradient communication can overlap compute"
    )
    yield (
        f"{operations} GPU operations become rows; host time, idle time, memory and FLOPs are "
        "dropped"
    )
    storage_ns = [
        stage.graph.nodes.duration_ns[stage.graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)]
        for stage in stages
    ]
    if reads := sum(map(len, storage_ns)):
        yield (
            f"{reads} reads and writes of storage, which take "
            f"{sum(int(ns.sum()) for ns in storage_ns)} ns"
        )


def _lost_communication(stages: Sequence[LayerTimes], sent_bytes: int) -> Iterator[str]:
    """Yield the calls that the file leaves out, moves to another column or shortens."""
    stage_losses = [stage.losses for stage in stages]
    for reason, calls in sum(
        (losses.calls_lost for losses in stage_losses), Counter[str]()
    ).items():
        size = sum(losses.bytes_lost[reason] for losses in stage_losses)
        yield f"collectives {reason}: {calls}, of {size} bytes per rank"
    for use, calls in sum((losses.moved for losses in stage_losses), Counter[str]()).items():
        yield (
            f"the phase of {calls} collectives ({use}): they are in the weight-gradient column, "
            "the only one with that group"
        )
    if messages := sum(losses.messages for losses in stage_losses):
        yield (
            f"{messages} sends and receives of the pipeline: pp_comm has the {sent_bytes} bytes "
            "that a micro-batch sends"
        )
    if within := [size for losses in stage_losses for size in losses.within_stage]:
        yield (
            f"{len(within)} sends and receives within a stage, as of ring attention, of "
            f"{sum(within)} bytes: SimAI has no such messages"
        )
    if sent_bytes > LARGEST_MESSAGE:
        yield f"pp_comm is {LARGEST_MESSAGE}, its maximum, instead of {sent_bytes} bytes"


def _lost_ranks(job: Job, pipeline: Sequence[Sequence[LayerTimes]]) -> Iterator[str]:
    """Yield how the ranks differ that all replay one file."""
    if len(job.classes) > 1 and len(pipeline) == 1:
        yield (
            f"every rank replays the step of rank {job.rank}; the job has {len(job.classes)} "
            "classes of unequal ranks"
        )
    if len(pipeline) > 1:
        times = [sum(stage.total_ns for stage in of_rank) for of_rank in pipeline]
        yield (
            "every rank runs the stages of the slowest rank; as captured, the ranks of the "
            f"pipeline compute {', '.join(map(str, times))} ns"
        )


def notes_on(stages: Sequence[LayerTimes], rows: Sequence[WorkloadRow]) -> Iterator[Note]:
    """Yield the caveats for the reader of SimAI's figures.

    Args:
        stages: stages of the rank that the file describes.
        rows: rows of the file.
    """
    by_shape = sum(len(stage.split.by_shape) for stage in stages)
    if by_shape:
        unclear = sum(stage.split.unclear_ns for stage in stages)
        yield (
            Note(
                f"The trace records no operands in {by_shape} backwards: GEMMs were assigned to "
                "input and weight gradients by shapes, and all other nodes to input gradients"
                + (f", with {unclear} ns of GEMMs that fit both." if unclear else "."),
                code="gradients-split-by-shapes",
            )
        )
    else:
        yield Note(
            "Input and weight gradients were separated by the operands of each operator.",
            code="gradients-split-by-operands",
        )
    if phaseless := sum(stage.phaseless_ns for stage in stages):
        yield Note(
            f"{phaseless} ns without a phase count as forward.", code="phaseless-counts-as-forward"
        )
    times = np.array([row.times_ns for row in rows], dtype=np.int64)
    rounded = times.astype(np.float32).astype(np.int64) - times
    if rounded.any():
        yield (
            Note(
                f"{int((rounded != 0).sum())} cells over {_EXACT_NS} ns are rounded by SimAI's "
                f"float32; their sum will be {int(rounded.sum()):+d} ns off.",
                code="simai-float32-rounding",
            )
        )
    calls = [call for row in rows for call in row.calls.values()]
    small = sum(call.size_bytes < _SMALL_BYTES for call in calls)
    if small:
        yield (
            Note(
                f"{small} collectives under 1 MiB take a fixed latency in SimAI-Analytical, and no "
                f"time in groups of sizes other than {', '.join(map(str, _TABLED_SIZES))}.",
                code="simai-small-collectives",
            )
        )
    if any(stage.updates.backward for stage in stages):
        yield (
            Note(
                "The optimizer is the first row's weight gradient, since SimAI does not count "
                "update_ns as compute.",
                code="simai-optimizer-row",
            )
        )
        if stages[0].updates.name == EMBEDDING:
            yield Note(
                f"That row is called {EMBEDDING}, so that SimAI excludes it from the bubble.",
                code="simai-embedding-row",
            )
