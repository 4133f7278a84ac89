"""The simulated allocator: streams, memory that lingers, and what can be configured."""

import pytest

from onerank.annotate.memory.allocator import (
    CachingAllocator,
    OutOfMemoryError,
    round_size,
)
from onerank.annotate.memory.reserved_memory import AllocationRequest, simulate_reserved
from onerank.ir import AllocatorSettings, Blocks, MemoryClass, MemoryLog, Phase

MIB = 1 << 20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def log_of(*rows: tuple[int, int, int, int], lingers: tuple[int, ...] = ()) -> MemoryLog:
    """Return a log of blocks (bytes, allocated at, freed at, pool), all of a forward."""
    size, made, freed, pool = zip(*rows, strict=True)
    kind, phase = (int(MemoryClass.ACTIVATIONS),), (int(Phase.FORWARD),)
    count = len(rows)
    blocks = Blocks(size, kind * count, made, freed, (0,) * count, phase * count, pool, (), lingers)
    return MemoryLog(blocks, 1 + max(*made, *freed))


def test_a_streams_memory_is_not_anothers():
    one_by_one = [(40 * MIB, 0, 1), (30 * MIB, 2, 3)]
    alone = log_of(*((*row, 0) for row in one_by_one))
    apart = log_of(*((*row, pool) for pool, row in enumerate(one_by_one)))
    assert simulate_reserved(alone, {}).reserved_bytes == 40 * MIB
    assert simulate_reserved(apart, {}).reserved_bytes == 70 * MIB


def test_what_is_held_is_of_its_own_pool():
    log = log_of((30 * MIB, 0, 1, 0))
    held = {MemoryClass.PARAMETERS: (AllocationRequest(3 * MIB), AllocationRequest(3 * MIB, 1))}
    assert simulate_reserved(log, held).reserved_bytes == (20 + 20 + 30) * MIB


def test_held_blocks_are_freed_where_the_next_step_takes_them():
    """A gradient made in one step on a side stream, freed as the next begins."""
    log = log_of((64 * MIB, -1, 0, 1), (64 * MIB, 1, -1, 1))
    assert simulate_reserved(log, {}).reserved_bytes == 64 * MIB
    late = log_of((64 * MIB, -1, 1, 1), (64 * MIB, 0, -1, 1))
    assert simulate_reserved(late, {}).reserved_bytes == 128 * MIB


def test_memory_that_lingers_is_not_used_again_until_its_use_ends():
    rows = [(40 * MIB, 0, 1, 0), (40 * MIB, 2, 3, 0), (40 * MIB, 4, 5, 0)]
    assert simulate_reserved(log_of(*rows), {}).reserved_bytes == 40 * MIB
    assert simulate_reserved(log_of(*rows, lingers=(1, 0, 0)), {}).reserved_bytes == 80 * MIB
    assert simulate_reserved(log_of(*rows, lingers=(4, 4, 0)), {}).reserved_bytes == 120 * MIB


def test_lingering_memory_is_waited_for_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=50 * MIB)
    allocator.free(allocator.allocate(40 * MIB), lingers=True)
    allocator.allocate(30 * MIB)
    assert (allocator.returned, allocator.reserved_bytes) == (1, 30 * MIB)


def test_blocks_have_their_requested_sizes():
    """A block may be larger than its request, where the rest was too small to split off."""
    log = log_of((15 * MIB, 0, -1, 0))
    spare = Blocks(
        *(getattr(log.blocks, name) for name in log.blocks.__struct_fields__[:7]),
        spare_bytes=(MIB,),
    )
    assert simulate_reserved(MemoryLog(spare, 1), {}, 50 * MIB).reserved_bytes == 3 * 14 * MIB


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1200 << 10, (4,), 1280 << 10),  # between 1024 and 2048 KiB: 1280, 1536, 1792
        (1280 << 10, (4,), 1280 << 10),
        (1281 << 10, (4,), 1536 << 10),
        (3 * MIB - 1, (1, 4), 3 * MIB),  # the second interval begins at 2 MiB
        (1200 << 10, (1, 4), 1200 << 10),
        (100 * MIB, (1, 4), 112 * MIB),  # the last holds for all above
        (2048, (4,), 2048),
        (2049, (4,), 2560),
        (100, (4,), 512),
        (MIB, (8,), MIB),
    ],
)
def test_divided_powers_of_two(size: int, divisions: tuple[int, ...], rounded: int):
    assert round_size(size, divisions) == rounded


