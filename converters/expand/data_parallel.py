"""Scale a job to another number of data-parallel replicas."""

import msgspec
import numpy as np

from onerank.converters.expand.ranks import with_peers, with_roots
from onerank.ir import Collective, Graph, Job, ProcessGroup, RankClass, World, axis_of
from onerank.ir.arrays import I64
from onerank.ir.errors import ExportError, division
from onerank.ir.notes import Note

AXIS = "dp"


def with_replicas(graph: Graph, dp: int) -> Graph:
    """Return the step of the same rank in a job with `dp` replicas.

    Every replica repeats the captured work. Only groups, peers and the size of gathered shards
    change. Compute on a shard, such as a sharded optimizer's step, keeps its captured time.

    Raises:
        ExportError: the captured job has a single replica, so it shows no gradient reduction;
            ranks along the data-parallel axis differ; or a group or peer has no counterpart.
    """
    old = graph.job.world
    if AXIS not in old.sizes:
        raise ExportError(
            f"--dp {dp}: the job ({old}) has one replica, so its trace does not show how replicas "
            "reduce their gradients\n  capture it with --dp 2 or more",
            code="dp-single-replica",
        )
    if dp < 2:
        raise ExportError(f"--dp {dp}: expected 2 replicas or more", code="dp-too-small")
    if dp == old.sizes[AXIS]:
        return graph
    new = World({**old.sizes, AXIS: dp}, old.ep)
    _check_experts(old, new)
    mapping = _ReplicaMapping(graph.job, new)
    groups = tuple(mapping.group(group) for group in graph.job.groups)
    job = msgspec.structs.replace(
        graph.job,
        world=new,
        rank=mapping.rank(graph.job.rank),
        groups=groups,
        classes=tuple(mapping.rank_class(rank_class) for rank_class in graph.job.classes),
    )
    shard_bytes = _rescaled_shards(graph, groups, new)
    graph = with_roots(graph, lambda _, root: mapping.rank(root))
    graph = with_peers(graph, mapping.peer).with_columns(comm_bytes=shard_bytes)
    return Graph(graph.nodes, graph.edges, graph.strings, job, graph.foreign)


