"""Nodes to be, in the lanes that they run in: one per stream, one per thread."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Draft:
    """A node to be; `launch_ns` is the host time at which a GPU operation was asked for."""

    start_ns: int
    end_ns: int
    launch_ns: int
    columns: dict[str, Any]
    index: int = -1


@dataclass(slots=True)
class Lane:
    """Drafts that run one after another."""

    drafts: list[Draft] = field(default_factory=list[Draft])

    def last_launched(self, horizon_ns: int) -> Draft | None:
        """Return the last draft asked for at or before `horizon_ns`."""
        position = bisect_right(self.drafts, horizon_ns, key=lambda d: d.launch_ns)
        return self.drafts[position - 1] if position else None

    def first_launched(self, after_ns: int) -> Draft | None:
        """Return the first draft asked for at or after `after_ns`."""
        position = bisect_left(self.drafts, after_ns, key=lambda d: d.launch_ns)
        return self.drafts[position] if position < len(self.drafts) else None

    def insert_by_start(self, draft: Draft) -> None:
        """Insert a draft that ran here after those that started before it."""
        position = bisect_right(self.drafts, draft.start_ns, key=lambda d: d.start_ns)
        self.drafts.insert(position, draft)

    def insert_by_launch(self, draft: Draft) -> None:
        """Insert a draft that ran nowhere after all that was asked for before it."""
        position = bisect_right(self.drafts, draft.launch_ns, key=lambda d: d.launch_ns)
        if position:
            draft.start_ns = max(draft.start_ns, self.drafts[position - 1].end_ns)
            draft.end_ns = max(draft.end_ns, draft.start_ns)
        neighbour = self.drafts[position - 1 if position else 0].columns if self.drafts else {}
        for name in ("stream", "thread"):
            draft.columns.setdefault(name, neighbour.get(name, -1))
        self.drafts.insert(position, draft)


def lane_at(streams: dict[tuple[int, int], Lane], time_ns: int) -> Lane:
    """Return the lane of the operation asked for last before `time_ns`, else of the first."""
    before = [d for lane in streams.values() if (d := lane.last_launched(time_ns))]
    if before:
        latest = max(before, key=lambda draft: draft.launch_ns)
        return next(lane for lane in streams.values() if latest in lane.drafts)
    return min(streams.values(), key=lambda lane: lane.drafts[0].launch_ns)
