"""Order nodes within each stream and each thread."""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from onerank.converters.sources.kineto.read.trace_columns import I64


def numbers(*parts: I64) -> "array[int]":
    """Return integers to which more can be added, in 8 bytes each."""
    return array("q", np.concatenate(parts).tobytes())


@dataclass(slots=True)
class Times:
    """When each node to be started and ended, and when the host asked for it; nanoseconds."""

    start: "array[int]"
    end: "array[int]"
    launch: "array[int]"

    def add(self, start_ns: int, end_ns: int, launch_ns: int) -> int:
        """Add a node to be; return its number."""
        self.start.append(start_ns)
        self.end.append(end_ns)
        self.launch.append(launch_ns)
        return len(self.start) - 1


@dataclass(slots=True)
class Lane:
    """Numbers of nodes to be that run one after another."""

    times: Times
    members: "array[int]" = field(default_factory=lambda: array("q"))

    def last_launched(self, horizon_ns: int) -> int | None:
        """Return the last one asked for at or before `horizon_ns`."""
        position = bisect_right(self.members, horizon_ns, key=self.times.launch.__getitem__)
        return self.members[position - 1] if position else None

    def last_ended(self, time_ns: int) -> int | None:
        """Return the last one that had ended by `time_ns`."""
        position = bisect_right(self.members, time_ns, key=self.times.end.__getitem__)
        return self.members[position - 1] if position else None

    def begun_at(self, time_ns: int) -> int | None:
        """Return the first one that began at `time_ns`."""
        position = bisect_left(self.members, time_ns, key=self.times.start.__getitem__)
        found = self.members[position] if position < len(self.members) else None
        return found if found is not None and self.times.start[found] == time_ns else None

    def first_launched(self, after_ns: int) -> int | None:
        """Return the first one asked for at or after `after_ns`."""
        position = bisect_left(self.members, after_ns, key=self.times.launch.__getitem__)
        return self.members[position] if position < len(self.members) else None

    def outlasting(self) -> list[tuple[int, int]]:
        """Return pairs of one that outlasted those behind it, and the first that began at its end.

        Where operations overlap, the one before is not all that one begins behind.
        """
        times = self.times
        pairs: list[tuple[int, int]] = []
        running: list[int] = []
        for before, number in pairwise(self.members):
            start = times.start[number]
            pairs.extend((one, number) for one in running if times.end[one] <= start)
            running = [one for one in running if times.end[one] > start]
            if times.end[before] > start:
                running.append(before)
        return pairs

    def insert_by_start(self, number: int) -> None:
        """Insert one that ran here after those that started before it."""
        start = self.times.start
        position = bisect_right(self.members, start[number], key=start.__getitem__)
        self.members.insert(position, number)

    def insert_by_launch(self, number: int) -> int | None:
        """Insert one that ran nowhere after all that was asked for before it.

        Returns:
            A neighbour in the lane, None in an empty one.
        """
        times = self.times
        position = bisect_right(self.members, times.launch[number], key=times.launch.__getitem__)
        if position:
            times.start[number] = max(times.start[number], times.end[self.members[position - 1]])
            times.end[number] = max(times.end[number], times.start[number])
        neighbour = self.members[position - 1 if position else 0] if self.members else None
        self.members.insert(position, number)
        return neighbour


def lane_at(streams: dict[tuple[int, int], Lane], time_ns: int) -> Lane:
    """Return the lane of the operation asked for last before `time_ns`, else of the first."""
    latest: tuple[int, Lane] | None = None
    for lane in streams.values():
        last = lane.last_launched(time_ns)
        if last is not None:
            launch = lane.times.launch[last]
            if latest is None or launch > latest[0]:
                latest = launch, lane
    if latest is not None:
        return latest[1]
    return min(streams.values(), key=lambda lane: lane.times.launch[lane.members[0]])
