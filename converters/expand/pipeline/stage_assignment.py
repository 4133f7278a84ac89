"""Which captured graph represents which stage, on which ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from onerank.converters.expand.pipeline.schedule_blocks import Stage, split_into_blocks
from onerank.converters.expand.pipeline.schedules import Schedule
from onerank.converters.expand.root_ranks import with_roots
from onerank.ir import Graph, Job, Kind, ProcessGroup, World
from onerank.ir.errors import ExportError

AXIS = "pp"

Point = tuple[tuple[str, int], ...]
"""Coordinates along the axes other than the pipeline's."""


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Ranks that do the same work on each stage.

    Attributes:
        stages: the step of every stage; equal ones share one.
        points: where on the other axes the ranks are.
    """

    stages: tuple[Stage, ...]
    points: tuple[Point, ...]

    def ranks(self, world: World, place: int) -> tuple[int, ...]:
        """Return the ranks of `world` that are at `place` of the pipeline's axis, ascending."""
        return tuple(sorted(world.at({**dict(point), AXIS: place}) for point in self.points))


def group_stages(graphs: Sequence[Graph]) -> list[StageGroup]:
    """Return the columns of a captured pipeline, one where the ranks of each stage are alike.

    Args:
        graphs: one per class of equal ranks, in any order.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, leave out a class, or two are
            of one rank.
        GraphError: a graph has a cycle.
    """
    if not graphs:
        raise ExportError("no trace was given")
    captured: set[int] = set()
    for graph in graphs:
        _check(graph.job, graphs[0].job)
        if graph.job.rank in captured:
            raise ExportError(
                f"two traces are of rank {graph.job.rank}, of two GPUs perhaps: give one of them"
            )
        captured.add(graph.job.rank)
    world = graphs[0].job.world
    cuts = {
        (index, _point(world, graph.job.rank)): split_into_blocks(graph)
        for index, graph in enumerate(graphs)
    }
    points: dict[tuple[int, ...], list[Point]] = {}
    for first in range(world.size):
        if world.point(first)[AXIS] == 0:
            standing = _standing(graphs, first)
            points.setdefault(standing, []).append(_point(world, first))
    columns: list[StageGroup] = []
    for standing, own in points.items():
        at = _point(world, graphs[standing[0]].job.rank)
        at = at if at in own else own[0]
        for index in standing:
            if (index, at) not in cuts:
                cuts[index, at] = split_into_blocks(_moved(graphs[index], at))
        columns.append(StageGroup(tuple(cuts[index, at] for index in standing), tuple(own)))
    return columns


def _check(job: Job, first: Job) -> None:
    if first.pipeline is None or AXIS not in first.world.sizes:
        raise ExportError(
            "the trace is of no pipeline stage, so there is nothing to schedule: capture a script "
            "that knows nothing of pipelines with `capture run --pp P`, or leave --schedule out"
        )
    if job.pipeline is None or job.pipeline.layers != first.pipeline.layers:
        raise ExportError(_of_another_job(job, first, "layers of the stages"))
    if job.world != first.world or job.classes != first.classes:
        raise ExportError(_of_another_job(job, first, "world"))


def _standing(graphs: Sequence[Graph], first: int) -> tuple[int, ...]:
    """Return which graph stands for each rank of the pipeline that begins with rank `first`."""
    world = graphs[0].job.world
    found: list[int] = []
    missing: list[int] = []
    for stage, rank in enumerate(world.line(AXIS, first)):
        standing = [at for at, graph in enumerate(graphs) if _stands_for(graph.job, rank)]
        same = [at for at in standing if _stage(graphs[at].job) == stage]
        found += (same or standing)[:1]
        missing += [] if standing else [stage]
    if missing:
        job = graphs[0].job
        given = [graph.job.rank_class for graph in graphs]
        wanted = [one for one in job.classes if one not in given]
        ranks = sorted(o.representative for o in wanted if {*o.where.get(AXIS, ())} & {*missing})
        raise ExportError(
            f"no trace stands for the stages {missing} of the pipeline's "
            f"{world.sizes[AXIS]}: capture the ranks {ranks} too"
        )
    return tuple(found)