def test_an_expandable_segment_grows_by_what_it_lacks():
    allocator = CachingAllocator(settings=EXPANDABLE)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # two pages of 20 MiB, of which 5 are left
    allocator.free(first)
    third = allocator.allocate(50 * MIB)  # above the second: the 5 left, and three pages
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(second)
    allocator.free(third)
    allocator.allocate(99 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    small = CachingAllocator(settings=EXPANDABLE)
    small.allocate(512)
    small.allocate(512, stream=1)
    assert small.reserved_bytes == 4 * MIB


def test_whole_pages_of_expandable_segments_go_back_when_memory_runs_out():
    allocator = CachingAllocator(100 * MIB, EXPANDABLE)
    first, _ = allocator.allocate(70 * MIB), allocator.allocate(5 * MIB)
    allocator.free(first)
    allocator.allocate(30 * MIB, stream=1)  # 80 of 100 are reserved: three of four pages go
    assert (allocator.reserved_bytes, allocator.returned) == ((20 + 40) * MIB, 1)
    allocator.allocate(35 * MIB)  # the lowest addresses, which get their memory again
    assert allocator.reserved_bytes == (20 + 40 + 40) * MIB
    with pytest.raises(OutOfMemoryError, match=f"{30 * MIB} .* {100 * MIB} of {100 * MIB}"):
        allocator.allocate(30 * MIB)


def test_above_the_split_limit_blocks_are_whole():
    allocator = CachingAllocator(settings=AllocatorSettings(max_split_bytes=100 * MIB))
    allocator.free(allocator.allocate(200 * MIB))
    allocator.allocate(60 * MIB)  # small requests leave the large block alone
    assert allocator.reserved_bytes == 260 * MIB
    allocator.allocate(150 * MIB)  # 50 too large: more than 20 MiB would be lost
    assert allocator.reserved_bytes == 410 * MIB
    allocator.allocate(190 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (410 * MIB, 410 * MIB)


def test_sizes_of_segments_and_unsplit_blocks_are_settings():
    allocator = CachingAllocator(settings=AllocatorSettings(large_segment_bytes=12 * MIB))
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 12 * MIB
    page = AllocatorSettings(expandable_segments=True, large_segment_bytes=12 * MIB)
    allocator = CachingAllocator(settings=page)
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 36 * MIB
    limits = AllocatorSettings(max_split_bytes=100 * MIB, unsplit_excess_bytes=60 * MIB)
    allocator = CachingAllocator(settings=limits)
    allocator.free(allocator.allocate(200 * MIB))
    allocator.allocate(141 * MIB)
    assert allocator.reserved_bytes == 200 * MIB


def test_blocks_that_do_not_make_enough_room_go_back_with_all_others():
    allocator = CachingAllocator(400 * MIB, AllocatorSettings(max_split_bytes=100 * MIB))
    for block in [allocator.allocate(size * MIB) for size in (100, 150, 60)]:
        allocator.free(block)
    # Releasing 250 MiB of oversize blocks is less than the request, so 60 MiB follow.
    allocator.allocate(300 * MIB)
    assert (allocator.reserved_bytes, allocator.returned) == (300 * MIB, 3)


def test_blocks_above_the_split_limit_go_back_first():
    allocator = CachingAllocator(300 * MIB, AllocatorSettings(max_split_bytes=100 * MIB))
    large, small = allocator.allocate(200 * MIB), allocator.allocate(60 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(150 * MIB)
    assert (allocator.reserved_bytes, allocator.returned) == (210 * MIB, 1)
