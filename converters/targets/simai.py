"""Export graphs as the text of a SimAI workload, with its limitations.

The format is that of SimAI 1.6 (`astra-sim-alibabacloud/astra-sim/workload/Workload.cc` and
`Layer.cc`): one file that every rank replays, forward down its rows and backward up. The
optimizer's time is in the weight-gradient column of an additional first row, because SimAI treats
`update_ns` as a delay after the row's communication and not as compute.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from onerank.converters.expand.host_delays import REMEDY
from onerank.converters.expand.pipeline import AXIS, PipelineSchedule
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.targets.lower_step import even_all_to_alls
from onerank.converters.targets.simai_rows import (
    Losses,
    ModuleRows,
    Slot,
    SlotAssigner,
    WorkloadRow,
    all_rows,
    leaves_stage,
)
from onerank.display import Displayed
from onerank.ir import Graph, Job, Kind, Node, Phase
from onerank.ir.arrays import Mask
from onerank.ir.coarsen import Grain, scopes_of
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replace_file

_GEMMS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm")

_WEIGHT_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_dense_backward")


@dataclass(slots=True)
class GradientSplit:
    """The nodes that compute weight gradients, and how they were identified.

    Attributes:
        weights: backward nodes of weight gradients, bool[n].
        by_shape: micro-batches split by GEMM shapes, since they have no recorded operands.
        unclear_ns: time of GEMMs whose shapes are ambiguous; counted as input gradient.
    """

    weights: Mask
    by_shape: list[int] = field(default_factory=list[int])
    unclear_ns: int = 0


def split_gradients(graph: Graph, order: list[int]) -> GradientSplit:
    """Split every backward of a step into input and weight gradients.

    If the trace records operands, the input gradient consists of all nodes that the embedding's
    gradient, or the gradient sent to another stage, depends on. Otherwise a GEMM whose output has
    the shape of a weight of its module computes that weight's gradient.

    Args:
        graph: one rank's step.
        order: its GPU and communication nodes, in topological order.
    """
    split = GradientSplit(np.zeros(len(graph), dtype=bool))
    backwards: defaultdict[int, list[int]] = defaultdict(list)
    in_backward = (graph.nodes.phase == Phase.BACKWARD).tolist()
    micro_batch = graph.nodes.micro_batch.tolist()
    for index in order:
        if in_backward[index]:
            backwards[max(micro_batch[index], 0)].append(index)
    shapes: dict[str, set[tuple[int, ...]]] | None = None
    for number, block in backwards.items():
        try:
            _, weights = split_backward(graph, block)
        except ExportError:
            # The trace records no operands, or no gradient leaves the backward.
            shapes = _weight_shapes(graph, order) if shapes is None else shapes
            weights, unclear_ns = _split_by_shape(graph, block, shapes)
            split.by_shape.append(number)
            split.unclear_ns += unclear_ns
        split.weights[weights] = True
    return split


def _split_by_shape(
    graph: Graph, block: list[int], shapes: dict[str, set[tuple[int, ...]]]
) -> tuple[list[int], int]:
    """Return the nodes of weight gradients, and the time of GEMMs that could be either gradient."""
    weights: list[int] = []
    unclear_ns = 0
    for index in block:
        node = graph.node(index)
        operator = _operator(node)
        if operator in _WEIGHT_GRADIENTS or "wgrad" in node.name.lower():
            weights.append(index)
        if operator not in _GEMMS:
            continue
        # The weight's gradient has the weight's shape; the input's gradient reads the weight.
        weight_shapes = shapes.get(node.text("module"), set())
        writes_weight = any(shape in weight_shapes for shape in _shapes(node, "output_shapes"))
        reads_weight = any(shape in weight_shapes for shape in _shapes(node, "input_shapes"))
        if writes_weight and not reads_weight:
            weights.append(index)
        elif writes_weight == reads_weight:
            unclear_ns += node.duration_ns
    return weights, unclear_ns


def _weight_shapes(graph: Graph, order: list[int]) -> dict[str, set[tuple[int, ...]]]:
    """Return module -> shapes of the weights of its GEMMs, as read and transposed."""
    shapes: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for index in order:
        node = graph.node(index)
        if node.phase is Phase.FORWARD and _operator(node) in _GEMMS:
            # The weight is the last matrix. `addmm` reads it transposed and `linear` does not, so
            # both orientations count.
            for shape in _shapes(node, "input_shapes")[-1:]:
                shapes[node.text("module")] |= {shape, (*shape[:-2], *shape[:-3:-1])}
    return shapes


def _operator(node: Node) -> str:
    return node.text("op").rsplit("::", 1)[-1].split(".", 1)[0]


def _shapes(node: Node, column: str) -> list[tuple[int, ...]]:
    """Return the shapes of two or more dimensions in a column."""
    text = node.text(column)
    values = cast("list[Any]", msgspec.json.decode(text)) if text else []
    sizes = (cast("list[Any]", value) for value in values if isinstance(value, list))
    return [
        tuple(size) for size in sizes if len(size) > 1 and all(type(side) is int for side in size)
    ]


EMBEDDING = "embedding_layer"
"""SimAI excludes rows of this name from the pipeline's bubble."""


