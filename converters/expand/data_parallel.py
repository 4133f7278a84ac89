"""Scale a job to another number of data-parallel replicas."""

import msgspec
import numpy as np

from onerank.converters.expand.root_ranks import with_roots
from onerank.ir import Collective, Graph, Job, Kind, ProcessGroup, RankClass, World, axis_of
from onerank.ir.errors import ExportError

AXIS = "dp"


def with_replicas(graph: Graph, dp: int) -> Graph:
    """Return the step of the same rank in a job with `dp` replicas.

    Each replica does what it did: only groups, peers and the shards that are gathered over more
    or fewer replicas change. What a rank computes on a shard keeps its time.

    Raises:
        ExportError: the job has no data parallelism to see how replicas talk, ranks of its axis
            are not alike, or a group or a peer has no counterpart.
    """
    old = graph.job.world
    if AXIS not in old.sizes:
        raise ExportError(
            f"--dp {dp}: the job ({old}) has one replica, so its trace does not show how replicas "
            "reduce their gradients; capture it with --dp 2 or more"
        )
    if dp < 2:
        raise ExportError(f"--dp {dp}: expected 2 replicas or more")
    if dp == old.sizes[AXIS]:
        return graph
    new = World({**old.sizes, AXIS: dp}, old.ep)
    _check_experts(old, new)
    moving = _Moving(graph.job, new, dp)
    groups = tuple(moving.group(group) for group in graph.job.groups)
    job = msgspec.structs.replace(
        graph.job,
        world=new,
        rank=moving.rank(graph.job.rank),
        groups=groups,
        classes=tuple(moving.rank_class(one) for one in graph.job.classes),
    )
    graph = with_roots(graph, lambda _, root: moving.rank(root))
    nodes = graph.nodes
    sizes = nodes.comm_bytes.copy()
    ends = {"comm_src": nodes.comm_src.copy(), "comm_dst": nodes.comm_dst.copy()}
    members = {
        group.name: (len(group.ranks), len(moved.ranks))
        for group, moved in zip(graph.job.groups, groups, strict=True)
    }
    for index in graph.communication.nonzero()[0].tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE:
            before, after = members.get(node.text("group"), (old.size, new.size))
            if node.collective is Collective.ALL_GATHER and sizes[index] > 0:
                sizes[index] = -(-int(sizes[index]) * before // after)
        else:
            column = "comm_dst" if node.kind is Kind.SEND else "comm_src"
            if 0 <= node.value(column) < old.size:
                ends[column][index] = moving.peer(node.value(column))
    moved = Graph(nodes, graph.edges, graph.strings, job, graph.foreign)
    return moved.with_columns(comm_bytes=sizes, **ends)


def replica_notes(graphs: list[Graph], dp: int) -> list[str]:
    """Return what a reader should know of graphs that `with_replicas` took to `dp`."""
    old = graphs[0].job.world.sizes.get(AXIS, 1)
    if dp == old:
        return []
    note = f"Captured with dp {old}, exported with dp {dp}: every replica does what it did."
    if any(_shares(graph) for graph in graphs):
        note = (
            f"{note[:-1]}, but gathers {old}/{dp} of its shards; what a rank computes on its own "
            f"shard (the optimizer's step) keeps the time it had with dp {old}."
        )
    return [note]


def _shares(graph: Graph) -> bool:
    """Whether replicas hold shards that they gather from each other."""
    gathers = graph.nodes.collective == Collective.ALL_GATHER
    named = {graph.strings[code] for code in np.unique(graph.nodes.group[gathers]).tolist()}
    groups = (graph.job.group(name) for name in named)
    axes = [group.axis.split("+") for group in groups if group is not None]
    return any(AXIS in axis or axis == ["edp"] for axis in axes)


def _check_experts(old: World, new: World) -> None:
    before, after = (world.sizes.get("cp", 1) * world.sizes[AXIS] for world in (old, new))
    if old.ep > 1 and after % old.ep:
        raise ExportError(
            f"--dp {new.sizes[AXIS]}: cp * dp = {after} ranks cannot share out the experts of "
            f"ep {old.ep} ({after} = {old.ep} x {after // old.ep} + {after % old.ep})"
        )
    if old.ep > 1 and before == old.ep < after:
        raise ExportError(
            f"--dp {new.sizes[AXIS]}: the job was captured with one copy of each expert (cp * dp = "
            f"ep = {old.ep}), so its trace does not show how copies reduce their gradients; "
            f"capture it with cp * dp {2 * old.ep} or more"
        )


class _Moving:
    """Where ranks of a job go when its replicas become more or fewer."""

    def __init__(self, job: Job, world: World, dp: int) -> None:
        self._job, self._old, self._new, self._dp = job, job.world, world, dp

    def rank(self, rank: int) -> int:
        """Return a rank's counterpart."""
        point = self._old.point(rank)
        return self._new.at({**point, AXIS: point[AXIS] % self._dp})

    def peer(self, peer: int) -> int:
        """Return the counterpart of a rank that this one sends to or receives from."""
        here, there = self._old.point(self._job.rank), self._old.point(peer)
        if here[AXIS] != there[AXIS]:
            raise ExportError(
                f"rank {self._job.rank} sends to or receives from rank {peer} of another replica; "
                f"with {self._dp} replicas nothing says which rank that is: capture with --dp "
                f"{self._dp}"
            )
        return self.rank(peer)

    def group(self, group: ProcessGroup) -> ProcessGroup:
        """Return a group's counterpart."""
        own, world = self.rank(self._job.rank), self._old
        axis = group.axis or axis_of(group.ranks, world, self._job.rank, group.name)
        points = [world.point(rank) for rank in group.ranks]
        if len(group.ranks) == world.size or axis == "world":
            ranks = tuple(range(self._new.size))
        elif axis and sorted(group.ranks) == [*world.line(axis, self._job.rank)]:
            ranks = self._new.line(axis, own)
        elif len({point[AXIS] for point in points}) == 1:
            ranks = tuple(self.rank(rank) for rank in group.ranks)
        else:
            raise ExportError(
                f"group {group.name!r} (ranks {list(group.ranks)}) lies across replicas and is no "
                f"line of an axis of {world}; nothing says which ranks it has with dp {self._dp}"
            )
        return ProcessGroup(group.name, ranks, group.axis)

    def rank_class(self, one: RankClass) -> RankClass:
        """Return a class of equal ranks, its representative moved."""
        if AXIS in one.where:
            raise ExportError(
                f"the job's replicas are not alike (rank {one.representative} stands for dp "
                f"{list(one.where[AXIS])}); capture it with --dp {self._dp}"
            )
        return RankClass(self.rank(one.representative), one.where)
