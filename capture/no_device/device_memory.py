"""The memory of the emulated GPU: PyTorch's caching allocator, simulated while the script runs.

The allocator's state depends on all that the process did before the recorded step: evaluations,
first steps, calls of `torch.cuda.empty_cache`. Streams have separate pools. How long memory lingers
that another stream uses (`record_stream`) depends on times, so here it is free at once.
"""

import os
import re
import threading
from collections import deque

from onerank.annotate.memory.allocator import Block, CachingAllocator, OutOfMemoryError
from onerank.ir import AllocatorSettings
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

_MIB = 1 << 20

# Sizes for which `roundup_power2_divisions` has an entry: 1 MiB, 2 MiB, ... (kRoundUpPowerOfTwo).
_ROUNDED_SIZES = 16

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DeviceMemory:
    """Blocks of the emulated GPU's memory, by number of their storage."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        """Create an empty memory with the settings of `PYTORCH_ALLOC_CONF`.

        Args:
            capacity_bytes: memory of the GPU; None for no limit.

        Raises:
            CaptureError: a setting is malformed.
        """
        text = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        self._allocator = CachingAllocator(capacity_bytes, settings_in(text))
        settings = filter(_changes_reserved_memory, _settings_of(text))
        self._unsimulated = dict.fromkeys(settings)  # keys, in order
        self._blocks: dict[int, Block] = {}
        self._freed: deque[int] = deque()
        # Reentrant: the garbage collector may free a storage within any line of an allocation.
        self._lock = threading.RLock()
        self._busy = False

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


def settings_in(text: str) -> AllocatorSettings:
    """Return the settings of the caching allocator in the value of `PYTORCH_ALLOC_CONF`.

    Other settings are ignored; `DeviceMemory.notes` names those that change reserved memory.

    Raises:
        CaptureError: a setting that is simulated is malformed.
    """
    settings = AllocatorSettings()
    for setting in _settings_of(text):
        name, _, value = setting.partition(":")
        try:
            settings = _with_setting(settings, name, value)
        except ValueError as error:
            raise CaptureError(
                f"{' or '.join(_VARIABLES)}: {setting}: {error}\n"
                "  PyTorch's notes on memory management of CUDA list the settings",
                code="alloc-conf-malformed",
            ) from error
    return settings


def _settings_of(text: str) -> list[str]:
    """Return the settings, each as name:value."""
    # A comma within brackets separates divisions.
    return [setting for setting in re.split(r",(?![^\[]*\])", text.replace(" ", "")) if setting]


def _changes_reserved_memory(setting: str) -> bool:
    """Return whether a setting that is not simulated changes what the allocator reserves.

    Above the threshold, a part of the GPU's memory, the allocator frees blocks before it reserves
    more (`garbage_collect_cached_blocks`). Another backend is another allocator.
    """
    name, _, value = setting.partition(":")
    match name:
        case "garbage_collection_threshold":
            # 0 is the default and turns it off.
            return value.strip("0.") != ""
        case "backend":
            return value != "native"
        case _:
            return False


def _with_setting(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    expandable, most = settings.expandable_segments, settings.max_split_bytes
    divisions = settings.roundup_divisions
    match name:
        case "expandable_segments":
            if value not in ("True", "False"):
                raise ValueError("expected True or False")
            expandable = value == "True"
        case "max_split_size_mb":
            most = int(value) * _MIB
        case "roundup_power2_divisions":
            divisions = _divisions(value)
        case _:
            pass
    return AllocatorSettings(expandable, most, divisions)


def _divisions(value: str) -> tuple[int, ...]:
    """Return the parts of each power of two (`parseRoundUpPower2Divisions`)."""
    if not value.startswith("["):
        return (_power_of_two(value),) * _ROUNDED_SIZES
    parts = [0] * _ROUNDED_SIZES
    last = -1
    for entry in value.strip("[]").split(","):
        size, _, text = entry.partition(":")
        count = _power_of_two(text)
        if size == ">":
            parts[last + 1 :] = [count] * (_ROUNDED_SIZES - last - 1)
            continue
        place = min(_power_of_two(size).bit_length() - 1, _ROUNDED_SIZES - 1)
        # The first entry holds for smaller sizes, too.
        begin = 0 if last < 0 else place
        parts[begin : place + 1] = [count] * (place + 1 - begin)
        last = place
    return tuple(parts)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(f"{number} is no power of two")
    return number
