"""Process groups of ranks that hold the same parameters and process different data."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from onerank.ir import World

# the two kinds of parameters: replicated on all data-parallel ranks, or on those with the same
# experts
DENSE, EXPERT = "dense", "edp"


def data_axis(world: World) -> str:
    """Return the axis whose ranks hold the same dense parameters and process other data."""
    return "cp+dp" if world.sizes.get("cp", 1) > 1 else "dp"


def data_ranks(world: World, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same dense parameters as `rank`."""
    return world.line(data_axis(world), rank)


class Groups:
    """Process groups of the two kinds of parameters, created on first use."""

    def __init__(
        self,
        new_group: Callable[[str, Sequence[int]], dist.ProcessGroup],
        world: World,
        rank: int,
    ) -> None:
        self._new_group = new_group
        self._world = world
        self._rank = rank
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def size(self) -> int:
        """Number of ranks that a gradient is averaged over."""
        return len(data_ranks(self._world, self._rank))

    def of(self, kind: str) -> dist.ProcessGroup:
        """Return the group of ranks that hold the same parameters of a kind."""
        axis = data_axis(self._world) if kind == DENSE else kind
        if axis not in self._groups:
            self._groups[axis] = self._new_group(axis, self._world.line(axis, self._rank))
        return self._groups[axis]


def group_kind_of(parameter: Tensor) -> str:
    """Return DENSE, or EXPERT for a parameter with that `_onerank_axis`."""
    return getattr(parameter, "_onerank_axis", DENSE)
