"""Export graphs as the text of a SimAI workload, with its limitations.

The format is that of SimAI 1.6 (`astra-sim-alibabacloud/astra-sim/workload/Workload.cc` and
`Layer.cc`): one file that every rank replays, forward down its rows and backward up. The
optimizer's time is in the weight-gradient column of an additional first row, because SimAI treats
`update_ns` as a delay after the row's communication and not as compute.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.converters.expand.pipeline import AXIS, Schedule
from onerank.converters.targets.simai.layer_times import EMBEDDING, LayerTimes, layer_times
from onerank.converters.targets.simai.workload_rows import Scope, WorkloadRow, all_rows
from onerank.display import Displayed
from onerank.ir import Graph, Job, Kind
from onerank.ir.coarsen import Grain
from onerank.ir.errors import ExportError
from onerank.ir.output_files import replace_file

LARGEST_MESSAGE = 2**31 - 1
"""Largest pp_comm, which SimAI reads as an int."""

_SMALL_BYTES = 1 << 20
"""SimAI-Analytical takes the time of smaller messages from a table of fixed latencies."""

_TABLED_SIZES = (2, 4, 8, 16, 32, 64, 128)
"""Group sizes of that table; other sizes take no time."""

_EXACT_NS = 1 << 24
"""Times up to which float32 is exact."""


def losses_of(
    stages: Sequence[LayerTimes], pipeline: Sequence[Sequence[LayerTimes]], sent_bytes: int
) -> Iterator[str]:
    """Yield the losses of the format, one clause each.

    Args:
        stages: stages of the rank that the file describes.
        pipeline: stages of each rank of the pipeline.
        sent_bytes: bytes that a micro-batch sends to the next stage.
    """
    graph = stages[0].graph
    yield (
        f"dependencies ({len(graph.edges)} edges) and overlap: a row computes, then communicates, "
        "and only weight-gradient communication can overlap compute"
    )
    yield (
        f"{int(graph.gpu_compute.sum())} GPU operations become rows; host time, idle time, memory "
        "and FLOPs are dropped"
    )
    storage = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    if storage.any():
        yield (
            f"{int(storage.sum())} reads and writes of storage, which take "
            f"{int(graph.nodes.duration_ns[storage].sum())} ns"
        )
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
    if sent_bytes > LARGEST_MESSAGE:
        yield f"pp_comm is {LARGEST_MESSAGE}, its maximum, instead of {sent_bytes} bytes"
    classes = graph.job.classes
    if len(classes) > 1 and len(pipeline) == 1:
        yield (
            f"every rank replays the step of rank {graph.job.rank}; the job has {len(classes)} "
            "classes of unequal ranks"
        )
    if len(pipeline) > 1:
        times = [sum(stage.total_ns for stage in of_rank) for of_rank in pipeline]
        yield (
            "every rank runs the stages of the slowest rank; as captured, the ranks of the "
            f"pipeline compute {', '.join(map(str, times))} ns"
        )


def notes_on(stages: Sequence[LayerTimes], rows: Sequence[WorkloadRow]) -> Iterator[str]:
    """Yield the caveats for the reader of SimAI's figures, one sentence each.

    Args:
        stages: stages of the rank that the file describes.
        rows: rows of the file.
    """
    by_shape = sum(len(stage.split.by_shape) for stage in stages)
    if by_shape:
        unclear = sum(stage.split.unclear_ns for stage in stages)
        yield (
            f"The trace records no operands in {by_shape} backwards: GEMMs were assigned to input "
            "and weight gradients by shapes, and all other nodes to input gradients"
            + (f", with {unclear} ns of GEMMs that fit both." if unclear else ".")
        )
    else:
        yield "Input and weight gradients were separated by the operands of each operator."
    if phaseless := sum(stage.phaseless_ns for stage in stages):
        yield f"{phaseless} ns without a phase count as forward."
    times = np.array([row.times_ns for row in rows], dtype=np.int64)
    rounded = times.astype(np.float32).astype(np.int64) - times
    if rounded.any():
        yield (
            f"{int((rounded != 0).sum())} cells over {_EXACT_NS} ns are rounded by SimAI's "
            f"float32; their sum will be {int(rounded.sum()):+d} ns off."
        )
    calls = [call for row in rows for call in row.calls.values()]
    small = sum(call.size_bytes < _SMALL_BYTES for call in calls)
    if small:
        yield (
            f"{small} collectives under 1 MiB take a fixed latency in SimAI-Analytical, and no "
            f"time in groups of sizes other than {', '.join(map(str, _TABLED_SIZES))}."
        )
    if any(stage.updates.backward for stage in stages):
        yield (
            "The optimizer is the first row's weight gradient, since SimAI does not count "
            "update_ns as compute."
        )
        if stages[0].updates.name == EMBEDDING:
            yield f"That row is called {EMBEDDING}, so that SimAI excludes it from the bubble."


POLICY = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"


@dataclass(frozen=True, slots=True, repr=False)
class SimaiExport(Displayed):
    """Contents and limitations of an exported workload.

    Attributes:
        path: the file.
        rank: captured rank whose step is in the file; with a pipeline, that of the first stage of
            the slowest rank.
        rows: number of rows.
        all_gpus: number of ranks of the job.
        micro_batches: micro-batches per step.
        forward_ns: sum of the forward column.
        input_gradient_ns: sum of the input-gradient column.
        weight_gradient_ns: sum of the weight-gradient column without the optimizer.
        optimizer_ns: time of the optimizer.
        losses: losses of the format, one clause each.
        notes: caveats for the reader of the simulator's figures, one sentence each.
    """

    path: Path
    rank: int
    rows: int
    all_gpus: int
    micro_batches: int
    forward_ns: int
    input_gradient_ns: int
    weight_gradient_ns: int
    optimizer_ns: int
    losses: list[str]
    notes: list[str]


def export(
    graphs: Sequence[Graph],
    path: str | Path,
    *,
    schedule: Schedule | None = None,
    micro_batches: int | None = None,
    grain: Grain = "submodule",
    notes: Sequence[str] = (),
) -> SimaiExport:
    """Write the workload of a job.

    Args:
        graphs: one graph that represents all ranks, or for a pipeline one per class of equal
            stages.
        path: output file; it appears complete, or not at all.
        schedule: schedule of a pipeline, which determines the stages of a rank.
        micro_batches: micro-batches per step, made by repeating captured ones; None for the
            captured number.
        grain: scope of a row; without module roles in the trace, each module is one.
        notes: caveats on how the graphs were made.

    Raises:
        ExportError: a graph has no GPU time, or the graphs do not form a pipeline.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    captured = [layer_times(graph, grain) for graph in graphs]
    if not captured:
        raise ExportError("no trace is given; expected one or more", code="simai-no-trace")
    pipeline = _stages_by_rank(captured, schedule)
    # SimAI has one generic stage. Its step time is that of the slowest rank.
    stages = max(pipeline, key=lambda of_rank: sum(stage.total_ns for stage in of_rank))
    rows, count = _rows(stages, micro_batches)
    world = stages[0].graph.job.world
    ranks, chunks = world.sizes.get(AXIS, 1) // len(stages), len(stages)
    sent_bytes = max(stage.sent_bytes for stage in captured)
    header = (
        f"{POLICY} model_parallel_NPU_group: {world.sizes.get('tp', 1)} ep: {world.ep} "
        f"pp: {ranks} vpp: {chunks} ga: {count} all_gpus: {world.size // chunks} checkpoints: 0 "
        f"checkpoint_initiates: 0 pp_comm: {min(sent_bytes, LARGEST_MESSAGE) if ranks > 1 else 0}"
    )
    lines = [header, str(len(rows)), *(row.text() for row in rows)]
    replace_file(Path(path), ("\n".join(lines) + "\n").encode())
    updates = sum(row.weight_ns for stage in stages for row in stage.updates.rows())
    forward, inputs, weights = (sum(ns) for ns in zip(*(row.times_ns for row in rows), strict=True))
    return SimaiExport(
        path=Path(path),
        rank=stages[0].graph.job.rank,
        rows=len(rows),
        all_gpus=world.size // chunks,
        micro_batches=count,
        forward_ns=forward,
        input_gradient_ns=inputs,
        weight_gradient_ns=weights - updates,
        optimizer_ns=updates,
        losses=[*losses_of(stages, pipeline, sent_bytes)],
        notes=[*notes, *notes_on(stages, rows)],
    )


