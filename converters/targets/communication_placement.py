"""Place one rank's communication on all ranks of the world, by the symmetry of its axes."""

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from onerank.converters.expand.pipeline import AXIS
from onerank.converters.expand.ranks import RankGraph
from onerank.ir import Collective, Graph, Job, Kind, Node, ProcessGroup, World
from onerank.ir.errors import ExportError
from onerank.ir.world import WORLD

ONE_RANK = "collectives of one-rank groups"
NO_BYTES = "communications of 0 bytes"

Shift = tuple[int, ...]
"""Distance between two ranks along each axis of the world, modulo the axis size."""


@dataclass(frozen=True, slots=True)
class MeshLine:
    """The groups of one dimension of a mesh over all ranks, in the order of their numbers.

    Attributes:
        stride: distance between neighbours.
        count: ranks of a group.
    """

    stride: int
    count: int

    def through(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank, ascending."""
        first = rank - rank // self.stride % self.count * self.stride
        return tuple(range(first, first + self.stride * self.count, self.stride))


@dataclass(frozen=True, slots=True)
class Placement:
    """The peers of a communication, relative to the rank that issues it.

    Exactly one attribute is set.

    Attributes:
        axis: axis whose line through the rank is the group, or "world".
        shift: distance to the peer of a send or receive.
        member_shifts: distances to all members of a group that is not a whole line of an axis.
        line: a dimension of a script's mesh of ranks.
    """

    axis: str = ""
    shift: Shift = ()
    member_shifts: tuple[Shift, ...] = ()
    line: MeshLine | None = None

    def group_ranks(self, world: World, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that `rank` belongs to, ascending."""
        if self.member_shifts:
            return tuple(sorted(shift_rank(world, rank, shift) for shift in self.member_shifts))
        if self.line is not None:
            return self.line.through(rank)
        return _line(world, self.axis, rank)


def shift_between(world: World, rank: int, peer: int) -> Shift:
    """Return the distance from `rank` to `peer`."""
    shift: list[int] = []
    for size in world.sizes.values():
        rank, coordinate = divmod(rank, size)
        peer, peer_coordinate = divmod(peer, size)
        shift.append((peer_coordinate - coordinate) % size)
    return tuple(shift)


def shift_rank(world: World, rank: int, shift: Shift) -> int:
    """Return the rank at the distance `shift` from `rank`."""
    # GOAL calls this once per message and rank, so it builds no coordinates as World.point does.
    shifted, stride = 0, 1
    for size, distance in zip(world.sizes.values(), shift, strict=True):
        rank, coordinate = divmod(rank, size)
        shifted += (coordinate + distance) % size * stride
        stride *= size
    return shifted


def opposite_shift(world: World, shift: Shift) -> Shift:
    """Return the distance from the peer back to the rank."""
    return tuple(
        -distance % size for distance, size in zip(shift, world.sizes.values(), strict=True)
    )


def unequal_axis(rank_graphs: Sequence[RankGraph]) -> str:
    """Return the axis along which ranks may have different graphs.

    This is the pipeline axis. In a world without known axes, or with a graph for each rank, any two
    ranks may differ.
    """
    world = rank_graphs[0].graph.job.world
    one_each = all(len(entry.ranks) == 1 for entry in rank_graphs)
    return WORLD if one_each or WORLD in world.sizes else AXIS


def world_of(job: Job, ranks: int | None) -> World:
    """Return the world to export.

    Args:
        job: the job of the graph.
        ranks: number of ranks; None for the job's world. A job without a world gets one axis.

    Raises:
        ExportError: the world has fewer than 2 ranks, another number than `ranks`, or does not
            contain the job's rank.
    """
    world = job.world
    if not world.sizes and ranks is not None:
        world = World({WORLD: ranks})
    if ranks is not None and ranks != world.size:
        raise ExportError(
            f"{ranks} ranks are requested, but the job's world has {world}\n"
            "  leave out the number of ranks",
            code="export-rank-count",
        )
    if world.size < 2:
        raise ExportError(
            f"the graph's job has {world.size} rank and a simulated network needs at least 2\n"
            "  capture the script as one rank of a larger world, or give the number of ranks if "
            "another tool wrote the graph",
            code="export-one-rank",
        )
    if not 0 <= job.rank < world.size:
        raise ExportError(
            f"the graph is of rank {job.rank}, but the job's world has {world}",
            code="export-rank-outside-world",
        )
    return world


def place_communications(
    graph: Graph, world: World, supported: Container[Collective], *, unequal_along: str = ""
) -> tuple[dict[int, Placement], dict[str, int]]:
    """Return the placement of each communication by node index, and dropped ones by reason.

    Args:
        graph: one rank's step.
        world: the ranks to export.
        supported: collectives that the simulator has.
        unequal_along: axis along which ranks have different graphs, so that a group may be a part
            of its line; "" if all ranks are equal.

    Raises:
        ExportError: the simulator lacks a collective, a communication has no recorded bytes or no
            valid peer, or the other ranks' counterparts of a group are unknown.
    """
    placements: dict[int, Placement] = {}
    dropped = {ONE_RANK: 0, NO_BYTES: 0}
    by_group: dict[str, Placement | None] = {}
    for index in graph.communication.nonzero()[0].tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE:
            group = node.text("group")
            if group not in by_group:
                by_group[group] = group_placement(group, graph.job, world, unequal_along)
            placement = by_group[group]
            if placement is None:
                # ASTRA-sim stalls on a group of one rank.
                dropped[ONE_RANK] += 1
                continue
            if node.collective not in supported:
                names = ", ".join(kind.name for kind in Collective if kind in supported)
                raise ExportError(
                    f"{_node_text(node)} is {_collective_text(node)}; the simulator has only "
                    f"{names}",
                    code="export-unknown-collective",
                )
        else:
            placement = Placement(shift=_peer_shift(node, graph.job.rank, world))
        size = node.value("comm_bytes")
        if node.collective is Collective.BARRIER:
            # A barrier moves no payload, so its bytes need not be known.
            placements[index] = placement
        elif size < 0:
            raise ExportError(
                f"{_node_text(node)} does not record how many bytes it moves\n  set its comm_bytes",
                code="export-no-bytes",
            )
        elif size == 0:
            # ASTRA-sim stalls or loops endlessly on a communication of 0 bytes.
            dropped[NO_BYTES] += 1
        else:
            placements[index] = placement
    return placements, dropped


def number_groups(
    world: World, uses: Iterable[tuple[Placement, Iterable[int]]]
) -> dict[int, tuple[int, ...]]:
    """Return group number -> ranks: the world as group 1, then the groups by axis.

    Args:
        world: the ranks to export.
        uses: placements of communications, each with the ranks that issue it.
    """
    axis_order = {axis: number for number, axis in enumerate(world.sizes)}
    # The world gets a number too: ASTRA-sim's default group can stall every rank once subgroups
    # were used unequally. Number 0 fails an assertion there.
    groups = {1: _line(world, WORLD, 0)}
    numbered = {groups[1]}
    # The caller's placements come from a set; sorting keeps the numbers equal from run to run.
    by_axis = sorted(
        uses, key=lambda use: (axis_order.get(use[0].axis, len(axis_order)), use[0].axis)
    )
    for placement, ranks in by_axis:
        if not placement.shift:
            new = _groups_of(placement, world, ranks) - numbered
            groups |= {len(groups) + 1 + at: line for at, line in enumerate(sorted(new))}
            numbered |= new
    return groups


def _groups_of(placement: Placement, world: World, ranks: Iterable[int]) -> set[tuple[int, ...]]:
    """Return the distinct groups that `ranks` have at a placement."""
    groups: set[tuple[int, ...]] = set()
    covered: set[int] = set()
    for rank in ranks:
        if rank not in covered:
            members = placement.group_ranks(world, rank)
            groups.add(members)
            covered.update(members)
    return groups


def _line(world: World, axis: str, rank: int) -> tuple[int, ...]:
    return tuple(range(world.size)) if axis == WORLD else world.line(axis, rank)


def group_placement(name: str, job: Job, world: World, unequal_along: str) -> Placement | None:
    """Return the placement of a process group; None for a group of one rank.

    Args:
        name: the group's name in the nodes; "" for the default group.
        job: the job that defines the group.
        world: the ranks to export.
        unequal_along: as for `place_communications`.

    Raises:
        ExportError: the group is undefined, or its counterparts on other ranks are unknown.
    """
    group = job.group(name)
    if group is None and name == "":
        return Placement(axis=WORLD)  # the default group, which contains all ranks
    if group is None:
        names = ", ".join(repr(known.name) for known in job.groups) or "none"
        raise ExportError(
            f"a collective is of group {name!r}; the job's groups are {names}",
            code="export-unknown-group",
        )
    ranks = tuple(sorted(group.ranks))
    if ranks == _line(world, WORLD, 0):
        return Placement(axis=WORLD)
    if len(ranks) == 1:
        return None
    has_axis = bool(group.axis) and _has_axis(world, group.axis)
    # Along this axis each graph records its own groups, so a group of only some pipeline stages is
    # known without being a whole line. Where any two ranks may differ, a group that is a whole line
    # is still placed by its axis: `equalize_all_to_alls` compares ranks along axes.
    on_axis = has_axis and unequal_along == WORLD and ranks == _line(world, group.axis, job.rank)
    if unequal_along and job.rank in ranks and not on_axis:
        line = _line(world, unequal_along, job.rank)
        if set(ranks) <= set(line):
            shifts = (shift_between(world, job.rank, rank) for rank in ranks)
            return Placement(member_shifts=tuple(shifts))
    if not has_axis and (mesh_line := _mesh_line(group, world)) is not None:
        return Placement(line=mesh_line)
    if not has_axis:
        raise ExportError(_unplaceable(group, world), code="export-group-not-placeable")
    line = _line(world, group.axis, job.rank)
    if ranks != line:
        raise ExportError(
            f"group {name!r} has the ranks {list(ranks)}, but the line of axis {group.axis!r} "
            f"through rank {job.rank} has {list(line)} in a world of {world}",
            code="export-group-off-axis",
        )
    return Placement(axis=group.axis)


def _has_axis(world: World, axis: str) -> bool:
    # Experts divide dp and cp, so these two axes are lines of a world without being among its
    # sizes.
    return axis in ("ep", "edp") or all(name in world.sizes for name in axis.split("+"))


def _mesh_line(group: ProcessGroup, world: World) -> MeshLine | None:
    """Return the dimension of the script's mesh that a group belongs to; None if unknown.

    torch describes the groups of a `DeviceMesh` as "mesh_" and the dimension's name, and the
    capture names them so. Ranks of a mesh over the world in the order of their numbers have equal
    distances. Groups of other names may differ from rank to rank.
    """
    ranks = sorted(group.ranks)
    line = MeshLine(ranks[1] - ranks[0], len(ranks))
    stage = world.size // world.sizes.get("pp", 1)
    is_whole = stage % (line.stride * line.count) == 0
    if not group.name.startswith("mesh_") or not is_whole or line.through(ranks[0]) != (*ranks,):
        return None
    return line


def _unplaceable(group: ProcessGroup, world: World) -> str:
    axis = f"its axis is {group.axis!r}" if group.axis else "it has no axis"
    axes = ", ".join(axis for axis in world.sizes if axis != WORLD)
    remedies = [
        "give the traces of all ranks",
        *([f"give the group one of the axes {axes}"] if axes else []),
        *_mesh_remedy(tuple(sorted(group.ranks)), world),
    ]
    return (
        f"the other ranks' counterparts of group {group.name!r} (ranks {list(group.ranks)}) are "
        f"unknown: {axis}, and it is not the whole world ({world})\n  {', or '.join(remedies)}"
    )


def _mesh_remedy(ranks: tuple[int, ...], world: World) -> list[str]:
    """Return the sizes to capture with, if the ranks are a line of a mesh that divides axis dp."""
    # FSDP that reshards to a part of its ranks after forward creates such groups, and so do meshes
    # of experts, which may include the axis tp.
    count, stride = len(ranks), ranks[1] - ranks[0]
    is_even = all(after - before == stride for before, after in itertools.pairwise(ranks))
    inside, stages = world.sizes.get("tp", 1), world.sizes.get("pp", 1)
    replicas = world.size // inside // stages
    # Without the strides of tp, dp and pp, the one that remains divides dp.
    borders = {stride, stride * count} - {1, inside, inside * replicas}
    if not is_even or ranks[0] // stride % count or len(borders) != 1 or "cp" in world.sizes:
        return []
    inner, rest = divmod(borders.pop(), inside)
    if rest or not 1 < inner < replicas or replicas % inner:
        return []
    sizes = {"tp": inside, "cp": inner, "dp": replicas // inner, "pp": stages}
    options = [f"--{axis} {size}" for axis, size in sizes.items() if size > 1]
    return [f"capture with {' '.join(options)}, which have such groups"]


def _peer_shift(node: Node, rank: int, world: World) -> Shift:
    peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
    if not 0 <= peer < world.size:
        raise ExportError(
            f"{_node_text(node)} has the peer {peer}; expected one of the ranks 0 to "
            f"{world.size - 1}",
            code="export-peer-out-of-range",
        )
    if peer == rank:
        raise ExportError(
            f"{_node_text(node)} has its own rank {peer} as its peer", code="export-peer-is-self"
        )
    return shift_between(world, rank, peer)


def _collective_text(node: Node) -> str:
    if node.collective is Collective.NONE:
        return "of an unknown collective (its comm_type is missing or no number of Chakra's)"
    return f"a {node.collective.name}"


def _node_text(node: Node) -> str:
    return f"node {node.id} ({node.name!r})"