def _stands_for(job: Job, rank: int) -> bool:
    own = job.rank_class
    if own is None:
        return job.world.point(rank)[AXIS] == _stage(job)
    return own.holds(rank, job.world)


def _stage(job: Job) -> int:
    assert job.pipeline is not None
    return job.pipeline.stage


def _point(world: World, rank: int) -> Point:
    return tuple((axis, at) for axis, at in world.point(rank).items() if axis != AXIS)


def _moved(graph: Graph, point: Point) -> Graph:
    """Return a graph as the rank at `point` of its stage has it."""
    job = graph.job
    world, own = job.world, _point(job.world, job.rank)
    if own == point:
        return graph

    def moved(rank: int) -> int:
        if _point(world, rank) != own:
            raise ExportError(
                f"rank {job.rank} communicates with rank {rank} along other axes than the "
                f"pipeline's, so that it cannot stand for rank {to}: capture that too"
            )
        return world.at({**dict(point), AXIS: world.point(rank)[AXIS]})

    to = world.at({**dict(point), AXIS: world.point(job.rank)[AXIS]})
    groups = tuple(
        ProcessGroup(one.name, _line(world, one.axis, to), one.axis)
        if one.axis
        else ProcessGroup(one.name, tuple(moved(rank) for rank in one.ranks), "")
        for one in job.groups
    )
    named = {one.name: one.ranks for one in groups}

    def moved_root(group: ProcessGroup, root: int) -> int:
        return named.get(group.name, group.ranks)[group.ranks.index(root)]

    graph = with_roots(graph, moved_root)
    ends = {name: getattr(graph.nodes, name).copy() for name in ("comm_src", "comm_dst")}
    for index in graph.mask(Kind.SEND, Kind.RECV).nonzero()[0].tolist():
        name = "comm_dst" if graph.node(index).kind is Kind.SEND else "comm_src"
        ends[name][index] = moved(int(ends[name][index]))
    job = msgspec.structs.replace(job, rank=to, groups=groups)
    return replace(graph.with_columns(**ends), job=job)


def _line(world: World, axis: str, rank: int) -> tuple[int, ...]:
    return tuple(range(world.size)) if axis == "world" else world.line(axis, rank)


def _of_another_job(job: Job, first: Job, what: str) -> str:
    return (
        f"the traces of ranks {first.rank} and {job.rank} differ in the {what} "
        f"({first.world}, {first.pipeline and first.pipeline.layers}; {job.world}, "
        f"{job.pipeline and job.pipeline.layers}): give the traces of one job"
    )


@dataclass(frozen=True, slots=True)
class StagePosition:
    """Where a rank is in the expanded pipeline."""

    schedule: Schedule
    ranks: int
    rank: int
    micro_batches: int
    captured: World
    world: World

    def moved(self, rank: int, to: int) -> int:
        """Return a captured rank's counterpart in the expanded world, at `to` along the axis."""
        return self.world.at({**self.captured.point(rank), AXIS: to})

    def root(self, group: ProcessGroup, root: int) -> int:
        """Return the counterpart of a captured rank that is the root of a call of its group."""
        stage = self.captured.point(root)[AXIS]
        if len({self.captured.point(rank)[AXIS] for rank in group.ranks}) == 1:
            return self.moved(root, self.rank)
        return self.moved(root, self.schedule.place(self.ranks, stage)[0])

    def group(self, group: ProcessGroup) -> ProcessGroup:
        """Return a captured group as this rank of the expanded world sees it."""
        points = [self.captured.point(rank) for rank in group.ranks]
        if len({point[AXIS] for point in points}) == 1:
            ranks = tuple(self.moved(rank, self.rank) for rank in group.ranks)
        elif len(group.ranks) == self.captured.size:
            ranks = tuple(range(self.world.size))
        else:
            places = (self.schedule.place(self.ranks, point[AXIS])[0] for point in points)
            moved = zip(group.ranks, places, strict=True)
            ranks = tuple(sorted({self.moved(rank, place) for rank, place in moved}))
        return ProcessGroup(group.name, ranks, group.axis)