def _rescaled_shards(graph: Graph, groups: tuple[ProcessGroup, ...], new: World) -> I64:
    """Return `comm_bytes` with the shard of every all-gather cut for the new group size."""
    members = {
        captured.name: (len(captured.ranks), len(scaled.ranks))
        for captured, scaled in zip(graph.job.groups, groups, strict=True)
    }
    comm_bytes = graph.nodes.comm_bytes.copy()
    # An all-gather counts its input, one shard; a reduce-scatter counts its whole input, which
    # stays.
    gathers = (graph.nodes.collective == Collective.ALL_GATHER) & (comm_bytes > 0)
    for index in np.flatnonzero(gathers & graph.communication).tolist():
        group = graph.node(index).text("group")
        before, after = members.get(group, (graph.job.world.size, new.size))
        # Rounded up, so that the shards together still hold the whole tensor.
        comm_bytes[index] = -(-int(comm_bytes[index]) * before // after)
    return comm_bytes


def replica_notes(graphs: list[Graph], dp: int) -> list[Note]:
    """Return limitations to print for graphs that `with_replicas` scaled to `dp`."""
    old = graphs[0].job.world.sizes.get(AXIS, 1)
    if dp == old:
        return []
    text = f"Captured with dp {old}, exported with dp {dp}: each replica repeats the captured work."
    notes = [Note(text, code="replicas-repeat-work")]
    if any(_gathers_shards(graph) for graph in graphs):
        text = (
            f"Replicas gather shards of {old}/{dp} the size; compute on a shard (the optimizer's "
            f"step) keeps its time with dp {old}."
        )
        notes.append(Note(text, code="replicas-gather-shards"))
    return notes


def _gathers_shards(graph: Graph) -> bool:
    """Return whether the replicas gather shards from each other."""
    gathers = graph.nodes.collective == Collective.ALL_GATHER
    names = {graph.strings[code] for code in np.unique(graph.nodes.group[gathers]).tolist()}
    groups = (graph.job.group(name) for name in names)
    axes = [group.axis.split("+") for group in groups if group is not None]
    # "edp" is the data-parallel axis of experts.
    return any(AXIS in axis or axis == ["edp"] for axis in axes)


def _check_experts(old: World, new: World) -> None:
    """Check that the expert-parallel size still divides cp * dp.

    Raises:
        ExportError: it does not, or experts would get copies that the capture had not.
    """
    before, after = (world.sizes.get("cp", 1) * world.sizes[AXIS] for world in (old, new))
    if old.ep > 1 and after % old.ep:
        raise ExportError(
            f"--dp {new.sizes[AXIS]}: ep {old.ep} does not divide cp * dp = {after} "
            f"({division(after, old.ep)})",
            code="dp-indivisible-experts",
        )
    if old.ep > 1 and before == old.ep < after:
        raise ExportError(
            f"--dp {new.sizes[AXIS]}: the job was captured with one copy of each expert (cp * dp = "
            f"ep = {old.ep}), so its trace does not show how copies reduce their gradients\n"
            f"  capture it with cp * dp {2 * old.ep} or more",
            code="dp-single-expert-copy",
        )


class _ReplicaMapping:
    """Maps captured ranks to their counterparts in a job with more or fewer replicas."""

    def __init__(self, job: Job, world: World) -> None:
        self._job, self._old, self._new, self._dp = job, job.world, world, world.sizes[AXIS]

    def rank(self, rank: int) -> int:
        """Return a rank's counterpart."""
        # Replicas do equal work, so with fewer of them the modulo gives an equivalent rank.
        point = self._old.point(rank)
        return self._new.at({**point, AXIS: point[AXIS] % self._dp})

    def peer(self, peer: int) -> int:
        """Return the counterpart of a rank that this one sends to or receives from.

        A peer outside the world, as traces of other tools have, stays unchanged.

        Raises:
            ExportError: the peer is in another replica.
        """
        if not 0 <= peer < self._old.size:
            return peer
        if self._old.point(self._job.rank)[AXIS] != self._old.point(peer)[AXIS]:
            raise ExportError(
                f"rank {self._job.rank} sends to or receives from rank {peer} of another replica, "
                f"which has no counterpart among {self._dp} replicas\n"
                f"  capture with --dp {self._dp}",
                code="dp-peer-across-replicas",
            )
        return self.rank(peer)

    def group(self, group: ProcessGroup) -> ProcessGroup:
        """Return the counterpart of a group.

        Raises:
            ExportError: the group spans replicas without following an axis.
        """
        old = self._old
        axis = group.axis or axis_of(group.ranks, old, self._job.rank, group.name)
        replicas = {old.point(rank)[AXIS] for rank in group.ranks}
        if len(group.ranks) == old.size or axis == "world":
            ranks = tuple(range(self._new.size))
        elif axis and sorted(group.ranks) == [*old.line(axis, self._job.rank)]:
            ranks = self._new.line(axis, self.rank(self._job.rank))
        # A group inside one replica, such as tp, exists in each replica.
        elif len(replicas) == 1:
            ranks = tuple(self.rank(rank) for rank in group.ranks)
        else:
            raise ExportError(
                f"group {group.name!r} (ranks {list(group.ranks)}) spans replicas and follows no "
                f"axis of {old}, so its ranks with dp {self._dp} are unknown\n"
                f"  capture with --dp {self._dp}",
                code="dp-group-across-replicas",
            )
        return ProcessGroup(group.name, ranks, group.axis)

    def rank_class(self, captured: RankClass) -> RankClass:
        """Return the counterpart of a class of equivalent ranks."""
        if AXIS in captured.where:
            raise ExportError(
                f"replicas differ: rank {captured.representative} represents dp "
                f"{list(captured.where[AXIS])} only\n  capture with --dp {self._dp}",
                code="dp-replicas-differ",
            )
        return RankClass(self.rank(captured.representative), captured.where)
