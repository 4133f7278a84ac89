"""Classes of ranks that do equivalent work, by what the slicer places on each rank."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from onerank.capture.parallelize.pipeline.stage import PipelineStage
from onerank.ir import RankClass, World

Loads = Mapping[str, Sequence[Hashable]]
"""Name of each module of experts -> per place in the expert-parallel group, a key that is equal
for places whose experts get as many tokens."""


def rank_classes(world: World, stage: PipelineStage | None, loads: Loads) -> tuple[RankClass, ...]:
    """Return the classes of equal ranks: one per sort of stage, and in it one per load of experts.

    Ranks that differ along other axes are alike: each holds an equal share of what it shares.

    Args:
        world: the job's world.
        stage: a stage of its pipeline; None where there is none.
        loads: of the whole model.
    """
    stages = len(stage.alike) if stage else 1
    rows = [_row(world, stage, at, loads) for at in range(stages)]
    classes: list[RankClass] = []
    for row, alike in _grouped(rows):
        found = _grouped(row)
        for _, places in found:
            where: dict[str, tuple[int, ...]] = {"pp": alike} if stage else {}
            if len(found) > 1:
                where["ep"] = places
            first = world.first({axis: coordinates[0] for axis, coordinates in where.items()})
            classes.append(RankClass(first, where))
    return tuple(sorted(classes, key=lambda one: one.representative))


def classes_along(world: World, ranks: Sequence[int]) -> tuple[RankClass, ...]:
    """Return a class for each of `ranks`: those that agree with it where the ranks differ.

    Args:
        world: the job's world.
        ranks: ranks of it, each once.
    """
    points = {rank: world.point(rank) for rank in ranks}
    axes = [axis for axis in world.sizes if len({point[axis] for point in points.values()}) > 1]
    return tuple(
        RankClass(rank, {axis: (point[axis],) for axis in axes}) for rank, point in points.items()
    )


def _row(world: World, stage: PipelineStage | None, at: int, loads: Loads) -> tuple[Hashable, ...]:
    """Return the work of each place in a stage's expert-parallel groups."""
    own = [keys for name, keys in loads.items() if stage is None or stage.of(name) == at]
    key = stage.alike[at] if stage else None
    return tuple((key, *(keys[place] for keys in own)) for place in range(world.ep))


def _grouped(keys: Iterable[Hashable]) -> list[tuple[tuple[Hashable, ...], tuple[int, ...]]]:
    """Return each different key, and the places that have it."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return [(key, tuple(places)) for key, places in found.items()]  # pyright: ignore[reportReturnType]
