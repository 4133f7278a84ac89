"""The JSON fields that conversion reads, and the columns built from them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, Mask


# Typed structs that the garbage collector does not track (`gc=False`): 1.06 million events parse in
# 2.0 to 2.4 s, with `json` in 24 s.
class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments of a Kineto event that conversion reads; names as in the file."""

    external_id: int = msgspec.field(name="External id", default=0)
    first_external_id: int = msgspec.field(name="external id", default=0)  # of torch 1.8
    rf_id: int = msgspec.field(name="Record function id", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    event_index: int = msgspec.field(name="Ev Idx", default=0)
    correlation: int = 0
    stream: int | str = -1  # text with AMD
    device: int = -1
    grid: list[int] | str | None = None  # text on kernels that the driver launches
    block: list[int] | str | None = None
    bytes: int = 0
    graph_node: int = msgspec.field(name="graph node id", default=0)
    kernel: str = ""  # of a launch, with AMD
    wait_on_stream: int = -1
    wait_on_record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    wait_on_event: int = msgspec.field(name="wait_on_cuda_event_id", default=-1)
    memory_bytes: int = msgspec.field(name="Bytes", default=0)
    memory_address: int = msgspec.field(name="Addr", default=0)
    memory_allocated: int = msgspec.field(name="Total Allocated", default=0)
    memory_reserved: int = msgspec.field(name="Total Reserved", default=0)
    memory_device_type: int = msgspec.field(name="Device Type", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=0)
    dtype: str = ""
    group_name: str = msgspec.field(name="Process Group Name", default="")
    group_description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str = msgspec.field(name="Process Group Ranks", default="")
    group_size: int = msgspec.field(name="Group size", default=0)
    first_rank: int = msgspec.field(name="Global rank start", default=-1)
    rank_stride: int = msgspec.field(name="Global rank stride", default=0)
    source: int = msgspec.field(name="Src Rank", default=-1)
    destination: int = msgspec.field(name="Dst Rank", default=-1)
    # Operands stay JSON text. Calls of one shape have equal texts, which the string table stores
    # once.
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One Kineto event. `ts` and `dur` are microseconds with nanosecond decimals."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = float("nan")  # an event without a time is rejected
    dur: float = 0.0
    args: Args = _NO_ARGS


class DeviceProperties(msgspec.Struct, frozen=True):
    """A GPU as Kineto describes it."""

    name: str = ""
    memory_bytes: int = msgspec.field(name="totalGlobalMem", default=0)
    sm_count: int = msgspec.field(name="numSms", default=0)


class KinetoFile(msgspec.Struct):
    """A part of a Kineto file. `device_properties` is a number in a CPU trace."""

    events: list[Event] = msgspec.field(name="traceEvents")
    device_properties: list[DeviceProperties] | int | None = msgspec.field(
        name="deviceProperties", default=None
    )
    distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=msgspec.Raw())
    vllm_version: msgspec.Raw = msgspec.Raw()

    @property
    def vllm_version_text(self) -> str:
        """Version of the vLLM that recorded the trace; "" if none is recorded."""
        try:
            return msgspec.json.decode(self.vllm_version, type=str)
        except msgspec.DecodeError:
            return ""


_NO_STRIDES = msgspec.Raw()


class Values(msgspec.Struct, gc=False, frozen=True):
    """Inputs or outputs of an ET node, each column as the JSON text of the file."""

    values: msgspec.Raw
    shapes: msgspec.Raw
    types: msgspec.Raw
    strides: msgspec.Raw = _NO_STRIDES  # since schema 1.1.1-chakra.0.0.4


class Attribute(msgspec.Struct, gc=False, frozen=True):
    """An attribute of an ET node."""

    name: str
    value: msgspec.Raw


# torch writes `rf_id` first and `tid` fifth. A brace before an unescaped quote is outside of any
# string, so a match is an attribute and not text that looks like one.
_RF_ID_AND_TID = re.compile(
    rb"""
    \[ \s* \{ \s* "name" \s*:\s* "rf_id" \s*,\s*
        "type" \s*:\s* "uint64" \s*,\s* "value" \s*:\s* (\d{1,19}) \s* \}
    (?: [^}]* \} ){3} \s*,\s*
    \{ \s* "name" \s*:\s* "tid" \s*,\s*
        "type" \s*:\s* "uint64" \s*,\s* "value" \s*:\s* (\d{1,19}) \s* \}
    """,
    re.VERBOSE,
)

_ATTRIBUTES = msgspec.json.Decoder(list[Attribute], strict=False)


