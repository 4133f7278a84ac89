"""Expand one rank to all by symmetry: groups and peers of the other ranks."""

import itertools
from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import prod

from onerank.converters.expand.pipeline import AXIS
from onerank.ir import Collective, Graph, Job, Kind, Node, ProcessGroup, World
from onerank.ir.errors import ExportError
from onerank.ir.job.comm_groups import WORLD

ONE_RANK = "collectives of one-rank groups"
NO_BYTES = "communications of 0 bytes"


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a job as points of a grid.

    Attributes:
        sizes: axis -> size, innermost first: rank = tp + TP * (next axis ...).
        rank: the rank that the graph is of.
        ep: ranks that share out the experts.
    """

    sizes: dict[str, int]
    rank: int
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @property
    def apart(self) -> str:
        """Axis along which ranks may have graphs of their own; all do where no axes are known."""
        return WORLD if WORLD in self.sizes else AXIS

    def point(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`, one per axis."""
        point: list[int] = []
        for size in self.sizes.values():
            rank, coordinate = divmod(rank, size)
            point.append(coordinate)
        return tuple(point)

    def at(self, point: tuple[int, ...]) -> int:
        """Return the rank at `point`."""
        rank = 0
        for size, coordinate in reversed([*zip(self.sizes.values(), point, strict=True)]):
            rank = rank * size + coordinate
        return rank

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the line along `axis` through `rank`, ascending."""
        if axis == WORLD:
            return tuple(range(self.ranks))
        return World(self.sizes, self.ep).line(axis, rank)

    def has_lines(self, axis: str) -> bool:
        """Return whether `axis` is an axis, several joined by "+", or "ep" or "edp"."""
        return axis in ("ep", "edp") or all(name in self.sizes for name in axis.split("+"))

    def shift_to(self, peer: int) -> tuple[int, ...]:
        """Return how far `peer` is from the graph's rank along each axis, wrapped around."""
        pairs = zip(self.point(self.rank), self.point(peer), self.sizes.values(), strict=True)
        return tuple((there - here) % size for here, there, size in pairs)

    def shifted(self, rank: int, shift: tuple[int, ...]) -> int:
        """Return the rank that is as far from `rank` as `shift` says."""
        triples = zip(self.point(rank), shift, self.sizes.values(), strict=True)
        return self.at(tuple((here + by) % size for here, by, size in triples))

    def opposite(self, shift: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shift that leads back."""
        return tuple(-by % size for by, size in zip(shift, self.sizes.values(), strict=True))

    def __str__(self) -> str:
        terms = " * ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"{terms} = {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a communication goes, said so that it holds for every rank.

    Attributes:
        axis: axis of the group's line, or "world"; else "".
        shift: distance of a send's or receive's peer along each axis; else ().
        members: distances of the members of a group that is part of a pipeline's line; else ().
    """

    axis: str = ""
    shift: tuple[int, ...] = ()
    members: tuple[tuple[int, ...], ...] = ()

    def group(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group that `rank` is in."""
        if self.members:
            return tuple(sorted(layout.shifted(rank, member) for member in self.members))
        return layout.line(self.axis, rank)


def layout_of(job: Job, ranks: int | None) -> Layout:
    """Return the grid of the job's ranks.

    Raises:
        ExportError: fewer than 2 ranks, or not as many as `ranks` says.
    """
    layout = Layout(dict(job.world.sizes), job.rank, job.world.ep)
    if not layout.sizes and ranks is not None:
        layout = Layout({WORLD: ranks}, job.rank)
    if ranks is not None and ranks != layout.ranks:
        raise ExportError(
            f"{ranks} ranks are asked for, but the job's world has {layout}",
            code="export-rank-count",
        )
    if layout.ranks < 2:
        raise ExportError(
            f"the graph's job has {layout.ranks} rank and a simulated network needs at least 2: "
            "capture the script as one rank of a larger world, or give the number of ranks if "
            "another tool wrote the graph",
            code="export-one-rank",
        )
    if not 0 <= layout.rank < layout.ranks:
        raise ExportError(
            f"the graph is of rank {layout.rank}, but the job's world has {layout}",
            code="export-rank-outside-world",
        )
    return layout


def place(
    graph: Graph,
    layout: Layout,
    supported: Container[Collective],
    *,
    along: str = "",
) -> tuple[dict[int, Place], dict[str, int]]:
    """Return the placement of each communication by node index, and dropped ones by reason.

    Args:
        graph: one rank's step.
        layout: the grid of ranks.
        supported: collectives of the simulator.
        along: axis whose ranks have graphs of their own, so that a group may be a part of its line;
            "" if all ranks are equal.

    Raises:
        ExportError: the simulator lacks a collective, or other ranks cannot have a call in the same
            way.
    """
    places: dict[int, Place] = {}
    left_out = {ONE_RANK: 0, NO_BYTES: 0}
    groups: dict[str, Place | None] = {}
    for index in graph.communication.nonzero()[0].tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE:
            group = node.text("group")
            if group not in groups:
                groups[group] = place_of(group, graph.job, layout, along)
            placed = groups[group]
            if placed is None:
                left_out[ONE_RANK] += 1
                continue
            if node.collective not in supported:
                known = ", ".join(one.name for one in Collective if one in supported)
                raise ExportError(
                    f"{_named(node)} is {_kind_of(node)}; the simulator has only {known}",
                    code="export-unknown-collective",
                )
        else:
            placed = Place(shift=_shift_of(node, layout))
        size = node.value("comm_bytes")
        if node.collective is Collective.BARRIER:
            places[index] = placed  # it moves nothing that would have to be known
        elif size < 0:
            raise ExportError(
                f"{_named(node)} does not say how many bytes it moves; set its comm_bytes",
                code="export-no-bytes",
            )
        elif size == 0:
            left_out[NO_BYTES] += 1
        else:
            places[index] = placed
    return places, left_out


def number_groups(
    layout: Layout, placed: Iterable[tuple[Place, Iterable[int]]]
) -> dict[int, tuple[int, ...]]:
    """Return group number -> ranks: the world as group 1, then those of each place by turns.

    Args:
        layout: the grid of ranks.
        placed: places of collectives, each with the ranks that have them.
    """
    order = {axis: number for number, axis in enumerate(layout.sizes)}
    groups = {1: layout.line(WORLD, 0)}
    known = {groups[1]}
    by_axis = sorted(placed, key=lambda one: (order.get(one[0].axis, len(order)), one[0].axis))
    for place, ranks in by_axis:
        if not place.shift:
            found = _groups(place, layout, ranks) - known
            groups |= {len(groups) + 1 + at: line for at, line in enumerate(sorted(found))}
            known |= found
    return groups


def _groups(place: Place, layout: Layout, ranks: Iterable[int]) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = set()
    covered: set[int] = set()
    for rank in ranks:
        if rank not in covered:
            found.add(place.group(layout, rank))
            covered.update(place.group(layout, rank))
    return found


def place_of(name: str, job: Job, layout: Layout, along: str) -> Place | None:
    """Return where a group's counterparts are; None for a group of one rank.

    Raises:
        ExportError: nothing says where they are.
    """
    group = job.group(name)
    if group is None and name == "":
        return Place(axis=WORLD)
    if group is None:
        known = ", ".join(repr(known.name) for known in job.groups) or "none"
        raise ExportError(
            f"a collective is of group {name!r}; the job's groups are {known}",
            code="export-unknown-group",
        )
    ranks = tuple(sorted(group.ranks))
    if ranks == layout.line(WORLD, 0):
        return Place(axis=WORLD)
    if len(ranks) == 1:
        return None
    if along and layout.rank in ranks and set(ranks) <= set(layout.line(along, layout.rank)):
        return Place(members=tuple(layout.shift_to(rank) for rank in ranks))
    if not group.axis or not layout.has_lines(group.axis):
        raise ExportError(_unplaceable(group, layout), code="export-group-not-placeable")
    line = layout.line(group.axis, layout.rank)
    if ranks != line:
        raise ExportError(
            f"group {name!r} has the ranks {list(ranks)}, but the line of axis {group.axis!r} "
            f"through rank {layout.rank} has {list(line)} in a world of {layout}",
            code="export-group-off-axis",
        )
    return Place(axis=group.axis)


def _unplaceable(group: ProcessGroup, layout: Layout) -> str:
    axis = f"its axis is {group.axis!r}" if group.axis else "it has no axis"
    return (
        f"group {group.name!r} (ranks {list(group.ranks)}) cannot be placed on the other ranks: "
        f"{axis}, and it is not the whole world ({layout}), so nothing says which ranks take part "
        f"in its counterparts; give the traces of all ranks{_or_an_axis(layout)}"
        f"{_or_two_axes(tuple(sorted(group.ranks)), layout)}"
    )


def _or_an_axis(layout: Layout) -> str:
    axes = ", ".join(axis for axis in layout.sizes if axis != WORLD)
    return f", or the group one of the axes {axes}" if axes else ""


def _or_two_axes(ranks: tuple[int, ...], layout: Layout) -> str:
    """Return what to capture with, where the ranks are a line of the world as a mesh of two."""
    world, count, stride = layout.ranks, len(ranks), ranks[1] - ranks[0]
    even = all(after - before == stride for before, after in itertools.pairwise(ranks))
    inner = count if stride == 1 else stride
    aligned = ranks[0] % count == 0 if stride == 1 else count * stride == world
    if not even or not aligned or world % inner or not 1 < inner < world:
        return ""
    return (
        f"; or capture with --cp {inner} --dp {world // inner}, of which it is a line (FSDP that "
        "reshards to a part of its ranks has such groups)"
    )


def _shift_of(node: Node, layout: Layout) -> tuple[int, ...]:
    peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
    if not 0 <= peer < layout.ranks:
        raise ExportError(
            f"{_named(node)} has the peer {peer}; expected one of the ranks 0 to "
            f"{layout.ranks - 1}",
            code="export-peer-out-of-range",
        )
    if peer == layout.rank:
        raise ExportError(
            f"{_named(node)} has its own rank {peer} as its peer", code="export-peer-is-self"
        )
    return layout.shift_to(peer)


def _kind_of(node: Node) -> str:
    if node.collective is Collective.NONE:
        return "of an unknown collective (its comm_type is missing or no number of Chakra's)"
    return f"a {node.collective.name}"


def _named(node: Node) -> str:
    return f"node {node.id} ({node.name!r})"
