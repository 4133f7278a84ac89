"""Captured pipeline stages: the blocks of their steps, and their ranks in the expanded pipeline.

A schedule reorders the blocks of a step: the forward and the backward of each micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD, PipelineSchedule
from onerank.converters.expand.ranks import check_same_step, with_peers, with_roots
from onerank.ir import Graph, Job, Kind, Node, Phase, ProcessGroup, Reason, World
from onerank.ir.errors import ExportError

BEFORE, EVALUATION, AFTER = "before", "evaluation", "after"
"""Parts of a step outside the micro-batches.

BEFORE ends at the first forward. EVALUATION has forwards after the micro-batches that no backward
follows. AFTER has the optimizer.
"""


class StageBlock(NamedTuple):
    """A part of a step: a phase of a micro-batch, or a part outside all micro-batches."""

    phase: str
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A captured stage's step in blocks.

    Attributes:
        graph: the captured graph.
        blocks: node indices of each block, in topological order.
        block_of: block of each node.
        micro_batches: number of captured micro-batches.
    """

    graph: Graph
    blocks: dict[StageBlock, list[int]]
    block_of: list[StageBlock]
    micro_batches: int

    def source(self, micro_batch: int, count: int) -> int:
        """Return the captured micro-batch to copy for one of `count`."""
        return captured_micro_batch(micro_batch, count, self.micro_batches)


def captured_micro_batch(micro_batch: int, count: int, captured: int) -> int:
    """Return which of `captured` micro-batches represents one of `count`.

    The first and the last represent themselves; those between are repeated in turn.
    """
    # The first micro-batch writes gradients where the others add to them. The last one may
    # synchronise them.
    last = captured - 1
    if micro_batch == count - 1:
        return last
    if micro_batch == 0 or last == 0:
        return 0
    return 1 + (micro_batch - 1) % (last - 1) if last > 1 else last


def split_into_blocks(graph: Graph) -> Stage:
    """Split a stage's step into blocks.

    - A node without a phase, such as the preparation of a batch, joins the next forward. Between
      the forward and the backward of a micro-batch it joins that forward.
    - An evaluation joins `BEFORE` if no micro-batch has begun, else `EVALUATION`.
    - A GPU node joins the operator that launched it.
    - A host delay joins the node that it holds back.

    Raises:
        ExportError: the graph is not one step with forward and backward of every micro-batch, or
            of inference with the forward of each.
        GraphError: the graph has a cycle.
    """
    order: list[int] = graph.topological_order().tolist()
    hosts = graph.mask(Kind.HOST_OP)
    # The order of the host decides: streams run behind it and overlap micro-batches.
    host_order = [index for index in order if hosts[index]] if hosts.any() else order
    evaluating: list[bool] = graph.evaluating.tolist()
    named = _named_blocks(graph)
    block_of = _blocks_in_order(graph, host_order, evaluating, named)
    current = StageBlock(BEFORE)
    delayed_node = host_delay_nodes(graph)
    is_optimizer: list[bool] = (graph.nodes.phase == Phase.OPTIMIZER).tolist()
    for index in order:
        deciding = delayed_node.get(index, index)
        block = block_of.get(deciding)
        if block is None and not evaluating[deciding]:
            block = named[deciding]
        if block is None:
            launchers = (i for i, why in graph.edges.of(deciding) if why is Reason.LAUNCH)
            block = next((block_of[i] for i in launchers), current)
            if is_optimizer[deciding] and block.phase == BACKWARD:
                block = StageBlock(AFTER)
        block_of[index] = current = block
    blocks: dict[StageBlock, list[int]] = {}
    for index in order:
        blocks.setdefault(block_of[index], []).append(index)
    count = 1 + max((block.micro_batch for block in blocks), default=0)
    for block in _expected(count, phases_of(graph.job)):
        if block not in blocks:
            raise ExportError(
                f"the graph has no {'forward' if block.phase == FORWARD else 'backward'} of "
                f"micro-batch {block.micro_batch} ({count} in all), which a schedule needs\n"
                "  capture a training step with `capture run --pp`, or a step of inference with "
                "`capture serve --pp`",
                code="pipeline-missing-phase",
            )
    return Stage(graph, blocks, [block_of[index] for index in range(len(graph))], count)


