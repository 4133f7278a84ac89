"""The JSON fields that conversion reads from Kineto traces and execution traces.

`KinetoFile` is a Kineto trace. An execution trace is a `NestedFile`, or in the first schemas a
`FlatFile`; `SchemaFile` identifies the schema. Readers build columns from them (`trace_columns`).
"""

import re
from collections.abc import Iterable
from itertools import compress

import msgspec


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
    # Of a capture without a device: counts by kind, as JSON.
    python_calls: str = msgspec.field(name="Python calls", default="")
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
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    in_splits: str = msgspec.field(name="In split size", default="")
    out_splits: str = msgspec.field(name="Out split size", default="")
    group_rank: int = msgspec.field(name="Rank", default=-1)
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
