"""Order of operations that overlap on one stream."""

import random
from array import array
from itertools import pairwise

import pytest

from onerank.converters.sources.kineto.lowering.dependency_edges import NodeSequence, Times


class CountedArray(array):
    """An array that counts how often its elements are read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def sequence_of(start: list[int], end: list[int]) -> tuple[NodeSequence, Times]:
    times = Times(CountedArray("q", start), CountedArray("q", end), array("q", start))
    return NodeSequence(times, array("q", range(len(start)))), times


def scanned_pairs(start: list[int], end: list[int]) -> list[tuple[int, int]]:
    """Scan all running operations at every start: the rule, without regard to cost."""
    pairs: list[tuple[int, int]] = []
    running: list[int] = []
    for previous, number in pairwise(range(len(start))):
        pairs += [(earlier, number) for earlier in running if end[earlier] <= start[number]]
        running = [earlier for earlier in running if end[earlier] > start[number]]
        if end[previous] > start[number]:
            running.append(previous)
    return pairs


@pytest.mark.parametrize("seed", range(200))
def test_overlapping_pairs_match_a_full_scan(seed):
    """Also with equal starts, operations without duration, and starts that are out of order."""
    draw = random.Random(seed)
    start = [draw.randrange(40) for _ in range(draw.randrange(25))]
    if seed % 4:  # an inserted call may put starts out of order
        start.sort()
    end = [time + draw.choice((0, 1, 5, 20, 60)) for time in start]
    sequence, _ = sequence_of(start, end)
    assert sequence.overlapping_pairs() == scanned_pairs(start, end)


@pytest.mark.parametrize("nested", [False, True])
def test_overlapping_pairs_take_linear_work(nested):
    """All n operations run at once; a scan would read their ends n * n / 2 times."""
    count = 2000
    start = list(range(count))
    end = [3 * count - 2 * time if nested else 2 * count for time in start]
    start, end = [*start, 5 * count], [*end, 6 * count]
    sequence, times = sequence_of(start, end)
    assert len(sequence.overlapping_pairs()) == count - 1
    assert times.start.reads + times.end.reads <= 10 * count