def _stages_by_rank(
    captured: Sequence[LayerTimes], schedule: Schedule | None
) -> list[list[LayerTimes]]:
    """Return the stages of each pipeline rank; without a pipeline, of the captured rank."""
    first = captured[0].graph.job
    if len(captured) > 1 and (first.pipeline is None or schedule is None):
        raise ExportError(
            f"{len(captured)} traces are given without --schedule\n"
            "  add --schedule for the stages of a pipeline, or give one trace for all ranks",
            code="simai-schedule-missing",
        )
    if schedule is not None and first.pipeline is None:
        raise ExportError(
            f"--schedule {schedule} is for a pipeline, and the trace of rank {first.rank} is of no "
            "stage\n  leave out --schedule",
            code="simai-no-pipeline",
        )
    if schedule is None or first.pipeline is None:
        return [[step] for step in captured]
    _check_one_pipeline(captured, first)
    by_stage = _captured_by_stage(captured)
    count = len(first.pipeline.layers)
    missing = sorted(set(range(count)) - set(by_stage))
    if missing or count % schedule.chunks:
        if missing:
            problem = f"the stages {missing} have no trace\n  give a trace for each class of stages"
        else:
            problem = f"{schedule.chunks} stages per rank do not divide its {count} stages"
        raise ExportError(
            f"--schedule {schedule} does not fit the pipeline: {problem}",
            code="simai-schedule-impossible",
        )
    ranks = count // schedule.chunks
    return [
        [by_stage[schedule.stage(ranks, rank, chunk)] for chunk in range(schedule.chunks)]
        for rank in range(ranks)
    ]


