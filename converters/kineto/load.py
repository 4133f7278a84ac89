"""Read a Kineto trace and a PyTorch execution trace (ET) into typed records.

Only what conversion needs is decoded; every other field of the files is skipped by the parser.
"""

import gzip
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from onerank.ir.errors import TraceError

GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"})
FLAT_ET_SCHEMAS = ("1.0.1", "1.0.2")
NESTED_ET_SCHEMAS = ("1.0.3-", "1.1.0-", "1.1.1-")

_T = TypeVar("_T")


class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments of a Kineto event that conversion reads; names as in the file."""

    external_id: int = msgspec.field(name="External id", default=0)
    rf_id: int = msgspec.field(name="Record function id", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    event_index: int = msgspec.field(name="Ev Idx", default=0)
    correlation: int = 0
    stream: int = -1
    device: int = -1
    grid: list[int] | None = None
    block: list[int] | None = None
    bytes: int = 0
    wait_on_stream: int = -1
    wait_on_record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    wait_on_event: int = msgspec.field(name="wait_on_cuda_event_id", default=-1)
    memory_bytes: int = msgspec.field(name="Bytes", default=0)
    memory_address: int = msgspec.field(name="Addr", default=0)
    memory_allocated: int = msgspec.field(name="Total Allocated", default=0)
    memory_device_type: int = msgspec.field(name="Device Type", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=0)
    dtype: str = ""
    group_name: str = msgspec.field(name="Process Group Name", default="")
    group_description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str = msgspec.field(name="Process Group Ranks", default="")


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One Kineto event. `ts` and `dur` are microseconds with nanosecond decimals."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Args = _NO_ARGS

    @property
    def start_ns(self) -> int:
        """Start, nanoseconds since the trace's base time."""
        return round(self.ts * 1000)

    @property
    def duration_ns(self) -> int:
        """Duration in nanoseconds."""
        return round(self.dur * 1000)

    @property
    def end_ns(self) -> int:
        """End, nanoseconds since the trace's base time."""
        return self.start_ns + self.duration_ns


class DeviceProperties(msgspec.Struct, frozen=True):
    """A GPU as Kineto describes it."""

    name: str = ""
    memory_bytes: int = msgspec.field(name="totalGlobalMem", default=0)
    sm_count: int = msgspec.field(name="numSms", default=0)


class KinetoTrace(msgspec.Struct):
    """A Kineto file. `device_properties` is a number in a CPU trace."""

    events: list[Event] = msgspec.field(name="traceEvents")
    device_properties: list[DeviceProperties] | int | None = msgspec.field(
        name="deviceProperties", default=None
    )


class Values(msgspec.Struct, gc=False, frozen=True):
    """Inputs or outputs of an ET node, each column as the JSON text of the file."""

    values: msgspec.Raw
    shapes: msgspec.Raw
    types: msgspec.Raw


class Attribute(msgspec.Struct, gc=False, frozen=True):
    """An attribute of an ET node."""

    name: str
    value: int | float | str | bool | None


class EtNode(msgspec.Struct, frozen=True):
    """One node of an execution trace; `ctrl_deps` is its calling parent."""

    id: int
    name: str
    ctrl_deps: int
    inputs: Values
    outputs: Values
    attrs: list[Attribute]

    def attribute(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        value = next((attr.value for attr in self.attrs if attr.name == name), default)
        return value if isinstance(value, int) else default


class _FlatNode(msgspec.Struct, frozen=True):
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
    seq_id: int = -1
    tid: int = 0

    def nested(self) -> EtNode:
        """Return the node as later schemas have it."""
        return EtNode(
            id=self.id,
            name=self.name,
            ctrl_deps=self.parent,
            inputs=Values(self.inputs, self.input_shapes, self.input_types),
            outputs=Values(self.outputs, self.output_shapes, self.output_types),
            attrs=[
                Attribute("rf_id", self.rf_id),
                Attribute("seq_id", self.seq_id),
                Attribute("tid", self.tid),
            ],
        )


class _FlatTrace(msgspec.Struct):
    schema: str
    nodes: list[_FlatNode]


class _EtSchema(msgspec.Struct):
    schema: str = ""


class ExecutionTrace(msgspec.Struct):
    """An execution trace file."""

    schema: str
    nodes: list[EtNode]


def load_kineto(path: Path) -> KinetoTrace:
    """Read a Kineto trace, gzip or not.

    Raises:
        TraceError: not a Kineto trace; the message names the place.
    """
    trace = _decode(path, KinetoTrace, "a Kineto trace (an object with `traceEvents`)")
    for number, event in enumerate(trace.events):
        if event.dur < 0:
            raise TraceError(
                f"{path}: event {number} ({event.name!r}) lasts {event.dur} us; "
                "a duration cannot be negative: record the trace again"
            )
    return trace


def load_execution_trace(path: Path) -> ExecutionTrace:
    """Read an execution trace, gzip or not.

    Raises:
        TraceError: not an execution trace, or of a schema that is not known.
    """
    content = _content(path)
    expected = "a PyTorch execution trace (an object with `schema` and `nodes`)"
    schema = _parse(path, content, _EtSchema, expected).schema
    if schema.startswith(FLAT_ET_SCHEMAS):
        flat = _parse(path, content, _FlatTrace, expected)
        return ExecutionTrace(schema, [node.nested() for node in flat.nodes])
    if not schema.startswith(NESTED_ET_SCHEMAS):
        known = ", ".join(f"{prefix}*" for prefix in FLAT_ET_SCHEMAS + NESTED_ET_SCHEMAS)
        found = f"schema {schema!r}" if schema else "no schema"
        raise TraceError(f"{path}: found {found}, expected an execution trace of schema {known}")
    return _parse(path, content, ExecutionTrace, expected)


def _decode(path: Path, kind: type[_T], expected: str) -> _T:
    return _parse(path, _content(path), kind, expected)


def _parse(path: Path, content: bytes, kind: type[_T], expected: str) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: expected {expected}, found: {error}") from error


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except FileNotFoundError as error:
        raise TraceError(f"{path}: no such file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip stream is cut or damaged ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
