"""Kineto and execution traces as columns: one numpy array per field and event type."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.read.process_groups import Distributed
from onerank.converters.sources.kineto.read.schema import Args, DeviceProperties
from onerank.ir import StringTable

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NO_CALL = -1
OWN_CALL = -1
"""Event index of a runtime call that stands among the host's events."""


def pick(values: npt.NDArray[Any], index: I64, default: int) -> npt.NDArray[Any]:
    """Return `values` at `index`, `default` where the index is negative."""
    picked = np.full(len(index), default, dtype=values.dtype)
    known = index >= 0
    picked[known] = values[index[known]]
    return picked


def last_of(keys: I64, wanted: I64, usable: Mask | None = None) -> I64:
    """Return for each wanted key the last place where `keys` has it, or -1.

    Args:
        keys: int64[n].
        wanted: int64[m]; a 0 is no key.
        usable: which of `keys` count; None for all.
    """
    places = np.arange(len(keys)) if usable is None else np.flatnonzero(usable)
    if not len(places):
        return np.full(len(wanted), -1)
    order = places[np.argsort(keys[places], kind="stable")]
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[found] == wanted) & (wanted != 0), found, -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Events of one sort, in the file's order: a column per field, of equal length n."""

    def take(self, index: npt.NDArray[Any] | slice) -> Self:
        """Return the rows at `index` (integers, a mask or a slice), in that order."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True, slots=True)
class HostRows(Rows):
    """Operators and annotations. Times are nanoseconds since the trace's base time.

    `thread` indexes the trace's `threads`; `call` its `calls`, NO_CALL for most. `operands` are
    codes of the JSON text of values, shapes and types of the inputs, as in the file, int32[n, 3].
    """

    name: I32
    is_operator: Mask
    thread: I64
    start_ns: I64
    end_ns: I64
    rf_id: I64
    external_id: I64
    sequence: I64
    forward_thread: I64
    event_index: I64
    call: I64
    operands: I32

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class LaunchRows(Rows):
    """Calls of the CUDA or HIP runtime or driver."""

    name: I32
    thread: I64
    start_ns: I64
    end_ns: I64
    correlation: I64
    external_id: I64

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class GpuRows(Rows):
    """Kernels, memcpys and memsets; `category` indexes GPU_CATEGORIES."""

    name: I32
    category: I64
    start_ns: I64
    duration_ns: I64
    correlation: I64
    external_id: I64
    stream: I64
    device: I64
    grid: I32
    block: I32
    bytes: I64
    call: I64

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class SyncRows(Rows):
    """Synchronisations as CUPTI tells them (`cuda_sync`)."""

    name: I32
    start_ns: I64
    correlation: I64
    stream: I64
    wait_on_stream: I64
    wait_on_record: I64
    wait_on_event: I64

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class MemoryRows(Rows):
    """Allocations (bytes above 0) and frees."""

    thread: I64
    start_ns: I64
    event_index: I64
    bytes: I64
    address: I64
    allocated: I64
    reserved: I64
    device_type: I64

    def __len__(self) -> int:
        return len(self.thread)


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """A Kineto trace.

    Attributes:
        path: the file.
        strings: table that names, grids and blocks point into.
        threads: ids of the operating system's threads; rows hold their places.
        calls: arguments of events that carry a collective's; rows hold their places.
        device: the first GPU; None where the file describes none.
        distributed: the run that the trace is of one rank of; None where it does not tell.
        lost_run: whether it tells of one, but of no rank within its world.
        unread: categories that are not known -> how many events have them.
    """

    path: Path
    strings: StringTable
    threads: list[int | str]
    calls: list[Args]
    host: HostRows
    launches: LaunchRows
    gpu: GpuRows
    syncs: SyncRows
    memory: MemoryRows
    device: DeviceProperties | None
    distributed: Distributed | None = None
    lost_run: bool = False
    unread: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """The nodes of an execution trace that stand for operators, in the file's order.

    Attributes:
        path: the file.
        id: int64[n].
        name: codes, int32[n].
        rf_id: record function ids, int64[n].
        tid: threads as RecordFunction numbers them, int64[n].
        operands: codes of the JSON text of values, shapes and types of the inputs, then of the
            outputs, int32[6, n].
        without_caller: nodes of the file, operators or not, whose caller is not in it.
        whole: whether the operands of all nodes are there, not of the wanted ones alone.
    """

    path: Path
    id: I64
    name: I32
    rf_id: I64
    tid: I64
    operands: I32
    without_caller: int = 0
    whole: bool = True
