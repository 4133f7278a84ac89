"""Export graphs as the text of a SimAI workload, with its limitations.

The format is that of SimAI 1.6 (`astra-sim-alibabacloud/astra-sim/workload/Workload.cc` and
`Layer.cc`): one file that every rank replays, forward down its rows and backward up. The
optimizer's time stands in the weight-gradient column of a first row of its own, because SimAI
treats `update_ns` as a delay after the row's communication and not as compute.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.converters.expand.pipeline import AXIS, Schedule
from onerank.converters.targets.simai.layer_times import EMBEDDING, Step, step_of
from onerank.converters.targets.simai.workload_rows import Scope, WorkloadRow, all_rows
from onerank.ir import Graph, Kind
from onerank.ir.atomic_write import replace_file
from onerank.ir.coarsen import Grain
from onerank.ir.errors import ExportError

LARGEST_MESSAGE = 2**31 - 1
"""Of pp_comm, which SimAI reads as an int."""

_SMALL_BYTES = 1 << 20

_TABLED_SIZES = (2, 4, 8, 16, 32, 64, 128)

_EXACT_NS = 1 << 24


def losses_of(chosen: Sequence[Step], stages: Sequence[Sequence[Step]], sent: int) -> Iterator[str]:
    """Yield what the file does not say, one sentence each.

    Args:
        chosen: steps whose rows it holds.
        stages: of each rank of the pipeline.
        sent: bytes that a micro-batch sends to the next stage.
    """
    graph = chosen[0].graph
    yield (
        f"dependencies ({len(graph.edges)} edges) and overlap: a row computes, then communicates, "
        "and only what is in the weight-gradient column may be hidden"
    )
    yield (
        f"{int(graph.gpu_compute.sum())} GPU operations become rows; host time, idle time, memory "
        "and FLOPs are left out"
    )
    storage = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    if storage.any():
        yield (
            f"{int(storage.sum())} reads and writes of storage, of "
            f"{int(graph.nodes.duration_ns[storage].sum())} ns"
        )
    of_all = [step.losses for step in chosen]
    for reason, calls in sum((one.calls_lost for one in of_all), Counter[str]()).items():
        size = sum(one.bytes_lost[reason] for one in of_all)
        yield f"collectives {reason}: {calls}, of {size} bytes per rank"
    for what, calls in sum((one.moved for one in of_all), Counter[str]()).items():
        yield (
            f"that {calls} collectives are of the {what} ranks: they stand in the weight-gradient "
            "column, the only one with that group"
        )
    if messages := sum(one.messages for one in of_all):
        yield (
            f"{messages} sends and receives of the pipeline: pp_comm holds the {sent} bytes that a "
            "micro-batch sends on"
        )
    if sent > LARGEST_MESSAGE:
        yield f"pp_comm is {LARGEST_MESSAGE}, the most it can be, for {sent} bytes"
    classes = graph.job.classes
    if len(classes) > 1 and len(stages) == 1:
        yield (
            f"every rank replays the step of rank {graph.job.rank}; the job has {len(classes)} "
            "classes of ranks that do different work"
        )
    if len(stages) > 1:
        times = [sum(step.total_ns for step in own) for own in stages]
        yield (
            "every rank runs the slowest rank's stages; the ranks of the pipeline compute "
            f"{', '.join(map(str, times))} ns as captured"
        )


def notes_on(chosen: Sequence[Step], rows: Sequence[WorkloadRow]) -> Iterator[str]:
    """Yield what a reader of the simulator's figures should know, one sentence each."""
    by_shape = sum(len(step.split.by_shape) for step in chosen)
    if by_shape:
        unclear = sum(step.split.unclear_ns for step in chosen)
        yield (
            f"The trace does not tell which node reads what in {by_shape} backwards: matrix "
            "products were told apart by shapes, all else counts as the input's gradient"
            + (f", {unclear} ns of products that fit both included." if unclear else ".")
        )
    else:
        yield "Input and weight gradients were told apart by what each operator reads and writes."
    if phaseless := sum(step.phaseless_ns for step in chosen):
        yield f"{phaseless} ns of no phase count as forward."
    times = np.array([row.times_ns for row in rows], dtype=np.int64)
    rounded = times.astype(np.float32).astype(np.int64) - times
    if rounded.any():
        yield (
            f"{int((rounded != 0).sum())} cells over {_EXACT_NS} ns lose digits in SimAI's "
            f"float32; its sum will be {int(rounded.sum()):+d} ns off."
        )
    calls = [call for row in rows for call in row.calls.values()]
    small = sum(call.size_bytes < _SMALL_BYTES for call in calls)
    if small:
        yield (
            f"{small} collectives under 1 MiB take a fixed latency in SimAI-Analytical, and no "
            f"time in groups of other sizes than {', '.join(map(str, _TABLED_SIZES))}."
        )
    if any(step.updates.backward for step in chosen):
        yield (
            "The optimizer is the first row's weight gradient: update_ns delays what follows a "
            "communication, and SimAI counts it as no compute."
        )
        if chosen[0].updates.name == EMBEDDING:
            yield f"That row is called {EMBEDDING}, so that it makes no bubble."


