"""Where a captured rank is in the pipeline that it is expanded to."""

from dataclasses import dataclass

from onerank.converters.pipeline.columns import AXIS
from onerank.converters.pipeline.schedule import Schedule
from onerank.ir import ProcessGroup, World


@dataclass(frozen=True, slots=True)
class Expanded:
    """Where a rank is in the expanded pipeline."""

    schedule: Schedule
    ranks: int
    rank: int
    micro_batches: int
    captured: World
    world: World

    def moved(self, rank: int, to: int) -> int:
        """Return a captured rank's counterpart in the expanded world, at `to` along the axis."""
        return self.world.at({**self.captured.point(rank), AXIS: to})

    def root(self, group: ProcessGroup, root: int) -> int:
        """Return the counterpart of a captured rank that is the root of a call of its group."""
        stage = self.captured.point(root)[AXIS]
        if len({self.captured.point(rank)[AXIS] for rank in group.ranks}) == 1:
            return self.moved(root, self.rank)
        return self.moved(root, self.schedule.place(self.ranks, stage)[0])

    def group(self, group: ProcessGroup) -> ProcessGroup:
        """Return a captured group as this rank of the expanded world sees it."""
        points = [self.captured.point(rank) for rank in group.ranks]
        if len({point[AXIS] for point in points}) == 1:
            ranks = tuple(self.moved(rank, self.rank) for rank in group.ranks)
        elif len(group.ranks) == self.captured.size:
            ranks = tuple(range(self.world.size))
        else:
            places = (self.schedule.place(self.ranks, point[AXIS])[0] for point in points)
            moved = zip(group.ranks, places, strict=True)
            ranks = tuple(sorted({self.moved(rank, place) for rank, place in moved}))
        return ProcessGroup(group.name, ranks, group.axis)
