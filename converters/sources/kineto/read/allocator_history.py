"""Read the caching allocator's history of a step.

The profiler records when which address was allocated and freed. The history adds the pool's stream,
the requested sizes, and when memory that other streams used became reusable.
"""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np

from onerank.converters.sources.kineto.read.schema import MemoryRows
from onerank.ir import AllocatorSettings
from onerank.ir.arrays import I64
from onerank.ir.errors import TraceError

_EVENT_BYTES = np.dtype(np.int64).itemsize


class Action(IntEnum):
    """What the allocator did with a block."""

    ALLOCATED = 0
    FREED = 1
    USABLE = 2


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """The actions of the allocator in a step, one entry each, in order.

    Attributes:
        action: an `Action`; USABLE follows FREED directly unless another stream used the block.
        address: of the block.
        bytes: requested size.
        pool: number of the block's pool, 0 for the default stream's.
        lingers: of each allocation and free, how long its memory lingers in a step without a
            profiler (`HistoryColumns.lingers`); empty if not
            known: then as in this step.
        reserved_bytes: most that the allocator had reserved when only steps without a profiler had
            run; 0 if not known. A profiler slows the host or waits, so other memory lingers.
        settings: configuration of the allocator; None for the default.
    """

    action: tuple[int, ...] = ()
    address: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    pool: tuple[int, ...] = ()
    lingers: tuple[int, ...] = ()
    reserved_bytes: int = 0
    settings: AllocatorSettings | None = None


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """What the history adds to each allocation and free, n of them.

    Attributes:
        pool: as in `History`.
        requested: requested bytes.
        lingers: of a free, how many allocations and frees follow before its memory can be reused.
        settings: as in `History`.
    """

    pool: I64
    requested: I64
    lingers: I64
    settings: AllocatorSettings | None


def read_history(path: Path) -> History | None:
    """Read the history of a step; None if there is no file.

    Raises:
        TraceError: the file is not a history.
    """
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=History)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(
            f"{path}: expected the allocator's history as `capture run --raw-dir` leaves it: "
            f"{reason}",
            code="history-malformed",
        ) from error


def join_history(history: History, rows: MemoryRows) -> HistoryColumns | None:
    """Join the history with the profiler's allocations and frees of the same device, in order.

    The profiler may have started earlier and ended later. None if no part of its events matches the
    history.
    """
    action = np.array(history.action, dtype=np.int64)
    address = np.array(history.address, dtype=np.int64)
    events = np.flatnonzero(action != Action.USABLE)
    begin = _begin(rows, address[events], action[events] == Action.ALLOCATED)
    if begin is None:
        return None
    count, size = len(events), len(rows)
    pool, requested = np.zeros(size, dtype=np.int64), np.abs(rows.bytes)
    within = slice(begin, begin + count)
    pool[within] = np.array(history.pool, dtype=np.int64)[events]
    requested[within] = np.array(history.bytes, dtype=np.int64)[events]
    lingers = np.zeros(size, dtype=np.int64)
    known = np.array(history.lingers, dtype=np.int64)
    lingers[within] = known if len(known) else lingering(action, address)
    return HistoryColumns(pool, requested, lingers, history.settings)


def _begin(rows: MemoryRows, address: I64, allocates: I64) -> int | None:
    """Return from which row on the profiler saw just these events."""
    # One integer per event: the address, and whether the event allocates.
    profiled = (rows.address * 2 + (rows.bytes > 0)).astype(np.int64).tobytes()
    recorded = (address * 2 + allocates).astype(np.int64).tobytes()
    # `bytes.find` takes linear time; comparing at every row takes rows x events.
    begin = profiled.find(recorded)
    while begin > 0 and begin % _EVENT_BYTES:  # a match that begins within an integer is none
        begin = profiled.find(recorded, begin + 1)
    return begin // _EVENT_BYTES if begin >= 0 else None


def lingering(action: I64, address: I64) -> I64:
    """Return `HistoryColumns.lingers` of each allocation and free, from columns of a `History`."""
    is_event = action != Action.USABLE
    before = np.cumsum(is_event) - is_event  # events before each action
    count = int(is_event.sum())
    lingers = np.zeros(count, dtype=np.int64)
    # Sorted by address, an allocation, its free and the end of its use are neighbours.
    order = np.lexsort((np.arange(len(action)), address))
    freed = np.flatnonzero(action[order] == Action.FREED)
    following = np.append(order[1:], -1)[freed]
    same = np.append(address[order][1:] == address[order][:-1], False)[freed]
    usable = same & (action[following] == Action.USABLE)
    until = np.where(usable, before[following], count)
    place = before[order[freed]]
    lingers[place] = until - place - 1
    return lingers


__all__ = ["Action", "History", "HistoryColumns", "join_history", "lingering", "read_history"]