class NestedNode(msgspec.Struct, gc=False, frozen=True):
    """One node of an execution trace; `ctrl_deps` is its caller."""

    id: int
    name: str
    ctrl_deps: int
    inputs: Values
    outputs: Values
    # Undecoded: objects of all ten attributes take over half of the time of decoding a node.
    attrs: msgspec.Raw

    @property
    def caller(self) -> int:
        """Id of the calling node; the root calls itself."""
        return self.ctrl_deps

    @property
    def rf_id_and_tid(self) -> tuple[int, int]:
        """Record function id, and thread as RecordFunction numbers them; 0 if missing.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: the attributes are malformed.
        """
        match = _RF_ID_AND_TID.match(self.attrs)
        if match:
            return int(match[1]), int(match[2])
        values = {"rf_id": 0, "tid": 0}
        # Reversed, so that the first of a name counts.
        for attribute in reversed(_ATTRIBUTES.decode(self.attrs)):
            text = bytes(attribute.value)
            # 2^64 has 20 digits.
            values[attribute.name] = int(text) if text.isdigit() and len(text) < 20 else 0
        return values["rf_id"], values["tid"]


class NestedFile(msgspec.Struct):
    """A part of an execution trace."""

    nodes: list[NestedNode]

    def operands(self, kept: Iterable[bool]) -> tuple[list[msgspec.Raw], ...]:
        """Return columns of the kept nodes, as `ExecutionTrace.operands` orders them."""
        nodes = [*compress(self.nodes, kept)]
        ins, outs = [node.inputs for node in nodes], [node.outputs for node in nodes]
        return (
            [side.values for side in ins],
            [side.shapes for side in ins],
            [side.types for side in ins],
            [side.values for side in outs],
            [side.shapes for side in outs],
            [side.types for side in outs],
            [side.strides for side in ins],
        )


class FlatNode(msgspec.Struct, gc=False, frozen=True):
    """A node of the first schemas, which keep operands and attributes side by side."""

    id: int
    name: str
    parent: int
    inputs: msgspec.Raw
    input_shapes: msgspec.Raw
    input_types: msgspec.Raw
    outputs: msgspec.Raw
    output_shapes: msgspec.Raw
    output_types: msgspec.Raw
    rf_id: int = 0
    tid: int = 0

    @property
    def caller(self) -> int:
        """Id of the calling node; the root calls itself."""
        return self.parent

    @property
    def rf_id_and_tid(self) -> tuple[int, int]:
        """Record function id, and thread as RecordFunction numbers them."""
        return self.rf_id, self.tid


class FlatFile(msgspec.Struct):
    """A part of an execution trace of the first schemas."""

    nodes: list[FlatNode]

    def operands(self, kept: Iterable[bool]) -> tuple[list[msgspec.Raw], ...]:
        """Return columns of the kept nodes, as `ExecutionTrace.operands` orders them."""
        nodes = [*compress(self.nodes, kept)]
        return (
            [node.inputs for node in nodes],
            [node.input_shapes for node in nodes],
            [node.input_types for node in nodes],
            [node.outputs for node in nodes],
            [node.output_shapes for node in nodes],
            [node.output_types for node in nodes],
            [_NO_STRIDES] * len(nodes),
        )


class SchemaFile(msgspec.Struct):
    """The fields that identify the schema of an execution trace."""

    nodes: list[msgspec.Raw] = []
    schema: str = ""


class Group(msgspec.Struct, frozen=True):
    """A process group in `distributedInfo`; `ranks` is empty if the list is cut off."""

    name: str = msgspec.field(name="pg_name", default="")
    description: str = msgspec.field(name="pg_desc", default="")
    ranks: tuple[int, ...] = ()


class Distributed(msgspec.Struct, frozen=True):
    """`distributedInfo` of a Kineto trace."""

    rank: int = 0
    size: int = msgspec.field(name="world_size", default=1)
    groups: tuple[Group, ...] = msgspec.field(name="pg_config", default=())


GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")

NO_CALL = -1

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
    `stream` is UNKNOWN except in captures without a device.
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
        device: the first GPU; None if the file describes none.
        distributed: the run and rank of the trace; None if not recorded.
        lost_run: whether it records a run, but a rank outside the run's world.
        unread: unknown categories -> number of events.
        frames: the Python frames that were requested, as host events.
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


# A damaged file may name any number of ranks, and conversion lists the ranks of a group. A larger
# world would take all memory.
MOST_RANKS = 1 << 24


def read_distributed(text: msgspec.Raw) -> Distributed | None:
    """Return the run that a trace records, None if its rank is outside the world."""
    try:
        distributed = msgspec.json.decode(text, type=Distributed, strict=False)
    except msgspec.DecodeError:
        return None
    is_valid = 0 <= distributed.rank < distributed.size <= MOST_RANKS
    return distributed if is_valid else None