@dataclass(slots=True)
class LayerTimes:
    """One rank's step, by scope.

    Attributes:
        graph: the step.
        micro_batches: scopes of each captured micro-batch, in forward order.
        updates: the optimizer.
        evaluation: forwards without a backward, once per step.
        split: nodes of the backward that compute weight gradients.
        losses: communication that the format cannot express.
        sent_bytes: maximum over micro-batches and phases of the bytes sent to other stages.
        phaseless_ns: compute without a phase.
    """

    graph: Graph
    micro_batches: list[list[ModuleRows]]
    updates: ModuleRows
    evaluation: ModuleRows
    split: GradientSplit
    losses: Losses
    sent_bytes: int
    phaseless_ns: int

    @property
    def total_ns(self) -> int:
        """Compute time of the step as captured."""
        compute = self.graph.gpu_compute
        return int(self.graph.nodes.duration_ns[compute].sum())


def layer_times(graph: Graph, grain: Grain) -> LayerTimes:
    """Return the compute and communication of each scope of a step.

    Args:
        graph: one rank's step.
        grain: scope of a row; without module roles in the trace, each module is a scope.

    Raises:
        ExportError: the graph has no GPU time, or a communication without bytes or group.
        GraphError: the graph has a cycle.
    """
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            f"the graph has no GPU time, so its workload would be empty\n  {REMEDY}",
            code="export-empty-graph",
        )
    device = (graph.gpu_compute | graph.communication).tolist()
    indices: list[int] = graph.topological_order().tolist()
    order = [index for index in indices if device[index]]
    split, losses = split_gradients(graph, order), Losses()
    rows = _RowsOfStep(graph, _row_names(graph, grain), split, losses)
    for index in order:
        rows.add(index)
    return LayerTimes(graph, rows.micro_batches or [[]], rows.updates, rows.evaluation, split,
                losses, max(rows.sent_bytes.values(), default=0), rows.phaseless_ns)  # fmt: skip