def _check_one_pipeline(captured: Sequence[LayerTimes], first: Job) -> None:
    """Check that the graphs are of different ranks of one pipeline."""
    ranks: set[int] = set()
    for stage in captured:
        job = stage.graph.job
        if job.rank in ranks:
            raise ExportError(
                f"two traces are of rank {job.rank}, perhaps for two GPUs\n  give only one of them",
                code="simai-same-rank",
            )
        ranks.add(job.rank)
        if job.pipeline is None or job.world != first.world or job.classes != first.classes:
            raise ExportError(
                f"the traces of ranks {first.rank} and {job.rank} are of different jobs\n"
                "  give the traces of one pipeline",
                code="simai-other-job",
            )


def _captured_by_stage(captured: Sequence[LayerTimes]) -> dict[int, LayerTimes]:
    """Return the graph that represents each stage; a stage's own trace takes precedence."""
    by_stage: dict[int, LayerTimes] = {}
    captured_stages: dict[int, LayerTimes] = {}
    for stage in captured:
        job = stage.graph.job
        assert job.pipeline is not None
        classes = (rank_class.where.get(AXIS, ()) for rank_class in job.classes)
        equal = next((stages for stages in classes if job.pipeline.stage in stages), ())
        by_stage |= dict.fromkeys(equal, stage)
        captured_stages[job.pipeline.stage] = stage
    return by_stage | captured_stages


def _rows(stages: Sequence[LayerTimes], micro_batches: int | None) -> tuple[list[WorkloadRow], int]:
    """Return the rows of a step with all micro-batches unrolled, and the number of these."""
    count = micro_batches or max(len(stage.micro_batches) for stage in stages)
    unrolled: list[list[Scope]] = []
    for number in range(count):
        for stage in stages:
            captured = _source(number, count, len(stage.micro_batches))
            unrolled.append(stage.micro_batches[captured])
    once = [stage.updates for stage in reversed(stages)] + [stage.evaluation for stage in stages]
    return all_rows(once, unrolled), count


def _source(micro_batch: int, count: int, captured: int) -> int:
    """Return the captured micro-batch that represents one of `count`; see `Stage.source`."""
    if micro_batch == count - 1 or captured == 1:
        return captured - 1
    return 0 if micro_batch == 0 else 1 + (micro_batch - 1) % max(captured - 2, 1)
