"""Classes of ranks that do equivalent work, derived from what the slicer places on each rank."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from onerank.capture.parallelize.pipeline.stage import PipelineStage
from onerank.ir import RankClass, World

Loads = Mapping[str, Sequence[Hashable]]
"""Name of each module of experts -> for each rank of the expert-parallel group, a key. Ranks with
equal keys receive equally many tokens."""


def rank_classes(world: World, stage: PipelineStage | None, loads: Loads) -> tuple[RankClass, ...]:
    """Return the classes of equivalent ranks: one per kind of stage and load of experts.

    Ranks that differ only along other axes are equivalent, because those axes split work evenly.

    Args:
        world: the job's world.
        stage: a stage of its pipeline; None without pipeline parallelism.
        loads: expert loads of the whole model.
    """
    stages = len(stage.work_keys) if stage else 1
    work_by_stage = [_stage_work(world, stage, at, loads) for at in range(stages)]
    classes: list[RankClass] = []
    for work_of_ranks, equal_stages in _grouped(work_by_stage):
        loads_of_stage = _grouped(work_of_ranks)
        for _, expert_ranks in loads_of_stage:
            coordinates: dict[str, tuple[int, ...]] = {"pp": equal_stages} if stage else {}
            if len(loads_of_stage) > 1:
                coordinates["ep"] = expert_ranks
            first = world.first({axis: values[0] for axis, values in coordinates.items()})
            classes.append(RankClass(first, coordinates))
    return tuple(sorted(classes, key=lambda rank_class: rank_class.representative))


def classes_along(world: World, ranks: Sequence[int]) -> tuple[RankClass, ...]:
    """Return a class for each of `ranks`: the ranks with its coordinate on every differing axis.

    Args:
        world: the job's world.
        ranks: distinct ranks of the world.
    """
    points = {rank: world.point(rank) for rank in ranks}
    axes = [axis for axis in world.sizes if len({point[axis] for point in points.values()}) > 1]
    return tuple(
        RankClass(rank, {axis: (point[axis],) for axis in axes}) for rank, point in points.items()
    )


def _stage_work(
    world: World, stage: PipelineStage | None, at: int, loads: Loads
) -> tuple[Hashable, ...]:
    """Return a key of the work of each rank in a stage's expert-parallel groups."""
    stage_loads = [keys for name, keys in loads.items() if stage is None or stage.of(name) == at]
    key = stage.work_keys[at] if stage else None
    return tuple((key, *(keys[place] for keys in stage_loads)) for place in range(world.ep))


def _grouped(keys: Iterable[Hashable]) -> list[tuple[tuple[Hashable, ...], tuple[int, ...]]]:
    """Return each distinct key with the positions that have it."""
    positions: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        positions.setdefault(key, []).append(place)
    return [(key, tuple(places)) for key, places in positions.items()]  # pyright: ignore[reportReturnType]
