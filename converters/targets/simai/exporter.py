"""Export graphs as the text of a SimAI workload, with its limitations.

The format is that of SimAI 1.6 (`astra-sim-alibabacloud/astra-sim/workload/Workload.cc` and
`Layer.cc`): one file that every rank replays, forward down its rows and backward up. The
optimizer's time is in the weight-gradient column of an additional first row, because SimAI treats
`update_ns` as a delay after the row's communication and not as compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onerank.converters.expand.pipeline import AXIS, PipelineSchedule
from onerank.converters.expand.pipeline.stages import captured_micro_batch
from onerank.converters.targets.lower_step import even_all_to_alls
from onerank.converters.targets.simai.layer_times import LayerTimes, layer_times
from onerank.converters.targets.simai.limitations import LARGEST_MESSAGE, losses_of, notes_on
from onerank.converters.targets.simai.rows import ModuleRows, WorkloadRow, all_rows
from onerank.display import Displayed
from onerank.ir import Graph, Job, World
from onerank.ir.coarsen import CoarseGranularity
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replace_file

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
        notes: caveats for the reader of the simulator's figures.
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
    notes: list[Note]


def export_simai(
    graphs: Sequence[Graph],
    path: str | Path,
    *,
    schedule: PipelineSchedule | None = None,
    micro_batches: int | None = None,
    granularity: CoarseGranularity = "submodule",
    notes: Sequence[Note] = (),
) -> SimaiExport:
    """Write the workload of a job.

    Args:
        graphs: one graph that represents all ranks, or for a pipeline one per class of equal
            stages.
        path: output file; it appears complete, or not at all.
        schedule: schedule of a pipeline, which determines the stages of a rank.
        micro_batches: micro-batches per step, made by repeating captured ones; None for the
            captured number.
        granularity: scope of a row; without module roles in the trace, each module is a scope.
        notes: caveats on how the graphs were made.

    Raises:
        ExportError: a graph has no GPU time, or the graphs do not form a pipeline.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    if not graphs:
        raise ExportError("no trace is given; expected one or more", code="simai-no-trace")
    evened = [even_all_to_alls(graph, graph.job.world) for graph in graphs]
    captured = [layer_times(graph, granularity) for graph, _ in evened]
    even_notes = dict.fromkeys(note for _, rank_notes in evened for note in rank_notes)
    pipeline = _stages_by_rank(captured, schedule)
    # SimAI has one generic stage. Its step time is that of the slowest rank.
    stages = max(pipeline, key=lambda of_rank: sum(stage.total_ns for stage in of_rank))
    rows, count = _rows(stages, micro_batches)
    world = stages[0].graph.job.world
    # A capture has one stage per rank of its world; with chunks a rank runs several.
    ranks, chunks = world.sizes.get(AXIS, 1) // len(stages), len(stages)
    sent_bytes = max(stage.sent_bytes for stage in captured)
    pp_comm = min(sent_bytes, LARGEST_MESSAGE) if ranks > 1 else 0
    header = f"{_header(world, ranks, chunks, count)} pp_comm: {pp_comm}"
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
        notes=[*notes, *even_notes, *notes_on(stages, rows)],
    )


def _header(world: World, ranks: int, chunks: int, micro_batches: int) -> str:
    """Return the first line of a workload, without the bytes that stages send.

    Args:
        world: of the capture, in which each chunk is a stage.
        ranks: ranks of a pipeline.
        chunks: stages of a rank.
        micro_batches: micro-batches of a step.
    """
    # SimAI crashes (SIGFPE) if the header lacks ep, pp, vpp or ga.
    return (
        f"{POLICY} model_parallel_NPU_group: {world.sizes.get('tp', 1)} ep: {world.ep} "
        f"pp: {ranks} vpp: {chunks} ga: {micro_batches} all_gpus: {world.size // chunks} "
        "checkpoints: 0 checkpoint_initiates: 0"
    )


def _stages_by_rank(
    captured: Sequence[LayerTimes], schedule: PipelineSchedule | None
) -> list[list[LayerTimes]]:
    """Return the stages of each pipeline rank; without a pipeline, of the captured rank."""
    first = captured[0].graph.job
    if len(captured) > 1 and first.pipeline is None:
        raise ExportError(
            f"{len(captured)} traces are given, but a workload of SimAI describes one rank, and "
            f"the trace of rank {first.rank} is not that of a stage of `capture run --pp`\n"
            "  give the trace of the slowest rank alone",
            code="simai-several-ranks",
        )
    if len(captured) > 1 and schedule is None:
        raise ExportError(
            f"{len(captured)} traces are given without --schedule\n"
            "  add the --schedule of the pipeline, or give one trace for all ranks",
            code="simai-schedule-missing",
        )
    if schedule is not None and first.pipeline is None:
        raise ExportError(
            f"--schedule {schedule} is for a pipeline, but the trace of rank {first.rank} is not "
            "that of a stage\n  leave out --schedule",
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
    unrolled: list[list[ModuleRows]] = []
    for number in range(count):
        for stage in stages:
            captured = captured_micro_batch(number, count, len(stage.micro_batches))
            unrolled.append(stage.micro_batches[captured])
    once = [stage.updates for stage in reversed(stages)] + [stage.evaluation for stage in stages]
    return all_rows(once, unrolled), count
