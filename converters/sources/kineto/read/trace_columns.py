"""Kineto traces and execution traces as columns, an array per field.

`KinetoTrace` and `ExecutionTrace` are the two files of a window. Readers (`kineto_trace`,
`execution_trace`) build them; linking and lowering read them. Times are nanoseconds since the
trace's base time, names are codes of the string table, and a negative index means none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from onerank.converters.sources.kineto.read.schema import Args, DeviceProperties, Distributed
from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, Mask

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's names of GPU operations."""

NO_CALL = -1
"""Index into `KinetoTrace.calls` of an event without a collective's arguments."""

OWN_CALL = -1
"""Event index of a runtime call that became a host event."""


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
        wanted: int64[m]; 0 means no key.
        usable: which of `keys` count; None for all.
    """
    places = np.arange(len(keys)) if usable is None else np.flatnonzero(usable)
    if not len(places):
        return np.full(len(wanted), -1)
    # Stable, so that the last of equal keys is the last in the file.
    order = places[np.argsort(keys[places], kind="stable")]
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    last = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[last] == wanted) & (wanted != 0), last, -1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Events of one kind, in the file's order: a column per field, of equal length n."""

    def take(self, index: npt.NDArray[Any] | slice) -> Self:
        """Return the rows at `index` (integers, a mask or a slice), in that order."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


R = TypeVar("R", bound=Rows)


def concatenated(parts: Sequence[R]) -> R:
    """Return the rows of all parts, at least one."""
    if len(parts) == 1:
        return parts[0]
    columns = {
        f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(parts[0])
    }
    return replace(parts[0], **columns)


@dataclass(frozen=True, slots=True)
class HostRows(Rows):
    """Operators and annotations. Times are nanoseconds since the trace's base time.

    `thread` indexes the trace's `threads`; `call` its `calls`, NO_CALL for most. `operands` are
    codes of the JSON text of values, shapes and types of the inputs, as in the file, int32[n, 3].
    `stream` is UNKNOWN and `python_calls` empty except in captures without a device.
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
    stream: I64
    python_calls: I32

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class LaunchRows(Rows):
    """Calls of the CUDA or HIP runtime or driver; `kernel` is "" unless the call names it."""

    name: I32
    kernel: I32
    thread: I64
    start_ns: I64
    end_ns: I64
    correlation: I64
    external_id: I64

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class GpuRows(Rows):
    """Kernels, memcpys and memsets; `category` indexes GPU_CATEGORIES.

    `graph_node` is the node of a CUDA graph, 0 outside of graphs and if not recorded.
    """

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
    graph_node: I64

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class SyncRows(Rows):
    """Synchronisations as CUPTI records them (`cuda_sync`)."""

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
    stream: I64

    def __len__(self) -> int:
        return len(self.thread)


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    """A Kineto trace.

    Attributes:
        path: the file.
        strings: table of names, grids and blocks.
        threads: ids of the operating system's threads; rows hold indices into it.
        calls: arguments of events that carry a collective's; rows hold indices into it.
        host: operators and annotations.
        launches: calls of the GPU's runtime and driver.
        gpu: GPU operations.
        syncs: synchronisations.
        memory: allocations and frees.
        frames: the Python frames that were requested, as host events.
        device: the first GPU; None if the file describes none.
        distributed: the run and rank of the trace; None if not recorded.
        lost_run: whether it records a run, but a rank outside the run's world.
        unread: unknown categories -> number of events.
        vllm_version: version of the vLLM that recorded the trace; "" if none is recorded.
        has_unread_frames: whether the file has Python frames, none of which were requested.
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
    frames: HostRows
    device: DeviceProperties | None
    distributed: Distributed | None = None
    lost_run: bool = False
    unread: dict[str, int] = field(default_factory=dict[str, int])
    vllm_version: str = ""
    has_unread_frames: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionTrace:
    """The operator nodes of an execution trace, in the file's order.

    Attributes:
        path: the file.
        id: int64[n].
        name: codes, int32[n].
        rf_id: record function ids, int64[n].
        tid: threads as RecordFunction numbers them, int64[n].
        operands: codes of the JSON text of values, shapes and types of the inputs, of the same of
            the outputs, and of the inputs' strides, "" if all inputs are contiguous, int32[7, n].
        without_caller: nodes of the file, operators or not, whose caller is missing.
        whole: whether operands of all nodes were read, not only of the wanted ones.
    """

    path: Path
    id: I64
    name: I32
    rf_id: I64
    tid: I64
    operands: I32
    without_caller: int = 0
    whole: bool = True
