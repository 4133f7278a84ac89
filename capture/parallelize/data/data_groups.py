"""Data-parallel ranks, which hold the same parameters and process different data.

The command line checks its options with this module, so torch is imported only for type checks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from onerank.capture.parallelize.parameter_kinds import DENSE, KIND_ATTRIBUTE
from onerank.ir import World
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


def data_axis(world: World) -> str:
    """Return the axis whose ranks hold the same dense parameters and process other data."""
    return "cp+dp" if world.sizes.get("cp", 1) > 1 else "dp"


def data_ranks(world: World, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same dense parameters as `rank`."""
    return world.line(data_axis(world), rank)


DataParallelStrategy = Literal["ddp", "zero1", "zero2", "fsdp"]


def strategy_of(
    world: World, *, ddp: bool, fsdp: bool, zero: int | None
) -> DataParallelStrategy | None:
    """Return the strategy that the options select; None if they select none.

    Raises:
        CaptureError: the options exclude each other, or the world has no data-parallel ranks.
    """
    selected = [name for name, on in (("--ddp", ddp), ("--fsdp", fsdp)) if on]
    if zero is not None:
        selected.append(f"--zero {zero}")
    if len(selected) > 1:
        raise CaptureError(
            f"{' and '.join(selected)}: each selects how gradients and states are sharded; give "
            "one (--fsdp is --zero 3)",
            code="dp-strategy-twice",
        )
    if zero not in (None, 1, 2, 3):
        raise CaptureError(
            f"--zero {zero}: expected 1 (optimizer states sharded), 2 (and gradients) or "
            "3 (and parameters, the same as --fsdp)",
            code="dp-zero-stage",
        )
    if selected and len(data_ranks(world, 0)) == 1:
        raise CaptureError(
            f"{selected[0]} needs more than one data-parallel rank; the world has {world}\n"
            "  give --dp D with D above 1",
            code="dp-size-missing",
        )
    if ddp:
        return "ddp"
    if fsdp or zero == 3:
        return "fsdp"
    if zero == 1:
        return "zero1"
    return "zero2" if zero == 2 else None


class DataGroups:
    """Process groups of the two kinds of parameters, created on first use."""

    def __init__(
        self,
        new_group: Callable[[str, Sequence[int]], "dist.ProcessGroup"],
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

    def of(self, kind: str) -> "dist.ProcessGroup":
        """Return the group of ranks that hold the same parameters of a kind."""
        axis = data_axis(self._world) if kind == DENSE else kind
        if axis not in self._groups:
            self._groups[axis] = self._new_group(axis, self._world.line(axis, self._rank))
        return self._groups[axis]


def group_kind_of(parameter: "Tensor") -> str:
    """Return DENSE, or EXPERT for a parameter of experts, by its `KIND_ATTRIBUTE`."""
    return getattr(parameter, KIND_ATTRIBUTE, DENSE)