def _blocks_in_order(
    graph: Graph, order: list[int], evaluating: list[bool], named: list[StageBlock | None]
) -> dict[int, StageBlock]:
    """Return the block of each node of a sequence; `named` is that of each node's phase."""
    block_of: dict[int, StageBlock] = {}
    is_optimizer: list[bool] = (graph.nodes.phase == Phase.OPTIMIZER).tolist()
    undecided: list[int] = []
    current = StageBlock(BEFORE)
    optimizer: Node | None = None
    for index in order:
        block = named[index]
        if is_optimizer[index]:
            # An optimizer node in front of all backwards, such as zero_grad, is no step yet.
            after_backward = current.phase == BACKWARD
            optimizer = graph.node(index) if after_backward else optimizer
            block_of[index] = StageBlock(AFTER if after_backward else BEFORE)
        elif evaluating[index]:
            # An evaluation runs once per step, so a schedule must not repeat it with a micro-batch.
            evaluation = StageBlock(BEFORE if current.phase == BEFORE else EVALUATION)
            block_of |= dict.fromkeys([*undecided, index], evaluation)
            undecided = []
        elif block is None:
            undecided.append(index)
        elif optimizer is not None:
            node = graph.node(index)
            raise ExportError(
                f"{node.name!r} (node {node.id}) follows {optimizer.name!r} (node {optimizer.id}) "
                "of the optimizer; expected one step whose micro-batches all precede the optimizer"
                "\n  capture one optimizer step",
                code="pipeline-two-steps",
            )
        else:
            inside_backward = block == current and block.phase == BACKWARD
            for earlier in undecided:
                block_of[earlier] = (
                    block if inside_backward else StageBlock(FORWARD, block.micro_batch)
                )
            undecided = []
            block_of[index] = current = block
    # A forward of inference ends with nodes outside the model's modules, such as the gathering of
    # the logits. Each micro-batch has them.
    infers = BACKWARD not in phases_of(graph.job)
    end = StageBlock(FORWARD, current.micro_batch) if infers else StageBlock(AFTER)
    return block_of | dict.fromkeys(undecided, end)


def _named_blocks(graph: Graph) -> list[StageBlock | None]:
    """Return the block that the phase of each forward or backward node names, else None."""
    phases = {int(Phase.FORWARD): FORWARD, int(Phase.BACKWARD): BACKWARD}
    micro_batches = np.maximum(graph.nodes.micro_batch, 0).tolist()
    # One object per block: a graph has thousands of nodes and a few blocks.
    blocks: dict[tuple[int, int], StageBlock | None] = {}
    pairs = [*zip(graph.nodes.phase.tolist(), micro_batches, strict=True)]
    for phase, number in set(pairs):
        name = phases.get(phase)
        blocks[phase, number] = None if name is None else StageBlock(name, number)
    return [blocks[pair] for pair in pairs]


def phases_of(job: Job) -> tuple[str, ...]:
    """Return the phases that each micro-batch of a job's step has: inference has no backward."""
    return (FORWARD, BACKWARD) if job.inference is None else (FORWARD,)


def _expected(count: int, phases: tuple[str, ...]) -> Iterator[StageBlock]:
    for micro_batch in range(count):
        for phase in phases:
            yield StageBlock(phase, micro_batch)


AXIS = "pp"