class _RowsOfStep:
    """Adds the nodes of a step, in dependency order, to the rows of their micro-batch and scope.

    Attributes:
        updates: the optimizer.
        evaluation: forwards without a backward.
        sent_bytes: bytes sent to other stages, by micro-batch and phase.
        phaseless_ns: compute without a phase.
    """

    def __init__(
        self, graph: Graph, names: list[str], split: GradientSplit, losses: Losses
    ) -> None:
        self._graph = graph
        self._names = names
        self._of_weights = split.weights
        self._slots = SlotAssigner(graph, losses)
        self._evaluating: list[bool] = graph.evaluating.tolist()
        self._scopes: dict[int, dict[str, ModuleRows]] = {}
        # Optimizer and evaluation run once per step. SimAI's bubble is the time of all rows that
        # are not called embedding_layer, times (PP - 1) / (ga * vpp).
        in_pipeline = graph.job.world.sizes.get(AXIS, 1) > 1
        self.updates = ModuleRows(EMBEDDING if in_pipeline else "optimizer")
        self.evaluation = ModuleRows(EMBEDDING if in_pipeline else "evaluation")
        self.sent_bytes = Counter[tuple[int, Phase]]()
        self.phaseless_ns = 0
        self._micro_batch = 0
        self._after_backward = False
        # Scope of the newest compute, to which a gradient bucket belongs.
        self._newest = ""

    @property
    def micro_batches(self) -> list[list[ModuleRows]]:
        """Rows of the scopes of each micro-batch, in forward order."""
        return [[*self._scopes[number].values()] for number in sorted(self._scopes)]

    def add(self, index: int) -> None:
        """Add the node at `index`, which computes or communicates."""
        node = self._graph.node(index)
        # A node without a micro-batch belongs to that of the node before it.
        if (recorded := node.value("micro_batch")) >= 0:
            self._micro_batch = recorded
        slot, rows = self._slot_of(index, node), self._rows_of(index, node)
        is_sent = node.kind is Kind.SEND and not self._evaluating[index]
        if is_sent and leaves_stage(self._graph.job, node):
            sent_bytes = max(node.value("comm_bytes"), 0)
            self.sent_bytes[self._micro_batch, node.phase] += sent_bytes
        if not node.kind.is_communication:
            if node.phase is Phase.NONE:
                self.phaseless_ns += node.duration_ns
            rows.compute(slot, node.duration_ns)
        elif (call := self._slots.assign(node, slot)) is not None:
            rows.communicate(call, slot)

    def _slot_of(self, index: int, node: Node) -> Slot:
        if node.phase is not Phase.NONE:
            self._after_backward = node.phase is Phase.BACKWARD
        # A script that reduces its gradients itself does so after the backward, outside of any
        # phase. SimAI overlaps only weight-gradient communication with compute.
        reduces_gradients = (
            node.phase is Phase.NONE and self._after_backward and node.kind.is_communication
        )
        if self._of_weights[index] or node.phase is Phase.OPTIMIZER or reduces_gradients:
            return Slot.WEIGHT
        return Slot.FORWARD if node.phase in (Phase.FORWARD, Phase.NONE) else Slot.INPUT

    def _rows_of(self, index: int, node: Node) -> ModuleRows:
        name = self._names[index]
        if node.kind.is_communication:
            name = name if node.text("module") else self._newest or name
        elif node.phase is not Phase.OPTIMIZER:
            self._newest = name
        if self._evaluating[index]:
            return self.evaluation
        if node.phase is Phase.OPTIMIZER:
            return self.updates
        return self._scopes.setdefault(self._micro_batch, {}).setdefault(name, ModuleRows(name))


def _row_names(graph: Graph, grain: Grain) -> list[str]:
    """Return the row name of each node."""
    if not graph.job.modules:
        return [_without_spaces(path) or "other" for path in graph.text("module")]
    scoping = scopes_of(graph, grain)
    names = [_without_spaces(scope.path) or scope.role for scope in scoping.scopes]
    for at, scope in enumerate(scoping.scopes):
        if scope.role == "other" and scope.path:
            names[at] += ".other"
    positions: list[int] = scoping.of.tolist()
    return [names[position] for position in positions]


def _without_spaces(path: str) -> str:
    # SimAI splits a row into its columns at white space.
    return re.sub(r"\s+", "_", path)


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
    graph = stages[0].graph
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
    grain: Grain = "submodule",
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
        grain: scope of a row; without module roles in the trace, each module is a scope.
        notes: caveats on how the graphs were made.

    Raises:
        ExportError: a graph has no GPU time, or the graphs do not form a pipeline.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    evened = [even_all_to_alls(graph, graph.job.world) for graph in graphs]
    captured = [layer_times(graph, grain) for graph, _ in evened]
    even_notes = dict.fromkeys(note for _, rank_notes in evened for note in rank_notes)
    if not captured:
        raise ExportError("no trace is given; expected one or more", code="simai-no-trace")
    pipeline = _stages_by_rank(captured, schedule)
    # SimAI has one generic stage. Its step time is that of the slowest rank.
    stages = max(pipeline, key=lambda of_rank: sum(stage.total_ns for stage in of_rank))
    rows, count = _rows(stages, micro_batches)
    world = stages[0].graph.job.world
    # A capture has one stage per rank of its world; with chunks a rank runs several.
    ranks, chunks = world.sizes.get(AXIS, 1) // len(stages), len(stages)
    sent_bytes = max(stage.sent_bytes for stage in captured)
    # SimAI crashes (SIGFPE) if the header lacks ep, pp, vpp or ga.
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
        notes=[*notes, *even_notes, *notes_on(stages, rows)],
    )


def _stages_by_rank(
    captured: Sequence[LayerTimes], schedule: PipelineSchedule | None
) -> list[list[LayerTimes]]:
    """Return the stages of each pipeline rank; without a pipeline, of the captured rank."""
    first = captured[0].graph.job
    if len(captured) > 1 and first.pipeline is None:
        raise ExportError(
            f"{len(captured)} traces are given, and that of rank {first.rank} is of no stage that "
            "`capture run --pp` made: a workload of SimAI describes one rank\n"
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
    unrolled: list[list[ModuleRows]] = []
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
