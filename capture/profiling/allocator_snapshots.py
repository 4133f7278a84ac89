"""The caching allocator's history of a step, which shows the stream of every block.

torch records it without stack traces (about 100 ns per event) and returns it in snapshots
(`torch.cuda.memory._snapshot`): plain dictionaries of segments, blocks and events. Everything
except the recording is a function of such snapshots.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from onerank.capture.profiling.resident_tensors import Held, Storage, sizes_of
from onerank.converters.sources.kineto import Action, History, lingering
from onerank.ir import AllocatorSettings

Snapshot = Mapping[str, Any]

WORKSPACE = "workspace"
"""Class of what is held and is no tensor of Python's: cuBLAS workspaces, buckets, C++ tensors."""

_ACTIONS = {
    "alloc": Action.ALLOCATED,
    "free_requested": Action.FREED,
    "free_completed": Action.USABLE,
}
_DEFAULT_POOL = (0, 0)
NOTHING: Snapshot = {"segments": (), "device_traces": ()}
"""Before anything was recorded."""

Key = tuple[tuple[int, int], int]
"""A private pool, (0, 0) for none, and a stream."""


@dataclass
class Pools:
    """Numbers of the allocator's pools, as they are met; 0 is the default stream's."""

    known: dict[Key, int] = field(default_factory=lambda: {(_DEFAULT_POOL, 0): 0})

    def number(self, key: Key) -> int:
        """Return the number of a pool."""
        return self.known.setdefault(key, len(self.known))


@dataclass
class StepHistory:
    """A step that is being recorded.

    Attributes:
        before: snapshot at its begin; None where nothing is recorded.
        after: snapshot at its end.
    """

    before: Snapshot | None = None
    after: Snapshot | None = None

    def end(self) -> None:
        """Take the snapshot at the end of the step."""
        if self.before is not None:
            self.after = _snapshot()


@contextlib.contextmanager
def recorded(*, on_gpu: bool) -> Generator[StepHistory]:
    """Record what the allocator does; a script's own recording goes on as it was.

    That may be bounded, see `is_complete`.
    """
    if not on_gpu or torch.cuda.get_allocator_backend() != "native":
        yield StepHistory()
        return
    starts_recording = not _records()
    if starts_recording:
        _record(on=True)
    try:
        yield StepHistory(before=_snapshot())
    finally:
        if starts_recording:
            _record(on=False)


class StepsHistory:
    """Records step after step, and keeps only the last."""

    def __init__(self) -> None:
        self._on = False

    def begin(self) -> None:
        """Forget what was recorded, and record on."""
        if self._on:
            self.stop()
        elif _records():
            # The script records a history itself; restarting would erase it.
            return
        _record(on=True)
        self._on = True

    def last(self) -> Snapshot | None:
        """Return the snapshot of what was done since the last step began; None of no step."""
        return _snapshot() if self._on else None

    def stop(self) -> None:
        """Record no more."""
        if self._on:
            _record(on=False)
        self._on = False


@contextlib.contextmanager
def steps_recorded(*, on_gpu: bool) -> Generator[StepsHistory | None]:
    """Record what the allocator does in each of some steps; None where that cannot be."""
    if not on_gpu or torch.cuda.get_allocator_backend() != "native":
        yield None
        return
    history = StepsHistory()
    try:
        yield history
    finally:
        history.stop()


def _records() -> bool:
    private: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    return private._cuda_isHistoryEnabled()


def _record(*, on: bool) -> None:
    memory: Any = torch.cuda.memory
    if on:
        memory._record_memory_history("all", context=None, stacks="python")
    else:
        memory._record_memory_history(None)


def _snapshot() -> Snapshot:
    memory: Any = torch.cuda.memory
    return memory._snapshot()


def is_complete(before: Snapshot, after: Snapshot, device: int) -> bool:
    """Return whether nothing was forgotten between two snapshots: a script may bound its own."""
    first, second = _trace(before, device), _trace(after, device)
    return len(second) > len(first) and list(second[: min(1, len(first))]) == list(first[:1])


def history_of(
    before: Snapshot, after: Snapshot, device: int, pools: Pools, reserved_bytes: int = 0
) -> History:
    """Return what the allocator of a device did between two snapshots.

    Args:
        before: snapshot taken while the history was being recorded.
        after: a later one of the same recording.
        device: number of the GPU.
        pools: the pools met so far; those met here are added.
        reserved_bytes: as in `History`.
    """
    begin = len(_trace(before, device))
    entries = [one for one in _trace(after, device)[begin:] if one["action"] in _ACTIONS]
    segments = _Segments([*before["segments"], *after["segments"]], device)
    numbers = [pools.number(_key(entry, segments)) for entry in entries]
    return History(
        action=tuple(int(_ACTIONS[entry["action"]]) for entry in entries),
        address=tuple(entry["addr"] for entry in entries),
        bytes=tuple(entry["size"] for entry in entries),
        pool=tuple(numbers),
        reserved_bytes=reserved_bytes,
        settings=settings_of(after),
    )


