"""The memory of the emulated GPU: PyTorch's caching allocator, simulated while the script runs.

The allocator's state depends on all that the process did before the recorded step: evaluations,
first steps, calls of `torch.cuda.empty_cache`. Streams have separate pools. How long memory lingers
that another stream uses (`record_stream`) depends on times, so here it is free at once.
"""

import threading
from collections import deque

from onerank.annotate.memory.allocator import Block, CachingAllocator, OutOfMemoryError
from onerank.capture.allocator_settings import (
    fraction_in,
    settings_in,
    settings_text,
    split_settings,
)
from onerank.ir import AllocatorSettings
from onerank.ir.notes import Note


class DeviceMemory:
    """Blocks of the emulated GPU's memory, by number of their storage."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Create an empty memory with the settings of `PYTORCH_ALLOC_CONF`.

        Args:
            capacity_bytes: memory of the GPU; None for no limit.

        Raises:
            CaptureError: a setting is malformed.
        """
        text = settings_text()
        self._capacity_bytes = capacity_bytes
        self._allocator = CachingAllocator(capacity_bytes, settings_in(text))
        # Another backend is another allocator.
        backends = (setting for setting in split_settings(text) if setting.startswith("backend:"))
        self._unsimulated = dict.fromkeys(
            setting for setting in backends if setting != "backend:native"
        )  # keys, in order
        self._threshold = fraction_in(text, "garbage_collection_threshold", 0.0)
        self.limit(fraction_in(text, "per_process_memory_fraction", 1.0))
        self._blocks: dict[int, Block] = {}
        self._freed: deque[int] = deque()
        # Reentrant: the garbage collector may free a storage within any line of an allocation.
        self._lock = threading.RLock()
        self._busy = False

    def limit(self, fraction: float) -> None:
        """Limit what the allocator reserves to a part of the GPU's memory.

        Follows `setMemoryFraction`.
        """
        if self._capacity_bytes is None:
            return
        self._allocator.capacity_bytes = int(fraction * self._capacity_bytes)
        # torch collects only with a limit: above the threshold, a part of it, the allocator frees
        # blocks before it reserves more (`garbage_collect_cached_blocks`).
        if fraction < 1 and self._threshold > 0:
            self.note_unsimulated(f"garbage_collection_threshold:{self._threshold:g}")

    def note_unsimulated(self, setting: str) -> None:
        """Note a setting of the script that changes reserved memory and is not simulated."""
        self._unsimulated[setting] = None

    def notes(self) -> list[Note]:
        """Return a note on settings that change reserved memory and are not simulated."""
        if not self._unsimulated:
            return []
        return [
            Note(
                f"allocator settings that are not simulated: {', '.join(self._unsimulated)}; "
                "reserved memory is that of an allocator without them",
                code="alloc-conf-not-simulated",
            )
        ]

    @property
    def settings(self) -> AllocatorSettings:
        """The allocator's settings."""
        return self._allocator.settings

    @property
    def allocated_bytes(self) -> int:
        """Bytes of blocks in use, with remainders that the allocator leaves unsplit."""
        return self._allocator.allocated_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Maximum of `allocated_bytes` since `reset_peaks`."""
        return self._allocator.peak_allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the allocator holds, with free blocks."""
        return self._allocator.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Maximum of `reserved_bytes` since `reset_peaks`."""
        return self._allocator.peak_reserved_bytes

    def allocate(self, storage: int, size: int, stream: int) -> None:
        """Allocate the memory of a storage; beyond the GPU's memory if it is full.

        Args:
            storage: its number.
            size: bytes, above 0.
            stream: number of the current stream.
        """
        with self._lock:
            self._busy = True
            try:
                self._blocks[storage] = self._allocator.allocate(size, stream)
            except OutOfMemoryError:
                # A step that does not fit is captured, too; `onerank memory` reports by how much.
                self._allocator.capacity_bytes = None
                self._blocks[storage] = self._allocator.allocate(size, stream)
            finally:
                self._busy = False
            self._free_pending()

    def free(self, storage: int) -> None:
        """Free the memory of a storage."""
        self._freed.append(storage)
        with self._lock:
            if not self._busy:
                self._free_pending()

    def empty_cache(self) -> None:
        """Return free segments to the driver, as `torch.cuda.empty_cache` does."""
        with self._lock:
            self._busy = True
            self._allocator.release_cached()
            self._busy = False
            self._free_pending()

    def reset_peaks(self) -> None:
        """Restart the peaks from the present values."""
        with self._lock:
            self._allocator.reset_peaks()

    def _free_pending(self) -> None:
        self._busy = True
        try:
            while self._freed:
                self._allocator.free(self._blocks.pop(self._freed.popleft()))
        finally:
            self._busy = False
