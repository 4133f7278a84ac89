"""Expand one rank to all by symmetry: where the groups and the peers of the other ranks are."""

from dataclasses import dataclass
from itertools import product
from math import prod

from onerank.ir import Collective, Graph, Job, Kind, Node, ProcessGroup
from onerank.ir.errors import ExportError

WORLD = "world"
SUPPORTED = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.REDUCE_SCATTER,
)
ONE_RANK = "collectives of one-rank groups"
NO_BYTES = "communications of 0 bytes"


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a job as points of a grid.

    Attributes:
        sizes: axis -> size, innermost first: rank = tp + TP * (next axis ...).
        rank: the rank that the graph is of.
    """

    sizes: dict[str, int]
    rank: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

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
        axes = list(self.sizes)
        ranges = [
            range(self.sizes[name]) if name == axis else (coordinate,)
            for name, coordinate in zip(axes, self.point(rank), strict=True)
        ]
        return tuple(sorted(self.at(point) for point in product(*ranges)))

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
        axis: axis of the group's line, or "world"; "" for a send or receive.
        shift: distance of the peer along each axis; () for a collective.
    """

    axis: str = ""
    shift: tuple[int, ...] = ()


def layout_of(job: Job, ranks: int | None) -> Layout:
    """Return the grid of the job's ranks.

    Raises:
        ExportError: fewer than 2 ranks, or not as many as `ranks` says.
    """
    layout = Layout(dict(job.world.sizes), job.rank)
    if not layout.sizes and ranks is not None:
        layout = Layout({WORLD: ranks}, job.rank)
    if ranks is not None and ranks != layout.ranks:
        raise ExportError(f"{ranks} ranks are asked for, but the job's world has {layout}")
    if layout.ranks < 2:
        raise ExportError(
            f"the graph's job has {layout.ranks} rank and ASTRA-sim needs at least 2: capture the "
            "script as one rank of a larger world, or give the number of ranks if another tool "
            "wrote the graph"
        )
    if not 0 <= layout.rank < layout.ranks:
        raise ExportError(f"the graph is of rank {layout.rank}, but the job's world has {layout}")
    return layout


def place(graph: Graph, layout: Layout) -> tuple[dict[int, Place], dict[str, int]]:
    """Return the place of each communication by node index, and how many were left out and why.

    Raises:
        ExportError: a communication that ASTRA-sim lacks or that other ranks cannot have alike.
    """
    places: dict[int, Place] = {}
    left_out = {ONE_RANK: 0, NO_BYTES: 0}
    axes: dict[str, str | None] = {}
    for index in graph.communication.nonzero()[0].tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE:
            group = node.text("group")
            if group not in axes:
                axes[group] = _axis_of(group, graph.job, layout)
            axis = axes[group]
            if axis is None:
                left_out[ONE_RANK] += 1
                continue
            if node.collective not in SUPPORTED:
                raise ExportError(
                    f"{_named(node)} is {_kind_of(node)}; ASTRA-sim has only "
                    f"{', '.join(collective.name for collective in SUPPORTED)}"
                )
            placed = Place(axis=axis)
        else:
            placed = Place(shift=_shift_of(node, layout))
        size = node.value("comm_bytes")
        if size < 0:
            raise ExportError(
                f"{_named(node)} does not say how many bytes it moves; set its comm_bytes"
            )
        if size == 0:
            left_out[NO_BYTES] += 1
        else:
            places[index] = placed
    return places, left_out


def number_groups(layout: Layout, axes: set[str]) -> dict[int, tuple[int, ...]]:
    """Return group number -> ranks: the world as group 1, then the lines of each of `axes`."""
    groups = {1: layout.line(WORLD, 0)}
    for axis in layout.sizes:
        if axis in axes - {WORLD}:
            for line in sorted({layout.line(axis, rank) for rank in range(layout.ranks)}):
                groups[len(groups) + 1] = line
    return groups


def _axis_of(name: str, job: Job, layout: Layout) -> str | None:
    """Return the axis whose lines are the group's counterparts; None for a group of one rank."""
    group = job.group(name)
    if group is None and name == "":
        return WORLD
    if group is None:
        known = ", ".join(repr(known.name) for known in job.groups) or "none"
        raise ExportError(f"a collective is of group {name!r}; the job's groups are {known}")
    ranks = tuple(sorted(group.ranks))
    if ranks == layout.line(WORLD, 0):
        return WORLD
    if len(ranks) == 1:
        return None
    if group.axis not in layout.sizes:
        raise ExportError(_unplaceable(group, layout))
    line = layout.line(group.axis, layout.rank)
    if ranks != line:
        raise ExportError(
            f"group {name!r} has the ranks {list(ranks)}, but the line of axis {group.axis!r} "
            f"through rank {layout.rank} has {list(line)} in a world of {layout}"
        )
    return group.axis


def _unplaceable(group: ProcessGroup, layout: Layout) -> str:
    axis = f"its axis is {group.axis!r}" if group.axis else "it has no axis"
    return (
        f"group {group.name!r} (ranks {list(group.ranks)}) cannot be placed on the other ranks: "
        f"{axis}, and it is not the whole world ({layout}), so nothing says which ranks take part "
        f"in its counterparts; give it one of the axes {', '.join(layout.sizes)}"
    )


def _shift_of(node: Node, layout: Layout) -> tuple[int, ...]:
    peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
    if not 0 <= peer < layout.ranks:
        raise ExportError(
            f"{_named(node)} has the peer {peer}; expected one of the ranks 0 to {layout.ranks - 1}"
        )
    if peer == layout.rank:
        raise ExportError(f"{_named(node)} has its own rank {peer} as its peer")
    return layout.shift_to(peer)


def _kind_of(node: Node) -> str:
    if node.collective is Collective.NONE:
        return "of an unknown collective (its comm_type is missing or no number of Chakra's)"
    return f"a {node.collective.name}"


def _named(node: Node) -> str:
    return f"node {node.id} ({node.name!r})"