def lingering_as(profiled: History, other: History) -> History:
    """Return a profiled step's history with its memory lingering as it did in another step.

    A profiler slows the host, which is then less far ahead of the GPU, so that less memory is freed
    before another stream is done with it. Where the steps did not do the same, up to a few events
    at their ends, the history stays.
    """
    profiled_events, other_events = _events(profiled), _events(other)
    shift = next((shift for shift in _SHIFTS if _alike(profiled_events, other_events, shift)), None)
    if shift is None:
        return profiled
    other_lingers = lingering(np.array(other.action), np.array(other.address)).tolist()
    places = (place + shift for place in range(len(profiled_events)))
    lingers = tuple(
        other_lingers[place] if 0 <= place < len(other_lingers) else 0 for place in places
    )
    return msgspec.structs.replace(profiled, lingers=lingers)


_SHIFTS = tuple(sorted(range(-16, 17), key=abs))


def _events(history: History) -> list[tuple[int, int, int]]:
    rows = zip(history.action, history.bytes, history.pool, strict=True)
    return [row for row in rows if row[0] != Action.USABLE]


def _alike(left: Sequence[Any], right: Sequence[Any], shift: int) -> bool:
    """Return whether the events are the same, with `shift` more at the begin of the others."""
    first, last = max(0, -shift), min(len(left), len(right) - shift)
    tolerance = len(_SHIFTS)
    overlaps = last - first >= max(len(left), len(right)) - tolerance and last > first
    return overlaps and left[first:last] == right[first + shift : last + shift]


def held_in(
    snapshot: Snapshot, device: int, storages: Mapping[str, Sequence[Storage]], pools: Pools
) -> tuple[Held, Held]:
    """Return the bytes and the pools of what is held, by class.

    A block that none of the storages lies in is of the class "workspace".

    Args:
        snapshot: the allocator's state.
        device: number of the GPU.
        storages: those of Python's tensors by class.
        pools: the pools met so far; those met here are added.
    """
    segments = _Segments(snapshot["segments"], device)
    pool_of_storage = {
        name: tuple(pools.number(segments.pool_at(one.address)) for one in found)
        for name, found in storages.items()
    }
    starts = sorted(one.address for found in storages.values() for one in found)
    workspace_blocks: list[tuple[int, int]] = []
    for segment in segments.rows:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                place = bisect_right(starts, block["address"] + block["size"] - 1)
                if not place or starts[place - 1] < block["address"]:
                    number = pools.number(_pool_of(segment))
                    workspace_blocks.append((block.get("requested_size", block["size"]), number))
    workspace_blocks.sort(reverse=True)
    sizes, numbers = sizes_of(storages), pool_of_storage
    if workspace_blocks:
        sizes |= {WORKSPACE: tuple(size for size, _ in workspace_blocks)}
        numbers |= {WORKSPACE: tuple(number for _, number in workspace_blocks)}
    return sizes, numbers if any(map(any, numbers.values())) else {}


def settings_of(snapshot: Snapshot) -> AllocatorSettings | None:
    """Return how the allocator was configured; None where as it comes."""
    reported = snapshot.get("allocator_settings", {})
    divisions = reported.get("roundup_power2_divisions", {})
    parts = tuple(int(divisions[key]) for key in sorted(divisions, key=int))
    split_limit = int(reported.get("max_split_size", -1))
    settings = AllocatorSettings(
        expandable_segments=bool(reported.get("expandable_segments", False)),
        # torch reports "no limit" as the largest value of the type.
        max_split_bytes=split_limit if 0 < split_limit < 1 << 62 else 0,
        roundup_divisions=parts if any(part > 1 for part in parts) else (),
    )
    return None if settings == AllocatorSettings() else settings


def _trace(snapshot: Snapshot, device: int) -> Sequence[Mapping[str, Any]]:
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else ()


def _pool_of(segment: Mapping[str, Any]) -> Key:
    return tuple(segment.get("segment_pool_id", _DEFAULT_POOL)), segment["stream"]


def _key(entry: Mapping[str, Any], segments: "_Segments") -> Key:
    """Return the pool of a traced event; older versions name only its stream."""
    pool_id = entry.get("pool_id")
    private = segments.pool_at(entry["addr"])[0] if pool_id is None else tuple(pool_id)
    return private, entry["stream"]


class _Segments:
    """Segments of a device, found by address."""

    def __init__(self, segments: Iterable[Mapping[str, Any]], device: int) -> None:
        on_device = [segment for segment in segments if segment.get("device", device) == device]
        self.rows = sorted(on_device, key=lambda one: one["address"])
        self._starts = [row["address"] for row in self.rows]

    def pool_at(self, address: int) -> Key:
        """Return the pool of the segment that holds an address, the default where none does."""
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self.rows[place]["total_size"]:
            return _DEFAULT_POOL, 0
        return _pool_of(self.rows[place])