Point = tuple[tuple[str, int], ...]
"""Coordinates along all axes except the pipeline's."""


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Pipelines whose ranks do the same work on each stage.

    Attributes:
        stages: the step of every stage; equivalent stages share an object.
        points: coordinates of the ranks on the other axes.
    """

    stages: tuple[Stage, ...]
    points: tuple[Point, ...]

    def ranks(self, world: World, place: int) -> tuple[int, ...]:
        """Return the ranks of `world` at `place` of the pipeline axis, ascending."""
        return tuple(sorted(world.at({**dict(point), AXIS: place}) for point in self.points))


def group_stages(graphs: Sequence[Graph]) -> list[StageGroup]:
    """Return the stage groups of a captured pipeline: one if all ranks of a stage are equal.

    Args:
        graphs: one per class of equivalent ranks, in any order.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, a class is missing, or two
            graphs are of one rank.
        GraphError: a graph has a cycle.
    """
    if not graphs:
        raise ExportError("expected at least one trace, got none", code="pipeline-no-trace")
    captured: set[int] = set()
    for graph in graphs:
        _check(graph.job, graphs[0].job)
        # A directory may also contain traces re-costed for another GPU; the user must choose.
        if graph.job.rank in captured:
            raise ExportError(
                f"two traces are of rank {graph.job.rank}, perhaps for two GPUs\n"
                "  give only one of them",
                code="pipeline-duplicate-rank",
            )
        captured.add(graph.job.rank)
    world = graphs[0].job.world
    stages = {
        (index, _point(world, graph.job.rank)): split_into_blocks(graph)
        for index, graph in enumerate(graphs)
    }
    points_of: dict[tuple[int, ...], list[Point]] = {}
    for first in range(world.size):
        if world.point(first)[AXIS] == 0:
            sources = _graphs_of_line(graphs, first)
            points_of.setdefault(sources, []).append(_point(world, first))
    stage_groups: list[StageGroup] = []
    for sources, points in points_of.items():
        # All stages of a group must be at one point, or their messages would cross replicas.
        point = _point(world, graphs[sources[0]].job.rank)
        point = point if point in points else points[0]
        for index in sources:
            if (index, point) not in stages:
                stages[index, point] = split_into_blocks(_at_point(graphs[index], point))
        members = tuple(stages[index, point] for index in sources)
        stage_groups.append(StageGroup(members, tuple(points)))
    return stage_groups


def _check(job: Job, first: Job) -> None:
    if first.pipeline is None or AXIS not in first.world.sizes:
        raise ExportError(
            "the trace is not that of a pipeline stage, so there is nothing to schedule\n"
            "  capture a script without pipeline parallelism with `capture run --pp P`, or leave "
            "--schedule out",
            code="pipeline-no-stage",
        )
    if job.pipeline is None or job.pipeline.layers != first.pipeline.layers:
        raise _different_jobs(job, first, "layers of the stages", code="pipeline-different-layers")
    if job.world != first.world or job.classes != first.classes:
        raise _different_jobs(job, first, "world", code="pipeline-different-worlds")
    check_same_step(job, first)


def _graphs_of_line(graphs: Sequence[Graph], first: int) -> tuple[int, ...]:
    """Return the index of the graph for each rank of the pipeline that begins with rank `first`."""
    world = graphs[0].job.world
    indices: list[int] = []
    missing: list[int] = []
    for stage, rank in enumerate(world.line(AXIS, first)):
        # A class may represent several stages; a graph captured on this stage takes precedence.
        candidates = [at for at, graph in enumerate(graphs) if _represents(graph.job, rank)]
        of_stage = [at for at in candidates if _stage(graphs[at].job) == stage]
        indices += (of_stage or candidates)[:1]
        missing += [] if candidates else [stage]
    if missing:
        job = graphs[0].job
        captured = [graph.job.rank_class for graph in graphs]
        absent = [rank_class for rank_class in job.classes if rank_class not in captured]
        ranks = sorted(
            rank_class.representative
            for rank_class in absent
            if {*rank_class.where.get(AXIS, ())} & {*missing}
        )
        raise ExportError(
            f"stages {missing} of the pipeline's {world.sizes[AXIS]} have no trace\n"
            f"  capture the ranks {ranks} too",
            code="pipeline-missing-stage",
        )
    return tuple(indices)


def _represents(job: Job, rank: int) -> bool:
    rank_class = job.rank_class
    if rank_class is None:
        return job.world.point(rank)[AXIS] == _stage(job)
    return rank_class.holds(rank, job.world)


def _stage(job: Job) -> int:
    assert job.pipeline is not None
    return job.pipeline.stage


def _point(world: World, rank: int) -> Point:
    return tuple((axis, at) for axis, at in world.point(rank).items() if axis != AXIS)


def _at_point(graph: Graph, point: Point) -> Graph:
    """Return the graph of the rank at `point` of the same stage, which does the same work."""
    job = graph.job
    world, captured_point = job.world, _point(job.world, job.rank)
    if captured_point == point:
        return graph
    new_rank = world.at({**dict(point), AXIS: world.point(job.rank)[AXIS]})

    def counterpart(rank: int) -> int:
        if _point(world, rank) != captured_point:
            raise ExportError(
                f"rank {job.rank} communicates with rank {rank} outside its pipeline, so its trace "
                f"cannot represent rank {new_rank}\n  capture rank {new_rank} too",
                code="pipeline-peer-off-axis",
            )
        return world.at({**dict(point), AXIS: world.point(rank)[AXIS]})

    groups = tuple(
        ProcessGroup(group.name, _line(world, group.axis, new_rank), group.axis)
        if group.axis
        else ProcessGroup(group.name, tuple(counterpart(rank) for rank in group.ranks), "")
        for group in job.groups
    )
    new_ranks = {group.name: group.ranks for group in groups}

    def new_root(group: ProcessGroup, root: int) -> int:
        return new_ranks.get(group.name, group.ranks)[group.ranks.index(root)]

    graph = with_peers(with_roots(graph, new_root), counterpart)
    return replace(graph, job=msgspec.structs.replace(job, rank=new_rank, groups=groups))


def _line(world: World, axis: str, rank: int) -> tuple[int, ...]:
    return tuple(range(world.size)) if axis == "world" else world.line(axis, rank)


def _different_jobs(job: Job, first: Job, difference: str, *, code: str) -> ExportError:
    return ExportError(
        f"the traces of ranks {first.rank} and {job.rank} differ in the {difference} "
        f"({first.world}, {first.pipeline and first.pipeline.layers}; {job.world}, "
        f"{job.pipeline and job.pipeline.layers})\n  give the traces of one job",
        code=code,
    )


@dataclass(frozen=True, slots=True)
class StagePosition:
    """Position of a rank in the expanded pipeline.

    Attributes:
        schedule: order of forwards and backwards; it also places stages on ranks.
        ranks: size of the expanded pipeline axis.
        rank: coordinate of the rank on that axis.
        micro_batches: micro-batches of the expanded step.
        captured: world of the capture.
        world: expanded world.
    """

    schedule: PipelineSchedule
    ranks: int
    rank: int
    micro_batches: int
    captured: World
    world: World

    def expanded_rank(self, rank: int, place: int) -> int:
        """Return a captured rank's counterpart at `place` of the expanded pipeline axis."""
        return self.world.at({**self.captured.point(rank), AXIS: place})

    def root(self, group: ProcessGroup, root: int) -> int:
        """Return the expanded rank of a root, given the captured group and root."""
        stage = self.captured.point(root)[AXIS]
        # A group within one stage moves to the place of this rank. In a group across stages, the
        # root moves to the rank on which the schedule puts its stage.
        if len({self.captured.point(rank)[AXIS] for rank in group.ranks}) == 1:
            return self.expanded_rank(root, self.rank)
        return self.expanded_rank(root, self.schedule.place(self.ranks, stage)[0])

    def group(self, group: ProcessGroup) -> ProcessGroup:
        """Return the counterpart of a captured group for this rank of the expanded world."""
        points = [self.captured.point(rank) for rank in group.ranks]
        if len({point[AXIS] for point in points}) == 1:
            ranks = tuple(self.expanded_rank(rank, self.rank) for rank in group.ranks)
        elif len(group.ranks) == self.captured.size:
            ranks = tuple(range(self.world.size))
        else:
            places = (self.schedule.place(self.ranks, point[AXIS])[0] for point in points)
            placed = zip(group.ranks, places, strict=True)
            ranks = tuple(sorted({self.expanded_rank(rank, place) for rank, place in placed}))
        return ProcessGroup(group.name, ranks, group.axis)
