"""The ranks of a job: a grid of parallel axes, process groups, classes of equivalent ranks."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Self

import msgspec

from onerank.ir.errors import JobError

WORLD = "world"
"""The only axis of a world whose parallel axes are not known."""


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group: ranks that communicate with each other.

    Attributes:
        name: name the nodes refer to.
        ranks: global ranks in group order.
        axis: axis of the world that the group lies along ("tp"), "world", or "".
    """

    name: str
    ranks: tuple[int, ...]
    axis: str = ""


class World(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ranks of a job as points of a grid of parallel axes.

    Expert parallelism adds no axis. As in Megatron-LM and DeepSpeed, an expert-parallel group is
    `ep` consecutive ranks of the plane of all axes except tp and pp.

    Attributes:
        sizes: axis -> size, innermost first: rank = tp + TP * (cp + CP * (dp + DP * pp)). Absent
            axes have size 1.
        ep: size of an expert-parallel group.
    """

    sizes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    ep: int = 1

    @classmethod
    def of(cls, *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1) -> Self:
        """Return the world with Megatron-LM's order of ranks: tp, cp, dp, pp.

        Raises:
            JobError: a size is below 1, or `ep` does not divide cp * dp.
        """
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for axis, size in {**sizes, "ep": ep}.items():
            if size < 1:
                raise JobError(f"--{axis} {size}: expected 1 or more", code="world-size-below-one")
        if cp * dp % ep:
            raise JobError(
                f"--ep {ep} must divide cp * dp, whose ranks share the experts "
                f"({cp} * {dp} = {ep} x {cp * dp // ep} + {cp * dp % ep})",
                code="world-ep-indivisible",
            )
        return cls({axis: size for axis, size in sizes.items() if size > 1}, ep)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def point(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank`, by axis."""
        point: dict[str, int] = {}
        for axis, size in self.sizes.items():
            rank, point[axis] = divmod(rank, size)
        return point

    def at(self, point: Mapping[str, int]) -> int:
        """Return the rank at `point`; the coordinate of an absent axis is 0."""
        rank = 0
        for axis, size in reversed(self.sizes.items()):
            rank = rank * size + point.get(axis, 0)
        return rank

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axis`, ascending.

        Args:
            axis: an axis of `sizes`; several joined by "+", for the plane they span; "ep", the
                expert-parallel group; or "edp", the ranks that hold the same experts. An axis
                of size 1 gives the rank itself.
            rank: any rank of the line.
        """
        if axis in ("ep", "edp"):
            plane = self.line(self._plane, rank)
            place = plane.index(rank)
            if axis == "edp":
                return plane[place % self.ep :: self.ep]
            first = place - place % self.ep
            return plane[first : first + self.ep]
        free = axis.split("+")
        coordinates = self.point(rank)
        # Outermost axis first, so that `product` gives the ranks in ascending order.
        spans = [
            range(n) if a in free else (coordinates[a],) for a, n in reversed(self.sizes.items())
        ]
        names = [*reversed(self.sizes)]
        return tuple(self.at(dict(zip(names, point, strict=True))) for point in product(*spans))

    def place(self, axis: str, rank: int) -> int:
        """Return the position of `rank` in its line along `axis` (values as for `line`)."""
        if axis == "ep":
            return self.place(self._plane, rank) % self.ep
        if axis == "edp":
            return self.place(self._plane, rank) // self.ep
        free, coordinates, place = axis.split("+"), self.point(rank), 0
        for name, size in reversed(self.sizes.items()):
            if name in free:
                place = place * size + coordinates[name]
        return place

    def first(self, where: Mapping[str, int]) -> int:
        """Return the lowest rank at these positions.

        Args:
            where: axis, or "ep" -> position in its line; absent axes are at 0.
        """
        point, place = {**where}, where.get("ep", 0)
        for axis in self._plane.split("+") if "ep" in where else ():
            place, point[axis] = divmod(place, self.sizes[axis])
        return self.at(point)

    @property
    def _plane(self) -> str:
        return "+".join(axis for axis in self.sizes if axis not in ("tp", "pp"))

    def __str__(self) -> str:
        terms = " * ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"{terms or '1'} = {self.size} ranks" if self.size > 1 else "1 rank"


def axis_of(ranks: Sequence[int], world: World, rank: int, name: str = "") -> str:
    """Return the axis of `world` whose line through `rank` has exactly these ranks.

    Args:
        ranks: global ranks of a group, in any order.
        world: the world they belong to.
        rank: a member of the group.
        name: name of the group; an axis of that name takes precedence over others that fit.

    Returns:
        "tp", "cp", "dp", "pp", several of them joined ("cp+dp"), "ep" or "edp"; "world" for all
        ranks of several axes; "" if no line fits, and for a group of one rank.
    """
    # Lines can coincide, as those of ep and dp do if ep equals dp. So the group's name decides
    # first, then the shortest combination of axes.
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return ""
    axes = [*world.sizes]
    axis_names = [
        "+".join(combined) for n in range(1, len(axes)) for combined in combinations(axes, n)
    ]
    axis_names += ["ep", "edp"] if world.ep > 1 else []
    if name in axis_names and world.line(name, rank) == members:
        return name
    if members == tuple(range(world.size)):
        return axes[0] if len(axes) == 1 else "world"
    return next((axis for axis in axis_names if world.line(axis, rank) == members), "")


class Pipeline(msgspec.Struct, frozen=True):
    """The pipeline stage that a graph belongs to.

    Attributes:
        stage: index of the stage, from 0.
        layers: layers of each stage of the pipeline.
    """

    stage: int
    layers: tuple[int, ...]


class RankClass(msgspec.Struct, frozen=True):
    """Ranks that do the same work, so that one graph represents them all.

    Attributes:
        representative: the rank to capture.
        where: axis, or "ep" -> positions of the class in its line; absent axes do not matter.
    """

    representative: int
    where: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict[str, tuple[int, ...]])

    def holds(self, rank: int, world: World) -> bool:
        """Return whether a rank of `world` belongs to this class."""
        return all(world.place(axis, rank) in places for axis, places in self.where.items())

    def members(self, world: World) -> tuple[int, ...]:
        """Return the ranks of `world` that belong to this class, ascending."""
        return tuple(rank for rank in range(world.size) if self.holds(rank, world))