POLICY = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        path: the file.
        rank: of the graph whose step it holds; with a pipeline the slowest of the ranks given.
        rows: how many.
        all_gpus: ranks of the job.
        micro_batches: of a step.
        forward_ns: sums of the columns.
        input_gradient_ns: likewise.
        weight_gradient_ns: likewise, without the optimizer.
        optimizer_ns: likewise.
        losses: what the format cannot say, one sentence each.
        notes: sentences a reader of the simulator's figures should know.
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
) -> Export:
    """Write the workload of a job.

    Args:
        graphs: one that represents all ranks; of a pipeline, one per class of equal stages.
        path: file to write; it appears complete, or not at all.
        schedule: of a pipeline; it determines the stages of a rank.
        micro_batches: of a step; None for as many as were captured. Captured ones represent others
            as in `export_ranks` of astra_sim.
        grain: what a row is; without module roles in the trace, each module.
        notes: further notes of the export.

    Raises:
        ExportError: a graph has no GPU time, or does not fit the layout.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    steps = [step_of(graph, grain) for graph in graphs]
    if not steps:
        raise ExportError("no trace was given", code="simai-no-trace")
    stages = _stages(steps, schedule)
    chosen = max(stages, key=lambda own: sum(step.total_ns for step in own))
    rows, count = _rows(chosen, micro_batches)
    world = chosen[0].graph.job.world
    ranks, chunks = world.sizes.get(AXIS, 1) // len(chosen), len(chosen)
    sent = max(step.sent_bytes for step in steps)
    header = (
        f"{POLICY} model_parallel_NPU_group: {world.sizes.get('tp', 1)} ep: {world.ep} "
        f"pp: {ranks} vpp: {chunks} ga: {count} all_gpus: {world.size // chunks} checkpoints: 0 "
        f"checkpoint_initiates: 0 pp_comm: {min(sent, LARGEST_MESSAGE) if ranks > 1 else 0}"
    )
    lines = [header, str(len(rows)), *(row.text() for row in rows)]
    replace_file(Path(path), ("\n".join(lines) + "\n").encode())
    updates = sum(row.weight_ns for step in chosen for row in step.updates.rows())
    forward, inputs, weights = (sum(ns) for ns in zip(*(row.times_ns for row in rows), strict=True))
    return Export(
        path=Path(path),
        rank=chosen[0].graph.job.rank,
        rows=len(rows),
        all_gpus=world.size // chunks,
        micro_batches=count,
        forward_ns=forward,
        input_gradient_ns=inputs,
        weight_gradient_ns=weights - updates,
        optimizer_ns=updates,
        losses=[*losses_of(chosen, stages, sent)],
        notes=[*notes, *notes_on(chosen, rows)],
    )


def _stages(steps: Sequence[Step], schedule: Schedule | None) -> list[list[Step]]:
    """Return the steps of each pipeline rank; without a schedule each step is one rank's."""
    first = steps[0].graph.job
    if len(steps) > 1 and (first.pipeline is None or schedule is None):
        raise ExportError(
            f"{len(steps)} traces are given: several are the stages of a pipeline, and need "
            "--schedule; one trace stands for all ranks otherwise",
            code="simai-schedule-missing",
        )
    if schedule is not None and first.pipeline is None:
        raise ExportError(
            f"--schedule {schedule} is for the stages of a pipeline, and the trace of rank "
            f"{first.rank} is of none: leave it out",
            code="simai-no-pipeline",
        )
    if schedule is None or first.pipeline is None:
        return [[step] for step in steps]
    count = len(first.pipeline.layers)
    of: dict[int, Step] = {}
    captured: set[int] = set()
    for step in steps:
        job = step.graph.job
        if job.rank in captured:
            raise ExportError(
                f"two traces are of rank {job.rank}, of two GPUs perhaps: give one of them",
                code="simai-same-rank",
            )
        captured.add(job.rank)
        if job.pipeline is None or job.world != first.world or job.classes != first.classes:
            raise ExportError(
                f"the traces of ranks {first.rank} and {job.rank} are not of one job: give the "
                "traces of one pipeline",
                code="simai-other-job",
            )
        classes = (rank_class.where.get(AXIS, ()) for rank_class in job.classes)
        alike = next((ones for ones in classes if job.pipeline.stage in ones), ())
        of |= dict.fromkeys(alike, step)
    for step in steps:
        assert step.graph.job.pipeline is not None
        of[step.graph.job.pipeline.stage] = step
    missing = sorted(set(range(count)) - set(of))
    if missing or count % schedule.chunks:
        why = f"no trace stands for the stages {missing}" if missing else (
            f"its {count} stages are no multiple of the {schedule.chunks} per rank"
        )  # fmt: skip
        raise ExportError(
            f"--schedule {schedule} cannot lay out the pipeline: {why}",
            code="simai-schedule-impossible",
        )
    ranks = count // schedule.chunks
    return [
        [of[schedule.stage(ranks, rank, chunk)] for chunk in range(schedule.chunks)]
        for rank in range(ranks)
    ]


def _rows(chosen: Sequence[Step], micro_batches: int | None) -> tuple[list[WorkloadRow], int]:
    captured = max(len(step.micro_batches) for step in chosen)
    count = micro_batches or captured
    unrolled: list[list[Scope]] = []
    for number in range(count):
        for step in chosen:
            unrolled.append(step.micro_batches[_source(number, count, len(step.micro_batches))])
    once = [step.updates for step in reversed(chosen)] + [step.evaluation for step in chosen]
    return all_rows(once, unrolled), count


def _source(micro_batch: int, count: int, captured: int) -> int:
    """Return the captured micro-batch that represents one of `count`; see `Stage.source`."""
    if micro_batch == count - 1 or captured == 1:
        return captured - 1
    return 0 if micro_batch == 0 else 1 + (micro_batch - 1) % max(captured - 2, 1)
