"""The world of a distributed run: its ranks, this rank, and the grid of its process groups."""

from collections.abc import Iterable

import msgspec

from onerank.ir import Job, ProcessGroup, World
from onerank.ir.job.world import axis_of

MOST_RANKS = 1 << 24
_UNNAMED = ("", "undefined")
_AXES = ("tp", "cp", "dp", "pp")


class Group(msgspec.Struct, frozen=True):
    """A process group as `distributedInfo` tells it; `ranks` is empty where the list is cut."""

    name: str = msgspec.field(name="pg_name", default="")
    description: str = msgspec.field(name="pg_desc", default="")
    ranks: tuple[int, ...] = ()


class Distributed(msgspec.Struct, frozen=True):
    """`distributedInfo` of a Kineto trace."""

    rank: int = 0
    size: int = msgspec.field(name="world_size", default=1)
    groups: tuple[Group, ...] = msgspec.field(name="pg_config", default=())


def read_distributed(text: msgspec.Raw) -> Distributed | None:
    """Return what a trace tells of its run, None where that is no rank within a world."""
    try:
        found = msgspec.json.decode(text, type=Distributed, strict=False)
    except msgspec.DecodeError:
        return None
    return found if 0 <= found.rank < found.size <= MOST_RANKS else None


def labels(groups: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return what to call groups, by name and description: the description where it is of one.

    torch's names are numbers, its descriptions what the script said, which may say the same of two.
    """
    names: dict[str, set[str]] = {}
    pairs = set(groups)
    for name, description in pairs:
        names.setdefault(description, set()).add(name)
    return {
        (name, described): described
        if described not in _UNNAMED and len(names[described]) == 1
        else f"{described} {name}"
        if described not in _UNNAMED
        else name
        for name, described in pairs
    }


def groups_of(told: Distributed | None) -> tuple[ProcessGroup, ...]:
    """Return the process groups that a trace describes."""
    groups = told.groups if told else ()
    return tuple(ProcessGroup(one.description or one.name, one.ranks) for one in groups)


def with_world(job: Job, told: Distributed | None) -> Job:
    """Return the job with the run's world and rank, its groups placed on the world's axes.

    The axes are the lines that the groups of the own rank are. Without any the world has one axis,
    called "world"; what no group spans is called "other".

    Args:
        job: of one rank, the groups it communicates in known.
        told: what the trace tells of the run.
    """
    if told is None or told.size < 2 or job.world.size > 1:
        return job
    world = World(_axes(told, job.groups))
    groups = tuple(
        msgspec.structs.replace(group, axis=axis_of(group.ranks, world, told.rank, group.name))
        if told.rank in group.ranks
        else group
        for group in job.groups
    )
    return msgspec.structs.replace(job, world=world, rank=told.rank, groups=groups)


def _axes(told: Distributed, groups: Iterable[ProcessGroup]) -> dict[str, int]:
    """Return the sizes of the axes that groups span, innermost first."""
    sizes: dict[str, int] = {}
    reach = 1
    for stride, count, name in sorted(_lines(told, groups)):
        if stride % reach:
            continue  # within several axes
        if stride > reach:
            sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = stride // reach
        sizes[name if name and name not in sizes else f"axis{len(sizes)}"] = count
        reach = stride * count
    if not sizes or told.size % reach:
        return {"world": told.size}
    if told.size > reach:
        sizes["other" if "other" not in sizes else f"other{len(sizes)}"] = told.size // reach
    return sizes


def _lines(told: Distributed, groups: Iterable[ProcessGroup]) -> set[tuple[int, int, str]]:
    """Return stride, size and name of the groups that are evenly spaced lines of a grid."""
    found: dict[tuple[int, int], str] = {}
    for group in groups:
        ranks = sorted(group.ranks)
        count = len(ranks)
        if told.rank not in ranks or not 1 < count < told.size:
            continue
        stride = ranks[1] - ranks[0]
        first = told.rank - told.rank // stride % count * stride
        if ranks == list(range(first, first + count * stride, stride)):
            said = [axis for axis in _AXES if axis in group.name.lower().split("_")]
            found.setdefault((stride, count), said[0] if said else "")
    return {(*line, name) for line, name in found.items()}
