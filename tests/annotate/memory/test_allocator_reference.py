"""The simulated allocator against a plain restatement of torch's rules, on random requests.

The restatement searches lists where torch keeps ordered sets and linked blocks. Sources are
`DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from onerank.annotate.memory.allocator import Block, CachingAllocator, OutOfMemoryError
from onerank.ir import AllocatorSettings

MIB = 1 << 20
KIB = 1 << 10


@dataclass
class Segment:
    """Memory of one driver call: its pool, and its parts as [address, bytes, free]."""

    stream: int
    small: bool
    parts: list[list[int]]


@dataclass
class Reference:
    """torch's allocator, without expandable segments."""

    settings: AllocatorSettings
    capacity: int
    segments: list[Segment] = field(default_factory=list[Segment])
    lowest: int = 0

    @property
    def reserved(self) -> int:
        return sum(part[1] for segment in self.segments for part in segment.parts)

    @property
    def allocated(self) -> int:
        return sum(part[1] for seg in self.segments for part in seg.parts if not part[2])

    def allocate(self, request: int, stream: int) -> int | None:
        """Return the address; None without memory."""
        size = max(1, -(-request // 512)) * 512
        small = size <= MIB
        found = self.cached(size, stream, small)
        if found is None:
            found = self.reserve(size, stream, small)
        if found is None and self.release_oversized(size, stream, small):
            found = self.reserve(size, stream, small)
        if found is None:
            whole = [segment for segment in self.segments if self.is_free(segment)]
            self.segments = [segment for segment in self.segments if segment not in whole]
            found = self.reserve(size, stream, small)
        if found is None:
            return None
        segment, part = found
        rest, most = part[1] - size, self.settings.max_split_bytes
        part[2] = 0
        if rest >= 512 if small else rest > MIB and not (most and size >= most):
            part[1] = size
            segment.parts.append([part[0] + size, rest, 1])
            segment.parts.sort()
        return part[0]

    def cached(self, size: int, stream: int, small: bool) -> tuple[Segment, list[int]] | None:
        fits = [
            (part[1], part[0], segment, part)
            for segment in self.of_pool(stream, small)
            for part in segment.parts
            if part[2] and part[1] >= size
        ]
        if not fits:
            return None
        length, _, segment, part = min(fits, key=lambda fit: fit[:2])
        most = self.settings.max_split_bytes
        if most and size < most <= length:
            return None
        if most and size >= most and length >= size + self.settings.unsplit_excess_bytes:
            return None
        return segment, part

    def reserve(self, size: int, stream: int, small: bool) -> tuple[Segment, list[int]] | None:
        if small:
            length = 2 * MIB
        elif size < 10 * MIB:
            length = self.settings.large_segment_bytes
        else:
            length = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + length > self.capacity:
            return None
        self.lowest -= length
        segment = Segment(stream, small, [[self.lowest, length, 1]])
        self.segments.append(segment)
        return segment, segment.parts[0]

    def release_oversized(self, size: int, stream: int, small: bool) -> bool:
        most = self.settings.max_split_bytes
        if not most:
            return False
        wanted = max(size, most)
        free = [segment for segment in self.of_pool(stream, small) if self.is_free(segment)]
        by_size = sorted(free, key=lambda segment: (segment.parts[0][1], segment.parts[0][0]))
        enough = [segment for segment in by_size if segment.parts[0][1] >= wanted]
        if enough:
            self.segments.remove(enough[0])
            return True
        released = 0
        for segment in reversed(by_size):
            if released >= wanted or segment.parts[0][1] < most:
                break
            released += segment.parts[0][1]
            self.segments.remove(segment)
        return released >= wanted

    def free(self, address: int) -> None:
        for segment in self.segments:
            for part in segment.parts:
                if part[0] == address:
                    part[2] = 1
            merged = [segment.parts[0]]
            for part in segment.parts[1:]:
                if part[2] and merged[-1][2]:
                    merged[-1][1] += part[1]
                else:
                    merged.append(part)
            segment.parts = merged

    def of_pool(self, stream: int, small: bool) -> list[Segment]:
        return [seg for seg in self.segments if (seg.stream, seg.small) == (stream, small)]

    @staticmethod
    def is_free(segment: Segment) -> bool:
        return len(segment.parts) == 1 and bool(segment.parts[0][2])


# Few sizes, so that blocks are reused and split; some on either side of each threshold.
SMALL = (1, 600, 200 * KIB, 900 * KIB, MIB)
LARGE = (MIB + 1, *(size * MIB for size in (3, 9, 10, 11, 25, 31, 40, 90)), 64 * MIB + 5)
SIZES = st.sampled_from(SMALL + LARGE)
ALLOCATE = st.tuples(SIZES, st.sampled_from([0, 0, 0, 1]))
FREE = st.integers(0, 1 << 16)
CONFIGURED = st.builds(
    AllocatorSettings,
    max_split_bytes=st.sampled_from([0, 0, 30 * MIB, 60 * MIB]),
    large_segment_bytes=st.sampled_from([20 * MIB, 12 * MIB]),
    unsplit_excess_bytes=st.sampled_from([20 * MIB, 40 * MIB]),
)


@settings(max_examples=150, deadline=None)
@given(CONFIGURED, st.sampled_from([120 * MIB, 1 << 40]), st.lists(ALLOCATE | FREE, max_size=60))
def test_every_block_is_where_torchs_rules_put_it(configured, capacity, requests):
    simulated, reference = CachingAllocator(capacity, configured), Reference(configured, capacity)
    live: list[tuple[Block, int]] = []
    for request in requests:
        if isinstance(request, tuple):
            expected = reference.allocate(*request)
            try:
                block = simulated.allocate(*request)
            except OutOfMemoryError:
                block = None
            assert (block.address if block is not None else None) == expected
            if block is not None and expected is not None:
                live.append((block, expected))
        elif live:
            block, address = live.pop(request % len(live))
            simulated.free(block)
            reference.free(address)
        assert simulated.reserved_bytes == reference.reserved
        assert simulated.allocated_bytes == reference.allocated
