"""The group of ranks that hold the same parameters and see different data."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from onerank.ir import World

# the two sorts of parameters: held by all data-parallel ranks, or by those of the same experts
DENSE, EXPERT = "dense", "edp"


def data_axis(world: World) -> str:
    """Return the axis whose ranks hold the same dense parameters and see other data."""
    return "cp+dp" if world.sizes.get("cp", 1) > 1 else "dp"


def data_ranks(world: World, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same dense parameters as `rank`."""
    return world.line(data_axis(world), rank)


class Groups:
    """The process groups of the two kinds of parameters, created on first use."""

    def __init__(
        self,
        new_group: Callable[[str, Sequence[int]], dist.ProcessGroup],
        world: World,
        rank: int,
    ) -> None:
        self._new_group = new_group
        self._world = world
        self._rank = rank
        self._made: dict[str, dist.ProcessGroup] = {}

    @property
    def size(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return len(data_ranks(self._world, self._rank))

    def of(self, sort: str) -> dist.ProcessGroup:
        """Return the group of ranks that hold the same parameters of a kind."""
        axis = data_axis(self._world) if sort == DENSE else sort
        if axis not in self._made:
            self._made[axis] = self._new_group(axis, self._world.line(axis, self._rank))
        return self._made[axis]


def group_kind_of(parameter: Tensor) -> str:
    """Return DENSE, or EXPERT for a parameter whose `_onerank_axis` says so."""
    return getattr(parameter, "_onerank_axis", DENSE)
